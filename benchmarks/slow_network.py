"""Step time over a slow link: two network namespaces joined by a cable of limited rate, one rank in each, the same model everywhere.

Compared: torch's DistributedDataParallel, the same with torch's PowerSGD hook, headway without and with overlap, headway's ZeRO-1,
headway with PowerSGD. Bytes are those the cable carried. `alone` is the same step on both ranks with nothing exchanged.
A second part trains 200 steps over an unlimited cable and compares the final losses.

    sudo python benchmarks/slow_network.py [--rate 100mbit] [--steps 8] [--loss-steps 200] [--only NAME...] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.namespaces import ADDRESSES, two_nodes, why_not

BUCKET_BYTES = 1 << 20
WARMUP = 3
"""Steps before the clock starts; while times are measured PowerSGD compresses from the third on."""
OFF = {"reduce": False, "gather": False, "step": False}
PLAIN: dict[str, Any] = {"zero1": {"size": 1}, "bucket_bytes": BUCKET_BYTES}
VARIANTS: dict[str, dict[str, Any] | str] = {
    "alone": "alone",
    "torch DDP": "torch",
    "torch DDP + PowerSGD": "torch powersgd",
    "headway, overlap off": {**PLAIN, "overlap": OFF},
    "headway, overlap on": PLAIN,
    "headway ZeRO-1": {"bucket_bytes": BUCKET_BYTES},
    "headway + PowerSGD": {**PLAIN, "hook": {"kind": "powersgd"}},
}
COMPRESSED = ("torch DDP + PowerSGD", "headway + PowerSGD")
SHAPE = {
    "hidden_size": 512,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 8,
    "ffn_size": 1376,
    "vocab_size": 256,
    "max_seq_len": 128,
}
ROWS, SEQ_LEN = 4, 64


@functools.cache
def corpus() -> Any:
    """The bytes of Python's own library, which every machine has."""
    import torch

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8
    )


def tokens_of(step: int, rank: int) -> Any:
    """Rows of text, other ones on every rank and in every step."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(0, len(corpus()) - SEQ_LEN - 1, (ROWS,), generator=generator)
    return torch.stack([corpus()[start : start + SEQ_LEN + 1].long() for start in starts.tolist()])


def batch_of(step: int, rank: int) -> Any:
    """One rank's rows of a step."""
    import torch

    from headway.data.batch import Batch

    data = tokens_of(step, rank)
    position = torch.arange(SEQ_LEN, dtype=torch.int32).expand(ROWS, SEQ_LEN)
    zeros = torch.zeros(ROWS, SEQ_LEN, dtype=torch.int32)
    bounds = torch.tensor([[0, SEQ_LEN]], dtype=torch.int32).expand(ROWS, 2)
    ones, source = torch.ones(ROWS, SEQ_LEN), torch.zeros(ROWS, dtype=torch.int32)
    return Batch(
        data[:, :-1].contiguous(),
        data[:, 1:].contiguous(),
        ones,
        position,
        zeros,
        source,
        bounds,
        single_document=True,
    )


def headway_step(group: Any, settings: dict[str, Any], total_steps: int) -> Callable[[int], float]:
    """A step of headway's engine; returns the loss over all ranks."""

    from headway.config.load import validate
    from headway.data.batch import StepBatch, StepStats
    from headway.model.config import ModelConfig
    from headway.model.init import initial_value
    from headway.optim.groups import hypers
    from headway.parallel.assemble import assemble
    from headway.parallel.collectives import form_groups
    from headway.parallel.config import ParallelConfig
    from headway.parallel.engine import EngineSpec
    from headway.tasks.base import StepInfo
    from headway.tasks.next_token import Config as NextToken

    config, optim = ModelConfig(**SHAPE), make_optim()
    parallel = validate(ParallelConfig, settings)
    ranks = form_groups(parallel.mesh(group.rank, group.size), group)
    engine = assemble(EngineSpec(config, NextToken(), optim, parallel=parallel, ranks=ranks))
    engine.fill((name, initial_value(spec, config, 0)) for name, spec in engine.specs.items())
    targets = float(group.size * ROWS * SEQ_LEN)

    def step(index: int) -> float:
        stats = StepStats(int(targets), ROWS, SEQ_LEN, ROWS, ROWS, 0)
        batch = StepBatch(
            (batch_of(index, group.rank),),
            {"targets": targets, "rows": float(group.size * ROWS)},
            stats,
            group.rank,
        )
        result = engine.forward_backward(batch, StepInfo(index, total_steps))
        engine.update(hypers(optim, engine.groups, index, total_steps))
        return float(result.loss)

    return step


def make_optim() -> Any:
    """The optimizer of all variants."""
    from headway.optim.adamw import Config as AdamW

    return AdamW(lr=1e-3)


def torch_step(group: Any, hook: dict[str, Any] | None, total_steps: int) -> Callable[[int], float]:
    """A step of torch's DistributedDataParallel around the same model."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
    from torch.nn.parallel import DistributedDataParallel

    from headway.kernels.attention import mask_of
    from headway.model.config import ModelConfig
    from headway.model.init import initial_value
    from headway.model.transformer import Transformer

    config, optim = ModelConfig(**SHAPE), make_optim()
    model = Transformer(config)
    specs = {spec.name: spec for spec in model.param_specs()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(specs[name], config, 0))
    # Over gloo torch's PowerSGD hook works with one bucket alone: with more, ranks run its callbacks in different orders and abort.
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=1000 if hook else BUCKET_BYTES / 2**20, gradient_as_bucket_view=True
    )
    if hook:
        state = powersgd.PowerSGDState(
            None, matrix_approximation_rank=hook["rank"], start_powerSGD_iter=hook["start_step"]
        )
        wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
    decaying = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decaying, "weight_decay": optim.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)

    def step(index: int) -> float:
        batch = batch_of(index, group.rank)
        hidden = wrapped(batch.tokens, batch.position, mask_of(batch))
        loss = nn.functional.cross_entropy(
            (hidden @ model.head_weight.T).flatten(0, 1), batch.targets.flatten()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in adam.param_groups:
            one["lr"] = optim.lr * optim.schedule.factor(index, total_steps)
        adam.step()
        adam.zero_grad(set_to_none=False)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / group.size

    return step


def sent_bytes() -> int:
    """What this namespace has put on the cable."""
    return int(
        Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text()
    )


def worker(variant: str, steps: int, total_steps: int, compression: dict[str, Any]) -> None:
    """One rank of one variant; the first prints what it measured."""
    import torch

    from headway.parallel.collectives import RankGroup, start_group
    from headway.runtime.process import from_environment

    torch.set_num_threads(1)
    with start_group(from_environment(), "gloo", 300) as group:
        wanted = VARIANTS[variant]
        if wanted == "alone":
            step = headway_step(RankGroup(), {}, total_steps)
        elif isinstance(wanted, str):
            step = torch_step(
                group, compression if wanted == "torch powersgd" else None, total_steps
            )
        else:
            hook = {"hook": {**wanted["hook"], **compression}} if "hook" in wanted else {}
            step = headway_step(group, {**wanted, **hook}, total_steps)
        seconds, sent, losses = [], [], []
        for index in range(steps):
            group.barrier()
            before, began = sent_bytes(), time.perf_counter()
            losses.append(step(index))
            seconds.append(time.perf_counter() - began)
            sent.append(sent_bytes() - before)
        if group.rank == 0:
            print(
                json.dumps({"seconds": seconds[WARMUP:], "bytes": sent[WARMUP:], "losses": losses})
            )


def measure(
    nodes: tuple[str, str],
    variant: str,
    lengths: tuple[int, int],
    port: int,
    compression: dict[str, Any],
) -> dict[str, Any]:
    """Run one variant on both nodes; `lengths`: steps to do, and steps of the whole schedule."""
    numbers = {
        "--steps": lengths[0],
        "--loss-steps": lengths[1],
        "--rank": compression["rank"],
        "--start-step": compression["start_step"],
    }
    command = [
        sys.executable,
        __file__,
        "--worker",
        variant,
        *(text for pair in numbers.items() for text in map(str, pair)),
    ]
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    started = []
    for rank, node in enumerate(nodes):
        listing = subprocess.run(
            ["ip", "netns", "exec", node, "ls", "/sys/class/net"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        cable = next(name for name in listing.split() if name.startswith("v"))
        settings = {
            **os.environ,
            **shared,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": cable,
        }
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", node, *command], env=settings, stdout=pipe, text=True
            )
        )
    answer = started[0].communicate()[0]
    if any(process.wait() for process in started):
        raise SystemExit(f"{variant} failed")
    return json.loads(answer.splitlines()[-1])


def known(variant: str) -> bool:
    """Whether this version has the hook a variant needs."""
    from headway.config.kinds import kind_names

    wanted = VARIANTS[variant]
    hook = wanted.get("hook") if isinstance(wanted, dict) else None
    return hook is None or hook["kind"] in kind_names("headway.parallel.hooks")


def report(times: dict[str, float], sent: dict[str, float]) -> list[str]:
    """The ratios that are claimed."""
    lines = []

    def ratio(what: str, slow: str, fast: str) -> None:
        if slow in times and fast in times:
            lines.append(f"{what}: {times[slow] / times[fast]:.2f} x")

    ratio("overlap on over off", "headway, overlap off", "headway, overlap on")
    ratio("headway over torch DDP", "torch DDP", "headway, overlap on")
    ratio("headway's PowerSGD over torch's", *COMPRESSED)
    ratio("torch: PowerSGD over plain", "torch DDP", "torch DDP + PowerSGD")
    ratio("headway: PowerSGD over plain", "headway, overlap on", "headway + PowerSGD")
    for plain, small in (("torch DDP", COMPRESSED[0]), ("headway, overlap on", COMPRESSED[1])):
        if {plain, small, "alone"} <= times.keys():
            less = sent[plain] / sent[small]
            possible = times[plain] / (
                times["alone"] + max(0.0, times[plain] - times["alone"]) / less
            )
            got = times[plain] / times[small]
            lines.append(
                f"{small}: {less:.1f} x fewer bytes allow {possible:.2f} x, reached {got:.2f} x = {got / possible:.0%}"
            )
    return lines


def main() -> None:
    """Measure every variant and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each variant")
    parser.add_argument("--loss-steps", type=int, default=200, help="0 = leave the second part out")
    parser.add_argument("--rank", type=int, default=16, help="rank of PowerSGD")
    parser.add_argument(
        "--start-step",
        type=int,
        default=20,
        help="steps with plain sums before compression, in the second part",
    )
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(
            options.worker,
            options.steps,
            options.loss_steps,
            {"rank": options.rank, "start_step": options.start_step},
        )
        return
    if reason := why_not():
        raise SystemExit(f"cannot measure here: {reason}")
    variants = [name for name in options.only if known(name)]
    for name in set(options.only) - set(variants):
        print(f"{name}: this version has no such hook")
    found: dict[str, Any] = {"rate": options.rate, "steps": {}, "losses": {}}
    with two_nodes(options.rate) as nodes:
        for number, name in enumerate(variants):
            found["steps"][name] = measure(
                nodes,
                name,
                (WARMUP + options.steps, 1000),
                29600 + number,
                {"rank": options.rank, "start_step": 2},
            )
    times = {name: statistics.median(one["seconds"]) for name, one in found["steps"].items()}
    sent = {name: statistics.median(one["bytes"]) for name, one in found["steps"].items()}
    print(
        f"{options.rate}, 2 ranks with one thread each, {ROWS} x {SEQ_LEN} tokens per rank, buckets of {BUCKET_BYTES >> 20} MiB"
    )
    print(f"{'':<26}{'seconds per step':>18}{'MB sent per rank':>18}")
    for name in variants:
        print(f"{name:<26}{times[name]:>18.3f}{sent[name] / 1e6:>18.3f}")
    found["ratios"] = report(times, sent)
    print("\n".join(found["ratios"]))
    compared = [
        name for name in variants if name in ("torch DDP", "headway, overlap on", *COMPRESSED)
    ]
    if options.loss_steps:
        with two_nodes() as nodes:
            for number, name in enumerate(compared):
                compression = {"rank": options.rank, "start_step": options.start_step}
                losses = measure(
                    nodes, name, (options.loss_steps,) * 2, 29700 + number, compression
                )["losses"]
                found["losses"][name] = statistics.mean(losses[-10:])
        print(f"\nloss after {options.loss_steps} steps (mean of the last ten)")
        for name, loss in found["losses"].items():
            base = found["losses"].get(
                "headway, overlap on" if name.startswith("headway") else "torch DDP", loss
            )
            print(f"{name:<26}{loss:>10.4f}{loss / base - 1:>+9.2%}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
