"""The training-curve picture: every curve is in it, rolled-back steps are drawn once, and a service keeps it with the other files."""

import json
import os
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headway.config.kinds import kind_config
from headway.track.base import KeepsFiles
from headway.track.curve import CURVE, MOST_POINTS, TrainingCurve, write_curve
from headway.track.service import ServiceConfig

STAND_IN = """
import json, os
class Info:
    run_id, experiment_id = "ab12", "1"
class Run:
    info = Info
class MlflowClient:
    def __init__(self, uri): self.uri = uri
    def __getattr__(self, name):
        def call(*given, **named):
            with open(os.environ["CALLS"], "a") as file:
                file.write(json.dumps([name, [str(one) for one in given]]) + "\\n")
            if name == "log_artifact" and given[1].endswith("recipe.yaml"): raise OSError("the disk is full")
            return Info if name == "get_experiment_by_name" else Run
        return call
"""


def numbers(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "loss": 1 / step, "lr": 0.1, "grad_norm": None, **more}


def test_every_curve_is_drawn_and_rolled_back_steps_once(tmp_path: Path) -> None:
    valid = {"valid": {"loss": 2.0, "text_to_image/recall_at_1": 0.5, "scale": 14.0}}
    records = [
        numbers(1),
        numbers(2, loss=9.0),
        numbers(3, loss=8.0),
        numbers(2, valid=valid),
        numbers(3, loss=float("nan")),
    ]
    curve = TrainingCurve(records)
    assert curve.panels["loss"]["training"].points == [(1, 1.0), (2, 0.5)]
    assert curve.panels["loss"]["valid"].points == [(2, 2.0)]
    assert not curve.panels["gradient norm"]
    assert {name: curve.points for name, curve in curve.panels["score"].items()} == {
        "text_to_image/recall_at_1": [(2, 0.5)]
    }
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records[:4]) + "{damaged\n"
    )
    assert write_curve(tmp_path / "metrics.jsonl", "a <run>") == tmp_path / CURVE
    texts = [
        element.text
        for element in ElementTree.parse(tmp_path / CURVE).iter()
        if element.text and element.text.strip()
    ]
    assert texts[0] == "a <run>"
    assert {
        "training: 0.5",
        "valid: 2",
        "text_to_image/recall_at_1: 0.5",
        "lr: 0.1",
    } <= set(texts)
    assert write_curve(tmp_path / "nowhere/metrics.jsonl", "x") is None


def test_a_long_run_keeps_its_memory_small() -> None:
    curve = TrainingCurve(numbers(step) for step in range(1, 10 * MOST_POINTS))
    points = curve.panels["loss"]["training"].points
    assert MOST_POINTS // 2 <= len(points) <= MOST_POINTS
    assert points[0][0] == 1
    assert points[-1][0] > 9 * MOST_POINTS
    assert [step for step, _ in points] == sorted({step for step, _ in points})


def test_mlflow_keeps_the_files_of_a_finished_run_and_a_failed_upload_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packages = tmp_path / "packages/mlflow"
    run = tmp_path / "run"
    packages.mkdir(parents=True)
    (packages / "__init__.py").write_text(textwrap.dedent(STAND_IN))
    (packages / "entities.py").write_text("Param = Metric = lambda *given: given\n")
    monkeypatch.syspath_prepend(str(packages.parent))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(packages.parent), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("CALLS", str(tmp_path / "calls.jsonl"))
    (run / "final").mkdir(parents=True)
    for name in (CURVE, "recipe.yaml", "summary.json", "answers.html"):
        (run / name).write_text("{}")
    config = kind_config("headway.track", "mlflow").model_validate(
        {"kind": "mlflow", "uri": "http://127.0.0.1:1", "weights": True}
    )
    assert isinstance(config, ServiceConfig)
    assert not config.model_copy(update={"artifacts": False, "weights": False}).files_of(run)
    tracker = config.build(run, "r")
    assert isinstance(tracker, KeepsFiles)
    tracker.log(1, {"step": 1, "loss": 1.0})
    tracker.keep_files(run)
    tracker.close()
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    kept = {
        Path(arguments[1]).name: arguments[2]
        for name, arguments in calls
        if name in ("log_artifact", "log_artifacts")
    }
    assert kept == {
        CURVE: "plots",
        "recipe.yaml": "config",
        "summary.json": "metrics",
        "answers.html": "reports",
        "final": "model",
    }
    assert calls[-1] == ["set_terminated", ["ab12", "FINISHED"]]
    assert "recipe.yaml is not kept there: OSError: the disk is full" in caplog.text
