"""The contract of an optimizer: it updates lists of local tensors in place.

    Optimizer             tensors are flat and cut anywhere, so that state shards evenly (AdamW)
    MatrixOptimizer       each tensor is a whole parameter in its shape, on one rank (Muon)
    AveragingOptimizer    masters are averages, the model trains with others (schedule-free)

Whether to clip or skip is decided on the device (`Guard`), so no update waits for the host.
A config may give parameters to several rules: `parts` names the part of each, `part` gives the
config of a part (Muon beside AdamW).

The modules of kinds import without torch, so that a recipe is read quickly; the arithmetic of a
kind is in `<kind>_update.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, runtime_checkable

from pydantic import model_validator

from headway.config.kinds import KindConfig
from headway.config.section import Section, setting
from headway.errors import ConfigError
from headway.optim.schedule import Schedule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headway.model.layout import Specs


@dataclass(frozen=True)
class Hyper:
    """The hyperparameters of one parameter group at one step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool = False
    average: float = 0.0
    """Share of the newest iterate in averaged weights, for an optimizer that averages them."""


class Optimizer(Protocol):
    """An update rule."""

    slots: tuple[str, ...]
    """Names of its state tensors, each as large as the parameter; fp32 unless it says otherwise
    (optim/state_storage.py)."""

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: dict[str, list[Tensor]],
        steps: list[Tensor],
        hyper: Hyper,
        guard: Guard,
        copies: list[Tensor] | None = None,
    ) -> None:
        """Change params and state in place, then set `copies`, their lower-precision twins.

        `steps` are 0-dim counters of updates done, which the rule advances unless it skips.
        `state` has a list for each tensor the state is stored in, as long as params; element i of
        each belongs to params[i].
        """
        ...


def takes_narrow_gradients(optimizer: object, device: torch.device) -> bool:
    """Whether `update` reads bf16 gradients without a copy in fp32: kernels on CUDA do."""
    # Not in the protocol, so that rules outside headway need not know it.
    return device.type == "cuda" and getattr(optimizer, "NARROW_ON_CUDA", False)


@runtime_checkable
class MatrixOptimizer(Optimizer, Protocol):
    """An update rule that needs whole parameters in their shapes.

    Each is updated by one rank of the shard group, which holds its state.
    """

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The state of a parameter of this shape: name of each tensor -> its shape.

        All names are in `slots`.
        """
        ...


@runtime_checkable
class AveragingOptimizer(Optimizer, Protocol):
    """An update rule whose params are averages of what trains.

    Averages are validated, saved and exported, while the model trains with `copies`.

    Engines keep both apart, also where they could be one tensor, and always pass `copies`.
    """

    def set_training_weights(
        self,
        params: list[Tensor],
        state: dict[str, list[Tensor]],
        steps: list[Tensor],
        copies: list[Tensor],
    ) -> None:
        """Set `copies` to the weights that train, bit for bit as the last update did.

        Before the first update they are the params.
        """
        ...


@dataclass(frozen=True)
class Guard:
    """Clip and skip, decided on the device: gradients are divided by `scale`.

    Where `found_inf` is not 0 nothing changes.
    """

    scale: Tensor
    found_inf: Tensor


class GroupRule(Section):
    """A group of parameters with its own hyperparameters."""

    match: tuple[str, ...] = setting(
        ..., "Patterns of parameter names, as in `freeze`.", min_length=1
    )
    lr: float | None = setting(None, "Peak learning rate of the group.", ge=0, le=1e30)
    lr_factor: float | None = setting(
        None,
        "Peak learning rate of the group as a multiple of optim.lr; instead of lr.",
        ge=0,
        le=1000,
    )
    betas: tuple[float, float] | None = setting(None, "Adam's betas of the group.")
    eps: float | None = setting(None, "Adam's epsilon of the group.", gt=0, le=1)
    weight_decay: float | None = setting(None, "Weight decay of the group.", ge=0, le=1000)
    maximize: bool | None = setting(None, "Ascend instead of descend.")


def check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    """Two decay rates, each at least 0 and below 1."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"is {list(betas)}; both must be at least 0 and below 1")
    return betas


class OptimConfig(KindConfig):
    """What every optimizer's settings hold."""

    NEEDS_MATRICES: ClassVar[bool] = False
    """Some of its parameters are updated by a `MatrixOptimizer`: settings that cut or move state
    freely are refused early."""
    COUPLES_EXPERTS: ClassVar[bool] = False
    AVERAGES_WEIGHTS: ClassVar[bool] = False
    """Whether the weights that are validated and saved are averages of those that train."""
    """The update of one expert depends on the others of its layer, so that ranks cannot share
    them."""
    HAS_NO: ClassVar[tuple[str, ...]] = ()
    """Settings of a group that mean nothing to this optimizer and are refused."""

    lr: float = setting(3e-4, "Peak learning rate.", ge=0, le=1e30)
    weight_decay: float = setting(0.1, "Decoupled weight decay.", ge=0, le=1000)
    decay: tuple[str, ...] = setting(
        ("matrices",),
        "Which parameters decay: patterns as in `freeze`; `matrices` are all of two dimensions.",
    )
    clip: float | None = setting(1.0, "Largest global gradient norm; null = no clipping.", gt=0)
    schedule: Schedule = setting(Schedule, "Learning rate over the run.")
    groups: tuple[GroupRule, ...] = setting(
        (), "Parameter groups with their own hyperparameters; the first rule that matches wins."
    )

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        for index, rule in enumerate(self.groups):
            if rule.lr is not None and rule.lr_factor is not None:
                raise ValueError(
                    f"groups.{index} has lr={rule.lr:g} and lr_factor={rule.lr_factor:g}, which "
                    "mean the same. Remove one"
                )
            # A setting that would do nothing is refused, not ignored.
            for name in self.HAS_NO:
                if getattr(rule, name) is not None:
                    raise ValueError(
                        f"groups.{index}.{name} is {getattr(rule, name)}, which {self.kind} does "
                        "not have. Remove it"
                    )
        return self

    def build(self) -> Optimizer:
        """Make the update rule."""
        raise ConfigError(f"{type(self).__module__} defines no Config.build; a kind needs one.")

    def hyper(self, step: int, total_steps: int) -> Hyper:
        """The hyperparameters of a group without a rule, at one step."""
        raise ConfigError(f"{type(self).__module__} defines no Config.hyper; a kind needs one.")

    def parts(self, specs: Specs) -> dict[str, str]:
        """The part that updates each parameter, by name; what is missing belongs to the part ""."""
        return {}

    def part(self, name: str) -> OptimConfig:
        """The settings of one part: what builds its rule and its hyperparameters."""
        return self
