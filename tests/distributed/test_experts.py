"""Mixtures of experts on several ranks: the same losses, norms, validation and weights as one process."""

import sys

import pytest
from support.layout_trials import (
    DRILL_STEPS,
    compare,
    expert_axis_trials,
    expert_trials,
    more_expert_axis_trials,
    more_expert_trials,
)


def test_mixtures_train_like_one_process_on_every_axis() -> None:
    sys.stdout.write("\n" + "\n".join(compare(expert_trials())) + "\n")


@pytest.mark.slow
def test_experts_split_over_four_ranks_train_like_one_process() -> None:
    sys.stdout.write("\n" + "\n".join(compare(expert_axis_trials())) + "\n")


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_experts_split_over_ranks_train_like_one_process_in_more_cases() -> None:
    sys.stdout.write(
        "\n"
        + "\n".join(compare(more_expert_axis_trials(), seconds_each=200, steps=DRILL_STEPS))
        + "\n"
    )


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_mixtures_train_like_one_process_in_more_cases() -> None:
    sys.stdout.write(
        "\n" + "\n".join(compare(more_expert_trials(), seconds_each=200, steps=DRILL_STEPS)) + "\n"
    )
