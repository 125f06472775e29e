"""A plan: one job comes in; memory, arithmetic, traffic and speed of its step go out, as plain
values for a table, JSON or a picture.

Nothing imports torch. Nothing is measured: rates are those of plan/rates.py, and docs/plan.md says
how far they are from measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headway.model.flops import TokenFlops, internlm_flops, picture_flops, token_flops
from headway.model.layout import active_parameters
from headway.parallel.mesh import Mesh
from headway.parallel.pipeline.program import PipelineShape
from headway.parallel.pipeline_order import ActionKind
from headway.parallel.stage_split import layer_costs
from headway.plan.compute import PassSeconds, update_seconds
from headway.plan.hardware import smallest_card
from headway.plan.job import PlanJob
from headway.plan.memory import Estimate, estimate
from headway.plan.parameters import count_parameters, parts_of
from headway.plan.rollout import RolloutPlan, plan_rollout, rollout_as_dict
from headway.plan.timeline import Timeline, simulate
from headway.plan.traffic import (
    AxisTraffic,
    context_traffic,
    data_traffic,
    expert_traffic,
    mixtures_in,
    pipeline_message,
    stages_of_job,
    tensor_traffic,
)

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24.0
SIMULATED_ROUNDS = 6
"""Microbatches per pipeline rank that are simulated; after these a schedule repeats itself."""
ZERO_BUBBLE_IDLE = 0.4
"""Share of the bubble that is left where gradients of weights fill it."""


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs of one token."""

    model: TokenFlops
    """Forward and backward, without recomputation."""
    recomputed: float
    """What recomputation adds, attention causal."""
    internlm: float
    """By InternLM's formula (`internlm_flops`)."""
    reference: float = 0.0
    """Forward pass of a frozen second model, attention causal."""
    picture: float | None = None
    """Of the largest picture in the vision tower, forward and backward; None: no tower."""

    @property
    def hardware(self) -> float:
        """What the GPU computes: causal attention, recomputation, and a second model's forward
        pass."""
        return self.model.causal + self.recomputed + self.reference


@dataclass(frozen=True)
class Plan:
    """Memory, arithmetic, traffic and speed of one job."""

    job: PlanJob
    worst_rank: int
    """The pipeline rank that needs the most memory."""
    memory: Estimate
    by_rank: tuple[Estimate, ...]
    """Of every pipeline rank."""
    flops: Arithmetic
    traffic: dict[str, AxisTraffic]
    """By axis, of one step and rank."""
    timeline: Timeline | None
    """None without a pipeline."""
    held: tuple[dict[int, int], ...]
    """Microbatches in flight, by stage, for every pipeline rank."""
    bubble: float
    """Idle share of the pipeline's ranks between the first and the last action."""
    step_seconds: float
    update_seconds: float
    rollout: RolloutPlan | None = None
    """The phases of a step, in a run that samples its own answers."""

    @property
    def fits(self) -> bool:
        """Whether the worst rank's bytes are within what a run is planned into."""
        return self.memory.total <= self.job.usable_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.job.step_tokens / self.step_seconds

    @property
    def per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens_per_second / self.job.layout.world

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: attention causal, no recomputation, against the bf16 peak."""
        return self.per_gpu * self.flops.model.causal / self.job.gpu.flops

    @property
    def mfu_full(self) -> float:
        """Model FLOPs utilization with attention counted in full, as in PaLM's formula."""
        return self.per_gpu * self.flops.model.full / self.job.gpu.flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: recomputation counts."""
        return self.per_gpu * self.flops.hardware / self.job.gpu.flops

    def budget(self, tokens: float, price: float | None) -> dict[str, float | None]:
        """Days, GPU hours and cost of training on so many tokens."""
        seconds = tokens / self.tokens_per_second
        gpu_hours = seconds / SECONDS_PER_HOUR * self.job.layout.world
        cost = None
        if price is not None:
            cost = gpu_hours * price
        return {
            "tokens": tokens,
            "days": seconds / SECONDS_PER_HOUR / HOURS_PER_DAY,
            "gpu_hours": gpu_hours,
            "cost": cost,
        }


def make_plan(job: PlanJob, *, simulated: bool = True) -> Plan:
    """Plan one job; its layout must break no rule. Without simulation the bubble is that of equal
    stages, which is faster."""
    if simulated:
        ranks = range(job.layout.pipeline)
    else:
        # The first rank holds the most microbatches, the last has the head; the others are between
        # them.
        ranks = range(0, job.layout.pipeline, max(1, job.layout.pipeline - 1))
    by_rank = tuple(estimate(job.memory_job(rank)) for rank in ranks)
    # A run fits if its largest rank does.
    worst = max(range(len(by_rank)), key=lambda index: by_rank[index].total)

    stages = stages_of_job(job)
    message = pipeline_message(job)
    busy_seconds = job.accumulate * sum(stage.total for stage in stages)
    timeline: Timeline | None = None
    held: tuple[dict[int, int], ...] = ({0: 1},)
    if job.layout.pipeline == 1:
        passes = busy_seconds
    elif simulated:
        timeline = step_timeline(job, stages, message.seconds)
        held = tuple(job.held)
        # Past its first rounds a pipeline takes as long for each microbatch as its slowest rank.
        passes = timeline.seconds + (job.accumulate - _simulated(job)) * _slowest(job, stages)
    else:
        passes = _equal_stages(job, stages)
    # Of the ranks' time between the first and the last action, what no stage computes in.
    bubble = 0.0
    if job.layout.pipeline > 1:
        bubble = 1 - busy_seconds / (job.layout.pipeline * passes)

    # All ranks wait for the slowest one at the end of a step.
    data = max(
        (data_traffic(job, stages, rank) for rank in ranks), key=lambda traffic: traffic.exposed
    )
    update = max(update_seconds(job, rank) for rank in ranks)
    step_seconds = passes + data.exposed + update
    rollout = None
    if job.rollout is not None:
        rollout = plan_rollout(job, ranks[worst], stages, passes + data.exposed, update)
        step_seconds = rollout.seconds
    return Plan(
        job=job,
        worst_rank=ranks[worst],
        memory=by_rank[worst],
        by_rank=by_rank,
        flops=arithmetic(job),
        traffic=_by_axis(job, data, message),
        timeline=timeline,
        held=held,
        bubble=bubble,
        step_seconds=step_seconds,
        update_seconds=update,
        rollout=rollout,
    )


def step_timeline(job: PlanJob, stages: list[PassSeconds], send_seconds: float) -> Timeline:
    """The pipeline of one step, action by action; of many microbatches the first rounds."""
    layout = job.layout
    seconds: dict[ActionKind, list[float]] = {
        "F": [stage.forward for stage in stages],
        "B": [stage.backward for stage in stages],
        "I": [stage.inputs for stage in stages],
        "W": [stage.weights for stage in stages],
    }
    return simulate(
        PipelineShape(layout.schedule, layout.pipeline, layout.virtual_stages),
        _simulated(job),
        seconds,
        send_seconds,
    )


def _simulated(job: PlanJob) -> int:
    """Microbatches that are simulated: whole rounds, if there are many."""
    return min(job.accumulate, SIMULATED_ROUNDS * job.layout.pipeline)


def _slowest(job: PlanJob, stages: list[PassSeconds]) -> float:
    """Seconds of one microbatch on the slowest pipeline rank."""
    return max(
        sum(stages[stage].total for stage in job.stages_of(rank))
        for rank in range(job.layout.pipeline)
    )


def _equal_stages(job: PlanJob, stages: list[PassSeconds]) -> float:
    """Seconds of a step if every rank were as slow as the slowest."""
    layout = job.layout
    # A pipeline idles for one microbatch per rank but one, less with several stages per rank.
    idle = (layout.pipeline - 1) / layout.virtual_stages
    if layout.schedule == "zero_bubble":
        idle *= ZERO_BUBBLE_IDLE
    return _slowest(job, stages) * (job.accumulate + idle)


def _by_axis(job: PlanJob, data: AxisTraffic, message: AxisTraffic) -> dict[str, AxisTraffic]:
    """Traffic of a whole step on the busiest rank, without axes of size 1."""
    layout = job.layout
    microbatches = job.accumulate
    # The rank with the most layers: the others wait for it.
    layers = max(
        sum(len(job.stages[stage]) for stage in job.stages_of(rank))
        for rank in range(layout.pipeline)
    )
    mixtures = mixtures_in(job, range(job.model.num_layers))

    def over_step(traffic: AxisTraffic, count: float) -> AxisTraffic:
        return AxisTraffic(
            traffic.sent_bytes * count, traffic.seconds * count, traffic.exposed * count
        )

    traffic: dict[str, AxisTraffic] = {}
    if layout.reduce > 1:
        traffic["data"] = data
    if layout.tensor > 1:
        traffic["tensor"] = over_step(tensor_traffic(job, layers), microbatches)
    if layout.context > 1:
        traffic["context"] = over_step(context_traffic(job, layers), microbatches)
    if layout.expert > 1:
        traffic["expert"] = over_step(expert_traffic(job, mixtures), microbatches)
    if layout.pipeline > 1:
        # A rank between two others sends an activation and a gradient for each of its stages.
        messages = 2 * microbatches * layout.virtual_stages
        traffic["pipeline"] = over_step(message, messages)
    return traffic


def arithmetic(job: PlanJob) -> Arithmetic:
    """FLOPs of one token, by every convention."""
    model = job.model
    flops = job.cached(
        "flops", lambda: token_flops(model, job.attended, specs=job.all_specs, training=job.trains)
    )
    costs, _, _ = layer_costs(model, job.seq_len)
    # A cost is that of forward and backward, which is three times the forward's.
    recomputed = sum(costs[layer] / 3 for layer in job.memory.recomputed_blocks(model.num_layers))
    reference = 0.0
    if job.reference is not None:
        reference = job.reference.flops(job.attended)
    recomputes = bool(job.memory.recomputed_blocks(model.num_layers))
    internlm = internlm_flops(model, job.seq_len, recomputed=recomputes)
    return Arithmetic(flops, recomputed, internlm, reference, _largest_picture(job))


def _largest_picture(job: PlanJob) -> float | None:
    """FLOPs of the largest picture in the vision tower of a job's model."""
    shape = job.model.vision
    flops = picture_flops(job.model, specs=job.all_specs, training=job.trains)
    if shape is None or flops is None:
        return None
    cells = shape.spec.max_pixels // shape.spec.side**2
    return flops.of(cells, cells**2)


def rank_groups(job: PlanJob) -> dict[str, list[list[int]]]:
    """The ranks of every group along every axis that has more than one rank."""
    layout = job.layout
    mesh = Mesh(
        0,
        layout.pipeline,
        layout.reduce // layout.shards,
        layout.shards,
        layout.context,
        layout.tensor,
        layout.expert,
    )
    sizes = {
        "tensor": layout.tensor,
        "context": layout.context,
        "data": layout.data,
        "shard": layout.shards,
        "pipeline": layout.pipeline,
        "expert": layout.expert,
    }
    return {axis: mesh.groups(axis) for axis, size in sizes.items() if size > 1}


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    job = plan.job
    layout = plan.job.layout
    # Of the whole model, not of one rank.
    counts = count_parameters(job.model, job.all_specs, job.trains)
    whole = counts.on_stages([range(job.model.num_layers)], first=True, last=True)
    reference = None
    if job.reference is not None:
        reference = {
            "role": job.reference.role,
            "parameters": job.reference.parameters().total,
        }
    rollout = None
    if plan.rollout is not None:
        rollout = rollout_as_dict(plan.rollout)
    return {
        "model": {
            "parameters": whole.total,
            "active": active_parameters(job.model),
            "trained": whole.trained,
            "parts": parts_of(counts),
            "seq_len": job.seq_len,
            "reference": reference,
        },
        "layout": {
            "world": layout.world,
            "data": layout.data,
            "strategy": layout.strategy,
            "shard": layout.shards,
            "tensor": layout.tensor,
            "sequence": layout.sequence and layout.tensor > 1,
            "pipeline": layout.pipeline,
            "schedule": layout.schedule,
            "virtual_stages": layout.virtual_stages,
            "context": layout.context,
            "expert": layout.expert,
            "micro_rows": job.rows,
            "accumulate": job.accumulate,
            "step_tokens": job.step_tokens,
            "recompute": job.memory.recompute,
            "settings": layout.settings(),
            "layers_by_stage": [len(layers) for layers in job.stages],
        },
        "gpu": {
            "name": job.gpu.name,
            "usable_bytes": job.usable_bytes,
            "bf16_flops": job.gpu.flops,
        },
        "memory": {
            "worst_pipeline_rank": plan.worst_rank,
            "kinds": plan.memory.kinds,
            "total": plan.memory.total,
            "host": plan.memory.host,
            "fits": plan.fits,
            "smallest_card_gb": smallest_card(plan.memory.total),
            "by_pipeline_rank": [rank_memory.total for rank_memory in plan.by_rank],
        },
        "flops_per_token": {
            "matrices": plan.flops.model.matrices,
            "attention_causal": plan.flops.model.causal_attention,
            "model_causal": plan.flops.model.causal,
            "model_full": plan.flops.model.full,
            "recomputed": plan.flops.recomputed,
            "hardware": plan.flops.hardware,
            "internlm": plan.flops.internlm,
            "reference": plan.flops.reference,
            "picture": plan.flops.picture,
        },
        "traffic": {
            axis: {
                "bytes": traffic.sent_bytes,
                "seconds": traffic.seconds,
                "exposed_seconds": traffic.exposed,
            }
            for axis, traffic in plan.traffic.items()
        },
        "pipeline": {"bubble": plan.bubble, "in_flight": [dict(held) for held in plan.held]},
        "speed": {
            "step_seconds": plan.step_seconds,
            "tokens_per_second": plan.tokens_per_second,
            "per_gpu": plan.per_gpu,
            "mfu_causal": plan.mfu,
            "mfu_full": plan.mfu_full,
            "hfu": plan.hfu,
            "update_seconds": plan.update_seconds,
        },
        "rollout": rollout,
    }
