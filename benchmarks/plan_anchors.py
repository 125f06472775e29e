"""Measurements that `headway plan` is compared with: each a `PlanJob` and what was measured. Own ones first, then published tables.

Nothing here is fitted per row. A row says which software it was (attention kernel, compiled or not, how gradients travel), because that is
known from its source; what is not published and was assumed is in `note`.

    python benchmarks/plan_anchors.py                          print the errors
    python benchmarks/plan_anchors.py --write docs/plan.md     and put them into the page
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.model.adapter.config import AdapterConfig, all_specs
from headway.model.config import ModelConfig
from headway.parallel.config import MemoryConfig
from headway.parallel.layouts import Layout
from headway.plan.hardware import GPUS
from headway.plan.job import PlanJob
from headway.plan.memory import ROUND, moments
from headway.plan.rates import Software
from headway.plan.result import make_plan

BEGIN, END = "<!-- errors: made by benchmarks/plan_anchors.py -->", "<!-- end of errors -->"


@dataclass(frozen=True)
class Anchor:
    """One measurement."""

    source: str
    name: str
    job: PlanJob
    tokens_per_second: float | None = None
    """Per GPU."""
    peak_gib: float | None = None
    note: str = ""
    gradients_from_start: bool = False
    """Measured while the first forward still found gradients in memory."""


OURS = "headway, one H200, benchmarks/README.md and docs/memory.md, 2026-11-15"
LLAMA_1B, LLAMA_3B, LLAMA_8B = (ModelConfig(preset=f"llama-{size}") for size in ("1b", "3b", "8b"))
WIDE = ModelConfig(preset="llama-8b", num_layers=10)
INTERNLM = ModelConfig(
    family="internlm", hidden_size=4096, num_layers=32, num_heads=32, ffn_size=11008, vocab_size=103168, tie_embeddings=False,
    qkv_bias=True, output_bias=True, max_seq_len=2048,
)  # fmt: skip


def recompute(value: float | str, *offload: Any) -> MemoryConfig:
    """A memory section."""
    return MemoryConfig(recompute=value, offload=offload)


def one_gpu(
    name: str,
    model: ModelConfig,
    rows: int,
    seq_len: int,
    speed: float | None,
    peak: float | None,
    **job: Any,
) -> Anchor:
    """A measurement of headway's own."""
    trained_all = "training" not in job
    return Anchor(
        OURS,
        name,
        PlanJob(model, seq_len, rows, 1, **job),
        speed,
        peak,
        gradients_from_start=trained_all,
    )


def own() -> Iterator[Anchor]:
    """One H200. Of several runs of a case the mean is taken."""
    fa4, fp8 = Software("fa4"), {"precision": "fp8"}
    yield one_gpu("1b, 4 x 8K, cuDNN", LLAMA_1B, 4, 8192, 56_494, 59.6)
    yield one_gpu("1b, 4 x 8K, FlashAttention-4", LLAMA_1B, 4, 8192, 59_055, 59.6, software=fa4)
    yield one_gpu("1b, 8 x 4K", LLAMA_1B, 8, 4096, 63_716, 59.6)
    yield one_gpu("1b, 16 x 2K, FlashAttention-4", LLAMA_1B, 16, 2048, 69_090, 59.6, software=fa4)
    yield one_gpu("1b, 1 x 64K", LLAMA_1B, 1, 65536, 20_803, 97.9)
    yield one_gpu("1b, 1 x 64K, FlashAttention-4", LLAMA_1B, 1, 65536, 23_916, 97.9, software=fa4)
    yield one_gpu("3b, 2 x 8K", LLAMA_3B, 2, 8192, 22_560, 94.0)
    yield one_gpu("8b10L, 4 x 8K", WIDE, 4, 8192, 31_169, 99.8)
    yield one_gpu("8b10L, 4 x 8K, fp8 tensorwise", WIDE, 4, 8192, 41_048, None, **fp8)
    yield one_gpu("8b10L, 4 x 8K, fp8 rowwise", WIDE, 4, 8192, 38_979, 88.2, **fp8)
    yield one_gpu("1b, 4 x 8K, fp8 tensorwise", LLAMA_1B, 4, 8192, 66_280, None, **fp8)
    yield one_gpu("1b, 4 x 8K, 8-bit state", LLAMA_1B, 4, 8192, 53_392, 52.8, state_dtype="8bit")
    yield one_gpu(
        "1b, 4 x 8K, recompute selective",
        LLAMA_1B,
        4,
        8192,
        54_710,
        48.0,
        memory=recompute("selective"),
    )
    yield one_gpu(
        "1b, 4 x 8K, optimizer offloaded",
        LLAMA_1B,
        4,
        8192,
        37_977,
        45.7,
        memory=recompute("none", "optimizer"),
    )
    yield one_gpu("1b, 4 x 8K, recompute 1", LLAMA_1B, 4, 8192, 44_268, 25.6, memory=recompute(1.0))
    yield one_gpu(
        "1b, 4 x 8K, recompute 1, activations offloaded",
        LLAMA_1B,
        4,
        8192,
        44_003,
        23.9,
        memory=recompute(1.0, "activations"),
    )
    least = MemoryConfig(
        recompute=1.0, offload=("activations", "optimizer"), loss_chunk_tokens=2048
    )
    yield one_gpu(
        "1b, 4 x 8K, everything", LLAMA_1B, 4, 8192, 36_842, 10.1, memory=least, state_dtype="8bit"
    )
    long = MemoryConfig(recompute=1.0, offload=("activations",), loss_chunk_tokens=2048)
    yield one_gpu(
        "1b, 1 x 128K, recompute 1, offload, 8-bit state",
        LLAMA_1B,
        1,
        131072,
        None,
        26.4,
        memory=long,
        state_dtype="8bit",
    )
    yield one_gpu(
        "1b, 1 x 256K, recompute 1, offload, 8-bit state",
        LLAMA_1B,
        1,
        262144,
        None,
        38.7,
        memory=long,
        state_dtype="8bit",
    )
    deep = ModelConfig(preset="llama-8b", num_layers=64)
    yield one_gpu(
        "8b widths, 64 layers, everything",
        deep,
        1,
        8192,
        2_079,
        85.5,
        memory=least,
        state_dtype="8bit",
    )
    adapter = AdapterConfig(rank=16)
    lora: dict[str, Any] = {
        "specs": all_specs(LLAMA_8B, adapter),
        "training": frozenset(adapter.shapes(LLAMA_8B)),
    }
    yield one_gpu("8b LoRA, 4 x 4K", LLAMA_8B, 4, 4096, 15_472, 85.7, **lora)
    yield one_gpu(
        "8b LoRA, 4 x 4K, recompute 1",
        LLAMA_8B,
        4,
        4096,
        10_899,
        23.6,
        memory=recompute(1.0),
        **lora,
    )


def own_peaks() -> Iterator[Anchor]:
    """Peaks of benchmarks/plan_memory.py on one H200; gradients have no memory before the first backward."""
    small = ModelConfig(
        hidden_size=1280,
        num_layers=20,
        num_heads=20,
        num_kv_heads=4,
        ffn_size=5120,
        vocab_size=50304,
        max_seq_len=8192,
    )
    adapter = AdapterConfig(rank=16)
    lora: dict[str, Any] = {
        "specs": all_specs(LLAMA_8B, adapter),
        "training": frozenset(adapter.shapes(LLAMA_8B)),
    }
    cases: tuple[tuple[str, ModelConfig, int, int, int, float, dict[str, Any]], ...] = (
        ("1b, 4 x 8K", LLAMA_1B, 4, 8192, 1, 55.96, {}),
        (
            "1b, 4 x 8K, recompute selective",
            LLAMA_1B,
            4,
            8192,
            1,
            44.47,
            {"memory": recompute("selective")},
        ),
        ("1b, 4 x 8K, recompute 1", LLAMA_1B, 4, 8192, 1, 23.60, {"memory": recompute(1.0)}),
        ("1b, 4 x 8K, fp8", LLAMA_1B, 4, 8192, 1, 45.29, {"precision": "fp8"}),
        ("1b, 4 x 2 x 4K, accumulated", LLAMA_1B, 2, 4096, 4, 32.13, {}),
        (
            "1b, 4 x 8K, recompute 1, optimizer offloaded",
            LLAMA_1B,
            4,
            8192,
            1,
            9.97,
            {"memory": recompute(1.0, "optimizer")},
        ),
        ("0.5b, 4 x 8K", small, 4, 8192, 1, 37.06, {}),
        (
            "0.5b, 2 x 8K, not compiled",
            small,
            2,
            8192,
            1,
            30.08,
            {"software": Software(fusion="eager")},
        ),
        ("3b, 2 x 8K, 8-bit state", LLAMA_3B, 2, 8192, 1, 65.95, {"state_dtype": "8bit"}),
        ("8b10L, 4 x 8K", WIDE, 4, 8192, 1, 89.90, {}),
        ("8b LoRA, 4 x 4K", LLAMA_8B, 4, 4096, 1, 85.62, lora),
        (
            "8b LoRA, 4 x 4K, recompute 1",
            LLAMA_8B,
            4,
            4096,
            1,
            23.52,
            {"memory": recompute(1.0), **lora},
        ),
    )
    for name, model, rows, seq_len, accumulate, peak, more in cases:
        yield Anchor(
            "headway, one H200, benchmarks/plan_memory.py, 2026-11-16",
            name,
            PlanJob(model, seq_len, rows, accumulate, **more),
            None,
            peak,
        )


def internlm() -> Iterator[Anchor]:
    """InternLM 7B on A100-80G, four adapters of 100 Gb/s per node of eight, rows of 2K."""
    source = "InternEvo, doc/en/train_performance.md"
    gpu = GPUS["a100"].with_network(50, 8)
    software = Software("fa1", "fused", "broadcast", reduce_bytes=2, bucket_elements=1 << 29)
    tables = (
        ("zero1 over all", 1, None, (4062, 3842, 3752, 3690, 3571, 3209, 2861, 2271)),
        ("zero1 over 8", 1, 8, (4078, 3939, 3919, 3944, 3928, 3920, 3835, 3625)),
        ("tensor 2, zero1 over all", 2, None, (3822, 3595, 3475, 3438, 3308, 3094, 2992, 2785)),
        ("tensor 2, zero1 over 4", 2, 4, (3761, 3658, 3655, 3650, 3651, 3653, 3589, 3486)),
    )
    for name, tensor, shard, speeds in tables:
        for index, speed in enumerate(speeds):
            world = 8 << index
            layout = Layout(world, tensor=tensor, sequence=False, shard=shard)
            note = (
                ""
                if tensor == 1
                else "rows per microbatch not published: as many tokens per GPU as without tensor"
            )
            job = PlanJob(INTERNLM, 2048, 2 * tensor, 4, layout, gpu, software=software)
            yield Anchor(source, f"{world} GPUs, {name}", job, speed, note=note)
    for index, speed in enumerate((3314, 3268, 3323, 3217, 3260, 3215, 3199, 3163)):
        world = 8 << index
        job = PlanJob(
            INTERNLM,
            2048,
            8,
            1,
            Layout(world, shard=8),
            gpu,
            software=software,
            memory=recompute(1.0),
        )
        yield Anchor(source, f"{world} GPUs, zero1 over 8, recompute 1", job, speed)


LLAMA2_7B = INTERNLM.with_(
    family="llama", vocab_size=32000, qkv_bias=False, output_bias=False, max_seq_len=4096
)
LLAMA2_13B = LLAMA2_7B.with_(hidden_size=5120, num_layers=40, num_heads=40, ffn_size=13824)
LLAMA_70B = ModelConfig(
    hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_size=28672, vocab_size=128256, tie_embeddings=False,
    max_seq_len=131072,
)  # fmt: skip
LLAMA2_70B = LLAMA_70B.with_(vocab_size=32000)
"""MPT has no gate: two matrices of 4 D are as much arithmetic as three of 8/3 D."""
MPT_7B = ModelConfig(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    ffn_size=10944,
    vocab_size=50432,
    max_seq_len=65536,
)
MPT_1B = ModelConfig(
    hidden_size=2048,
    num_layers=24,
    num_heads=16,
    ffn_size=5440,
    vocab_size=50432,
    max_seq_len=65536,
)
MPT_3B = ModelConfig(
    hidden_size=2560,
    num_layers=32,
    num_heads=20,
    ffn_size=6784,
    vocab_size=50432,
    max_seq_len=65536,
)
MPT_13B = ModelConfig(
    hidden_size=5120,
    num_layers=40,
    num_heads=40,
    ffn_size=13632,
    vocab_size=50432,
    max_seq_len=65536,
)
MPT_30B = ModelConfig(
    hidden_size=7168,
    num_layers=48,
    num_heads=64,
    ffn_size=19072,
    vocab_size=50432,
    max_seq_len=65536,
)
MPT_70B = ModelConfig(
    hidden_size=8192,
    num_layers=80,
    num_heads=64,
    ffn_size=21824,
    vocab_size=50432,
    max_seq_len=65536,
)


def fsdp(world: int, **axes: Any) -> Layout:
    """A layout of fsdp."""
    return Layout(world, strategy="fsdp", **axes)


def torchtitan() -> Iterator[Anchor]:
    """Llama 3.1, compiled blocks, FSDP2 in bf16 with fp32 reduction; H100 with a limit of 500 of 700 W."""
    source = "torchtitan, benchmarks/"
    capped = replace(GPUS["h100"], power=500 / 700, bandwidth=2.4e12)
    compiled, eager = (
        Software("fa2", logits_in_fp32=True),
        Software("fa2", "eager", logits_in_fp32=True),
    )
    half = recompute("selective")
    h200 = GPUS["h200"]
    for name, gpu, world, rows, precision, software, speed in (
        ("8B, 8K, 8 H100, compiled", capped, 8, 1, "bf16", compiled, 6_667),
        ("8B, 8K, 8 H100, eager", capped, 8, 1, "bf16", eager, 5_762),
        ("8B, 8K, 8 H100, fp8", capped, 8, 1, "fp8", compiled, 8_532),
        ("8B, 8K, 128 H100, compiled", capped, 128, 1, "bf16", compiled, 6_514),
        ("8B, 8K, 128 H100, fp8", capped, 128, 1, "fp8", compiled, 8_380),
        ("8B, 8K, 32 H200, fp8", h200, 32, 2, "fp8", compiled, 10_938),
    ):
        job = PlanJob(
            LLAMA_8B, 8192, rows, 1, fsdp(world), gpu, precision, software=software, memory=half
        )
        yield Anchor(
            source,
            name,
            job,
            speed,
            note="recomputation of every second product counted as selective",
        )
    full = recompute(1.0)
    tensor = replace(compiled, async_tensor=True)
    for precision, speed in (("bf16", 652), ("fp8", 942)):
        job = PlanJob(
            LLAMA_70B,
            8192,
            16,
            1,
            fsdp(256, tensor=8),
            capped,
            precision,
            software=tensor,
            memory=full,
        )
        yield Anchor(
            source,
            f"70B, 8K, 256 H100, tensor 8, recompute 1, {precision}",
            job,
            speed,
            note="16 rows per tensor group assumed",
        )
    for context, seq_len, speed in (
        (1, 32768, 3_890),
        (2, 65536, 2_540),
        (4, 131072, 1_071),
        (8, 262144, 548),
    ):
        job = PlanJob(
            LLAMA_8B,
            seq_len,
            1,
            1,
            fsdp(8, context=context),
            capped,
            "fp8",
            software=compiled,
            memory=full,
        )
        yield Anchor(
            source,
            f"8B, {seq_len // 1024}K, 8 H100, context {context}, recompute 1, fp8",
            job,
            speed,
            note="its context is a ring",
        )


def others() -> Iterator[Anchor]:
    """llm-foundry, IBM, NVIDIA, torchtune, zero2all."""
    h100, a100 = GPUS["h100"], GPUS["a100"]
    fms = Software("fa2", reduce_bytes=2, logits_in_fp32=True)
    for name, model, gpu, world, speed, note in (
        ("Llama 2 7B, 4K, 96 H100", LLAMA2_7B, h100, 96, 9_600, ""),
        ("Llama 2 7B, 4K, 128 A100", LLAMA2_7B, a100, 128, 4_550, "number of GPUs assumed"),
        ("Llama 2 13B, 4K, 96 H100", LLAMA2_13B, h100, 96, 4_850, ""),
    ):
        job = PlanJob(model, 4096, 2, 1, fsdp(world), gpu, software=fms)
        yield Anchor("IBM fms-fsdp README", name, job, speed, note=note)
    mosaic, again = Software("fa2", "eager", reduce_bytes=2, logits_in_fp32=True), recompute(1.0)
    for name, model, world, seq_len, rows, memory, speed in (
        ("MPT 1B, 2K, 8 H100", MPT_1B, 8, 2048, 16, recompute("none"), 45_455),
        ("MPT 7B, 2K, 8 H100", MPT_7B, 8, 2048, 6, recompute("none"), 10_643),
        ("MPT 7B, 4K, 8 H100, recompute 1", MPT_7B, 8, 4096, 8, again, 8_611),
        ("MPT 7B, 8K, 8 H100, recompute 1", MPT_7B, 8, 8192, 4, again, 6_935),
        ("MPT 7B, 32K, 8 H100, recompute 1", MPT_7B, 8, 32768, 1, again, 3_318),
        ("MPT 7B, 64K, 8 H100, recompute 1", MPT_7B, 8, 65536, 1, again, 1_956),
        ("MPT 13B, 4K, 8 H100, recompute 1", MPT_13B, 8, 4096, 8, again, 4_717),
        ("MPT 30B, 2K, 32 H100, recompute 1", MPT_30B, 32, 2048, 8, again, 2_308),
        ("MPT 70B, 2K, 64 H100, recompute 1", MPT_70B, 64, 2048, 8, again, 1_039),
    ):
        job = PlanJob(model, seq_len, rows, 1, fsdp(world), h100, memory=memory, software=mosaic)
        yield Anchor(
            "llm-foundry, scripts/train/benchmarking",
            name,
            job,
            speed,
            note="rows per microbatch assumed",
        )
    bridge = Software("cudnn", reduce_bytes=2, regathers=True)
    source = "Megatron-Bridge, performance summary"
    yield Anchor(
        source,
        "Llama 3 8B, 8K, 8 H100, fp8",
        PlanJob(LLAMA_8B, 8192, 1, 16, fsdp(8), h100, "fp8", software=bridge),
        14_451,
    )
    layout = Layout(64, tensor=4, pipeline=8, schedule="interleaved", virtual_stages=5)
    job = PlanJob(
        LLAMA_70B, 8192, 1, 64, layout, h100, "fp8", software=replace(bridge, async_tensor=True)
    )
    yield Anchor(
        source,
        "Llama 3 70B, 8K, 64 H100, tensor 4, pipeline 8 x 5, fp8",
        job,
        1_664,
        note="64 microbatches assumed",
    )
    tune = Software("fa2", logits_in_fp32=False)
    three = PlanJob(LLAMA_3B, 4096, 4, 1, Layout(), a100, software=tune, grad_bytes=2)
    yield Anchor(
        "torchtune README", "Llama 3.2 3B, 4K, one A100", three, 9_174, note="rows assumed"
    )
    yield Anchor(
        "torchtune README",
        "Llama 3.2 3B, 4K, one A100, recompute 1",
        replace(three, memory=again),
        7_210,
        note="rows assumed",
    )
    zero2all = Software("fa2", "fused")
    small = LLAMA2_7B.with_(
        hidden_size=2048, num_layers=22, ffn_size=5632, vocab_size=64320, max_seq_len=2048
    )
    a800 = replace(GPUS["a800"], link=25e9, is_nvlink=False)
    job = PlanJob(small, 2048, 2, 16, Layout(), a800, software=zero2all)
    yield Anchor(
        "llm-zero2all",
        "1.26B, 2K, one A800",
        job,
        65_536 / 3.23,
        note="3.23 s for 65,536 tokens; ffn_size assumed",
    )
    large = small.with_(num_layers=32)
    job = PlanJob(large, 2048, 8, 32, Layout(4, shard=1), a800, software=zero2all)
    yield Anchor(
        "llm-zero2all",
        "1.7B, 2K, 4 A800 without NVLink",
        job,
        13_900,
        note="layers from the parameter count",
    )


def anchors() -> list[Anchor]:
    """All of them."""
    return [*own_peaks(), *own(), *internlm(), *torchtitan(), *others()]


def planned_peak(anchor: Anchor) -> float:
    """Planned bytes of the rank with the most, in GiB, under the conditions of the measurement."""
    plan = make_plan(anchor.job)
    if not anchor.gradients_from_start:
        return plan.memory.total / 2**30
    # the first step had all gradients in every moment, the head's in its place among them
    job = anchor.job.memory_job()
    standing = (
        sum(
            plan.memory.kinds[kind] for kind in ("weights", "masters", "optimizer state", "buffers")
        )
        / ROUND
    )
    moved = max(
        kinds["activations"]
        + max(0, kinds["logits and head"] - 4 * job.model.vocab * job.model.hidden_size)
        for kinds in moments(job).values()
    )
    return ROUND * (standing + moved + 4 * job.trained) / 2**30


def errors() -> tuple[list[tuple[Anchor, float, float]], list[tuple[Anchor, float, float]]]:
    """(anchor, planned, error) of every peak and of every speed."""
    all_of_them = anchors()
    peaks = [
        (one, planned_peak(one), one.peak_gib) for one in all_of_them if one.peak_gib is not None
    ]
    speeds = [
        (one, make_plan(one.job).per_gpu, one.tokens_per_second)
        for one in all_of_them
        if one.tokens_per_second is not None
    ]
    return [(one, value, value / real - 1) for one, value, real in peaks], [
        (one, value, value / real - 1) for one, value, real in speeds
    ]


def share_within(found: list[tuple[Anchor, float, float]], limit: float) -> str:
    """How many errors are within a limit."""
    return f"{sum(abs(error) <= limit for _, _, error in found)} of {len(found)} are within {100 * limit:.0f} %"


def page(
    peaks: list[tuple[Anchor, float, float]], speeds: list[tuple[Anchor, float, float]]
) -> str:
    """The tables of docs/plan.md."""
    far = max(peaks, key=lambda one: abs(one[2]))
    lines = [
        f"**Memory**: {share_within(peaks, 0.05)}; the largest error is {100 * far[2]:+.1f} % ({far[0].name}).",
        "",
    ]
    for source in dict.fromkeys(one.source for one, _, _ in peaks):
        lines += [f"{source}:", "", "| layout | GiB | planned | error |", "|---|---|---|---|"]
        measured = [found for found in peaks if found[0].source == source]
        lines += [
            *(
                f"| {one.name} | {one.peak_gib} | {value:.1f} | {100 * error:+.1f} % |"
                for one, value, error in measured
            ),
            "",
        ]
    lines += [
        f"**Tokens/s per GPU**: {share_within(speeds, 0.1)}, {share_within(speeds, 0.05)}.",
        "",
    ]
    for source in dict.fromkeys(one.source for one, _, _ in speeds):
        rows = [(one, value, error) for one, value, error in speeds if one.source == source]
        lines += [
            f"{source} ({share_within(rows, 0.1)}):",
            "",
            "| layout | measured | planned | error | assumed |",
            "|---|---|---|---|---|",
        ]
        for one, value, error in rows:
            real = one.tokens_per_second or 0.0
            lines.append(
                f"| {one.name} | {real:,.0f} | {value:,.0f} | {100 * error:+.1f} % | {one.note} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Print the tables, or put them into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", type=Path, metavar="docs/plan.md", help="replace the tables of this page"
    )
    options = parser.parse_args()
    if options.write is None:
        print(page(*errors()), end="")
        return
    text = options.write.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    options.write.write_text(
        f"{before}{BEGIN}\n{page(*errors())}{END}{rest.partition(END)[2]}", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
