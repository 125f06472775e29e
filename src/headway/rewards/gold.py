"""The right answer of a record: a number, text after `####` (GSM8K), a `\\boxed{}` (MATH)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headway.config.section import setting
from headway.rewards.base import FallibleSettings, RewardAnswer, column_value, require_column

COLUMNS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
"""Where records keep the right answer, the first that is there."""
MARK = "####"


class GoldSettings(FallibleSettings):
    """Settings of rewards that compare with the right answer."""

    column: str | None = setting(
        None,
        "The column of the right answer; dots go into nested columns. Default: the first of "
        "answer, reward_model.ground_truth, ground_truth, solution.",
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """The columns to look at, in order."""
        if self.column is not None:
            return (self.column,)
        return COLUMNS

    def check(self, columns: Collection[str]) -> None:
        """Refuse records without a right answer."""
        require_column(self.kind, columns, self.paths)

    def inputs(self, answer: RewardAnswer) -> dict[str, Any]:
        """The text and the right answer."""
        return {"text": answer.text, "gold": gold_text(answer.record, self.paths)}


def gold_text(record: Mapping[str, Any], paths: tuple[str, ...]) -> str | None:
    """The right answer as text; None if the record has none."""
    for path in paths:
        value = column_value(record, path)
        # True is an int of Python, and no number that an answer could give.
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str) and value.strip():
            # GSM8K has the whole solution before the mark. Without a mark this is all of the text.
            return value.rpartition(MARK)[2].strip()
    return None
