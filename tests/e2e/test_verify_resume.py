"""The proof of exact resume holds where it should, and says tensor by tensor where it does not."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.ranks import start_processes
from support.runs import headway, make_stores, write_recipe

from headway.cli.verify import print_certificate
from headway.config.load import load
from headway.errors import ConfigError
from headway.launch.train import kill_after
from headway.train import train
from headway.train.config import Recipe
from headway.workflows.resume_proof import Trial, prove_resume

pytestmark = pytest.mark.slow


def forked(arguments: list[str], nproc: int | None, kill_at: int | None) -> None:
    """Train in processes forked from this one, which has everything loaded."""
    recipe = load(Recipe, Path(arguments[0]), arguments[1:])
    if kill_at is None and nproc in (None, 1):
        train(recipe)
    elif kill_at is None:
        start_processes(lambda: train(recipe), nproc or 1)
    elif nproc in (None, 1):
        child = multiprocessing.get_context("fork").Process(
            target=lambda: train(recipe, hook=kill_after(kill_at))
        )
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
    else:
        with pytest.raises(AssertionError, match=r"rank 0|did not finish"):
            start_processes(lambda: train(recipe, hook=kill_after(kill_at)), nproc or 1)


def proof(folder: Path, *overrides: str, trainer: Any = forked, **changes: Any) -> dict[str, Any]:
    recipe = write_recipe(folder, make_stores(folder), steps=12)
    arguments = (str(recipe), *overrides)
    trial = Trial(arguments, **{"steps": 10, "kill_at": 6, **changes})
    return prove_resume(trial, load(Recipe, recipe, list(overrides)), folder / "trial", trainer)


def test_a_killed_run_is_certified_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = proof(tmp_path)
    assert certificate["holds"]
    assert certificate["rule"] == "bit for bit"
    assert certificate["unequal"] == []
    assert certificate["killed_after_step"] == 6
    assert certificate["resumed_from_step"] == 3
    assert certificate["whole"] == certificate["resumed"]
    assert certificate["whole"]["next_batch_documents"]
    print_certificate(certificate)
    assert "the resume is exact" in capsys.readouterr().out


@pytest.mark.drill
def test_another_number_of_ranks_keeps_the_order_and_stays_within_the_bound(tmp_path: Path) -> None:
    certificate = proof(tmp_path, "batch.micro_rows=1", nproc=2, resume_nproc=1)
    assert certificate["holds"]
    assert certificate["same_sample_order"]
    assert certificate["parameter_difference"] <= certificate["bound"] == 1e-3


def test_a_resume_that_differs_is_told_tensor_by_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(arguments: list[str], nproc: int | None, kill_at: int | None) -> None:
        again = (tmp_path / "trial" / "killed").exists()
        forked([*arguments, *(["optim.lr=2e-2"] if again else [])], nproc, kill_at)

    certificate = proof(tmp_path, trainer=changed)
    assert not certificate["holds"]
    assert certificate["same_sample_order"]
    names = {(tensor["name"], tensor["role"]) for tensor in certificate["unequal"]}
    assert ("model.norm.weight", "master") in names
    assert ("model.norm.weight", "exp_avg") in names
    print_certificate(certificate)
    said = capsys.readouterr().out
    assert "NOT the same run" in said
    assert "model.norm.weight" in said
    assert "DIFFERS" in said


@pytest.mark.parametrize(
    ("kill_at", "resumed_from"),
    [
        pytest.param(8, 7, id="in the second stage"),
        pytest.param(3, 2, id="in the first", marks=pytest.mark.drill),
    ],
)
def test_a_recipe_in_stages_is_certified_stage_by_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kill_at: int, resumed_from: int
) -> None:
    recipe = write_recipe(tmp_path, make_stores(tmp_path))
    with recipe.open("a") as file:
        file.write(
            "stages:\n  - {name: one, epochs: 1, checkpoint: {every: 100}}\n  - {name: two, freeze: [embeddings], steps: 99}\n"
        )
    trial = Trial(
        (str(recipe), f"checkpoint.to={tmp_path / 'elsewhere'}"),
        steps=5,
        kill_at=kill_at,
        num_stages=2,
    )
    certificate = prove_resume(trial, load(Recipe, recipe), tmp_path / "trial", forked)
    assert certificate["holds"]
    assert certificate["rule"] == "bit for bit"
    assert certificate["unequal"] == []
    assert (certificate["killed_after_step"], certificate["resumed_from_step"]) == (
        kill_at,
        resumed_from,
    )
    assert [stage["name"] for stage in certificate["stages"]] == ["01-one", "02-two"]
    assert all(s["whole"] == s["resumed"] for s in certificate["stages"])
    assert not (tmp_path / "elsewhere").exists(), "the user's store is left alone"
    print_certificate(certificate)
    assert "02-two" in capsys.readouterr().out


def test_a_kill_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="--steps 9 x 2 stages"):
        Trial((), steps=9, kill_at=18, num_stages=2)
    with pytest.raises(ConfigError, match="--kill-at is 9"):
        Trial((), steps=9, kill_at=9)


@pytest.mark.drill
def test_the_verb_prints_a_certificate(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, make_stores(tmp_path), steps=12)
    done = headway(
        "verify", "resume", str(recipe), "--steps", "8", "--kill-at", "5", "--json", timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["holds"]
    assert os.listdir(tmp_path / "runs") == ["cache"], (
        "nothing but the data cache lies in the folder of runs"
    )
    mistaken = headway(
        "verify", "resume", str(recipe), "--steps", "8", "--kill-at", "5", "model.hidden_size=7"
    )
    assert mistaken.returncode == 2
    assert "Traceback" not in mistaken.stderr
