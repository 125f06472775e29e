"""A recipe with what it names: what it changes about the given weights is said."""

import logging
from pathlib import Path

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.config.load import load
from headway.train.config import Recipe
from headway.train.resolve import resolve


def test_a_model_that_is_changed_by_the_recipe_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = write_model(
        tmp_path, CONFIG.with_(rope_theta=10000.0), byte_tokenizer("<|im_start|>", "<|im_end|>")
    )

    def lines(*overrides: str) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "headway"):
            resolve(load(Recipe, None, [f"init.from={base}", "data.seq_len=32", *overrides]))
        return [line for line in caplog.messages if "changes the model" in line]

    assert (
        lines()
        == lines("model.rope_theta=10000", "model.dropout=0.1", "model.max_seq_len=64")
        == []
    )
    start = f"the recipe changes the model of init.from={base}: "
    assert lines("model.rope_theta=1e6") == [f"{start}rope_theta 10000 -> 1000000"]
    assert lines("model.rope_theta=1e6", "model.no_rope_layers=[1]") == [
        f"{start}no_rope_layers [] -> [1], rope_theta 10000 -> 1000000"
    ]
