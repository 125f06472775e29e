"""How the time of a step divides in a run that samples its own answers: a job with a `RolloutShape`
comes in, seconds of each phase and bytes of sampling and training go out. Nothing imports torch.

    hand-over     the weights of the last update into the sampler's copy
    prefill       prompts are read, whole pages of them once for all answers to a prompt
    decoding      one token of every running answer in a step
    rewards       as long as they take: not known before a run
    scoring       the trainer's log-probabilities before several updates, or before a KL in the reward
    reference     forward pass of a frozen model
    passes        forward and backward over packed rows, with the exchanges that they do not hide
    update        clip and optimizer

A rollout serves `num_updates` steps; its seconds are divided among them. The lengths of answers are
an expectation, so the seconds are as good as it is. Sampling and updates take turns on a GPU, with
`rollout.ahead` too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headway.parallel.config import MemoryConfig
from headway.parallel.layouts import Layout
from headway.plan.compute import (
    PassSeconds,
    attention_products,
    embedding_seconds,
    layer_seconds,
    reference_seconds,
)
from headway.plan.job import PREFILL_TOKENS, PlanJob, RolloutShape, SamplerCopy
from headway.plan.memory import Estimate, phase_estimates
from headway.plan.rates import (
    DECODE_BLOCK,
    DECODE_READS,
    ELEMENTWISE,
    LAUNCH,
    LAUNCHES,
    STREAMING,
    matmul_seconds,
)
from headway.plan.traffic import RankRing

DRAW_BYTES = 118
"""What drawing a token moves for each answer and id of the vocabulary, counted in the operations of
infer/engine/sampler.py without top-k, top-p and min-p: logits to fp32 (6), the likeliest id and the
largest score (12), a copy in double (12), its largest value (8), difference, division, exponential
and running sum in double (64), log-probabilities in fp32 (16)."""
MASTER_BYTES = 4
"""Of a number as the trainer gives it to the sampler."""
PHASES = (
    "hand_over",
    "prefill",
    "decoding",
    "rewards",
    "scoring",
    "reference",
    "passes",
    "update",
)
"""In the order of a step."""


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of one step of decoding, by what they are spent on."""

    weights: float
    """Matrix products: the bytes of the weights, or the arithmetic where that is more."""
    cache: float
    """Keys, values and states."""
    drawing: float
    """Log-probabilities and draws over the vocabulary."""
    launches: float
    """What is left of a block with little to read."""
    is_compute_bound: bool
    """The products need more time for arithmetic than for the bytes of the weights."""

    @property
    def total(self) -> float:
        """Of the whole step."""
        return self.weights + self.cache + self.drawing + self.launches


@dataclass(frozen=True)
class Decoding:
    """How the answers of a rollout are decoded on a rank."""

    running: int
    """Answers that are sampled at the same time, at most."""
    steps: float
    batch: float
    """Answers of a step, on average."""
    context: float
    """Tokens that an answer looks back at, on average."""
    step: DecodeStep

    @property
    def seconds(self) -> float:
        """All steps."""
        return self.steps * self.step.total


@dataclass(frozen=True)
class RolloutPlan:
    """The phases of one step, and the memory of sampling and training."""

    shape: RolloutShape
    copy: SamplerCopy
    rank_answers: int
    """Answers of a rollout that the busiest rank samples."""
    decoding: Decoding
    phases: dict[str, float]
    """Seconds of one step by phase, without rewards."""
    memory: dict[str, Estimate]
    """Of the pipeline rank that needs the most, by phase."""

    @property
    def seconds(self) -> float:
        """One step, without rewards."""
        return sum(self.phases.values())

    @property
    def rollout_seconds(self) -> float:
        """What a step spends on the answers before they are trained on, without rewards."""
        return sum(self.phases[name] for name in ("hand_over", "prefill", "decoding"))

    @property
    def rollout_share(self) -> float:
        """Of a step, without rewards."""
        return self.rollout_seconds / self.seconds

    @property
    def answers_per_second(self) -> float:
        """Sampled and trained on, over all ranks."""
        return self.shape.answers / self.shape.num_updates / self.seconds

    @property
    def sampled_tokens_per_second(self) -> float:
        """Tokens of answers in the time of a rollout, over all ranks."""
        tokens = self.shape.answers * self.shape.answer_tokens / self.shape.num_updates
        return tokens / self.rollout_seconds

    @property
    def update_tokens_per_second(self) -> float:
        """Tokens of prompts and answers in the rest of a step, over all ranks."""
        tokens = self.shape.step_answers * self.shape.document_tokens
        return tokens / (self.seconds - self.rollout_seconds)

    @property
    def staleness(self) -> int:
        """Updates between the weights that draw an answer and the first update on it."""
        if self.shape.ahead:
            return self.shape.num_updates
        return 0


def plan_rollout(
    job: PlanJob, rank: int, stages: list[PassSeconds], passes: float, update: float
) -> RolloutPlan:
    """The phases of a step of a job that samples answers.

    `rank`: the pipeline rank that needs the most memory. `stages`: of a microbatch. `passes`:
    seconds of forward and backward of a step, with a reference's pass and what exchanges add;
    `update`: those of clip and optimizer.
    """
    shape = job.rollout
    copy = job.sampler
    assert shape is not None and copy is not None
    updates = shape.num_updates
    decoding = decode_answers(job)
    reference = reference_seconds(job) * job.accumulate

    # A forward pass over the microbatches of all updates of a pass, once for all passes.
    scoring = 0.0
    if shape.scores_first:
        by_rank = [
            sum(stages[stage].forward for stage in job.stages_of(rank))
            for rank in range(job.layout.pipeline)
        ]
        # The frozen model's pass is in the first stage, and a phase of its own.
        by_rank[0] -= reference_seconds(job)
        scoring = max(by_rank) * job.accumulate / shape.passes
    return RolloutPlan(
        shape=shape,
        copy=copy,
        rank_answers=shape.rank_prompts(job.layout.world) * shape.samples,
        decoding=decoding,
        phases={
            "hand_over": hand_over_seconds(job) / updates,
            "prefill": prefill_seconds(job) / updates,
            "decoding": decoding.seconds / updates,
            "scoring": scoring,
            "reference": reference,
            "passes": passes - reference,
            "update": update,
        },
        memory=phase_estimates(job.memory_job(rank)),
    )


def _copy_job(job: PlanJob, tokens: int, rows: int) -> PlanJob:
    """The sampler's copy, whole on one rank, over rows of so many tokens."""
    assert job.sampler is not None
    precision = job.precision
    if precision == "fp8":
        # fp8 is of training; the copy computes in bf16.
        precision = "bf16"
    return replace(
        job,
        model=job.sampler.model,
        seq_len=tokens,
        rows=rows,
        accumulate=1,
        layout=Layout(),
        precision=precision,
        specs=None,
        training=(),
        reference=None,
        sampler=None,
        rollout=None,
        memory=MemoryConfig(),
    )


def prefill_tokens(job: PlanJob) -> int:
    """Tokens of prompts that a rank computes in a rollout.

    With P tokens of a prompt, S answers to it and W tokens in whole pages before its last token:

        P + (S - 1) (P - W)     for each prompt

    The first answer to a prompt reads all of it; each further one what whole pages do not have
    (infer/engine/memory.py, `EngineMemory.admit`).
    """
    shape = job.rollout
    copy = job.sampler
    assert shape is not None and copy is not None
    shared = copy.shared_tokens(shape.prompt.mean)
    by_prompt = shape.prompt.mean + (shape.samples - 1) * (shape.prompt.mean - shared)
    return round(shape.rank_prompts(job.layout.world) * by_prompt)


def prefill_seconds(job: PlanJob) -> float:
    """Reading the prompts of a rollout on a rank: the forward pass of its blocks over packed pieces
    of PREFILL_TOKENS tokens, at the rates of training (`layer_seconds`)."""
    shape = job.rollout
    assert shape is not None
    prompt = max(1, round(shape.prompt.mean))
    rows = max(1, PREFILL_TOKENS // prompt)
    piece = _copy_job(job, prompt, rows)
    seconds = embedding_seconds(piece).forward
    seconds += sum(layer_seconds(piece, layer).forward for layer in range(piece.model.num_layers))
    return prefill_tokens(job) * seconds / (rows * prompt)


def decode_answers(job: PlanJob) -> Decoding:
    """How a rank decodes its n answers with r of them at a time.

    Lengths are spread evenly from 2 A - L to L around their mean A, where L is the longest answer:
    twice the mean, at most max_new_tokens. Slots are refilled at once, and the last answers end one
    after another:

        steps     n A / r + L - A
        batch     n A / steps
        context   P + E[l^2] / (2 E[l]) = P + (A^2 + (L - A)^2 / 3) / (2 A)

    The last line is the mean position of a token in its answer: long answers have more tokens.
    """
    shape = job.rollout
    copy = job.sampler
    assert shape is not None and copy is not None
    world = job.layout.world
    answers = shape.rank_prompts(world) * shape.samples
    mean = shape.answer_tokens
    spread = shape.longest_answer - mean

    running = copy.running(shape, world, job.compute_bytes)
    steps = answers * mean / running + spread
    batch = answers * mean / steps
    context = shape.prompt.mean + (mean**2 + spread**2 / 3) / (2 * mean)
    return Decoding(running, steps, batch, context, decode_step(job, batch, context))


def decode_step(job: PlanJob, batch: float, context: float) -> DecodeStep:
    """One token of each of `batch` answers that look back at `context` tokens.

        weights    for every matrix [n, k]: max(n k bytes / bandwidth, 2 batch n k FLOPs / rate);
                   of a mixture of E experts, k of them for a token, those that any answer takes:
                   E (1 - (1 - k / E)^batch)
        cache      batch x (keys and values of the context, in each layer at most its window;
                   states are read and written) / bandwidth
        drawing    batch x vocabulary x DRAW_BYTES / bandwidth
        launches   DECODE_BLOCK a block

    A roofline: decoding reads all weights and the cache for each step (Pope 2022, arXiv:2211.05102,
    section 2). Shares of bandwidth and peak are those of plan/rates.py. The work of the host for
    each token is not modelled.
    """
    copy = job.sampler
    assert copy is not None
    model = copy.model
    gpu = job.gpu
    number_bytes = job.compute_bytes
    streaming = gpu.bandwidth * STREAMING

    # Every product of the model once: (weights that are read, rows of the product, n, k).
    products: list[tuple[float, float, float, float]] = []
    for layer in range(model.num_layers):
        for outputs, inputs in attention_products(model, 1, layer):
            products.append((outputs * inputs, batch, outputs, inputs))
        if not model.is_mixture(layer):
            ffn = float(model.ffn_size)
            up = (model.ffn_matrices - 1) * ffn
            width = model.hidden_size
            products.append((up * width, batch, up, width))
            products.append((width * ffn, batch, width, ffn))
            continue
        assert model.experts is not None
        experts = model.experts
        width = model.hidden_size
        chosen_share = experts.per_token / experts.num
        touched = experts.num * (1 - (1 - chosen_share) ** batch)
        expert_weights = 3.0 * model.expert_size * width
        slots = batch * experts.per_token
        products.append((touched * expert_weights, slots, 3.0 * model.expert_size, width))
        if experts.shared_ffn_size:
            shared = 3.0 * experts.shared_ffn_size
            products.append((shared * width, batch, shared, width))
    products.append(
        (model.head_rows * model.hidden_size, batch, model.head_rows, model.hidden_size)
    )

    reading = 0.0
    arithmetic = 0.0
    weights = 0.0
    for num_read, rows, outputs, inputs in products:
        read_seconds = num_read * number_bytes / streaming
        flops = 2.0 * rows * outputs * inputs
        compute_seconds = matmul_seconds(gpu, flops, (max(1.0, rows), outputs, inputs))
        reading += read_seconds
        arithmetic += compute_seconds
        weights += max(read_seconds, compute_seconds)

    positions = 0.0
    for layer in range(model.num_layers):
        if model.has_state(layer):
            continue
        window = model.window_of(layer)
        if window is None:
            positions += context
        else:
            positions += min(context, window)
    vectors = 1
    if model.latent_attention is None:
        vectors = 2
    width_bytes = vectors * model.cached_heads * model.cached_size * number_bytes
    # A state is read and written by every token.
    cache_bytes = positions * width_bytes + 2 * copy.idle_bytes(number_bytes)
    cache = batch * cache_bytes / (gpu.bandwidth * DECODE_READS)

    drawing = batch * model.vocab * DRAW_BYTES / (gpu.bandwidth * ELEMENTWISE)

    block_seconds = DECODE_BLOCK
    if job.software.fusion == "eager":
        # Such a model is neither compiled nor recorded: the host launches every kernel.
        block_seconds = LAUNCHES["eager"] * LAUNCH
    return DecodeStep(
        weights=weights,
        cache=cache,
        drawing=drawing,
        launches=model.num_layers * block_seconds,
        is_compute_bound=arithmetic > reading,
    )


def hand_over_seconds(job: PlanJob) -> float:
    """The weights of the last update into the copy, whole on every rank.

    The trainer gives fp32 numbers, parameter after parameter (`Engine.weights`): 4 bytes are read
    and those of the compute dtype written, with two kernels for each parameter. Ranks that share
    parameters gather them in a ring first. Merging an adapter is not counted.
    """
    copy = job.sampler
    assert copy is not None
    layout = job.layout
    gpu = job.gpu
    size = copy.parameters
    moved_bytes = size * (MASTER_BYTES + job.compute_bytes)
    seconds = moved_bytes / (gpu.bandwidth * STREAMING) + 2 * len(job.all_specs) * LAUNCH
    sharing = layout.shards * layout.tensor * layout.pipeline
    if sharing > 1:
        ring = RankRing(sharing, min(sharing, gpu.gpus_per_node))
        seconds += ring.pass_seconds(gpu, MASTER_BYTES * size, len(job.all_specs))
    return seconds


def rollout_as_dict(plan: RolloutPlan) -> dict[str, Any]:
    """The phases as plain values. What is not known is null."""
    shape = plan.shape
    decoding = plan.decoding
    step = decoding.step
    phases: dict[str, float | None] = {}
    shares: dict[str, float | None] = {}
    for name in PHASES:
        phases[name] = plan.phases.get(name)
        shares[name] = None
        if name in plan.phases:
            shares[name] = plan.phases[name] / plan.seconds
    return {
        "prompts": shape.prompts,
        "samples": shape.samples,
        "answers": shape.answers,
        "updates": shape.num_updates,
        "answers_per_update": shape.step_answers,
        "prompt_tokens": shape.prompt.mean,
        "longest_prompt_tokens": shape.prompt.longest,
        "prompts_read": shape.prompt.num_read,
        "answer_tokens": shape.answer_tokens,
        "max_new_tokens": shape.max_new_tokens,
        "ahead": shape.ahead,
        "staleness": plan.staleness,
        "refill": shape.refill,
        "rank_answers": plan.rank_answers,
        "reserved_answers": plan.copy.at_once,
        "decoding": {
            "running": decoding.running,
            "steps": decoding.steps,
            "batch": decoding.batch,
            "context": decoding.context,
            "step_seconds": step.total,
            "weights_seconds": step.weights,
            "cache_seconds": step.cache,
            "drawing_seconds": step.drawing,
            "launch_seconds": step.launches,
            "compute_bound": step.is_compute_bound,
        },
        "seconds": phases,
        "shares": shares,
        "step_seconds_without_rewards": plan.seconds,
        "rollout_share": plan.rollout_share,
        "answers_per_second": plan.answers_per_second,
        "sampled_tokens_per_second": plan.sampled_tokens_per_second,
        "update_tokens_per_second": plan.update_tokens_per_second,
        "memory": {
            phase: {"kinds": estimate.kinds, "total": estimate.total}
            for phase, estimate in plan.memory.items()
        },
    }
