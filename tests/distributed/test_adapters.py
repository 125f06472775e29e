"""Adapters train alike under every strategy and in every precision, and the frozen base costs its own bytes and nothing else."""

import functools
from typing import Any

import pytest
import torch
from support.engines import CONFIG, Setup, make_engine, train_steps
from support.ranks import run_ranks

from headway.model.adapter.config import AdapterConfig
from headway.model.adapter.lora import merged
from headway.model.adapter.packed_base import plain_values
from headway.model.layout import num_parameters
from headway.optim.groups import ADAPTER
from headway.optim.scaler import ScalerConfig
from headway.parallel.collectives import RankGroup

STEPS = 6
MICRO = 4
DORA = AdapterConfig(kind="dora", rank=4, alpha=8.0, dropout=0.1)
QLORA = AdapterConfig(
    rank=4, alpha=8.0, dropout=0.1, targets=("q_proj", "v_proj", "down_proj"), base="nf4"
)
QDORA = AdapterConfig(kind="dora", rank=4, alpha=8.0, base="int8")
LORA = AdapterConfig(rank=4, alpha=8.0, dropout=0.1, targets=("q_proj", "v_proj", "down_proj"))
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"zero1": {"size": 1}},
    "zero1": {},
    "zero1.5": {"zero1": {"size": 2}},
    "fsdp": {"strategy": "fsdp"},
}
Seen = tuple[list[tuple[float, float, float]], dict[str, torch.Tensor]]


def trained(setup: Setup, group: RankGroup) -> Seen:
    engine = make_engine(group, setup)
    seen = train_steps(engine, group, MICRO, 0, STEPS)
    assert setup.adapter is not None
    values = {
        name: value.clone()
        for name, value in plain_values(engine.weights(), setup.adapter.layouts(setup.config))
    }
    whole = merged(values.items(), setup.adapter, setup.adapter.modules(setup.config))
    return seen, {
        **dict(whole),
        **{name: value for name, value in values.items() if ADAPTER in name},
    }


@functools.cache
def alone(adapter: AdapterConfig, dtype: torch.dtype) -> Seen:
    return trained(
        Setup(
            dtype=dtype,
            micro=MICRO,
            freeze=(),
            adapter=adapter,
            loss_scale=ScalerConfig(initial=256.0),
        ),
        RankGroup(),
    )


@pytest.mark.parametrize(
    ("strategy", "ranks", "adapter", "dtype"),
    [
        ("ddp", 2, DORA, torch.float32),
        ("zero1", 2, LORA, torch.bfloat16),
        ("zero1", 2, DORA, torch.float16),
        ("zero1.5", 4, LORA, torch.float32),
        ("fsdp", 2, LORA, torch.float32),
        ("fsdp", 2, DORA, torch.bfloat16),
        ("fsdp", 2, QLORA, torch.bfloat16),
        ("zero1", 2, QDORA, torch.float32),
    ],
    ids=str,
)
def test_adapters_train_like_in_one_process(
    strategy: str, ranks: int, adapter: AdapterConfig, dtype: torch.dtype
) -> None:
    expected, weights = alone(adapter, dtype)
    exact = dtype == torch.float32
    setup = Setup(
        STRATEGIES[strategy],
        dtype,
        MICRO,
        (),
        adapter=adapter,
        loss_scale=ScalerConfig(initial=256.0),
    )
    assert expected[-1][0] != expected[0][0]
    for seen, got in run_ranks(functools.partial(trained, setup), ranks):
        for (loss, norm, skipped), (right_loss, right_norm, _) in zip(seen, expected, strict=True):
            assert loss == pytest.approx(right_loss, rel=1e-6 if exact else 2e-3)
            assert norm == pytest.approx(right_norm, rel=1e-4 if exact else 5e-2)
            assert skipped == 0
        assert got.keys() == weights.keys()
        for name in weights:
            torch.testing.assert_close(
                got[name], weights[name], rtol=1e-3 if exact else 5e-2, atol=1e-4 if exact else 3e-2
            )


def test_a_frozen_base_in_bf16_has_no_gradient_no_master_and_no_state() -> None:
    engine = make_engine(RankGroup(), Setup(dtype=torch.bfloat16, freeze=(), adapter=LORA))
    updates = sum(torch.Size(shape).numel() for shape in LORA.shapes(CONFIG).values())
    base = num_parameters(CONFIG)
    padding = 64 * len(engine.shapes)
    frozen = engine.frozen.values.values()
    assert {value.dtype for value in frozen} == {torch.bfloat16}
    held = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in frozen
    }
    assert 2 * base <= sum(held.values()) <= 2 * (base + padding)
    gradients = sum(grad.numel() for buffer in engine.buffers for grad in buffer.grads)
    assert updates <= gradients <= updates + padding
    # fp32: master and two moments
    assert updates * 12 <= engine.state_bytes <= (updates + padding) * 12
    train_steps(engine, RankGroup(), MICRO, 0, 1)
    assert all(p.grad is None for p in engine.model.parameters())
    assert {name for name, role, _, _ in engine.tensors() if role != "param"} == set(
        LORA.shapes(CONFIG)
    )


def sharded_bytes(group: RankGroup) -> tuple[int, int, set[torch.dtype]]:
    engine = make_engine(group, Setup(STRATEGIES["fsdp"], torch.bfloat16, MICRO, (), adapter=LORA))
    frozen = [part for part in engine.parts.values() if part.group is None]
    return (
        sum(part.master.nbytes for part in frozen),
        engine.state_bytes,
        {part.master.dtype for part in frozen},
    )


def test_fsdp_cuts_the_frozen_base_and_keeps_it_in_bf16() -> None:
    seen = run_ranks(sharded_bytes, 2)
    assert sum(frozen for frozen, _, _ in seen) == 2 * num_parameters(CONFIG)
    updates = sum(torch.Size(shape).numel() for shape in LORA.shapes(CONFIG).values())
    assert sum(state for _, state, _ in seen) == 12 * updates
    assert seen[0][2] == {torch.bfloat16}
