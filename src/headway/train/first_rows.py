"""How many rows are validated before the first step (`eval.start_rows`).

In: a run's recipe, model and device; out: the first rows of each validation set, where they are
fewer than later validations read.

Numbers of few rows do not compare with those of all rows. So every later validation has them too:

    before the first step   valid_first_rows_at_start: {set: numbers of the first rows}
    each validation         valid: {set: numbers of all rows}
                            valid_first_rows: {set: numbers of the first rows}

Invariant: the number depends on the recipe, the model and the kind of device, never on a clock: two
runs of one recipe validate the same rows, and a resumed run those of the run it resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError

FIRST_ROWS = "valid_first_rows"
"""Key in the record of a validated step: its numbers over the first rows."""
FIRST_ROWS_AT_START = "valid_first_rows_at_start"
"""Key in the first step's record: the same before that step."""
CPU_START_FLOPS = 1.5e12
"""What a validation at the start may cost on a CPU with eval.start_rows=auto, over all sets: about
10 seconds of two cores that reach 150 GFLOP/s together."""


@dataclass(frozen=True)
class FirstRows:
    """The rows of each validation set that are validated before the first step."""

    rows: int
    """Over all ranks."""
    micro_rows: int
    """Rows of a microbatch of every validation, so that the first rows are whole microbatches."""
    num_microbatches: int
    """Of one rank, with the first rows."""

    @staticmethod
    def of(rows: int, eval_rows: int, micro_rows: int, num_ranks: int) -> FirstRows | None:
        """At most `rows` rows, at least one on each rank; None where later validations read no
        more."""
        if rows >= eval_rows:
            return None
        smaller_rows = max(1, min(micro_rows, rows // num_ranks))
        rows_at_once = smaller_rows * num_ranks
        num_microbatches = max(1, rows // rows_at_once)
        actual_rows = num_microbatches * rows_at_once
        if actual_rows >= eval_rows:
            return None
        return FirstRows(actual_rows, smaller_rows, num_microbatches)

    def label(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers of the first rows with how many rows they are of."""
        return {**numbers, "rows": self.rows}


def affordable_rows(flops_per_row: float, num_sets: int) -> int:
    """The rows of each of `num_sets` sets whose forward passes cost CPU_START_FLOPS together, at
    least one."""
    return max(1, int(CPU_START_FLOPS / (flops_per_row * num_sets)))


def refuse_coupled(rows: int) -> ConfigError:
    """The error about an objective whose validation cannot be cut into rows."""
    return ConfigError(
        f"eval.start_rows is {rows}; a validation of this objective compares all of its rows with "
        "each other, or samples answers, so its first rows have no numbers of their own. Use "
        "eval.start_rows=auto, lower eval.rows, or set eval.at_start to false."
    )
