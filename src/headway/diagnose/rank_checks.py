"""What only several ranks can find out: the speed of collectives, a slow or faulty GPU among
equals, hosts that differ.

Every rank calls `check_ranks` at the same time. The first rank of each node runs the checks of its
host. All ranks get the same report.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from headway.diagnose.check import Bandwidth, Check, RanksReport
from headway.diagnose.doctor import DoctorPlan, examine
from headway.diagnose.host import HostNeeds
from headway.diagnose.preflight import preflight
from headway.parallel.collectives import RankGroup
from headway.runtime.machine import usable_cores
from headway.runtime.process import Process
from headway.runtime.progress import quantity

GPU_SIZES = (1 << 20, 16 << 20, 256 << 20)
CPU_SIZES = (1 << 16, 1 << 20, 16 << 20)
"""Bytes that every rank holds after the collective."""
SECONDS_PER_CASE = 0.4
MOST_REPEATS = 50
SLOW_NETWORK = 1e9
"""Bus bandwidth in bytes/s between hosts: less than a 10 Gbit/s network gives."""
SLOW_NODE = 4e9
"""Bus bandwidth in bytes/s on one host: less than PCIe gives."""
SLOW_RANK = 0.9
"""Of the median speed; every step waits for a rank that is slower."""
GPU_MATRIX = 8192
"""Rows and columns of the product that a GPU computes: large enough to reach its peak."""
CPU_MATRIX = 256
TIMEOUT_SECONDS = 300
"""For a host whose own checks take long, on a slow disk for one."""


class ComputeResult(NamedTuple):
    """What one rank computed, how fast, and on what."""

    host: str
    device: str
    rate: float
    """FLOP/s."""
    digest: str


class _Leaders:
    """The first ranks of the nodes, which exchange texts over connections of their own: an
    `Exchange` for `preflight`.
    """

    def __init__(self, group: RankGroup, nodes: Sequence[int]) -> None:
        ranks = sorted({nodes.index(node) for node in nodes})
        self.is_leader = group.rank in ranks
        self.rank = ranks.index(group.rank) if self.is_leader else -1
        self.size = len(ranks)
        # Every rank of the job must call this, also those that are no leaders.
        self.handle = dist.new_group(
            ranks, backend="gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS)
        )

    def swap(self, text: str) -> list[str]:
        """The texts of all nodes."""
        texts: list[Any] = [None] * self.size
        dist.all_gather_object(texts, text, group=self.handle)
        return texts


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
    # srun shows each task its own GPU and its own cores: what the first rank of a host sees is
    # not all that the host's ranks have.
    gpus = group.gather(gpu_identity(device))
    cores = group.gather(sorted(core_numbers()))
    cores_here: set[int] = set()
    for node, numbers in zip(nodes, cores, strict=True):
        if node == process.node:
            cores_here.update(numbers)

    leaders = _Leaders(group, nodes)
    host_checks: list[Check] = []
    if leaders.is_leader:
        local_plan = DoctorPlan(plan.run_dir, plan.cache_dir, None, ranks_here, len(cores_here))
        host_checks = _check_hosts(leaders, local_plan, environment)

    # Leaders have the same list; all ranks take that of the first.
    gathered = group.gather([check.to_json() for check in host_checks])
    checks = [Check.from_json(data) for data in gathered[0]]
    checks += gpu_checks(gpus)

    bandwidths: list[Bandwidth] = []
    for size in GPU_SIZES if device.type == "cuda" else CPU_SIZES:
        bandwidths.append(measure(group, "all_reduce", size, device))
        bandwidths.append(measure(group, "all_gather", size, device))

    checks.append(sums_check(group, device))
    checks += compute_checks(group, device)
    checks += bandwidth_checks(bandwidths, device, leaders.size)
    return RanksReport(tuple(checks), tuple(bandwidths))


def _check_hosts(
    leaders: _Leaders, plan: DoctorPlan, environment: Mapping[str, str]
) -> list[Check]:
    """The checks of each host, then what `preflight` finds by comparing hosts."""
    local_checks = examine(plan, environment)
    message = [socket.gethostname(), [check.to_json() for check in local_checks]]
    answers = [json.loads(text) for text in leaders.swap(json.dumps(message))]

    # `preflight` repeats the fast checks of each host, which `examine` made already. Only what it
    # finds by comparing hosts is new. With several hosts a repeated check is named `HOST: CHECK`
    # (`Check.on`); with a single host it has the name of a check above.
    known_names = {check.name for check in local_checks}
    compared: list[Check] = []
    for check in preflight(leaders, plan.folder, HostNeeds(plan.ranks), environment):
        is_of_one_host = leaders.size > 1 and ": " in check.name
        if check.name not in known_names and not is_of_one_host:
            compared.append(check)
    return [*_by_host(answers), *compared]


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
    """Whether each rank has a GPU of its own, whichever of its host's GPUs it sees.

    In: the GPU of each rank.
    """
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
    """The checks of each host.

    On several hosts the good ones of all are one line, the others name their host.
    """
    if len(answers) == 1:
        _, host_checks = answers[0]
        return [Check.from_json(data) for data in host_checks]

    checks: list[Check] = []
    for node, (host, host_checks) in enumerate(answers):
        name = f"{host} (node {node})"
        not_ok = [check for check in map(Check.from_json, host_checks) if check.state != "ok"]
        if not_ok:
            checks += [check.on(name) for check in not_ok]
        else:
            checks.append(Check(name, "ok", f"{len(host_checks)} checks passed"))
    return checks


def measure(group: RankGroup, collective: str, size_bytes: int, device: torch.device) -> Bandwidth:
    """Time one collective; the mean of several, at the slowest rank.

    `bus` is NCCL's bus bandwidth: a ring sends (n - 1) / n of the bytes once per rank for an
    all-gather, and twice for an all-reduce, which is a reduce-scatter and an all-gather.
    """
    # fp32, divisible by the number of ranks.
    count = max(group.size, size_bytes // 4 // group.size * group.size)
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // group.size, device=device)

    def run() -> None:
        if collective == "all_reduce":
            group.all_reduce(whole).wait()
        else:
            group.all_gather(whole, part).wait()

    run()  # the first one connects the ranks
    once = _seconds(group, device, run, 1)
    repeats = max(1, min(MOST_REPEATS, int(SECONDS_PER_CASE / max(once, 1e-6))))
    seconds = _seconds(group, device, run, repeats) / repeats

    num_bytes = count * 4
    passes = 2 if collective == "all_reduce" else 1
    sent_bytes = passes * (group.size - 1) / group.size * num_bytes
    return Bandwidth(collective, num_bytes, seconds, num_bytes / seconds, sent_bytes / seconds)


def _seconds(group: RankGroup, device: torch.device, run: Any, repeats: int) -> float:
    """The time of some repeats at the slowest rank.

    All ranks get the same number, and repeat as often.
    """
    # Ranks begin together; a rank that began earlier would count its wait for the others.
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
    # Ranks add 1, 2, ..., n: whole numbers, so that the sum is exact in any order.
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
    """The speed of one matrix product on each rank, by itself, and whether equal devices compute
    equal results.
    """
    is_gpu = device.type == "cuda"
    size = GPU_MATRIX if is_gpu else CPU_MATRIX
    dtype = torch.float32
    if is_gpu and torch.cuda.is_bf16_supported(including_emulation=False):
        dtype = torch.bfloat16

    # Drawn on the CPU from one seed: all ranks multiply the same matrices.
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(size, size, generator=generator).to(device, dtype)
    b = torch.randn(size, size, generator=generator).to(device, dtype)
    product = a @ b
    _wait(device)

    begun = time.perf_counter()
    repeats = 0
    # Each product is waited for: queued ones would measure launches.
    while time.perf_counter() - begun < SECONDS_PER_CASE / 2 or repeats < 3:
        torch.mm(a, b, out=product)
        _wait(device)
        repeats += 1

    # A product of n x n matrices has n^3 multiplications and as many additions.
    rate = 2 * size**3 * repeats / (time.perf_counter() - begun)
    digest = hashlib.sha256(product.float().cpu().numpy().tobytes()).hexdigest()
    name = "cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)

    results = group.gather(ComputeResult(socket.gethostname(), name, rate, digest))
    return [_speed_check(results, is_gpu=is_gpu), *_result_check(results)]


def _speed_check(results: Sequence[ComputeResult], *, is_gpu: bool) -> Check:
    """Whether a GPU is slower than the others."""
    rates = [result.rate for result in results]
    # The median, which one bad GPU does not move.
    middle = median(rates)
    slowest = min(range(len(rates)), key=lambda rank: rates[rank])
    worst = f"rank {slowest} on {results[slowest].host}: {rates[slowest] / 1e12:.2f}"
    detail = f"matrix products at {middle / 1e12:.2f} TFLOP/s (median), slowest {worst}"
    if is_gpu and rates[slowest] < SLOW_RANK * middle:
        return Check(
            "compute",
            "warn",
            detail,
            f"Every step waits for rank {slowest}: look at that GPU's "
            "clocks, heat and other processes.",
        )

    return Check("compute", "ok", detail)


def _result_check(results: Sequence[ComputeResult]) -> list[Check]:
    """Equal devices give equal bits; one that does not may be broken."""
    # CPUs of different kinds compute with different instructions, and all of them are "cpu" here.
    if results[0].device == "cpu":
        return []

    for device in dict.fromkeys(result.device for result in results):
        digests = {
            rank: result.digest for rank, result in enumerate(results) if result.device == device
        }
        usual_digest = Counter(digests.values()).most_common(1)[0][0]
        odd_ranks = [rank for rank, digest in digests.items() if digest != usual_digest]
        if odd_ranks:
            odd_words = ", ".join(f"rank {rank} on {results[rank].host}" for rank in odd_ranks)
            return [
                Check(
                    "equal results",
                    "fail",
                    f"{odd_words} computed another product than the other {device}",
                    "Test that GPU (dcgmi diag -r 3).",
                )
            ]

    return [Check("equal results", "ok", f"the same product on {len(results)} ranks")]


def bandwidth_checks(
    bandwidths: Sequence[Bandwidth], device: torch.device, nodes: int
) -> list[Check]:
    """Whether the largest all-reduce is as fast as the slowest usual link."""
    # The largest: small messages measure latency, not bandwidth.
    best = max(
        (bandwidth for bandwidth in bandwidths if bandwidth.collective == "all_reduce"),
        key=lambda bandwidth: bandwidth.bytes,
    )
    detail = f"all-reduce of {quantity(best.bytes, 'bytes')}: {best.bus / 1e9:.2f} GB/s per rank"
    limit = SLOW_NETWORK if nodes > 1 else SLOW_NODE
    if device.type == "cuda" and best.bus < limit:
        remedy = (
            "Look at nvidia-smi topo -m, and unset NCCL_P2P_DISABLE; in a container use --ipc=host."
        )
        if nodes > 1:
            remedy = (
                "Set NCCL_SOCKET_IFNAME to the fast interface, and look with NCCL_DEBUG=INFO "
                "whether InfiniBand is used (docs/cluster.md)."
            )
        return [Check("bandwidth", "warn", detail, remedy)]

    return [Check("bandwidth", "ok", detail)]
