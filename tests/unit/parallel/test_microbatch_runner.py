"""Gradients do not depend on the loss scale, dropout follows from seed, step and microbatch alone, and a validation drops nothing."""

from dataclasses import replace

import pytest
import torch
from support.batches import make_batch, make_step
from support.engines import CONFIG, Setup, make_engine

from headway.optim.adamw import Config as AdamW
from headway.optim.groups import hypers
from headway.optim.scaler import ScalerConfig
from headway.parallel.collectives import RankGroup
from headway.tasks.base import StepInfo

PLAIN = CONFIG.with_(dropout=0.0)
BATCH = make_batch([[16], [7, 9], [3, 13], [10]], seq_len=16, vocab=64)


@pytest.mark.parametrize("scale", [1.0, 64.0, 4096.0])
def test_gradients_carry_the_loss_scale_and_the_norm_does_not(scale: float) -> None:
    """Adam alone would hide a wrong size: it divides it away."""
    exact = make_engine(RankGroup(), Setup(config=PLAIN, freeze=()))
    exact.forward_backward(make_step(BATCH, 2), StepInfo(0, 10))
    half = make_engine(
        RankGroup(),
        Setup(config=PLAIN, freeze=(), dtype=torch.float16, loss_scale=ScalerConfig(initial=scale)),
    )
    result = half.forward_backward(make_step(BATCH, 2), StepInfo(0, 10))
    right = {
        name: view.clone() for buffer in exact.buffers for name, view in buffer.gradients.items()
    }
    gradients = {
        name: view.clone() for buffer in half.buffers for name, view in buffer.gradients.items()
    }
    for name, value in right.items():
        assert (gradients[name] / scale - value).norm() <= 0.02 * value.norm() + 1e-6, name
    norm = sum(float(value.square().sum()) for value in right.values()) ** 0.5
    update = half.update(hypers(AdamW(), half.groups, 0, 10))
    assert float(update.norm) == pytest.approx(norm, rel=0.01)
    assert float(update.loss_scale) == scale
    assert float(result.loss) == pytest.approx(
        float(exact.forward_backward(make_step(BATCH, 2), StepInfo(0, 10)).loss), rel=0.01
    )


def test_a_validation_drops_nothing() -> None:
    sums = []
    for config in (PLAIN, CONFIG.with_(dropout=0.5)):
        engine = make_engine(RankGroup(), Setup(config=config, freeze=()))
        sums += [
            engine.evaluate([BATCH], StepInfo(step, 10, training=False))["nll"] for step in (0, 3)
        ]
    first, weight = sums[0]
    assert float(weight) == float(BATCH.loss_weight.sum())
    assert all(torch.equal(first, total) for total, _ in sums)


def dropout_loss(step: int, first_microbatch: int = 0, num_micro: int = 1) -> float:
    """The loss of the same rows and weights; only where they stand in the run differs."""
    engine = make_engine(RankGroup(), Setup(config=CONFIG.with_(dropout=0.5), freeze=()))
    row = make_batch([[16]], seq_len=16, vocab=64)
    rows = replace(
        row,
        **{
            name: torch.cat([getattr(row, name)] * num_micro)
            for name in ("tokens", "targets", "loss_weight")
        },
    )
    same = ("position", "document", "source", "bounds")
    rows = replace(rows, **{name: torch.cat([getattr(row, name)] * num_micro) for name in same})
    batch = replace(make_step(rows, num_micro), first_microbatch=first_microbatch)
    return float(engine.forward_backward(batch, StepInfo(step, 10)).loss)


def test_every_step_and_every_microbatch_drops_other_places_and_a_rerun_the_same() -> None:
    losses = {(step, micro): dropout_loss(step, micro) for step in (0, 1) for micro in (0, 1)}
    assert len(set(losses.values())) == 4, losses
    assert dropout_loss(1, 1) == losses[1, 1]


def test_microbatches_of_one_step_drop_other_places_counted_over_all_ranks() -> None:
    first = dropout_loss(0, 0)
    second = dropout_loss(0, 1)
    # two equal microbatches share one mean: half of each one's own loss, the second drawn as number 1
    assert abs(dropout_loss(0, 0, num_micro=2) - (first + second) / 2) < 1e-6
    assert abs(dropout_loss(0, 1, num_micro=2) - (second + dropout_loss(0, 2)) / 2) < 1e-6
