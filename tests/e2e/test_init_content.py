"""A new run takes from a checkpoint what it asks for, says so, and with all of it goes on exactly; a resumed run honours a new lr."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.internlm_folder import write_optimizer, write_weights
from support.runs import deterministic, make_stores, write_recipe

from headway.checkpoint.load import open_checkpoint
from headway.config.load import load
from headway.errors import ConfigError
from headway.train import train
from headway.train.config import Recipe


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(load(Recipe, write_recipe(folder, make_stores(folder), name="whole", steps=20)))
    return folder


def start(
    whole: Path, tmp_path: Path, content: str, *more: str
) -> tuple[list[dict[str, Any]], str]:
    path = write_recipe(tmp_path, [whole / "store0", whole / "store1"], name="new", steps=20)
    source = whole / "runs" / "whole" / "checkpoints" / "step-00000015"
    train(load(Recipe, path, [f"init.from={source}", f"init.content={content}", *more]))
    return deterministic(tmp_path / "runs" / "new" / "metrics.jsonl"), (
        tmp_path / "runs" / "new" / "train.log"
    ).read_text()


def test_with_all_of_a_checkpoint_a_new_run_goes_on_exactly(whole: Path, tmp_path: Path) -> None:
    records, _ = start(whole, tmp_path, "all")
    assert records == deterministic(whole / "runs" / "whole" / "metrics.jsonl")[15:]


def test_parts_of_a_checkpoint_are_taken_alone(whole: Path, tmp_path: Path) -> None:
    base = deterministic(whole / "runs" / "whole" / "metrics.jsonl")
    records, _ = start(whole, tmp_path, "[model, optimizer]", "steps=2")
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["lr"] != base[15]["lr"]
    assert records[0]["num_samples_in_batch"] == base[0]["num_samples_in_batch"], (
        "the data begins anew"
    )


@pytest.mark.parametrize(
    ("content", "words"), [("[optimizer]", "must contain model"), ("[model, rng]", "Add scheduler")]
)
def test_a_content_that_makes_no_sense_is_refused(content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(Recipe, None, ["init.from=x", f"init.content={content}"])


def test_more_than_the_model_needs_a_checkpoint(whole: Path, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, [whole / "store0", whole / "store1"], name="new", steps=2)
    with pytest.raises(ConfigError, match="only a headway checkpoint has more"):
        train(
            load(
                Recipe,
                path,
                [f"init.from={whole / 'runs' / 'whole' / 'final'}", "init.content=all"],
            )
        )


def test_a_learning_rate_changed_on_resume_is_honoured_and_logged(
    whole: Path, tmp_path: Path
) -> None:
    path = write_recipe(tmp_path, [whole / "store0", whole / "store1"], name="lr", steps=20)
    train(load(Recipe, path, ["steps=5", "optim.schedule.kind=constant"]))
    train(load(Recipe, path, ["steps=7", "optim.schedule.kind=constant", "optim.lr=1e-3"]))
    records = deterministic(tmp_path / "runs" / "lr" / "metrics.jsonl")
    assert records[4]["lr"] == pytest.approx(1e-2)
    assert records[5]["lr"] == pytest.approx(1e-3)
    assert (
        "changed since the run began: optim.lr: 0.01 -> 0.001"
        in (tmp_path / "runs" / "lr" / "train.log").read_text()
    )


INTERNLM_SHAPE = [
    "model.qkv_bias=true",
    "model.output_bias=true",
    "model.tie_embeddings=false",
    "model.family=internlm",
    "model.num_kv_heads=4",
]


def as_internlm(run: Path, folder: Path, tp: int, pp: int, zero: int) -> None:
    """A checkpoint of ours as InternLM would have left it."""
    reader = open_checkpoint(run / "checkpoints" / "step-00000015")
    roles = {
        role: {name: reader.read(name, role) for name in reader.names("master")}
        for role in ("master", "exp_avg", "exp_avg_sq")
    }
    write_weights(roles["master"], folder, tp, pp, heads=4)
    context = {
        "step_count": 15,
        "num_consumed_tokens": int(str(reader.scalars["consumed_tokens"])),
        "inf_nan_skip_batches": 2,
    }
    write_optimizer(roles, folder, tp, pp, zero, updates=15, context=context)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("biased")
    train(
        load(
            Recipe,
            write_recipe(folder, make_stores(folder), name="whole", steps=20),
            INTERNLM_SHAPE,
        )
    )
    return folder


@pytest.mark.parametrize(("tp", "pp", "zero"), [(1, 1, 1), (2, 2, 3)])
def test_optimizer_and_scheduler_come_along_from_internlms_shards(
    biased: Path, tmp_path: Path, tp: int, pp: int, zero: int
) -> None:
    run = biased / "runs" / "whole"
    as_internlm(run, tmp_path / "internlm", tp, pp, zero)
    path = write_recipe(tmp_path, [biased / "store0", biased / "store1"], name="new", steps=20)
    records = {}
    for name, source in (
        ("theirs", tmp_path / "internlm"),
        ("ours", run / "checkpoints" / "step-00000015"),
    ):
        content = [
            f"init.from={source}",
            "init.content=[model, optimizer, scheduler]",
            f"run.name={name}",
        ]
        train(load(Recipe, path, [*INTERNLM_SHAPE, "checkpoint.every=20", *content]))
        records[name] = deterministic(tmp_path / "runs" / name / "metrics.jsonl")
    assert [record["step"] for record in records["theirs"]] == [16, 17, 18, 19, 20]
    assert [record.pop("inf_nan_skip_batches") for record in records["theirs"]] == [2] * 5, (
        "skipped batches are counted on"
    )
    assert records["theirs"] == [
        {k: v for k, v in record.items() if k != "inf_nan_skip_batches"}
        for record in records["ours"]
    ]
    left, right = (
        open_checkpoint(tmp_path / "runs" / name / "checkpoints" / "step-00000020")
        for name in records
    )
    assert all(
        torch.equal(left.read(n, role), right.read(n, role))
        for n in left.names()
        for role in left.roles(n)
    )


def test_what_internlms_shards_cannot_give_is_refused(biased: Path, tmp_path: Path) -> None:
    as_internlm(biased / "runs" / "whole", tmp_path / "internlm", 1, 1, 2)
    path = write_recipe(tmp_path, [biased / "store0", biased / "store1"], name="new", steps=20)
    with pytest.raises(
        ConfigError,
        match=r"position in the data does not fit.*init\.content=\[model, optimizer, scheduler\]",
    ):
        train(
            load(
                Recipe,
                path,
                [*INTERNLM_SHAPE, f"init.from={tmp_path / 'internlm'}", "init.content=all"],
            )
        )
    (tmp_path / "internlm" / "optimizer_tp0_pp0_zo1.pt").unlink()
    with pytest.raises(
        ConfigError, match=r"the optimizer's plan does not fit.*init\.content=\[model\]"
    ):
        train(
            load(
                Recipe,
                path,
                [
                    *INTERNLM_SHAPE,
                    f"init.from={tmp_path / 'internlm'}",
                    "init.content=[model, optimizer]",
                ],
            )
        )
