"""The inference engine: a request becomes the same alone and among others, and memory is returned."""

import pytest
from support.byte_model import CONFIG, write_model

from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest, QueueFull, RequestTooLarge
from headway.infer.generate import GenerateOptions, generate
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling

PROMPTS = ["the cat", "a", "sat on the mat and then it", "the dog"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_model(tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=160)))


def run(engine: InferenceEngine, requests: list[EngineRequest]) -> list[list[int]]:
    numbers = [engine.submit(one) for one in requests]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            found[event.request] += event.tokens
    return [found[number] for number in numbers]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.9, seed=3)])
def test_tokens_are_those_of_generate(loaded: LoadedModel, sampling: Sampling) -> None:
    assert loaded.tokenizer is not None
    expected = generate(loaded, PROMPTS, GenerateOptions(20, sampling=sampling))
    engine = InferenceEngine(loaded, EngineOptions(max_running=3))
    requests = [EngineRequest(tuple(loaded.tokenizer.encode(prompt)), 20, sampling, key=f"0:{prompt}") for prompt in PROMPTS]
    assert run(engine, requests) == [one.token_ids for one in expected]


def test_what_cannot_fit_and_what_must_wait_is_refused(loaded: LoadedModel) -> None:
    engine = InferenceEngine(loaded, EngineOptions(max_running=1, max_waiting=1))
    with pytest.raises(RequestTooLarge, match="160"):
        engine.submit(EngineRequest((1,) * 160, 4))
    first = engine.submit(EngineRequest((1, 2), 4, ignore_eos=True))
    with pytest.raises(QueueFull):
        engine.submit(EngineRequest((1, 2), 4))
    engine.cancel(first)
    assert [event.finished for event in engine.step()] == ["cancelled"] and not engine.busy
