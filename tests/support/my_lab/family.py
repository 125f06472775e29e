"""A family of one's own: Llama under another name, with every tensor's name prefixed."""

from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import llama

MODEL_TYPE = "my_llama"
ARCHITECTURE = "MyLlamaForCausalLM"


def read(config: dict[str, Any]) -> ModelConfig:
    return llama.read(
        {**config, "model_type": "llama", "architectures": [llama.ARCHITECTURE]}
    ).with_(family="support.my_lab.family")


def to_hf_model(config: ModelConfig) -> ModelConfig:
    return config


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        **llama.write(config.with_(family="llama")),
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
    }


def to_hf_name(name: str) -> str:
    return "lab." + name


def from_hf_name(name: str) -> str:
    return name.removeprefix("lab.")
