"""The vocabulary-parallel loss beside the plain one on one GPU: the ranks run one after another, without their exchange.

    PYTHONPATH=src:tests python benchmarks/vocab_parallel.py [--tokens 8192] [--vocab 131072] [--width 2048] [--ranks 2 4 8]

Prints one JSON line for the plain loss (forward and backward, logits in chunks) and one for each number of ranks: milliseconds of the
slowest rank, the time of all ranks together divided by that of the plain loss (what sharing costs beside the exchange), bytes that a rank
sends per step, peak memory, and the largest difference of loss and gradients from the plain loss.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from support.vocab_ranks import EmulatedVocab
from torch import Tensor

from headway.kernels.cross_entropy import Shaping, linear_nll
from headway.kernels.vocab_loss import VocabShard


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, size in (
        ("tokens", 8192),
        ("vocab", 131072),
        ("width", 2048),
        ("chunk", 4096),
        ("repeats", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(given.tokens, given.width, device=device, generator=generator).to(dtype)
    weight = (0.02 * torch.randn(given.vocab, given.width, device=device, generator=generator)).to(
        dtype
    )
    targets = torch.randint(given.vocab, (given.tokens,), device=device, generator=generator)
    for shaping in (Shaping(), Shaping(0.1, 1e-4)):
        measure(given, (hidden, weight, targets), shaping)


def measure(
    given: argparse.Namespace, tensors: tuple[Tensor, Tensor, Tensor], shaping: Shaping
) -> None:
    """The plain loss, then every number of ranks."""
    hidden, weight, targets = tensors
    coefficients = torch.full(targets.shape, 1 / targets.numel(), device=targets.device)

    def step(part: Tensor, shard: Callable[[], VocabShard | None]) -> tuple[Tensor, Tensor, Tensor]:
        own, rows = hidden.clone().requires_grad_(), part.detach().requires_grad_()
        total = linear_nll(
            own, rows, targets, coefficients, shaping, given.chunk, shard=shard()
        ).total
        total.backward()
        assert own.grad is not None and rows.grad is not None
        return total.detach(), own.grad, rows.grad

    plain, right = timed(lambda: step(weight, lambda: None), given.repeats, hidden.device)
    show({"ranks": 1, "shaped": bool(shaping.label_smoothing), **plain})
    for ranks in given.ranks:
        found = time_ranks(
            EmulatedVocab(hidden, weight, targets, given.chunk, ranks), step, given.repeats
        )
        times = [one["milliseconds"] for one, _ in found]
        d_hidden = torch.stack([result[1].float() for _, result in found]).sum(0)
        d_weight = torch.cat([result[2] for _, result in found])
        show(
            {
                "ranks": ranks,
                "shaped": bool(shaping.label_smoothing),
                "milliseconds": max(times),
                "all_ranks_over_plain": round(sum(times) / plain["milliseconds"], 3),
                "sent_bytes": 16 * given.tokens,
                "peak_gib": max(one["peak_gib"] for one, _ in found),
                "loss_difference": abs(float(found[0][1][0] - right[0])),
                "hidden_gradient_difference": far(d_hidden, right[1]),
                "weight_gradient_difference": far(d_weight, right[2]),
            }
        )


def time_ranks(
    emulated: EmulatedVocab, step: Callable[..., Any], repeats: int
) -> list[tuple[dict[str, float], Any]]:
    """Every rank's time and result."""
    return [
        timed(
            lambda rank=rank: step(emulated.weights[rank], lambda rank=rank: emulated.shard(rank)),
            repeats,
            emulated.weights[rank].device,
        )
        for rank in range(len(emulated.weights))
    ]


def timed(
    work: Callable[[], Any], repeats: int, device: torch.device
) -> tuple[dict[str, float], Any]:
    """Mean milliseconds and peak memory of some work, and its last result."""
    work()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(repeats):
        result = work()
    synchronize(device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "milliseconds": round(1000 * (time.perf_counter() - begin) / repeats, 3),
        "peak_gib": round(peak, 2),
    }, result


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def far(got: Tensor, right: Tensor) -> float:
    """The relative distance of two tensors."""
    return float((got.float() - right.float()).norm() / right.float().norm())


def show(line: dict[str, Any]) -> None:
    """One line of JSON."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
