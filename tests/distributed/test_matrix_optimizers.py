"""Optimizers that see whole matrices or keep averages: any ranks and strategy train like one process, and continue their checkpoints.

Newton-Schulz multiplies small singular values of the momentum by up to 500, and with them what ranks round differently; losses are compared
within 1e-5 relative where AdamW's are within 1e-6. All cases of one number of ranks share one started group.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import Setup, make_engine, share_of_step, train_steps
from support.ranks import run_ranks

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.save import Writers, save_checkpoint
from headway.optim.adafactor import Config as Adafactor
from headway.optim.muon import Config as Muon
from headway.optim.schedule import Schedule
from headway.optim.schedule_free import Config as ScheduleFree
from headway.optim.schedule_free import WarmupSchedule
from headway.parallel.collectives import RankGroup
from headway.tasks.base import StepInfo

CUT = 3
END = 6
OFF = {"reduce": False, "gather": False, "step": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"zero1": {"size": 1}},
    "zero1": {"zero1": {"size": "auto"}},
    "zero1 without overlap": {"zero1": {"size": "auto"}, "overlap": OFF},
    "zero1.5": {"zero1": {"size": 2}},
    "fsdp": {"strategy": "fsdp"},
    "powersgd": {
        "zero1": {"size": 1},
        "hook": {"kind": "powersgd", "rank": 64, "start_step": 0, "min_compression_rate": 0.0},
    },
    "hsdp": {"strategy": "fsdp", "fsdp": {"size": 2}},
}
COMMON: dict[str, Any] = {"lr": 1e-2, "clip": 0.5, "schedule": Schedule(warmup=2)}
OPTIMS: dict[str, Any] = {
    "muon": Muon(**COMMON),
    "muon bf16": Muon(**COMMON, state_dtype="bf16"),
    "adafactor": Adafactor(**COMMON, weight_decay=0.1),
    "schedule_free": ScheduleFree(**COMMON | {"schedule": WarmupSchedule(warmup=2)}),
}
MICRO = 4
Result = tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]


def setup_of(layout: str, optim: str) -> Setup:
    # a vocabulary, widths and a bucket size that do not divide evenly: some ranks own nothing of a bucket, and rows are padded
    return Setup(
        LAYOUTS.get(layout, {}), micro=MICRO, optim=OPTIMS[optim], freeze=("*.layers.0.mlp.*",)
    )


def outcome(engine: Any, losses: list[float]) -> Result:
    return losses, {name: value.clone() for name, value in engine.weights()}, engine.scalars()


def save(folder: Path, engine: Any, group: RankGroup) -> None:
    records = engine.tensors()
    save_checkpoint(
        folder,
        CUT,
        records,
        {"engine": engine.scalars()},
        None,
        Writers(group.rank, group.size, group.gather),
    )


def resumed(folder: Path, setup: Setup, group: RankGroup) -> Result:
    engine = make_engine(group, setup)
    with open_checkpoint(folder / f"step-{CUT:08}") as reader:
        engine.load(reader.read, reader.scalars["engine"])  # pyright: ignore[reportArgumentType]
    return outcome(engine, [step[0] for step in train_steps(engine, group, MICRO, CUT, END)])


def check_validation(engine: Any, setup: Setup, group: RankGroup) -> None:
    """What is validated are the weights that are kept, which need not be those that train."""
    plain = make_engine(RankGroup(), replace(setup, parallel={}, optim=None))
    plain.fill((name, value.clone()) for name, value in engine.weights())
    step_info = StepInfo(CUT, 20, training=False)
    metrics = engine.evaluate(
        share_of_step(50, MICRO, group.rank, group.size).microbatches, step_info
    )
    expected = plain.evaluate(share_of_step(50, MICRO, 0, 1).microbatches, step_info)
    for name, (total, weight) in expected.items():
        assert float(metrics[name][0] / metrics[name][1]) == pytest.approx(
            float(total / weight), rel=1e-6
        ), name


def run_layouts(
    folder: Path, optim: str, layouts: tuple[str, ...], group: RankGroup
) -> dict[str, Result]:
    """Every layout from the beginning with a save in between, then from what the one before it saved, then from its own."""
    results: dict[str, Result] = {}
    before = folder / "alone"
    for layout in layouts:
        setup = setup_of(layout, optim)
        engine = make_engine(group, setup)
        losses = [step[0] for step in train_steps(engine, group, MICRO, 0, CUT)]
        check_validation(engine, setup, group)
        save(folder / layout, engine, group)
        losses += [step[0] for step in train_steps(engine, group, MICRO, CUT, END)]
        results[layout] = outcome(engine, losses)
        results[f"{layout} continues {before.name}"] = resumed(before, setup, group)
        results[f"{layout} continues itself"] = resumed(folder / layout, setup, group)
        before = folder / layout
    return results


def alone(optim: str, folder: Path) -> Result:
    engine = make_engine(RankGroup(), setup_of("one", optim))
    losses = [step[0] for step in train_steps(engine, RankGroup(), MICRO, 0, CUT)]
    check_validation(engine, setup_of("one", optim), RankGroup())
    save(folder / "alone", engine, RankGroup())
    losses += [step[0] for step in train_steps(engine, RankGroup(), MICRO, CUT, END)]
    return outcome(engine, losses)


def check(folder: Path, world: int, cases: dict[str, tuple[str, ...]]) -> None:
    right = {optim: alone(optim, folder / optim) for optim in cases}

    def run(group: RankGroup) -> dict[str, dict[str, Result]]:
        return {
            optim: run_layouts(folder / optim, optim, layouts, group)
            for optim, layouts in cases.items()
        }

    for rank in run_ranks(run, world, timeout=120):
        for optim, results in rank.items():
            compare(optim, right[optim], results)
            for layout in cases[optim]:
                whole = results[layout]
                again = results[f"{layout} continues itself"]
                assert again[0] == whole[0][CUT:], f"{optim}, {layout} resumes bit for bit"
                assert all(
                    torch.equal(again[1][name], value) for name, value in whole[1].items()
                ), (optim, layout)


def compare(optim: str, right: Result, results: dict[str, Result]) -> None:
    rounded = "bf16" in optim  # which way a value is rounded is drawn from its bits
    for case, (losses, got, numbers) in results.items():
        assert losses == pytest.approx(right[0][-len(losses) :], rel=2e-3 if rounded else 1e-5), (
            optim,
            case,
        )
        assert numbers["steps"] == right[2]["steps"], (optim, case)
        for name, value in right[1].items() if not rounded else ():
            torch.testing.assert_close(
                got[name],
                value,
                rtol=1e-3,
                atol=1e-4,
                msg=lambda text, case_name=(optim, case, name): f"{case_name}: {text}",
            )


def test_two_ranks_train_and_continue_like_one_process(tmp_path: Path) -> None:
    check(
        tmp_path, 2, {"muon": ("zero1", "fsdp"), "adafactor": ("fsdp",), "schedule_free": ("fsdp",)}
    )


@pytest.mark.drill
@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ("ddp", "powersgd", "zero1 without overlap", "fsdp")),
        (4, ("zero1.5", "hsdp", "zero1", "fsdp")),
    ],
)
def test_any_ranks_train_and_continue_like_one_process(
    world: int, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    check(
        tmp_path,
        world,
        {
            optim: tuple(layout for layout in layouts if layout != "powersgd" or optim == "muon")
            for optim in OPTIMS
        },
    )
