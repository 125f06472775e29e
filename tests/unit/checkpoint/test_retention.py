"""What stays: the newest, the best, the permanent, two snapshots. What is best follows from the validations in the manifests."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoint.best import (
    best_checkpoint,
    best_checkpoints,
    is_among_best,
    metric_value,
    require_metric,
)
from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import newest_good
from headway.checkpoint.retention import restore_links, retain, set_aside_later
from headway.checkpoint.save import save_checkpoint
from headway.errors import CheckpointError, ConfigError
from headway.parallel.box import StateTensor


def save(
    folder: Path, step: int, loss: float | None = None, *, snapshot: bool = False, **more: Any
) -> Path:
    valid = None if loss is None else {"web": {"loss": loss, "accuracy": 1 - loss, **more}}
    record = StateTensor("w", "master", (1,), [((0,), torch.full((1,), float(step)))])
    return save_checkpoint(folder, step, [record], {"valid": valid}, snapshot=snapshot)


def run(folder: Path, losses: list[float | None], config: CheckpointConfig) -> set[str]:
    """Save steps 10, 20, ... with these validation losses, retaining after each; what is left."""
    for number, loss in enumerate(losses, 1):
        save(folder, 10 * number, loss)
        retain(folder, config)
    return {path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink()}


def test_the_newest_two_and_the_best_two_stay_and_the_best_are_linked(tmp_path: Path) -> None:
    left = run(tmp_path, [0.9, 0.2, 0.5, 0.3, 0.6, 0.7], CheckpointConfig())
    assert left == {"step-00000020", "step-00000040", "step-00000050", "step-00000060"}
    assert str((tmp_path / "best-1").readlink()) == "step-00000020"
    assert str((tmp_path / "best-2").readlink()) == "step-00000040"
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert (best.path.name, best.step, best.value) == (
        "step-00000020",
        20,
        0.2,
    )


def test_more_of_an_accuracy_is_better_and_a_goal_may_say_so_of_anything(tmp_path: Path) -> None:
    run(tmp_path, [0.9, 0.2, 0.5], CheckpointConfig(keep_last=9))
    assert [
        checkpoint.step
        for checkpoint in best_checkpoints(tmp_path, CheckpointConfig(metric="accuracy"))
    ] == [20, 30, 10]
    assert [
        checkpoint.step
        for checkpoint in best_checkpoints(
            tmp_path, CheckpointConfig(metric="web/loss", goal="max")
        )
    ] == [10, 30, 20]


def test_fewer_best_ones_lose_their_links_and_go(tmp_path: Path) -> None:
    run(tmp_path, [0.1, 0.2, 0.5, 0.6], CheckpointConfig(keep_best=2))
    retain(tmp_path, CheckpointConfig(keep_best=0, keep_last=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000040"]


def test_every_kth_is_kept_for_good(tmp_path: Path) -> None:
    left = run(tmp_path, [None] * 9, CheckpointConfig(keep_last=1, keep_every=40))
    assert left == {"step-00000040", "step-00000080", "step-00000090"}


def test_two_snapshots_stay_beside_the_checkpoints_and_are_resumed_from(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_last=1)
    save(tmp_path, 100, 0.5)
    for step in (110, 120, 130):
        save(tmp_path, step, 0.1, snapshot=True)
        retain(tmp_path, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best-1",
        "latest",
        "snapshot-00000120",
        "snapshot-00000130",
        "step-00000100",
    ]
    assert (
        newest_good(tmp_path).path
        == tmp_path / "snapshot-00000130"
        == (tmp_path / "latest").resolve()
    )
    best = best_checkpoint(tmp_path)
    assert best is not None and best.step == 100, (
        "a snapshot does not stay, so it is never the best"
    )
    (tmp_path / "snapshot-00000130" / "manifest.json").unlink()
    newest = newest_good(tmp_path)
    assert newest.path == tmp_path / "snapshot-00000120"
    assert len(newest.rejected) == 1


def test_a_damaged_checkpoint_is_not_the_best(tmp_path: Path) -> None:
    run(tmp_path, [0.5, 0.1], CheckpointConfig())
    (tmp_path / "step-00000020" / "rank-00000.safetensors").write_bytes(b"")
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert best.step == 10


def test_going_back_drops_the_links_to_what_was_set_aside(tmp_path: Path) -> None:
    run(tmp_path, [0.5, 0.1], CheckpointConfig())
    set_aside_later(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best-2",
        "latest",
        "set-aside-step-00000020",
        "step-00000010",
    ]
    retain(tmp_path, CheckpointConfig())
    assert str((tmp_path / "best-1").readlink()) == "step-00000010"
    assert not (tmp_path / "best-2").is_symlink()


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("loss", 2.0),
        ("a/loss", 1.0),
        ("b/loss", 3.0),
        ("c/loss", None),
        ("acc", None),
        ("a/acc", 0.5),
        ("nan", None),
    ],
)
def test_a_metric_is_a_mean_over_sets_or_one_sets_number(metric: str, value: float | None) -> None:
    valid = {
        "a": {"loss": 1.0, "acc": 0.5, "nan": float("nan")},
        "b": {"loss": 3.0, "acc": float("inf")},
    }
    assert metric_value(valid, metric) == value


def test_a_number_whose_name_holds_a_slash_is_found_in_all_sets_or_in_one() -> None:
    valid = {"zh": {"rewards/accuracies": 0.5}, "a/b": {"rewards/accuracies": 0.7}}
    assert metric_value(valid, "rewards/accuracies") == pytest.approx(0.6)
    assert metric_value(valid, "zh/rewards/accuracies") == 0.5
    assert metric_value(valid, "a/b/rewards/accuracies") == 0.7
    require_metric(valid, "a/b/rewards/accuracies")
    with pytest.raises(
        ConfigError,
        match=r"metric is 'rewards/margins'; the validation reports rewards/accuracies for the sets zh, a/b",
    ):
        require_metric(valid, "rewards/margins")
    assert CheckpointConfig(metric="rewards/accuracies").higher_is_better
    assert CheckpointConfig(metric="zh/rewards/margins").higher_is_better


def test_what_would_be_among_the_best_is_known_before_it_is_saved(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_best=2)
    run(tmp_path, [0.5], config)
    assert is_among_best(0.9, tmp_path, config)
    run(tmp_path, [0.5, 0.3], config)
    assert is_among_best(0.4, tmp_path, config)
    assert not is_among_best(0.5, tmp_path, config)
    assert not is_among_best(None, tmp_path, config)


def test_of_equal_values_the_earlier_is_the_better(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_last=1, keep_best=1)
    assert run(tmp_path, [0.5, 0.3, 0.3, 0.3, 0.4], config) == {"step-00000020", "step-00000050"}
    assert [checkpoint.step for checkpoint in best_checkpoints(tmp_path, config)] == [20, 50]
    for step in (60, 70):
        save(tmp_path, step, 0.3)
    assert [checkpoint.step for checkpoint in best_checkpoints(tmp_path, config)] == [
        20,
        60,
        70,
        50,
    ]
    higher = CheckpointConfig(metric="accuracy")
    assert [checkpoint.step for checkpoint in best_checkpoints(tmp_path, higher)] == [
        20,
        60,
        70,
        50,
    ]


def test_a_manifest_is_read_once_however_often_checkpoints_are_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.checkpoint import best
    from headway.checkpoint.best import is_among_best

    config = CheckpointConfig(keep_last=1, keep_best=1, keep_every=1)
    for step in range(1, 9):
        save_checkpoint(tmp_path, step, [], {"valid": {"a": {"loss": float(step)}}})
    read: list[str] = []
    plain = best.read_summary
    monkeypatch.setattr(best, "read_summary", lambda path: (read.append(path.name), plain(path))[1])
    known = best.ManifestCache()
    assert retain(tmp_path, config, manifests=known) == []
    assert len(read) == 8
    assert (tmp_path / "best-1").readlink().name == "step-00000001"
    save_checkpoint(tmp_path, 9, [], {"valid": {"a": {"loss": 0.5}}})
    retain(tmp_path, config, manifests=known)
    assert read[8:] == ["step-00000009"]
    assert (tmp_path / "best-1").readlink().name == "step-00000009"
    assert not is_among_best(0.7, tmp_path, config, known)
    assert is_among_best(0.3, tmp_path, config, known)
    assert len(read) == 9
    (tmp_path / "step-00000009" / "manifest.json").write_bytes(b"damaged")
    retain(tmp_path, config, manifests=known)
    assert (tmp_path / "best-1").readlink().name == "step-00000001", (
        "what was changed is read again"
    )


def test_the_head_of_a_manifest_says_what_the_whole_says(tmp_path: Path) -> None:
    from headway.checkpoint.manifest import read_manifest, read_summary

    scalars = {
        "valid": {"a": {"loss": 1.5}},
        "odd": ['\n "shapes": {}', '\n "version": 7', {"files": []}],
        "deep": {"shapes": {"x": 1}},
    }
    path = save_checkpoint(tmp_path, 3, [], scalars)
    head = read_summary(path)
    whole = read_manifest(path)
    assert (head.step, head.run, head.scalars, head.files) == (
        whole.step,
        whole.run,
        whole.scalars,
        whole.files,
    )


def copied(folder: Path) -> Path:
    """A copy that follows links, as `cp -rL` or a file share makes it."""
    target = folder.with_name(f"{folder.name}-copy")
    shutil.copytree(folder, target, symlinks=False)
    return target


def test_links_that_a_copy_made_folders_of_are_links_again_and_saves_go_on(tmp_path: Path) -> None:
    run(tmp_path / "made", [0.9, 0.2, 0.5], CheckpointConfig())
    names = {
        path.name: path.readlink() for path in (tmp_path / "made").iterdir() if path.is_symlink()
    }
    folder = copied(tmp_path / "made")
    with pytest.raises(CheckpointError):
        save(folder, 40, 0.1)  # what happened at every save
    shutil.rmtree(folder / "step-00000040")
    assert restore_links(folder) == ["best-1", "best-2", "latest"]
    assert restore_links(folder) == []
    assert {name: (folder / name).readlink() for name in names} == names
    save(folder, 40, 0.1)
    retain(folder, CheckpointConfig())
    assert (
        str((folder / "latest").readlink())
        == str((folder / "best-1").readlink())
        == "step-00000040"
    )
    assert not list(folder.glob("set-aside-*"))


def test_a_copied_link_is_never_deleted_unless_its_checkpoint_is_there(tmp_path: Path) -> None:
    run(tmp_path / "made", [None, None], CheckpointConfig())
    alone = copied(tmp_path / "made")
    shutil.rmtree(alone / "step-00000020")
    assert restore_links(alone) == ["latest"]
    good = newest_good(alone)
    assert good.reader is not None
    assert good.reader.step == 20
    assert str((alone / "latest").readlink()) == "step-00000020"

    shutil.rmtree(tmp_path / "made-copy")
    other = copied(tmp_path / "made")
    manifest = other / "step-00000020" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    assert restore_links(other) == ["latest"]
    assert (other / "set-aside-latest" / "manifest.json").exists()
    assert not (other / "latest").exists()

    empty = tmp_path / "empty"
    (empty / "latest").mkdir(parents=True)
    assert restore_links(empty) == ["latest"]
    assert (empty / "set-aside-latest").is_dir()
    assert restore_links(tmp_path / "nowhere") == []
