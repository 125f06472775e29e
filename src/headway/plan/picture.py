"""The picture of a plan: memory bars of every pipeline rank, and the step in time. A `Plan` comes
in, a file goes out; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.plan.compute import PassSeconds
from headway.plan.memory import GIB
from headway.plan.result import Plan
from headway.plan.traffic import stages_of_job
from headway.runtime.optional import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "F": "#4c78a8",
    "B": "#f58518",
    "I": "#f58518",
    "W": "#e45756",
    "data": "#72b7b2",
    "update": "#54a24b",
}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "data": "exchange",
    "update": "update",
}
SUFFIXES = (".png", ".svg", ".pdf")
MAX_MICROBATCHES = 16
"""Microbatches that are shown of a step without a pipeline."""
MAX_NUMBERED_ACTIONS = 400
"""Beyond this many, bars are too narrow for the number of their microbatch."""


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the picture."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"--plot is {str(path)!r}; its name must end in {', '.join(SUFFIXES[:-1])} or "
            f"{SUFFIXES[-1]}."
        )
    if not path.resolve().parent.is_dir():
        raise ConfigError(
            f"--plot is {str(path)!r}; there is no folder {path.resolve().parent}. Create it, or "
            "give another path."
        )
    need("matplotlib", "--plot")
    from matplotlib.figure import Figure

    layout = plan.job.layout
    ranks = layout.pipeline
    figure = Figure(figsize=(12, 4.5 + 0.25 * ranks), layout="constrained")
    bars, time = figure.subplots(2, 1, height_ratios=[1, 1.2])
    _draw_memory(bars, plan)
    _draw_time(time, plan)
    job = plan.job
    figure.suptitle(
        f"{layout.world} x {job.gpu.name}: {layout.settings()}\n"
        f"{job.rows} rows x {job.accumulate} microbatches, {plan.per_gpu:,.0f} tokens/s per GPU, "
        f"bubble {100 * plan.bubble:.1f} %",
        fontsize=10,
    )
    figure.savefig(path)


def _draw_memory(axes: Axes, plan: Plan) -> None:
    """A bar for each pipeline rank, its kinds of memory one after another."""
    left = [0.0] * len(plan.by_rank)
    for kind in plan.memory.kinds:
        sizes = [memory.kinds[kind] / GIB for memory in plan.by_rank]
        if not any(sizes):
            continue
        axes.barh(range(len(sizes)), sizes, left=left, label=kind)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    limit = plan.job.usable_bytes / GIB
    axes.axvline(limit, color="black", linestyle="--", label=f"usable, {limit:.0f} GiB")
    _name_ranks(axes, len(left))
    axes.set_xlabel("GiB")
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.28))


def _name_ranks(axes: Axes, ranks: int) -> None:
    """One row for each pipeline rank, the first on top."""
    names = ["every rank"]
    if ranks > 1:
        names = [f"pipeline rank {rank}" for rank in range(ranks)]
    axes.set_yticks(range(ranks), names)
    axes.invert_yaxis()


def _draw_time(axes: Axes, plan: Plan) -> None:
    """The actions of each pipeline rank, then the exchange of gradients and the update."""
    used: set[str] = set()

    def bar(rank: int, kind: str, start: float, seconds: float, text: str = "") -> None:
        # One bar of each kind has a label: the legend has a line for every label.
        label: dict[str, Any] = {}
        if kind not in used:
            label = {"label": NAMES[kind]}
        used.add(kind)
        axes.barh(
            rank,
            1000 * seconds,
            left=1000 * start,
            color=COLOURS[kind],
            edgecolor="white",
            linewidth=0.4,
            **label,
        )
        if text:
            axes.text(
                1000 * (start + seconds / 2), rank, text, ha="center", va="center", fontsize=6
            )

    if plan.timeline is None:
        end = _one_rank(plan, bar)
        ranks = 1
    else:
        ranks = plan.timeline.ranks
        has_numbers = len(plan.timeline.actions) <= MAX_NUMBERED_ACTIONS
        for timed in plan.timeline.actions:
            number = str(timed.action.microbatch) if has_numbers else ""
            bar(timed.rank, timed.action.kind, timed.start, timed.end - timed.start, number)
        end = plan.timeline.seconds
    # Only the part that computing does not hide; it is drawn after the last action.
    exchange = 0.0
    if "data" in plan.traffic:
        exchange = plan.traffic["data"].exposed
    for rank in range(ranks):
        if exchange:
            bar(rank, "data", end, exchange)
        bar(rank, "update", end + exchange, plan.update_seconds)
    _name_ranks(axes, ranks)
    axes.set_xlabel("ms")
    axes.legend(fontsize=7, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.22))


def _one_rank(plan: Plan, bar: Any) -> float:
    """Microbatches one after another, the first ones; returns when they end."""
    whole = sum(stages_of_job(plan.job), PassSeconds())
    start = 0.0
    for _ in range(min(plan.job.accumulate, MAX_MICROBATCHES)):
        bar(0, "F", start, whole.forward)
        bar(0, "B", start + whole.forward, whole.backward)
        start += whole.total
    return start
