"""The rollouts of a run for people. In: a run folder, whether the run is alive or not; out: a line of
figures for each batch of prompts, or answers beside what they earned.

    RUN/rollouts.jsonl                  the journal of a run
    RUN/stages/NN-name/rollouts.jsonl   that of each stage that has rollouts

Reads only. The line that a live run is writing, or that a kill has cut short, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from heapq import nlargest, nsmallest
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from headway.config.load import load
from headway.errors import ConfigError
from headway.rollout.journal import FILE, RewardedBatch, SampledBatch, read_journal
from headway.train.config import Recipe
from headway.train.run_folder import RECIPE, was_used
from headway.train.stages import FOLDER

Order = Literal["best", "worst", "sampled"]
ANSWERS_SHOWN = 10
"""Answers where nothing says how many."""
BATCHES_SHOWN = 20
"""Batches where nothing says how many: the newest."""


@dataclass(frozen=True)
class RolloutChoice:
    """Which answers of a run are wanted."""

    step: int | None = None
    """The update that trained on them; None: all."""
    prompt: int | None = None
    """The number of their prompt; None: all."""
    order: Order = "sampled"
    """By reward, or as they were sampled."""
    limit: int | None = None
    """At most this many batches or answers."""

    @property
    def wants_answers(self) -> bool:
        """Whether answers are wanted; otherwise the figures of batches are."""
        return self.step is not None or self.prompt is not None or self.order != "sampled"


@dataclass(frozen=True)
class RolloutFigures:
    """A batch of prompts in numbers; those of rewards are None until there are rewards."""

    stage: str | None
    first_step: int
    """The first update that trains on it."""
    last_step: int
    batch: int
    version: int
    """Updates before it was sampled: the weights that drew its answers."""
    prompts: int
    answers: int
    tokens: float
    """Of an answer, on average."""
    cut: float
    """The share of answers that a limit of length ended."""
    seconds: float
    tokens_per_second: float | None
    reward: float | None
    lowest: float | None
    highest: float | None
    parts: dict[str, float]
    without_signal: float | None
    """The share of prompts whose answers all have the same reward."""
    failed: int
    """Answers on which a reward failed."""
    reward_seconds: float | None


@dataclass(frozen=True)
class ReadAnswer:
    """One answer with all that is known of it."""

    stage: str | None
    first_step: int
    last_step: int
    batch: int
    version: int
    prompt: int
    sample: int
    question: str
    text: str
    reward: float | None
    """None: its rewards are not there yet."""
    parts: dict[str, float]
    problems: tuple[str, ...]
    finished: str
    """Why it ended: eos, stop, length, context."""
    tokens: int
    logprob: float
    """Of its tokens on average, in the distribution that they were drawn from."""


@dataclass(frozen=True)
class RolloutReport:
    """What `headway rollouts` shows: batches, or answers."""

    run: Path
    batches: tuple[RolloutFigures, ...]
    answers: tuple[ReadAnswer, ...]
    left_out: int
    """Batches or answers beyond the limit."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "run": str(self.run)}


@dataclass(frozen=True)
class JournalBatch:
    """A batch of a journal with the updates that train on it."""

    stage: str | None
    num_updates: int
    sampled: SampledBatch
    rewarded: RewardedBatch | None

    @property
    def first_step(self) -> int:
        return self.sampled.first_step

    @property
    def last_step(self) -> int:
        return self.sampled.first_step + self.num_updates - 1


def read_rollouts(run: Path, choice: RolloutChoice = RolloutChoice()) -> RolloutReport:
    """The batches of a run, the newest if there are many, or the answers that are wanted."""
    folders = journal_folders(run)
    if choice.wants_answers:
        return _read_answers(run, folders, choice)

    limit = choice.limit or BATCHES_SHOWN
    newest: list[RolloutFigures] = []
    count = 0
    for batch in journal_batches(folders):
        count += 1
        # Figures are small; batches with their answers are dropped as soon as they are counted.
        newest = [*newest, _figures(batch)][-limit:]
    if not count:
        raise ConfigError(f"{run / FILE}: no batch is complete yet. Try again in a moment.")
    return RolloutReport(run, tuple(newest), (), count - len(newest))


def journal_folders(run: Path) -> list[tuple[str | None, Path]]:
    """The stages of a run that have a journal, each with its folder."""
    if not run.is_dir():
        raise ConfigError(f"{run}: no such folder. Give the folder of a run.")
    # Also where it is no file: reading it says so.
    if (run / FILE).exists():
        return [(None, run)]
    # Sorted by their names, which begin with the number of the stage.
    stages = sorted(path.parent for path in (run / FOLDER).glob(f"*/{FILE}"))
    if stages:
        return [(folder.name, folder) for folder in stages]
    if not was_used(run):
        raise ConfigError(f"{run}: is no run. Give the folder of a run of objective grpo.")
    raise ConfigError(
        f"{run}: has no {FILE}; it samples no answers, or has not sampled any yet. "
        "Runs of objective grpo do."
    )


def journal_batches(folders: Iterable[tuple[str | None, Path]]) -> Iterator[JournalBatch]:
    """The batches of some stages, each with the updates that train on it."""
    for stage, folder in folders:
        num_updates = load(Recipe, folder / RECIPE).rollout.num_updates
        for sampled, rewarded in read_journal(folder):
            yield JournalBatch(stage, num_updates, sampled, rewarded)


def _read_answers(
    run: Path, folders: list[tuple[str | None, Path]], choice: RolloutChoice
) -> RolloutReport:
    seen_steps = _SeenSteps()
    matching = _Counted(_matching(folders, choice, seen_steps))
    limit = choice.limit or ANSWERS_SHOWN
    if choice.order == "sampled":
        answers = list(islice(matching, limit))
        # What is left is counted, not kept.
        for _ in matching:
            pass
    else:
        # Not a list: the answers of a long run may be larger than memory, and these keep `limit` of
        # them.
        rewarded = (answer for answer in matching if answer.reward is not None)
        # Of equal rewards the newest come first.
        if choice.order == "best":
            answers = nlargest(limit, rewarded, key=lambda a: (a.reward, a.first_step))
        else:
            answers = nsmallest(limit, rewarded, key=lambda a: (a.reward, -a.first_step))

    if not answers:
        raise ConfigError(_nothing(run, choice, seen_steps))
    return RolloutReport(run, (), tuple(answers), matching.count - len(answers))


@dataclass
class _SeenSteps:
    """The updates that the journal has answers for."""

    first: int | None = None
    last: int = 0

    def add(self, batch: JournalBatch) -> None:
        if self.first is None:
            self.first = batch.first_step
        self.first = min(self.first, batch.first_step)
        self.last = max(self.last, batch.last_step)


class _Counted:
    """Counts the answers that pass through."""

    def __init__(self, answers: Iterator[ReadAnswer]) -> None:
        self._answers = answers
        self.count = 0

    def __iter__(self) -> Iterator[ReadAnswer]:
        return self

    def __next__(self) -> ReadAnswer:
        answer = next(self._answers)
        self.count += 1
        return answer


def _matching(
    folders: list[tuple[str | None, Path]], choice: RolloutChoice, seen_steps: _SeenSteps
) -> Iterator[ReadAnswer]:
    for batch in journal_batches(folders):
        seen_steps.add(batch)
        if choice.step is not None and not batch.first_step <= choice.step <= batch.last_step:
            continue
        for answer in _answers(batch):
            if choice.prompt is None or answer.prompt == choice.prompt:
                yield answer


def _nothing(run: Path, choice: RolloutChoice, seen_steps: _SeenSteps) -> str:
    if seen_steps.first is None:
        return f"{run / FILE}: no batch is complete yet. Try again in a moment."
    steps = f"it has answers for the steps {seen_steps.first} to {seen_steps.last}"
    if choice.prompt is not None:
        wanted = f"--prompt {choice.prompt}"
        if choice.step is not None:
            wanted += f" --step {choice.step}"
        return f"{run}: no answer matches {wanted}; {steps}, and prompts are counted from 0."
    if choice.step is not None and not seen_steps.first <= choice.step <= seen_steps.last:
        return f"{run}: no answer matches --step {choice.step}; {steps}."
    return f"{run}: the answers of these steps have no rewards yet. Try again in a moment."


def _answers(batch: JournalBatch) -> Iterator[ReadAnswer]:
    sampled = batch.sampled
    rewarded = batch.rewarded
    # All prompts of a batch have the same number of answers, one prompt after the other.
    samples = len(sampled.answers) // max(1, len(sampled.prompts))
    for index, answer in enumerate(sampled.answers):
        question = ""
        if sampled.questions:
            question = sampled.questions[index // samples]
        # An answer that was cut before its first token has no mean.
        logprob = 0.0
        if len(answer.ids):
            logprob = fmean(answer.logprobs.tolist())
        reward = None
        parts: dict[str, float] = {}
        problems: tuple[str, ...] = ()
        if rewarded is not None:
            reward = rewarded.totals[index]
            parts = dict(rewarded.parts[index])
            if rewarded.problems:
                problems = rewarded.problems[index]
        yield ReadAnswer(
            stage=batch.stage,
            first_step=batch.first_step,
            last_step=batch.last_step,
            batch=sampled.batch,
            version=sampled.version,
            prompt=answer.prompt,
            sample=answer.sample,
            question=question,
            text=answer.text,
            reward=reward,
            parts=parts,
            problems=problems,
            finished=answer.finished,
            tokens=len(answer.ids),
            logprob=logprob,
        )


def _figures(batch: JournalBatch) -> RolloutFigures:
    sampled = batch.sampled
    rewarded = batch.rewarded
    answers = sampled.answers
    num_tokens = sum(len(answer.ids) for answer in answers)
    rate = None
    if sampled.seconds:
        rate = num_tokens / sampled.seconds

    reward = lowest = highest = without_signal = reward_seconds = None
    parts: dict[str, float] = {}
    failed = 0
    if rewarded is not None and rewarded.totals:
        totals = rewarded.totals
        reward = fmean(totals)
        lowest = min(totals)
        highest = max(totals)
        # A reward may give further numbers for some answers only; it counts as 0 for the others.
        names = sorted({name for each in rewarded.parts for name in each})
        parts = {name: fmean(each.get(name, 0.0) for each in rewarded.parts) for name in names}
        samples = len(totals) // max(1, len(sampled.prompts))
        groups = [totals[first : first + samples] for first in range(0, len(totals), samples)]
        without_signal = fmean(max(group) == min(group) for group in groups)
        failed = sum(1 for problems in rewarded.problems if problems)
        reward_seconds = rewarded.seconds

    return RolloutFigures(
        stage=batch.stage,
        first_step=batch.first_step,
        last_step=batch.last_step,
        batch=sampled.batch,
        version=sampled.version,
        prompts=len(sampled.prompts),
        answers=len(answers),
        tokens=num_tokens / max(1, len(answers)),
        cut=sum(answer.is_cut for answer in answers) / max(1, len(answers)),
        seconds=sampled.seconds,
        tokens_per_second=rate,
        reward=reward,
        lowest=lowest,
        highest=highest,
        parts=parts,
        without_signal=without_signal,
        failed=failed,
        reward_seconds=reward_seconds,
    )
