"""Ranks that share every layer: the same losses, norms, validation and weights as one process, alone and with every other axis."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.engines import OPTIM, make_engine, share_of_step
from support.killed_runs import finish, small, started
from support.layout_trials import (
    DRILL_STEPS,
    GATED,
    SPARSITY,
    compare,
    compiled_tensor_trials,
    more_tensor_trials,
    tensor_trials,
    train_some,
    trial,
)
from support.memory_peak import MemoryPeak
from support.ranks import run_ranks, start_processes
from support.runs import make_stores, write_recipe

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.save import Writers, save_checkpoint
from headway.checkpoint.stored_model import find_model
from headway.config.load import load
from headway.errors import CommunicationError
from headway.export.huggingface import export_huggingface
from headway.kernels.fp8 import LinearSplit, fp8_linear
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.optim.adamw import Config as AdamW
from headway.optim.groups import hypers
from headway.parallel.assemble import assemble
from headway.parallel.collectives import RankGroup, form_groups
from headway.parallel.config import ParallelConfig
from headway.parallel.engine import EngineSpec
from headway.parallel.tensor_exchange import TensorExchange
from headway.tasks.base import StepInfo
from headway.tasks.next_token import Config as NextToken
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe


def test_ranks_that_share_layers_train_like_one_process() -> None:
    sys.stdout.write("\n" + "\n".join(compare(tensor_trials())) + "\n")


@pytest.mark.drill
def test_ranks_that_share_layers_train_like_one_process_in_more_cases() -> None:
    sys.stdout.write("\n" + "\n".join(compare(more_tensor_trials(), steps=DRILL_STEPS)) + "\n")


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_compiled_halves_exchange_in_their_graphs() -> None:
    sys.stdout.write(
        "\n"
        + "\n".join(compare(compiled_tensor_trials(), seconds_each=300, steps=DRILL_STEPS))
        + "\n"
    )


MOVES: list[tuple[int, dict[str, Any]]] = [
    (4, {"zero1": {"size": 2}}),
    (4, {"tensor": 2}),
    (4, {"tensor": 2, "strategy": "fsdp"}),
    (1, {}),
]
"""(ranks, layout), each for two steps."""


def continued(
    folder: Path, moves: list[tuple[int, dict[str, Any]]], first: int, group: RankGroup
) -> list[float]:
    """Two steps on each layout, each from the checkpoint the one before has left."""
    losses = []
    for index, (_, parallel) in enumerate(moves, first):
        moved_trial = trial(
            "moves",
            group.size,
            parallel,
            config=GATED.with_(num_kv_heads=2),
            objective=SPARSITY,
            micro=4,
        )
        engine = make_engine(group, moved_trial.setup)
        if index:
            with open_checkpoint(folder / f"step-{2 * index:08}") as reader:
                engine.load(reader.read, reader.scalars["engine"])
        losses += train_some(moved_trial, engine, range(2 * index, 2 * index + 2))[0]
        records = engine.tensors()
        writers = Writers(group.rank, group.size, group.gather)
        save_checkpoint(folder, 2 * index + 2, records, {"engine": engine.scalars()}, None, writers)
    return losses


def test_a_run_moves_from_layout_to_layout_with_the_same_losses(tmp_path: Path) -> None:
    alone = trial("alone", 1, {}, config=GATED.with_(num_kv_heads=2), objective=SPARSITY, micro=4)
    engine = make_engine(RankGroup(), alone.setup)
    right = train_some(alone, engine, range(2 * len(MOVES)))[0]
    for losses in run_ranks(functools.partial(continued, tmp_path, MOVES[:-1], 0), 4):
        assert losses == pytest.approx(right[: len(losses)], rel=1e-5)
    assert continued(tmp_path, MOVES[-1:], len(MOVES) - 1, RankGroup()) == pytest.approx(
        right[-2:], rel=1e-5
    )
    with open_checkpoint(tmp_path / "step-00000008") as moved:
        for name, value in engine.weights():
            got = moved.weight(name)
            assert (got - value).norm() <= 1e-5 * max(1.0, float(value.norm())), name


def test_tensor_ranks_leave_what_one_process_leaves(tmp_path: Path) -> None:
    """From the recipe on: packed documents, dropout, validation, the meter's counts, the exported model; then it resumes alone."""
    stores = make_stores(tmp_path)
    layouts = {"one": (1, []), "four": (4, ["parallel.tensor=2"])}
    recipes = {}
    for name, (world, overrides) in layouts.items():
        recipes[name] = recipe = load(
            Recipe, write_recipe(tmp_path, stores, name=name, steps=4), ["eval.every=2", *overrides]
        )
        start_processes(lambda recipe=recipe: train(recipe), world) if world > 1 else train(recipe)
    runs = [read_metrics(recipe.run.folder / "metrics.jsonl") for recipe in recipes.values()]
    for alone, four in zip(*runs, strict=True):
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
        for name, values in alone.get("valid", {}).items():
            assert four["valid"][name] == pytest.approx(values, rel=1e-5)
    last = runs[1][-1]
    assert last["time"]["tgs"] * last["time"]["step_seconds"] == pytest.approx(
        last["micro_num"] * 2 * 64 / 2
    ), "half of its rows' work"
    alone, four = (
        load_file(recipe.run.folder / "final" / "model.safetensors") for recipe in recipes.values()
    )
    assert alone.keys() == four.keys()
    for name, value in alone.items():
        assert (four[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.drill  # the same for stages is in test_pipeline.py
def test_a_rank_that_stops_inside_a_layer_is_named_with_the_axis_and_the_exchange(
    tmp_path: Path,
) -> None:
    recipe = load(
        Recipe,
        write_recipe(tmp_path, make_stores(tmp_path), steps=8),
        ["parallel.tensor=2", "parallel.timeout_seconds=3"],
    )

    @contextmanager
    def probe(run: Any) -> Iterator[None]:
        def stall(*_: object) -> None:
            if run.process.rank == 1 and run.state.step == 2:
                time.sleep(4.5)

        run.engine.model.model.layers["1"].mlp.register_forward_pre_hook(stall)
        yield

    def work() -> str:
        try:
            train(recipe, hook=probe)
        except CommunicationError as error:
            return str(error)
        return "done"

    said = start_processes(work, 2)
    assert said[0].startswith("rank 0 waited ") and "of 2 tensor ranks (exchange " in said[0], said[
        0
    ]
    assert "rank 1" in said[0], said[0]


def in_fp8(group: RankGroup) -> None:
    """A column-split and a row-split product in fp8, against the whole layers."""
    exchange = TensorExchange(group, sequence=False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 16, generator=generator)
    up = torch.randn(64, 16, generator=generator)
    down = torch.randn(16, 64, generator=generator)
    up[40] *= 30  # the highest values are on one rank
    down[:, 5] *= 30
    rows = slice(32 * group.rank, 32 * group.rank + 32)
    for scaling in ("tensorwise", "rowwise"):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
        whole = fp8_linear(
            fp8_linear(leaves[0], leaves[1], None, scaling).relu(), leaves[2], None, scaling
        )
        whole.square().sum().backward()
        parts = [tensor.clone().requires_grad_() for tensor in (x, up[rows], down[:, rows])]
        middle = fp8_linear(
            exchange.gather_input(parts[0][None])[0],
            parts[1],
            None,
            scaling,
            LinearSplit("column", exchange.highest),
        ).relu()
        split = exchange.reduce_output(
            fp8_linear(middle, parts[2], None, scaling, LinearSplit("row", exchange.highest))[None]
        )[0]
        torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-4)
        split.square().sum().backward()
        grads = [leaf.grad for leaf in leaves]
        for got, right in zip(
            [part.grad for part in parts],
            [grads[0], grads[1][rows], grads[2][:, rows]],
            strict=True,
        ):
            assert (got - right).norm() <= 1e-5 * right.norm(), scaling


def test_products_in_fp8_have_the_scales_of_the_whole_layer() -> None:
    run_ranks(in_fp8, 2)


LARGER = ModelConfig(
    hidden_size=512,
    num_layers=28,
    num_heads=8,
    ffn_size=1408,
    vocab_size=4096,
    max_seq_len=64,
    tie_embeddings=False,
)


def through_files(folder: Path, parallel: dict[str, Any], group: RankGroup) -> tuple[int, int]:
    """Extra memory of this rank to read a Hugging Face folder and to write one."""
    config = ParallelConfig.model_validate(parallel)
    ranks = form_groups(config.mesh(group.rank, group.size), group)
    engine = assemble(EngineSpec(LARGER, NextToken(), AdamW(), parallel=config, ranks=ranks))
    with MemoryPeak() as reading:
        engine.fill(find_model(folder).weights())
    with MemoryPeak() as writing:
        if group.rank == 0:
            export_huggingface(LARGER, engine.weights(), folder.parent / "out", tokenizer=None)
        else:
            for _ in engine.weights():
                pass
    return reading.extra, writing.extra


@pytest.mark.drill
@pytest.mark.parametrize(
    "parallel", [{"tensor": 4}, {"tensor": 2, "strategy": "fsdp"}], ids=["tensor", "fsdp"]
)
def test_no_rank_holds_the_whole_model_to_read_or_write_it(
    parallel: dict[str, Any], tmp_path: Path
) -> None:
    specs = param_specs(LARGER)
    values = {spec.name: initial_value(spec, LARGER, 0) for spec in specs}
    export_huggingface(LARGER, values.items(), tmp_path / "model", tokenizer=None)
    whole = 4 * sum(spec.size for spec in specs)
    for reading, writing in run_ranks(
        functools.partial(through_files, tmp_path / "model", parallel), 4
    ):
        sys.stdout.write(
            f"model {whole >> 20} MiB: read with {reading >> 20} MiB, written with {writing >> 20} MiB beside the engine\n"
        )
        assert reading < 0.1 * whole
        assert writing < 0.4 * whole
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in values.items())


def broken_on_one_rank(group: RankGroup) -> list[tuple[float, float, float]]:
    """A part of one rank's gradients is not finite in the second step; then the run continues. In fp16, with a loss scale."""
    broken_trial = trial("broken", 2, {"tensor": 2}, dtype=torch.float16)
    engine = make_engine(group, broken_trial.setup)
    seen = []
    for index in range(3):
        result = engine.forward_backward(
            share_of_step(index, broken_trial.setup.micro, 0, 1), StepInfo(index, 20)
        )
        if index == 1 and group.rank == 1:
            buffer, span, slot = engine.slots["model.layers.1.mlp.up_proj.weight"]
            buffer.gradient(span, slot)[0, 0] = torch.inf
        update = engine.update(hypers(OPTIM, engine.groups, index, 20))
        seen.append((float(result.loss), float(update.skipped), float(update.loss_scale)))
    return seen


def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    first, other = run_ranks(broken_on_one_rank, 2)
    assert first == other
    assert [skipped for _, skipped, _ in first] == [0, 1, 0]
    assert first[2][0] < first[0][0] + 1, "the weights are still finite"


@pytest.mark.drill
@pytest.mark.parametrize(
    "after",
    [(4, ()), (1, ()), (2, ("parallel.tensor=2", "parallel.sequence=false"))],
    ids=["dp4", "alone", "tensor2"],
)
def test_a_run_killed_on_a_tensor_layout_resumes_on_another_with_the_same_losses(
    after: tuple[int, tuple[str, ...]], tmp_path: Path
) -> None:
    path = write_recipe(tmp_path, make_stores(tmp_path))
    rows = ("batch.rows=4", "batch.micro_rows=1")
    right = small(path, "right", *rows)
    train(right)
    with started(small(path, "moved", *rows, "parallel.tensor=2"), 4) as attempt:
        folder = tmp_path / "runs" / "moved" / "checkpoints"
        while not (folder / "step-00000004").exists():
            assert attempt.is_alive()
            time.sleep(0.005)
        attempt.ranks[3].kill()
    world, overrides = after
    moved = small(path, "moved", *rows, *overrides)
    assert finish(moved, world) == [0] * world
    seen = {
        record["step"]: record["loss"]
        for record in read_metrics(moved.run.folder / "metrics.jsonl")
    }
    for record in read_metrics(right.run.folder / "metrics.jsonl"):
        assert seen[record["step"]] == pytest.approx(record["loss"], rel=1e-5), (
            f"step {record['step']}"
        )
