"""Is a step's loss what it should be? Judged on the device, with no wait for it, by a rule that is the same on every rank and rerun.

A loss is *not finite*, or it is a *spike*: above the mean of the last `window` good losses by more than `sigma` standard deviations (of
which one is at least 1 % of the mean, so that a flat curve has no spikes). Nothing is judged before the window is full.
Imports without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from headway.config.section import Section, setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAST_DEVIATION = 0.01
SPIKE, NOT_FINITE = 1, 2
NAMES = {SPIKE: "spike", NOT_FINITE: "nan"}


class HealConfig(Section):
    """What to do about a loss that is not finite or jumps; it is told in any case (events nan and spike)."""

    on_nan: Literal["skip", "rollback"] = setting(
        "skip", "A loss or gradient that is not finite: skip the step, or go back to a checkpoint and leave out that batch."
    )
    on_spike: Literal["alert", "skip", "rollback"] = setting(
        "alert", "A spike: only tell it, skip the step, or go back to a checkpoint and leave out that batch."
    )
    sigma: float | None = setting(6.0, "A spike is so many standard deviations above the mean of the window; null = never.", gt=0)
    window: int = setting(128, "Good losses the rule looks back on; nothing is a spike before there are so many.", gt=1, le=1_000_000)
    skip_before: int = setting(0, "Going back: batches before the bad one that are left out with it.", ge=0, le=1_000_000)
    limit: int = setting(
        3, "Skipped steps in a row, or ways back to the same checkpoint, after which the run gives up (exit code 3).", ge=0
    )

    @property
    def rolls_back(self) -> bool:
        """Whether a run may have to go back to a checkpoint."""
        return "rollback" in (self.on_nan, self.on_spike)


class Watch:
    """The last good losses, on the device; part of what resumes."""

    def __init__(self, config: HealConfig, device: torch.device) -> None:
        import torch

        self.config = config
        self.losses = torch.zeros(config.window, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        self.count = torch.zeros((), dtype=torch.int64, device=self.losses.device)

    def judge(self, loss: Tensor) -> Tensor:
        """0, SPIKE or NOT_FINITE; a good loss enters the window, and where spikes are only told, they do too."""
        import torch

        config, loss = self.config, loss.detach().double()
        is_bad = loss.isfinite().logical_not()
        is_spike = torch.zeros_like(is_bad)
        if config.sigma is not None:
            mean = self.losses.mean()
            deviation = self.losses.std(correction=0).maximum(LEAST_DEVIATION * mean.abs())
            is_spike = (self.count >= config.window) & (loss > mean + config.sigma * deviation)
        enters = ~is_bad if config.on_spike == "alert" else ~(is_bad | is_spike)
        place = (self.count % config.window).reshape(1)
        self.losses.scatter_(0, place, torch.where(enters, loss, self.losses.gather(0, place).squeeze(0)).reshape(1))
        self.count += enters
        return torch.where(is_bad, NOT_FINITE, is_spike.to(torch.int64) * SPIKE)

    def skips(self, verdict: Tensor) -> Tensor | None:
        """1 where the update is to change nothing; a step that is not finite never changes anything anyway."""
        return (verdict == SPIKE).float() if self.config.on_spike == "skip" else None

    def scalars(self) -> dict[str, Any]:
        """Numbers for a checkpoint: the window, oldest place first, and how many losses were seen."""
        return {"count": int(self.count), "losses": self.losses.tolist()}

    def load(self, scalars: dict[str, Any] | None) -> None:
        """Take back what `scalars` gave; a window of another length begins anew."""
        import torch

        fits = scalars is not None and len(scalars["losses"]) == self.config.window
        self.losses.copy_(torch.tensor(scalars["losses"] if fits and scalars else [0.0] * self.config.window, dtype=torch.float64))
        self.count.fill_(scalars["count"] if fits and scalars else 0)
