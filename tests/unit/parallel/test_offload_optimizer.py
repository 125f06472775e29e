"""Where and in which form optimizer state lies does not change what is trained, and survives a checkpoint bit for bit."""

from typing import Any

import pytest
import torch
from support.engines import Setup, make_engine, train_steps

from headway.optim.lion import Config as Lion
from headway.optim.schedule import Schedule
from headway.optim.schedule_free import Config as ScheduleFree
from headway.optim.schedule_free import WarmupSchedule
from headway.parallel.collectives import RankGroup
from headway.parallel.offload_optimizer import HostStateOptimizer

KINDS = ["fp32", "bf16", "8bit"]


def state_of(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Everything an engine would save, by name and role."""
    return {(name, role): boxes[0][1].clone() for name, role, _, boxes in engine.tensors()}


def carry_over(engine: Any, other: Any) -> None:
    """Save and load, in memory."""
    kept = {
        (name, role): [(offset, part.clone()) for offset, part in boxes]
        for name, role, _, boxes in engine.tensors()
    }

    def read(name: str, role: str, offset: Any, shape: Any) -> torch.Tensor:
        ((_, part),) = kept[name, role]
        return part[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]

    other.load(read, engine.scalars())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_of_any_type_in_host_memory_trains_to_the_same_bits(
    kind: str, dtype: torch.dtype
) -> None:
    alone = RankGroup()
    here = make_engine(alone, Setup(dtype=dtype, state_dtype=kind, memory={"offload": []}))
    there = make_engine(
        alone, Setup(dtype=dtype, state_dtype=kind, memory={"offload": ["optimizer"]})
    )
    assert there.host_state is not None
    assert here.host_state is None
    next(iter(there.host_state.values())).chunk = 128  # many pieces of each bucket
    assert train_steps(here, alone, 2, 0, 4) == train_steps(there, alone, 2, 0, 4)
    ours = state_of(here)
    offloaded = state_of(there)
    assert all(torch.equal(ours[key], offloaded[key]) for key in ours)


@pytest.mark.parametrize(
    "optim",
    [
        Lion(lr=3e-3, clip=0.5, schedule=Schedule(warmup=1)),
        ScheduleFree(lr=3e-3, clip=0.5, schedule=WarmupSchedule(warmup=1)),
    ],
    ids=["lion", "schedule_free"],
)
def test_other_rules_than_adamws_train_to_the_same_bits_from_host_memory(optim: Any) -> None:
    alone = RankGroup()
    here = make_engine(alone, Setup(dtype=torch.bfloat16, optim=optim, memory={"offload": []}))
    there = make_engine(
        alone, Setup(dtype=torch.bfloat16, optim=optim, memory={"offload": ["optimizer"]})
    )
    assert there.host_state is not None
    for host in there.host_state.values():
        host.chunk = 128
    assert train_steps(here, alone, 2, 0, 3) == train_steps(there, alone, 2, 0, 3)
    assert all(torch.equal(here.masters[name], value) for name, value in there.masters.items())
    for engine in (here, there):
        engine._set_compute_params(averages=False)  # what a resumed run computes with
    assert train_steps(here, alone, 2, 3, 5) == train_steps(there, alone, 2, 3, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_to_the_same_bits(kind: str) -> None:
    alone = RankGroup()
    setup = Setup(dtype=torch.bfloat16, state_dtype=kind)
    straight = make_engine(alone, setup)
    resumed = make_engine(alone, setup)
    train_steps(straight, alone, 2, 0, 3)
    carry_over(straight, resumed)
    assert train_steps(straight, alone, 2, 3, 6) == train_steps(resumed, alone, 2, 3, 6)
    ours = state_of(straight)
    continued = state_of(resumed)
    assert all(torch.equal(ours[key], continued[key]) for key in ours)


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_narrow_state_trains_as_fp32_state_does(kind: str) -> None:
    alone = RankGroup()
    wide = train_steps(make_engine(alone, Setup()), alone, 2, 0, 12)
    narrow = train_steps(make_engine(alone, Setup(state_dtype=kind)), alone, 2, 0, 12)
    for wide_loss, other in zip(wide, narrow, strict=True):
        assert other[0] == pytest.approx(wide_loss[0], rel=2e-3)
    assert wide[1:] != narrow[1:]


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_a_run_may_change_the_form_of_its_state(kind: str) -> None:
    alone = RankGroup()
    wide = make_engine(alone, Setup())
    narrow = make_engine(alone, Setup(state_dtype=kind))
    back = make_engine(alone, Setup())
    train_steps(wide, alone, 2, 0, 3)
    carry_over(wide, narrow)
    carry_over(narrow, back)
    expected = train_steps(wide, alone, 2, 3, 6)
    for engine in (narrow, back):
        for loss, other in zip(expected, train_steps(engine, alone, 2, 3, 6), strict=True):
            assert other[0] == pytest.approx(loss[0], rel=1e-3)


def test_pieces_do_not_change_what_an_update_does() -> None:
    alone = RankGroup()
    engines = [
        make_engine(alone, Setup(dtype=torch.bfloat16, memory={"offload": ["optimizer"]}))
        for _ in range(2)
    ]
    engines[1].host_state = {
        name: HostStateOptimizer(rule.optimizer, torch.device("cpu"), chunk=64)
        for name, rule in engines[1].rules.items()
    }
    assert train_steps(engines[0], alone, 2, 0, 3) == train_steps(engines[1], alone, 2, 0, 3)


def test_gradients_have_no_memory_between_steps_and_train_to_the_same_bits() -> None:
    alone = RankGroup()
    held, freed = (make_engine(alone, Setup(dtype=torch.bfloat16)) for _ in range(2))
    freed.frees_gradients = True
    freed._free_gradients()  # as on CUDA, where the first forward finds none either
    for first in range(3):
        assert train_steps(held, alone, 2, first, first + 1) == train_steps(
            freed, alone, 2, first, first + 1
        )
        assert all(bucket.flat.untyped_storage().nbytes() == 0 for bucket in freed.reducer.buckets)
    assert all(torch.equal(held.masters[name], value) for name, value in freed.masters.items())
