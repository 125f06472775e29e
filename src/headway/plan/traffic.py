"""What ranks send each other in a step: a job comes in; bytes and seconds by axis go out. Numbers only; nothing imports torch.

    data       gradients and parameters of ranks with the same part of the model (zero1: once a step; fsdp: every microbatch and block)
    tensor     activations around every product of a layer          context    heads for tokens (Ulysses), keys and values (ring)
    pipeline   activations and their gradients between stages       expert     tokens to their experts and back

A ring over n ranks sends (n - 1) / n of the whole from every rank. A group inside a node uses its links; one that spans nodes is as fast
as the network adapters of its members in one node.
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


@dataclass(frozen=True)
class AxisTraffic:
    """One axis in one step: what a rank sends, how long that takes, and how much of it computation does not hide."""

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
        within = gpu.link * (NVLINK if gpu.is_nvlink else PCIE)
        return min(within, gpu.network * NETWORK * self.inside) if self.spans_nodes else within

    @property
    def hops(self) -> float:
        """Seconds for a message to pass every rank once."""
        nodes = self.size / self.inside
        return (self.size - nodes) * HOP_INSIDE + (nodes if self.spans_nodes else 0) * HOP_BETWEEN

    def pass_seconds(self, gpu: GpuModel, size: float, messages: float = 1.0) -> float:
        """All-gather or reduce-scatter of `size` bytes in so many messages; an all-reduce is two of them."""
        if self.size == 1:
            return 0.0
        return size * (self.size - 1) / self.size / self.bandwidth(gpu) + messages * self.hops


def rings(job: PlanJob) -> dict[str, RankRing]:
    """The groups of every axis. Tensor ranks are neighbours, then context, then data; pipeline ranks are farthest apart."""
    layout, node = job.layout, job.gpu.gpus_per_node
    found: dict[str, RankRing] = {}
    inner = 1
    for axis, size in (
        ("tensor", layout.tensor),
        ("context", layout.context),
        ("reduce", layout.reduce),
        ("pipeline", layout.pipeline),
    ):
        if axis == "reduce":
            inner = layout.tensor
            found["shard"] = RankRing(layout.shards, max(1, min(layout.shards, node // inner)))
            outer = inner * layout.shards
            copies = layout.reduce // layout.shards
            found["replicate"] = RankRing(copies, max(1, min(copies, node // outer)))
            outer = inner * layout.expert
            found["expert"] = RankRing(layout.expert, max(1, min(layout.expert, node // inner)))
            shards, copies = (
                layout.expert_shards,
                layout.reduce // (layout.expert * layout.expert_shards),
            )
            found["expert_shard"] = RankRing(shards, max(1, min(shards, node // outer)))
            found["expert_replicate"] = RankRing(
                copies, max(1, min(copies, node // (outer * shards)))
            )
        found[axis] = RankRing(size, max(1, min(size, node // inner)))
        inner *= size
    return found


def exposed(seconds: float, window: float) -> float:
    """What an exchange costs beside computation that takes `window` seconds."""
    return max(0.0, seconds - window) + UNHIDDEN * min(seconds, window)


def data_traffic(job: PlanJob, stages: list[PassSeconds], rank: int) -> AxisTraffic:
    """Gradients and parameters of one rank of the pipeline."""
    layout, count = job.layout, job.parameters_of(rank)
    if layout.reduce == 1:
        return AxisTraffic()
    mine = [stages[stage] for stage in job.stages_of(rank)]
    forward, backward = sum(one.forward for one in mine), sum(one.backward for one in mine)
    if layout.strategy == "fsdp" and layout.shards > 1:
        experts = count.experts + count.frozen_experts
        gathered = count.total - count.packed + count.packed_bytes // job.compute_bytes - experts
        plain = _fsdp(job, count.trained - count.experts, gathered, forward, backward)
        return (
            plain + _fsdp(job, count.experts, experts, forward, backward, "expert_")
            if experts
            else plain
        )
    if job.software.exchange == "broadcast":
        return _broadcast(job, count.trained, forward, backward)
    plain = _shards(job, count.trained - count.experts, forward, backward)
    return (
        plain + _shards(job, count.experts, forward, backward, "expert_")
        if count.experts
        else plain
    )


def _shards(
    job: PlanJob, trained: int, forward: float, backward: float, of: str = ""
) -> AxisTraffic:
    """zero1: gradients are reduced to shards during the last backward; updated parameters are gathered during the next forward."""
    ring, software = rings(job), job.software
    shard, copies = ring[of + "shard"], ring[of + "replicate"]
    buckets = max(1.0, trained / (software.bucket_elements or job.bucket_bytes / job.grad_bytes))
    gradients = trained * software.reduce_bytes
    reduce = shard.pass_seconds(job.gpu, gradients, buckets) + 2 * copies.pass_seconds(
        job.gpu, gradients / shard.size, buckets
    )
    gather = (
        shard.pass_seconds(job.gpu, trained * job.compute_bytes, buckets) if shard.size > 1 else 0.0
    )
    share = (shard.size - 1) / shard.size
    sent = (gradients + trained * job.compute_bytes) * share + 2 * gradients / shard.size * (
        copies.size - 1
    ) / max(1, copies.size)
    return AxisTraffic(sent, reduce + gather, exposed(reduce, backward) + exposed(gather, forward))


def _broadcast(job: PlanJob, trained: int, forward: float, backward: float) -> AxisTraffic:
    """All-reduce of gradients over all ranks; then every rank of the shard group broadcasts the whole parameters it has updated."""
    ring, software = rings(job), job.software
    reduce, shard = ring["reduce"], ring["shard"]
    buckets = max(1.0, trained / (software.bucket_elements or job.bucket_bytes / job.grad_bytes))
    gradients = trained * software.reduce_bytes
    summed = 2 * reduce.pass_seconds(job.gpu, gradients, buckets)
    matrices = sum(1 for spec in job.all_specs.values() if len(spec.shape) > 1)
    tensors = matrices + 2 * job.model.num_layers
    # a chain to every rank, one message for each rank that has whole tensors; it hides nothing and nothing hides it
    sent_to_all = trained * job.compute_bytes / shard.bandwidth(job.gpu) + min(
        shard.size, tensors
    ) * shard.size * (HOP_BETWEEN if shard.spans_nodes else HOP_INSIDE)
    gather = sent_to_all if shard.size > 1 else 0.0
    sent = 2 * gradients * (reduce.size - 1) / reduce.size + trained * job.compute_bytes / max(
        1, shard.size
    )
    return AxisTraffic(sent, summed + gather, exposed(summed, backward) + gather)


def _fsdp(
    job: PlanJob, trained: int, total: int, forward: float, backward: float, of: str = ""
) -> AxisTraffic:
    """Parameters are gathered block by block, for forward and again for backward; gradients are reduced once a step."""
    ring = rings(job)
    shard, copies = ring[of + "shard"], ring[of + "replicate"]
    blocks = job.model.num_layers + 1
    gather = shard.pass_seconds(job.gpu, total * job.compute_bytes, blocks)
    gradients = trained * job.software.reduce_bytes
    reduce = shard.pass_seconds(job.gpu, gradients, blocks) + 2 * copies.pass_seconds(
        job.gpu, gradients / shard.size, blocks
    )
    times = job.accumulate
    again = gather if job.reshard else 0.0
    cost = times * (exposed(gather, forward) + exposed(again, backward)) + exposed(
        reduce, max(0.0, backward - again)
    )
    share = (shard.size - 1) / shard.size
    sent = times * (2 if job.reshard else 1) * total * job.compute_bytes * share + gradients * share
    sent += 2 * gradients / shard.size * (copies.size - 1) / max(1, copies.size)
    return AxisTraffic(sent, times * (gather + again) + reduce, cost)


def tensor_traffic(job: PlanJob, layers: int) -> AxisTraffic:
    """Gathers and sums of activations around the products of some layers, one microbatch."""
    layout = job.layout
    if layout.tensor == 1:
        return AxisTraffic()
    ring = rings(job)["tensor"]
    size = job.tokens * job.model.hidden_size * job.compute_bytes
    # with sequence parallelism a gather before and a sum after attention and feed-forward, both ways; else two all-reduces each way
    passes = 8 + (2 if layout.sequence and job.software.regathers else 0)
    again = len(job.memory.recomputed_blocks(job.model.num_layers)) / job.model.num_layers
    passes += 4 * again
    seconds = layers * passes * ring.pass_seconds(job.gpu, size)
    sent = layers * passes * size * (ring.size - 1) / ring.size
    return AxisTraffic(
        sent, seconds, seconds * (ASYNC_TENSOR if job.software.async_tensor else 1.0)
    )


def context_traffic(job: PlanJob, layers: int) -> AxisTraffic:
    """Exchanges around attention in some layers, one microbatch."""
    layout, model = job.layout, job.model
    if layout.context == 1:
        return AxisTraffic()
    ring, heads = rings(job)["context"], ulysses_size(layout, model)
    query = model.num_heads * model.head_size / layout.tensor
    key = model.kv_heads * model.head_size / min(layout.tensor, model.kv_heads)
    each = job.tokens * job.compute_bytes
    again = 1 + 0.5 * len(job.memory.recomputed_blocks(model.num_layers)) / model.num_layers
    # q, k, v to heads and the result back, and their gradients
    exchanged = 2 * again * each * (2 * query + 2 * key) * (heads - 1) / heads
    rounds = ring_size(layout, model)
    # keys and values to the next rank; in backward with their gradients
    passed = (again + 2) * each * 2 * key * (rounds - 1) * heads / max(1, heads)
    rate = ring.bandwidth(job.gpu)
    hop = HOP_BETWEEN if ring.spans_nodes else HOP_INSIDE
    waits = layers * (exchanged / rate + 8 * ring.hops / max(1, rounds))
    passing = layers * (passed / rate + 3 * (rounds - 1) * hop)
    return AxisTraffic(layers * (exchanged + passed), waits + passing, waits + UNHIDDEN * passing)


def expert_traffic(job: PlanJob, mixtures: int) -> AxisTraffic:
    """Tokens of some mixtures to their experts and back, one microbatch, both ways; equal loads."""
    layout, experts = job.layout, job.model.experts
    if layout.expert == 1 or experts is None:
        return AxisTraffic()
    ring = rings(job)["expert"]
    again = 0.5 * len(job.memory.recomputed_blocks(job.model.num_layers)) / job.model.num_layers
    exchanges = 4 * (1 + again)  # there and back, and their gradients
    size = job.tokens * experts.per_token * job.model.hidden_size * job.compute_bytes
    share = (ring.size - 1) / ring.size
    rate = (
        min(ring.bandwidth(job.gpu), job.gpu.network * NETWORK)
        if ring.spans_nodes
        else ring.bandwidth(job.gpu)
    )
    hop = HOP_BETWEEN if ring.spans_nodes else HOP_INSIDE
    # counts are exchanged first, and the host reads them
    seconds = mixtures * (
        exchanges * (size * share / rate + hop) + (1 + 2 * again) * (2 * hop + LAUNCH)
    )
    return AxisTraffic(mixtures * exchanges * size * share, seconds, seconds)


def mixtures_in(job: PlanJob, layers: range) -> int:
    """How many of some layers are mixtures."""
    return sum(map(job.model.is_mixture, layers))


def pipeline_message(job: PlanJob) -> AxisTraffic:
    """One tensor between two stages."""
    layout = job.layout
    if layout.pipeline == 1:
        return AxisTraffic()
    ring = rings(job)["pipeline"]
    shared = layout.tensor if layout.tensor > 1 and layout.sequence else 1
    size = job.tokens * job.model.hidden_size * job.compute_bytes / shared
    rate = job.gpu.network * NETWORK if ring.spans_nodes else ring.bandwidth(job.gpu)
    seconds = size / rate + (HOP_BETWEEN if ring.spans_nodes else HOP_INSIDE)
    return AxisTraffic(size, seconds, seconds)


def stages_of_job(job: PlanJob) -> list[PassSeconds]:
    """Every stage with the exchanges inside its layers, which computation waits for."""
    found: list[PassSeconds] = []
    for stage, seconds in zip(job.stages, stage_seconds(job), strict=True):
        inside = tensor_traffic(job, len(stage)).exposed + context_traffic(job, len(stage)).exposed
        inside += expert_traffic(job, mixtures_in(job, stage)).exposed
        found.append(seconds + PassSeconds(inside / 3, 2 * inside / 3, 0.0))
    return found
