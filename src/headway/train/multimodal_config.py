"""The `multimodal` section of a recipe: what a language model sees and hears, and how features
become embeddings. Imports without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import field_validator, model_validator

from headway.config.section import Section, setting

POOLED_TOKENS = 4
"""Soft tokens of an item that an encoder pools into one vector."""
POOLED_HIDDEN = 2048
"""Width inside the projector of pooled vectors."""
MAX_FILE_NAME = 255
"""Bytes of one part of a path that file systems take."""


class MediaInputConfig(Section):
    """One modality of a language model."""

    encoder: str | None = setting(
        None,
        "What encodes it: a Hugging Face folder, the name of an encoder (`headway list`), "
        "or one with its file (`cnn14:FILE`). null = the "
        "encoder of multimodal.aligner.",
    )
    patches: bool = setting(
        False,
        "One soft token of each patch of a Hugging Face encoder (LLaVA), "
        "instead of a pooled vector.",
    )
    features: Path | None = setting(None, "A table of features made before, instead of an encoder.")
    tokens: int | None = setting(
        None,
        f"Soft tokens of one item; null = {POOLED_TOKENS} of a pooled vector, "
        "or one of each patch.",
        gt=0,
        le=65536,
    )

    @field_validator("encoder")
    @classmethod
    def _can_be_a_file(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if "\0" in value or any(len(part.encode()) > MAX_FILE_NAME for part in value.split("/")):
            raise ValueError(
                f"is a name of {len(value)} characters that no folder can have. Give a folder, a "
                "hub id or the name of an encoder"
            )
        return value

    @model_validator(mode="after")
    def _one_origin(self) -> MediaInputConfig:
        if self.encoder is not None and self.features is not None:
            raise ValueError(
                f"has encoder={self.encoder} and features={self.features}; "
                "features come from one of them. Remove one"
            )
        if self.patches and self.encoder is None:
            raise ValueError(
                "has patches, which are those of a Hugging Face encoder, and no encoder. "
                "Set encoder"
            )
        return self


class NativeConfig(Section):
    """Pictures as the published model takes them: by its own vision tower, at their own size."""

    min_pixels: int | None = setting(
        None,
        "Smaller pictures are enlarged to this area; null = as the model's processor says.",
        gt=0,
        on_resume="fixed",
    )
    max_pixels: int | None = setting(
        None,
        "Larger pictures are shrunk to this area; null = as the model's processor says.",
        gt=0,
        on_resume="fixed",
    )


class MultimodalConfig(Section):
    """Media inputs of a language model."""

    native: NativeConfig | None = setting(
        None,
        "Pictures enter through the model's own vision tower (Qwen2.5-VL, Qwen3-VL), each at its own "
        "size; {} = as the model was published. null = encoders of your choice, as below.",
        on_resume="fixed",
    )
    image: MediaInputConfig | None = setting(None, "Pictures; null = none.", on_resume="fixed")
    audio: MediaInputConfig | None = setting(None, "Sounds; null = none.", on_resume="fixed")
    aligner: Path | None = setting(
        None,
        "The run of phase 1, its aligner.safetensors or PurrSight's aligner.pt: "
        "projections between encoder and projector, frozen. A run "
        "brings its encoders along.",
        on_resume="fixed",
    )
    hidden: int | None = setting(
        None,
        f"Width inside the projector; null = {POOLED_HIDDEN}, or the model's width for patches.",
        gt=0,
        le=1 << 20,
        on_resume="fixed",
    )
    shared: bool | Literal["auto"] = setting(
        "auto", "One projector for all modalities; auto = with an aligner.", on_resume="fixed"
    )
    missing: bool = setting(
        True,
        "Every conversation has positions for each modality; "
        "those without media hold a learned embedding. false = only where media are.",
        on_resume="fixed",
    )

    @model_validator(mode="after")
    def _has_inputs(self) -> MultimodalConfig:
        if self.native is not None:
            # By value: recipe.yaml of a run lists defaults too.
            fields = type(self).model_fields
            given = [
                name
                for name in sorted(set(fields) - {"native"})
                if getattr(self, name) != fields[name].default
            ]
            if given:
                raise ValueError(
                    f"has native and {given[0]}, which is for encoders beside the model. Remove "
                    "one of them"
                )
            return self
        if self.image is None and self.audio is None:
            raise ValueError(
                "has neither image nor audio; give one of them, e.g. {image: {encoder: DIR}}"
            )
        for name, media_input in self.inputs.items():
            origins = (media_input.encoder, media_input.features, self.aligner)
            if all(origin is None for origin in origins):
                raise ValueError(
                    f"{name} has no encoder; give {name}.encoder, {name}.features, "
                    "or the aligner of a phase-1 run"
                )
        return self

    @property
    def inputs(self) -> dict[str, MediaInputConfig]:
        """The modalities that are given, images first."""
        candidates = {"image": self.image, "audio": self.audio}
        return {name: settings for name, settings in candidates.items() if settings is not None}
