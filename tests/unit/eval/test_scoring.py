"""Sums of scored tokens by hand: every token in one bucket of context and one bin of confidence, edges included."""

import numpy as np
import pytest

from headway.eval.scoring import TokenScores, TokenSums


def tallied(
    confidence: list[float], correct: list[float], context: list[int], nll: list[float]
) -> TokenSums:
    tally = TokenSums()
    tally.add(
        TokenScores(
            np.array(nll),
            np.array(correct),
            np.array(confidence),
            np.array(context),
            np.zeros(len(nll), np.int64),
        )
    )
    return tally


def test_a_confidence_at_an_edge_belongs_to_the_bin_below_it() -> None:
    # 3/15 is the last of (2/15, 3/15], a hair more the first of the next; 1 is the last of all
    tally = tallied([0.2, 0.2000001, 0.6, 1.0, 1e-9], [1, 0, 1, 1, 0], [1] * 5, [0.0] * 5)
    assert {
        index: confidence_bin.tokens
        for index, confidence_bin in enumerate(tally.bins())
        if confidence_bin.tokens
    } == {
        2: 1,
        3: 1,
        8: 1,
        14: 1,
        0: 1,
    }
    assert (tally.bins()[2].low, tally.bins()[2].high) == (
        pytest.approx(2 / 15),
        pytest.approx(0.2),
    )
    assert tally.bins()[1].confidence is None


def test_contexts_fall_into_powers_of_two() -> None:
    tally = tallied(
        [0.5] * 7,
        [1, 0, 1, 0, 0, 0, 1],
        [1, 2, 3, 4, 7, 8, 1024],
        [1.0, 2.0, 4.0, 3.0, 5.0, 6.0, 7.0],
    )
    buckets = [
        (position.first, position.last, position.tokens, position.loss, position.accuracy)
        for position in tally.positions()
    ]
    assert buckets == [
        (1, 1, 1, 1.0, 1.0),
        (2, 3, 2, 3.0, 0.5),
        (4, 7, 2, 4.0, 0.0),
        (8, 15, 1, 6.0, 0.0),
        (1024, 2047, 1, 7.0, 1.0),
    ]
    assert (tally.tokens, tally.nll, tally.correct) == (7, 28.0, 3)


def test_the_calibration_error_is_the_mean_gap_over_tokens() -> None:
    # one bin: confidences 0.9 and 0.92, one right of two: gap |1.82 - 1|; another: 0.3, wrong: gap 0.3; three tokens
    tally = tallied([0.9, 0.92, 0.3], [1, 0, 0], [1, 1, 1], [0.0] * 3)
    assert tally.calibration_error() == pytest.approx((0.82 + 0.3) / 3)
