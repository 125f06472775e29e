"""Every family on ranks that share its layers, its rows or its depth trains like one process."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support.family_shapes import FAMILY_SHAPES
from support.layout_trials import DRILL_STEPS, LORA, PLAIN, LayoutTrial, compare, trial


def trials(
    world: int, parallel: dict[str, object], names: tuple[str, ...], **more: Any
) -> list[LayoutTrial]:
    label = " x ".join(f"{key} {value}" for key, value in parallel.items())
    return [
        trial(
            f"{name}, {label}", world, parallel, config=PLAIN.with_(**FAMILY_SHAPES[name]), **more
        )
        for name in names
    ]


@pytest.mark.slow
def test_families_on_two_ranks_that_share_layers_train_like_one_process() -> None:
    listed = trials(
        2,
        {"tensor": 2},
        (
            "gemma2",
            "gemma3",
            "phi3",
            "glm4",
            "olmo2",
            "cohere2",
            "gpt2",
            "granite",
            "gpt_oss",
            "qwen3_5",
            "lfm2",
            "granitemoehybrid",
            "ministral3",
            "glm4_moe",
            "minimax_m2",
        ),
    )
    sys.stdout.write("\n" + "\n".join(compare(listed)) + "\n")


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_families_on_every_axis_train_like_one_process() -> None:
    whole = {"tensor": 2, "sequence": False}
    listed = trials(
        2,
        whole,
        (
            "deepseek",
            "gemma2",
            "olmo2",
            "cohere2",
            "gpt2",
            "gpt_oss",
            "qwen3_5",
            "qwen3_next",
            "lfm2",
            "granitemoehybrid",
            "state space of one group",
        ),
    )
    listed += trials(
        2,
        {"tensor": 2},
        (
            "deepseek",
            "gemma3",
            "olmo2",
            "gpt2",
            "ministral3",
            "minimax_m2",
            "qwen3_5",
            "qwen3_next",
            "lfm2",
            "granitemoehybrid",
            "state space of one group",
        ),
        adapter=LORA,
    )
    listed += trials(
        2,
        {"pipeline": 2},
        (
            "deepseek",
            "gemma2",
            "gemma3",
            "cohere2",
            "gpt2",
            "olmo2",
            "qwen3_5",
            "lfm2",
            "granitemoehybrid",
        ),
    )
    hybrids = ("qwen3_5", "qwen3_next", "lfm2", "granitemoehybrid")
    listed += trials(2, {"zero1": {"size": 1}}, hybrids)
    listed += trials(2, {}, hybrids, memory={"recompute": 1.0})
    listed += trials(2, {"strategy": "fsdp"}, hybrids, memory={"recompute": "selective"})
    listed += trials(
        2, {"context": 2}, ("deepseek", "gemma2", "gemma3", "cohere2", "gpt2", "olmo2")
    )
    listed += trials(2, {"expert": 2}, ("gpt_oss", "qwen3_next"))
    listed += [
        trial(
            "trained sinks, context 2",
            2,
            {"context": 2},
            config=PLAIN.with_(attention_sinks=True, sliding_window=5),
        )
    ]
    listed += trials(
        2, {"strategy": "fsdp"}, ("deepseek", "gemma2", "gpt2", "olmo2", "gpt_oss", "qwen3_5")
    )
    listed += [
        trial(
            "olmo2, 2 KV heads on 4 ranks",
            4,
            {"tensor": 4},
            config=PLAIN.with_(num_kv_heads=2, **FAMILY_SHAPES["olmo2"]),
        )
    ]
    sys.stdout.write("\n" + "\n".join(compare(listed, steps=DRILL_STEPS)) + "\n")
