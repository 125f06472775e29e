"""Metrics of next-token prediction, distillation and head sparsity in sums counted by hand, by source where there are several."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.batches import make_batch

from headway.data.batch import Batch
from headway.tasks.base import Collectives, Loss, StepInfo
from headway.tasks.distill import Config as Distill
from headway.tasks.head_sparsity import Config as HeadSparsity
from headway.tasks.next_token import Config as NextToken

ALONE: Collectives = None  # type: ignore[assignment] - nothing here communicates
VALUES = torch.tensor([[1.0, 2.0, 100.0], [4.0, 8.0, 16.0], [32.0, 64.0, 100.0]])
CORRECT = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
WEIGHT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.5, 0.5], [0.0, 1.0, 0.0]])
"""Rows of the sources 1, 0 and 1; targets without weight count nowhere."""


def batch_of() -> Batch:
    return replace(
        make_batch([[3]] * 3, seq_len=3, vocab=8),
        loss_weight=WEIGHT,
        source=torch.tensor([1, 0, 1]),
    )


def out_of(**per_token: torch.Tensor) -> Any:
    scored = SimpleNamespace(total=torch.tensor(5.0), **per_token)
    return SimpleNamespace(head=SimpleNamespace(nll=lambda *_: scored, distill=lambda *_: scored))


def sums_of(loss: Loss) -> dict[str, tuple[Any, Any]]:
    return {
        name: (total.tolist(), weight.tolist()) for name, (total, weight) in loss.metrics.items()
    }


def test_next_token_metrics_are_weighted_and_divided_by_source() -> None:
    objective = NextToken(z_loss=0.25).build()
    loss = objective.loss(
        out_of(nll=VALUES, correct=CORRECT, lse=VALUES / 2),
        batch_of(),
        StepInfo(0, 1, num_sources=3),
        ALONE,
    )
    # 1 + 2, then 4 + 8 / 2 + 16 / 2, then 64; correct: 1, then 1 + 1 / 2, then 1
    assert sums_of(loss) == {
        "nll": (3 + 16 + 64, 5.0),
        "accuracy": (1 + 1.5 + 1, 5.0),
        "z_loss": (0.25 * (0.25 + 1 + 4 + 16 / 2 + 64 / 2 + 1024), 5.0),
        "nll/source": ([16, 3 + 64, 0], [2, 3, 0]),
        "accuracy/source": ([1.5, 2, 0], [2, 3, 0]),
    }
    assert float(loss.terms["next_token"].sum) == 5.0


def test_distillation_metrics_are_weighted_and_divided_by_source() -> None:
    objective = Distill().with_teacher_head(SimpleNamespace()).build()  # type: ignore[arg-type]
    batch = replace(batch_of(), extra={"teacher": torch.zeros(3, 3, 2)})
    loss = objective.loss(
        out_of(nll=VALUES, correct=CORRECT, kl=2 * VALUES),
        batch,
        StepInfo(0, 1, num_sources=2),
        ALONE,
    )
    assert sums_of(loss) == {
        "nll": (83.0, 5.0),
        "accuracy": (3.5, 5.0),
        "kl": (166.0, 5.0),
        "nll/source": ([16, 67], [2, 3]),
        "accuracy/source": ([1.5, 2], [2, 3]),
        "kl/source": ([32, 134], [2, 3]),
    }


def test_head_sparsity_counts_undecided_heads_and_both_terms() -> None:
    objective = HeadSparsity(target=0.5, start=0.5).build()
    lambdas = dict(objective.module.named_parameters())  # type: ignore[union-attr]
    with torch.no_grad():
        lambdas["lambda_1"].fill_(3.0)
        lambdas["lambda_2"].fill_(7.0)
    z = torch.tensor([[0.0, 1.0, 0.25], [1.0, 1.0, 0.75]])
    out = out_of(nll=VALUES, correct=CORRECT)
    out.gates = SimpleNamespace(z=z, log_alpha=z)
    loss = objective.loss(out, batch_of(), StepInfo(0, 10), ALONE)
    # the mean of z is 4 / 6, so the sparsity is 1/3 and the gap -1/6
    assert float(loss.terms["sparsity"].sum.detach()) == pytest.approx(3 * -1 / 6 + 7 / 36)
    assert float(loss.metrics["sparsity"][0]) == pytest.approx(1 / 3)
    assert float(loss.metrics["undecided_heads"][0]) == pytest.approx(2 / 6)
