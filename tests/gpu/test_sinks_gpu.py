"""On CUDA: attention with trained sinks, forward and backward and from every cache, and texts of a gpt-oss model in the engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu.test_attention_gpu import ALONE, PACKED, T, inputs, mask
from gpu.test_engine_gpu import requests, run
from support.byte_model import write_model
from support.cached_chunk_case import SEQUENCES, SHAPES, chunk_gap
from support.paged_case import HEADS, paged_gaps

from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions
from headway.infer.load import load_model
from headway.kernels.attention import ScoreRule, attend, attend_chunk, choose
from headway.kernels.past_attention import flash, has_cudnn
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CONFIG = ModelConfig.model_validate({
    "family": "gpt_oss", "hidden_size": 256, "num_layers": 3, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "ffn_size": 128,
    "vocab_size": 320, "max_seq_len": 1024, "init_std": 0.3, "sliding_window": 48, "window_layers": (0, 2), "tie_embeddings": False,
    "experts": {"num": 8, "per_token": 2, "aux_loss": 0.0},
})  # fmt: skip
MASKS = HeadMasks(((True, False, False, True), (False,) * 4, (True,) * 4), 32, 8)


def sinks(heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-2, 4, heads).to("cuda", dtype).requires_grad_()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 6e-3), (torch.float32, 1e-4)]
)
@pytest.mark.parametrize("window", [None, 1, 64, 1000])
@pytest.mark.parametrize("rows", [PACKED, ALONE])
def test_outputs_and_gradients_are_those_of_the_fp32_reference(
    rows: list[list[int]], window: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    for shape in ((8, 2, 64), (4, 4, 128), (6, 2, 40)):
        found, own = inputs(*shape, dtype), sinks(shape[0], dtype)
        expected, right = (
            [x.detach().float().requires_grad_() for x in found],
            own.detach().float().requires_grad_(),
        )
        assert choose(found[0], mask(rows), window, ScoreRule(sinks=own)) == (
            "sdpa" if dtype == torch.float32 else "varlen"
        )
        weight = torch.randn(
            3, T, shape[0], shape[2], generator=torch.Generator().manual_seed(1)
        ).cuda()
        o = attend(*found, mask(rows), window=window, rule=ScoreRule(sinks=own))
        r = attend(
            *expected, mask(rows), window=window, backend="reference", rule=ScoreRule(sinks=right)
        )
        (o.float() * weight).sum().backward()
        (r * weight).sum().backward()
        assert (o.float() - r).abs().max() < tolerance
        for a, b in zip((*found, own), (*expected, right), strict=True):
            assert a.grad is not None and b.grad is not None
            assert (a.grad.float() - b.grad).abs().max() < tolerance * max(
                1.0, b.grad.abs().max().item()
            ), shape


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_kernels_of_caches_have_sinks_as_their_references_do(
    dtype: torch.dtype, tolerance: float
) -> None:
    for head_size, groups in ((64, 8), (24, 3)):
        for name in HEADS:
            far, same = paged_gaps(name, head_size, groups, "cuda", dtype, sinks=True)
            assert far < tolerance and same, ("paged", name, far)
    for name, sequences in SEQUENCES.items():
        for shape in SHAPES:
            far, same = chunk_gap(sequences, shape, "cuda", dtype, sinks=True)
            assert far < tolerance and same, ("chunk", name, shape, far)


@pytest.mark.parametrize("past", [100, 800])
def test_every_way_behind_a_past_has_sinks(past: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, heads, 64, generator=generator).to("cuda", torch.bfloat16)
        for n, heads in ((300, 8), (past + 300, 2), (past + 300, 2))
    )
    own = sinks(8).detach()
    right = attend_chunk(q.float(), k.float(), v.float(), start=past, rule=ScoreRule(sinks=own))
    assert has_cudnn(torch.bfloat16, 64)
    for found in (
        attend_chunk(q, k, v, start=past, rule=ScoreRule(sinks=own)),
        flash(q, k, v, own),
    ):
        assert (found.float() - right).abs().max() < 2e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.mark.parametrize("masks", [None, MASKS])
def test_texts_of_models_with_sinks_on_the_gpu_are_those_of_the_cpu(
    folder: Path, masks: HeadMasks | None
) -> None:
    options = EngineOptions(max_running=5, page_tokens=16, prefill_tokens=200)
    expected = run(InferenceEngine(load_model(folder).with_masks(masks), options), requests())
    loaded = load_model(folder, device="cuda", dtype=torch.float32).with_masks(masks)
    found = run(InferenceEngine(loaded, replace(options, compile_blocks=False)), requests())
    same = [a == b for a, b in zip(found, expected, strict=True)]
    # fp32 sums in another order may turn a near tie of a random model, in its router or its logits.
    assert sum(same) >= len(same) - 2, same


def test_recorded_steps_in_bf16_give_the_texts_of_plain_ones(folder: Path) -> None:
    options = EngineOptions(max_running=5, page_tokens=16, prefill_tokens=200, compile_blocks=False)
    loaded = load_model(folder, device="cuda", dtype=torch.bfloat16)
    plain, recorded = (
        run(InferenceEngine(loaded, replace(options, record=record)), requests())
        for record in (False, True)
    )
    assert recorded == plain
