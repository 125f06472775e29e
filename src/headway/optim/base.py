"""The contract of an optimizer: it updates lists of local tensors in place; whether to clip or skip is decided on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headway.config.kinds import KindConfig
from headway.config.section import Section, setting
from headway.errors import ConfigError
from headway.optim.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Hyper:
    """The hyperparameters of one parameter group at one step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool = False


class Optimizer(Protocol):
    """An update rule."""

    slots: tuple[str, ...]
    """Names of its state tensors, each as large as the parameter; fp32 unless it says otherwise (optim/state_storage.py)."""

    def update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], steps: list[Tensor], hyper: Hyper, guard: Guard,
        copies: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Change params and state in place, then set `copies`, their lower-precision twins; `steps` are 0-dim counters of updates done.

        `state` has a list for each tensor the state is stored in, as long as params; element i of each belongs to params[i].
        """
        ...


@dataclass(frozen=True)
class Guard:
    """Clip and skip, decided on the device: gradients are divided by `scale`; where `found_inf` is not 0 nothing changes."""

    scale: Tensor
    found_inf: Tensor


class GroupRule(Section):
    """A group of parameters with its own hyperparameters."""

    match: tuple[str, ...] = setting(..., "Patterns of parameter names, as in `freeze`.", min_length=1)
    lr: float | None = setting(None, "Peak learning rate of the group.", ge=0)
    betas: tuple[float, float] | None = setting(None, "Adam's betas of the group.")
    eps: float | None = setting(None, "Adam's epsilon of the group.", gt=0)
    weight_decay: float | None = setting(None, "Weight decay of the group.", ge=0)
    maximize: bool | None = setting(None, "Ascend instead of descend.")


class OptimConfig(KindConfig):
    """What every optimizer's settings hold."""

    lr: float = setting(3e-4, "Peak learning rate.", ge=0)
    weight_decay: float = setting(0.1, "Decoupled weight decay.", ge=0)
    decay: tuple[str, ...] = setting(
        ("matrices",), "Which parameters decay: patterns as in `freeze`; `matrices` are all of two dimensions."
    )
    clip: float | None = setting(1.0, "Largest global gradient norm; null = no clipping.", gt=0)
    schedule: Schedule = setting(Schedule, "Learning rate over the run.")
    groups: tuple[GroupRule, ...] = setting((), "Parameter groups with their own hyperparameters; the first rule that matches wins.")

    def build(self) -> Optimizer:
        """Make the update rule."""
        raise ConfigError(f"{type(self).__module__} defines no Config.build; a kind needs one.")

    def hyper(self, step: int, total_steps: int) -> Hyper:
        """The hyperparameters of a group without a rule, at one step."""
        raise ConfigError(f"{type(self).__module__} defines no Config.hyper; a kind needs one.")
