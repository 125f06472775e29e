"""What ranks send each other in a step: a job comes in; bytes and seconds by axis go out. Numbers
only; nothing imports torch.

    data       gradients and parameters of ranks with the same part of the model (zero1: once a
               step; fsdp: every microbatch and block)
    tensor     activations around every product of a layer
    context    heads for tokens (Ulysses), keys and values (ring)
    pipeline   activations and their gradients between stages
    expert     tokens to their experts and back

A ring over n ranks sends (n - 1) / n of the whole from every rank. A group inside a node uses its
links; one that spans nodes is as fast as the network adapters of its members in one node.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.parallel.layouts import ring_size, ulysses_size
from headway.plan.compute import PassSeconds, stage_seconds
from headway.plan.hardware import GpuModel
from headway.plan.job import PlanJob
from headway.plan.rates import (
    ASYNC_TENSOR,
    HOP_BETWEEN,
    HOP_INSIDE,
    LAUNCH,
    NETWORK,
    NVLINK,
    PCIE,
    UNHIDDEN,
)

TENSOR_PASSES = 8
"""Gathers and sums of a layer's tokens over tensor ranks: before and after attention and
feed-forward, forward and backward."""
REGATHER_PASSES = 2
"""The gathers once more, where backward does not keep what they brought."""
RECOMPUTED_PASSES = 4
"""Those of a layer's forward, where it runs a second time."""
FORWARD_SHARE = 1 / 3
"""Of the time that exchanges add to a layer, as of its arithmetic: backward has two thirds."""


@dataclass(frozen=True)
class AxisTraffic:
    """One axis in one step: what a rank sends, how long that takes, and how much of it computation
    does not hide."""

    sent_bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: AxisTraffic) -> AxisTraffic:
        return AxisTraffic(
            self.sent_bytes + other.sent_bytes,
            self.seconds + other.seconds,
            self.exposed + other.exposed,
        )


@dataclass(frozen=True)
class RankRing:
    """A group of ranks: how many, and how many of them are in one node."""

    size: int
    inside: int

    @property
    def spans_nodes(self) -> bool:
        """Whether its messages leave the node."""
        return self.inside < self.size

    def bandwidth(self, gpu: GpuModel) -> float:
        """Bytes per second of a collective on one rank."""
        efficiency = NVLINK if gpu.is_nvlink else PCIE
        within_node = gpu.link * efficiency
        if self.spans_nodes:
            # Every member in a node has an adapter, and a ring's traffic spreads over all of them.
            return min(within_node, gpu.network * NETWORK * self.inside)
        return within_node

    @property
    def hops(self) -> float:
        """Seconds for a message to pass every rank once."""
        nodes = self.size / self.inside
        inside = (self.size - nodes) * HOP_INSIDE
        if self.spans_nodes:
            return inside + nodes * HOP_BETWEEN
        return inside

    @property
    def hop_seconds(self) -> float:
        """The slowest step from one rank to the next."""
        return HOP_BETWEEN if self.spans_nodes else HOP_INSIDE

    def pass_seconds(self, gpu: GpuModel, size: float, messages: float = 1.0) -> float:
        """All-gather or reduce-scatter of `size` bytes in so many messages; an all-reduce is two of
        them."""
        if self.size == 1:
            return 0.0
        return size * (self.size - 1) / self.size / self.bandwidth(gpu) + messages * self.hops


def rings(job: PlanJob) -> dict[str, RankRing]:
    """The groups of every axis. Tensor ranks are neighbours, then context, then data; pipeline
    ranks are farthest apart."""
    layout = job.layout
    node = job.gpu.gpus_per_node

    def ring(size: int, stride: int) -> RankRing:
        """`size` ranks that are `stride` apart: of a node's ranks every `stride`-th is a member."""
        return RankRing(size, max(1, min(size, node // stride)))

    # The distance between neighbours of an axis is the product of the axes inside it. Data ranks
    # and context ranks exchange gradients together ("reduce"), so this axis starts right behind
    # tensor.
    tensor = layout.tensor
    shard = layout.shards
    expert = layout.expert
    expert_shard = layout.expert_shards
    return {
        "tensor": ring(tensor, 1),
        "context": ring(layout.context, tensor),
        "shard": ring(shard, tensor),
        "replicate": ring(layout.reduce // shard, tensor * shard),
        "expert": ring(expert, tensor),
        "expert_shard": ring(expert_shard, tensor * expert),
        "expert_replicate": ring(
            layout.reduce // (expert * expert_shard), tensor * expert * expert_shard
        ),
        "reduce": ring(layout.reduce, tensor),
        "pipeline": ring(layout.pipeline, tensor * layout.reduce),
    }


def exposed(seconds: float, window: float) -> float:
    """What an exchange costs beside computation that takes `window` seconds."""
    return max(0.0, seconds - window) + UNHIDDEN * min(seconds, window)


def data_traffic(job: PlanJob, stages: list[PassSeconds], rank: int) -> AxisTraffic:
    """Gradients and parameters of one rank of the pipeline."""
    layout = job.layout
    count = job.parameters_of(rank)
    if layout.reduce == 1:
        return AxisTraffic()
    local_stages = [stages[stage] for stage in job.stages_of(rank)]
    forward = sum(stage.forward for stage in local_stages)
    backward = sum(stage.backward for stage in local_stages)
    if layout.strategy == "fsdp" and layout.shards > 1:
        # Experts are sharded over fewer ranks than the rest, so they are exchanges of their own.
        experts = count.experts + count.frozen_experts
        # quantised parameters travel as bytes: counted in elements of the compute dtype
        gathered = count.total - count.packed + count.packed_bytes // job.compute_bytes - experts
        plain = _fsdp(job, count.trained - count.experts, gathered, forward, backward)
        if experts:
            return plain + _fsdp(job, count.experts, experts, forward, backward, "expert_")
        return plain
    if job.software.exchange == "broadcast":
        return _broadcast(job, count.trained, forward, backward)
    plain = _shards(job, count.trained - count.experts, forward, backward)
    if count.experts:
        return plain + _shards(job, count.experts, forward, backward, "expert_")
    return plain


def _shards(
    job: PlanJob, trained: int, forward: float, backward: float, group: str = ""
) -> AxisTraffic:
    """zero1: gradients are reduced to shards during the last backward; updated parameters are
    gathered during the next forward."""
    ring = rings(job)
    software = job.software
    shard = ring[group + "shard"]
    copies = ring[group + "replicate"]
    buckets = max(1.0, trained / (software.bucket_elements or job.bucket_bytes / job.grad_bytes))

    # Reduce-scatter inside the shard group, then an all-reduce (two passes) of the shard among its
    # copies.
    gradients = trained * software.reduce_bytes
    reduce = shard.pass_seconds(job.gpu, gradients, buckets) + 2 * copies.pass_seconds(
        job.gpu, gradients / shard.size, buckets
    )
    # Without shards (ddp) every rank updates all parameters itself.
    gather = 0.0
    if shard.size > 1:
        gather = shard.pass_seconds(job.gpu, trained * job.compute_bytes, buckets)

    share = (shard.size - 1) / shard.size
    sent_in_shard = (gradients + trained * job.compute_bytes) * share
    sent_to_copies = 2 * gradients / shard.size * (copies.size - 1) / max(1, copies.size)
    return AxisTraffic(
        sent_in_shard + sent_to_copies,
        reduce + gather,
        exposed(reduce, backward) + exposed(gather, forward),
    )


def _broadcast(job: PlanJob, trained: int, forward: float, backward: float) -> AxisTraffic:
    """All-reduce of gradients over all ranks; then every rank of the shard group broadcasts the
    whole parameters it has updated."""
    ring = rings(job)
    software = job.software
    reduce = ring["reduce"]
    shard = ring["shard"]
    buckets = max(1.0, trained / (software.bucket_elements or job.bucket_bytes / job.grad_bytes))
    gradients = trained * software.reduce_bytes
    summed = 2 * reduce.pass_seconds(job.gpu, gradients, buckets)
    # InternEvo assigns whole tensors to ranks: each matrix, and two norms of a layer.
    matrices = sum(1 for spec in job.all_specs.values() if len(spec.shape) > 1)
    tensors = matrices + 2 * job.model.num_layers

    # A chain to every rank, one message for each rank that has whole tensors; nothing is computed
    # meanwhile.
    broadcast = 0.0
    if shard.size > 1:
        chain_hops = min(shard.size, tensors) * shard.size
        broadcast = (
            trained * job.compute_bytes / shard.bandwidth(job.gpu) + chain_hops * shard.hop_seconds
        )

    sent_gradients = 2 * gradients * (reduce.size - 1) / reduce.size
    sent_parameters = trained * job.compute_bytes / max(1, shard.size)
    return AxisTraffic(
        sent_gradients + sent_parameters,
        summed + broadcast,
        exposed(summed, backward) + broadcast,
    )


def _fsdp(
    job: PlanJob, trained: int, total: int, forward: float, backward: float, group: str = ""
) -> AxisTraffic:
    """Parameters are gathered block by block, for forward and again for backward; gradients are
    reduced once a step."""
    ring = rings(job)
    shard = ring[group + "shard"]
    copies = ring[group + "replicate"]
    # One message for each block, and one for embedding and head.
    blocks = job.model.num_layers + 1
    gather = shard.pass_seconds(job.gpu, total * job.compute_bytes, blocks)
    gradients = trained * job.software.reduce_bytes
    reduce = shard.pass_seconds(job.gpu, gradients, blocks) + 2 * copies.pass_seconds(
        job.gpu, gradients / shard.size, blocks
    )
    microbatches = job.accumulate
    gather_again = gather if job.reshard else 0.0

    # In the last backward gathers and the reduction of gradients share the link. So the reduction
    # hides behind the time that the gathers leave.
    gathers_exposed = microbatches * (exposed(gather, forward) + exposed(gather_again, backward))
    reduce_exposed = exposed(reduce, max(0.0, backward - gather_again))

    share = (shard.size - 1) / shard.size
    num_gathers = 2 if job.reshard else 1
    sent = microbatches * num_gathers * total * job.compute_bytes * share + gradients * share
    sent += 2 * gradients / shard.size * (copies.size - 1) / max(1, copies.size)
    return AxisTraffic(
        sent, microbatches * (gather + gather_again) + reduce, gathers_exposed + reduce_exposed
    )


def tensor_traffic(job: PlanJob, layers: int) -> AxisTraffic:
    """Gathers and sums of activations around the products of some layers, one microbatch.

        bytes    layers * passes * T D b * (n - 1) / n
        passes   8, + 2 where inputs are gathered again in backward, + 4 where layers are recomputed

    T tokens of D channels of b bytes, n ranks.
    """
    layout = job.layout
    if layout.tensor == 1:
        return AxisTraffic()
    ring = rings(job)["tensor"]
    size = job.tokens * job.model.hidden_size * job.compute_bytes

    # Without sequence parallelism there are half as many all-reduces, which are two passes each.
    passes = float(TENSOR_PASSES)
    if layout.sequence and job.software.regathers:
        passes += REGATHER_PASSES
    passes += RECOMPUTED_PASSES * _recomputed_share(job)

    seconds = layers * passes * ring.pass_seconds(job.gpu, size)
    sent = layers * passes * size * (ring.size - 1) / ring.size
    # Products wait for their inputs: nothing hides these exchanges unless they are pipelined.
    visible = ASYNC_TENSOR if job.software.async_tensor else 1.0
    return AxisTraffic(sent, seconds, seconds * visible)


def _recomputed_share(job: PlanJob) -> float:
    """Share of the layers whose forward runs a second time."""
    return len(job.memory.recomputed_blocks(job.model.num_layers)) / job.model.num_layers


def context_traffic(job: PlanJob, layers: int) -> AxisTraffic:
    """Exchanges around attention in some layers, one microbatch.

        Ulysses   2 p T b (2 A + 2 K) (h - 1) / h    q, k, v to heads, o back, and their gradients
        ring      (p + 2) T b 2 K (r - 1)            k and v to the next rank; in backward with
                                                     their gradients

    T tokens of a rank, b bytes, A and K widths of query and key heads, h ranks exchange heads, r
    ranks form the ring, p = 1 + half the share of recomputed layers.
    """
    layout = job.layout
    model = job.model
    if layout.context == 1:
        return AxisTraffic()
    ring = rings(job)["context"]
    heads = ulysses_size(layout, model)
    query = model.num_heads * model.head_size / layout.tensor
    key = model.kv_heads * model.head_size / min(layout.tensor, model.kv_heads)
    channel_bytes = job.tokens * job.compute_bytes
    # Recomputation repeats the forward half of the exchanges.
    passes = 1 + 0.5 * _recomputed_share(job)
    exchanged = 2 * passes * channel_bytes * (2 * query + 2 * key) * (heads - 1) / heads
    turns = ring_size(layout, model)
    passed = (passes + 2) * channel_bytes * 2 * key * (turns - 1)

    # Attention waits for its heads; a ring's next keys travel while it computes with the last ones.
    # q, k, v and o are four messages each way.
    rate = ring.bandwidth(job.gpu)
    waiting = layers * (exchanged / rate + 2 * 4 * ring.hops / turns)
    # Keys pass all ranks in forward, in backward, and there once more with their gradients.
    passing = layers * (passed / rate + 3 * (turns - 1) * ring.hop_seconds)
    return AxisTraffic(
        layers * (exchanged + passed), waiting + passing, waiting + UNHIDDEN * passing
    )


def expert_traffic(job: PlanJob, mixtures: int) -> AxisTraffic:
    """Tokens of some mixtures to their experts and back, one microbatch, both ways; equal loads.

        bytes   mixtures * (4 + 2 r) T k D b (n - 1) / n

    T tokens of D channels of b bytes, k experts of a token, n ranks, r the share of recomputed
    layers.
    """
    layout = job.layout
    experts = job.model.experts
    if layout.expert == 1 or experts is None:
        return AxisTraffic()
    ring = rings(job)["expert"]
    # There and back, and their gradients; recomputation repeats the forward half.
    recomputed = 0.5 * _recomputed_share(job)
    exchanges = 4 * (1 + recomputed)
    size = job.tokens * experts.per_token * job.model.hidden_size * job.compute_bytes
    share = (ring.size - 1) / ring.size
    rate = ring.bandwidth(job.gpu)
    if ring.spans_nodes:
        # An all-to-all is no ring: each rank sends through its own adapter.
        rate = min(rate, job.gpu.network * NETWORK)

    # Before tokens go to their experts their counts are exchanged, and the host reads them: it must
    # know how much will arrive. Once in forward, and once more where forward runs a second time.
    hop = ring.hop_seconds
    exchange_seconds = exchanges * (size * share / rate + hop)
    count_seconds = (1 + 2 * recomputed) * (2 * hop + LAUNCH)
    seconds = mixtures * (exchange_seconds + count_seconds)
    return AxisTraffic(mixtures * exchanges * size * share, seconds, seconds)


def mixtures_in(job: PlanJob, layers: range) -> int:
    """How many of some layers are mixtures."""
    return sum(map(job.model.is_mixture, layers))


def pipeline_message(job: PlanJob) -> AxisTraffic:
    """One activation, or its gradient, from a stage to the next."""
    layout = job.layout
    if layout.pipeline == 1:
        return AxisTraffic()
    ring = rings(job)["pipeline"]
    # with sequence parallelism each tensor rank has and sends only its own tokens
    senders = layout.tensor if layout.tensor > 1 and layout.sequence else 1
    size = job.tokens * job.model.hidden_size * job.compute_bytes / senders
    if ring.spans_nodes:
        # point to point: one adapter, not those of all members
        rate = job.gpu.network * NETWORK
    else:
        rate = ring.bandwidth(job.gpu)
    seconds = size / rate + ring.hop_seconds
    return AxisTraffic(size, seconds, seconds)


def stages_of_job(job: PlanJob) -> list[PassSeconds]:
    """Every stage with the exchanges inside its layers, which computation waits for."""
    stages: list[PassSeconds] = []
    for layers, seconds in zip(job.stages, stage_seconds(job), strict=True):
        waiting = (
            tensor_traffic(job, len(layers)).exposed + context_traffic(job, len(layers)).exposed
        )
        waiting += expert_traffic(job, mixtures_in(job, layers)).exposed
        forward = FORWARD_SHARE * waiting
        stages.append(seconds + PassSeconds(forward, waiting - forward, 0.0))
    return stages
