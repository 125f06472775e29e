"""The `memory` section of a recipe: what is kept, what is computed again, what waits in host memory. Imports without torch."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from headway.config.section import Section, setting

Offload = Literal["activations", "optimizer"]


class MemoryConfig(Section):
    """Memory against time."""

    loss_chunk_tokens: int | Literal["auto"] = setting("auto", "Tokens whose logits exist at one time; auto = 4096 on CUDA, else 2048.")
    recompute: float | str = setting(
        "none",
        "Activations computed again in backward instead of kept: none or false, true (all blocks), a fraction of the blocks (0 to 1, the "
        "first ones), every-k (every k-th block), or selective (in all blocks, all but the results of matrix products and attention).",
    )
    offload: tuple[Offload, ...] = setting(
        (), "What waits in host memory: activations (large ones, between forward and backward), optimizer (its state and fp32 masters)."
    )

    limit_gib: float | None = setting(
        None,
        "Memory a rank may use, in GiB; null = what the device has, on CPU most of what is free. batch.micro_rows=auto fits into it.",
        gt=0,
    )

    def chunk_tokens(self, *, on_cuda: bool) -> int:
        """Tokens whose logits exist at one time, on a device."""
        return (4096 if on_cuda else 2048) if self.loss_chunk_tokens == "auto" else self.loss_chunk_tokens

    @field_validator("loss_chunk_tokens")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"is {value}; it must be at least 1")
        return value

    @field_validator("recompute", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        """true and false, as other systems have it: all blocks or none."""
        return value if not isinstance(value, bool) else 1.0 if value else "none"

    @field_validator("recompute")
    @classmethod
    def _known(cls, value: float | str) -> float | str:
        if isinstance(value, str):
            fits = value in ("none", "selective") or re.fullmatch(r"every-[1-9]\d*", value)
        else:
            fits = 0 <= value <= 1
        if not fits:
            raise ValueError(f"is {value!r}; it must be none, selective, every-k (such as every-2) or a fraction from 0 to 1")
        return value

    @field_validator("offload")
    @classmethod
    def _once(cls, value: tuple[Offload, ...]) -> tuple[Offload, ...]:
        return tuple(dict.fromkeys(value))

    def recomputed_blocks(self, num_layers: int) -> list[int]:
        """The blocks of which only the input is kept."""
        if isinstance(self.recompute, str):
            if not self.recompute.startswith("every-"):
                return []
            step = int(self.recompute.removeprefix("every-"))
            return list(range(step - 1, num_layers, step))
        return list(range(int(num_layers * self.recompute)))
