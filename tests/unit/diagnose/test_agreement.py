"""What headway and transformers compute on a small random model is compared, and a difference is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headway.diagnose import agreement
from headway.diagnose.agreement import compare
from headway.diagnose.small_model import FIRST_LENGTH, shrunk
from headway.model.families.transformers import Wrapping

pytest.importorskip("transformers", minversion="5.0")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attention_bias": True, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def test_a_small_copy_keeps_the_form_of_the_model() -> None:
    small = shrunk(LLAMA)
    assert small["num_attention_heads"] == 6
    assert small["num_key_value_heads"] == 2
    assert small["hidden_size"] == small["head_dim"] * 6
    assert small["attention_bias"] is True
    assert small["rope_parameters"]["original_max_position_embeddings"] == FIRST_LENGTH
    assert small["rope_parameters"]["factor"] == 8.0


def test_layers_of_a_small_copy_have_every_kind() -> None:
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    small = shrunk({"model_type": "gemma3_text", "num_hidden_layers": 24, "layer_types": kinds})
    assert small["layer_types"] == kinds[: small["num_hidden_layers"]]
    assert set(small["layer_types"]) == set(kinds)


@pytest.mark.parametrize("wrapping", [None, Wrapping()])
def test_a_family_and_the_wrapped_class_agree_with_transformers(wrapping: Wrapping | None) -> None:
    assert compare(shrunk(LLAMA), wrapping=wrapping).problem is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 1e4}, "logits"),
        ({"norm_eps": 0.1}, "logits"),
        ({"logit_scale": 2.0}, "logits"),
    ],
)
def test_a_model_that_is_read_otherwise_differs(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_model = agreement.find_model

    def misread(*arguments: Any, **named: Any) -> Any:
        stored = find_model(*arguments, **named)
        return replace(stored, config=stored.config.with_(**changes))

    monkeypatch.setattr(agreement, "find_model", misread)
    # What the family cannot write would be refused before anything is compared.
    monkeypatch.setattr(agreement, "_export", lambda *_: True)
    problem = compare(shrunk(LLAMA)).problem
    assert problem is not None
    assert problem.startswith(said)
