"""What a loss scale and dropout must not change: the gradients that arrive, and what a validation says."""

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
    found = {
        name: view.clone() for buffer in half.buffers for name, view in buffer.gradients.items()
    }
    for name, value in right.items():
        assert (found[name] / scale - value).norm() <= 0.02 * value.norm() + 1e-6, name
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


def test_frozen_parameters_come_back_from_a_checkpoint_too() -> None:
    engine = make_engine(RankGroup(), Setup(config=PLAIN, freeze=("layers.0", "embeddings")))
    engine.fill(
        [(name, value + 1.0) for name, value in engine.masters.items()]
    )  # weights that no seed gives
    wanted = {name: value.clone() for name, value in engine.masters.items()}
    saved = {(name, role): boxes[0][1].clone() for name, role, _, boxes in engine.tensors()}
    assert {role for name, role in saved if "layers.0" in name} == {"param"}
    other = make_engine(RankGroup(), Setup(config=PLAIN, freeze=("layers.0", "embeddings")))
    other.load(lambda name, role, offset, shape: saved[name, role], engine.scalars())
    assert all(torch.equal(other.masters[name], value) for name, value in wanted.items())
    assert all(
        torch.equal(parameter, wanted[name]) for name, parameter in other.model.named_parameters()
    )
