"""Layers on several ranks: every schedule trains as one process does, alone and with every other axis."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support.layout_trials import compare
from support.pipeline_trials import DEEP, TWO, more_pipeline_trials, pipeline_trials

from headway.errors import ParallelError
from headway.objective.next_token import Config as NextToken
from headway.parallel.config import ParallelConfig


def test_ranks_with_stages_train_like_one_process() -> None:
    sys.stdout.write("\n" + "\n".join(compare(pipeline_trials())) + "\n")


@pytest.mark.drill
def test_ranks_with_stages_train_like_one_process_in_more_cases() -> None:
    sys.stdout.write("\n" + "\n".join(compare(more_pipeline_trials())) + "\n")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "fsdp", **TWO}, "which shards every layer over all ranks. Use strategy zero1, or pipeline 1"),
        ({"pipeline": 8}, "every stage needs a layer, and the model has 5. Use pipeline 5"),
        ({"pipeline": 3, "schedule": "interleaved"}, "pipeline is 3 with 2 stages each; every stage needs a layer, .* Use pipeline 2"),
        ({**TWO, "virtual_stages": 2}, "schedule is 1f1b, which has one stage per rank. Use schedule interleaved"),
        ({**TWO, "pipeline_split": (3, 3)}, "must have 2 numbers, one per stage, at least 1 each, whose sum is num_layers=5"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_with_the_rule(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        ParallelConfig.model_validate(settings).check_rows(DEEP, 16, NextToken(), None)
