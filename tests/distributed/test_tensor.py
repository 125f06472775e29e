"""Ranks that share every layer: the same losses, norms, validation and weights as one process, alone and with every other axis."""

from __future__ import annotations

from support.layout_trials import compare, tensor_trials


def test_ranks_that_share_layers_train_like_one_process() -> None:
    print("\n" + "\n".join(compare(list(tensor_trials()))))
