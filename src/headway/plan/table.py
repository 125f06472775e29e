"""A plan as tables for people: a `Plan` comes in, titles with rows of text go out. Nothing imports
torch."""

from __future__ import annotations

from dataclasses import dataclass

from headway.model.layout import active_parameters
from headway.plan.hardware import smallest_card
from headway.plan.memory import amount
from headway.plan.parameters import count_parameters, parts_of
from headway.plan.result import Plan
from headway.plan.rollout import PHASES, RolloutPlan


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
    if plan.rollout is not None:
        sections += [
            _rollout(plan.rollout),
            _memory_by_phase(plan, plan.rollout),
            _phases(plan.rollout),
        ]
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
        ("step", _step(plan)),
        ("settings", layout.settings()),
    ]
    if layout.expert > 1:
        rows.insert(2, ("experts", f"over {layout.expert} of the data ranks"))
    if layout.pipeline > 1:
        rows.append(("layers by stage", " ".join(str(len(stage)) for stage in job.stages)))
    return TextTable("Layout", ("what", "value"), rows)


def _step(plan: Plan) -> str:
    job = plan.job
    shape = f"{job.layout.data} x {job.accumulate} microbatches x {job.rows} rows x {job.seq_len}"
    if job.rollout is None:
        return f"{job.step_tokens:,} tokens = {shape}"
    # Rows are filled with whole documents, so their tokens are more than those of the answers.
    return f"{job.rollout.step_answers:,} answers, {job.step_tokens:,} tokens, in {shape}"


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


PHASE_NAMES = {
    "hand_over": "weights to the sampler",
    "prefill": "prompts read",
    "decoding": "answers decoded",
    "rewards": "rewards",
    "scoring": "answers scored before the first update",
    "reference": "frozen model",
    "passes": "forward and backward",
    "update": "clip and optimizer",
}
"""As people read them."""


def _rollout(rollout: RolloutPlan) -> TextTable:
    """How many answers of which lengths, and where the lengths are from."""
    shape = rollout.shape
    decoding = rollout.decoding
    prompt = shape.prompt
    prompt_source = "assumed; --prompt-tokens says otherwise"
    if prompt.num_read:
        prompt_source = f"of {prompt.num_read:,} that were read"
    elif prompt.mean == prompt.longest:
        prompt_source = "each"
    answer_source = "expected on average"
    if shape.answer_tokens == shape.max_new_tokens:
        answer_source = "the longest there may be; --answer-tokens gives a mean"
    running = f"{decoding.running:,} of {rollout.rank_answers:,}"
    if rollout.copy.at_once > rollout.rank_answers:
        running += (
            f"; memory for {rollout.copy.at_once:,} is reserved "
            f"(rollout.at_once={rollout.rank_answers} needs less)"
        )
    bound = "arithmetic" if decoding.step.is_compute_bound else "the bytes of the weights"
    step = decoding.step
    parts = ", ".join(
        f"{name} {1000 * seconds:.2f}"
        for name, seconds in (
            ("weights", step.weights),
            ("cache", step.cache),
            ("drawing", step.drawing),
            ("launches", step.launches),
        )
    )
    rows = [
        (
            "rollout",
            f"{shape.prompts:,} prompts x {shape.samples} answers, for {shape.num_updates} "
            f"update{'s' if shape.num_updates > 1 else ''}",
        ),
        (
            "tokens of a prompt",
            f"{prompt.mean:.0f} (longest {prompt.longest:,}; {prompt_source})",
        ),
        ("tokens of an answer", f"{shape.answer_tokens:.0f} ({answer_source})"),
        ("answers of a rank at once", running),
        (
            "decoding",
            f"{decoding.steps:,.0f} steps of {decoding.batch:.0f} answers, "
            f"{1000 * step.total:.2f} ms each ({parts}); products are bound by {bound}",
        ),
    ]
    if shape.ahead:
        rows.append(
            (
                "ahead",
                f"rewards overlap with updates, sampling takes turns with them; answers are "
                f"{rollout.staleness} update{'s' if rollout.staleness > 1 else ''} older",
            )
        )
    if shape.refill:
        rows.append(
            ("refill", f"not counted: up to {shape.refill} further batches of prompts a rollout")
        )
    return TextTable("Rollout", ("what", "value"), rows)


def _memory_by_phase(plan: Plan, rollout: RolloutPlan) -> TextTable:
    """The peak of each phase; the larger one is that of the run."""
    rows = [(phase, amount(estimate.total)) for phase, estimate in rollout.memory.items()]
    rows.append(("peak", amount(plan.memory.total)))
    return TextTable("Memory by phase", ("phase", "bytes"), rows)


def _phases(rollout: RolloutPlan) -> TextTable:
    """Where the time of a step goes."""
    rows: list[tuple[str, str, str]] = []
    for phase in PHASES:
        if phase == "rewards":
            rows.append((PHASE_NAMES[phase], "not known before a run", ""))
            continue
        seconds = rollout.phases[phase]
        if seconds > 0:
            share = 100 * seconds / rollout.seconds
            rows.append((PHASE_NAMES[phase], f"{seconds:.3f} s", f"{share:.1f} %"))
    return TextTable("Time of a step (estimate)", ("phase", "seconds", "share"), rows)


def _speed(plan: Plan) -> TextTable:
    rows = [
        ("step", f"{plan.step_seconds:.3f} s"),
        ("tokens/s", f"{plan.tokens_per_second:,.0f}"),
        ("tokens/s per GPU", f"{plan.per_gpu:,.0f}"),
        ("MFU, causal / full", f"{100 * plan.mfu:.1f} / {100 * plan.mfu_full:.1f} %"),
        ("HFU (recomputation counts)", f"{100 * plan.hfu:.1f} %"),
    ]
    rollout = plan.rollout
    if rollout is not None:
        rows[0] = ("step without rewards", f"{plan.step_seconds:.3f} s")
        rows[1:1] = [
            ("answers/s", f"{rollout.answers_per_second:,.1f}"),
            ("tokens/s of sampling", f"{rollout.sampled_tokens_per_second:,.0f}"),
            ("tokens/s of updates", f"{rollout.update_tokens_per_second:,.0f}"),
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
