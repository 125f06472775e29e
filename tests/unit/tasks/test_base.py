"""A microbatch's share of the step's loss, counted by hand: each term over its own total of the whole step, times its coefficient."""

import torch

from headway.tasks.base import Loss, Term


def test_a_share_is_each_sum_over_its_total_times_its_coefficient() -> None:
    loss = Loss({
        "next_token": Term(torch.tensor(6.0)),
        "z": Term(torch.tensor(8.0), coefficient=0.25),
        "pairs": Term(torch.tensor(9.0), per="pairs", coefficient=2.0),
    })  # fmt: skip
    # 6 / 12 + 0.25 * 8 / 12 + 2 * 9 / 3
    assert abs(float(loss.share({"targets": 12.0, "pairs": 3.0})) - (0.5 + 1 / 6 + 6.0)) < 1e-6


def test_a_step_without_targets_divides_by_one() -> None:
    assert float(Loss({"next_token": Term(torch.tensor(0.0))}).share({"targets": 0.0})) == 0.0
