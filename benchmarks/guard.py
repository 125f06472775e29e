"""Ten ratios against torch's own functions, in one process: has something become slower?

    python benchmarks/guard.py                 measure, compare with guard.json, exit code 1 on a fall
    python benchmarks/guard.py --record        measure, and write the ratios of this device into guard.json

A ratio is torch's time divided by headway's, each the median of warm runs that take turns. It hardly
depends on the machine's load or clock. What fell by more than 3 % is measured again twice before it
counts. A device without recorded ratios is measured and said to have none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.adamw import AdamWHyper, AdamWTensors, adamw_step
from headway.kernels.attention import AttentionMask, attend
from headway.kernels.cross_entropy import linear_nll, linear_scores
from headway.kernels.grouped import grouped_linear
from headway.kernels.packed_layout import PackedLayout
from headway.kernels.packed_weight import pack, packed_linear, unpack
from headway.model.config import ModelConfig
from headway.model.layers import FeedForward, RMSNorm
from headway.model.paged_cache import CacheShape, PagedCache
from headway.model.rope import rotate
from headway.runtime.machine import cpu_name

RECORDED = Path(__file__).with_name("guard.json")
TOLERANCE = 0.03
WARM_RUNS = 3
RUNS = 15
SHORTEST_RUN_SECONDS = 0.01
"""A run repeats its function until it takes about so long."""
AGAIN = 2
"""How often a ratio that fell is measured again."""
Outputs = Sequence[Tensor]


@dataclass(frozen=True)
class Sizes:
    """How large the tensors are."""

    tokens: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    rows: int
    """Sequences of a decoding step."""


LARGE = Sizes(8192, 2048, 32, 8, 64, 8192, 32_000, 32)
"""For GPUs: the shapes of a model of 1B parameters."""
SMALL = Sizes(512, 256, 8, 2, 32, 1024, 4096, 8)
"""For CPUs."""
TINY = Sizes(48, 32, 4, 2, 8, 64, 96, 3)
"""For tests."""


@dataclass(frozen=True)
class Pair:
    """The same result by headway's function and by torch's own."""

    name: str
    headway: Callable[[], Outputs]
    torch: Callable[[], Outputs]


def pairs(device: torch.device, sizes: Sizes) -> list[Pair]:
    """All pairs on a device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    makers = (
        _head_loss, _scores, _adamw, _documents, _norm, _rotation, _feed_forward, _experts,
        _packed_product, _paged_step,
    )  # fmt: skip
    return [make(drawn, sizes) for make in makers]


Drawn = Callable[..., Tensor]


def _head_loss(drawn: Drawn, sizes: Sizes) -> Pair:
    hidden = drawn(sizes.tokens, sizes.width).requires_grad_()
    weight = (drawn(sizes.vocab, sizes.width) * 0.02).requires_grad_()
    targets = torch.arange(sizes.tokens, device=hidden.device) % sizes.vocab
    coefficients = torch.full((sizes.tokens,), 1 / sizes.tokens, device=hidden.device)

    def ours() -> Outputs:
        total = linear_nll(hidden, weight, targets, coefficients).total
        return (total, *torch.autograd.grad(total, (hidden, weight)))

    def theirs() -> Outputs:
        total = F.cross_entropy((hidden @ weight.t()).float(), targets)
        return (total, *torch.autograd.grad(total, (hidden, weight)))

    return Pair("head and loss", ours, theirs)


def _scores(drawn: Drawn, sizes: Sizes) -> Pair:
    hidden = drawn(sizes.tokens, sizes.width).requires_grad_()
    weight = (drawn(sizes.vocab, sizes.width) * 0.02).requires_grad_()
    targets = torch.arange(sizes.tokens, device=hidden.device) % sizes.vocab

    def ours() -> Outputs:
        scores, _ = linear_scores(hidden, weight, targets)
        return (scores, *torch.autograd.grad(scores.mean(), (hidden, weight)))

    def theirs() -> Outputs:
        known = (hidden @ weight.t()).float().log_softmax(-1)
        scores = known.gather(1, targets[:, None]).squeeze(1)
        return (scores, *torch.autograd.grad(scores.mean(), (hidden, weight)))

    return Pair("log-probabilities of answers", ours, theirs)


def _adamw(drawn: Drawn, sizes: Sizes) -> Pair:
    count = sizes.width * sizes.ffn
    grad = drawn(count).float()
    device = grad.device
    found_inf = torch.zeros((), device=device)
    scale = torch.ones((), device=device)

    def state() -> AdamWTensors:
        param = torch.ones(count, device=device)
        moments = [torch.zeros_like(param), torch.zeros_like(param)]
        step = torch.zeros((), device=device)
        copy = torch.ones(count, device=device, dtype=torch.bfloat16)
        return AdamWTensors([param], [grad], [moments[0]], [moments[1]], [step], [copy])

    mine, plain = state(), state()
    hyper = AdamWHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, False)

    def ours() -> Outputs:
        adamw_step(mine, hyper, scale, found_inf)
        return (mine.params[0], mine.copies[0])

    def theirs() -> Outputs:
        torch._foreach_add_(list(plain.steps), 1)
        torch._fused_adamw_(
            list(plain.params),
            list(plain.grads),
            list(plain.exp_avg),
            list(plain.exp_avg_sq),
            [],
            list(plain.steps),
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=found_inf,
        )
        plain.copies[0].copy_(plain.params[0])
        return (plain.params[0], plain.copies[0])

    return Pair("AdamW step", ours, theirs)


def _documents(drawn: Drawn, sizes: Sizes) -> Pair:
    # Five documents of different lengths in one row.
    cuts = [0, *(sizes.tokens * part // 16 for part in (1, 3, 6, 10, 16))]
    q = drawn(1, sizes.tokens, sizes.heads, sizes.head_size)
    k = drawn(1, sizes.tokens, sizes.kv_heads, sizes.head_size)
    v = drawn(1, sizes.tokens, sizes.kv_heads, sizes.head_size)
    document = torch.cat(
        [torch.full((end - begin,), number) for number, (begin, end) in enumerate(spans(cuts))]
    )
    bounds = torch.tensor([cuts], dtype=torch.int32, device=q.device)
    mask = AttentionMask(
        document[None].to(q.device, torch.int32),
        bounds,
        False,
        bounds.flatten(),
        max(end - begin for begin, end in spans(cuts)),
        (tuple(cuts),),
    )

    def ours() -> Outputs:
        return (attend(q, k, v, mask),)

    def theirs() -> Outputs:
        parts = [
            F.scaled_dot_product_attention(
                q[:, begin:end].transpose(1, 2),
                k[:, begin:end].transpose(1, 2),
                v[:, begin:end].transpose(1, 2),
                is_causal=True,
                enable_gqa=True,
            ).transpose(1, 2)
            for begin, end in spans(cuts)
        ]
        return (torch.cat(parts, 1),)

    return Pair("attention of packed documents", ours, theirs)


def spans(cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each document."""
    return list(pairwise(cuts))


def _norm(drawn: Drawn, sizes: Sizes) -> Pair:
    x = drawn(sizes.tokens, sizes.width).requires_grad_()
    grad = drawn(sizes.tokens, sizes.width)
    norm = RMSNorm(sizes.width, 1e-5).to(x.device, x.dtype)

    forward = compiled(norm.forward, x.device)

    def ours() -> Outputs:
        y = forward(x)
        return (y, *torch.autograd.grad(y, (x,), grad))

    def theirs() -> Outputs:
        y = F.rms_norm(x, (sizes.width,), norm.weight, 1e-5)
        return (y, *torch.autograd.grad(y, (x,), grad))

    return Pair("RMS norm", ours, theirs)


def _rotation(drawn: Drawn, sizes: Sizes) -> Pair:
    x = drawn(1, sizes.tokens, sizes.heads, sizes.head_size)
    angle = torch.rand(1, sizes.tokens, sizes.head_size // 2, device=x.device)
    cos, sin = angle.cos(), angle.sin()
    turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]
    apply = compiled(rotate, x.device)

    def ours() -> Outputs:
        return (apply(x, cos, sin),)

    def theirs() -> Outputs:
        # As a product of complex numbers, one per plane.
        planes = torch.stack(x.float().chunk(2, -1), -1).contiguous()
        turned = torch.view_as_real(torch.view_as_complex(planes) * turn)
        return (turned.transpose(-1, -2).flatten(-2).to(x.dtype),)

    return Pair("rotary positions", ours, theirs)


def _feed_forward(drawn: Drawn, sizes: Sizes) -> Pair:
    config = ModelConfig(
        hidden_size=sizes.width, num_layers=1, num_heads=1, ffn_size=sizes.ffn, vocab_size=8,
        max_seq_len=8,
    )  # fmt: skip
    x = drawn(sizes.tokens, sizes.width).requires_grad_()
    grad = drawn(sizes.tokens, sizes.width)
    mlp = FeedForward(config).to(x.device, x.dtype)
    forward = compiled(mlp.forward, x.device)
    assert mlp.gate_proj is not None
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight

    def ours() -> Outputs:
        y = forward(x)
        return (y, *torch.autograd.grad(y, (x, down), grad))

    def theirs() -> Outputs:
        y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return (y, *torch.autograd.grad(y, (x, down), grad))

    return Pair("SwiGLU", ours, theirs)


def _experts(drawn: Drawn, sizes: Sizes) -> Pair:
    experts = 8
    x = drawn(sizes.tokens, sizes.width)
    weight = drawn(experts, sizes.ffn // experts, sizes.width) * 0.02
    cuts = [sizes.tokens * (number * (number + 1)) // (experts * (experts + 1)) for number in range(experts + 1)]  # fmt: skip
    ends = torch.tensor(cuts[1:], dtype=torch.int32, device=x.device)

    def ours() -> Outputs:
        return (grouped_linear(x, weight, ends),)

    def theirs() -> Outputs:
        parts = [
            F.linear(x[begin:end], weight[number])
            for number, (begin, end) in enumerate(spans(cuts))
        ]
        return (torch.cat(parts),)

    return Pair("product per expert", ours, theirs)


def _packed_product(drawn: Drawn, sizes: Sizes) -> Pair:
    x = drawn(sizes.tokens, sizes.width)
    layout = PackedLayout("nf4", sizes.ffn, sizes.width)
    packed = pack(drawn(sizes.ffn, sizes.width).float() * 0.02, "nf4")
    weight = unpack(packed, layout, x.dtype)

    def ours() -> Outputs:
        return (packed_linear(x, packed, layout),)

    def theirs() -> Outputs:
        return (F.linear(x, weight),)

    return Pair("nf4 product", ours, theirs)


def _paged_step(drawn: Drawn, sizes: Sizes) -> Pair:
    page_tokens = 16
    length = max(page_tokens, sizes.tokens // 4)
    config = ModelConfig(
        hidden_size=sizes.heads * sizes.head_size, num_layers=1, num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads, ffn_size=8, vocab_size=8, max_seq_len=length + 1,
    )  # fmt: skip
    q = drawn(sizes.rows, 1, sizes.heads, sizes.head_size)
    k = drawn(sizes.rows, length, sizes.kv_heads, sizes.head_size)
    v = drawn(sizes.rows, length, sizes.kv_heads, sizes.head_size)
    pages_of_row = -(-length // page_tokens)
    cache = PagedCache(
        CacheShape(config, None, length + 1, page_tokens, q.dtype),
        slots=sizes.rows,
        pages=sizes.rows * pages_of_row + 1,
        snapshots=0,
        device=q.device,
    )
    for row in range(sizes.rows):
        cache.table.append(row, [cache.pool.allocate() for _ in range(pages_of_row)])
    cache.table.flush()
    batch = cache.decode_batch(sizes.rows)
    batch.slots.copy_(torch.arange(sizes.rows))

    # One token at a time, as decoding fills it.
    for number in range(length):
        position = torch.full((sizes.rows, 1), number, device=q.device)
        batch.most = number + 1
        batch.attend(0, q, k[:, number, None], v[:, number, None], position)
    last = torch.full((sizes.rows, 1), length - 1, device=q.device)

    def ours() -> Outputs:
        return (batch.attend(0, q, k[:, -1:], v[:, -1:], last),)

    def theirs() -> Outputs:
        output = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
        )
        return (output.transpose(1, 2),)

    return Pair("decoding step over pages", ours, theirs)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """As training runs it: compiled on GPUs, plain on CPUs."""
    if device.type == "cuda":
        return torch.compile(function, dynamic=False)
    return function


def ratio_of(pair: Pair, clock: Callable[[Callable[[], Outputs]], float]) -> float:
    """torch's time divided by headway's; the runs of both take turns."""
    for _ in range(WARM_RUNS):
        clock(pair.headway)
        clock(pair.torch)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(RUNS):
        ours.append(clock(pair.headway))
        theirs.append(clock(pair.torch))
    return statistics.median(theirs) / statistics.median(ours)


def clock_on(device: torch.device) -> Callable[[Callable[[], Outputs]], float]:
    """Measures the seconds of one call, as the mean of as many as a run takes."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds(function: Callable[[], Outputs], repeats: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            function()
        wait()
        return (time.perf_counter() - begin) / repeats

    def clock(function: Callable[[], Outputs]) -> float:
        once = seconds(function, 1)
        return seconds(function, max(1, round(SHORTEST_RUN_SECONDS / once)))

    return clock


def falls(now: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """The names of the ratios that fell by more than the tolerance."""
    return [
        name
        for name, ratio in now.items()
        if name in recorded and ratio < recorded[name] * (1 - TOLERANCE)
    ]


def measure_again(
    now: Mapping[str, float], recorded: Mapping[str, float], ratio: Callable[[str], float]
) -> dict[str, float]:
    """The same ratios, where those that fell are the best of several measurements."""
    best = dict(now)
    for _ in range(AGAIN):
        for name in falls(best, recorded):
            best[name] = max(best[name], ratio(name))
    return best


def read_recorded(path: Path, device: str) -> dict[str, float]:
    """The recorded ratios of a device; empty where there are none."""
    if not path.is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8")).get(device, {}).get("ratios", {})


def record(path: Path, device: str, ratios: Mapping[str, float]) -> None:
    """Write the ratios of a device; those of others stay."""
    recorded: dict[str, Any] = {}
    if path.is_file():
        recorded = json.loads(path.read_text(encoding="utf-8"))
    recorded[device] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "ratios": {name: round(ratio, 4) for name, ratio in ratios.items()},
    }
    path.write_text(json.dumps(recorded, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def table(now: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """A line per ratio: its name, what it is, what it was, and the change."""
    lines = [f"{'torch / headway':32}{'now':>8}{'recorded':>10}{'change':>9}"]
    for name, ratio in now.items():
        line = f"{name:32}{ratio:8.3f}"
        if name in recorded:
            line += f"{recorded[name]:10.3f}{ratio / recorded[name] - 1:+9.1%}"
        lines.append(line)
    return lines


def guard(
    device: str,
    measure: Callable[[str], float],
    names: Sequence[str],
    path: Path = RECORDED,
    *,
    records: bool = False,
    say: Callable[[str], object] = print,
) -> int:
    """Measure, compare or record; the exit code."""
    recorded = read_recorded(path, device)
    now = {name: measure(name) for name in names}
    if recorded and not records:
        now = measure_again(now, recorded, measure)
    say(device)
    for line in table(now, recorded):
        say(line)
    if records:
        record(path, device, now)
        say(f"recorded in {path.name}")
        return 0
    if not recorded:
        say("No ratios are recorded for this device, so nothing is compared. Record with --record.")
        return 0
    fallen = falls(now, recorded)
    if fallen:
        say(f"fell by more than {TOLERANCE:.0%}: {', '.join(fallen)}")
        return 1
    say(f"nothing fell by more than {TOLERANCE:.0%}")
    return 0


def main() -> int:
    """Run on the command line's device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--record", action="store_true", help="write the ratios to guard.json")
    options = parser.parse_args()
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    sizes = LARGE if kind == "cuda" else SMALL
    name = cpu_name()
    if kind == "cuda":
        name = torch.cuda.get_device_name()
    by_name = {pair.name: pair for pair in pairs(device, sizes)}
    clock = clock_on(device)
    return guard(
        name, lambda pair: ratio_of(by_name[pair], clock), list(by_name), records=options.record
    )


if __name__ == "__main__":
    sys.exit(main())
