"""A model family: Llama, whose files name every tensor differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.plugin import ModelConfig, llama

MODEL_TYPE = "my_llama"
ARCHITECTURE = "MyLlamaForCausalLM"


def read(given: Mapping[str, Any]) -> ModelConfig:
    """config.json -> ModelConfig."""
    as_llama = {**given, "model_type": llama.MODEL_TYPE, "architectures": [llama.ARCHITECTURE]}
    return llama.read(as_llama).with_(family="my_lab.family")


def write(config: ModelConfig) -> dict[str, Any]:
    """ModelConfig -> config.json."""
    return {
        **llama.write(config.with_(family="llama")),
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
    }


def to_hf_model(config: ModelConfig) -> ModelConfig:
    """The family it is exported as: this one. Return `config.with_(family="llama")` to export a Llama instead."""
    return config


def to_hf_name(name: str) -> str:
    """Our name of a tensor -> its name in the files."""
    return f"my.{name}"


def from_hf_name(name: str) -> str | None:
    """Its name in the files -> our name; None for a tensor that may be left out."""
    return name.removeprefix("my.")
