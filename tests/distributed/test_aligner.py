"""The aligner trains the same on one rank and on several, in every engine and memory mode: negatives come from all of them."""

import functools
from typing import Any

import pytest
import torch
from support.engines import OPTIM, Setup, make_engine
from support.initial_weights import initialize
from support.ranks import run_ranks
from support.small_aligner import ALIGNER, naive_loss, share_of_samples

from headway.model.aligner import Aligner
from headway.optim.groups import hypers
from headway.parallel.collectives import RankGroup
from headway.tasks.base import StepInfo
from headway.tasks.contrastive import Config as Contrastive

STEPS = 3
SETUP: dict[str, Any] = {"config": ALIGNER, "freeze": (), "objective": Contrastive()}


def trained(cases: list[tuple[dict[str, Any], dict[str, Any], int]], group: RankGroup) -> list[Any]:
    """Losses, norms, weights, scale and validation metrics of each case."""
    results = []
    for parallel, memory, micro in cases:
        engine = make_engine(group, Setup(parallel, micro=micro, memory=memory, **SETUP))
        seen = []
        for index in range(STEPS):
            result = engine.forward_backward(
                share_of_samples(index, micro, group.rank, group.size), StepInfo(index, 20)
            )
            update = engine.update(hypers(OPTIM, engine.groups, index, 20))
            seen.append((float(result.loss), float(update.norm)))
        weights = {
            name: value.clone() for name, value in engine.weights()
        } | engine.objective_values()
        valid = engine.evaluate(
            share_of_samples(9, micro, group.rank, group.size).microbatches,
            StepInfo(STEPS, 20, training=False),
        )
        results.append(
            (
                seen,
                weights,
                {name: float(total / weight) for name, (total, weight) in valid.items()},
            )
        )
    return results


@functools.cache
def plain() -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], float]:
    """The same by plain autograd over whole batches with torch's AdamW."""
    model = Aligner(ALIGNER)
    initialize(model, 1)
    scale = torch.nn.Parameter(torch.tensor(2.6592600369))
    engine = make_engine(RankGroup(), Setup(micro=1, **SETUP))
    decays = {name for group in engine.groups if group.decays for name in group.names}
    named = {**dict(model.named_parameters()), "objective.log_scale": scale}
    decay = max(hyper.weight_decay for hyper in hypers(OPTIM, engine.groups, 0, 20).values())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if n in decays], "weight_decay": decay},
            {"params": [p for n, p in named.items() if n not in decays], "weight_decay": 0.0},
        ],
        betas=OPTIM.betas,
        eps=OPTIM.eps,
    )
    seen = []
    for index in range(STEPS):
        out = model.forward_batch(share_of_samples(index, 1, 0, 1).microbatches[0]).embeddings
        assert out is not None
        loss = naive_loss(out.values, out.present, scale.expand(3))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), OPTIM.clip or torch.inf)
        for group in optimizer.param_groups:
            group["lr"] = next(iter(hypers(OPTIM, engine.groups, index, 20).values())).lr
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(loss.detach()), float(norm)))
    out = model.forward_batch(share_of_samples(9, 1, 0, 1).microbatches[0]).embeddings
    assert out is not None
    valid = float(naive_loss(out.values, out.present, scale.expand(3)).detach())
    return seen, {name: parameter.detach() for name, parameter in named.items()}, valid


ONE: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({}, {}, 1),
    ({}, {}, 4),
    ({}, {"recompute": 1}, 2),
    ({}, {"recompute": "selective"}, 2),
    ({}, {"offload": ["activations"]}, 2),
    ({}, {"offload": ["optimizer"]}, 1),
]
TWO: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({}, {}, 2),
    ({}, {}, 4),
    ({"zero1": {"size": "auto"}}, {}, 4),
    ({"strategy": "fsdp"}, {}, 2),
    ({"strategy": "fsdp"}, {"recompute": 1}, 4),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(1, ONE, id="one rank"),
        pytest.param(2, TWO, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_every_layout_trains_like_plain_autograd(ranks: int, cases: list[Any]) -> None:
    expected, weights, valid = plain()
    for results in run_ranks(functools.partial(trained, cases), ranks):
        for case, (seen, got, metrics) in zip(cases, results, strict=True):
            for (loss, norm), (right_loss, right_norm) in zip(seen, expected, strict=True):
                assert loss == pytest.approx(right_loss, rel=1e-5), case
                assert norm == pytest.approx(right_norm, rel=1e-4), case
            assert got.keys() == weights.keys()
            for name in weights:
                torch.testing.assert_close(
                    got[name],
                    weights[name],
                    rtol=1e-3,
                    atol=2e-5,
                    msg=lambda text, n=name, c=case: f"{c} {n} {text}",
                )
            assert metrics["loss"] == pytest.approx(valid, rel=1e-4), case
