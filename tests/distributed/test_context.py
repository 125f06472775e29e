"""Rows whose tokens lie on several ranks: the same losses, gradients, gates, weights and validation as one process.

Rows hold packed documents, some of which cross the edge between two ranks' tokens; two query heads share each KV head.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import CONFIG, Setup, make_engine, share_of_step, train_steps
from support.ranks import run_ranks, start_processes
from support.runs import make_stores, write_recipe

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.save import Writers, save_checkpoint
from headway.config.load import load
from headway.model.config import HeadGatesConfig
from headway.model.layout import GATES
from headway.parallel.collectives import RankGroup
from headway.parallel.context import to_heads, to_tokens
from headway.store.writer import StoreWriter
from headway.tasks.base import StepInfo
from headway.tasks.head_sparsity import Config as HeadSparsity
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

STEPS = 3
PLAIN = CONFIG.with_(dropout=0.0, num_heads=8, num_kv_heads=4, init_std=0.3)
GATED = PLAIN.with_(head_gates=HeadGatesConfig(window=3, sinks=1, init_mean=0.0, init_std=1.5))
SPARSITY = HeadSparsity(start=0.5, target=0.7, mask_lr=0.3, reg_lr=0.3)
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"zero1": {"size": 1}},
    "zero1": {"zero1": {"size": "auto"}},
    "zero1.5": {"zero1": {"size": 2}},
    "fsdp": {"strategy": "fsdp"},
    "powersgd": {
        "zero1": {"size": 1},
        "hook": {"kind": "powersgd", "start_step": 0, "min_compression_rate": 1e9},
    },
}


def setup(
    strategy: str, context: int, *, gated: bool = False, freeze: tuple[str, ...] = (), **more: Any
) -> Setup:
    objective = SPARSITY if gated else None
    parallel = {**STRATEGIES[strategy], "context": context}
    return Setup(
        parallel, config=GATED if gated else PLAIN, freeze=freeze, objective=objective, **more
    )


def rows_of(setting: Setup, group: RankGroup) -> RankGroup:
    """Which rows a rank reads, as a group to count by."""
    context = setting.parallel["context"] if group.size > 1 else 1
    return RankGroup(group.rank // context, group.size // context)


def alone_of(setting: Setup) -> Setup:
    return Setup({}, config=setting.config, freeze=setting.freeze, objective=setting.objective)


def gate_gradient(setting: Setup, group: RankGroup) -> torch.Tensor:
    """The gradient of log_alpha after the first step's exchange, from the mix of heads and from the constraint on their sparsity."""
    engine = make_engine(group, setting)
    rows = rows_of(setting, group)
    engine.fill(
        [("objective.lambda_1", torch.tensor(2.0)), ("objective.lambda_2", torch.tensor(3.0))]
    )
    engine.forward_backward(share_of_step(0, setting.micro, rows.rank, rows.size), StepInfo(0, 20))
    if setting.parallel.get("strategy") == "fsdp" and group.size > 1:
        return engine.parts[GATES].parameter.grad.clone()
    buffer, span, slot = engine.slots[GATES]
    return buffer.gradient(span, slot).clone()


@pytest.mark.parametrize(
    ("strategy", "ranks", "context"), [("ddp", 2, 2), ("ddp", 4, 4), ("fsdp", 4, 2)]
)
def test_gate_gradients_are_those_of_one_rank(strategy: str, ranks: int, context: int) -> None:
    setting = setup(strategy, context, gated=True, freeze=("weights",))
    right = gate_gradient(alone_of(setting), RankGroup())
    assert ((right != 0).sum(1) >= 2).all(), (
        "several heads of every layer are undecided, on more than one rank"
    )
    for got in run_ranks(functools.partial(gate_gradient, setting), ranks):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-7)


def trained(
    setting: Setup, group: RankGroup
) -> tuple[list[tuple[float, float, float]], dict[str, torch.Tensor], float]:
    """Losses and norms, weights, and the loss of a validation afterwards."""
    engine = make_engine(group, setting)
    rows = rows_of(setting, group)
    seen = train_steps(engine, rows, setting.micro, 0, STEPS)
    batches = share_of_step(STEPS, setting.micro, rows.rank, rows.size).microbatches
    total, weight = engine.evaluate(batches, StepInfo(STEPS, 20, training=False))["nll"]
    assert weight == share_of_step(STEPS, setting.micro, 0, 1).totals["targets"], (
        "every target counts once"
    )
    return seen, {name: value.clone() for name, value in engine.weights()}, float(total / weight)


@functools.cache
def right_of(
    objective: HeadSparsity | None, freeze: tuple[str, ...]
) -> tuple[list[tuple[float, float, float]], dict[str, torch.Tensor], float]:
    setting = setup("ddp", 1, gated=objective is not None, freeze=freeze)
    return trained(alone_of(replace(setting, objective=objective)), RankGroup())


def check(setting: Setup, ranks: int) -> None:
    objective: Any = setting.objective  # frozen settings, which have a hash
    losses, weights, valid = right_of(objective, setting.freeze)
    for seen, got, got_valid in run_ranks(functools.partial(trained, setting), ranks):
        assert [loss for loss, *_ in seen] == pytest.approx([loss for loss, *_ in losses], rel=1e-5)
        assert [norm for _, norm, _ in seen] == pytest.approx(
            [norm for _, norm, _ in losses], rel=1e-5
        )
        assert got_valid == pytest.approx(valid, rel=1e-5)
        assert got.keys() == weights.keys()
        for name in weights:
            assert (got[name] - weights[name]).norm() <= 1e-5 * weights[name].norm(), name


@pytest.mark.parametrize(
    ("strategy", "ranks", "context"),
    [("ddp", 2, 2), ("zero1.5", 4, 4), ("fsdp", 4, 2), ("powersgd", 2, 2)],
)
def test_ranks_that_share_rows_train_like_one_process(
    strategy: str, ranks: int, context: int
) -> None:
    check(setup(strategy, context), ranks)


@pytest.mark.parametrize(
    ("strategy", "ranks", "context", "kv_heads"),
    [("zero1", 4, 4, 2), ("ddp", 2, 2, 1), ("fsdp", 4, 4, 1)],
)
def test_more_ranks_than_kv_heads_train_like_one_process(
    strategy: str, ranks: int, context: int, kv_heads: int
) -> None:
    """Keys go around a ring: of single ranks, and of groups that exchange heads."""
    setting = replace(setup(strategy, context), config=PLAIN.with_(num_kv_heads=kv_heads))
    losses, weights, valid = trained(alone_of(setting), RankGroup())
    for seen, got, got_valid in run_ranks(functools.partial(trained, setting), ranks):
        assert [loss for loss, *_ in seen] == pytest.approx([loss for loss, *_ in losses], rel=1e-5)
        assert [norm for _, norm, _ in seen] == pytest.approx(
            [norm for _, norm, _ in losses], rel=1e-5
        )
        assert got_valid == pytest.approx(valid, rel=1e-5)
        for name in (
            weights
        ):  # sums in another order; AdamW makes more of it where a gradient is almost zero
            assert (got[name] - weights[name]).norm() <= 3e-5 * weights[name].norm(), name


@pytest.mark.parametrize(("strategy", "freeze"), [("zero1", ("weights",)), ("fsdp", ())])
def test_ranks_that_share_rows_train_gates_like_one_process(
    strategy: str, freeze: tuple[str, ...]
) -> None:
    check(setup(strategy, 2, gated=True, freeze=freeze), 4)


def test_ranks_that_share_rows_hold_gates_like_one_process() -> None:
    held = HeadSparsity(control="hold", start=0.5, target=0.7, mask_lr=0.3)
    check(replace(setup("zero1", 2, gated=True, freeze=("weights",)), objective=held), 2)


def test_blocks_that_are_computed_again_exchange_again() -> None:
    check(setup("zero1", 2, gated=True, freeze=("weights",), memory={"recompute": 1.0}), 2)


def decided_on_one_rank(setting: Setup, group: RankGroup) -> torch.Tensor:
    engine = make_engine(group, setting)
    rows = rows_of(setting, group)
    engine.fill([(GATES, torch.tensor([[0.5, 0.0, 30.0, 30.0], [-30.0, -30.0, 0.0, -0.5]]))])
    engine.forward_backward(share_of_step(0, setting.micro, rows.rank, rows.size), StepInfo(0, 20))
    buffer, span, slot = engine.slots[GATES]
    return buffer.gradient(span, slot).clone()


@pytest.mark.parametrize("memory", [{}, {"recompute": 1.0}])
def test_a_rank_whose_heads_are_all_decided_keeps_the_others_company(
    memory: dict[str, Any],
) -> None:
    """Frozen weights, and in the first layer only the first rank's gates are open: nobody waits for a gradient that never comes."""
    setting = setup("ddp", 2, gated=True, freeze=("weights",), memory=memory)
    right = decided_on_one_rank(alone_of(setting), RankGroup())
    for got in run_ranks(functools.partial(decided_on_one_rank, setting), 2, timeout=20):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-7)


def first_half(folder: Path, setting: Setup, group: RankGroup) -> list[float]:
    engine = make_engine(group, setting)
    seen = train_steps(engine, rows_of(setting, group), setting.micro, 0, 2)
    records = engine.tensors()
    save_checkpoint(
        folder,
        2,
        records,
        {"engine": engine.scalars()},
        None,
        Writers(group.rank, group.size, group.gather),
    )
    return [step[0] for step in seen]


def second_half(folder: Path, setting: Setup, group: RankGroup) -> list[float]:
    engine = make_engine(group, setting)
    with open_checkpoint(folder / "step-00000002") as reader:
        engine.load(reader.read, reader.scalars["engine"])  # pyright: ignore[reportArgumentType]
    return [
        step[0] for step in train_steps(engine, rows_of(setting, group), setting.micro, 2, STEPS)
    ]


@pytest.mark.parametrize(
    ("before", "after"), [(("zero1.5", 2, 4), ("fsdp", 2, 2)), (("ddp", 1, 1), ("zero1", 2, 4))]
)
def test_a_run_continues_with_another_number_of_ranks_to_a_row(
    before: tuple[str, int, int], after: tuple[str, int, int], tmp_path: Path
) -> None:
    gated = setup("ddp", 1, gated=True).objective
    assert isinstance(gated, HeadSparsity)
    right = [loss for loss, *_ in right_of(gated, ())[0]]
    for (strategy, context, ranks), half, expected in (
        (before, first_half, right[:2]),
        (after, second_half, right[2:]),
    ):
        setting = setup(strategy, context, gated=True)
        for losses in run_ranks(functools.partial(half, tmp_path, setting), ranks):
            assert losses == pytest.approx(expected, rel=1e-5)


def there_and_back(group: RankGroup) -> None:
    q = torch.randn(2, 3, 8, 5, dtype=torch.bfloat16)
    k = torch.randn(2, 3, 4, 5, dtype=torch.bfloat16)
    by_heads = to_heads((q, k), group)
    assert [tuple(x.shape) for x in by_heads] == [(2, 12, 2, 5), (2, 12, 1, 5)]
    assert all(torch.equal(*pair) for pair in zip(to_tokens(by_heads, group), (q, k), strict=True))
    numbered = torch.arange(12).view(1, 12, 1, 1).expand(1, 12, 4, 1)[:, group.rank * 3 :][
        :, :3
    ] + 100 * torch.arange(4).view(1, 1, 4, 1)
    (mine,) = to_heads([numbered], group)
    assert mine.flatten().tolist() == [100 * group.rank + token for token in range(12)]


def test_exchanges_bring_all_tokens_of_the_own_heads_in_order_and_undo_each_other() -> None:
    run_ranks(there_and_back, 4)


def test_context_ranks_leave_what_one_process_leaves(tmp_path: Path) -> None:
    """From the recipe on: masked and packed documents, validation, the meter's counts, the exported model."""
    rng = np.random.default_rng(0)
    writer = StoreWriter(
        tmp_path / "masked", dtype="uint16", tokenizer_fingerprint=None, masked=True
    )
    for _ in range(60):
        length = int(rng.integers(5, 60))
        writer.add(rng.integers(0, 64, length).astype(np.uint16), rng.random(length) < 0.7)
    writer.finish()
    stores = [tmp_path / "masked", *make_stores(tmp_path)[:1]]
    records: list[list[dict[str, Any]]] = []
    for name, world, overrides in (("one", 1, []), ("four", 4, ["parallel.context=2"])):
        shared = ["model.dropout=0", "eval.every=2"]
        recipe = load(
            Recipe, write_recipe(tmp_path, stores, name=name, steps=4), [*shared, *overrides]
        )
        if world == 1:
            train(recipe)
        else:
            start_processes(lambda recipe=recipe: train(recipe), world)
        records.append(read_metrics(recipe.run.folder / "metrics.jsonl"))
    for alone, four in zip(*records, strict=True):
        for key in (
            "loss",
            "nll",
            "accuracy",
            "grad_norm",
            "tokens",
            "num_samples_in_batch",
            "num_consumed_tokens",
        ):
            assert four[key] == pytest.approx(alone[key], rel=1e-5), (
                f"{key} of step {alone['step']}"
            )
        assert four.get("valid", {}).keys() == alone.get("valid", {}).keys()
        for name, values in alone.get("valid", {}).items():
            assert four["valid"][name] == pytest.approx(values, rel=1e-5)
    assert any("valid" in record for record in records[0])
    # a rank computes a part of the rows it reads
    last = records[1][-1]
    assert last["time"]["tgs"] * last["time"]["step_seconds"] == pytest.approx(
        last["micro_num"] * 2 * 64 / 2
    )
