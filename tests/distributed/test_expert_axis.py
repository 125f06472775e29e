"""Experts that ranks share: checkpoints of mixtures belong to no layout, a rank without tokens works, a killed run ends bit for bit.

All cases of one number of ranks share one started group.
"""

import signal
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support.batches import make_batch
from support.engines import Setup, make_engine, share_of_step, train_steps
from support.layout_trials import PLAIN
from support.ranks import run_ranks
from support.runs import (
    assert_same_run,
    headway,
    make_stores,
    start_headway,
    wait_for_step,
    write_recipe,
)

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.save import Writers, save_checkpoint
from headway.checkpoint.stored_model import find_model
from headway.data.batch import StepBatch, StepStats
from headway.model.config import ModelConfig
from headway.model.experts_config import ExpertsConfig
from headway.model.layout import ROUTER_BIAS
from headway.optim.groups import hypers
from headway.optim.muon import Config as Muon
from headway.optim.schedule import Schedule
from headway.parallel.collectives import RankGroup
from headway.tasks.balance import LOAD
from headway.tasks.base import StepInfo

CUT = 3
END = 6
MICRO = 4
MIXTURE = PLAIN.with_(
    experts={
        "num": 4,
        "per_token": 2,
        "ffn_size": 24,
        "aux_loss": 0.1,
        "bias_rate": 0.01,
        "router": "sigmoid",
    }
)
ZERO1: dict[str, Any] = {}
DDP: dict[str, Any] = {"zero1": {"size": 1}}
FSDP: dict[str, Any] = {"strategy": "fsdp"}
COMMON: dict[str, Any] = {"lr": 1e-2, "clip": 0.5, "schedule": Schedule(warmup=2)}
Result = tuple[list[float], dict[str, torch.Tensor]]


def setup_of(parallel: dict[str, Any], **more: Any) -> Setup:
    return Setup(parallel, config=MIXTURE, micro=MICRO, freeze=(), **more)


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


def steps(engine: Any, group: RankGroup, first: int, last: int) -> list[float]:
    return [loss for loss, _, _ in train_steps(engine, group, MICRO, first, last)]


def first_part(folder: Path, setup: Setup, group: RankGroup) -> Result:
    """Train, save on the way, and go on."""
    engine = make_engine(group, setup)
    before = steps(engine, group, 0, CUT)
    save(folder, engine, group)
    return before + steps(engine, group, CUT, END), {
        name: value.clone() for name, value in engine.weights()
    }


def second_part(folder: Path, setup: Setup, group: RankGroup) -> Result:
    """Continue what was saved."""
    engine = make_engine(group, setup)
    with open_checkpoint(folder / f"step-{CUT:08}") as reader:
        engine.load(reader.read, reader.scalars["engine"])  # pyright: ignore[reportArgumentType]
    return steps(engine, group, CUT, END), {name: value.clone() for name, value in engine.weights()}


def change_layouts(
    folder: Path, split: dict[str, Any], others: list[dict[str, Any]], group: RankGroup, **more: Any
) -> list[Result]:
    """A run with split experts; the same continued on that layout and on others; and one of the last layout continued on that layout."""
    results = [first_part(folder / "split", setup_of(split, **more), group)]
    results += [
        second_part(folder / "split", setup_of(other, **more), group) for other in (split, *others)
    ]
    first_part(folder / "other", setup_of(others[-1], **more), group)
    return [*results, second_part(folder / "other", setup_of(split, **more), group)]


def check(results: list[list[Result]], right: Result, rel: float = 1e-6) -> None:
    losses, weights = right
    for whole, again, *rest in results:
        assert whole[0] == pytest.approx(losses, rel=rel)
        assert again[0] == whole[0][CUT:], "the same layout continues bit for bit"
        assert all(torch.equal(again[1][name], value) for name, value in whole[1].items())
        for result in rest:
            assert result[0] == pytest.approx(losses[CUT:], rel=rel)
            for name, value in weights.items():
                torch.testing.assert_close(result[1][name], value, rtol=1e-3, atol=1e-4)


def alone(**more: Any) -> Result:
    engine = make_engine(RankGroup(), setup_of({}, **more))
    return steps(engine, RankGroup(), 0, END), dict(engine.weights())


def test_checkpoints_of_split_experts_continue_on_any_layout_and_on_their_own_bit_for_bit(
    tmp_path: Path,
) -> None:
    layouts: list[dict[str, Any]] = [{"expert": 2, **FSDP}, FSDP]
    check(run_ranks(partial(change_layouts, tmp_path, {"expert": 2}, layouts), 2), alone())
    assert second_part(tmp_path / "split", setup_of({}), RankGroup())[0] == pytest.approx(
        alone()[0][CUT:], rel=1e-6
    )


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_muon_updates_split_experts(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"expert": 2, **FSDP}, {"expert": 2, **DDP}, FSDP, ZERO1]
    results = run_ranks(
        partial(change_layouts, tmp_path, {"expert": 2}, layouts, optim=Muon(**COMMON)), 2
    )
    check(results, alone(optim=Muon(**COMMON)), rel=1e-5)


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_checkpoints_of_split_experts_continue_on_other_degrees(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [
        {"expert": 2},
        {"expert": 2, **FSDP},
        {"expert": 2, "zero1": {"size": 2}},
        {"expert": 4, **DDP},
        FSDP,
    ]
    results = run_ranks(partial(change_layouts, tmp_path, {"expert": 4}, layouts), 4)
    check(results, alone())


def without_tokens(group: RankGroup) -> list[tuple[float, float, float]]:
    """Biases let all tokens choose the first experts, which the first rank holds."""
    config = PLAIN.with_(experts={"num": 4, "aux_loss": 0.0, "bias_rate": 0.0, "normalize": False})
    engine = make_engine(group, Setup({"expert": group.size}, config=config, freeze=()))
    biases = [name for name in engine.shapes if name.endswith(ROUTER_BIAS)]
    engine.fill((name, torch.tensor([100.0, 100.0, 0.0, 0.0])) for name in biases)
    load = engine.evaluate(
        share_of_step(0, MICRO, group.rank, group.size).microbatches,
        StepInfo(0, 20, training=False),
    )[LOAD][0]
    assert load[:, :2].all()
    assert not load[:, 2:].any()
    return train_steps(engine, group, MICRO, 0, 3)


def test_a_rank_whose_experts_get_no_token_trains_on() -> None:
    right = without_tokens(RankGroup())
    for seen in run_ranks(without_tokens, 2):
        for got, wanted in zip(seen, right, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_a_killed_run_with_split_experts_ends_bit_for_bit_and_exports_what_one_process_exports(
    tmp_path: Path,
) -> None:
    stores = make_stores(tmp_path)
    recipe = write_recipe(tmp_path, stores, steps=12)
    settings = [
        "model.experts.num=4",
        "model.experts.aux_scope=step",
        "checkpoint.every=3",
        "steps=12",
    ]
    ranks = ["--nproc", "2", "parallel.expert=2"]
    for name, extra in (("alone", []), ("undisturbed", ranks)):
        assert headway("train", str(recipe), *settings, *extra, f"run.name={name}").returncode == 0
    process = start_headway("train", str(recipe), *settings, *ranks, "run.name=killed")
    wait_for_step(tmp_path / "runs" / "killed" / "metrics.jsonl", 4, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert headway("train", str(recipe), *settings, *ranks, "run.name=killed").returncode == 0
    assert_same_run(tmp_path / "runs" / "undisturbed", tmp_path / "runs" / "killed", 12)
    whole = dict(find_model(tmp_path / "runs" / "alone" / "final").weights())
    killed = dict(find_model(tmp_path / "runs" / "killed" / "final").weights())
    assert whole.keys() == killed.keys()
    for name, value in whole.items():
        torch.testing.assert_close(killed[name], value, rtol=1e-3, atol=1e-4)


def step_seconds(group: RankGroup) -> list[float]:
    """Median seconds of a step without and with split experts, the two in turns."""
    experts = ExpertsConfig(num=8, per_token=2, ffn_size=256)
    shape = ModelConfig(
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        ffn_size=512,
        vocab_size=64,
        max_seq_len=256,
        experts=experts,
    )
    engines = [
        make_engine(
            group, Setup({"expert": size, "bucket_bytes": 32 << 20}, config=shape, freeze=())
        )
        for size in (1, group.size)
    ]
    batch = make_batch([[256]] * 4, seq_len=256, vocab=64, seed=group.rank)
    step = StepBatch(
        (batch,),
        {"targets": 4 * 255.0 * group.size, "rows": 4.0 * group.size},
        StepStats(1024, 1, 1, 1, 1, 0),
    )
    seconds: list[list[float]] = [[], []]
    for index in range(12):
        for engine, seen in zip(engines, seconds, strict=True):
            group.barrier()
            begin = time.perf_counter()
            engine.forward_backward(step, StepInfo(index, 20))
            engine.update(hypers(engine.spec.optim, engine.groups, index, 20))
            seen.append(time.perf_counter() - begin)
    return [median(seen[2:]) for seen in seconds]


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_time_of_a_step_with_and_without_split_experts() -> None:
    plain, split = run_ranks(step_seconds, 2, timeout=300)[0]
    shape = "2 gloo ranks, 2 mixtures of 8 experts, width 128, 1024 tokens each"
    sys.stdout.write(f"\n{shape}: {plain:.3f} s, expert=2 {split:.3f} s ({split / plain:.2f}x)\n")
    assert split < 3 * plain
