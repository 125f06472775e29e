"""Every number that a tracker shows is the number in metrics.jsonl: all metrics of all steps, not only the loss.

TensorBoard stores 32-bit floats, so its numbers are those of metrics.jsonl rounded to 32 bits; Weights & Biases and MLflow keep 64.
The packages that are not installed are skipped by name.
"""

import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.test_tracker_packages import WANDB_READER
from support.setting_runs import BASE

from headway.config.load import load
from headway.runtime.optional import is_installed
from headway.track.base import flatten
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

pytestmark = pytest.mark.slow
Numbers = dict[int, dict[str, float]]
STEPS = 4


def recorded(run: Path) -> Numbers:
    """The numbers of metrics.jsonl by step and name; what is not a finite number has no point in a curve."""
    numbers: Numbers = {}
    for record in read_metrics(run / "metrics.jsonl"):
        flat = flatten(record)
        numbers[record["step"]] = {
            name: float(v)
            for name, v in flat.items()
            if isinstance(v, (int, float)) and math.isfinite(v)
        }
    return numbers


def rounded(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def in_tensorboard(run: Path, _: Path) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    numbers: Numbers = {}
    for name in events.Tags()["scalars"]:
        for point in events.Scalars(name):
            numbers.setdefault(point.step, {})[name] = point.value
    return numbers


def in_wandb(run: Path, _: Path) -> Numbers:
    command = [
        sys.executable,
        "-P",
        "-c",
        WANDB_READER,
        *sorted(map(str, run.glob("wandb/offline-run-*/run-*.wandb"))),
    ]
    rows = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    points = [row for row in rows if "loss" in row]
    return {
        row["step"]: {
            name: float(v) for name, v in row.items() if name != "step" and not name.startswith("_")
        }
        for row in points
    }


MLFLOW_READER = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("headway").experiment_id])
for name in run.data.metrics:
    for point in client.get_metric_history(run.info.run_id, name):
        print(json.dumps([point.step, name, point.value]))
"""


def in_mlflow(_: Path, store: Path) -> Numbers:
    command = [sys.executable, "-P", "-c", MLFLOW_READER, f"sqlite:///{store}"]
    numbers: Numbers = {}
    for line in subprocess.check_output(command, text=True).splitlines():
        step, name, value = json.loads(line)
        numbers.setdefault(step, {})[name] = value
    return numbers


CASES: dict[str, tuple[str, Callable[[Path, Path], Numbers], Callable[[float], float]]] = {
    "tensorboard": ("{kind: tensorboard}", in_tensorboard, rounded),
    "wandb": ("{kind: wandb}", in_wandb, float),
    "mlflow": ("{kind: mlflow, uri: 'sqlite:///STORE'}", in_mlflow, float),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_tracker_shows_every_number_of_metrics_jsonl(kind: str, tmp_path: Path) -> None:
    if not is_installed(kind):
        pytest.skip(f"{kind} is not installed")
    tracker, read, stored = CASES[kind]
    store = tmp_path / "mlflow.db"
    settings = [
        f"steps={STEPS}",
        f"run.dir={tmp_path}",
        "run.name=r",
        "log.every=1",
        "eval.every=2",
        "data.valid.fraction=0.1",
    ]
    recipe = load(
        Recipe, None, [*BASE, *settings, f"track=[{tracker.replace('STORE', str(store))}]"]
    )
    train(recipe)
    expected = recorded(recipe.run.folder)
    assert list(expected) == list(range(1, STEPS + 1))
    assert len(expected[2]) > 25
    assert any("valid" in name for name in expected[2])
    shown = read(recipe.run.folder, store)
    assert shown == {
        step: {name: stored(value) for name, value in numbers.items()}
        for step, numbers in expected.items()
    }
