"""An adapter that PEFT would read otherwise is written with a warning, and one that it reads is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from support.family_shapes import FAMILY_SHAPES

from headway.export.adapter import write_adapter
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig

MIXTURE = ModelConfig(
    family="glm4_moe", vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, ffn_size=48, **FAMILY_SHAPES["glm4_moe"]
)  # fmt: skip


@pytest.mark.parametrize(("targets", "warns"), [(("all",), True), (("q_proj", "o_proj"), False)])
def test_shared_experts_are_taken_for_experts_by_peft(
    targets: tuple[str, ...], warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AdapterConfig(rank=2, targets=targets)
    values = {name: torch.zeros(shape) for name, shape in config.shapes(MIXTURE).items()}
    with caplog.at_level(logging.WARNING, logger="headway"):
        write_adapter(values, config, MIXTURE, tmp_path / "adapter", base=None)
    assert ("shared_experts" in caplog.text) is warns
