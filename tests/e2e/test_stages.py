"""Several stages in one recipe and one run folder: each is what it would be as a run of its own, and none is run twice."""

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import start_processes
from support.runs import (
    assert_same_run,
    deterministic,
    headway,
    make_stores,
    start_headway,
    wait_for_step,
)

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.stored_model import find_model
from headway.config.load import load, read_yaml
from headway.errors import ConfigError, HeadwayError
from headway.runtime.heartbeat import read_beats
from headway.train import dry_run, train
from headway.train.compare import compare_recipes
from headway.train.config import Recipe
from headway.train.stages import expand, steps_saved

RECIPE = """\
run: {{name: {name}, dir: {dir}}}
model: {{hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 48, vocab_size: 64, max_seq_len: 64, dropout: 0.1}}
data: {{train: [{stores}/store0], valid: {{fraction: 0.1}}, seq_len: 64, tokenizer_unchecked: true, cache_dir: {stores}/cache}}
batch: {{rows: 4, micro_rows: 2}}
optim: {{lr: 1e-2}}
eval: {{every: 4, rows: 4}}
checkpoint: {{every: 2}}
device: cpu
steps: 4
stages:
  - {{name: changed, train: [layers.1], optim: {{lr: 1e-3}}}}
  - {{name: everything, optim: {{lr: 5e-3, schedule: {{kind: wsd}}}}, model: {{no_rope_layers: [1], rope_theta: 500.0}}, steps: {middle}}}
  - {{name: other, data: {{train: [{stores}/store1]}}, freeze: [embeddings], batch: {{tokens: 128, micro_rows: 2}}}}
"""
STAGES = ("01-changed", "02-everything", "03-other")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    make_stores(folder)
    return folder


def recipe_of(folder: Path, stores: Path, *, name: str = "run", middle: int = 6) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(name=name, dir=folder, stores=stores, middle=middle))
    return path


@pytest.fixture(scope="module")
def whole(stores: Path) -> Path:
    """An undisturbed run."""
    train(load(Recipe, recipe_of(stores, stores, name="whole")))
    return stores / "whole"


def assert_same_stages(first: Path, two: Path) -> None:
    for label in STAGES:
        steps = json.loads((first / "stages" / label / "summary.json").read_text())["steps"]
        assert_same_run(first / "stages" / label, two / "stages" / label, steps)
    assert deterministic(first / "metrics.jsonl") == deterministic(two / "metrics.jsonl")


def test_each_stage_is_the_run_it_would_be_alone(whole: Path, stores: Path) -> None:
    path = recipe_of(stores, stores, name="alone")
    source: Path | None = None
    for index, stage in enumerate(expand(load(Recipe, path))):
        says = [f"run.name=alone-{index}", f"run.dir={stores}"] + (
            [] if source is None else [f"init.from={source}"]
        )
        single = {
            key: value
            for key, value in stage.recipe.model_dump(
                mode="json", by_alias=True, exclude_unset=True
            ).items()
            if key != "run"
        }
        (stores / f"alone-{index}.json.yaml").write_text(json.dumps(single))
        summary = train(load(Recipe, stores / f"alone-{index}.json.yaml", says))
        source = Path(summary["run"]) / "checkpoints" / "latest"
        assert_same_run(whole / "stages" / stage.label, Path(summary["run"]), summary["steps"])


def test_the_run_folder_reads_as_one_run(whole: Path) -> None:
    records = deterministic(whole / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 15))
    assert [record["stage"] for record in records] == ["01-changed"] * 4 + ["02-everything"] * 6 + [
        "03-other"
    ] * 4
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["steps"], len(summary["stages"]), summary["final"]) == (
        14,
        3,
        str(whole / "final"),
    )
    assert summary["last_valid_loss"] == records[-1]["valid"]["valid"]["loss"]
    assert [
        entry["state"] for entry in json.loads((whole / "stages.json").read_text())["stages"]
    ] == ["done"] * 3
    log = (whole / "train.log").read_text()
    assert "train layers.1: 9 tensors, 7,744 parameters" in log
    assert "freeze embeddings: 1 tensors, 2,048 parameters" in log
    model = find_model(whole)
    assert model.config.no_rope_layers == (1,)
    assert model.config.rope_theta == 500.0


def test_steps_are_counted_over_all_stages_by_whoever_looks_from_outside(
    whole: Path, tmp_path: Path
) -> None:
    assert steps_saved(whole) == 14
    assert steps_saved(whole / "stages" / STAGES[1]) == 6
    shutil.copytree(whole, tmp_path / "half", symlinks=True)
    ledger = json.loads((whole / "stages.json").read_text())["stages"]
    ledger[1]["state"] = "running"
    ledger[2]["state"] = "waiting"
    (tmp_path / "half" / "stages.json").write_text(json.dumps({"stages": ledger}))
    shutil.rmtree(tmp_path / "half" / "stages" / STAGES[1] / "checkpoints" / "step-00000006")
    assert steps_saved(tmp_path / "half") == 4 + 4
    assert steps_saved(tmp_path) == -1


def test_a_run_asked_to_stop_at_a_step_of_the_whole_stops_there(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.train import control

    monkeypatch.setattr(control, "POLL_SECONDS", 0.0)
    recipe = load(Recipe, recipe_of(tmp_path, stores), ["eval.every=null"])
    monkeypatch.setattr(
        control,
        "read_request",
        lambda folder: control.StopRequest(at_step=7) if folder == tmp_path / "run" else None,
    )
    summary = train(recipe)
    assert (summary["stopped_by"], summary["stage"], summary["steps"]) == (
        "headway stop",
        "everything",
        3,
    )


def test_a_stage_trains_only_what_it_says_and_begins_where_the_last_one_ended(whole: Path) -> None:
    def weights(label: str, step: int) -> dict[str, torch.Tensor]:
        with open_checkpoint(
            whole / "stages" / label / "checkpoints" / f"step-{step:08}"
        ) as reader:
            return {
                name: reader.weight(name)
                for name in reader.names()
                if set(reader.roles(name)) & {"param", "master"}
            }

    first = weights("01-changed", 2)
    last = weights("01-changed", 4)
    assert {name for name in first if not torch.equal(first[name], last[name])} == {
        name for name in first if ".layers.1." in name
    }
    before = weights("02-everything", 6)
    after = weights("03-other", 4)
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        "model.embed_tokens.weight"
    }


def test_a_run_stopped_in_stage_two_goes_on_there_and_ends_like_the_undisturbed_one(
    whole: Path, stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.train import staged_run

    recipe = load(Recipe, recipe_of(tmp_path, stores))
    with monkeypatch.context() as patched:
        patched.setattr(staged_run, "_entry", _die_after(staged_run._entry, "everything"))
        with pytest.raises(SystemExit):
            train(recipe)
    folder = tmp_path / "run" / "stages" / STAGES[1]
    shutil.rmtree(folder / "checkpoints" / "step-00000006")  # as if it had been killed after step 4
    (folder / "summary.json").unlink()
    (folder / "saved.json").unlink()
    assert [
        entry["state"]
        for entry in json.loads((tmp_path / "run" / "stages.json").read_text())["stages"]
    ] == ["done", "running", "waiting"]
    assert find_model(tmp_path / "run").path.is_relative_to(folder)
    untouched = (tmp_path / "run" / "stages" / STAGES[0] / "train.log").read_bytes()
    train(recipe)
    assert (tmp_path / "run" / "stages" / STAGES[0] / "train.log").read_bytes() == untouched
    assert_same_stages(whole, tmp_path / "run")


def _die_after(work: Any, name: str) -> Any:
    def wrapped(stage: Any) -> Any:
        if stage.name == name:
            raise SystemExit(9)
        return work(stage)

    return wrapped


def test_a_moved_run_goes_on(whole: Path, stores: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "whole", symlinks=True)
    ledger = json.loads((tmp_path / "whole" / "stages.json").read_text())
    ledger["stages"][2] = {"name": "other", "folder": "stages/03-other", "state": "running"}
    (tmp_path / "whole" / "stages.json").write_text(json.dumps(ledger))
    recipe = load(Recipe, recipe_of(stores, stores, name="whole"), [f"run.dir={tmp_path}"])
    assert train(recipe)["steps"] == 14
    assert_same_stages(whole, tmp_path / "whole")


@pytest.mark.parametrize("keeps_links", [True, False], ids=["moved", "copied with links followed"])
def test_a_finished_run_is_not_run_again_and_more_stages_may_follow(
    whole: Path, stores: Path, tmp_path: Path, keeps_links: bool
) -> None:
    shutil.copytree(whole, tmp_path / "whole", symlinks=keeps_links)
    before = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    path = recipe_of(tmp_path, stores, name="whole")
    assert train(load(Recipe, path))["steps"] == 14
    assert (tmp_path / "whole" / "metrics.jsonl").read_bytes() == before
    path.write_text(path.read_text() + "  - {name: more, steps: 2}\n")
    summary = train(load(Recipe, path))
    assert (summary["steps"], (tmp_path / "whole" / "final").readlink()) == (
        16,
        Path("stages/04-more/final"),
    )
    assert (tmp_path / "whole" / "final.old-1" / "config.json").exists() != keeps_links


def test_changes_of_finished_stages_are_refused_with_what_differs(
    whole: Path, stores: Path
) -> None:
    path = recipe_of(stores, stores, name="whole")
    changed = headway("train", str(path), "stages.0.optim.lr=0.5", "data.seq_len=32")
    assert (changed.returncode, "Traceback" in changed.stderr) == (2, False)
    assert "changed: optim.lr: 0.001 -> 0.5" in changed.stderr
    assert "other: data.seq_len: 64 -> 32" in changed.stderr
    with pytest.raises(ConfigError, match="stage 1: changed -> another"):
        train(load(Recipe, path, ["stages.0.name=another"]))
    # how, not what
    train(load(Recipe, path, ["data.workers=0", "log.every=3", "parallel.bucket_bytes=5000"]))
    plain = {key: value for key, value in read_yaml(path).items() if key != "stages"}
    (stores / "plain.yaml").write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match="stages"):
        train(load(Recipe, stores / "plain.yaml"))


def test_a_checkpoint_of_a_stage_can_be_gone_back_to(
    whole: Path, stores: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "whole", symlinks=True)
    recipe = load(Recipe, recipe_of(tmp_path, stores, name="whole"))
    train(
        recipe,
        resume=str(tmp_path / "whole" / "stages" / STAGES[1] / "checkpoints" / "step-00000004"),
    )
    assert_same_stages(whole, tmp_path / "whole")
    assert (tmp_path / "whole" / "stages" / f"{STAGES[2]}.old-1").is_dir()
    with pytest.raises(ConfigError, match="not a checkpoint of a stage"):
        train(recipe, resume=str(tmp_path))


def test_mistakes_in_the_last_stage_are_said_before_the_first_one_trains(
    stores: Path, tmp_path: Path
) -> None:
    path = recipe_of(tmp_path, stores)
    for override, message in (
        ("stages.2.optm.lr=1", "did you mean 'optim'"),
        (
            "stages.2.freeze=[layers.7]",
            r"stage other: freeze contains 'layers.7', which matches no parameter; blocks are numbered 0 to 1",
        ),
        ("stages.2.freeze=['*.q_porj.*']", r"close to it are '\*\.q_proj\.\*'"),
        ("stages.2.data.train=[nowhere/at/all.jsonl]", "stage other: .*nowhere"),
        ("stages.2.tokenizer=nowhere", "stage other: tokenizer is 'nowhere'"),
        ("stages.1.checkpoint.at_end=false", "starts from its last checkpoint"),
        ("stages.2.batch.micro_rows=3", "stage other: batch"),
        ("stages.1.run.name=x", "all stages share the run folder"),
    ):
        with pytest.raises(HeadwayError, match=message):
            train(load(Recipe, path, [override]))
        assert not (tmp_path / "run").exists()


def test_a_dry_run_tries_every_stage_and_writes_nothing(stores: Path, tmp_path: Path) -> None:
    tried = dry_run(load(Recipe, recipe_of(tmp_path, stores)))
    assert [stage["name"] for stage in tried["stages"]] == ["changed", "everything", "other"]
    assert tried["total_steps"] == 14
    assert not (tmp_path / "run").exists()


def test_show_prints_what_each_stage_comes_to_and_it_reads_back_the_same(
    stores: Path, tmp_path: Path
) -> None:
    path = recipe_of(tmp_path, stores)
    shown = headway("config", "show", str(path), "--json")
    stages = json.loads(shown.stdout)["stages"]
    assert [(stage["name"], stage["steps"], stage["optim"]["lr"], stage["seed"]) for stage in stages] == [
        ("changed", 4, 1e-3, 42), ("everything", 6, 5e-3, 43), ("other", 4, 1e-2, 44),
    ]  # fmt: skip
    assert (
        stages[2]["batch"]["tokens"],
        stages[2]["batch"]["rows"],
        stages[0]["batch"]["rows"],
    ) == (128, None, 4)
    (tmp_path / "shown.yaml").write_text(shown.stdout)
    assert compare_recipes(path, tmp_path / "shown.yaml") == []
    (tmp_path / "changed.yaml").write_text(path.read_text().replace("lr: 5e-3", "lr: 6e-3"))
    assert [difference.key for difference in compare_recipes(path, tmp_path / "changed.yaml")] == [
        "stages.everything.optim.lr"
    ]


def test_adapters_of_one_form_go_on_from_stage_to_stage_and_others_are_merged(
    stores: Path, tmp_path: Path
) -> None:
    path = recipe_of(tmp_path, stores)
    text = path.read_text()
    text = text[: text.index("stages:")]
    path.write_text(
        text + "stages:\n  - {name: base, steps: 1}\n  - {name: one, adapter: {rank: 2}}\n"
        "  - {name: two, adapter: {rank: 2}, optim: {lr: 0.0}, steps: 1}\n  - {name: three, adapter: null, optim: {lr: 0.0}, steps: 1}\n"
    )
    train(load(Recipe, path))
    stages = tmp_path / "run" / "stages"
    first = dict(open_of(stages / "02-one"))
    second = dict(open_of(stages / "03-two"))
    assert any(".lora_B" in name and float(value.abs().max()) > 0 for name, value in first.items())
    assert all(torch.equal(first[name], second[name]) for name in first)
    merged = dict(find_model(stages / "03-two" / "final").weights())
    plain = dict(find_model(stages / "04-three" / "final").weights())
    assert all(torch.allclose(merged[name], plain[name], atol=1e-6) for name in plain)
    assert not (stages / "04-three" / "final" / "adapter").exists()


def open_of(run: Path) -> Any:
    with open_checkpoint(run / "checkpoints" / "latest") as reader:
        return [(name, reader.weight(name)) for name in reader.names("master")]


@pytest.mark.slow
def test_two_ranks_go_through_the_stages_together(
    whole: Path, stores: Path, tmp_path: Path
) -> None:
    recipe = load(
        Recipe, recipe_of(tmp_path, stores), ["model.dropout=0", "stages.2.batch.micro_rows=1"]
    )
    alone = load(
        Recipe,
        recipe_of(stores, stores, name="serial"),
        ["model.dropout=0", "stages.2.batch.micro_rows=1"],
    )
    train(alone)
    summaries = start_processes(lambda: train(recipe), 2, timeout=120)
    assert summaries[0]["steps"] == summaries[1]["steps"] == 14
    for mine, other in zip(
        deterministic(tmp_path / "run" / "metrics.jsonl"),
        deterministic(stores / "serial" / "metrics.jsonl"),
        strict=True,
    ):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["stage"] == other["stage"]


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [1, 2])
def test_three_stages_killed_in_stage_two_resume_in_stage_two(
    ranks: int, stores: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    middle = 40
    kill_after = 4 + random.Random(seed).randrange(1, middle - 8)
    more = () if ranks == 1 else ("stages.2.batch.micro_rows=1", "--nproc", "2")
    undisturbed = headway(
        "train", str(recipe_of(tmp_path, stores, name="undisturbed", middle=middle)), *more
    )
    assert undisturbed.returncode == 0, undisturbed.stderr
    path = recipe_of(tmp_path, stores, name="killed", middle=middle)
    process = start_headway("train", str(path), *more)
    wait_for_step(tmp_path / "killed" / "metrics.jsonl", kill_after, process)
    if ranks == 1:
        process.send_signal(signal.SIGKILL)
    else:
        os.kill(
            next(beat.pid for beat in read_beats(tmp_path / "killed") if beat.rank == seed % 2),
            signal.SIGKILL,
        )
    assert process.wait(60) != 0, f"kill_after={kill_after} seed={seed}"
    states = [
        entry["state"]
        for entry in json.loads((tmp_path / "killed" / "stages.json").read_text())["stages"]
    ]
    assert states == ["done", "running", "waiting"], f"kill_after={kill_after} seed={seed}"
    resumed = headway("train", str(path), *more)
    assert resumed.returncode == 0, f"kill_after={kill_after} seed={seed}\n{resumed.stderr}"
    assert "stage 2 of 3" in resumed.stderr
    assert "stage 1 of 3" not in resumed.stderr
    assert_same_stages(tmp_path / "undisturbed", tmp_path / "killed")
