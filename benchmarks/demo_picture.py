"""The picture on the front page, from the folder of `headway demo`: three runs, their losses and what DPO learned.

    python benchmarks/demo_picture.py --demo demo --out docs/images/demo-loss.png

In: metrics.jsonl of the demo's runs; out: one PNG below 150 KB. Invariant: every point is a number of those files.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

TRAIN, VALID, GREY = "#9fa8da", "#303f9f", "#616161"


def records(run: Path) -> list[dict[str, Any]]:
    """The steps of a run."""
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def smooth(values: list[float], width: int = 15) -> list[float]:
    """The mean of the last values, so that a curve of single batches can be read."""
    return [
        sum(values[max(0, at - width) : at + 1]) / len(values[max(0, at - width) : at + 1])
        for at in range(len(values))
    ]


def curve(axes: Axes, run: Path, title: str, key: str, label: str) -> None:
    """Training as a thin line, validation as points."""
    steps = [one for one in records(run) if one.get(key) is not None]
    axes.plot(
        [one["step"] for one in steps],
        smooth([one[key] for one in steps]),
        color=TRAIN,
        label="training",
    )
    checked = [
        (one["step"], next(iter(one["valid"].values()))) for one in records(run) if one.get("valid")
    ]
    points = [(step, found[key]) for step, found in checked if found.get(key) is not None]
    axes.plot(
        [step for step, _ in points],
        [value for _, value in points],
        "o-",
        color=VALID,
        markersize=4,
        label="held out",
    )
    first, last = points[0][1], points[-1][1]
    axes.set_title(
        f"{title}\n{label} {first:.2f} → {last:.2f}", fontsize=10, loc="left", color="#212121"
    )
    axes.set_xlabel("step", fontsize=9, color=GREY)
    axes.tick_params(labelsize=8, colors=GREY)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("demo"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/demo-loss.png"))
    given = parser.parse_args()
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    runs = given.demo / "runs"
    curve(left, runs / "pretrain", "Pre-training", "loss", "loss")
    curve(middle, runs / "sft", "Fine-tuning on questions", "loss", "loss on answers")
    curve(right, runs / "dpo", "DPO", "rewards/accuracies", "right answer preferred")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out, dpi=110, facecolor="white")
    print(f"{given.out}: {given.out.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
