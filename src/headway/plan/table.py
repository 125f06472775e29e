"""A plan as tables for people: a `Plan` comes in, titles with rows of text go out. Nothing imports
torch."""

from __future__ import annotations

from dataclasses import dataclass

from headway.model.layout import active_parameters
from headway.plan.hardware import smallest_card
from headway.plan.memory import amount
from headway.plan.parameters import count_parameters, parts_of
from headway.plan.result import Plan


@dataclass(frozen=True)
class TextTable:
    """A title, the names of columns, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(plan: Plan) -> list[TextTable]:
    """The tables of one plan, in the order in which they are printed; empty ones are left out."""
    sections = [_model(plan), _layout(plan), _memory(plan), _flops(plan)]
    if plan.traffic:
        sections.append(_traffic(plan))
    if plan.job.layout.pipeline > 1:
        sections.append(_pipeline(plan))
    sections.append(_speed(plan))
    return sections


def _model(plan: Plan) -> TextTable:
    job = plan.job
    counts = count_parameters(job.model, job.all_specs, job.trains)
    whole = counts.on_stages([range(job.model.num_layers)], first=True, last=True)
    rows = [("all", f"{whole.total:,}"), ("trained", f"{whole.trained:,}")]
    # Without experts every parameter is active, and the row would repeat the first one.
    if job.model.experts is not None:
        rows.insert(1, ("active for one token", f"{active_parameters(job.model):,}"))
    rows += [(part, f"{size:,}") for part, size in parts_of(counts).items()]
    # The rank that decides whether the run fits.
    here = job.parameters_of(plan.worst_rank).total
    return TextTable(
        "Parameters",
        ("part", "parameters"),
        [*rows, ("on the rank with the most bytes", f"{here:,}")],
    )


def _layout(plan: Plan) -> TextTable:
    job = plan.job
    layout = plan.job.layout
    axes = (
        f"pipeline {layout.pipeline} x data {layout.data} x context {layout.context} x tensor "
        f"{layout.tensor}"
    )
    rows = [
        ("ranks", f"{layout.world} = {axes}"),
        ("strategy", f"{layout.strategy} over {layout.shards}"),
        (
            "step",
            f"{job.step_tokens:,} tokens = {layout.data} x {job.accumulate} microbatches x "
            f"{job.rows} rows x {job.seq_len}",
        ),
        ("settings", layout.settings()),
    ]
    if layout.expert > 1:
        rows.insert(2, ("experts", f"over {layout.expert} of the data ranks"))
    if layout.pipeline > 1:
        rows.append(("layers by stage", " ".join(str(len(stage)) for stage in job.stages)))
    return TextTable("Layout", ("what", "value"), rows)


def _memory(plan: Plan) -> TextTable:
    usable = plan.job.usable_bytes
    rows = [(kind, amount(size)) for kind, size in plan.memory.kinds.items() if size]
    rows.append(("all", amount(plan.memory.total)))
    verdict = "fits" if plan.fits else "does NOT fit"
    rows.append((f"usable of a {plan.job.gpu.name}", f"{amount(usable)}: {verdict}"))
    card = smallest_card(plan.memory.total)
    rows.append(("smallest card", "none" if card is None else f"{card} GB"))
    if plan.memory.host:
        rows.append(("host memory", amount(plan.memory.host)))
    where = ""
    if plan.job.layout.pipeline > 1:
        where = f" (pipeline rank {plan.worst_rank})"
    return TextTable(f"Memory of the rank with the most bytes{where}", ("kind", "bytes"), rows)


def _flops(plan: Plan) -> TextTable:
    flops = plan.flops
    reference = plan.job.reference
    rows = [
        ("matrices", _gflop(flops.model.matrices)),
        ("attention, causal", _gflop(flops.model.causal_attention)),
        ("model: forward and backward, causal", _gflop(flops.model.causal)),
        (
            "model, attention over whole rows and windows (6 N + 12 L H Q T)",
            _gflop(flops.model.full),
        ),
    ]
    if reference is not None:
        rows.append((f"{reference.role}: forward, causal", _gflop(flops.reference)))
    if flops.picture is not None:
        rows.append(("vision tower: the largest picture, not per token", _gflop(flops.picture)))
    rows.append(("hardware: with recomputation", _gflop(flops.hardware)))
    rows.append(("InternLM's formula", f"{flops.internlm:,.0f}"))
    return TextTable("FLOPs per token", ("part", "FLOPs"), rows)


def _gflop(value: float) -> str:
    return f"{value / 1e9:.3f} G"


def _traffic(plan: Plan) -> TextTable:
    rows = [
        (
            axis,
            amount(traffic.sent_bytes),
            f"{1000 * traffic.seconds:.1f} ms",
            f"{1000 * traffic.exposed:.1f} ms",
        )
        for axis, traffic in plan.traffic.items()
    ]
    return TextTable("Sent by a rank in a step", ("axis", "bytes", "takes", "not hidden"), rows)


def _pipeline(plan: Plan) -> TextTable:
    layout = plan.job.layout
    rows = [
        ("schedule", f"{layout.schedule}, {layout.virtual_stages} stages per rank"),
        ("bubble", f"{100 * plan.bubble:.1f} %"),
    ]
    for rank, held in enumerate(plan.held):
        stages = ", ".join(f"stage {stage}: {count}" for stage, count in sorted(held.items()))
        rows.append(
            (
                f"rank {rank}",
                f"microbatches in flight: {stages}; {amount(plan.by_rank[rank].total)}",
            )
        )
    return TextTable("Pipeline", ("what", "value"), rows)


def _speed(plan: Plan) -> TextTable:
    rows = [
        ("step", f"{plan.step_seconds:.3f} s"),
        ("tokens/s", f"{plan.tokens_per_second:,.0f}"),
        ("tokens/s per GPU", f"{plan.per_gpu:,.0f}"),
        ("MFU, causal / full", f"{100 * plan.mfu:.1f} / {100 * plan.mfu_full:.1f} %"),
        ("HFU (recomputation counts)", f"{100 * plan.hfu:.1f} %"),
    ]
    return TextTable("Speed (estimate)", ("what", "value"), rows)


COLUMNS = (
    "settings",
    "micro rows x microbatches",
    "recompute",
    "GiB",
    "bubble",
    "tokens/s per GPU",
    "MFU causal",
)


def summary_row(plan: Plan) -> tuple[str, ...]:
    """One plan in one row of a list."""
    job = plan.job
    return (
        job.layout.settings(),
        f"{job.rows} x {job.accumulate}",
        str(job.memory.recompute),
        f"{plan.memory.total / (1 << 30):.1f}",
        f"{100 * plan.bubble:.1f} %",
        f"{plan.per_gpu:,.0f}",
        f"{100 * plan.mfu:.1f} %",
    )
