"""Reward models on ranks that share rows, layers or depth train like one process."""

import sys
from typing import Any

import pytest
from support.layout_trials import LORA, PLAIN, LayoutTrial, compare, trial

from headway.tasks.reward import Config

OBJECTIVE = Config(margin=0.2, center_rewards_coefficient=0.05)
SCORING = PLAIN.with_(score_head=True)
UNTIED = SCORING.with_(tie_embeddings=False)
NF4 = LORA.model_copy(update={"base": "nf4"})


def reward(name: str, world: int, parallel: dict[str, Any], **more: Any) -> LayoutTrial:
    return trial(
        name, world, parallel, **{"config": SCORING, "pairs": True, "objective": OBJECTIVE, **more}
    )


@pytest.mark.slow
def test_two_ranks_train_like_one_process() -> None:
    tensor = {"tensor": 2}
    listed = [
        reward("zero1, lora, recomputed", 2, {}, adapter=LORA, memory={"recompute": 1.0}),
        reward("fsdp", 2, {"strategy": "fsdp"}),
        reward("tensor", 2, tensor),
    ]
    sys.stdout.write("\n" + "\n".join(compare(listed)) + "\n")


@pytest.mark.drill
def test_several_axes_train_like_one_process() -> None:
    experts = SCORING.with_(experts={"num": 4, "per_token": 2, "ffn_size": 24, "aux_loss": 0.1})
    tensor = {"tensor": 2}
    listed = [
        reward("ddp, untied", 2, {"zero1": {"size": 1}}, config=UNTIED),
        reward("fsdp, nf4 base", 2, {"strategy": "fsdp"}, adapter=NF4),
        reward(
            "tensor, no sequence, lora",
            2,
            {**tensor, "sequence": False},
            adapter=LORA,
            config=UNTIED,
        ),
        reward("pipeline", 2, {"pipeline": 2}),
        reward("tensor x zero1, accumulation", 4, tensor, micro=4),
        reward("tensor x fsdp", 4, {**tensor, "strategy": "fsdp"}),
        reward("2 KV heads on 4 ranks", 4, {"tensor": 4}, config=SCORING.with_(num_kv_heads=2)),
        reward(
            "tensor, recomputed, offloaded",
            2,
            tensor,
            memory={"recompute": 1.0, "offload": ["activations", "optimizer"]},
        ),
        reward("experts, tensor", 2, tensor, config=experts),
        reward("experts, fsdp", 2, {"strategy": "fsdp"}, config=experts),
        reward("pipeline, lora", 2, {"pipeline": 2}, adapter=LORA, config=UNTIED),
        reward("pipeline x tensor", 4, {"pipeline": 2, "tensor": 2}),
    ]
    sys.stdout.write("\n" + "\n".join(compare(listed)) + "\n")
