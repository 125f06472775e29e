"""A function of the user, `def reward(prompt, answer, record) -> float | dict`, in ./mine.py or a
module on Python's path. Only its worker process imports it.

    prompt   messages with role and content      answer   the decoded text
    record   all columns of the prompt's record

It returns a number, or a mapping with the number under `reward` and further ones for the logs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any

from headway.config.section import setting
from headway.config.user_code import is_file_name
from headway.errors import ConfigError
from headway.rewards.base import RewardAnswer, RewardTools, WorkerSettings, settings_digest
from headway.rewards.source_digest import code_digest
from headway.rewards.worker import WorkerReward


class UserFileReward(WorkerSettings):
    """Settings of a reward of the user."""

    settings: dict[str, Any] = setting(
        dict, "Further arguments of your function `reward`, by name."
    )

    @property
    def name(self) -> str:
        """The file's or module's own name."""
        if is_file_name(self.kind):
            return Path(self.kind).stem
        return self.kind.rpartition(".")[2]

    def check(self, columns: Collection[str]) -> None:
        """Import it in a worker, which refuses what cannot be imported."""
        reward = self.build(RewardTools())
        try:
            reward.require_start()
        finally:
            reward.close()

    def build(self, tools: RewardTools) -> WorkerReward:
        """Workers that import the code. Its digest has all that the code imports: a changed file
        makes kept results void."""
        return WorkerReward(
            self, "user", tools, self.inputs, settings_digest(self, self._source_digest())
        )

    def _source_digest(self) -> str:
        path: Path | None = Path(self.kind)
        if not is_file_name(self.kind):
            # The parents of a dotted name are imported by this search, the module itself is not.
            try:
                spec = importlib.util.find_spec(self.kind)
            except ImportError:
                spec = None
            path = None
            if spec is not None and spec.origin is not None:
                path = Path(spec.origin)
        try:
            if path is not None:
                return code_digest(path)
        except OSError:
            pass
        raise ConfigError(
            f"reward kind is {self.kind[:200]!r}, but there is no such file or module (working "
            f"directory: {Path.cwd()}). Give the path of your file."
        )

    def inputs(self, answer: RewardAnswer) -> dict[str, Any]:
        """All of it: nobody knows what the function reads."""
        return {
            "prompt": [dict(message) for message in answer.prompt],
            "text": answer.text,
            "record": dict(answer.record),
        }
