"""The verdict about head masks: comparisons and what is known of the gates come in; for each of
the masks one of five cases and a line go out.

    full_model_fails   the full model cannot do these tasks, so nothing can be lost
    no_better          the learned mask is no better than random, or than a choice that
                       nothing was learned for
    undecided          it is better, but many gates are neither full nor streaming
    sparsity_missed    it is better, but the gates did not end at their target
    wins               it is better, and by how much
    not_compared       (no case of its own) nothing was measured beside it

The first case that fits is the verdict.

When is a mask better than random? If it were one more draw of the same kind, its number x would lie
in the prediction interval of the n draws that were measured, with mean m and standard deviation s
(one-sided, 95 %):

    |x - m| <= t s sqrt(1 + 1/n)                   t: Student's quantile of n - 1 degrees of freedom
    |x - m| <= t sqrt(s^2 (1 + 1/n) + p (1 - p) / c)        for a share of c questions

The second has the chance in the questions, too: p is the mean of both shares. With few questions
one right answer more is no lead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.eval.mask_comparison import DrawSpread, MaskComparison, Scores

VerdictKind = Literal[
    "full_model_fails", "no_better", "undecided", "sparsity_missed", "wins", "not_compared"
]

LEAST_SCORE = 0.1
"""Share of the answers below which the full model cannot do the tasks."""
MOST_UNDECIDED = 0.25
"""Share of undecided gates above which the masks depend on where they are cut."""
SPARSITY_TOLERANCE = 0.02
"""How far gates may end from their target; one head where that is more."""
LEAST_LOSS = 0.001
"""Nats per token. A smaller lead is rounding."""
STUDENT_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
    1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
"""One-sided 95 % quantiles of Student's t, of 1 to 30 degrees of freedom."""
SEVERITY: tuple[VerdictKind, ...] = (
    "full_model_fails",
    "no_better",
    "undecided",
    "sparsity_missed",
    "not_compared",
    "wins",
)
"""The verdict about several masks has the kind of the first of these."""
SIMPLE_WORDS = {"first": "the first heads of each layer", "windows": "windows everywhere"}
"""The simple choices for which nothing was learned. The best heads of each layer are the gates'
own, cut in another way."""


@dataclass(frozen=True)
class GateState:
    """How the gates of a model ended."""

    sparsity: float
    """The share of heads that they expect to stream."""
    undecided: float
    """The share of gates that choose one side in fewer than 9 of 10 draws."""
    num_heads: int
    target: float | None = None
    """The sparsity they were trained for; None: not known."""

    @property
    def missed(self) -> bool:
        """Whether they ended away from their target."""
        if self.target is None:
            return False
        tolerance = max(SPARSITY_TOLERANCE, 1 / self.num_heads)
        return abs(self.sparsity - self.target) > tolerance


@dataclass(frozen=True)
class Lead:
    """How far a mask is ahead of its random draws in one number."""

    value: float
    """Positive: better."""
    needed: float
    """A lead that chance alone hardly gives."""

    @property
    def is_better(self) -> bool:
        """Whether it is no chance."""
        return self.value > self.needed

    @property
    def is_worse(self) -> bool:
        """The same in the other direction."""
        return -self.value > self.needed


@dataclass(frozen=True)
class MaskVerdict:
    """About one of the masks."""

    variant: str
    kind: VerdictKind
    line: str
    leads: dict[str, Lead] = field(default_factory=dict)
    """By measure: score, loss."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        leads = {
            name: {"value": lead.value, "needed": lead.needed} for name, lead in self.leads.items()
        }
        return {"variant": self.variant, "kind": self.kind, "line": self.line, "leads": leads}


@dataclass(frozen=True)
class LongVerdict:
    """About all masks of an evaluation."""

    kind: VerdictKind
    line: str
    masks: list[MaskVerdict]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "kind": self.kind,
            "line": self.line,
            "masks": [verdict.to_json() for verdict in self.masks],
        }


def verdict_of(
    full: Scores, comparisons: Sequence[MaskComparison], cases: int, gates: GateState | None
) -> LongVerdict | None:
    """About all masks, most full heads first; None where there is nothing to judge."""
    failure = _failure(full)
    masks = [judge(full, comparison, cases, gates) for comparison in comparisons]
    if failure is not None:
        return LongVerdict("full_model_fails", failure, masks)
    if not masks:
        return None
    worst = min(masks, key=lambda verdict: SEVERITY.index(verdict.kind))
    line = "; ".join(f"{verdict.variant}: {verdict.line}" for verdict in masks) + "."
    return LongVerdict(worst.kind, line, masks)


def judge(
    full: Scores, comparison: MaskComparison, cases: int, gates: GateState | None
) -> MaskVerdict:
    """About one of the masks. `gates`: those that the masks were made of, if they are known."""
    name = comparison.variant.name
    failure = _failure(full)
    if failure is not None:
        return MaskVerdict(name, "full_model_fails", failure)

    if comparison.random is None:
        return MaskVerdict(name, "not_compared", "not compared with random masks")
    leads = _leads(comparison, comparison.random, cases)
    if not leads:
        line = "one random draw has no spread; give --random-draws 5"
        return MaskVerdict(name, "not_compared", line)

    numbers = _in_words(full, comparison, comparison.random, leads)
    is_better = any(lead.is_better for lead in leads.values())
    is_worse = any(lead.is_worse for lead in leads.values())
    # A mask that another program made has no gates here.
    trained = gates if comparison.variant.masks_from == "own" else None
    if not is_better or is_worse:
        line = f"learned is no better than random, {numbers}"
        if trained is not None:
            # Why, where it is known: the reader's next question.
            line += "".join(f"; {reason}" for reason in _reasons(trained))
        return MaskVerdict(name, "no_better", line, leads)
    simple = _equal_choice(comparison)
    if simple is not None:
        line = f"learned is no better than {simple}, {numbers}"
        return MaskVerdict(name, "no_better", line, leads)

    if trained is not None and trained.undecided > MOST_UNDECIDED:
        line = "; ".join([*_reasons(trained), f"learned leads random, {numbers}"])
        return MaskVerdict(name, "undecided", line, leads)
    if trained is not None and trained.missed:
        line = "; ".join([*_reasons(trained), f"learned leads random, {numbers}"])
        return MaskVerdict(name, "sparsity_missed", line, leads)
    return MaskVerdict(name, "wins", f"learned wins, {numbers}", leads)


def _failure(full: Scores) -> str | None:
    """Why nothing can be said; None where the full model answers enough, or texts alone are
    scored."""
    if full.score is None or full.score.mean >= LEAST_SCORE:
        return None
    return (
        f"the full model cannot do these tasks: it finds {full.score.mean:.1%} of the answers, and "
        f"below {LEAST_SCORE:.0%} masks hardly differ. Take easier tasks, shorter prompts "
        "or a stronger model."
    )


def _reasons(gates: GateState) -> list[str]:
    """What is wrong with the gates."""
    reasons: list[str] = []
    if gates.undecided > MOST_UNDECIDED:
        reasons.append(f"gates undecided ({gates.undecided:.0%})")
    if gates.missed:
        reasons.append(f"sparsity missed ({gates.sparsity:.3f} for {gates.target:g})")
    return reasons


def _leads(comparison: MaskComparison, random: Scores, cases: int) -> dict[str, Lead]:
    """By measure; none of a single draw."""
    leads: dict[str, Lead] = {}
    own = comparison.own
    if own.score is not None and random.score is not None and len(random.score.values) > 1:
        share = (own.score.mean + random.score.mean) / 2
        of_questions = share * (1 - share) / cases
        needed = needed_lead(random.score, of_questions)
        leads["score"] = Lead(own.score.mean - random.score.mean, needed)
    if own.loss is not None and random.loss is not None and len(random.loss.values) > 1:
        # All read the same text, so only the choice of heads differs. A lower loss is better.
        needed = max(LEAST_LOSS, needed_lead(random.loss, 0.0))
        leads["loss"] = Lead(random.loss.mean - own.loss.mean, needed)
    return leads


def needed_lead(draws: DrawSpread, further_variance: float) -> float:
    """The lead over the mean of two or more draws that one more draw would exceed in 5 % of all
    cases; the formula is the module's."""
    num_draws = len(draws.values)
    quantile = STUDENT_95[min(num_draws - 1, len(STUDENT_95)) - 1]
    return quantile * math.sqrt(draws.std**2 * (1 + 1 / num_draws) + further_variance)


def _equal_choice(comparison: MaskComparison) -> str | None:
    """A simple choice that is as good in every number, in words."""
    for kind, words in SIMPLE_WORDS.items():
        simple = comparison.simple.get(kind)
        if simple is not None and _is_as_good(simple, comparison.own):
            return words
    return None


def _is_as_good(simple: Scores, own: Scores) -> bool:
    if own.score is not None and (simple.score is None or simple.score.mean < own.score.mean):
        return False
    if own.loss is None:
        return True
    return simple.loss is not None and simple.loss.mean <= own.loss.mean


def _in_words(
    full: Scores, comparison: MaskComparison, random: Scores, leads: dict[str, Lead]
) -> str:
    """`+0.575 of the answers (0.975 against 0.400 ± 0.050 of 5 random draws, full 0.990)`, and the
    same of the loss."""
    parts: list[str] = []
    for measure, unit, sign, digits in (
        ("score", "of the answers", 1, 3),
        ("loss", "in loss", -1, 4),
    ):
        if measure not in leads:
            continue
        learned: DrawSpread = getattr(comparison.own, measure)
        drawn: DrawSpread = getattr(random, measure)
        whole: DrawSpread | None = getattr(full, measure)
        values = (
            f"{learned.mean:.{digits}f} against {drawn.mean:.{digits}f} ± {drawn.std:.{digits}f} "
            f"of {len(drawn.values)} random draws"
        )
        if whole is not None:
            values += f", full {whole.mean:.{digits}f}"
        change = sign * leads[measure].value
        parts.append(f"{change:+.{digits}f} {unit} ({values})")
    return ", ".join(parts)
