"""The verdict about masks: each of its cases, and how large a lead has to be."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean, stdev

import pytest

from headway.eval.long_context import VariantResult
from headway.eval.mask_comparison import DrawSpread, MaskComparison, Scores
from headway.eval.mask_verdict import (
    GateState,
    LongVerdict,
    VerdictKind,
    judge,
    needed_lead,
    verdict_of,
)

DRAWS = (0.35, 0.45, 0.4, 0.3, 0.5)
"""Shares found under random masks: mean 0.4, standard deviation 0.079."""
LOSSES = (3.3, 3.1, 3.2, 3.25, 3.15)
DECIDED = GateState(sparsity=0.705, undecided=0.05, num_heads=90, target=0.7)


def scores(score: float | None, loss: float | None = None) -> Scores:
    return Scores(
        None if score is None else DrawSpread.of([score]),
        None if loss is None else DrawSpread.of([loss]),
    )


FULL = scores(0.99, 2.9)


def comparison(
    score: float | None = 0.975,
    loss: float | None = None,
    *,
    draws: tuple[float, ...] = DRAWS,
    simple: dict[str, Scores] | None = None,
    masks_from: str = "own",
) -> MaskComparison:
    variant = VariantResult(
        name="s=0.7", sparsity=0.7, window=16, sinks=4, masks_from=masks_from, cells=[], footprints={},
        footprint=0.4, peak=0.4, length=512, cache_bytes=1, prefill_tokens_per_second=1.0,
        decode_tokens_per_second=1.0, kind="masks",
    )  # fmt: skip
    drawn_score = None if score is None else DrawSpread.of(draws)
    drawn_loss = None if loss is None else DrawSpread.of(LOSSES)
    drawn = Scores(drawn_score, drawn_loss)
    return MaskComparison(variant, scores(score, loss), drawn, (0, 1, 2, 3, 4), simple or {})


@pytest.mark.parametrize(
    ("full", "compared", "gates", "kind", "said"),
    [
        (
            scores(0.02),
            comparison(0.02),
            DECIDED,
            "full_model_fails",
            "the full model cannot do these tasks: it finds 2.0% of the answers",
        ),
        (
            FULL,
            comparison(0.5),
            DECIDED,
            "no_better",
            "learned is no better than random, +0.100 of the answers (0.500 against 0.400 ± 0.079 "
            "of 5 random draws, full 0.990)",
        ),
        (
            FULL,
            comparison(),
            replace(DECIDED, undecided=0.44),
            "undecided",
            "gates undecided (44%); learned leads random, +0.575",
        ),
        (
            FULL,
            comparison(),
            replace(DECIDED, sparsity=0.355),
            "sparsity_missed",
            "sparsity missed (0.355 for 0.7); learned leads random, +0.575",
        ),
        (
            FULL,
            comparison(),
            DECIDED,
            "wins",
            "learned wins, +0.575 of the answers (0.975 against 0.400 ± 0.079 of 5 random draws, full 0.990)",
        ),
    ],
)
def test_each_of_the_five_cases_has_its_verdict(
    full: Scores, compared: MaskComparison, gates: GateState, kind: VerdictKind, said: str
) -> None:
    verdict = verdict_of(full, [compared], 100, gates)
    assert verdict is not None
    assert verdict.kind == kind
    assert said in verdict.line
    assert "\n" not in verdict.line
    assert [each.kind for each in verdict.masks] == [kind]


def test_why_learned_is_no_better_is_said_where_the_gates_tell() -> None:
    gates = replace(DECIDED, undecided=0.44, sparsity=0.355)
    said = judge(FULL, comparison(0.5), 100, gates).line
    assert said.endswith("; gates undecided (44%); sparsity missed (0.355 for 0.7)")


def test_gates_say_nothing_about_the_masks_of_a_file() -> None:
    gates = replace(DECIDED, undecided=0.44, sparsity=0.355)
    assert judge(FULL, comparison(masks_from="masks.tsv"), 100, gates).kind == "wins"


def test_a_head_more_or_less_is_not_missed() -> None:
    few = GateState(sparsity=0.5 + 0.2, undecided=0.0, num_heads=4, target=0.5)
    assert not few.missed
    assert replace(few, num_heads=40).missed
    assert not replace(few, num_heads=40, target=None).missed


def test_a_verdict_about_text_alone_compares_its_loss() -> None:
    better = judge(scores(None, 2.9), comparison(None, 2.95), 0, DECIDED)
    assert better.kind == "wins"
    assert (
        "-0.2500 in loss (2.9500 against 3.2000 ± 0.0791 of 5 random draws, full 2.9000)"
        in better.line
    )
    assert judge(scores(None, 2.9), comparison(None, 3.1), 0, DECIDED).kind == "no_better"


def test_a_mask_that_finds_more_but_reads_text_worse_is_no_better() -> None:
    assert judge(FULL, comparison(0.975, 3.2), 100, DECIDED).kind == "wins"
    assert judge(FULL, comparison(0.975, 3.5), 100, DECIDED).kind == "no_better"


def test_a_choice_that_nothing_was_learned_for_may_be_as_good() -> None:
    windows = {"windows": scores(0.98)}
    verdict = judge(FULL, comparison(simple=windows), 100, DECIDED)
    assert verdict.kind == "no_better"
    assert "learned is no better than windows everywhere" in verdict.line
    assert judge(FULL, comparison(simple={"windows": scores(0.9)}), 100, DECIDED).kind == "wins"
    # The best heads of each layer are chosen by the same gates.
    assert judge(FULL, comparison(simple={"equal": scores(0.98)}), 100, DECIDED).kind == "wins"
    # Found as much, but reads the text worse.
    worse = {"windows": scores(0.98, 3.3)}
    assert judge(FULL, comparison(0.975, 2.95, simple=worse), 100, DECIDED).kind == "wins"


def test_a_single_draw_gives_no_verdict_and_no_masks_none_at_all() -> None:
    single = judge(FULL, comparison(draws=(0.4,)), 100, DECIDED)
    assert (single.kind, single.leads) == ("not_compared", {})
    without = replace(comparison(), random=None)
    assert judge(FULL, without, 100, DECIDED).kind == "not_compared"
    assert verdict_of(FULL, [], 100, None) is None
    failed = verdict_of(scores(0.0), [], 100, None)
    assert failed is not None
    assert failed.kind == "full_model_fails"


def test_several_masks_have_one_line_and_the_kind_that_needs_attention() -> None:
    weak = comparison(0.5)
    weak = replace(weak, variant=replace(weak.variant, name="s=0.9"))
    verdict = verdict_of(FULL, [comparison(), weak], 100, DECIDED)
    assert isinstance(verdict, LongVerdict)
    assert verdict.kind == "no_better"
    assert verdict.line.startswith("s=0.7: learned wins, +0.575")
    assert "; s=0.9: learned is no better than random" in verdict.line
    assert [each["kind"] for each in verdict.to_json()["masks"]] == ["wins", "no_better"]


def test_with_few_questions_one_right_answer_more_is_no_lead() -> None:
    none_found = (0.0,) * 5
    assert judge(FULL, comparison(0.1, draws=none_found), 10, DECIDED).kind == "no_better"
    assert judge(FULL, comparison(0.1, draws=none_found), 200, DECIDED).kind == "wins"


def test_one_more_random_draw_exceeds_the_lead_in_five_cases_of_a_hundred() -> None:
    rng = random.Random(0)
    trials = 20_000
    exceeded = 0
    for _ in range(trials):
        *draws, further = [rng.gauss(0.4, 0.1) for _ in range(6)]
        exceeded += further - fmean(draws) > needed_lead(DrawSpread.of(draws), 0.0)
    assert exceeded / trials == pytest.approx(0.05, abs=0.006)


def test_the_lead_is_a_prediction_interval_and_the_chance_of_the_questions() -> None:
    spread = stdev(DRAWS)
    assert needed_lead(DrawSpread.of(DRAWS), 0.0) == pytest.approx(2.132 * spread * (6 / 5) ** 0.5)
    lead = judge(FULL, comparison(0.6), 25, DECIDED).leads["score"]
    variance = 0.5 * 0.5 / 25
    assert lead.value == pytest.approx(0.2)
    assert lead.needed == pytest.approx(2.132 * (spread**2 * 6 / 5 + variance) ** 0.5)
