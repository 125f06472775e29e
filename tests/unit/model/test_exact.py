"""The exact form of a Transformer: the plain one's values and gradients; decoding has the bits of a packed row with gradients."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.byte_model import byte_tokenizer
from support.policy_steps import floats

from headway.data.batch import Batch
from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.memory import build_cache
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.load import LoadedModel
from headway.infer.sampling import Sampling
from headway.kernels.policy_scores import DrawnFrom
from headway.model import exact
from headway.model.base import build_frozen_model
from headway.model.config import ModelConfig
from headway.model.exact import check_machine
from headway.model.exact_config import why_not_exact
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.transformer import Transformer
from headway.optim.adamw import Config as AdamW
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.rollout.rows import StepRows, TrainedAnswer, answer_step
from headway.tasks.next_token import Config as NextToken

SMALL = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=320,
    max_seq_len=256,
    init_std=0.3,
)
VARIANTS = {
    "llama": SMALL,
    "norms and biases": SMALL.with_(
        norm="layernorm",
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        tie_embeddings=False,
        ffn_gate=False,
        activation="gelu_tanh",
    ),
    "learned positions": SMALL.with_(positions="learned", activation="gelu"),
    "parallel": SMALL.with_(parallel_block=True, qk_norm=True),
    "one head for all": SMALL.with_(num_kv_heads=1, norm_placement="both", hidden_size=40),
}
DRAWN = DrawnFrom(0.8, byte_tokenizer().vocab_size)


def weights(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    return ((spec.name, initial_value(spec, config, 5)) for spec in param_specs(config))


def trainer(config: ModelConfig, dtype: torch.dtype, *, is_exact: bool) -> Transformer:
    """The model inside an engine that trains."""
    spec = EngineSpec(config, NextToken(), AdamW(), dtype=dtype, chunk_tokens=40, exact=is_exact)
    engine = assemble(spec)
    engine.fill(weights(config))
    assert isinstance(engine.model, Transformer)
    return engine.model


def packed(answers: list[TrainedAnswer], shape: StepRows) -> Iterator[tuple[Batch, list[tuple[int, int, int]]]]:  # fmt: skip
    step = answer_step(answers, shape, 0)
    yield from zip(step.batch.microbatches, step.places, strict=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_values_and_gradients_are_those_of_the_plain_form(name: str) -> None:
    config = VARIANTS[name]
    answers = [TrainedAnswer((1, 2, 3), tuple(range(4, 90)), floats([0.0] * 86), 0.0)] * 3
    ((batch, _),) = packed(answers, StepRows(192, 4, 2))
    results: list[dict[str, torch.Tensor]] = []
    for is_exact in (False, True):
        model = trainer(config, torch.float32, is_exact=is_exact)
        scores = model.forward_batch(batch).head.policy(batch.targets, DRAWN)
        loss = (scores.log_prob * batch.loss_weight).sum() + scores.entropy.mean()
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        results.append(
            {"log_prob": scores.log_prob.detach()} | dict(zip(parameters, gradients, strict=True))
        )
    plain, got = results
    for key, value in plain.items():
        torch.testing.assert_close(got[key], value, rtol=2e-3, atol=2e-3 * float(value.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in list(VARIANTS)[1:])]
)
def test_the_bits_of_decoding_are_those_of_a_packed_row_with_gradients(
    name: str, dtype: torch.dtype
) -> None:
    """Prompts that share their beginning, batches that change, prompts read in pieces, requests that
    are preempted and computed again."""
    config = VARIANTS[name]
    model = build_frozen_model(config, weights(config), torch.device("cpu"), dtype)
    loaded = LoadedModel(model, config, byte_tokenizer(), Path(), frozenset({257}))
    page = build_cache(loaded, EngineOptions(), 256).shape.page_bytes
    options = EngineOptions(8 * page, max_running=5, prefill_tokens=50, exact=True)
    engine = InferenceEngine(loaded, options)
    shared = tuple(range(70))
    prompts = [(9, 8, 7), shared, (3,), shared, (6, 7) * 9, (*shared, 4), (5,)]
    sampling = Sampling(0.8, seed=3, by_id=True)
    requests = [
        EngineRequest(
            prompt,
            min(150, 190 - len(prompt)),
            sampling,
            f"{index}",
            ignore_eos=True,
            logprobs=0,
            drawn_logprobs=True,
        )
        for index, prompt in enumerate(prompts)
    ]
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    running = {engine.submit(requests[index]): index for index in order}
    ids: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    while engine.busy:
        for event in engine.step():
            ids[running[event.request]] += event.tokens
            logprobs[running[event.request]] += [e.logprob for e in event.logprobs or ()]
    assert engine.stats().preempted > 0
    assert engine.stats().cached_tokens > 0

    answers = [
        TrainedAnswer(prompt, tuple(some), floats(recorded), 0.0)
        for prompt, some, recorded in zip(prompts, ids, logprobs, strict=True)
    ]
    trained = trainer(config, dtype, is_exact=True).train()
    checked = 0
    for shape in (StepRows(256, 4, 1), StepRows(200, 9, 3)):
        for batch, places in packed(answers, shape):
            scores = trained.forward_batch(batch).head.policy(batch.targets, DRAWN)
            assert scores.log_prob.requires_grad
            for answer, row, first in places:
                recorded = answers[answer].logprobs
                got = scores.log_prob[row, first : first + len(recorded)]
                assert floats(got.detach()).tobytes() == recorded.tobytes()
                checked += len(recorded)
    assert checked == 2 * sum(map(len, ids)) > 200


UNFIT = {
    "experts": {"experts": {"num": 4}},
    "linear_attention": {"linear_attention": {}},
    "latent_attention": {"latent_attention": {}, "num_kv_heads": 4},
    "logit_softcap": {"logit_softcap": 30.0},
    "attention_softcap": {"attention_softcap": 30.0},
    "attention_sinks": {"attention_sinks": True},
    "dropout": {"dropout": 0.1},
    "a sliding_window shorter than 100 tokens": {"sliding_window": 99},
}


@pytest.mark.parametrize("reason", UNFIT)
def test_what_has_no_exact_form_is_named(reason: str) -> None:
    config = ModelConfig.model_validate(SMALL.model_dump(exclude_unset=True) | UNFIT[reason])
    assert why_not_exact(config, 100) == reason


def test_a_window_that_no_row_exceeds_is_none() -> None:
    assert why_not_exact(SMALL.with_(sliding_window=100), 100) == ""


def test_a_machine_whose_products_depend_on_the_place_of_a_token_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_frozen_model(SMALL, weights(SMALL), torch.device("cpu"), torch.float32)
    assert isinstance(model, Transformer)
    model.use_exact()
    check_machine(model)
    monkeypatch.setattr(
        exact, "row_logits", lambda x, w: (x @ w.t()) * torch.linspace(1, 1.001, len(x))[:, None]
    )
    with pytest.raises(ConfigError, match="on this machine logits give a token other bits"):
        check_machine(model)
