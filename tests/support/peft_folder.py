"""A PEFT adapter with random updates, for the model of `byte_model`, and the weights of that model with the adapter merged."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SHAPES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.v_proj": (16, 32),
    "mlp.down_proj": (32, 48),
    "mlp.up_proj": (48, 32),
}


def write_adapter(
    folder: Path, base: Path, seed: int, rank: int, names: tuple[str, ...], **more: object
) -> Path:
    """A PEFT folder with random updates of some linears."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.split(".")[1] for name in names],
    }
    (folder / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": str(base), **more})
    )
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        for name in names:
            outputs, inputs = SHAPES[name]
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.3
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.3
            if more.get("use_dora"):
                tensors[f"{path}.lora_magnitude_vector"] = torch.ones(outputs)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_updates(folder: Path) -> dict[str, torch.Tensor]:
    """What an adapter adds to each weight of the model: alpha / r is 2 in `write_adapter`."""
    tensors = load_file(folder / "adapter_model.safetensors")
    updates: dict[str, torch.Tensor] = {}
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            path = name.removesuffix(".lora_A.weight")
            updates[path.removeprefix("base_model.model.") + ".weight"] = (
                2.0 * tensors[f"{path}.lora_B.weight"] @ down
            )
    return updates
