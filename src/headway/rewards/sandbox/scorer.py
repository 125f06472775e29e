"""What the worker of the reward `code` computes: settings come in, a function of a program and its
tests goes out. All expected values stay in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.rewards.sandbox.client import SandboxClient, SandboxRefusal
from headway.rewards.sandbox.expression import Step
from headway.rewards.sandbox.trials import CodeTrial, RunResult, read_trials

SHORTEST_SECONDS = 0.05
"""Less than this is not worth a start."""


class CodeScorer:
    """Runs a program on all tests of its record."""

    def __init__(self, settings: Mapping[str, Any], client: SandboxClient) -> None:
        self.settings = settings
        self.client = client
        self._deadline = 0.0

    def score(self, inputs: dict[str, Any]) -> dict[str, float]:
        """The reward of a program, the share of its tests that it passed, and their number."""
        if inputs["tests"] is None:
            raise ValueError("the record has no tests")
        trials = read_trials(inputs["tests"], inputs["entry_point"], self.settings["tolerance"])
        # None, the default, keeps all.
        trials = trials[: self.settings["max_tests"]]
        total = sum(trial.tests for trial in trials)
        passed = 0
        if inputs["program"] is not None:
            passed = self._passed(inputs["program"], trials)
        share = passed / total
        reward = share
        if self.settings["score"] == "all":
            reward = float(passed == total)
        return {"reward": reward, "passed": share, "tests": float(total)}

    def _passed(self, program: str, trials: Sequence[CodeTrial]) -> int:
        self._deadline = time.monotonic() + self.settings["timeout"]
        passed = 0
        for trial in trials:
            seconds = self._seconds()
            # A program that is too slow for all tests has not passed the others.
            if seconds < SHORTEST_SECONDS:
                break
            result = self.client.run(program, trial.steps, trial.stdin, seconds)
            verdicts = trial.verdicts(result, self._run_alone)
            passed += sum(verdicts)
            # One test that failed decides.
            if self.settings["score"] == "all" and not all(verdicts):
                break
        return passed

    def _run_alone(self, program: str, steps: Sequence[Step]) -> RunResult:
        seconds = self._seconds()
        # Values that make a comparison slow do not make it the reward's failure.
        if seconds < SHORTEST_SECONDS:
            return RunResult("time", 0, "")
        return self.client.run(program, steps, "", seconds)

    def _seconds(self) -> float:
        """How long the next run may take."""
        return min(self.settings["test_timeout"], self._deadline - time.monotonic())


def code_scorer(settings: Mapping[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """The scorer of programs; a system without sandboxes is a ConfigError."""
    from headway.errors import ConfigError

    client = SandboxClient(
        {
            "memory_bytes": int(settings["memory_gib"] * 2**30),
            "processes": settings["processes"],
            "disk_bytes": settings["disk_mib"] << 20,
            "output_bytes": settings["output_mib"] << 20,
            "folders": list(settings["folders"]),
        }
    )
    try:
        client.require()
    except SandboxRefusal as problem:
        raise ConfigError(f"reward kind code: {problem}") from None
    return CodeScorer(settings, client).score
