"""Runs the program of an answer in sandboxes, on the tests of its record.

    answer -> last block of code -> sandboxes -> values and texts -> compared in the worker

The process of the program has no expected value, so it cannot pass by anything but right results.
See `sandbox/`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from headway.config.section import setting
from headway.rewards.base import (
    RewardAnswer,
    RewardTools,
    WorkerSettings,
    column_value,
    require_column,
    settings_digest,
)
from headway.rewards.worker import WorkerReward

COLUMNS = (
    "tests",
    "test_list",
    "input_output",
    "test",
    "test_cases",
    "reward_model.ground_truth",
    "ground_truth",
)
"""Where records keep tests, the first that is there."""
FENCE = "```"
LANGUAGES = {"python": ("", "python", "py", "python3")}
"""Words behind the marks of a block."""
LONGEST_PROGRAM = 1 << 20
VERDICT_SECONDS = 30.0
"""For starting sandboxes and comparing, beside the time of the program."""
WORKER_GIB = 2.0
VERSION = 1
"""Of how programs are run and compared; a new one makes kept results void."""


class Config(WorkerSettings):
    """Settings of the code reward."""

    kind: str = setting("code", "code.", on_resume="fixed")
    tests: str | None = setting(
        None,
        "The column of the tests; dots go into nested columns. Default: the first of tests, "
        "test_list, input_output, test, test_cases, reward_model.ground_truth, ground_truth.",
    )
    language: Literal["python"] = setting("python", "The language of the programs.")
    score: Literal["all", "share"] = setting(
        "all", "all: 1 if every test passes, else 0; share: the share of the tests that pass."
    )
    max_tests: int | None = setting(None, "Use only the first tests of a record.", ge=1)
    tolerance: float = setting(
        0.0, "Numbers of inputs/outputs tests may differ by this, absolutely or relatively.", ge=0
    )
    timeout: float = setting(
        30.0, "Seconds for all tests of one answer; later ones count as failed.", gt=0, le=3600
    )
    test_timeout: float = setting(5.0, "Seconds for one run of a program.", gt=0, le=3600)
    memory_gib: float = setting(1.0, "Memory of each process of a program.", gt=0)
    processes: int = setting(16, "Processes and threads of a program.", ge=1, le=1024)
    disk_mib: int = setting(64, "Size of a program's /tmp, in memory.", ge=1, le=65536)
    output_mib: int = setting(1, "Largest output of a program.", ge=1, le=32)
    folders: tuple[str, ...] = setting(
        (), "Further folders that programs may read and import from, such as site-packages."
    )

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        for folder in self.folders:
            if not Path(folder).is_absolute() or not Path(folder).is_dir():
                raise ValueError(f"folders has {folder!r}; each must be a folder from the root on")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """The columns to look at, in order."""
        if self.tests is not None:
            return (self.tests,)
        return COLUMNS

    def check(self, columns: Collection[str]) -> None:
        """Refuse records without tests, and systems on which no sandbox can be made."""
        require_column(self.kind, columns, self.paths, setting_name="tests")
        reward = self.build(RewardTools())
        try:
            reward.require_start()
        finally:
            reward.close()

    def build(self, tools: RewardTools) -> WorkerReward:
        """Workers, each with a process that starts sandboxes."""
        return WorkerReward(
            self,
            "code",
            tools,
            self.inputs,
            # A program that is too slow or too large fails, so these limits are part of the result.
            settings_digest(self, VERSION, sys.version_info[:3], self.timeout, self.memory_gib),
            seconds=self.timeout + VERDICT_SECONDS,
            memory_gib=self.memory_gib + WORKER_GIB,
        )

    def inputs(self, answer: RewardAnswer) -> dict[str, Any]:
        """The program and the tests."""
        tests = None
        for path in self.paths:
            tests = column_value(answer.record, path)
            # Mixed data sets have all columns in every record, and leave some of them empty.
            if tests is not None and tests != "":
                break
        entry_point = answer.record.get("entry_point")
        return {
            "program": last_program(answer.text, LANGUAGES[self.language]),
            "tests": tests,
            # HumanEval names the function here that its tests call `candidate`.
            "entry_point": entry_point if isinstance(entry_point, str) else None,
        }


def last_program(text: str, languages: tuple[str, ...]) -> str | None:
    """The last whole block of code in a text, if it is of one of these languages; None without."""
    program: str | None = None
    # Of the block that is open. One that is never closed does not count: the answer was cut in it.
    lines: list[str] | None = None
    language = ""
    for line in text.splitlines():
        if lines is None:
            if line.lstrip().startswith(FENCE):
                words = line.strip().lstrip("`").split()
                language = ""
                if words:
                    language = words[0].lower()
                lines = []
        elif line.strip() == FENCE:
            if language in languages:
                program = "\n".join(lines)
            lines = None
        else:
            lines.append(line)
    if program is None or len(program) > LONGEST_PROGRAM:
        return None
    return program
