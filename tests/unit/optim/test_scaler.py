"""The loss scale against the rule written with plain numbers."""

import random

import torch

from headway.optim.scaler import Scaler, ScalerConfig


def test_the_scale_follows_the_rule_over_random_overflows() -> None:
    config = ScalerConfig(
        initial=64.0,
        min=4.0,
        max=256.0,
        growth_interval=3,
        hysteresis=2,
        growth_factor=2.0,
        backoff_factor=0.5,
    )
    for seed in range(20):
        draw = random.Random(seed)
        scaler = Scaler(config, torch.device("cpu"))
        scale = 64.0
        good = 0
        overflows = 0
        for _ in range(60):
            bad = draw.random() < 0.3
            scaler.update(torch.tensor(float(bad)))
            if bad:
                overflows = overflows + 1
                good = 0
                if overflows >= config.hysteresis:
                    scale = max(scale * 0.5, config.min)
            else:
                good += 1
                if good == config.growth_interval:
                    good = 0
                    overflows = 0
                    scale = min(scale * 2.0, config.max)
            assert scaler.scalars() == {"scale": scale, "good": good, "overflows": overflows}, (
                f"seed {seed}"
            )


def test_a_scaler_comes_back_from_a_checkpoint() -> None:
    scaler = Scaler(ScalerConfig(), torch.device("cpu"))
    for bad in (0.0, 1.0, 1.0, 0.0):
        scaler.update(torch.tensor(bad))
    other = Scaler(ScalerConfig(), torch.device("cpu"))
    other.load(scaler.scalars())
    assert other.scalars() == scaler.scalars()
