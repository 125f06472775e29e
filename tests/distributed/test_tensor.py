"""Ranks that share every layer: the same losses, norms, validation and weights as one process, alone and with every other axis."""

from __future__ import annotations

import sys

import pytest
from support.layout_trials import compare, more_tensor_trials, tensor_trials


def test_ranks_that_share_layers_train_like_one_process() -> None:
    sys.stdout.write("\n" + "\n".join(compare(tensor_trials())) + "\n")


@pytest.mark.drill
def test_ranks_that_share_layers_train_like_one_process_in_more_cases() -> None:
    sys.stdout.write("\n" + "\n".join(compare(more_tensor_trials())) + "\n")
