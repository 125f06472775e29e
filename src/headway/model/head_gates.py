"""Head gates: one number log_alpha per layer and KV head; for each forward pass it becomes z, how
much of full attention the head uses.

Hard concrete distribution (Louizos 2018), with noise u in (0, 1):

    s = sigmoid((logit(u) + log_alpha) / tau)                  tau 2/3
    z = clamp(low + (high - low) * s, 0, 1)                    low -0.1, high 1.1

In training z is sampled, and is exactly 0 or 1 most of the time. The noise is derived from (seed,
step, microbatch), so ranks that share a microbatch agree. It is drawn on the host for all heads:
the host then knows which heads need which branch, and a rank that computes a slice of the heads
takes its slice. Only log_alpha comes from the device, once per step.

`hold` shifts all gates together until they expect a wanted share of streaming heads. An engine does
so after every update for a task that wants it; the gradient then only says which heads stream.

Where gates do not train, and in evaluation, they are settled: as many heads stream as the gates
expect, those with the lowest log_alpha.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headway.kernels.head_mix import HeadMix
from headway.kernels.streaming import StreamingWindow
from headway.model.head_masks.masks import select_heads

if TYPE_CHECKING:
    from headway.model.config import ModelConfig

TEMPERATURE = 2 / 3
LOW = -0.1
HIGH = 1.1
EPS = 1e-8
"""Noise stays this far from 0 and 1, where its logit is infinite."""
EDGE = TEMPERATURE * math.log(-LOW / HIGH)
"""P(z > 0) = sigmoid(log_alpha - EDGE), P(z = 1) = sigmoid(log_alpha + EDGE)."""
SHIFT_SPAN = 16.0
"""A gate this far from 0 is certain: E[z] is within 1e-6 of 0 or 1."""
SHIFT_HALVINGS = 44
"""Halvings of an interval of some 40 until it is as small as the rounding of fp32."""


@dataclass(frozen=True)
class GateDraw:
    """The gates of one forward pass."""

    mix: HeadMix
    """What attention needs."""
    z: Tensor
    """fp32 [L,KV] of all heads; its gradient reaches log_alpha where it was sampled and not
    clamped"""
    log_alpha: Tensor
    """fp32 [L,KV]"""


class HeadGates(nn.Module):
    """The gates of a model; parameters are fp32 and whole on every rank."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.head_gates is not None
        self.window = config.head_gates.window
        self.sinks = config.head_gates.sinks
        self.log_alpha = nn.Parameter(
            torch.empty(config.num_layers, config.kv_heads, dtype=torch.float32)
        )
        self.heads = slice(None)
        """The KV heads this rank computes."""
        self.counts = True
        """Whether the gradient of the task's terms on gates counts on this rank; of ranks that
        compute the same loss, it does on one."""
        self.skip = True
        """Heads that are decided run one branch. False computes both for all of them, to measure
        what that saves."""

    def forward(self) -> Tensor:
        """log_alpha on the host; waits for the device, so it is called once per step."""
        return self.log_alpha.detach().cpu()

    def draw(self, on_host: Tensor, seed: int | None, *, is_held: bool = False) -> GateDraw:
        """The gates of one pass from log_alpha on the host: sampled with the noise of a seed, or
        deterministic if it is None.

        `is_held`: an engine holds the expected sparsity, so the gradient leaves it as it is
        (`along_sparsity`)."""
        # Frozen gates are settled in training too.
        if seed is None or not self.log_alpha.requires_grad:
            z_host = settle(on_host).float()
            z = self._moved(z_host)
        else:
            z_host, slope = sample(on_host, seed)
            # The value is z_host exactly, the gradient that of the sample: clamped gates have none.
            zero = self.log_alpha - self.log_alpha.detach()
            if is_held:
                zero = along_sparsity(zero, self._moved(slope_of_expected_z(on_host)))
            z = self._moved(z_host) + self._moved(slope) * zero

        mix = HeadMix.of(
            z, z_host, StreamingWindow(self.window, self.sinks), heads=self.heads, skip=self.skip
        )
        # The gradient that attention has of z counts on every rank: each computes its own heads.
        if self.counts:
            return GateDraw(mix, z, self.log_alpha)
        return GateDraw(mix, _without_slope(z), _without_slope(self.log_alpha))

    def _moved(self, host: Tensor) -> Tensor:
        device = self.log_alpha.device
        if device.type == "cuda":
            return host.pin_memory().to(device, non_blocking=True)
        return host


def _without_slope(x: Tensor) -> Tensor:
    """The same value with a gradient of zero.

    There always is one, so that an engine finds the gates used in every pass.
    """
    return x.detach() + 0.0 * (x - x.detach())


def sample(log_alpha: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """(z, dz / d log_alpha), fp32 like log_alpha on the host; the arithmetic between is fp64."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    noise = torch.rand(log_alpha.shape, generator=generator, dtype=torch.float64, device="cpu")
    u = noise * (1 - 2 * EPS) + EPS
    # The formula of the module's docstring. A clamped z has no gradient.
    s = torch.sigmoid((torch.logit(u) + log_alpha.double()) / TEMPERATURE)
    z = (LOW + (HIGH - LOW) * s).clamp(0, 1).float()
    slope = (HIGH - LOW) * s * (1 - s) / TEMPERATURE
    return z, torch.where((z > 0) & (z < 1), slope, 0.0).float()


def expected_full_heads(log_alpha: Tensor) -> int:
    """How many heads the gates expect to be full; the number that stream is rounded to the
    nearest, a half up."""
    # In fp64, so that the rounding to a whole number is the same everywhere.
    streaming = float((1 - expected_z(log_alpha.double())).sum())
    return log_alpha.numel() - math.floor(streaming + 0.5)


def settle(log_alpha: Tensor) -> Tensor:
    """Bool [L,KV] on the host: which heads are full.

    As many as the gates expect, those with the highest log_alpha.
    """
    masks = select_heads(log_alpha.tolist(), expected_full_heads(log_alpha))
    return torch.tensor(masks.full, device="cpu")


def hold(log_alpha: Tensor, target: float) -> Tensor:
    """The gates shifted together so that they expect a share `target` of streaming heads:

        mean(1 - E[z](log_alpha + shift)) = target

    fp32 [L,KV] on the host like log_alpha. Gates that are not finite stay as they are.
    """
    if not bool(log_alpha.isfinite().all()):
        return log_alpha
    # No finite shift makes all gates certain. So little is rounded away when gates are settled.
    least = min(0.02, 0.4 / log_alpha.numel())
    wanted = min(max(target, least), 1 - least)

    # The expected sparsity falls with the shift. In fp64, so that every rank finds the same one.
    gates = log_alpha.double()
    span = SHIFT_SPAN + float(gates.abs().max())
    low = -span
    high = span
    for _ in range(SHIFT_HALVINGS):
        middle = (low + high) / 2
        if float(1 - expected_z(gates + middle).mean()) > wanted:
            low = middle
        else:
            high = middle
    return (gates + (low + high) / 2).float()


def along_sparsity(zero: Tensor, slopes: Tensor) -> Tensor:
    """A change of log_alpha followed by the shift that takes back what it does to the expected
    sparsity: d - sum(w d) / sum(w) for the slopes w of E[z].

    Backward then gives a head the gradient g - w sum(g) / sum(w): it opens where the head gains
    more for its share of the sparsity than heads do on average, and closes where it gains less.
    This is the gradient of the loss with the shift of `hold` as a function of log_alpha, and it
    stands where a Lagrange multiplier would: sum(g) / sum(w) is its value.
    """
    total = slopes.sum()
    # All gates are certain: nothing moves.
    return zero - (slopes * zero).sum() / total.clamp(min=EPS)


def probability_zero(log_alpha: Tensor) -> Tensor:
    """P(z = 0), the expected-L0 sparsity of a head."""
    return torch.sigmoid(EDGE - log_alpha)


def probability_one(log_alpha: Tensor) -> Tensor:
    """P(z = 1)."""
    return torch.sigmoid(log_alpha + EDGE)


def expected_z(log_alpha: Tensor) -> Tensor:
    """E[z], the integral of P(z > t) over t in 0..1, by a quadrature that is exact to 1e-6."""
    nodes, weights = _quadrature()
    probabilities = torch.sigmoid(log_alpha[..., None] - log_alpha.new_tensor(nodes))
    return (probabilities * log_alpha.new_tensor(weights)).sum(-1)


def slope_of_expected_z(log_alpha: Tensor) -> Tensor:
    """d E[z] / d log_alpha, by the quadrature of `expected_z`."""
    nodes, weights = _quadrature()
    shares = torch.sigmoid(log_alpha[..., None] - log_alpha.new_tensor(nodes))
    return (shares * (1 - shares) * log_alpha.new_tensor(weights)).sum(-1)


@cache
def _quadrature() -> tuple[list[float], list[float]]:
    """Gauss-Legendre nodes t on 0..1, as the log_alpha at which P(z > t) is a half, and their
    weights.

    P(z > t) = sigmoid(log_alpha - tau logit((t - low) / (high - low)))
    """
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(48)
    share = ((nodes + 1) / 2 - LOW) / (HIGH - LOW)
    return (TEMPERATURE * np.log(share / (1 - share))).tolist(), (weights / 2).tolist()
