"""Classes of transformers on two ranks train like one process, in every data-parallel engine, with everything that wraps a layer."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support.layout_trials import LORA, LayoutTrial, compare, trial
from support.stock_cases import CASES, SHAPE

from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.model.families.transformers import read

pytest.importorskip("transformers", minversion="5.0")
DDP: dict[str, Any] = {"zero1": {"size": 1}}
ZERO1: dict[str, Any] = {"zero1": {"size": "auto"}}
FSDP: dict[str, Any] = {"strategy": "fsdp"}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
                 "head_dim": 8},
}  # fmt: skip
"""Mixtures of experts; one has biases that are stored and never trained."""
WIDE = {"initializer_range": 0.3, "init_std": 0.3}


def stock(kind: str) -> ModelConfig:
    return read({**SHAPE, "model_type": kind, **(CASES | OTHERS)[kind], **WIDE})


def trials(kinds: tuple[str, ...], parallel: dict[str, Any], **more: Any) -> list[LayoutTrial]:
    label = " ".join(map(str, (*parallel.values(), *more)))
    return [trial(f"{kind}, {label}", 2, parallel, config=stock(kind), **more) for kind in kinds]


@pytest.mark.slow
def test_wrapped_classes_on_two_ranks_train_like_one_process() -> None:
    listed = trials(("starcoder2", "opt"), DDP)
    listed += trials(("starcoder2",), ZERO1, memory={"recompute": 1, "offload": ["activations"]})
    listed += trials(("phi", "exaone4"), FSDP, memory={"recompute": "selective"})
    listed += trials(("starcoder2",), FSDP, adapter=LORA)
    listed += trials(("starcoder2",), ZERO1, pairs=True)
    listed += trials(("qwen2_moe", "glm4_moe"), ZERO1, memory={"recompute": 1})
    listed += trials(("qwen2_moe", "glm4_moe"), FSDP)
    sys.stdout.write("\n" + "\n".join(compare(listed)) + "\n")


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_all_wrapped_classes_on_two_ranks_train_like_one_process() -> None:
    kinds = tuple(CASES)
    listed = [trial for strategy in (DDP, ZERO1) for trial in trials(kinds, strategy)]
    # The gradient of OPT's key biases is noise around zero, which Adam makes large; in another order of sums it is another noise.
    listed += trials(tuple(kind for kind in kinds if kind != "opt"), FSDP)
    listed += trials(kinds, FSDP, adapter=LORA)
    listed += trials(("starcoder2",), FSDP, adapter=AdapterConfig(rank=4, base="nf4"))
    listed += trials(kinds, ZERO1, memory={"recompute": 1})
    sys.stdout.write("\n" + "\n".join(compare(listed)) + "\n")
