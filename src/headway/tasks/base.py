"""The contract of a task: a model's output and a batch come in, additive terms go out, never
a mean.

Each rank and microbatch back-propagates its share of one global loss: the sum over terms of
coefficient * sum / total. The total is the weight of the whole step and is known before the first
forward. So accumulation and the number of ranks do not change the result, except through the noise
of dropout and of sampled head gates, which is drawn per microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

from pydantic import PrivateAttr

from headway.config.kinds import KindConfig
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.data.config import DataConfig
    from headway.data.groups import SourceReader
    from headway.data.samples import SampleSource
    from headway.kernels.distill_loss import TeacherHead
    from headway.model.base import ModelOut
    from headway.model.config import Head
    from headway.tasks.answers import AnswerGroup, AnswerSampling

MetricSums = dict[str, "tuple[Tensor, Tensor]"]
"""Metrics by name, each as (sum, weight): over the step both are added up, then divided."""
LARGEST = "/max"
"""The ending of a metric whose values are not added up: the largest counts. Its weight is 1."""


@dataclass(frozen=True)
class Term:
    """One additive part of a loss: its sum over this microbatch. The engine divides it by the
    step's total named `per`."""

    sum: Tensor
    per: str = "targets"
    """A name of `StepBatch.totals`, or `tokens`, `step` (1) or `microbatches`, which the engine
    adds."""
    coefficient: float = 1.0


@dataclass(frozen=True)
class Loss:
    """The terms of one microbatch, and metrics as (sum, weight) pairs of tensors; both are summed
    over the step before the division."""

    terms: dict[str, Term]
    metrics: MetricSums = field(default_factory=dict)

    def share(self, totals: Mapping[str, float]) -> Tensor:
        """This microbatch's additive share of the step's loss."""
        # A total of 0 (a step without a target) has sums of 0: the share is 0, not NaN.
        parts = [
            term.sum * (term.coefficient / max(totals[term.per], 1.0))
            for term in self.terms.values()
        ]
        return sum(parts[1:], start=parts[0])


SURVEY = "survey"
"""The name of the one first pass of a `StepTask`."""


class SeenRows(NamedTuple):
    """What a first pass read from the rows of all microbatches and ranks."""

    values: Tensor
    """[n of all microbatches and ranks, ...], without gradients."""
    start: int = 0
    """Where the rows of the microbatch at hand begin."""


@dataclass(frozen=True)
class FirstPass:
    """A pass without gradients over all microbatches of a step that comes before the first loss, so
    that accumulation and ranks change nothing in a loss that couples the rows of a whole step."""

    name: str
    """Under which `StepInfo.seen` has what it read."""
    read: Callable[[ModelOut, Batch], Tensor]
    """What the loss must know of a microbatch's rows: [n, ...], with the same n for every
    microbatch."""
    rows: Callable[[Batch], Batch] | None = None
    """Other rows that the model sees instead of those it trains on; None: the same. Then a step of
    one microbatch on one rank needs no pass: its loss sees all rows anyway."""
    in_evaluation: bool = True
    """Whether the loss of validation rows needs it, too."""


@dataclass(frozen=True)
class StepInfo:
    """The step for which a loss is computed."""

    step: int
    total_steps: int
    num_sources: int = 1
    training: bool = True
    seen: Mapping[str, SeenRows] = field(default_factory=dict)
    """What first passes read, by their names. A pass is missing where this microbatch is the whole
    step (see `FirstPass.rows`)."""

    @property
    def survey(self) -> Tensor | None:
        """What the first pass of a `StepTask` read; None if this microbatch is the whole step."""
        if SURVEY not in self.seen:
            return None
        return self.seen[SURVEY].values

    @property
    def survey_start(self) -> int:
        """Where this microbatch's rows begin in it."""
        if SURVEY not in self.seen:
            return 0
        return self.seen[SURVEY].start


class Collectives(Protocol):
    """Differentiable communication over the ranks that share a step; identity in one process."""

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks."""
        ...

    def gather(self, value: Tensor) -> Tensor:
        """All ranks' values along dim 0."""
        ...


@runtime_checkable
class Task(Protocol):
    """A loss. It never calls the model. Its own parameters, if any, are in `module`; the engine
    trains them."""

    scope: Literal["row", "step"]
    """`row`: rows are independent. `step`: a term couples all rows of a step. For readers; engines
    go by `first_passes_of`."""
    module: nn.Module | None
    """Parameters of the task itself (a Lagrange multiplier, a temperature), or None."""

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The additive terms of one microbatch."""
        ...


@runtime_checkable
class CoupledTask(Task, Protocol):
    """A loss that couples all rows of a step."""

    def first_passes(self) -> tuple[FirstPass, ...]:
        """The passes that come before the first loss of a step, in their order."""
        ...


@runtime_checkable
class StepTask(Task, Protocol):
    """A loss that couples all rows of a step through one pass over the rows it trains on. Plug-ins
    of earlier releases have this form; new tasks define `first_passes`."""

    def survey(self, out: ModelOut, batch: Batch) -> Tensor:
        """What the loss must know of a microbatch's rows: [n, ...], with the same n for every
        microbatch."""
        ...


def first_passes_of(objective: Task) -> tuple[FirstPass, ...]:
    """The passes that come before the first loss of a step; most tasks have none."""
    if isinstance(objective, CoupledTask):
        return objective.first_passes()
    if isinstance(objective, StepTask):
        return (FirstPass(SURVEY, objective.survey),)
    return ()


class ScoreColumns(Protocol):
    """How the log-probabilities of a frozen model are stored: as columns of a microbatch, and in a
    table for the whole data.

    The table has two numbers for each group of the data: DPO's chosen and rejected answer, KTO's
    answer and KL completion. A row of a microbatch has the same number of places for groups in
    every microbatch; some may be empty.
    """

    number: str
    """The column that says which group is in a place, -1 for empty ones: [rows, places]."""

    def scored(self, batch: Batch) -> dict[str, Batch]:
        """The rows that the frozen model reads for each column of log-probabilities."""
        ...

    def to_table(self, columns: Mapping[str, Tensor], places: int) -> Tensor:
        """Columns as two numbers for each place: [rows, places, 2]."""
        ...

    def from_table(self, scores: Tensor) -> dict[str, Tensor]:
        """The columns of two numbers for each place."""
        ...


@dataclass(frozen=True)
class ReferenceSpec:
    """The reference model whose log-probabilities a task compares with."""

    path: str | None
    """A run, a checkpoint or a Hugging Face folder; None: the weights the run starts from."""
    cached: bool
    """Compute its log-probabilities once for all data before training, instead of keeping the model
    in memory."""
    columns: ScoreColumns | None = None
    """How its log-probabilities of documents are kept; None: those are not wanted."""
    token_column: str | None = None
    """The column that gets its log-probability of every target, at the temperature of rollouts."""
    teaches: bool = False
    """Messages call it a teacher, although its log-probabilities are what is wanted."""

    @property
    def is_teacher(self) -> bool:
        """Whether its hidden states and its head are needed, not its log-probabilities of the
        targets."""
        return self.columns is None and self.token_column is None

    @property
    def setting(self) -> str:
        """The setting that names it."""
        return f"objective.{self.role}"

    @property
    def role(self) -> str:
        """What messages call it."""
        if self.is_teacher or self.teaches:
            return "teacher"
        return "reference"


@dataclass(frozen=True)
class TeacherCacheSpec:
    """Stored logits of a teacher that a task reads."""

    paths: tuple[str, ...]
    temperature: float | None
    """For which the rest of the vocabulary must be summed up; None: the rest is not read."""


@dataclass(frozen=True)
class ParameterRule:
    """Optimizer settings a task needs for some parameters; optim.groups of the recipe take
    precedence."""

    match: tuple[str, ...]
    """Patterns of parameter names, as in `freeze`."""
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    maximize: bool = False
    lr_steps: int | None = None
    """Runs of up to so many steps take `lr`, a longer one of n steps `lr * lr_steps / n`; None:
    all take `lr`."""


@dataclass(frozen=True)
class GateSpec:
    """Window and sinks of streaming heads, for a task that trains head gates; None = as in
    the model's config."""

    window: int | None = None
    sinks: int | None = None
    target: float | None = None
    """The share of streaming heads that training aims at; None: the task has no such number."""
    held_at: Callable[[int, int], float] | None = None
    """(step, total steps) -> the share of streaming heads that the gates expect in this step; None:
    nothing holds them there but the loss."""


class UsualRates(NamedTuple):
    """Peak learning rates of AdamW that are usual for a task; `headway doctor recipe` names others."""

    name: str
    low: float
    high: float


@dataclass(frozen=True)
class TaskNeeds:
    """What a task needs beside its rows. The defaults are next-token prediction's."""

    head: Head = "tokens"
    """What the model puts out (`ModelConfig.head`)."""
    whole_rows: bool = True
    """Whether a loss must see whole rows. False: terms and metrics are sums over tokens (or per
    microbatch), so ranks may share a row."""
    frozen: ReferenceSpec | None = None
    """A second model that does not train."""
    stored_logits: TeacherCacheSpec | None = None
    """Logits of a teacher that the loader reads."""
    gates: GateSpec | None = None
    """Head gates that train."""
    rollouts: bool = False
    """Whether its rows are answers that the model samples while it trains (`rollout` and `reward`
    of the recipe). Such a task defines `TaskConfig.advantages_of`."""


class TaskConfig(KindConfig):
    """What is asked of a task before anything is built. No torch. Every question has an answer that
    suits single documents of text."""

    _answer_sampling: Any = PrivateAttr(None)

    @property
    def reads(self) -> tuple[str, ...]:
        """The kinds of records it reads, the preferred one first."""
        return ("text", "chat")

    def reader(self, config: DataConfig) -> SourceReader:
        """How it reads the sources of a run: documents, or groups of them."""
        from headway.data.groups import DocumentReader

        return DocumentReader()

    @property
    def needs(self) -> TaskNeeds:
        """What it needs beside its rows."""
        # Plug-ins written for the second release say with BY_TOKEN that ranks may share a row.
        return TaskNeeds(whole_rows=not getattr(type(self), "BY_TOKEN", False))

    @property
    def rules(self) -> tuple[ParameterRule, ...]:
        """Parameters that need their own optimizer settings."""
        return ()

    @property
    def usual_rates(self) -> UsualRates | None:
        """Usual learning rates, where they are the task's own; None: they depend on the model."""
        return None

    def with_teacher_head(self, head: TeacherHead) -> Self:
        """These settings once the teacher is loaded."""
        return self

    # What follows is asked of a task that learns from answers (`needs.rollouts`).

    def advantages_of(self, groups: Sequence[AnswerGroup]) -> Sequence[Sequence[float]]:
        """The advantages of the answers to some prompts, those of one rollout: a finite number for
        each answer, by prompts. A function of its argument alone: a resumed run asks again."""
        raise ConfigError(
            f"objective {self.kind} learns from rollouts, but does not say what their rewards are "
            "worth. Define advantages_of in its Config (docs/extend.md)."
        )

    @property
    def needs_rewards(self) -> bool:
        """Whether answers are of no use without a reward of the recipe."""
        return True

    @property
    def fewest_samples(self) -> int:
        """The least number of answers to a prompt that it can compare."""
        return 1

    @property
    def reward_divergence(self) -> float:
        """What the reward of an answer loses for every unit of log p - log p_frozen, summed over
        its tokens, with the model of `needs.frozen`. Above 0, answers are scored once, when they
        were sampled, and not with every microbatch."""
        return 0.0

    def with_sampling(self, sampling: AnswerSampling) -> Self:
        """These settings once it is known how answers are sampled."""
        config = self.model_copy()
        config._answer_sampling = sampling
        return config

    @property
    def answer_sampling(self) -> AnswerSampling:
        """How answers are sampled: known when `build` is called."""
        from headway.tasks.answers import AnswerSampling

        return self._answer_sampling or AnswerSampling()

    # What follows is asked of a task whose model puts out vectors of modalities.

    def without_absent(self, modalities: tuple[str, ...]) -> tuple[Self, tuple[str, ...]]:
        """The settings for a model without some modalities, and the pairs of modalities that this
        leaves out."""
        return self, ()

    def check_modalities(self, modalities: tuple[str, ...]) -> None:
        """Raise a ConfigError for settings that do not fit the modalities of a model."""

    def remarks(self, samples: SampleSource) -> Iterator[str]:
        """What a reader of the log should know about some samples before training on them, a line
        each."""
        return iter(())

    def values_from_scales(
        self, modalities: tuple[str, ...], log_scales: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """First values of its own parameters by name, from the log scales in the file of an
        aligner."""
        return {}

    def scales_of(
        self, modalities: tuple[str, ...], values: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """The log scale of every modality, for the file of an aligner. `values` has its own
        parameters by name. 0: similarities are taken as they are."""
        return dict.fromkeys(modalities, 0.0)

    def build(self) -> Task:
        """The loss with its own parameters. The last question: `with_teacher_head` and `with_sampling`
        have been asked where they apply."""
        raise ConfigError(f"{type(self).__module__} defines no Config.build; every kind needs one.")
