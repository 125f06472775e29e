"""Dynamic loss scaling for fp16.

The loss is multiplied by a scale so that small gradients do not become zero.

A step whose gradients overflow on any rank is skipped; `hysteresis` overflows (counted until the
next growth) lower the scale, and `growth_interval` good steps in a row raise it. Everything stays
on the device.

Micikevicius et al. 2017, arXiv:1710.03740; hysteresis as in Megatron-LM's DynamicGradScaler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from headway.config.section import Section, setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ScalerConfig(Section):
    """The loss scale of precision fp16."""

    initial: float = setting(65536.0, "Scale at the start.", gt=0)
    min: float = setting(1.0, "Lowest scale.", gt=0)
    max: float = setting(float(2**24), "Highest scale.", gt=0)
    growth_interval: int = setting(1000, "Good steps before the scale grows.", gt=0)
    growth_factor: float = setting(2.0, "What the scale is multiplied by when it grows.", gt=1)
    backoff_factor: float = setting(
        0.5, "What the scale is multiplied by after overflows.", gt=0, lt=1
    )
    hysteresis: int = setting(
        2,
        "Overflows before the scale is lowered; further overflows lower it each time until it has "
        "grown again.",
        gt=0,
    )

    @model_validator(mode="after")
    def _in_order(self) -> ScalerConfig:
        if not self.min <= self.initial <= self.max:
            raise ValueError(
                f"has initial={self.initial}; it must be between min={self.min} and max={self.max}"
            )
        return self


class Scaler:
    """The loss scale of a run, on the device."""

    def __init__(self, config: ScalerConfig, device: torch.device) -> None:
        import torch

        self.config = config
        self.scale = torch.tensor(config.initial, dtype=torch.float32, device=device)
        self.good = torch.zeros((), dtype=torch.float32, device=device)
        """Good steps since the last overflow or growth."""
        self.overflows = torch.zeros((), dtype=torch.float32, device=device)
        """Overflows since the last growth."""

    def update(self, found_inf: Tensor) -> None:
        """Follow one step; `found_inf` is 1 where it overflowed, the same on every rank."""
        import torch

        # An overflow ends a row of good steps; growth forgets earlier overflows.
        config = self.config
        bad = found_inf > 0
        self.overflows += found_inf
        self.good.copy_(torch.where(bad, torch.zeros_like(self.good), self.good + 1))

        # Both outcomes are computed and one is chosen: a branch would wait for the device.
        lowered = torch.where(
            self.overflows >= config.hysteresis,
            (self.scale * config.backoff_factor).clamp(min=config.min),
            self.scale,
        )
        grows = self.good >= config.growth_interval
        raised = torch.where(
            grows, (self.scale * config.growth_factor).clamp(max=config.max), self.scale
        )
        self.scale.copy_(torch.where(bad, lowered, raised))
        self.good.masked_fill_(grows, 0.0)
        self.overflows.masked_fill_(grows, 0.0)

    def scalars(self) -> dict[str, Any]:
        """Numbers for a checkpoint."""
        return {
            "scale": float(self.scale),
            "good": int(self.good),
            "overflows": int(self.overflows),
        }

    def load(self, scalars: dict[str, Any]) -> None:
        """Restore what `scalars` returned."""
        for name, value in scalars.items():
            getattr(self, name).fill_(value)
