"""Encoders of a Hugging Face folder, through transformers: CLIP, SigLIP, DINOv2, ViT, Whisper,
CLAP, BERT and what AutoModel knows.

In: config.json, weights, preprocessor_config.json or a tokenizer; out: a frozen encoder. Sizes,
mean and standard deviation come from the folder's own files. Code of a folder is never run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.config.section import setting
from headway.model.encoders.base import EncoderConfig
from headway.runtime.optional import need

if TYPE_CHECKING:
    from headway.model.encoders.base import FrozenMediaEncoder


class Config(EncoderConfig):
    """An encoder of a Hugging Face folder, frozen."""

    kind: str = setting("huggingface", "huggingface.", on_resume="fixed")
    path: str = setting(
        ..., "The folder, or a hub id (ORG/NAME or ORG/NAME@REVISION).", min_length=1
    )
    pool: Literal["auto", "mean", "cls", "none"] = setting(
        "auto",
        "One vector per item: the model's own pooled output if it has one, else the mean (auto); "
        "the mean; or the first token (cls). "
        "none: every vector, e.g. one per patch.",
    )
    layer: int = setting(
        -1,
        "Layer whose vectors are taken, from the end; -2 is LLaVA's. auto pooling needs -1.",
        le=-1,
        ge=-200,
    )
    max_tokens: int = setting(
        32, "Text: tokens that are read; the rest of a text is ignored.", ge=3, le=8192
    )
    seconds: float = setting(
        10.0, "Audio: seconds that are read, at most what the model takes.", gt=0, le=600
    )

    def build(self, modality: str) -> FrozenMediaEncoder:
        need("transformers", "model.aligner encoders of kind huggingface")
        from headway.model.encoders.huggingface_module import open_encoder

        return open_encoder(self, modality)
