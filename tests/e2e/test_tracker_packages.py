"""Whole runs with the real packages of trackers, where they are installed: what each has afterwards is what metrics.jsonl has.

A run of four steps is resumed to six; the service continues the same run. MLflow is asked over HTTP on a server, Weights & Biases
by reading its offline files back, Trackio by its database, SwanLab by its files.
"""

import json
import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ranks import free_port
from support.setting_runs import BASE

from headway.config.load import load
from headway.runtime.optional import is_installed
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

WANDB_READER = """
import json, sys
from wandb.proto import wandb_internal_pb2 as pb
for path in sys.argv[1:]:  # after 7 bytes, blocks of 32 KiB: checksum (4), length (2), kind (1: whole, 2, 3, 4: parts)
    data, at, record = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found, record = pb.Record.FromString(record), b""
            if found.HasField("history"):
                print(json.dumps({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in found.history.item}))
            if found.HasField("run"):
                print(json.dumps({"id": found.run.run_id, "tags": list(found.run.tags)}))
"""


def run_twice(folder: Path, tracker: str) -> tuple[Path, dict[int, float], str]:
    """Train four steps, then two more; returns the run folder, the losses, and the id in trackers.json, the same after both."""
    ids: list[dict[str, str]] = []
    for steps in (4, 6):
        settings = [
            *BASE,
            f"steps={steps}",
            f"run.dir={folder}",
            "run.name=r",
            "log.every=1",
            f"track=[{tracker}]",
        ]
        recipe = load(Recipe, None, settings)
        train(recipe)
        ids.append(json.loads((recipe.run.folder / "trackers.json").read_text()))
    assert ids[0] == ids[1]
    assert len(ids[0]) == 1
    events = (recipe.run.folder / "events.jsonl").read_text()
    assert "tracker_failure" not in events, events
    losses = {
        record["step"]: record["loss"]
        for record in read_metrics(recipe.run.folder / "metrics.jsonl")
    }
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    return recipe.run.folder, losses, next(iter(ids[0].values()))


@pytest.mark.slow
def test_wandb_offline_files_hold_the_same_numbers(tmp_path: Path) -> None:
    if not is_installed("wandb"):
        pytest.skip("wandb is not installed")
    run, losses, identity = run_twice(tmp_path, "{kind: wandb, tags: [a, b]}")
    command = [
        sys.executable,
        "-P",
        "-c",
        WANDB_READER,
        *sorted(map(str, run.glob("wandb/offline-run-*/run-*.wandb"))),
    ]
    history = [
        json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()
    ]
    assert {row["step"]: row["loss"] for row in history if "loss" in row} == losses
    assert {row["id"] for row in history if "id" in row} == {identity}
    assert any(row.get("tags") == ["a", "b"] for row in history)


def test_trackio_has_the_same_numbers(tmp_path: Path) -> None:
    if not is_installed("trackio"):
        pytest.skip("trackio is not installed")
    _, losses, name = run_twice(
        tmp_path / "runs", f"{{kind: trackio, folder: {tmp_path / 'trackio'}}}"
    )
    with sqlite3.connect(tmp_path / "trackio" / "headway.db") as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by step"
        ).fetchall()
    assert {row[0] for row in rows} == {name}
    assert {
        step: json.loads(values)["loss"] for _, step, values in rows if "loss" in json.loads(values)
    } == losses


def test_swanlab_writes_files_of_one_run(tmp_path: Path) -> None:
    if not is_installed("swanlab"):
        pytest.skip("swanlab is not installed")
    run, losses, identity = run_twice(tmp_path, "swanlab")
    files = sorted(run.glob(f"swanlab/*/run-{identity}.swanlab"))
    assert len(files) == 2
    assert losses
    assert all(b"loss" in file.read_bytes() for file in files)


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    command = shutil.which("mlflow", path=str(Path(sys.executable).parent)) or shutil.which(
        "mlflow"
    )
    if not is_installed("mlflow") or command is None:
        pytest.skip("mlflow with its server is not installed")
    port = free_port()
    store = f"sqlite:///{tmp_path}/mlflow.db"
    artifacts = str(tmp_path / "artifacts")
    server = subprocess.Popen(
        [
            command,
            "server",
            "--port",
            str(port),
            "--backend-store-uri",
            store,
            "--default-artifact-root",
            artifacts,
            "--workers",
            "1",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def ask(address: str, **content: Any) -> Any:
    data = json.dumps(content).encode() if content else None
    with urllib.request.urlopen(
        urllib.request.Request(address, data, {"Content-Type": "application/json"}), timeout=30
    ) as answer:
        return json.loads(answer.read())


@pytest.mark.drill  # the server takes longer to start than the run
def test_mlflow_server_has_the_same_numbers(mlflow_server: str, tmp_path: Path) -> None:
    _, losses, identity = run_twice(
        tmp_path / "runs", f"{{kind: mlflow, uri: '{mlflow_server}', experiment: mine}}"
    )
    api = f"{mlflow_server}/api/2.0/mlflow"
    history = ask(f"{api}/metrics/get-history?run_id={identity}&metric_key=loss")["metrics"]
    assert {int(point.get("step", 0)): point["value"] for point in history} == losses
    run = ask(f"{api}/runs/get?run_id={identity}")["run"]
    assert run["info"]["status"] == "FINISHED"
    assert {param["key"]: param["value"] for param in run["data"]["params"]}[
        "model.hidden_size"
    ] == "16"
    assert any(tag["key"] == "headway.event.finish" for tag in run["data"]["tags"])
    places = [
        ask(f"{api}/artifacts/list?run_id={identity}&path={folder}")["files"]
        for folder in ("plots", "config", "metrics")
    ]
    kept = [file["path"] for files in places for file in files]
    assert kept == [
        "plots/training_curve.svg",
        "config/environment.json",
        "config/recipe.yaml",
        "metrics/summary.json",
    ]
