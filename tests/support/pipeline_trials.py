"""Trials of the pipeline axis, alone and with others; five layers, so that stages differ. `layout_trials.compare` runs them."""

from __future__ import annotations

from typing import Any

from headway.tasks.dpo import Config as DPO
from support.layout_trials import DORA, GATED, LORA, PLAIN, SPARSITY, LayoutTrial, trial

DEEP = PLAIN.with_(num_layers=5, init_std=0.1)
UNTIED = DEEP.with_(tie_embeddings=False)
GATES: dict[str, Any] = {"config": GATED.with_(num_layers=5, init_std=0.1), "objective": SPARSITY}
DROPPED = DEEP.with_(dropout=0.2)
KTO = DPO(reference_free=True, loss_type="kto_pair")
TWO = {"pipeline": 2}
INTERLEAVED = {"pipeline": 2, "schedule": "interleaved"}
ZERO_BUBBLE = {"pipeline": 2, "schedule": "zero_bubble"}
SCHEDULES: list[dict[str, Any]] = [TWO, INTERLEAVED, ZERO_BUBBLE]
NAMES = ("1f1b", "interleaved", "zero bubble")
QLORA = LORA.model_copy(update={"base": "nf4", "targets": ("q_proj", "down_proj")})
DROPPED_LORA = LORA.model_copy(update={"dropout": 0.2})
POWERSGD: dict[str, Any] = {
    "zero1": {"size": 1},
    "hook": {"kind": "powersgd", "start_step": 0, "min_compression_rate": 1e9},
}
OFF = {"overlap": {"reduce": False, "gather": False, "step": False}}
EVERYTHING = {"recompute": 1.0, "offload": ["activations", "optimizer"]}


def pipeline_trials() -> list[LayoutTrial]:
    """Every schedule, and what stages share, on two ranks; every other axis on four."""
    return [
        trial("1f1b, packed documents, clipping, tied", 2, TWO, config=DEEP, micro=4),
        trial("zero bubble, tied, 4 microbatches", 2, ZERO_BUBBLE, config=DEEP, micro=4),
        trial("interleaved, dropout, selective recompute", 2, INTERLEAVED, config=DROPPED, memory={"recompute": "selective"}),
        trial("1f1b, kto over a step", 2, TWO, config=DEEP, pairs=True, objective=KTO),
        trial("4 stages, zero bubble, gates, frozen weights", 4, {"pipeline": 4, "schedule": "zero_bubble"}, **GATES, freeze=("weights",)),
        trial("interleaved x zero1, tied", 4, {**INTERLEAVED, "zero1": {"size": "auto"}}, config=DEEP, micro=8),
        trial("zero bubble x tensor, gates", 4, {**ZERO_BUBBLE, "tensor": 2}, **GATES),
    ]  # fmt: skip


def more_pipeline_trials() -> list[LayoutTrial]:
    """The rest, for drills: up to eight ranks."""
    two = [
        trial(f"{name}, {micro} microbatches", 2, schedule, config=DEEP, micro=micro)
        for name, schedule in zip(NAMES, SCHEDULES, strict=True)
        for micro in (1, 2, 16)
    ]
    eight = [
        trial(f"{name} x {axis} x zero1 of {size}, {description}", 8, {**schedule, axis: 2, "zero1": {"size": size}}, **of)
        for name, schedule, size in zip(NAMES, SCHEDULES, ("auto", 2, 1), strict=True)
        for axis in ("context", "tensor")
        for description, of in (("tied", {"config": DEEP}), ("gates", GATES))
    ]  # fmt: skip
    return [
        *two,
        *eight,
        trial("interleaved, untied, 8 microbatches", 2, INTERLEAVED, config=UNTIED, micro=8),
        trial("1f1b, gates, one microbatch", 2, TWO, **GATES, micro=1),
        trial(
            "zero bubble, lora with dropout, recomputed",
            2,
            ZERO_BUBBLE,
            config=UNTIED,
            adapter=DROPPED_LORA,
            memory=EVERYTHING,
        ),
        trial(
            "interleaved, embedding and first layers frozen",
            2,
            INTERLEAVED,
            config=UNTIED,
            freeze=("embeddings", "layers.0-1"),
        ),
        trial("4 stages, tied", 4, {"pipeline": 4}, config=DEEP, micro=8),
        trial("1f1b x tensor, tied", 4, {**TWO, "tensor": 2}, config=DEEP),
        trial("1f1b x context, powersgd", 4, {**TWO, "context": 2, **POWERSGD}, config=DEEP),
        trial("layers counted by hand", 2, {**TWO, "pipeline_split": (4, 1)}, config=DEEP),
        trial("dpo, lora", 2, ZERO_BUBBLE, config=DEEP, pairs=True, adapter=LORA),
        trial(
            "a base in nf4, recomputed",
            2,
            ZERO_BUBBLE,
            config=UNTIED,
            adapter=QLORA,
            memory=EVERYTHING,
        ),
        trial(
            "dora with dropout",
            2,
            INTERLEAVED,
            config=UNTIED,
            adapter=DORA.model_copy(update={"dropout": 0.2}),
        ),
        trial("only the head trains", 2, TWO, config=UNTIED, freeze=("embeddings", "layers.0-4")),
        trial("gates, everything trains", 2, INTERLEAVED, **GATES),
        trial("recomputed and offloaded", 2, ZERO_BUBBLE, config=DROPPED, memory=EVERYTHING),
        trial(
            "five stages of one layer",
            5,
            {"pipeline": 5, "schedule": "zero_bubble"},
            config=DEEP,
            micro=8,
        ),
        trial("x zero1, overlaps off", 4, {**TWO, **OFF}, config=DEEP),
        trial("x powersgd", 4, {**ZERO_BUBBLE, **POWERSGD}, config=DEEP),
        trial(
            "x tensor, no sequence, untied",
            4,
            {**INTERLEAVED, "tensor": 2, "sequence": False},
            config=UNTIED,
        ),
        trial("x tensor, lora", 4, {**TWO, "tensor": 2}, config=DEEP, adapter=LORA),
        trial("x tensor, dpo", 4, {**INTERLEAVED, "tensor": 2}, config=DEEP, pairs=True),
        trial("x context, gates", 4, {**INTERLEAVED, "context": 2}, **GATES),
        trial("x tensor x context", 8, {**ZERO_BUBBLE, "tensor": 2, "context": 2}, **GATES),
        trial("4 stages x tensor", 8, {"pipeline": 4, "tensor": 2}, config=DEEP),
    ]
