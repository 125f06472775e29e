"""A small random Qwen2.5-VL or Qwen3-VL as a published folder, with a tokenizer of one id per byte and
conversations about pictures of different sizes; needs transformers 5 and Pillow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.byte_model import byte_tokenizer

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # fmt: skip
FIRST_SPECIAL = 258
IDS = {name: FIRST_SPECIAL + number for number, name in enumerate(SPECIALS)}
TEXT: dict[str, Any] = {
    "vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}, "tie_word_embeddings": False,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 24, "fullatt_block_indexes": [1],
}  # fmt: skip
TEXT3: dict[str, Any] = {
    **TEXT, "num_hidden_layers": 3, "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 2, 1], "mrope_interleaved": True},
}  # fmt: skip
TOWER3: dict[str, Any] = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "router_aux_loss_coef": 0.0,
}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", TEXT, TOWER),
    "qwen3_vl": ("Qwen3VL", TEXT3, TOWER3),
    "qwen3_vl_moe": ("Qwen3VLMoe", {**TEXT3, **MOE}, TOWER3),
}
"""model_type -> the beginning of its classes' names, settings of its text part and of its tower."""
SIZES = ((37, 21), (60, 90), (16, 16), (80, 24))
"""Width and height of each picture."""


def build_vision(
    text: dict[str, Any] | None = None,
    tower: dict[str, Any] | None = None,
    std: float = 0.2,
    kind: str = "qwen2_5_vl",
) -> Any:
    """The class of transformers with random weights; `text`, `tower`: changed settings."""
    import transformers

    torch.manual_seed(0)
    name, usual_text, usual_tower = KINDS[kind]
    settings = {**usual_text, **(text or {})}
    config = getattr(transformers, f"{name}Config")(
        text_config=settings,
        vision_config={**usual_tower, **(tower or {})},
        tie_word_embeddings=settings["tie_word_embeddings"],
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model


def processor_of(tower: dict[str, Any] | None = None, kind: str = "qwen2_5_vl") -> Any:
    """The processor of transformers for pictures, without torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = {**KINDS[kind][2], **(tower or {})}
    side = settings["patch_size"] * settings["spatial_merge_size"]
    if kind != "qwen2_5_vl":
        # Its files name the sizes otherwise, and have other means.
        return Qwen2VLImageProcessorPil(
            patch_size=settings["patch_size"],
            merge_size=settings["spatial_merge_size"],
            temporal_patch_size=settings["temporal_patch_size"],
            size={"shortest_edge": 4 * side**2, "longest_edge": 40 * side**2},
            image_mean=[0.5, 0.5, 0.5],
            image_std=[0.5, 0.5, 0.5],
        )
    return Qwen2VLImageProcessorPil(
        patch_size=settings["patch_size"],
        merge_size=settings["spatial_merge_size"],
        temporal_patch_size=settings["temporal_patch_size"],
        min_pixels=4 * side**2,
        max_pixels=40 * side**2,
    )


def write_vision(
    folder: Path,
    model: Any = None,
    tower: dict[str, Any] | None = None,
    kind: str = "qwen2_5_vl",
) -> Path:
    """Write the folder of a model, as it is published."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    (model or build_vision(kind=kind)).save_pretrained(folder)
    processor_of(tower, kind).save_pretrained(folder)
    byte_tokenizer(*SPECIALS).save(folder)
    return folder


def write_pictures(folder: Path, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Path]:
    """Pictures of noise."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(3)
    paths: list[Path] = []
    for number, (width, height) in enumerate(sizes):
        path = folder / f"{number}.png"
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
        paths.append(path)
    return paths


def write_conversations(folder: Path) -> Path:
    """Records with one picture, two in a turn, one in each of two turns, and none."""
    paths = [str(path) for path in write_pictures(folder / "pictures")]
    records = [
        {"messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}], "images": paths[:1]},
        {"messages": [{"role": "user", "content": "Is <image> like <image>?"}, {"role": "assistant", "content": "No."}], "images": paths[1:3]},
        {"messages": [{"role": "user", "content": "<image>This?"}, {"role": "assistant", "content": "Yes"},
                      {"role": "user", "content": "And <image>"}, {"role": "assistant", "content": "A dog."}], "images": [paths[3], paths[0]]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}], "images": []},
    ]  # fmt: skip
    path = folder / "chat.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path
