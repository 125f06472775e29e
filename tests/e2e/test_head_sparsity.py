"""Learned head sparsity as runs: masks only, masks and weights, fine-tuning under frozen masks, and what comes out at the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import assert_same_run, make_stores

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.stored_model import find_model
from headway.cli import main
from headway.config.load import load
from headway.errors import ConfigError
from headway.infer.load import load_model
from headway.model.head_gates import settle
from headway.model.head_masks.choice import MaskChoice
from headway.model.head_masks.file import read_masks, write_masks
from headway.model.head_masks.masks import HeadMasks
from headway.model.layout import GATES
from headway.runtime.digests import DIGESTS
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

BASE = [
    "model.hidden_size=32", "model.num_layers=3", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=32", "model.vocab_size=64",
    "model.max_seq_len=64", "data.seq_len=64", "data.tokenizer_unchecked=true", "batch.rows=4", "batch.micro_rows=2", "device=cpu",
    "optim.lr=1e-2", "optim.schedule.warmup=1", "eval.rows=4", "data.valid.fraction=0.2",
]  # fmt: skip
SPARSE = [
    "objective.kind=head_sparsity",
    "objective.window=6",
    "objective.sinks=2",
    "objective.start=0.5",
    "objective.target=0.5",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores, a pretrained run `dense`, and `masks`: gates trained over its frozen weights."""
    folder = tmp_path_factory.mktemp("sparse")
    make_stores(folder)
    run(folder, "dense", ["steps=4"])
    run(
        folder,
        "masks",
        [*SPARSE, "steps=6", "checkpoint.every=3", "freeze=[weights]", f"init.from={folder}/dense"],
    )
    return folder


def run(folder: Path, name: str, overrides: list[str], base: list[str] = BASE) -> dict[str, Any]:
    places = [
        f"run.dir={folder}",
        f"run.name={name}",
        f"data.train=[{folder}/store0]",
        f"data.cache_dir={folder}/cache",
    ]
    shapes = [] if any(text.startswith("init.from") for text in overrides) else base[:7]
    return train(load(Recipe, None, [*shapes, *base[7:], *places, *overrides]))


def stored(path: Path) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in find_model(path).weights()}


def test_masks_only_trains_the_gates_and_leaves_every_weight_as_it_was(world: Path) -> None:
    before = stored(world / "dense")
    after = stored(world / "masks")
    for name in before:
        assert torch.equal(before[name], after[name]), name
    assert (after[GATES] != 4.0).all()
    assert set(after) - set(before) == {GATES}
    reader = open_checkpoint(world / "masks" / "checkpoints" / "step-00000006")
    trained = {name for name in reader.names() if "exp_avg" in reader.roles(name)}
    assert trained == {GATES, "objective.lambda_1", "objective.lambda_2"}


def test_metrics_hold_sparsity_aim_and_lambdas(world: Path) -> None:
    records = read_metrics(world / "masks" / "metrics.jsonl")
    assert [record["sparsity_target"] for record in records] == [0.5] * 6
    for key in ("sparsity", "lambda_1", "lambda_2", "nll", "undecided_heads"):
        assert all(isinstance(record[key], float) for record in records), key
    for record in records:  # an undecided head runs both branches
        assert record["full_heads"] + record["streaming_heads"] == pytest.approx(
            1 + record["undecided_heads"]
        )
        assert 1 - record["full_heads"] <= record["sparsity"] <= record["streaming_heads"]
    assert records[0]["lambda_2"] == 0.0
    assert records[-1]["lambda_2"] > 0
    assert 0 <= records[-1]["valid"]["valid"]["sparsity"] <= 1


def test_a_resumed_run_draws_the_same_gates(world: Path) -> None:
    resume_after_step_three(world, "masks", [])


def test_a_resumed_run_holds_the_same_gates(world: Path) -> None:
    hold = ["objective.control=hold", "objective.start=0.2"]
    steps = ["steps=6", "checkpoint.every=3", "freeze=[weights]"]
    run(world, "held", [*SPARSE, *hold, *steps, f"init.from={world}/dense"])
    for record in read_metrics(world / "held" / "metrics.jsonl")[1:]:
        assert record["expected_sparsity"] == pytest.approx(record["sparsity_target"], abs=1e-5)
    assert not any("lambda" in name for name in stored(world / "held"))
    resume_after_step_three(world, "held", hold)


def resume_after_step_three(world: Path, name: str, more: list[str]) -> None:
    again = world / f"again-{name}"
    again.mkdir()
    shutil.copytree(world / name, again / name, symlinks=True)
    # as if it had been killed after step 3
    shutil.rmtree(again / name / "checkpoints" / "step-00000006")
    (again / name / "saved.json").unlink()
    (again / name / "summary.json").unlink()
    for link in (again / name / "checkpoints").iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink()
    sources = [
        f"data.train=[{world}/store0]",
        f"data.cache_dir={world}/cache",
        f"init.from={world}/dense",
    ]
    train(
        load(
            Recipe,
            None,
            [
                *BASE[7:],
                *SPARSE,
                *more,
                "steps=6",
                "checkpoint.every=3",
                "freeze=[weights]",
                f"run.dir={again}",
                f"run.name={name}",
                *sources,
            ],
        )
    )
    assert_same_run(world / name, again / name, 6)


def test_later_stages_go_on_from_the_gates_and_fine_tuning_keeps_them(world: Path) -> None:
    held = [
        "objective.start=0.5",
        "objective.target=0.5",
        "objective.mask_lr=0.0",
        "objective.mask_weight_decay=0.0",
    ]
    run(
        world,
        "weights",
        [SPARSE[0], "objective.window=9", *held, "steps=2", f"init.from={world}/masks"],
    )
    gates = stored(world / "masks")[GATES]
    kept = stored(world / "weights")
    assert torch.equal(kept[GATES], gates), "a rate of 0 leaves the gates where they were"
    assert not torch.equal(kept["model.norm.weight"], stored(world / "masks")["model.norm.weight"])
    shape = find_model(world / "weights").config.head_gates
    assert shape is not None
    assert (shape.window, shape.sinks) == (9, 2)
    run(world, "sft", ["freeze=[gates]", "steps=2", f"init.from={world}/weights"])
    tuned = stored(world / "sft")
    assert torch.equal(tuned[GATES], gates)
    assert not torch.equal(tuned["model.norm.weight"], kept["model.norm.weight"])
    assert read_masks(world / "sft" / "final") == read_masks(world / "weights" / "final")


def test_the_three_modes_are_stages_of_one_recipe(world: Path) -> None:
    stages = [
        "{name: masks, objective: {kind: head_sparsity, window: 6, sinks: 2, start: 0.5, target: 0.5}, freeze: [weights]}",
        "{name: weights, objective: {kind: head_sparsity, window: 9, start: 0.5, target: 0.5}}",
        "{name: sft, freeze: [gates]}",
    ]
    run(world, "staged", ["steps=2", f"init.from={world}/dense", f"stages=[{', '.join(stages)}]"])
    shape = find_model(world / "staged").config.head_gates
    assert shape is not None
    assert (shape.window, shape.sinks) == (9, 2)
    kept = [
        stored(world / "staged" / "stages" / name)[GATES]
        for name in ("01-masks", "02-weights", "03-sft")
    ]
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(kept[1], kept[2])
    with pytest.raises(ConfigError, match="stage sft: the model has head gates"):
        run(
            world,
            "mistaken",
            ["steps=2", f"init.from={world}/dense", f"stages=[{stages[0]}, {{name: sft}}]"],
        )


def test_gates_train_beside_adapters_and_stay_out_of_the_adapter_folder(world: Path) -> None:
    from safetensors import safe_open

    run(world, "adapted", [*SPARSE, "adapter.rank=2", "steps=2", f"init.from={world}/dense"])
    final = world / "adapted" / "final"
    with safe_open(final / "adapter" / "adapter_model.safetensors", framework="pt") as file:
        assert not [name for name in file.keys() if "head_gates" in name]  # noqa: SIM118
    assert (stored(world / "adapted")[GATES] != 4.0).all()
    run(
        world,
        "adapted-on",
        [*SPARSE, "adapter.rank=2", "steps=1", f"init.from={world}/adapted/checkpoints/latest"],
    )


def test_frozen_masks_decide_what_training_sees(world: Path) -> None:
    losses = {}
    for name, full in (("all-full", True), ("all-streaming", False)):
        write_masks(HeadMasks(((full, full),) * 3, 3, 1), world / f"{name}.tsv")
        run(
            world,
            name,
            [
                "freeze=[gates]",
                "steps=1",
                f"init.from={world}/dense",
                f"init.masks={world}/{name}.tsv",
            ],
        )
        losses[name] = read_metrics(world / name / "metrics.jsonl")[0]["loss"]
        assert read_masks(world / name / "final").num_full == (6 if full else 0)
    run(world, "plain", ["steps=1", f"init.from={world}/dense"])
    assert losses["all-full"] == pytest.approx(
        read_metrics(world / "plain" / "metrics.jsonl")[0]["loss"], rel=1e-5
    )
    assert losses["all-streaming"] != pytest.approx(losses["all-full"], rel=1e-5)


def test_gates_must_be_frozen_trained_or_left_behind(world: Path) -> None:
    with pytest.raises(ConfigError, match="freeze: \\[gates\\]"):
        run(world, "forgot", ["steps=1", f"init.from={world}/masks"])
    run(world, "left", ["steps=1", "model.head_gates=null", f"init.from={world}/masks"])
    assert GATES not in stored(world / "left")
    write_masks(HeadMasks(((True,),) * 3), world / "other.tsv")
    with pytest.raises(ConfigError, match="3 layers of 1 KV heads; the model has 3 layers of 2"):
        run(
            world,
            "other",
            ["freeze=[gates]", f"init.from={world}/dense", f"init.masks={world}/other.tsv"],
        )
    with pytest.raises(
        ConfigError, match=r"objective\.window is 6 and model\.head_gates\.window is 7"
    ):
        run(world, "twice", [*SPARSE, "model.head_gates.window=7", f"init.from={world}/dense"])


def test_an_exported_model_is_the_plain_one_with_gates_beside_it(world: Path) -> None:
    final = world / "masks" / "final"
    assert {"head_gates.json", "masks.tsv", "masks.json"} <= {path.name for path in final.iterdir()}
    from safetensors import safe_open

    with safe_open(final / "model.safetensors", framework="pt") as file:
        assert GATES not in set(file.keys())
    loaded = load_model(world / "masks")
    plain = load_model(world / "dense")
    assert loaded.config.head_gates is None
    for (name, parameter), (_, other) in zip(
        loaded.model.named_parameters(), plain.model.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, other), name
    (final / "head_gates.json").rename(world / "aside")
    (final / DIGESTS).rename(world / DIGESTS)
    try:
        (final / "head_gates.json").write_text("{}")
        assert main(["masks", "export", "--model", str(final), "--out", str(world / "x.tsv")]) == 1
    finally:
        (world / "aside").rename(final / "head_gates.json")
        (world / DIGESTS).rename(final / DIGESTS)


def test_runs_checkpoints_and_exports_are_read_under_what_their_gates_have_come_to(
    world: Path,
) -> None:
    is_full = settle(stored(world / "masks")[GATES]).tolist()
    settled = HeadMasks(tuple(tuple(row) for row in is_full), 6, 2)
    for path in (
        world / "masks",
        world / "masks" / "checkpoints" / "step-00000006",
        world / "masks" / "final",
    ):
        loaded = load_model(path)
        assert loaded.masks is None
        assert (
            loaded.with_mask_choice(MaskChoice()).masks,
            loaded.with_mask_choice(MaskChoice()).masks_from,
        ) == (settled, "own")
        assert loaded.with_mask_choice(MaskChoice("none")).masks is None


def test_masks_are_exported_raw_at_a_sparsity_and_equal_per_layer(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = world / "exported" / "masks.tsv"
    options = ["--model", str(world / "masks"), "--sparsity", "0.5", "--out", str(out), "--json"]
    assert main(["masks", "export", *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["full_heads"], said["sparsity"], said["window"], said["sinks"]) == (3, 0.5, 6, 2)
    masks = read_masks(out)
    gates = stored(world / "masks")[GATES]
    assert min(gates[torch.tensor(masks.full)]) >= max(gates[~torch.tensor(masks.full)])
    options = [
        "--model",
        str(world / "masks"),
        "--sparsity",
        "0.5",
        "--equal-per-layer",
        "--out",
        str(out),
    ]
    assert main(["masks", "export", *options]) == 0
    assert [sum(row) for row in read_masks(out).full] == [1, 1, 1]
    options = [
        "--model",
        str(world / "masks" / "checkpoints" / "step-00000003"),
        "--raw",
        "--out",
        str(out),
    ]
    assert main(["masks", "export", *options]) == 0
    header, *rows = (line.split("\t") for line in out.read_text().splitlines())
    assert header == ["layer", "head", "log_alpha", "expected_z", "p_streaming", "p_full"]
    assert len(rows) == 6


def test_masks_are_shown_as_a_table_and_a_picture(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_masks(HeadMasks(((True, False), (False, False)), 8, 1), world / "small.tsv")
    options = ["--masks", str(world / "small.tsv"), "--out", str(world / "small.png")]
    assert main(["masks", "show", *options]) == 0
    shown = capsys.readouterr().out
    assert "#." in shown
    assert "1 of 4 heads full, sparsity 0.7500; window 8, sinks 1" in shown
    options = [
        "--model",
        str(world / "masks"),
        "--sparsity",
        "0.5",
        "--out",
        str(world / "gates.png"),
        "--json",
    ]
    assert main(["masks", "show", *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["layers"], said["kv_heads"], sum(map(sum, said["full"]))) == (3, 2, 3)
    for name in ("small.png", "gates.png"):
        assert (world / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show"], "give either a model or --masks"),
        (["show", "--masks", "$/small.tsv", "--out", "x.txt"], "ends in .png"),
        (
            ["show", "--masks", "$/small.tsv", "--equal-per-layer"],
            "1, 0 full heads in its layers, so heads cannot be ranked",
        ),
        (["export", "--model", "$/dense", "--out", "m.tsv"], "has no head gates"),
        (
            ["export", "--model", "$/masks", "--out", "m.tsv", "--raw", "--sparsity", "0.5"],
            "--raw writes the gates",
        ),
        (
            ["export", "--model", "$/masks", "--out", "m.tsv", "--sparsity", "1.5"],
            "between 0 and 1",
        ),
        (["export", "--model", "$/masks", "--out", "$"], "is a folder"),
    ],
)
def test_a_wrong_argument_of_masks_is_one_line(
    world: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_masks(HeadMasks(((True, False), (False, False)), 8, 1), world / "small.tsv")
    assert main(["masks", *(text.replace("$", str(world)) for text in arguments)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert said in error[0]
