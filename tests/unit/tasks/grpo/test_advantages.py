"""What the rewards of the answers to one prompt become, by the table of tasks/grpo."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.tasks.grpo import ALGORITHMS, Config

REWARDS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=9)
BY_MEAN = Config(advantage="mean")
BY_STD = Config(advantage="std")
LEFT_OUT = Config(advantage="leave_one_out")
TABLE = {
    "grpo": ("token", 0.2, 0.2, "answer", "std"),
    "dr_grpo": ("token", 0.2, 0.2, "longest", "mean"),
    "bnpo": ("token", 0.2, 0.2, "token", "std"),
    "dapo": ("token", 0.2, 0.28, "token", "std"),
    "gspo": ("sequence", 3e-4, 4e-4, "answer", "std"),
    "cispo": ("token", None, 5.0, "token", "std"),
    "rloo": ("whole", 0.2, 0.2, "answer", "leave_one_out"),
}


@given(REWARDS)
def test_minus_the_mean(rewards: list[float]) -> None:
    mean = statistics.fmean(rewards)
    assert BY_MEAN.advantages(rewards) == pytest.approx([r - mean for r in rewards], abs=1e-12)


@given(REWARDS)
def test_divided_by_the_standard_deviation_of_a_sample(rewards: list[float]) -> None:
    divisor = statistics.stdev(rewards) + 1e-4
    mean = statistics.fmean(rewards)
    expected = [(r - mean) / divisor for r in rewards]
    assert BY_STD.advantages(rewards) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(REWARDS)
def test_minus_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [
        reward - statistics.fmean(rewards[:index] + rewards[index + 1 :])
        for index, reward in enumerate(rewards)
    ]
    assert LEFT_OUT.advantages(rewards) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(REWARDS, st.randoms(use_true_random=False))
def test_the_order_of_answers_changes_nothing_and_their_sum_is_zero(
    rewards: list[float], draw: object
) -> None:
    order = list(range(len(rewards)))
    draw.shuffle(order)  # type: ignore[attr-defined]
    for config in (BY_MEAN, BY_STD, LEFT_OUT):
        advantages = config.advantages(rewards)
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-9)
        shuffled = config.advantages([rewards[index] for index in order])
        assert shuffled == pytest.approx([advantages[index] for index in order], abs=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_answers_of_equal_rewards_have_no_advantage(reward: float, count: int) -> None:
    for config in (BY_MEAN, BY_STD, LEFT_OUT):
        advantages = config.advantages([reward] * count)
        # The mean of equal numbers is that number, to the rounding of a division.
        assert max(map(abs, advantages)) <= 1e-5 * max(1.0, abs(reward)) * 1e-4


def test_one_answer_has_nothing_to_be_compared_with() -> None:
    for config in (BY_MEAN, BY_STD, LEFT_OUT):
        assert config.advantages([3.0]) == [0.0]


@pytest.mark.parametrize("algorithm", TABLE)
def test_an_algorithm_has_the_parts_of_the_table(algorithm: str) -> None:
    assert tuple(Config.model_validate({"algorithm": algorithm}).parts) == TABLE[algorithm]
    assert set(TABLE) == set(ALGORITHMS)


def test_a_part_that_is_set_by_itself_replaces_that_of_the_algorithm() -> None:
    config = Config(algorithm="gspo", clip_high=0.5, weighting="token", advantage="mean")
    assert tuple(config.parts) == ("sequence", 3e-4, 0.5, "token", "mean")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"teacher": "t", "beta": 0.1}, "teacher and beta=0.1"),
        ({"reference": "r"}, "reference and beta=0"),
        ({"algorithm": "cispo", "clip_low": 0.2}, "does not clip from below"),
        ({"algorithm": "ppo"}, "algorithm"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"importance_cap": 0}, "importance_cap"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Config.model_validate(settings)
