"""The tables of docs/cluster.md that come from `headway plan`: python docs/_cluster_tables.py writes them, a test checks them.

A table lies between `<!-- plan: NAME -->` and `<!-- end of plan -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from headway.config.load import load
from headway.plan.hardware import find_gpu
from headway.plan.result import Plan, make_plan
from headway.train.config import Recipe
from headway.train.planning import PlanTarget, plan_job

PAGE = Path(__file__).with_name("cluster.md")
GIB = 1 << 30
GPU, WORLD = "h100", 8
BASE = (
    "model.preset=llama-8b",
    "model.vocab_size=128256",
    "data.seq_len=8192",
    "batch.rows=64",
    "batch.micro_rows=2",
    "precision=bf16",
)
RUNGS: tuple[tuple[str, str], ...] = (
    ("`batch.micro_rows: 1`", "batch.micro_rows=1"),
    ("`memory.recompute: selective`", "memory.recompute=selective"),
    ("`memory.recompute: true`", "memory.recompute=true"),
    ("`optim.state_dtype: 8bit`", "optim.state_dtype=8bit"),
    ("`parallel.strategy: fsdp`", "parallel.strategy=fsdp"),
    ("`memory.offload: [activations]`", "memory.offload=[activations]"),
    ("`memory.offload: [optimizer]`", "memory.offload=[optimizer]"),
    ("`parallel.tensor: 2`", "parallel.tensor=2"),
    ("`parallel.context: 2`", "parallel.context=2"),
    ("`data.seq_len: 4096`", "data.seq_len=4096"),
    (
        "LoRA of rank 16 (`adapter`)",
        "adapter={kind: lora, rank: 16, alpha: 32.0, targets: [q_proj, v_proj]}",
    ),
    (
        "`parallel.strategy: fsdp`, `memory.recompute: true`, `batch.micro_rows: 1`",
        "parallel.strategy=fsdp memory.recompute=true batch.micro_rows=1",
    ),
)
SIZES = (1, 2, 4, 8, 16)
NETWORKS = (
    ("400 Gbit/s InfiniBand per GPU", 400.0),
    ("25 Gbit/s Ethernet per GPU", 25.0),
    ("10 Gbit/s Ethernet per node of 8", 1.25),
)


def planned(*overrides: str, world: int = WORLD, gbps: float | None = None) -> Plan:
    """The base with some settings changed."""
    recipe = load(Recipe, None, [*BASE, *overrides])
    return make_plan(plan_job(recipe, PlanTarget(find_gpu(GPU).with_network(gbps, None), world)))


def memory_table() -> str:
    """What each setting saves by itself."""
    base = planned()
    lines = [
        "| setting | memory of a rank | saves | speed |",
        "|---|---|---|---|",
        f"| no change | {base.memory.total / GIB:.0f} GiB | | {base.per_gpu:,.0f} tokens/s per GPU |",
    ]
    for words, overrides in RUNGS:
        made = planned(*re.split(r" (?=[a-z]+\.)", overrides))
        lines.append(
            f"| {words} | {made.memory.total / GIB:.0f} GiB | {(base.memory.total - made.memory.total) / GIB:.0f} GiB "
            f"| {made.per_gpu / base.per_gpu - 1:+.0%} |"
        )
    return "\n".join(lines)


def network_table() -> str:
    """Tokens per second and GPU by number of nodes and network."""
    lines = [
        "| network | " + " | ".join(f"{8 * nodes} GPUs" for nodes in SIZES) + " |",
        "|---" * 6 + "|",
    ]
    for words, gbps in NETWORKS:
        speeds = [
            planned(
                "parallel.strategy=fsdp", f"batch.rows={64 * nodes}", world=8 * nodes, gbps=gbps
            ).per_gpu
            for nodes in SIZES
        ]
        lines.append(f"| {words} | " + " | ".join(f"{speed:,.0f}" for speed in speeds) + " |")
    return "\n".join(lines)


TABLES = {"memory": memory_table, "network": network_table}


def with_tables(text: str) -> str:
    """The page with its tables made again."""

    def replaced(found: re.Match[str]) -> str:
        return f"<!-- plan: {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end of plan -->"

    return re.sub(r"<!-- plan: (\w+) -->.*?<!-- end of plan -->", replaced, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
