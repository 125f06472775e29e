"""Phase 2 on several ranks: the projector and adapters train as in one process, in every layout, with soft tokens in most rows."""

import functools
from typing import Any

import pytest
import torch
from support.engines import Setup, make_engine
from support.media_batches import PATCHES, SHAPE, media_config, train_media
from support.ranks import run_ranks

from headway.model.adapter.config import AdapterConfig
from headway.optim.adamw import Config as AdamW
from headway.optim.base import GroupRule
from headway.optim.schedule import Schedule
from headway.parallel.collectives import RankGroup

STEPS = 3
LORA = AdapterConfig(rank=2, targets=("q_proj", "v_proj"))
PLAIN = AdamW(lr=1e-2, clip=0.5, eps=1e-4, schedule=Schedule(warmup=2))
"""A large eps: with a small one, Adam makes whole steps of gradients that are rounding alone."""
RULES = (
    GroupRule(match=("projector",), lr_factor=5.0),
    GroupRule(match=("adapter",), lr_factor=0.5),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"zero1": {"size": 1}},
    "zero1": {"zero1": {"size": "auto"}},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"tensor": 2},
    "tensor without sequence": {"tensor": 2, "sequence": False},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
}


def setup_of(
    parallel: dict[str, Any],
    *,
    full: bool = False,
    memory: dict[str, Any] | None = None,
    compiled: bool = False,
) -> Setup:
    config = media_config(PATCHES if full else SHAPE)
    optim = PLAIN if full else PLAIN.model_copy(update={"groups": RULES})
    return Setup(
        parallel,
        micro=4,
        freeze=(),
        config=config,
        optim=optim,
        adapter=None if full else LORA,
        memory=memory or {},
        compile_blocks=compiled,
    )


def trained(
    setup: Setup, group: RankGroup
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    engine = make_engine(group, setup)
    seen = train_media(engine, group, setup.micro, STEPS)
    return seen, {name: value.clone() for name, value in engine.weights()}


@functools.cache
def alone(full: bool) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    return trained(setup_of({}, full=full), RankGroup())


def check(
    got: tuple[list[tuple[float, float]], dict[str, torch.Tensor]], full: bool, case: str
) -> None:
    expected, weights = alone(full)
    for (loss, norm), (right_loss, right_norm) in zip(got[0], expected, strict=True):
        assert loss == pytest.approx(right_loss, rel=1e-5), case
        assert norm == pytest.approx(right_norm, rel=1e-4), case
    assert got[1].keys() == weights.keys(), case
    for name in weights:
        torch.testing.assert_close(
            got[1][name], weights[name], rtol=1e-4, atol=1e-5, msg=f"{case}: {name}"
        )


def all_layouts(group: RankGroup) -> list[tuple[str, bool, Any]]:
    """Every layout on the same two ranks, one engine after another."""
    results = [
        (case, False, trained(setup_of(parallel), group)) for case, parallel in LAYOUTS.items()
    ]
    return results + [
        (case, True, trained(setup_of(LAYOUTS[case], full=True), group))
        for case in ("zero1", "fsdp", "tensor")
    ]


def test_two_ranks_train_like_one_in_every_layout() -> None:
    for results in run_ranks(all_layouts, 2):
        for case, full, got in results:
            check(got, full, f"{case}, {'all weights' if full else 'projector and LoRA'}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [
        {"recompute": 1},
        {"recompute": "selective"},
        {"offload": ["activations"]},
        {"offload": ["optimizer"]},
    ],
)
def test_memory_modes_change_nothing(memory: dict[str, Any]) -> None:
    check(trained(setup_of({}, memory=memory), RankGroup()), False, str(memory))


def test_projector_and_adapter_have_their_own_rates_and_the_aligner_never_trains() -> None:
    engine = make_engine(RankGroup(), setup_of({}))
    named = {group.name.split(".")[0]: group for group in engine.groups}
    assert {name.split(".")[0] for name in named["rule0"].names} == {"projector"}
    assert all("lora_" in name for name in named["rule1"].names)
    assert not any(name.startswith("aligner.") for group in engine.groups for name in group.names)
    before = {name: value.clone() for name, value in engine.weights()}
    train_media(engine, RankGroup(), 4, 1)
    moved = {name for name, value in engine.weights() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith("projector.") or "lora_" in name for name in moved)
