"""What only several ranks can find out: the speed of collectives, a slow or faulty GPU among equals, hosts that differ.

Every rank calls `check_ranks` at the same time. The first rank of each node runs the checks of its host. All ranks get the same report.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from headway.diagnose.check import Check
from headway.diagnose.doctor import DoctorPlan, examine
from headway.diagnose.host import HostNeeds
from headway.diagnose.preflight import preflight
from headway.diagnose.rank_report import Bandwidth, RanksReport
from headway.parallel.collectives import RankGroup
from headway.runtime.machine import usable_cores
from headway.runtime.process import Process
from headway.runtime.progress import quantity

GPU_SIZES, CPU_SIZES = (1 << 20, 16 << 20, 256 << 20), (1 << 16, 1 << 20, 16 << 20)
"""Bytes that every rank holds after the collective."""
SECONDS_PER_CASE = 0.4
MOST_REPEATS = 50
SLOW_NETWORK, SLOW_NODE = 1e9, 4e9
"""Bus bandwidth in bytes/s: between hosts less than a 10 Gbit/s network gives, or on one host less than PCIe gives."""
SLOW_RANK = 0.9
TIMEOUT_SECONDS = 300


class _Leaders:
    """The first ranks of the nodes, which exchange over connections of their own."""

    def __init__(self, group: RankGroup, nodes: Sequence[int]) -> None:
        ranks = sorted({nodes.index(node) for node in nodes})
        self.is_one = group.rank in ranks
        self.rank, self.size = (ranks.index(group.rank) if self.is_one else -1), len(ranks)
        self.handle = dist.new_group(
            ranks, backend="gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS)
        )

    def swap(self, text: str) -> list[str]:
        """The texts of all nodes."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, text, group=self.handle)
        return found


def check_ranks(
    group: RankGroup,
    process: Process,
    device: torch.device,
    plan: DoctorPlan,
    environment: Mapping[str, str],
) -> RanksReport:
    """Check every host of the group, and measure compute on and collectives between all ranks."""
    nodes = group.gather(process.node)
    ranks_here = nodes.count(process.node)
    # srun shows each task its own GPU and its own cores: what the first rank of a host sees is not all that the host's ranks have.
    gpus = group.gather(gpu_identity(device))
    cores = group.gather(sorted(core_numbers()))
    cores_here = {
        core
        for node, numbers in zip(nodes, cores, strict=True)
        if node == process.node
        for core in numbers
    }
    leaders = _Leaders(group, nodes)
    mine: list[Check] = []
    if leaders.is_one:
        local = examine(
            DoctorPlan(plan.run_dir, plan.cache_dir, None, ranks_here, len(cores_here)), environment
        )
        hosts = [(socket.gethostname(), [one.to_json() for one in local])]
        answers = [json.loads(text)[0] for text in leaders.swap(json.dumps(hosts))]
        needs = HostNeeds(ranks_here)
        known = {one.name for one in local}
        found = [
            one
            for one in preflight(leaders, plan.folder, needs, environment)
            if one.name not in known
        ]
        mine = [
            *_by_host(answers),
            *(one for one in found if leaders.size == 1 or ": " not in one.name),
        ]
    first = group.gather([one.to_json() for one in mine])[0]
    checks = [Check.from_json(one) for one in first]
    checks += gpu_checks(gpus)
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    bandwidths = [
        measure(group, name, size, device)
        for size in sizes
        for name in ("all_reduce", "all_gather")
    ]
    checks += [
        sums_check(group, device),
        *compute_checks(group, device),
        *bandwidth_checks(bandwidths, device, leaders.size),
    ]
    return RanksReport(tuple(checks), tuple(bandwidths))


def gpu_identity(device: torch.device) -> str | None:
    """A name of this rank's GPU that no other GPU of any host has; None on a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def core_numbers() -> set[int]:
    """The cores this process may use, by their numbers on the host."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(usable_cores()))


def gpu_checks(gpus: Sequence[str | None]) -> list[Check]:
    """Whether each rank has a GPU of its own, whichever of its host's GPUs it sees. In: the GPU of each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is not None:
            ranks.setdefault(gpu, []).append(rank)
    if not ranks:
        return []
    shared = [users for users in ranks.values() if len(users) > 1]
    if shared:
        detail = f"ranks {', '.join(map(str, shared[0]))} compute on the same GPU"
        return [
            Check(
                "gpu count",
                "fail",
                detail,
                "Start fewer ranks, or show each rank its GPU: `srun --gpus-per-task=1`.",
            )
        ]
    return [Check("gpu count", "ok", f"{len(ranks)} ranks, each with a GPU of its own")]


def _by_host(answers: Sequence[Any]) -> list[Check]:
    """The checks of each host; on several hosts the good ones of all are one line, the others name their host."""
    if len(answers) == 1:
        return [Check.from_json(one) for one in answers[0][1]]
    checks: list[Check] = []
    for node, (host, found) in enumerate(answers):
        bad = [check for check in map(Check.from_json, found) if check.state != "ok"]
        name = f"{host} (node {node})"
        checks += [check.on(name) for check in bad] or [
            Check(name, "ok", f"{len(found)} checks passed")
        ]
    return checks


def measure(group: RankGroup, collective: str, size_bytes: int, device: torch.device) -> Bandwidth:
    """Time one collective; the mean of several, at the slowest rank."""
    count = max(group.size, size_bytes // 4 // group.size * group.size)
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // group.size, device=device)

    def run() -> None:
        (
            group.all_reduce(whole) if collective == "all_reduce" else group.all_gather(whole, part)
        ).wait()

    run()  # the first one connects the ranks
    once = _seconds(group, device, run, 1)
    repeats = max(1, min(MOST_REPEATS, int(SECONDS_PER_CASE / max(once, 1e-6))))
    seconds = _seconds(group, device, run, repeats) / repeats
    sent = (2 if collective == "all_reduce" else 1) * (group.size - 1) / group.size
    return Bandwidth(
        collective, count * 4, seconds, count * 4 / seconds, sent * count * 4 / seconds
    )


def _seconds(group: RankGroup, device: torch.device, run: Any, repeats: int) -> float:
    group.barrier()
    _wait(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(device)
    return group.max(int((time.perf_counter() - begun) * 1e9)) / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sums_check(group: RankGroup, device: torch.device) -> Check:
    """Whether an all-reduce adds correctly, at a size that uses every channel."""
    values = torch.full((1 << 20,), float(group.rank + 1), device=device)
    group.all_reduce(values).wait()
    expected = group.size * (group.size + 1) / 2
    wrong = int((values != expected).sum())
    if group.max(wrong):
        return Check(
            "sum over ranks",
            "fail",
            f"{group.max(wrong)} of {values.numel()} sums are wrong",
            "Check the network and the GPUs' ECC errors.",
        )
    return Check("sum over ranks", "ok", f"{group.size} ranks add correctly")


def compute_checks(group: RankGroup, device: torch.device) -> list[Check]:
    """The speed of one matrix product on each rank, by itself, and whether equal devices compute equal results."""
    size = 8192 if device.type == "cuda" else 256
    dtype = (
        torch.bfloat16
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        else torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    product = a @ b
    _wait(device)
    begun, repeats = time.perf_counter(), 0
    while time.perf_counter() - begun < SECONDS_PER_CASE / 2 or repeats < 3:
        torch.mm(a, b, out=product)
        _wait(device)
        repeats += 1
    rate = 2 * size**3 * repeats / (time.perf_counter() - begun)
    digest = hashlib.sha256(product.float().cpu().numpy().tobytes()).hexdigest()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = group.gather((socket.gethostname(), name, rate, digest))
    return [_speed_check(found, is_gpu=device.type == "cuda"), *_result_check(found)]


def _speed_check(found: Sequence[tuple[str, str, float, str]], *, is_gpu: bool) -> Check:
    rates = [rate for _, _, rate, _ in found]
    middle, slowest = median(rates), min(range(len(rates)), key=lambda rank: rates[rank])
    worst = f"rank {slowest} on {found[slowest][0]}: {rates[slowest] / 1e12:.2f}"
    detail = f"matrix products at {middle / 1e12:.2f} TFLOP/s (median), slowest {worst}"
    if is_gpu and rates[slowest] < SLOW_RANK * middle:
        return Check(
            "compute",
            "warn",
            detail,
            f"Every step waits for rank {slowest}: look at that GPU's clocks, heat and other processes.",
        )
    return Check("compute", "ok", detail)


def _result_check(found: Sequence[tuple[str, str, float, str]]) -> list[Check]:
    """Equal devices give equal bits; one that does not may be broken."""
    for name in dict.fromkeys(one[1] for one in found):
        digests = [(rank, one[3]) for rank, one in enumerate(found) if one[1] == name]
        usual = max({digest for _, digest in digests}, key=[digest for _, digest in digests].count)
        other = [rank for rank, digest in digests if digest != usual]
        if other and name != "cpu":
            where = ", ".join(f"rank {rank} on {found[rank][0]}" for rank in other)
            return [
                Check(
                    "equal results",
                    "fail",
                    f"{where} computed another product than the other {name}",
                    "Test that GPU (dcgmi diag -r 3).",
                )
            ]
    return (
        [Check("equal results", "ok", f"the same product on {len(found)} ranks")]
        if found[0][1] != "cpu"
        else []
    )


def bandwidth_checks(
    bandwidths: Sequence[Bandwidth], device: torch.device, nodes: int
) -> list[Check]:
    """Whether the largest all-reduce is as fast as the slowest usual link."""
    best = max(
        (one for one in bandwidths if one.collective == "all_reduce"), key=lambda one: one.bytes
    )
    detail = f"all-reduce of {quantity(best.bytes, 'bytes')}: {best.bus / 1e9:.2f} GB/s per rank"
    limit = SLOW_NETWORK if nodes > 1 else SLOW_NODE
    if device.type == "cuda" and best.bus < limit:
        remedy = (
            "Set NCCL_SOCKET_IFNAME to the fast interface, and look with NCCL_DEBUG=INFO whether InfiniBand is used (docs/cluster.md)."
            if nodes > 1
            else "Look at nvidia-smi topo -m, and unset NCCL_P2P_DISABLE; in a container use --ipc=host."
        )
        return [Check("bandwidth", "warn", detail, remedy)]
    return [Check("bandwidth", "ok", detail)]
