"""How long the arithmetic of a step takes on one rank: a job comes in, seconds of each part go out.
Numbers only; nothing imports torch.

    layer      matrix products (2 FLOPs a weight and token, at the rate of their sizes), attention,
               the operations between them (bytes)
    head       logits and loss, one pass forward and two products backward
    update     clip and optimizer over this rank's shard (bytes), or its transfers if the state is
               in host memory
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.model.config import ModelConfig
from headway.model.flops import visible_tokens
from headway.model.layout import mixer_specs
from headway.parallel.config import MemoryConfig
from headway.plan.job import PlanJob, head_trains
from headway.plan.memory import STATE_BYTES, state_core
from headway.plan.rates import (
    ELEMENTWISE,
    LAUNCH,
    LAUNCHES,
    STREAMING,
    TRAFFIC,
    attention_seconds,
    matmul_seconds,
)

BETWEEN_FORWARD = {"stream": 9, "ffn": 3, "heads": 2}
BETWEEN_BACKWARD = {"stream": 12, "ffn": 6, "heads": 2}
"""Elements that a compiled block moves between its matrix products for each token, in widths of the
stream, of the feed-forward and of query and key heads: two norms and two sums over the stream, the
gated activation, rotary positions.
"""
FP8_QUANTISATION = 1.35
"""What writing activations in 8 bits, with their scales, adds to the traffic between products."""
LOSS_PASSES = 3
"""Passes of the fused loss over one chunk of logits, which end as their own gradients."""
LOSS_PASSES_FP32 = 12
"""The same in passes over 2-byte elements, where the loss works on fp32 copies."""
POLICY_FORWARD_BYTES = 64
POLICY_BACKWARD_BYTES = 38
"""What the loss of sampled answers moves for each token and id, in plain torch operations
(kernels/policy_scores.py). Forward: the product and its fp32 copy (8), the sum of exponentials (24),
the entropy (32). Backward: the same product and copy (8), log-probabilities (8), probabilities (8),
their gradient (8), in 16 bits (6)."""
NORM_PASSES = 8
"""Passes of the last norm, which is never compiled, over the stream."""
STEP_8BIT_SECONDS = 1.0e-11
"""Unpacking and rounding of 8-bit moments, per parameter, on an H200; other GPUs by their
bandwidth."""
REFERENCE_BANDWIDTH = 4.8e12
"""Bytes per second of an H200's memory."""


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
        """Gradients of inputs and of weights."""
        return self.inputs + self.weights

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def layer_seconds(job: PlanJob, layer: int) -> PassSeconds:
    """One layer, one microbatch, recompute included."""
    if layer in job.recomputed:
        recompute = "whole"
    elif job.memory.recompute == "selective":
        recompute = "selective"
    else:
        recompute = "none"
    window = job.model.window_of(layer)
    trains = layer in job.trained_layers
    mixture = job.model.is_mixture(layer)
    has_state = job.model.has_state(layer)

    # Most layers of a model take the same time: everything their time depends on is in the key.
    layout = job.layout
    key = (
        "layer",
        window,
        recompute,
        trains,
        mixture,
        has_state,
        job.rows,
        layout.tensor,
        layout.sequence,
        layout.context,
        layout.expert,
    )
    return job.cached(key, lambda: _layer(job, layer, window, recompute, trains, mixture))


def _layer(
    job: PlanJob, layer: int, window: int | None, recompute: str, trains: bool, mixture: bool
) -> PassSeconds:
    """One layer from its parts: matrix products, attention, what moves between them, adapters,
    quantised weights, recomputation."""
    model = job.model
    gpu = job.gpu
    tensor = job.layout.tensor
    tokens = job.tokens
    query = model.num_heads * model.head_size / tensor
    key = model.kv_heads * model.head_size / min(tensor, model.kv_heads)
    ffn = model.ffn_size / tensor
    width = model.hidden_size

    # Products are fused: q, k and v in one, gate and up in another.
    products = attention_products(model, tensor, layer)
    if not mixture:
        products += [((model.ffn_matrices - 1) * ffn, width), (width, ffn)]
    fp8 = job.precision == "fp8"
    matmul = sum(
        matmul_seconds(gpu, 2.0 * tokens * n * k, (tokens, n, k), fp8=fp8) for n, k in products
    )
    dispatch = 0.0
    if mixture:
        experts, dispatch = _mixture(job)
        matmul = matmul + experts
        ffn = model.mean_ffn / tensor

    # Scores and weighted values: 2 FLOPs for each visible pair and channel, of keys and of values.
    _, visible = visible_tokens(job.attended, window)
    flops = 2.0 * tokens * visible * model.num_heads * (model.head_size + model.value_size) / tensor
    # Kernels reach their rate by the length of the row; causal rows see half of it on the average.
    row_length = visible * 2
    attention, attention_backward = attention_seconds(
        gpu, job.software.attention, flops, row_length, model.head_size
    )
    if model.has_state(layer):
        # Plain torch, which memory limits: what the core keeps is written and read.
        query = key = 0.0
        core_bytes = job.compute_bytes * tokens * state_core(model, tensor, job.compute_bytes)
        attention = 2 * core_bytes / (gpu.bandwidth * ELEMENTWISE)
        attention_backward = 2 * attention

    between, between_backward = _between(job, query, key, ffn)
    between = between + dispatch
    between_backward = between_backward + 2 * dispatch

    forward = matmul + attention + between
    # Backward is two products of the same size: one gives the gradient of the inputs, which
    # attention belongs to, and one that of the weights.
    inputs = matmul + attention_backward + between_backward
    weights = matmul if trains else 0.0

    if job.has_adapter:
        # A and B on every linear: little arithmetic, but each result passes through memory once
        # more, forward and backward.
        written_elements = query + 2 * key + 2 * width + 3 * ffn
        adapter = 2 * job.compute_bytes * tokens * written_elements / (gpu.bandwidth * ELEMENTWISE)
        forward = forward + adapter
        inputs = inputs + adapter
        weights = weights + adapter / 2

    # All layers are quantised the same way, so the first one stands for any.
    counts = job.counts.layers[0]
    if counts.packed:
        # Quantised matrices are written out before each product: bytes in, floats out.
        moved_bytes = counts.packed_bytes + job.compute_bytes * counts.packed
        dequantise = moved_bytes / (gpu.bandwidth * ELEMENTWISE)
        forward = forward + dequantise
        inputs = inputs + dequantise

    if recompute == "whole":
        inputs += forward
    elif recompute == "selective":
        # Norms and activations are computed again, matrix products are not.
        inputs += between / 2

    # A layer cannot be faster than the host launches its kernels; backward of weights has half of
    # them.
    launches = LAUNCHES[job.software.fusion] * LAUNCH
    if trains or job.has_adapter:
        weights = max(weights, launches / 2)
    else:
        weights = 0.0
    return PassSeconds(max(forward, launches), max(inputs, launches), weights)


def attention_products(model: ModelConfig, tensor: int, layer: int) -> list[tuple[float, float]]:
    """(outputs, inputs) of attention's matrices on one rank; q, k and v in one product."""
    if model.latent_attention is None and not model.has_state(layer) and not model.attention_gate:
        query = model.num_heads * model.head_size / tensor
        key = model.kv_heads * model.head_size / min(tensor, model.kv_heads)
        return [(query + 2 * key, model.hidden_size), (model.hidden_size, query)]

    # Other kinds of attention have projections of their own; what is split over ranks says the
    # spec.
    ranks_by_split = {"column": (tensor, 1), "row": (1, tensor)}
    products: list[tuple[float, float]] = []
    for spec in mixer_specs(model, "", layer):
        if spec.is_matrix:
            output_ranks, input_ranks = ranks_by_split.get(spec.split, (1, 1))
            products.append((spec.shape[0] / output_ranks, spec.shape[1] / input_ranks))
    return products


def _mixture(job: PlanJob) -> tuple[float, float]:
    """Seconds of the products of a mixture, and of moving tokens to their experts and back; experts
    with equal load."""
    model = job.model
    tensor = job.layout.tensor
    assert model.experts is not None
    width = model.hidden_size
    ffn = model.expert_size / tensor

    # One slot for each token and expert it was routed to; a grouped product has this many rows per
    # expert.
    slots = float(job.tokens * model.experts.per_token)
    rows = max(1.0, slots * job.layout.expert / model.experts.num)
    seconds = matmul_seconds(job.gpu, 2.0 * slots * 2 * ffn * width, (rows, 2 * ffn, width))
    seconds += matmul_seconds(job.gpu, 2.0 * slots * ffn * width, (rows, width, ffn))

    # Shared experts see every token: gate, up and down at the rate of the largest of the three.
    shared = model.experts.shared_ffn_size / tensor
    if shared:
        seconds += matmul_seconds(
            job.gpu, 6.0 * job.tokens * shared * width, (job.tokens, 2 * shared, width)
        )

    # Sorting reads and writes every slot, and so does putting the results back.
    dispatch_bytes = 4 * slots * width * job.compute_bytes
    return seconds, dispatch_bytes / (job.gpu.bandwidth * ELEMENTWISE)


def _between(job: PlanJob, query: float, key: float, ffn: float) -> tuple[float, float]:
    """Norms, rotary positions, activation and sums: forward and backward."""
    layout = job.layout
    # Sequence parallelism divides the tokens of the residual stream among tensor ranks.
    stream = float(job.model.hidden_size)
    if layout.tensor > 1 and layout.sequence:
        stream = job.model.hidden_size / layout.tensor
    rate = job.gpu.bandwidth * ELEMENTWISE / TRAFFIC[job.software.fusion]
    seconds_per_element = job.tokens * job.compute_bytes / rate
    quantisation = FP8_QUANTISATION if job.precision == "fp8" else 1.0

    def seconds(moved: dict[str, int]) -> float:
        elements = moved["stream"] * stream + moved["ffn"] * ffn + moved["heads"] * (query + key)
        return seconds_per_element * elements * quantisation

    return seconds(BETWEEN_FORWARD), seconds(BETWEEN_BACKWARD)


def head_seconds(job: PlanJob) -> PassSeconds:
    """Final norm, logits and loss of one microbatch. Forward computes its gradients too, where the
    loss is fused."""
    model = job.model
    gpu = job.gpu
    tokens = job.tokens
    vocab = model.head_rows / job.layout.tensor
    matmul = matmul_seconds(
        gpu, 2.0 * tokens * vocab * model.hidden_size, (tokens, vocab, model.hidden_size)
    )
    passes = LOSS_PASSES_FP32 if job.software.logits_in_fp32 else LOSS_PASSES
    # logits and the residual stream of the norm: 2 bytes an element
    loss = passes * 2 * tokens * vocab / (gpu.bandwidth * STREAMING)
    norm = NORM_PASSES * 2 * tokens * model.hidden_size / (gpu.bandwidth * ELEMENTWISE)
    weights = matmul if head_trains(job) else 0.0
    if job.rollout is not None:
        # Backward computes the logits again.
        streaming = gpu.bandwidth * STREAMING
        forward_loss = POLICY_FORWARD_BYTES * tokens * vocab / streaming
        backward_loss = POLICY_BACKWARD_BYTES * tokens * vocab / streaming
        return PassSeconds(matmul + forward_loss + norm, 2 * matmul + backward_loss + norm, weights)
    return PassSeconds(matmul + loss / 2 + norm, matmul + loss / 2 + norm, weights)


def embedding_seconds(job: PlanJob) -> PassSeconds:
    """The lookup, and the sum of its gradient into rows."""
    moved_bytes = 2 * job.tokens * job.model.hidden_size * job.compute_bytes
    lookup = moved_bytes / (job.gpu.bandwidth * ELEMENTWISE)
    # Backward reads the stream's gradient, and reads and writes the rows it is added to.
    return PassSeconds(lookup, 0.0, 3 * lookup)


def stage_seconds(job: PlanJob) -> list[PassSeconds]:
    """Every pipeline stage, one microbatch."""
    stages = [
        sum((layer_seconds(job, layer) for layer in layers), PassSeconds()) for layers in job.stages
    ]
    stages[0] += embedding_seconds(job)
    stages[-1] += head_seconds(job)
    # A second model is never split into stages: it runs where the microbatch enters.
    stages[0] += PassSeconds(reference_seconds(job))
    return stages


def reference_seconds(job: PlanJob) -> float:
    """The forward pass of a frozen second model over one microbatch.

    Where it scores the answers of a rollout once for all passes over them, its part of one.
    """
    if job.reference is None:
        return 0.0
    passes = 1
    if job.rollout is not None and job.rollout.reference_once:
        passes = job.rollout.passes
    # The same cost model over its shape: nothing trains, nothing is recomputed.
    frozen = replace(
        job,
        model=job.reference.model,
        specs=job.reference.specs,
        training=(),
        reference=None,
        memory=MemoryConfig(),
    )
    layers = sum(layer_seconds(frozen, layer).forward for layer in range(frozen.model.num_layers))
    seconds = embedding_seconds(frozen).forward + layers + head_seconds(frozen).forward
    return seconds / passes


def update_seconds(job: PlanJob, rank: int = 0) -> float:
    """Clip and update of this rank's shard, gradients into their buffers."""
    gpu = job.gpu
    count = job.parameters_of(rank)
    dense_shard = (count.trained - count.experts) / job.layout.shards
    shard = dense_shard + count.experts / job.layout.expert_shards
    if job.other_state_bytes is None:
        state_bytes = STATE_BYTES[job.state_dtype]
    else:
        state_bytes = job.other_state_bytes

    # Per parameter of the shard: the fp32 gradient read for the norm (4), state and master read and
    # written (2 * state, 8), the gradient read again (4), the compute copy written.
    update_bytes = shard * (4 + 2 * state_bytes + 8 + 4 + job.compute_bytes)
    # 16-bit gradients into fp32 sums: written in the first microbatch (2 + 4), added in the others
    # (2 + 4 + 4).
    collected_bytes = count.trained * (6 + 10 * (job.accumulate - 1))
    seconds = (update_bytes + collected_bytes) / (gpu.bandwidth * STREAMING)

    if job.state_dtype == "8bit":
        seconds += shard * STEP_8BIT_SECONDS * (REFERENCE_BANDWIDTH / gpu.bandwidth)
    if "optimizer" in job.memory.offload:
        # state to the device and back at the same time: a link is as fast in both directions
        seconds += shard * (state_bytes + 4) / gpu.host
    return seconds
