"""The `memory` section of a recipe: what is kept, what is computed again, what waits in host memory. Imports without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from headway.config.section import Section, setting

Offload = Literal["optimizer"]


class MemoryConfig(Section):
    """Memory against time."""

    loss_chunk_tokens: int | Literal["auto"] = setting("auto", "Tokens whose logits exist at one time; auto = 8192 on CUDA, else 2048.")
    offload: tuple[Offload, ...] = setting((), "What waits in host memory between uses: optimizer (its state and the fp32 masters).")

    @field_validator("loss_chunk_tokens")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"is {value}; it must be at least 1")
        return value

    @field_validator("offload")
    @classmethod
    def _once(cls, value: tuple[Offload, ...]) -> tuple[Offload, ...]:
        return tuple(dict.fromkeys(value))
