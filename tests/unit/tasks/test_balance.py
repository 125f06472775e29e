"""The losses of mixtures in numbers counted by hand: sigmoid scores, several layers, rows with padding and empty rows.

Scores are chosen so that those of a token and their shares are short decimals; a logit is the logarithm of s / (1 - s).
"""

from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.model.experts_config import ExpertsConfig
from headway.model.router import Routing, stack_routings, summarize
from headway.tasks.balance import LOAD, Balanced, StepBalanced
from headway.tasks.base import Collectives, Loss, SeenRows, StepInfo, Term
from headway.tasks.kto import Config as KTO
from headway.tasks.kto.loss import KL_COMPLETIONS
from headway.tasks.kto.source import kl_completions

ALONE: Collectives = None  # type: ignore[assignment] - nothing here communicates
LN2 = log(2)
ROW = [[0.5, 0.25, 0.25], [0.8, 0.4, 0.4], [0.2, 0.6, 0.2], [0.9, 0.9, 0.9]]
"""Scores of four tokens; the last one is padding. Shares are (0.5, 0.25, 0.25) twice, then (0.2, 0.6, 0.2)."""
LOAD_OF_ROW = [2.0, 1.0, 0.0]
SHARES_OF_ROW = [1.2, 1.1, 0.7]
AUX_OF_ROW = 3 * (2 * 1.2 + 1 * 1.1) / 9
# exponentials of logits, s / (1 - s): 1 + 1/3 + 1/3, 4 + 2/3 + 2/3, 1/4 + 3/2 + 1/4
Z_OF_ROW = log(5 / 3) ** 2 + log(16 / 3) ** 2 + log(2) ** 2
ENTROPY_OF_ROW = 2 * 1.5 * LN2 - 0.4 * log(0.2) - 0.6 * log(0.6)


class Nothing:
    """An objective whose loss is zero."""

    scope = "row"
    module = None

    def loss(self, out: Any, batch: Any, at: StepInfo, collectives: Collectives) -> Loss:
        return Loss({"next_token": Term(torch.zeros(()))})


def routing_of(rows: list[list[list[float]]], counted: list[list[float]]) -> Routing:
    """What a sigmoid router does with scores [B,T,E] where every token takes its best expert."""
    scores = torch.tensor(rows)
    taken = torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)
    return summarize(torch.logit(scores), scores, taken, torch.tensor(counted))


def config(**changes: Any) -> ExpertsConfig:
    return ExpertsConfig(num=3, per_token=1, router="sigmoid", **changes)


def loss_of(
    routing: Routing, experts: ExpertsConfig, kind: type[Balanced] = Balanced, **settings: Any
) -> Loss:
    out: Any = SimpleNamespace(routing=routing)
    return kind(Nothing(), experts).loss(out, None, StepInfo(0, 1, **settings), ALONE)  # type: ignore[arg-type]


def test_a_routers_sums_are_those_of_the_tokens_that_count() -> None:
    routing = routing_of([ROW, [[0.5, 0.25, 0.25]] * 4], [[1, 1, 1, 0], [0, 0, 0, 0]])
    assert routing.load.tolist() == [LOAD_OF_ROW, [0, 0, 0]]
    assert routing.probability[0].tolist() == pytest.approx(SHARES_OF_ROW, abs=1e-6)
    assert not routing.probability[1].any()
    assert routing.z.tolist() == pytest.approx([Z_OF_ROW, 0.0], rel=1e-5)
    assert routing.entropy.tolist() == pytest.approx([ENTROPY_OF_ROW, 0.0], rel=1e-5)


def test_the_balancing_loss_of_sigmoid_scores_takes_their_shares() -> None:
    routing = stack_routings([routing_of([ROW], [[1, 1, 1, 0]])])
    loss = loss_of(routing, config(aux_loss=0.5))
    assert float(loss.share({"targets": 1.0, "rows": 1.0})) == pytest.approx(
        0.5 * AUX_OF_ROW, rel=1e-6
    )


ROTATED = [[score[2], score[0], score[1]] for score in ROW]
"""The same scores for the next expert: load (0, 2, 1), shares (0.7, 1.2, 1.1)."""


def two_layers() -> Routing:
    """Two mixtures of two rows, the second of which is empty; the mixtures choose different experts."""
    counted = [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    return stack_routings([routing_of([ROW, ROW], counted), routing_of([ROTATED, ROW], counted)])


def test_the_losses_of_two_layers_are_means_over_layers_and_rows_that_hold_tokens() -> None:
    loss = loss_of(two_layers(), config(aux_loss=0.5, z_loss=0.25, aux_layers="each"))
    totals = {"targets": 1.0, "rows": 1.0, "tokens": 3.0}
    assert float(loss.terms["aux_loss"].sum) == pytest.approx(AUX_OF_ROW, rel=1e-6)
    assert float(loss.share(totals)) == pytest.approx(
        0.5 * AUX_OF_ROW + 0.25 * Z_OF_ROW / 3, rel=1e-5
    )
    means = {
        name: float(total) / float(weight)
        for name, (total, weight) in loss.metrics.items()
        if name != LOAD
    }
    assert means == pytest.approx(
        {"aux_loss": AUX_OF_ROW, "router_z": Z_OF_ROW / 3, "router_entropy": ENTROPY_OF_ROW / 3},
        rel=1e-5,
    )
    assert loss.metrics[LOAD][0].tolist() == [[2, 1, 0], [0, 2, 1]]


def test_pooled_layers_are_counted_together_before_the_product() -> None:
    loss = loss_of(two_layers(), config(aux_loss=1.0, aux_layers="pooled"))
    # mean load (1, 1.5, 0.5), mean shares (0.95, 1.15, 0.9)
    pooled = 3 * (1 * 0.95 + 1.5 * 1.15 + 0.5 * 0.9) / 9
    assert float(loss.terms["aux_loss"].sum) == pytest.approx(pooled, rel=1e-6)


def test_tokens_with_two_experts_count_once() -> None:
    scores = torch.tensor([ROW])
    taken = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]])
    routing = stack_routings(
        [summarize(torch.logit(scores), scores, taken, torch.tensor([[1.0, 1.0, 1.0, 0.0]]))]
    )
    experts = ExpertsConfig(num=3, per_token=2, router="sigmoid", aux_loss=1.0)
    # every expert has two of three tokens: the loss is k = 2 for any scores
    assert float(loss_of(routing, experts).terms["aux_loss"].sum) == pytest.approx(
        3 * 2 * 3 / 9, rel=1e-6
    )


def test_a_step_is_balanced_by_the_choices_of_all_its_rows() -> None:
    routing = stack_routings([routing_of([ROW], [[1, 1, 1, 0]])])
    # the other microbatch of the step sent its three tokens to the last expert
    seen = {LOAD: SeenRows(torch.tensor([[[2.0, 1.0, 0.0]], [[0.0, 0.0, 3.0]]]))}
    loss = loss_of(routing, config(aux_loss=1.0, aux_scope="step"), StepBalanced, seen=seen)
    share = 3 * (2 * 1.2 + 1 * 1.1 + 3 * 0.7) / 36
    assert float(loss.terms["aux_loss"].sum) == pytest.approx(share, rel=1e-6)
    total, weight = loss.metrics["aux_loss"]
    assert (float(total), float(weight)) == (pytest.approx(share, rel=1e-6), 0.5)
    # a validation has no first pass over a whole step: it balances what it sees
    valid = loss_of(
        routing, config(aux_loss=1.0, aux_scope="step"), StepBalanced, seen=seen, training=False
    )
    assert float(valid.terms["aux_loss"].sum) == pytest.approx(AUX_OF_ROW, rel=1e-6)


def test_a_mixture_keeps_the_first_passes_of_its_objective_and_adds_its_own() -> None:
    kto = KTO().build()
    experts = ExpertsConfig(num=3, per_token=1, aux_loss=0.1)
    by_row = Balanced(kto, experts).first_passes()
    assert [(first_pass.name, first_pass.rows) for first_pass in by_row] == [
        (KL_COMPLETIONS, kl_completions)
    ]
    by_step = StepBalanced(kto, experts).first_passes()
    assert [
        (first_pass.name, first_pass.rows, first_pass.in_evaluation) for first_pass in by_step
    ] == [
        (KL_COMPLETIONS, kl_completions, True),
        (LOAD, None, False),
    ]
