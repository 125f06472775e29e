"""Families agree with transformers on unusual configurations: one call compares logits, gradients, packed documents, the cache, greedy
text and an export."""

from __future__ import annotations

from typing import Any

import pytest
from support.odd_configs import ODD, REQUIRED, odd_config

from headway.diagnose.agreement import compare
from headway.diagnose.small_model import shrunk
from headway.errors import ConfigError
from headway.model.families.base import family_for

pytest.importorskip("transformers", minversion="5.0")
CASES = [(kind, number) for kind, listed in ODD.items() for number in range(len(listed))]


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_an_odd_configuration_is_computed_as_transformers_does(kind: str, number: int) -> None:
    config = odd_config(kind, ODD[kind][number])
    assert vars(family_for(config))["MODEL_TYPE"] == kind
    assert compare(config).problem is None


@pytest.mark.parametrize("kind", ODD)
def test_the_published_form_is_computed_as_transformers_does(kind: str) -> None:
    assert compare(shrunk({"model_type": kind, **REQUIRED.get(kind, {})})).problem is None


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "yarn"),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
        ("ernie4_5", {"use_bias": 3}, "use_bias"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("seed_oss", {"attention_out_bias": "yes"}, "attention_out_bias"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(
    kind: str, changes: dict[str, Any], said: str
) -> None:
    config = {**odd_config(kind, ODD[kind][0]), **changes}
    with pytest.raises(ConfigError, match=said):
        family_for(config).read(config)


def test_dropout_of_a_file_is_left_to_the_recipe() -> None:
    config = odd_config("seed_oss", {"attention_dropout": 0.1, "residual_dropout": 0.1})
    assert family_for(config).read(config).dropout == 0.0


def test_queries_that_grow_need_a_rotation_of_all_channels() -> None:
    from headway.model.config import ModelConfig

    scaling = {"kind": "yarn", "factor": 4.0, "query_growth": 0.1}
    with pytest.raises(ValueError, match="query_growth"):
        ModelConfig(rope_scaling=scaling, rotary_fraction=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="query_growth"):
        ModelConfig(rope_scaling={**scaling, "kind": "linear"})  # pyright: ignore[reportArgumentType]
