"""Where two runs with rollouts part. In: two run folders of one recipe, on other ranks, with other
microbatches, or of which one was resumed; out: the first token that they drew differently, and how
near they were before it.

    rollout  0  1  2  3        first difference: rollout 2, the prompt, sample and position of a
    run      =  =  x  x        token; metrics are compared up to the update before it
    other    =  =  x  x

Both runs draw a token with the same random number. Their probabilities differ by roundings, so at
some time a number falls between the two, and both draw other tokens from there on. Then equal
tokens have nearly equal log-probabilities until the difference. Where these are far apart, or
metrics are, the runs differed before that draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headway.config.load import load
from headway.errors import ConfigError
from headway.rollout.journal import SampledAnswer, SampledBatch
from headway.track.base import flatten
from headway.track.metrics_file import MetricsReader
from headway.train.config import Recipe
from headway.train.rollout_report import JournalBatch, journal_batches, journal_folders
from headway.train.run_folder import METRICS, RECIPE

LAYOUT_METRICS = {
    "micro_num",
    "largest_length",
    "largest_batch",
    "smallest_batch",
}
"""Numbers of microbatches, which other ranks and other `batch.micro_rows` change."""
CLOCK_ENDINGS = ("seconds", "per_second")
SAMPLING_SETTINGS = ("samples", "max_new_tokens", "temperature", "top_k", "top_p", "min_p")
"""Settings of `rollout` that decide what is drawn."""


@dataclass(frozen=True)
class DrawnToken:
    """What one of the runs drew where they differ."""

    id: int | None
    """None: its answer had ended."""
    logprob: float | None
    """In the distribution that it was drawn from."""
    version: int
    """Updates of the weights that drew it."""
    text: str
    """Of the whole answer."""


@dataclass(frozen=True)
class FirstDifference:
    """The first rollout that differs, and the first token in it, in the order of its answers."""

    what: Literal["token", "prompts"]
    """prompts: the rollouts answer other prompts, or with other settings; there is no token."""
    stage: str | None
    first_step: int
    """The first update that trains on it."""
    last_step: int
    batch: int
    prompt: int | None = None
    sample: int | None = None
    position: int | None = None
    """Of the token in its answer, counted from 0."""
    question: str = ""
    drawn: DrawnToken | None = None
    other_drawn: DrawnToken | None = None
    gap: float | None = None
    """Between the log-probabilities of the two tokens."""
    answers_differing: int = 0
    """Answers of this rollout whose ids differ."""
    answers: int = 0
    """Answers of this rollout."""


@dataclass(frozen=True)
class MetricDifference:
    """The metric that differs most. `difference` is |value - other| / max(1, |value|, |other|)."""

    name: str
    step: int
    value: float | None
    """None: not finite."""
    other: float | None
    difference: float
    """Infinite where one of them is not finite."""


@dataclass(frozen=True)
class RolloutComparison:
    """Two runs, token by token."""

    run: Path
    other: Path
    equal: bool
    """No id differs in the rollouts that both have."""
    rollouts: int
    """Rollouts that are equal."""
    tokens: int
    """Tokens before the first difference; of its rollout, those of equal beginnings."""
    logprob_difference: float
    """The largest difference of the log-probabilities of these tokens."""
    first: FirstDifference | None
    steps: int
    """Updates before the first difference whose metrics both runs have."""
    worst_metric: MetricDifference | None
    """Over these updates; None: there are none, or all metrics are equal."""
    trained_otherwise_from: int | None
    """The first update from which settings of training differ (objective, reward, optim, ...)."""
    more_rollouts: int
    """Rollouts of the run that the other one does not have; where nothing differs."""
    more_rollouts_of_other: int

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; it has no infinity, and null in its place."""
        values = {**asdict(self), "run": str(self.run), "other": str(self.other)}
        if self.worst_metric is not None and math.isinf(self.worst_metric.difference):
            values["worst_metric"]["difference"] = None
        return values


@dataclass
class _Compared:
    """What has been compared so far."""

    rollouts: int = 0
    tokens: int = 0
    logprob_difference: float = 0.0
    trained_otherwise_from: int | None = None
    more: int = 0
    more_of_other: int = 0

    def add_tokens(self, values: Sequence[float], others: Sequence[float]) -> None:
        """Count tokens that are equal, by their log-probabilities."""
        self.tokens += len(values)
        if len(values):
            difference = np.abs(np.asarray(values, np.float64) - np.asarray(others, np.float64))
            self.logprob_difference = max(self.logprob_difference, float(difference.max()))


def compare_rollouts(run: Path, other: Path) -> RolloutComparison:
    """Compare the journals of two runs, then the metrics before the first difference. Refuses runs
    that do not answer the same prompts in the same way from the beginning.
    """
    folders = dict(journal_folders(run))
    others = dict(journal_folders(other))
    stages = [stage for stage in folders if stage in others]
    if not stages:
        raise ConfigError(
            f"{run} and {other} have no stage with rollouts in common: "
            f"{_stage_names(folders)}, and {_stage_names(others)}. Give two runs of one recipe."
        )

    compared = _Compared()
    first: FirstDifference | None = None
    for stage in stages:
        first = _first_difference(stage, folders[stage], others[stage], compared)
        if first is not None:
            break
    if not compared.rollouts and first is None:
        raise ConfigError(
            f"{run} and {other} have no rollout in common. Give two runs of one recipe that have "
            "sampled answers."
        )

    # Metrics of the stages before the difference are compared too, and of its stage those of the
    # updates before it.
    steps = 0
    worst: MetricDifference | None = None
    for stage in stages:
        end = None
        if first is not None and stage == first.stage:
            end = first.first_step
        count, metric = _worst_metric(folders[stage], others[stage], end)
        steps += count
        if metric is not None and (worst is None or metric.difference > worst.difference):
            worst = metric
        if end is not None:
            break
    return RolloutComparison(
        run=run,
        other=other,
        equal=first is None,
        rollouts=compared.rollouts,
        tokens=compared.tokens,
        logprob_difference=compared.logprob_difference,
        first=first,
        steps=steps,
        worst_metric=worst,
        trained_otherwise_from=compared.trained_otherwise_from,
        more_rollouts=compared.more,
        more_rollouts_of_other=compared.more_of_other,
    )


def _stage_names(folders: Mapping[str | None, Path]) -> str:
    return ", ".join(stage or "a run without stages" for stage in folders)


def _first_difference(
    stage: str | None, folder: Path, other_folder: Path, compared: _Compared
) -> FirstDifference | None:
    """Compare a stage, rollout by rollout, up to the first difference."""
    is_first = True
    for batch, other in _pairs(stage, folder, other_folder, compared):
        # The digest has all that decides the answers beside the weights. Where the first rollouts
        # differ in it, the runs have other settings; later, one of them read other prompts.
        if batch.sampled.digest != other.sampled.digest:
            if is_first:
                raise ConfigError(_refusal(folder, other_folder, batch.sampled, other.sampled))
            return FirstDifference(
                "prompts", stage, batch.first_step, batch.last_step, batch.sampled.batch
            )
        is_first = False

        # Noted, and not refused: it says why weights, and so tokens, differ from there on.
        has_other_training = batch.sampled.training != other.sampled.training
        if has_other_training and compared.trained_otherwise_from is None:
            compared.trained_otherwise_from = batch.first_step

        difference = _token_difference(batch, other, compared)
        if difference is not None:
            return difference
        compared.rollouts += 1
    return None


def _pairs(
    stage: str | None, folder: Path, other_folder: Path, compared: _Compared
) -> Iterator[tuple[JournalBatch, JournalBatch]]:
    """The rollouts that both have, by number; those of one alone are counted."""
    # Both journals are read once and side by side, like sorted lists that are merged: a journal may
    # be larger than memory. Either may lack batches, where a line was damaged.
    others = iter(journal_batches([(stage, other_folder)]))
    other = next(others, None)
    for batch in journal_batches([(stage, folder)]):
        while other is not None and other.sampled.batch < batch.sampled.batch:
            compared.more_of_other += 1
            other = next(others, None)
        if other is None or other.sampled.batch > batch.sampled.batch:
            compared.more += 1
            continue
        yield batch, other
        other = next(others, None)
    while other is not None:
        compared.more_of_other += 1
        other = next(others, None)


def _token_difference(
    batch: JournalBatch, other: JournalBatch, compared: _Compared
) -> FirstDifference | None:
    """The first token of a rollout that differs, answer by answer."""
    sampled = batch.sampled
    first: FirstDifference | None = None
    differing = 0
    pairs = list(zip(sampled.answers, other.sampled.answers, strict=True))
    for index, (answer, other_answer) in enumerate(pairs):
        position = _first_position(answer.ids, other_answer.ids)
        # Behind the first token that differs, both continue other texts.
        equal = len(answer.ids)
        if position is not None:
            equal = position
        compared.add_tokens(
            answer.logprobs[:equal].tolist(), other_answer.logprobs[:equal].tolist()
        )
        if position is None:
            continue
        differing += 1
        if first is not None:
            continue

        question = ""
        if sampled.questions:
            # Answers stand prompt by prompt, equally many of each.
            question = sampled.questions[index * len(sampled.prompts) // len(pairs)]
        drawn = _drawn(sampled, answer, position)
        other_drawn = _drawn(other.sampled, other_answer, position)
        gap = None
        if drawn.logprob is not None and other_drawn.logprob is not None:
            gap = abs(drawn.logprob - other_drawn.logprob)
        first = FirstDifference(
            "token",
            batch.stage,
            batch.first_step,
            batch.last_step,
            sampled.batch,
            answer.prompt,
            answer.sample,
            position,
            question,
            drawn,
            other_drawn,
            gap,
            answers=len(pairs),
        )
    if first is None:
        return None
    return replace(first, answers_differing=differing)


def _first_position(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position where two answers differ, the end of the shorter one included."""
    for position, (token, other) in enumerate(zip_longest(ids, others)):
        if token != other:
            return position
    return None


def _drawn(sampled: SampledBatch, answer: SampledAnswer, position: int) -> DrawnToken:
    if position >= len(answer.ids):
        return DrawnToken(None, None, sampled.version, answer.text)
    logprob = float(answer.logprobs[position])
    return DrawnToken(answer.ids[position], logprob, sampled.version, answer.text)


def _worst_metric(
    folder: Path, other_folder: Path, end: int | None
) -> tuple[int, MetricDifference | None]:
    """How many updates before `end` both runs have metrics of, and the metric that differs most."""
    others = dict(_metrics(other_folder, end))
    steps = 0
    worst: MetricDifference | None = None
    for step, metrics in _metrics(folder, end):
        if step not in others:
            continue
        steps += 1
        for name, value in metrics.items():
            if name not in others[step]:
                continue
            other = others[step][name]
            difference = _difference(value, other)
            if difference and (worst is None or difference > worst.difference):
                worst = MetricDifference(name, step, value, other, difference)
    return steps, worst


def _metrics(folder: Path, end: int | None) -> Iterator[tuple[int, dict[str, float | None]]]:
    """The updates of a run with what they say of learning: no clock, no shape of microbatches."""
    path = folder / METRICS
    if not path.is_file():
        return
    for record in MetricsReader(path):
        step = record["step"]
        if end is not None and step >= end:
            return
        values: dict[str, float | None] = {}
        for name, value in flatten({**record, "time": {}, "non_finite": {}}).items():
            # What two runs on other ranks or machines may differ in.
            if name in LAYOUT_METRICS or name.endswith(CLOCK_ENDINGS):
                continue
            if value is None or isinstance(value, (int, float)):
                values[name] = value
        yield step, values


def _difference(value: float | None, other: float | None) -> float:
    """Relative for large numbers, absolute for small ones: a loss near 0 is all rounding."""
    if value is None or other is None:
        # None: both were not finite, which is no difference.
        if value is other:
            return 0.0
        return math.inf
    return abs(value - other) / max(1.0, abs(value), abs(other))


def _refusal(folder: Path, other_folder: Path, sampled: SampledBatch, other: SampledBatch) -> str:
    """Names what makes two first rollouts incomparable."""
    settings = load(Recipe, folder / RECIPE).rollout
    other_settings = load(Recipe, other_folder / RECIPE).rollout
    names = [
        f"rollout.{name} ({getattr(settings, name)} and {getattr(other_settings, name)})"
        for name in SAMPLING_SETTINGS
        if getattr(settings, name) != getattr(other_settings, name)
    ]
    if sampled.seed != other.seed:
        names.insert(0, f"seed ({sampled.seed} and {other.seed})")
    if sampled.tokenizer != other.tokenizer:
        names.insert(0, "the tokenizer")
    if sampled.prompts != other.prompts:
        names.append("the prompts of the first rollout")
    # The digest differs, and all else that is in it is equal.
    if not names:
        names.append("the ids that end an answer")
    return (
        f"{folder} and {other_folder} cannot be compared: they differ in {', '.join(names)}. "
        "Give two runs of one recipe, for example on other ranks."
    )
