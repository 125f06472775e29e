"""On CUDA every family computes what it computes on the CPU: eager and compiled halves, forward and backward, and from the cache."""

import pytest
import torch
from support.engine_steps import engine_logits
from support.family_shapes import FAMILY_SHAPES
from support.initial_weights import initialize

from headway.data.batch import Batch
from headway.model.base import compile_method
from headway.model.config import ModelConfig
from headway.model.transformer import Transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

T, LENGTHS = 256, [100, 29, 127]


def build(name: str, device: str, dtype: torch.dtype = torch.float32) -> Transformer:
    shape = (
        {**FAMILY_SHAPES[name], "head_dim": 64, "sliding_window": 37}
        if "sliding_window" in FAMILY_SHAPES[name]
        else FAMILY_SHAPES[name]
    )
    if name == "phi3":
        factors = {
            "short_factor": tuple(1.0 + i / 8 for i in range(16)),
            "long_factor": tuple(2.0 + i for i in range(16)),
        }
        scaling = {"kind": "longrope", "factor": 4.0, "original_max_seq_len": 110, **factors}
        shape = {"rotary_fraction": 0.5, "rope_scaling": scaling}
    config = ModelConfig(
        **{
            "hidden_size": 128,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            "ffn_size": 192,
            "vocab_size": 320,
            "max_seq_len": 512,
            "init_std": 0.1,
            **shape,
        }
    )
    model = Transformer(config)
    initialize(model, 0)
    return model.to(device, dtype)


def batch(device: str) -> Batch:
    tokens = torch.randint(0, 320, (1, T), generator=torch.Generator().manual_seed(0))
    position = torch.cat([torch.arange(length) for length in LENGTHS])[None].int()
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[
        None
    ].int()
    bounds = torch.tensor([[0, 100, 129, T, T]], dtype=torch.int32)
    weight = torch.full((1, T), 1 / T)
    made = Batch(
        tokens,
        tokens.roll(-1, 1),
        weight,
        position,
        document,
        torch.zeros(1, dtype=torch.int32),
        bounds,
        single_document=False,
    )
    return made.to(device)


def step(model: Transformer, given: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    out = model.forward_batch(given)
    total = out.head.nll(given.targets, given.loss_weight).total
    total.backward()
    gradients = {
        name: parameter.grad.float().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return total.item(), gradients


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_a_packed_step_is_that_of_the_cpu(name: str, compiled: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    expected, right = step(build(name, "cpu"), batch("cpu"))
    model = build(name, "cuda")
    if compiled:
        for block in model.blocks().values():
            for method in model.BLOCK_METHODS:
                setattr(block, method, compile_method(getattr(block, method)))
    found, gradients = step(model, batch("cuda"))
    assert found == pytest.approx(expected, rel=1e-4)
    assert gradients.keys() == right.keys()
    for key, value in right.items():
        assert (gradients[key] - value).abs().max() <= 2e-3 * max(1e-3, value.abs().max().item()), (
            key
        )


@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_bf16_steps_are_near_those_of_fp32(name: str) -> None:
    expected, _ = step(build(name, "cpu"), batch("cpu"))
    found, gradients = step(build(name, "cuda", torch.bfloat16), batch("cuda"))
    assert found == pytest.approx(expected, rel=2e-2)
    assert all(value.isfinite().all() for value in gradients.values())


@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_recorded_steps_over_a_cache_are_the_forward(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build(name, "cuda").requires_grad_(False)
    tokens = torch.randint(0, 320, (2, 150), generator=torch.Generator().manual_seed(1)).cuda()
    position = torch.arange(150, device="cuda").expand(2, -1)
    with torch.inference_mode():
        whole = model.logits(model.hidden_states(tokens, position)).float()
    found = torch.stack(engine_logits(model, tokens, [120, 120], 30, chunk=120))
    assert (found - whole).abs().max() < 2e-3 * whole.abs().max()
