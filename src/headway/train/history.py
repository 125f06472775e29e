"""A run folder comes in, its curves go out: what evaluations show beside what they measure themselves."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from headway.eval.training import Point, Training
from headway.track.jsonl import MetricsReader
from headway.train.evaluate import AT_START
from headway.train.folder import METRICS

STRETCHES = 200
"""Points of a curve of training losses, at most."""


def read_training(run: Path) -> list[Training]:
    """The curves of a run, one for each of its stages; nothing for a folder that is no run."""
    if not (run / METRICS).is_file():
        return []
    records = MetricsReader(run / METRICS)
    return [
        _training(f"{run}: {stage}" if stage else str(run), some) for stage, some in groupby(records, lambda record: record.get("stage"))
    ]


def _training(name: str, records: Iterable[dict[str, Any]]) -> Training:
    """Keeps the losses and the validations of the records; the rest of each is let go, because there may be millions."""
    valid: dict[str, list[Point]] = {}
    losses: list[tuple[int, float | None]] = []
    for record in records:
        step = record.get("stage_step", record["step"])
        loss = record.get("loss")
        losses.append((step, loss if isinstance(loss, (int, float)) else None))
        for at, key in ((step - 1, AT_START), (step, "valid")):
            sets = record.get(key)
            for each, numbers in sets.items() if isinstance(sets, dict) else ():
                if isinstance(numbers, dict):
                    valid.setdefault(each, []).append(Point(at, numbers))
    return Training(name, len(losses), _curve(losses), valid)


def _curve(losses: list[tuple[int, float | None]]) -> list[tuple[int, float]]:
    size = -(-len(losses) // STRETCHES)
    curve: list[tuple[int, float]] = []
    for first in range(0, len(losses), size):
        some = losses[first : first + size]
        known = [loss for _, loss in some if loss is not None]
        if known:
            curve.append((some[-1][0], sum(known) / len(known)))
    return curve
