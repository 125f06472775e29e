"""How long the arithmetic of a step takes on one rank: a job comes in, seconds of each part go out. Numbers only; nothing imports torch.

layer      matrix products (2 FLOPs a weight and token, at the rate of their sizes), attention, the operations between them (bytes)
head       logits and loss, one pass forward and two products backward
update     clip and optimizer over this rank's shard (bytes), or its transfers if the state is in host memory
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.model.config import ModelConfig
from headway.model.flops import visible_tokens
from headway.model.layout import attention_specs
from headway.parallel.config import MemoryConfig
from headway.plan.job import PlanJob, head_trains
from headway.plan.memory import STATE_BYTES
from headway.plan.rates import (
    ELEMENTWISE,
    LAUNCH,
    LAUNCHES,
    STREAMING,
    TRAFFIC,
    attention_seconds,
    matmul_seconds,
)


@dataclass(frozen=True)
class PassSeconds:
    """One layer or stage, one microbatch."""

    forward: float = 0.0
    inputs: float = 0.0
    """Gradients of inputs; what is recomputed counts here."""
    weights: float = 0.0
    """Gradients of weights."""

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights
        )

    @property
    def backward(self) -> float:
        """The whole backward."""
        return self.inputs + self.weights

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def layer_seconds(job: PlanJob, layer: int) -> PassSeconds:
    """One layer, one microbatch, recompute included."""
    recompute = job.memory.recompute
    again = layer in job.recomputed
    kind = "whole" if again else "selective" if recompute == "selective" else "none"
    window, trains, layout = job.model.window_of(layer), layer in job.trained_layers, job.layout
    mixture = job.model.is_mixture(layer)
    key = (
        "layer",
        window,
        kind,
        trains,
        mixture,
        job.rows,
        layout.tensor,
        layout.sequence,
        layout.context,
        layout.expert,
    )
    return job.cached(key, lambda: _layer(job, window, kind, trains, mixture))


def _layer(
    job: PlanJob, window: int | None, recompute: str, trains: bool, mixture: bool
) -> PassSeconds:
    model, gpu, tensor = job.model, job.gpu, job.layout.tensor
    tokens, fp8 = job.tokens, job.precision == "fp8"
    query, key = (
        model.num_heads * model.head_size / tensor,
        model.kv_heads * model.head_size / min(tensor, model.kv_heads),
    )
    ffn, width = model.ffn_size / tensor, model.hidden_size
    # fused: q, k, v in one product, gate and up in another
    dense = [] if mixture else [((model.ffn_matrices - 1) * ffn, width), (width, ffn)]
    products = [*_attention_products(model, tensor), *dense]
    matmul = sum(
        matmul_seconds(gpu, 2.0 * tokens * n * k, (tokens, n, k), fp8=fp8) for n, k in products
    )
    moved = 0.0
    if mixture:
        grouped, moved = _mixture(job)
        matmul, ffn = matmul + grouped, model.mean_ffn / tensor
    _, seen = visible_tokens(job.seq_len, window)
    flops = 2.0 * tokens * seen * model.num_heads * (model.head_size + model.value_size) / tensor
    attend, attend_back = attention_seconds(
        gpu, job.software.attention, flops, seen * 2, model.head_size
    )
    between, between_back = _between(job, query, key, ffn)
    between, between_back = between + moved, between_back + 2 * moved
    forward = matmul + attend + between
    inputs, weights = matmul + attend_back + between_back, matmul if trains else 0.0
    if job.has_adapter:
        # A and B on every linear: little arithmetic, but each result passes through memory once more, forward and backward
        extra = (
            2
            * job.compute_bytes
            * tokens
            * (query + 2 * key + 2 * width + 3 * ffn)
            / (gpu.bandwidth * ELEMENTWISE)
        )
        forward, inputs, weights = forward + extra, inputs + extra, weights + extra / 2
    if job.counts.layers[0].packed:
        # matrices are written out before each product: bytes in, floats out
        each = job.counts.layers[0]
        written = (each.packed_bytes + job.compute_bytes * each.packed) / (
            gpu.bandwidth * ELEMENTWISE
        )
        forward, inputs = forward + written, inputs + written
    if recompute == "whole":
        inputs += forward
    elif recompute == "selective":
        inputs += between / 2
    launches = LAUNCHES[job.software.fusion] * LAUNCH
    return PassSeconds(
        max(forward, launches),
        max(inputs, launches),
        max(weights, launches / 2) if trains or job.has_adapter else 0.0,
    )


def _attention_products(model: ModelConfig, tensor: int) -> list[tuple[float, float]]:
    """(outputs, inputs) of attention's matrices on one rank; q, k and v in one product."""
    if model.latent_attention is None:
        query, key = (
            model.num_heads * model.head_size / tensor,
            model.kv_heads * model.head_size / min(tensor, model.kv_heads),
        )
        return [(query + 2 * key, model.hidden_size), (model.hidden_size, query)]
    shares = {"column": (tensor, 1), "row": (1, tensor)}
    found: list[tuple[float, float]] = []
    for spec in attention_specs(model):
        if len(spec.shape) > 1:
            outputs, inputs = shares.get(spec.split, (1, 1))
            found.append((spec.shape[0] / outputs, spec.shape[1] / inputs))
    return found


def _mixture(job: PlanJob) -> tuple[float, float]:
    """Seconds of the products of a mixture, and of moving tokens to their experts and back; experts with equal load."""
    model, tensor = job.model, job.layout.tensor
    assert model.experts is not None
    width, ffn = model.hidden_size, model.expert_size / tensor
    slots = float(job.tokens * model.experts.per_token)
    rows = max(1.0, slots * job.layout.expert / model.experts.num)
    seconds = matmul_seconds(job.gpu, 2.0 * slots * 2 * ffn * width, (rows, 2 * ffn, width))
    seconds += matmul_seconds(job.gpu, 2.0 * slots * ffn * width, (rows, width, ffn))
    shared = model.experts.shared_ffn_size / tensor
    if shared:
        seconds += matmul_seconds(
            job.gpu, 6.0 * job.tokens * shared * width, (job.tokens, 2 * shared, width)
        )
    return seconds, 4 * slots * width * job.compute_bytes / (job.gpu.bandwidth * ELEMENTWISE)


def _between(job: PlanJob, query: float, key: float, ffn: float) -> tuple[float, float]:
    """Norms, rotary positions, activation and sums: forward and backward."""
    layout = job.layout
    width = job.model.hidden_size / (layout.tensor if layout.tensor > 1 and layout.sequence else 1)
    rate = job.gpu.bandwidth * ELEMENTWISE / TRAFFIC[job.software.fusion]
    each = job.tokens * job.compute_bytes / rate
    quantised = 1.35 if job.precision == "fp8" else 1.0
    forward = each * (9 * width + 3 * ffn + 2 * (query + key)) * quantised
    backward = each * (12 * width + 6 * ffn + 2 * (query + key)) * quantised
    return forward, backward


def head_seconds(job: PlanJob) -> PassSeconds:
    """Final norm, logits and loss of one microbatch. Forward computes its gradients too, where the loss is fused."""
    model, gpu, tokens = job.model, job.gpu, job.tokens
    vocab = model.head_rows / job.layout.tensor
    matmul = matmul_seconds(
        gpu, 2.0 * tokens * vocab * model.hidden_size, (tokens, vocab, model.hidden_size)
    )
    passes = 12 if job.software.logits_in_fp32 else 3
    loss = passes * 2 * tokens * vocab / (gpu.bandwidth * STREAMING)
    norm = 8 * 2 * tokens * model.hidden_size / (gpu.bandwidth * ELEMENTWISE)
    return PassSeconds(
        matmul + loss / 2 + norm, matmul + loss / 2 + norm, matmul if head_trains(job) else 0.0
    )


def embedding_seconds(job: PlanJob) -> PassSeconds:
    """The lookup, and the sum of its gradient into rows."""
    each = (
        2
        * job.tokens
        * job.model.hidden_size
        * job.compute_bytes
        / (job.gpu.bandwidth * ELEMENTWISE)
    )
    return PassSeconds(each, 0.0, 3 * each)


def stage_seconds(job: PlanJob) -> list[PassSeconds]:
    """Every pipeline stage, one microbatch."""
    found = [
        sum((layer_seconds(job, layer) for layer in layers), PassSeconds()) for layers in job.stages
    ]
    found[0] += embedding_seconds(job)
    found[-1] += head_seconds(job)
    found[0] += PassSeconds(reference_seconds(job))
    return found


def reference_seconds(job: PlanJob) -> float:
    """The forward pass of a frozen second model over one microbatch."""
    if job.reference is None:
        return 0.0
    frozen = replace(
        job,
        model=job.reference.model,
        specs=job.reference.specs,
        training=(),
        reference=None,
        memory=MemoryConfig(),
    )
    layers = sum(layer_seconds(frozen, layer).forward for layer in range(frozen.model.num_layers))
    return embedding_seconds(frozen).forward + layers + head_seconds(frozen).forward


def update_seconds(job: PlanJob, rank: int = 0) -> float:
    """Clip and update of this rank's shard, gradients into their buffers."""
    gpu, count = job.gpu, job.parameters_of(rank)
    mine = (
        count.trained - count.experts
    ) / job.layout.shards + count.experts / job.layout.expert_shards
    state = STATE_BYTES[job.state_dtype] if job.other_state_bytes is None else job.other_state_bytes
    # read gradient for the norm; read and write state and master, read gradient, write the compute copy
    moved = mine * (4 + 2 * state + 8 + 4 + job.compute_bytes)
    # 16-bit gradients into fp32 sums: written in the first microbatch, added in the others
    collected = count.trained * (6 + 10 * (job.accumulate - 1))
    seconds = (moved + collected) / (gpu.bandwidth * STREAMING)
    if job.state_dtype == "8bit":
        seconds += mine * 1.0e-11 * (4.8e12 / gpu.bandwidth)  # unpacking and rounding
    if "optimizer" in job.memory.offload:
        seconds += mine * (state + 4) / gpu.host  # both directions at once
    return seconds
