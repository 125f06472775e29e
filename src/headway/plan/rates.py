"""What real work reaches of a GPU's peaks: a few measured constants, each with where it comes from.
Nothing imports torch.

None of them belongs to one row of docs/plan.md: a constant describes a kind of kernel or link on a
generation of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.plan.hardware import GpuModel

AttentionKernel = Literal["cudnn", "fa4", "fa3", "fa2", "fa1"]
Fusion = Literal["compiled", "fused", "eager"]
Exchange = Literal["shards", "broadcast"]

MATMUL = {"hopper": 0.70, "ampere": 0.77, "ada": 0.75, "blackwell": 0.70}
"""Share of the bf16 peak in large matrix products during training. Hopper: 665-766 of 989 TFLOP/s
measured on H200 (power limit). Ampere: 271 of 312 is the best measured product; training runs reach
less. Ada and Blackwell: not measured here.
"""
FP8_MATMUL = 0.54
"""Share of the fp8 peak, scaling and rounding included: 1020-1105 of 1979 TFLOP/s in training steps
on H200."""
SMALL = 48.0
"""A product of sizes m, n, k runs at 1 / (1 + SMALL (1/m + 1/n + 1/k)) of the rate of a large one:
tiles at the edges, short sums."""
ATTENTION: dict[tuple[AttentionKernel, bool], tuple[float, float]] = {
    ("cudnn", True): (0.62, 0.51),
    ("cudnn", False): (0.47, 0.42),
    ("fa4", True): (0.68, 0.57),
    ("fa4", False): (0.545, 0.51),
    ("fa3", True): (0.65, 0.53),
    ("fa3", False): (0.50, 0.42),
    ("fa2", True): (0.345, 0.31),
    ("fa2", False): (0.31, 0.275),
    ("fa1", True): (0.25, 0.22),
    ("fa1", False): (0.22, 0.20),
}
"""Share of Hopper's peak, forward and backward, for heads of 128 or more channels and for smaller
ones; measured on H200 at 8K and 64K."""
ATTENTION_AMPERE = {"cudnn": (0.58, 0.48), "fa2": (0.58, 0.48), "fa1": (0.40, 0.34)}
"""Share of Ampere's peak; heads of 64 channels reach 0.87 of it. From FlashAttention's published
curves."""
SHORT_ROWS = 320.0
"""Attention over T tokens runs at T / (T + SHORT_ROWS) of the rate over long rows."""
STREAMING = 0.80
"""Share of the memory bandwidth in one long pass, such as AdamW: 30 bytes a parameter in 10.8 ms at
1.2 billion on H200."""
ELEMENTWISE = 0.60
"""Share of the memory bandwidth in the many shorter passes between matrix products."""
TRAFFIC: dict[Fusion, float] = {"compiled": 1.0, "fused": 2.0, "eager": 3.2}
"""Bytes of the operations between matrix products, against those of a compiled block: hand-fused
norms and rotary (InternEvo, Megatron, Liger), and plain operations (torchtitan eager against
compiled: 3.4; transformers eager on H200: 4).
"""
LAUNCHES: dict[Fusion, int] = {"compiled": 24, "fused": 60, "eager": 110}
"""Kernels of one block forward; backward has twice as many. A kernel costs the host LAUNCH
seconds."""
LAUNCH = 4.5e-6
NVLINK = 0.78
PCIE = 0.70
NETWORK = 0.86
"""Share of the link's bandwidth that collectives reach with large messages."""
HOP_INSIDE = 2.5e-6
HOP_BETWEEN = 8e-6
"""Seconds from one rank of a ring to the next, in a node and between nodes; the latter from
InternEvo's broadcasts to 1024 GPUs."""
WIDE_HEAD = 96
"""Heads of at least this many channels reach the rates of 128; smaller ones those of 64."""
AMPERE_NARROW_HEAD = 0.87
ATTENTION_BACKWARD_FLOPS = 2.5
"""FLOPs of attention's backward against its forward: five products instead of two, since the scores
are computed again."""
UNHIDDEN = 0.22
"""Share of an exchange that costs time although it runs beside computation: it takes processors and
bandwidth. From InternEvo's 8 to 16 GPUs.
"""
DECODE_READS = 0.85
"""Share of the memory bandwidth at which decoding reads keys and values: 4.1 of 4.8 TB/s at 128K on
H200 (benchmarks/README.md, Decoding)."""
DECODE_BLOCK = 3.4e-5
"""Seconds of one block in a recorded decoding step beside the bytes it reads: a step of one row at
2K takes 1.207 ms in 16 blocks on H200 (benchmarks/README.md, Decoding), of which weights and cache
need 0.66."""
ASYNC_TENSOR = 0.5
"""Share of tensor-parallel exchanges that stays visible where they are pipelined with the
products."""


@dataclass(frozen=True)
class Software:
    """How a training system computes; the defaults are headway's on Hopper."""

    attention: AttentionKernel = "cudnn"
    fusion: Fusion = "compiled"
    exchange: Exchange = "shards"
    """Gradients by reduce-scatter and parameters by all-gather; or by all-reduce, and a broadcast
    of each rank's whole parameters."""
    reduce_bytes: int = 4
    """Bytes of a gradient on its way."""
    async_tensor: bool = False
    regathers: bool = False
    """With sequence parallelism, inputs of products are gathered again in backward instead of
    kept."""
    logits_in_fp32: bool = False
    """The loss makes fp32 copies of the logits."""
    bucket_elements: int | None = None
    """Gradients exchanged at a time; None = the layout's buckets."""


def matmul_seconds(
    gpu: GpuModel, flops: float, sizes: tuple[float, float, float], *, fp8: bool = False
) -> float:
    """Seconds of a matrix product with these sizes."""
    # Power lowers the clock, and arithmetic with it; products are not bound by bandwidth here.
    share = 1 / (1 + SMALL * sum(1 / size for size in sizes))
    if fp8 and gpu.fp8_flops is not None:
        return flops / (gpu.fp8_flops * FP8_MATMUL * share * gpu.power)
    return flops / (gpu.flops * MATMUL[gpu.generation] * share * gpu.power)


def attention_seconds(
    gpu: GpuModel, kernel: AttentionKernel, flops: float, tokens: float, head_size: int
) -> tuple[float, float]:
    """Seconds of attention forward and backward; `flops` of the forward over visible pairs of rows
    of `tokens`."""
    is_wide = head_size >= WIDE_HEAD
    if gpu.generation in ("hopper", "blackwell"):
        forward_share, backward_share = ATTENTION[kernel, is_wide]
    else:
        # FlashAttention 3 and 4 are for Hopper and later: older GPUs run version 2 instead.
        forward_share, backward_share = ATTENTION_AMPERE["fa1" if kernel == "fa1" else "fa2"]
        if not is_wide:
            forward_share = forward_share * AMPERE_NARROW_HEAD
            backward_share = backward_share * AMPERE_NARROW_HEAD

    rate = gpu.flops * gpu.power * tokens / (tokens + SHORT_ROWS)
    forward = flops / (rate * forward_share)
    backward = ATTENTION_BACKWARD_FLOPS * flops / (rate * backward_share)
    return forward, backward
