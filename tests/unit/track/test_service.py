"""Trackers in a process of their own: the numbers arrive, a resumed run continues its id, and a package that fails or hangs is dropped.

The packages are stand-ins that write down every call; tests/e2e/test_tracker_packages.py uses the real ones where they are installed.
"""

import json
import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from headway.config.kinds import kind_config
from headway.errors import ConfigError
from headway.runtime.optional import install_command
from headway.track.service import IDS, Service

RECORD: dict[str, Any] = {
    "step": 7,
    "loss": 3.25,
    "bad": float("nan"),
    "none": None,
    "valid": {"loss": 3.5},
    "time": {"tokens_per_second": 10.0},
}
STAND_IN = """
import json, os, time
print("a package may print anything")
def note(*call):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(call) + "\\n")
def init(**options):
    note("init", options["name"], sorted(options["config"]), options["resume"])
    if os.environ.get("TROUBLE") == "init raises": raise RuntimeError("no such project\\nsecond line")
    if os.environ.get("TROUBLE") == "init hangs": time.sleep(1000)
def log(values, step):
    note("log", step, values)
    if os.environ.get("TROUBLE") == "log raises": raise OSError("connection refused")
    if os.environ.get("TROUBLE") == "log hangs": time.sleep(1000)
    if os.environ.get("TROUBLE") == "log kills": os._exit(3)
def alert(title, text): note("alert", title, text)
def finish():
    note("finish")
    if os.environ.get("TROUBLE") == "finish hangs": time.sleep(1000)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for trackio on the path of this process and of its children; returns where it writes its calls."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "trackio.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("CALLS", str(tmp_path / "calls.jsonl"))
    return tmp_path / "calls.jsonl"


def tracker(run_dir: Path, seconds: float = 30.0) -> Service:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "recipe.yaml").write_text("optim: {lr: 0.1}\nsteps: 3\n")
    built: Any = kind_config("headway.track", "trackio").model_validate(
        {"kind": "trackio", "timeout_seconds": seconds}
    )
    return built.build(run_dir, "my-run")


def read(calls: Path) -> list[Any]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_numbers_events_and_the_id_arrive_and_a_resumed_run_continues_its_id(
    calls: Path, tmp_path: Path
) -> None:
    for step in (7, 8):
        service = tracker(tmp_path / "run")
        service.log(step, RECORD | {"step": step})
        service.event("spike", "the loss rose", step)
        service.close()
        service.close()
    received = read(calls)
    name = received[0][1]
    assert name.startswith("my-run-")
    assert json.loads((tmp_path / "run" / IDS).read_text()) == {"trackio:/headway": name}
    values = {"loss": 3.25, "valid/loss": 3.5, "tokens_per_second": 10.0}
    expected = [
        [
            ["init", name, ["optim", "steps"], "allow"],
            ["log", step, values],
            ["alert", "spike", f"step {step}: the loss rose"],
            ["finish"],
        ]
        for step in (7, 8)
    ]
    assert received == expected[0] + expected[1]
    assert "may print anything" in (tmp_path / "run" / "logs" / "tracker-trackio.log").read_text()


def test_a_signal_to_every_process_of_a_job_does_not_end_the_tracker(
    calls: Path, tmp_path: Path
) -> None:
    service = tracker(tmp_path / "run")
    service.log(7, RECORD)
    end = time.monotonic() + 30
    while time.monotonic() < end and not (calls.exists() and len(read(calls)) == 2):
        time.sleep(0.02)
    assert service._child is not None
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        os.kill(service._child.pid, number)
    service.log(8, RECORD | {"step": 8})
    service.close()
    assert [call[0] for call in read(calls)] == ["init", "log", "log", "finish"]


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("init raises", "RuntimeError: no such project"),
        ("log raises", "OSError: connection refused"),
        ("log kills", "its process ended with exit code 3"),
        ("init hangs", "it does not answer for 1 s"),
        ("finish hangs", "it did not finish in 1 s"),
    ],
)
def test_a_package_that_fails_or_hangs_is_dropped_with_one_report(
    trouble: str, reason: str, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUBLE", trouble)
    service = tracker(tmp_path / "run", 1.0 if trouble == "init hangs" else 30.0)
    told = list[str]()
    slowest = 0.0
    service.on_failure(told.append)
    end = time.monotonic() + 30
    step = 0
    while (
        not told
        and time.monotonic() < end
        and not (trouble == "finish hangs" and calls.exists() and '"log"' in calls.read_text())
    ):
        step += 1
        begun = time.perf_counter()
        service.log(step, RECORD)
        slowest = max(slowest, time.perf_counter() - begun)
        time.sleep(0.05)
    service.config = service.config.model_copy(update={"timeout_seconds": 1.0})
    begun = time.monotonic()
    service.close()
    assert time.monotonic() - begun < 4
    assert len(told) == 1
    assert reason in told[0]
    assert "training continues" in told[0]
    assert slowest < 1.0, "logging never waits for the package"
    assert service._child is not None and service._child.poll() is not None, "the process is gone"
    service.log(step + 1, RECORD)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"kind": "wandb"},
            f"track kind wandb needs Weights & Biases, which is not installed. Run {install_command('wandb')}.",
        ),
        ({"kind": "mlflow"}, install_command("mlflow")),
        ({"kind": "swanlab"}, install_command("swanlab")),
        ({"kind": "trackio"}, install_command("trackio")),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.runtime.optional.is_installed", lambda package: False)
    config: Any = kind_config("headway.track", settings["kind"]).model_validate(settings)
    with pytest.raises(ConfigError) as error:
        config.check()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "wandb", "mode": "online"}, "WANDB_API_KEY is not set"),
        ({"kind": "swanlab", "mode": "online"}, "SWANLAB_API_KEY is not set"),
        ({"kind": "trackio", "space": "me/curves"}, "HF_TOKEN is not set"),
        ({"kind": "mlflow"}, "MLFLOW_TRACKING_URI is not set"),
        ({"kind": "mlflow", "uri": "http://me:secret@host:5000"}, "holds a user name or password"),
    ],
)
def test_secrets_come_from_the_environment_alone(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headway.runtime.optional.is_installed", lambda package: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    config: Any = kind_config("headway.track", settings["kind"]).model_validate(settings)
    with pytest.raises(ConfigError, match=words) as error:
        config.check()
    assert "secret" not in str(error.value)
