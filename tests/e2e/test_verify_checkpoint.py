"""`headway verify checkpoint` finds what is wrong and names it; each file damaged in turn is found and the checkpoint before it is used."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.runs import headway, make_stores, write_recipe

from headway.checkpoint.load import newest_good, open_checkpoint
from headway.checkpoint.save import save_checkpoint
from headway.config.load import load
from headway.infer.check_checkpoint import check_checkpoint
from headway.parallel.box import StateTensor
from headway.train import train
from headway.train.config import Recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(load(Recipe, write_recipe(folder, make_stores(folder), steps=10)))
    return folder / "runs" / "run"


def test_a_good_checkpoint_is_called_good_and_generates(run: Path) -> None:
    report = check_checkpoint(run)
    assert report.problems == []
    assert report.step == 10
    assert len(report.token_ids) == 8
    assert report.tensors > 50
    assert report.token_ids == check_checkpoint(run / "checkpoints" / "latest").token_ids


def test_the_command_ends_with_1_and_lists_what_is_wrong(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "c", symlinks=True)
    path = tmp_path / "c" / "step-00000010" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 8
    path.write_bytes(bytes(content))
    done = headway("verify", "checkpoint", str(tmp_path / "c" / "step-00000010"), "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert not report["good"]
    assert len(report["problems"]) == 1
    assert "rank-00000.safetensors: damaged" in report["problems"][0]


def changed(run: Path, folder: Path, name: str, value: torch.Tensor | None) -> Path:
    """The same checkpoint with one tensor changed, or left out."""
    reader = open_checkpoint(run / "checkpoints" / "latest")
    records = []
    for tensor_name in reader.names():
        for role in reader.roles(tensor_name):
            tensor = (
                reader.read(tensor_name, role) if tensor_name != name or role != "master" else value
            )
            if tensor is not None:
                records.append(
                    StateTensor(
                        tensor_name, role, tuple(tensor.shape), [((0,) * tensor.dim(), tensor)]
                    )
                )
    return save_checkpoint(folder, 10, records, reader.scalars)


def test_numbers_that_are_not_finite_and_shapes_that_do_not_fit_are_named(
    run: Path, tmp_path: Path
) -> None:
    weight = open_checkpoint(run / "checkpoints" / "latest").weight("model.norm.weight")
    spoiled = weight.clone()
    spoiled[3] = float("nan")
    (problem,) = check_checkpoint(
        changed(run, tmp_path / "nan", "model.norm.weight", spoiled)
    ).problems
    assert (
        f"master of model.norm.weight has 1 of {weight.numel()} values that are not finite"
        in problem
    )
    (problem,) = check_checkpoint(
        changed(run, tmp_path / "shape", "model.norm.weight", weight[:-1])
    ).problems
    assert "model.norm.weight has shape" in problem
    assert any(
        "model.norm.weight" in problem
        for problem in check_checkpoint(
            changed(run, tmp_path / "gone", "model.norm.weight", None)
        ).problems
    )


def test_each_file_damaged_in_turn_is_named_and_the_one_before_is_used(
    run: Path, tmp_path: Path
) -> None:
    for number, name in enumerate(["rank-00000.safetensors", "manifest.json"]):
        for how in ("truncated", "flipped", "deleted"):
            folder = tmp_path / f"{number}-{how}"
            shutil.copytree(run / "checkpoints", folder, symlinks=True)
            path = folder / "step-00000010" / name
            content = path.read_bytes()
            if how == "deleted":
                path.unlink()
            else:
                middle = len(content) // 2
                flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
                path.write_bytes(content[:-7] if how == "truncated" else flipped)
            problems = check_checkpoint(folder / "step-00000010").problems
            assert problems and all(name in problem for problem in problems), (name, how, problems)
            newest = newest_good(folder)
            assert newest.path == folder / "step-00000005"
            assert name in newest.rejected[0][1]
