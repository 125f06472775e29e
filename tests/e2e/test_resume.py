"""A run that was interrupted is, in the end, the run that was not."""

import random
import signal
from pathlib import Path

import pytest
from support.runs import (
    assert_same_run,
    deterministic,
    headway,
    make_stores,
    start_headway,
    wait_for_step,
    write_recipe,
)

from headway.config.load import load
from headway.train import train
from headway.train.config import Recipe

STEPS = 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished, undisturbed run, and the folder of its stores."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = write_recipe(folder, make_stores(folder, documents=30), name="whole", steps=STEPS)
    train(load(Recipe, recipe))
    return folder / "runs" / "whole", folder


def test_the_fixture_crosses_an_epoch_boundary_between_save_and_end(
    whole: tuple[Path, Path],
) -> None:
    records = deterministic(whole[0] / "metrics.jsonl")
    assert records[-1]["epoch"] >= 1
    assert len({record["epoch"] for record in records[5:]}) > 1


def test_a_run_killed_at_a_random_step_ends_bit_for_bit_like_the_undisturbed_one(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    # behind a checkpoint, and far from the end
    kill_after = random.Random(seed).randrange(7, STEPS - 10)
    run, folder = whole
    recipe = write_recipe(
        tmp_path, [folder / "store0", folder / "store1"], name="killed", steps=STEPS
    )
    process = start_headway("train", str(recipe))
    wait_for_step(tmp_path / "runs" / "killed" / "metrics.jsonl", kill_after, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = headway("train", str(recipe), afresh=True)
    assert resumed.returncode == 0, f"kill_after={kill_after} seed={seed}\n{resumed.stderr}"
    assert_same_run(run, tmp_path / "runs" / "killed", STEPS)


def test_a_run_asked_to_stop_saves_and_goes_on_where_it_was(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    run, folder = whole
    recipe = write_recipe(
        tmp_path, [folder / "store0", folder / "store1"], name="stopped", steps=STEPS
    )
    process = start_headway("train", str(recipe))
    wait_for_step(tmp_path / "runs" / "stopped" / "metrics.jsonl", 8, process)
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    stopped_at = len(deterministic(tmp_path / "runs" / "stopped" / "metrics.jsonl"))
    assert code == 143 or stopped_at == STEPS
    assert (tmp_path / "runs" / "stopped" / "checkpoints" / f"step-{stopped_at:08}").is_dir()
    assert headway("train", str(recipe)).returncode == 0
    assert_same_run(run, tmp_path / "runs" / "stopped", STEPS)


def test_resuming_from_a_given_checkpoint_repeats_what_followed(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    run, folder = whole
    recipe = load(
        Recipe,
        write_recipe(tmp_path, [folder / "store0", folder / "store1"], name="again", steps=STEPS),
    )
    train(recipe, resume=str(run / "checkpoints" / f"step-{STEPS - 5:08}"))
    assert (
        deterministic(tmp_path / "runs" / "again" / "metrics.jsonl")
        == deterministic(run / "metrics.jsonl")[-5:]
    )


def test_a_finished_run_is_not_trained_again(whole: tuple[Path, Path]) -> None:
    run, folder = whole
    before = (run / "metrics.jsonl").read_bytes()
    again = headway("train", str(folder / "whole.yaml"))
    assert again.returncode == 0
    assert "complete" in again.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    run, folder = whole
    recipe = write_recipe(
        tmp_path, [folder / "store0", folder / "store1"], name="damaged", steps=STEPS
    )
    train(load(Recipe, recipe))
    newest = (
        tmp_path
        / "runs"
        / "damaged"
        / "checkpoints"
        / f"step-{STEPS:08}"
        / "rank-00000.safetensors"
    )
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1
    newest.write_bytes(bytes(content))
    resumed = headway("train", str(recipe))
    assert resumed.returncode == 0, resumed.stderr
    assert "cannot be used" in resumed.stderr
    assert_same_run(run, tmp_path / "runs" / "damaged", STEPS)


def test_no_good_checkpoint_left_ends_with_one_line_and_exit_code_1(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    _, folder = whole
    recipe = write_recipe(tmp_path, [folder / "store0", folder / "store1"], name="ruined", steps=10)
    train(load(Recipe, recipe))
    for manifest in (tmp_path / "runs" / "ruined" / "checkpoints").glob("step-*/manifest.json"):
        manifest.write_text("{}")
    resumed = headway("train", str(recipe))
    assert resumed.returncode == 1
    assert "Traceback" not in resumed.stderr
    assert "--resume never" in resumed.stderr


def test_a_fixed_setting_may_not_change_and_a_free_one_is_said(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    _, folder = whole
    recipe = write_recipe(tmp_path, [folder / "store0", folder / "store1"], name="changed", steps=6)
    train(load(Recipe, recipe))
    refused = headway("train", str(recipe), "model.num_layers=3", "seed=9")
    assert refused.returncode == 2
    assert "model.num_layers: 2 -> 3" in refused.stderr
    assert "seed: 42 -> 9" in refused.stderr
    allowed = headway("train", str(recipe), "steps=8", "optim.lr=5e-3")
    assert allowed.returncode == 0, allowed.stderr
    assert "optim.lr: 0.01 -> 0.005" in allowed.stderr
    fresh = headway("train", str(recipe), "seed=9", "--resume", "never")
    assert fresh.returncode == 0
    assert (tmp_path / "runs" / "changed.old-1" / "metrics.jsonl").exists()


def test_prefetching_workers_do_not_change_the_batches(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    run, folder = whole
    recipe = load(
        Recipe,
        write_recipe(tmp_path, [folder / "store0", folder / "store1"], name="plain", steps=STEPS),
        ["data.workers=0"],
    )
    train(recipe)
    assert deterministic(tmp_path / "runs" / "plain" / "metrics.jsonl") == deterministic(
        run / "metrics.jsonl"
    )
