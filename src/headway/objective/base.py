"""The contract of an objective: a model's output and a batch come in, additive terms go out, never a mean.

Each rank and microbatch back-propagates its share of one global loss: the sum over terms of coefficient * sum / total. The total is the
weight of the whole step and is known before the first forward. So accumulation and the number of ranks do not change the result, except
through the noise of dropout and of sampled head gates, which is drawn per microbatch.
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
    """One additive part of a loss: its sum over this microbatch. The engine divides it by the step's total named `per`."""

    sum: Tensor
    per: str = "targets"
    coefficient: float = 1.0


@dataclass(frozen=True)
class Loss:
    """The terms of one microbatch, and metrics as (sum, weight) pairs of tensors; both are summed over the step before the division."""

    terms: dict[str, Term]
    metrics: MetricSums = field(default_factory=dict)

    def share(self, totals: Mapping[str, float]) -> Tensor:
        """This microbatch's additive share of the step's loss."""
        parts = [
            term.sum * (term.coefficient / max(totals[term.per], 1.0))
            for term in self.terms.values()
        ]
        return sum(parts[1:], start=parts[0])


@dataclass(frozen=True)
class StepInfo:
    """The step for which a loss is computed."""

    step: int
    total_steps: int
    num_sources: int = 1
    training: bool = True
    survey: Tensor | None = None
    """What `StepObjective.survey` returned for all microbatches and ranks; None if this microbatch is the whole step."""
    survey_start: int = 0
    """Where this microbatch's rows begin in it."""


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
    """A loss. It never calls the model. Its own parameters, if any, are in `module`; the engine trains them."""

    scope: Literal["row", "step"]
    """`row`: rows are independent. `step`: a term couples all rows of a step."""
    module: nn.Module | None
    """Parameters of the objective itself (a Lagrange multiplier, a temperature), or None."""

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The additive terms of one microbatch."""
        ...


@runtime_checkable
class StepObjective(Objective, Protocol):
    """A loss that couples all rows of a step. It surveys all rows without gradients first, so accumulation and ranks change nothing."""

    def survey(self, out: ModelOut, batch: Batch) -> Tensor:
        """What the loss must know of a microbatch's rows: [n, ...], with the same n for every microbatch."""
        ...


@runtime_checkable
class MismatchObjective(StepObjective, Protocol):
    """A step objective that surveys other rows than those it trains on, so the survey is never left out."""

    def surveyed_rows(self, batch: Batch) -> Batch:
        """The rows that the model sees for the survey of a microbatch."""
        ...


@dataclass(frozen=True)
class ReferenceSpec:
    """The reference model whose log-probabilities an objective compares with."""

    path: str | None
    """A run, a checkpoint or a Hugging Face folder; None: the weights the run starts from."""
    cached: bool
    """Compute them once for all pairs before training, instead of keeping the model in memory."""
    is_teacher: bool = False
    """Its hidden states and its head are needed, not its log-probabilities of the targets."""

    @property
    def setting(self) -> str:
        """The setting that names it."""
        return "objective.teacher" if self.is_teacher else "objective.reference"


@dataclass(frozen=True)
class TeacherCacheSpec:
    """Stored logits of a teacher that an objective reads."""

    paths: tuple[str, ...]
    temperature: float | None
    """For which the rest of the vocabulary must be summed up; None: the rest is not read."""


@dataclass(frozen=True)
class ParameterRule:
    """Optimizer settings an objective needs for some parameters; optim.groups of the recipe take precedence."""

    match: tuple[str, ...]
    """Patterns of parameter names, as in `freeze`."""
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    maximize: bool = False


@dataclass(frozen=True)
class GateSpec:
    """Window and sinks of streaming heads, for an objective that trains head gates; None = as in the model's config."""

    window: int | None = None
    sinks: int | None = None


class ObjectiveConfig(KindConfig):
    """Settings that every objective has."""

    PAIRS: ClassVar[bool] = False
    """It reads preference pairs instead of documents."""

    SCORES: ClassVar[bool] = False
    """It trains a head that scores documents, in place of the one that predicts tokens."""

    UNPAIRED: ClassVar[bool] = False
    """It reads answers that are labelled good or bad; a pair counts as one of each."""

    BY_TOKEN: ClassVar[bool] = False
    """Its terms and metrics are sums over tokens (or per microbatch), so ranks may share the tokens of a row."""

    @property
    def reference_spec(self) -> ReferenceSpec | None:
        """The reference model it needs, if any."""
        return None

    @property
    def teacher_cache(self) -> TeacherCacheSpec | None:
        """The stored logits it reads, if any."""
        return None

    @property
    def rules(self) -> tuple[ParameterRule, ...]:
        """Parameters that need their own optimizer settings."""
        return ()

    @property
    def gate_spec(self) -> GateSpec | None:
        """The head gates it trains, if any."""
        return None

    def build(self) -> Objective:
        """Make the objective."""
        raise ConfigError(f"{type(self).__module__} defines no Config.build; every kind needs one.")
