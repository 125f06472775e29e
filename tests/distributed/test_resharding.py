"""A checkpoint belongs to no layout: what one strategy on some ranks saved, another on other ranks continues, with the same losses."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import Setup, make_engine, train_steps
from support.ranks import run_ranks

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.save import Writers, save_checkpoint
from headway.parallel.collectives import RankGroup

ONE: dict[str, Any] = {}
DDP: dict[str, Any] = {"zero1": {"size": 1}}
ZERO: dict[str, Any] = {"zero1": {"size": "auto"}}
HALF: dict[str, Any] = {"zero1": {"size": 2}}
FSDP: dict[str, Any] = {"strategy": "fsdp"}
HSDP: dict[str, Any] = {"strategy": "fsdp", "fsdp": {"size": 2, "reshard_after_forward": False}}
MICRO = 4
CUT = 4
END = 8


def first_half(folder: Path, setup: Setup, group: RankGroup) -> list[float]:
    engine = make_engine(group, setup)
    seen = train_steps(engine, group, MICRO, 0, CUT)
    records = engine.tensors()
    save_checkpoint(
        folder,
        CUT,
        records,
        {"engine": engine.scalars()},
        None,
        Writers(group.rank, group.size, group.gather),
    )
    return [step[0] for step in seen]


def second_half(
    folder: Path, setup: Setup, group: RankGroup
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    engine = make_engine(group, setup)
    with open_checkpoint(folder / f"step-{CUT:08}") as reader:
        engine.load(reader.read, reader.scalars["engine"])  # pyright: ignore[reportArgumentType]
    seen = train_steps(engine, group, MICRO, CUT, END)
    return (
        [step[0] for step in seen],
        {name: value.clone() for name, value in engine.weights()},
        engine.scalars(),
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((ZERO, 2), (ONE, 1)),
        ((ONE, 1), (ZERO, 2)),
        ((ZERO, 2), (FSDP, 2)),
        ((HSDP, 4), (HALF, 4)),
        ((DDP, 2), (ZERO, 4)),
        ((HALF, 4), (FSDP, 2)),
    ],
)
def test_a_run_continues_on_another_layout(
    before: tuple[Any, int], after: tuple[Any, int], tmp_path: Path
) -> None:
    whole = make_engine(RankGroup(), Setup(micro=MICRO))
    right = [step[0] for step in train_steps(whole, RankGroup(), MICRO, 0, END)]
    first = run_ranks(partial(first_half, tmp_path, Setup(before[0], micro=MICRO)), before[1])
    second = run_ranks(partial(second_half, tmp_path, Setup(after[0], micro=MICRO)), after[1])
    for losses in first:
        assert losses == pytest.approx(right[:CUT], rel=1e-6)
    for losses, weights, scalars in second:
        assert losses == pytest.approx(right[CUT:], rel=1e-6)
        assert set(scalars["steps"].values()) == {END}
        for name, value in whole.weights():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("parallel", [ZERO, FSDP], ids=["zero1", "fsdp"])
def test_the_same_layout_continues_bit_for_bit(parallel: dict[str, Any], tmp_path: Path) -> None:
    setup = Setup(parallel, dtype=torch.bfloat16, micro=MICRO)

    def without_a_break(group: RankGroup) -> list[float]:
        return [step[0] for step in train_steps(make_engine(group, setup), group, MICRO, 0, END)]

    right = run_ranks(without_a_break, 2)[0]
    assert run_ranks(partial(first_half, tmp_path, setup), 2)[0] == right[:CUT]
    assert run_ranks(partial(second_half, tmp_path, setup), 2)[0][0] == right[CUT:]


POWERSGD = {
    "zero1": {"size": 1},
    "hook": {"kind": "powersgd", "rank": 2, "min_compression_rate": 0.0, "start_step": 1},
}


def residuals(folder: Path, group: RankGroup) -> dict[str, torch.Tensor]:
    engine = make_engine(group, Setup(POWERSGD, micro=MICRO))
    with open_checkpoint(folder / f"step-{CUT:08}") as reader:
        engine.load(reader.read, reader.scalars["engine"])  # pyright: ignore[reportArgumentType]
    return engine.reducer.hook.residuals


def test_powersgd_continues_bit_for_bit_and_shares_its_residual_among_other_ranks(
    tmp_path: Path,
) -> None:
    setup = Setup(POWERSGD, micro=MICRO)

    def without_a_break(group: RankGroup) -> list[float]:
        return [step[0] for step in train_steps(make_engine(group, setup), group, MICRO, 0, END)]

    right = run_ranks(without_a_break, 2)[0]
    run_ranks(partial(first_half, tmp_path, setup), 2)
    assert run_ranks(partial(second_half, tmp_path, setup), 2)[0][0] == right[CUT:]
    two = run_ranks(partial(residuals, tmp_path), 2)
    four = run_ranks(partial(residuals, tmp_path), 4)
    assert two[0]
    for name in two[0]:
        torch.testing.assert_close(
            sum(rank[name] for rank in four), sum(rank[name] for rank in two)
        )
