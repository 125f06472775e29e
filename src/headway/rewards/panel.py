"""All rewards of a run. In: answers; out: their scores, in order, whatever the number of workers.

    with RewardPanel(recipe.reward, run / "rewards") as panel:
        panel.check(columns)
        scores = panel.score(answers)

A reward that fails on an answer counts as its `default` there, and the score names the problem. One
that fails on too many ends the run with one line.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

from headway.errors import ConfigError, GaveUpError
from headway.rewards.base import (
    BuiltReward,
    OpenModel,
    RewardAnswer,
    RewardOutcome,
    RewardSettings,
    RewardTools,
    Score,
    digest_of,
)
from headway.rewards.kept import KeptRewards

log = logging.getLogger("headway")

WINDOW = 200
"""Answers over which failures are counted."""
FEWEST = 50
"""Answers before failures are judged at all."""


class _Member:
    """One reward of a panel, with the outcomes of its last answers."""

    def __init__(self, name: str, settings: RewardSettings, source: BuiltReward) -> None:
        self.name = name
        self.settings = settings
        self.source = source
        self.digest = source.digest()
        self.failures: deque[bool] = deque(maxlen=WINDOW)
        self.last_problem = ""
        self.num_failures = 0
        self.num_answers = 0

    def outcomes(self, answers: Sequence[RewardAnswer], kept: KeptRewards) -> list[RewardOutcome]:
        """One for each answer: those that are kept, and the others computed and kept."""
        inputs = [self.source.inputs(answer) for answer in answers]
        # With the digest: an answer that was judged with other settings is judged again.
        keys = [digest_of([self.digest, item]) for item in inputs]

        # Answers that are equal are computed once.
        new: dict[str, dict[str, object]] = {}
        for key, item in zip(keys, inputs, strict=True):
            if kept.get(key) is None:
                new[key] = item
        new_keys = list(new)
        computed: dict[str, RewardOutcome] = {}
        for portion in self.source.score(list(new.values())):
            outcomes_by_key = {new_keys[index]: outcome for index, outcome in portion.items()}
            # On the disk before the source begins more: a kill during the batch must not make a
            # resumed run ask for these again.
            kept.add(outcomes_by_key)
            computed |= outcomes_by_key

        # Failures are never kept, so only what was computed now can be one. In the order of the
        # answers: the last failures must not depend on which answer was judged first.
        for key in new_keys:
            outcome = computed[key]
            self.failures.append(outcome.value is None)
            self.num_answers += 1
            if outcome.value is None:
                self._note_failure(outcome.problem or "no value")
        outcomes: list[RewardOutcome] = []
        for key in keys:
            outcome = computed.get(key) or kept.get(key)
            assert outcome is not None
            outcomes.append(outcome)
        return outcomes

    def _note_failure(self, problem: str) -> None:
        """Count a failure; the first one is logged."""
        self.num_failures += 1
        self.last_problem = problem
        if self.num_failures == 1:
            log.warning(
                "reward %s failed on an answer, which gets its default of %g: %s. Further "
                "failures are counted.",
                self.name,
                self.settings.fallback,
                problem.rstrip("."),
            )

    def report_failures(self) -> None:
        """Log how many failures there were in the end."""
        if self.num_failures > 1:
            log.warning(
                "reward %s failed on %d of %d answers; the last reason: %s",
                self.name,
                self.num_failures,
                self.num_answers,
                self.last_problem,
            )

    def require_health(self) -> None:
        """End the run if the reward failed on too many of the last answers."""
        count = sum(self.failures)
        if len(self.failures) < FEWEST or count <= self.settings.failures_allowed * len(
            self.failures
        ):
            return
        raise GaveUpError(
            f"reward {self.name} failed on {count} of the last {len(self.failures)} answers; "
            f"reward.N.max_failures is {self.settings.failures_allowed:g}. The last reason: "
            f"{self.last_problem.rstrip('.')}. Correct it and resume the run."
        )


class RewardPanel:
    """The rewards of a recipe."""

    def __init__(
        self,
        settings: Sequence[RewardSettings],
        cache: Path | None = None,
        workers: int = 1,
        open_model: OpenModel | None = None,
    ) -> None:
        if not settings:
            raise ConfigError("reward is empty; name at least one, e.g. reward=math.")
        if workers < 1:
            raise ConfigError(f"workers of rewards is {workers}; it must be at least 1.")
        self.settings = tuple(settings)
        tools = RewardTools(workers, open_model)
        names = unique_names(self.settings)
        self._members = [
            _Member(name, each, each.build(tools))
            for name, each in zip(names, self.settings, strict=True)
        ]
        self._kept = [KeptRewards(_folder_of(cache, member)) for member in self._members]
        # Rewards wait for processes and servers most of the time, so a thread for each is enough.
        self._threads = ThreadPoolExecutor(len(names), thread_name_prefix="headway-rewards")
        self._closing = threading.Event()
        self.seconds = 0.0
        """That `score` has taken so far."""

    @property
    def names(self) -> list[str]:
        """The names of the parts, in the order of the recipe."""
        return [member.name for member in self._members]

    @property
    def failures(self) -> dict[str, int]:
        """How many answers each reward failed on so far."""
        return {member.name: member.num_failures for member in self._members}

    def check(self, columns: Collection[str]) -> None:
        """Refuse what cannot work, before training starts: a column that records lack, a missing
        package or key, a file that cannot be imported.
        """
        for settings in self.settings:
            settings.check(columns)

    def digest(self) -> str:
        """Identifies sources, settings and weights."""
        return digest_of(
            [
                # Weight and fallback are no part of what a source computes (`settings_digest`), but
                # they are of the totals, which the journal keeps.
                [member.name, member.digest, member.settings.weight, member.settings.fallback]
                for member in self._members
            ]
        )

    def score(self, answers: Sequence[RewardAnswer]) -> list[Score]:
        """The score of every answer, in order. Rewards run at the same time. Raises CancelledError
        if another thread closes the panel meanwhile.
        """
        started = time.monotonic()
        columns = list(
            self._threads.map(
                lambda pair: pair[0].outcomes(answers, pair[1]),
                zip(self._members, self._kept, strict=True),
            )
        )
        self.seconds += time.monotonic() - started
        # A process that was ended and a request that was given up look like failures of the reward.
        # The run must not use their default: a resumed one would have asked.
        if self._closing.is_set():
            raise CancelledError("the rewards were closed while they judged answers")
        # After all have ended: what succeeded is kept by now, and a resumed run does not ask again.
        for member in self._members:
            member.require_health()
        return [self._combined(outcomes) for outcomes in zip(*columns, strict=True)]

    def _combined(self, outcomes: Sequence[RewardOutcome]) -> Score:
        total = 0.0
        parts: dict[str, float] = {}
        problems: list[str] = []
        for member, outcome in zip(self._members, outcomes, strict=True):
            value = outcome.value
            if value is None:
                value = member.settings.fallback
                problems.append(f"{member.name}: {outcome.problem}")
            parts[member.name] = value
            # Further numbers are for the logs; the total counts the value alone.
            for name, number in outcome.details.items():
                parts[f"{member.name}/{name}"] = number
            total += member.settings.weight * value
        return Score(total, parts, tuple(problems))

    def close(self) -> None:
        """End all processes."""
        # Before the sources: what fails from here on is not a failure of a reward (`score`).
        self._closing.set()
        for member in self._members:
            member.source.close()
            member.report_failures()
        self._threads.shutdown(cancel_futures=True)
        for kept in self._kept:
            kept.close()

    def __enter__(self) -> RewardPanel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def unique_names(settings: Sequence[RewardSettings]) -> list[str]:
    """A name for each reward: math, format, math_2."""
    names: list[str] = []
    for each in settings:
        name = each.name
        number = 1
        while name in names:
            number += 1
            name = f"{each.name}_{number}"
        names.append(name)
    return names


def _folder_of(cache: Path | None, member: _Member) -> Path | None:
    """Each reward has a folder, so that changed settings do not read results of others."""
    if cache is None:
        return None
    return cache / f"{member.name}-{member.digest[:16]}"
