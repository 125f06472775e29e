"""A run folder comes in, its curves go out: what evaluations show beside what they measure themselves."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from headway.eval.training import Point, Training
from headway.track.jsonl import read_metrics
from headway.train.evaluate import AT_START
from headway.train.folder import METRICS

STRETCHES = 200
"""Points of a curve of training losses, at most."""


def read_training(run: Path) -> list[Training]:
    """The curves of a run, one for each of its stages; nothing for a folder that is no run."""
    if not (run / METRICS).is_file():
        return []
    records = read_metrics(run / METRICS)
    return [
        _training(f"{run}: {stage}" if stage else str(run), list(some))
        for stage, some in groupby(records, lambda record: record.get("stage"))
    ]


def _training(name: str, records: list[dict[str, Any]]) -> Training:
    valid: dict[str, list[Point]] = {}
    for record in records:
        step = record.get("stage_step", record["step"])
        for at, key in ((step - 1, AT_START), (step, "valid")):
            for each, numbers in record.get(key, {}).items():
                valid.setdefault(each, []).append(Point(at, numbers))
    return Training(name, len(records), _curve(records), valid)


def _curve(records: list[dict[str, Any]]) -> list[tuple[int, float]]:
    size = -(-len(records) // STRETCHES)
    curve: list[tuple[int, float]] = []
    for first in range(0, len(records), size):
        some = records[first : first + size]
        losses = [record["loss"] for record in some if record["loss"] is not None]
        if losses:
            curve.append((some[-1].get("stage_step", some[-1]["step"]), sum(losses) / len(losses)))
    return curve
