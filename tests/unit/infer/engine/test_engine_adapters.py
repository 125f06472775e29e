"""Adapters chosen per request: each text is that of the model with this adapter merged, in one batch with others."""

from pathlib import Path

import pytest
from support.byte_model import CONFIG, write_model
from support.peft_folder import write_adapter

from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest, Speculation
from headway.infer.load import load_model


def run(engine: InferenceEngine, requests: list[EngineRequest]) -> list[list[int]]:
    numbers = [engine.submit(request) for request in requests]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            tokens[event.request] += event.tokens
    return [tokens[number] for number in numbers]


def test_every_request_has_the_text_of_its_merged_model(tmp_path: Path) -> None:
    base = write_model(tmp_path, CONFIG.with_(max_seq_len=96))
    folders = {
        "one": write_adapter(tmp_path / "one", base, 1, 4, ("self_attn.q_proj", "mlp.down_proj")),
        "two": write_adapter(
            tmp_path / "two", base, 2, 2, ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
        ),
    }
    prompts = [tuple(range(begin, begin + 30)) for begin in (0, 0, 0, 40, 41)]
    names = [None, "one", "two", "two", "one"]
    expected: list[list[int]] = []
    for prompt, name in zip(prompts, names, strict=True):
        merged = load_model(base if name is None else folders[name])
        expected += run(
            InferenceEngine(merged, EngineOptions(max_running=1)),
            [EngineRequest(prompt, 20, ignore_eos=True)],
        )
    assert len({tuple(tokens) for tokens in expected[:3]}) == 3, "the adapters change the text"
    loaded = load_model(base)
    engine = InferenceEngine(
        loaded, EngineOptions(max_running=4, page_tokens=8, prefill_tokens=40), folders
    )
    requests = [
        EngineRequest(prompt, 20, ignore_eos=True, adapter=name)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    assert run(engine, requests) == expected
    assert run(engine, requests[::-1]) == expected[::-1], (
        "with kept pages, which adapters do not share"
    )
    guess = EngineOptions(max_running=4, page_tokens=8, speculation=Speculation(str(base), 3))
    guessing = InferenceEngine(load_model(base), guess, folders)
    assert run(guessing, requests) == expected, "with guesses of the model without adapters"
    assert guessing.stats().proposed_tokens > 0
    assert engine.stats().cached_tokens > 0
    with pytest.raises(ConfigError, match="loaded are: one, two"):
        engine.submit(EngineRequest((1,), 4, adapter="three"))
    assert run(InferenceEngine(loaded, EngineOptions()), requests[:1]) == expected[:1], (
        "others see the base"
    )


def test_an_adapter_that_cannot_be_chosen_is_refused(tmp_path: Path) -> None:
    base = write_model(tmp_path)
    dora = write_adapter(tmp_path / "dora", base, 1, 4, ("self_attn.q_proj",), use_dora=True)
    for folder, message in ((dora, "'x'.*DoRA"), (tmp_path, "no adapter_config.json")):
        with pytest.raises(ConfigError, match=message):
            InferenceEngine(load_model(base), EngineOptions(), {"x": folder})
