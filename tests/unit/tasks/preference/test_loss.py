"""What losses over pairs share."""

import torch

from headway.tasks.preference.loss import share_right


def test_a_tie_is_half_right() -> None:
    assert share_right(torch.tensor([-2.0, 0.0, -0.0, 1e-30, 3.0])).tolist() == [
        0.0,
        0.5,
        0.5,
        1.0,
        1.0,
    ]
