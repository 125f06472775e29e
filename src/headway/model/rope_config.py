"""The `model.rope_scaling` section: how rotary positions reach beyond the length a model was
trained at. Imports without torch."""

import math
from typing import Any, Literal

from pydantic import field_validator, model_validator

from headway.config.section import Section, setting


class RopeScaling(Section):
    """How rotary positions are scaled beyond the length a model was trained at."""

    kind: Literal["linear", "llama3", "yarn", "longrope"] = setting(
        "linear",
        "linear divides all frequencies by factor; llama3 and yarn divide only the low ones; yarn "
        "also sharpens attention; longrope "
        "divides each frequency by its own factor, one list for short and one for long documents.",
    )
    factor: float = setting(1.0, "How many times longer the context becomes.", gt=0)
    low_freq_factor: float = setting(
        1.0, "llama3: wavelengths above original_max_seq_len / this are divided by factor.", gt=0
    )
    high_freq_factor: float = setting(
        4.0, "llama3: wavelengths below original_max_seq_len / this are unchanged.", gt=0
    )
    original_max_seq_len: int = setting(
        8192, "llama3, yarn, longrope: the length the model was trained at first.", gt=0
    )
    beta_fast: float = setting(
        32.0,
        "yarn: dimensions that rotate more often than this over original_max_seq_len are "
        "unchanged.",
        gt=0,
    )
    beta_slow: float = setting(
        1.0, "yarn: dimensions that rotate less often than this are divided by factor.", gt=0
    )
    attention_factor: float | None = setting(
        None,
        "yarn, longrope: cos and sin are multiplied by this; null = 0.1 * ln(factor) + 1 with "
        "yarn, "
        "sqrt(1 + ln(factor) / ln(original_max_seq_len)) with longrope.",
        gt=0,
    )
    truncate: bool = setting(
        True, "yarn: round the bounds of the ramp outwards to whole dimensions."
    )
    mscale: float = setting(
        0.0,
        "yarn: with mscale_all_dim, the two growths of attention whose quotient is "
        "attention_factor.",
        ge=0,
    )
    mscale_all_dim: float = setting(
        0.0,
        "yarn: latent attention multiplies scores by (0.1 * this * ln(factor) + 1) squared; 0 = "
        "unchanged.",
        ge=0,
    )
    query_growth: float = setting(
        0.0,
        "yarn: queries at position p are multiplied by 1 + this * ln(1 + floor(p / "
        "original_max_seq_len)); 0 = unchanged.",
        ge=0,
    )
    short_factor: tuple[float, ...] = setting(
        (), "longrope: divisors of the frequencies in documents up to original_max_seq_len."
    )
    long_factor: tuple[float, ...] = setting(
        (), "longrope: divisors of the frequencies in longer documents."
    )

    @field_validator("short_factor", "long_factor", mode="before")
    @classmethod
    def _list_as_tuple(cls, factors: Any) -> Any:
        # Values of a preset are validated as Python values, where a strict tuple accepts no list.
        if isinstance(factors, list):
            return tuple(factors)
        return factors

    @model_validator(mode="after")
    def _fits_kind(self) -> "RopeScaling":
        short = len(self.short_factor)
        long = len(self.long_factor)
        if self.kind == "longrope" and (short != long or not short):
            raise ValueError(
                f"longrope needs short_factor and long_factor of one length; they have {short}, "
                f"{long}"
            )
        if self.kind != "longrope" and (short or long):
            key = "short_factor" if short else "long_factor"
            raise ValueError(f"has {key}, which is for kind longrope; kind is {self.kind}")
        if any(factor <= 0 for factor in self.short_factor + self.long_factor):
            raise ValueError("has a factor that is not above 0 in short_factor or long_factor")

        # A setting of another kind would be ignored, so it is refused.
        for key in ("mscale", "mscale_all_dim", "query_growth"):
            if self.kind != "yarn" and getattr(self, key):
                raise ValueError(f"has {key}, which is for kind yarn; kind is {self.kind}")
        if self.kind == "yarn" and self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast is {self.beta_fast}; it must be above beta_slow={self.beta_slow}"
            )
        return self


def yarn_growth(factor: float, scale: float = 1.0) -> float:
    """What yarn multiplies queries and keys by for a context `factor` times as long: 0.1 scale
    ln(factor) + 1 (Peng 2023)."""
    if factor > 1:
        return 0.1 * scale * math.log(factor) + 1.0
    return 1.0
