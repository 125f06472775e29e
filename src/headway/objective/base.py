"""The contract of an objective: it turns a model's output and a batch into additive terms, never into a mean.

Each rank and microbatch back-propagates its share of one global loss: sum over terms of coefficient * sum / total, where total is the
weight of the whole step, known before the first forward. So accumulation and ranks cannot change the result, but for the noise
of dropout and of sampled head gates, which is drawn per microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

from headway.config.kinds import KindConfig
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.model.base import ModelOut

MetricSums = dict[str, "tuple[Tensor, Tensor]"]


@dataclass(frozen=True)
class Term:
    """One additive part of a loss: `sum` over this microbatch; the engine divides by the step's total called `per`."""

    sum: Tensor
    per: str = "targets"
    coefficient: float = 1.0


@dataclass(frozen=True)
class Loss:
    """The terms of one microbatch, and metrics as (sum, weight) pairs of tensors, added up over the step before they are divided."""

    terms: dict[str, Term]
    metrics: MetricSums = field(default_factory=dict)

    def share(self, totals: Mapping[str, float]) -> Tensor:
        """This microbatch's additive share of the step's loss."""
        parts = [term.sum * (term.coefficient / max(totals[term.per], 1.0)) for term in self.terms.values()]
        return sum(parts[1:], start=parts[0])


@dataclass(frozen=True)
class StepInfo:
    """Where training stands when a loss is computed."""

    step: int
    total_steps: int
    num_sources: int = 1
    training: bool = True
    survey: Tensor | None = None
    """What `StepObjective.survey` saw of every row of the step, of all microbatches and ranks; None: this microbatch is all of it."""


class Collectives(Protocol):
    """Differentiable communication over the ranks that share a step; identity in one process."""

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks."""
        ...

    def gather(self, value: Tensor) -> Tensor:
        """All ranks' values along dim 0."""
        ...


@runtime_checkable
class Objective(Protocol):
    """A loss. It is pure and never calls the model; its own parameters, if any, live in `module` and are trained by the engine."""

    scope: Literal["row", "step"]
    """Whether rows are independent (`row`) or a term couples all rows of a step (`step`)."""
    module: nn.Module | None
    """Parameters of the objective itself (a Lagrange multiplier, a temperature), or None."""

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The additive terms of one microbatch."""
        ...


@runtime_checkable
class StepObjective(Objective, Protocol):
    """A loss that couples all rows of a step. It first sees every row without gradients, so that accumulation and ranks change nothing."""

    def survey(self, out: ModelOut, batch: Batch) -> Tensor:
        """What the loss needs to know of a microbatch's rows, without gradients: [n, ...], n the same for every microbatch."""
        ...


@dataclass(frozen=True)
class ReferenceSpec:
    """A frozen model whose log-probabilities an objective compares with."""

    path: str | None
    """A run, a checkpoint or a Hugging Face folder; None: the weights the run starts from."""
    cached: bool
    """Compute them once for all pairs before training, instead of keeping the model."""


@dataclass(frozen=True)
class ParameterRule:
    """Numbers an objective asks for, for some parameters; a recipe's own optim.groups go before."""

    match: tuple[str, ...]
    """Patterns of parameter names, as in `freeze`."""
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    maximize: bool = False


@dataclass(frozen=True)
class GateSpec:
    """An objective trains head gates, with this reach of streaming heads; None = as the model has it."""

    window: int | None = None
    sinks: int | None = None


class ObjectiveConfig(KindConfig):
    """Base of every objective's settings."""

    PAIRS: ClassVar[bool] = False
    """Whether it compares preference pairs instead of reading documents."""

    BY_TOKEN: ClassVar[bool] = False
    """Whether its terms and metrics are sums over tokens (or per microbatch), so that ranks may each hold a part of a row's tokens."""

    @property
    def reference_spec(self) -> ReferenceSpec | None:
        """The reference it needs, if any."""
        return None

    @property
    def rules(self) -> tuple[ParameterRule, ...]:
        """Parameters that train with numbers of their own."""
        return ()

    @property
    def gate_spec(self) -> GateSpec | None:
        """The head gates it trains; None: it knows nothing of them."""
        return None

    def build(self) -> Objective:
        """Make the objective."""
        raise ConfigError(f"{type(self).__module__} defines no Config.build; a kind needs one.")
