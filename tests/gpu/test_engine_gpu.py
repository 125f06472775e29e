"""On a CUDA device: the fused loss, and a whole step, against their plain forms."""

import pytest
import torch
from support.batches import make_batch, make_step
from support.vocab_ranks import EmulatedVocab

from headway.kernels.cross_entropy import Shaping, linear_nll, softmax_gradient, softmax_gradient_reference
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.objective.base import StepInfo
from headway.objective.next_token import Config as NextToken
from headway.optim.adamw import Config as AdamW
from headway.optim.groups import hypers
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.parallel.flat.engine import FlatEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = ModelConfig(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=256, vocab_size=1000, max_seq_len=128)


@pytest.mark.parametrize("vocab", [1000, 32000, 128256])
@pytest.mark.parametrize("shaping", [Shaping(), Shaping(0.1, 1e-4)])
def test_the_fused_softmax_gradient_equals_the_reference(vocab: int, shaping: Shaping) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(33, vocab, device="cuda", generator=generator) * 3
    targets = torch.randint(0, vocab, (33,), device="cuda", generator=generator)
    coefficients = torch.rand(33, device="cuda", generator=generator)
    coefficients[3] = 0
    fused, plain = logits.clone(), logits.clone()
    got = softmax_gradient(fused, targets, coefficients, shaping)
    expected = softmax_gradient_reference(plain, targets, coefficients, shaping)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("shaping", [Shaping(), Shaping(0.1, 1e-4)])
def test_ranks_with_rows_of_the_head_have_the_loss_of_the_whole_head(ranks: int, shaping: Shaping) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(500, 256, device="cuda", generator=generator, requires_grad=True)
    weight = torch.randn(32003, 256, device="cuda", generator=generator, requires_grad=True)
    targets = torch.randint(0, 32003, (500,), device="cuda", generator=generator)
    coefficients = torch.rand(500, device="cuda", generator=generator)
    right = linear_nll(hidden, weight, targets, coefficients, shaping, 128)
    right.total.backward()
    emulated = EmulatedVocab(hidden, weight, targets, 128, ranks)
    d_hidden = torch.zeros_like(hidden)
    for rank, part in enumerate(emulated.weights):
        own = hidden.detach().requires_grad_()
        got = linear_nll(own, part, targets, coefficients, shaping, 128, shard=emulated.shard(rank))
        torch.testing.assert_close(tuple(got), tuple(right), rtol=1e-4, atol=1e-4)
        got.total.backward()
        d_hidden += own.grad
    grads = torch.cat([part.grad for part in emulated.weights])
    assert (d_hidden - hidden.grad).norm() < 1e-4 * hidden.grad.norm()
    assert (grads - weight.grad).norm() < 1e-4 * weight.grad.norm()


def test_chunks_do_not_change_the_loss() -> None:
    hidden = torch.randn(100, 64, device="cuda", requires_grad=True)
    weight = torch.randn(1000, 64, device="cuda", requires_grad=True)
    targets, weights = torch.randint(0, 1000, (100,), device="cuda"), torch.ones(100, device="cuda")
    whole = linear_nll(hidden, weight, targets, weights, chunk_tokens=100).total
    parts = linear_nll(hidden, weight, targets, weights, chunk_tokens=7).total
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-4)


def engine_on(device: str, dtype: torch.dtype, *, compiled: bool = False) -> FlatEngine:
    engine = assemble(
        EngineSpec(CONFIG, NextToken(), AdamW(lr=1e-2), torch.device(device), dtype, chunk_tokens=64, seed=3, compile_blocks=compiled)
    )
    assert isinstance(engine, FlatEngine)
    engine.fill((name, initial_value(name, tuple(value.shape), CONFIG, 1)) for name, value in engine.masters.items())
    return engine


@pytest.mark.parametrize("rows", [[[128], [100]], [[50, 70], [3, 60, 65]]])
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_steps_on_the_gpu_follow_fp32_steps_on_the_cpu(rows: list[list[int]], compiled: bool) -> None:
    optim = AdamW(lr=1e-2)
    engines = [engine_on("cpu", torch.float32), engine_on("cuda", torch.bfloat16, compiled=compiled)]
    for index in range(4):
        batch = make_batch(rows, seq_len=128, vocab=1000, seed=index)
        losses, norms = [], []
        for engine in engines:
            losses.append(engine.forward_backward(make_step(batch, 2), StepInfo(index, 10)).loss.item())
            norms.append(engine.update(hypers(optim, engine.groups, index, 10)).norm.item())
        assert losses[1] == pytest.approx(losses[0], rel=2e-2)
        assert norms[1] == pytest.approx(norms[0], rel=5e-2)


def test_a_deterministic_step_repeats_bit_for_bit() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            engine = engine_on("cuda", torch.bfloat16)
            engine.forward_backward(make_step(make_batch([[50, 70], [128]], seq_len=128, vocab=1000), 1), StepInfo(0, 10))
            engine.update(hypers(AdamW(), engine.groups, 0, 10))
            results.append({name: value.clone() for name, value in engine.masters.items()})
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step_never_waits_for_the_device() -> None:
    engine = engine_on("cuda", torch.bfloat16)
    optim = AdamW()
    step = make_step(make_batch([[50, 70], [128]], seq_len=128, vocab=1000), 2)
    for _ in range(2):
        engine.forward_backward(step, StepInfo(0, 10))
        engine.update(hypers(optim, engine.groups, 0, 10))
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.forward_backward(step, StepInfo(0, 10))
        engine.update(hypers(optim, engine.groups, 0, 10))
    finally:
        torch.cuda.set_sync_debug_mode("default")
