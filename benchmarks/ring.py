"""Ring attention beside attention of whole rows on one GPU: the ranks of a ring run one after another, without their exchanges.

    PYTHONPATH=src:tests python benchmarks/ring.py [--length 65536] [--ranks 4]

Prints the time of forward and backward of whole rows, of every rank of the ring, and what the ring adds: the sum over ranks divided by
the time of whole rows (extra work), and the slowest rank divided by the mean (balance).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.batches import make_batch
from support.one_process_ring import EmulatedRing, split_rows
from torch import Tensor

from headway.kernels.attention import AttentionMask, attend, mask_of
from headway.parallel.ring import RingCore


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Mean time of some work."""
    work()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--documents",
        type=int,
        nargs="+",
        default=[1, 16],
        help="documents of equal length in a row",
    )
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 4])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for documents in given.documents:
        for line in measure(given, documents, device):
            print(json.dumps(line), flush=True)


def measure(
    given: argparse.Namespace, documents: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """One line for every number of ranks."""
    lengths = [[given.length // documents] * documents]
    mask = mask_of(make_batch(lengths, seq_len=given.length, vocab=9, seed=0).to(device))
    heads, kv_heads = given.heads
    q, k, v, d_o = (
        torch.randn(1, given.length, number, 128, device=device, dtype=torch.bfloat16)
        for number in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    backend = "varlen" if device.type == "cuda" else "auto"
    whole = seconds(
        lambda: attend(*leaves, mask, backend=backend).backward(d_o), device, given.repeats
    )
    for ranks in given.ranks:
        parts = [split_rows(x, ranks) for x in (q, k, v, d_o)]
        kv = [torch.stack(pair) for pair in zip(parts[1], parts[2], strict=True)]
        times = [
            rank_seconds(
                EmulatedRing(rank, kv), parts[0][rank], parts[3][rank], mask, given.repeats
            )
            for rank in range(ranks)
        ]
        yield {
            "tokens": given.length,
            "documents": documents,
            "ranks": ranks,
            "whole_ms": round(whole * 1e3, 2),
            "rank_ms": [round(one * 1e3, 2) for one in times],
            "work_vs_whole": round(sum(times) / whole, 3),
            "slowest_vs_mean": round(max(times) / (sum(times) / ranks), 3),
        }


def rank_seconds(
    ring: EmulatedRing, q: Tensor, d_o: Tensor, mask: AttentionMask, repeats: int
) -> float:
    """Time of forward and backward of one rank."""
    inputs = [
        q.detach().requires_grad_(),
        *(x.detach().requires_grad_() for x in ring.kv[ring.rank]),
    ]

    def step() -> None:
        ring.restart()
        o = RingCore(ring)(*inputs, mask)
        ring.restart()
        o.backward(d_o)

    return seconds(step, q.device, repeats)


if __name__ == "__main__":
    main()
