"""Head gates on several ranks: every rank holds all of them, and their gradients are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.engines import CONFIG, Setup, make_engine, share_of_step, train_steps
from support.layout_trials import GATED as TRIAL_GATED
from support.layout_trials import STEPS as LAYOUT_STEPS
from support.layout_trials import Outcome, on_one_process, train_trial, trial
from support.ranks import run_ranks

from headway.model.config import HeadGatesConfig
from headway.model.layout import GATES
from headway.parallel.collectives import RankGroup
from headway.tasks.base import StepInfo
from headway.tasks.head_sparsity import Config as HeadSparsity

STEPS = 6
GATED = CONFIG.with_(
    head_gates=HeadGatesConfig(window=3, sinks=1, init_mean=0.0, init_std=1.5), init_std=0.3
)
OBJECTIVE = HeadSparsity(start=0.5, target=0.7, mask_lr=0.3, reg_lr=0.3)
HELD = HeadSparsity(control="hold", start=0.5, target=0.7, mask_lr=0.3)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"zero1": {"size": 1}},
    "zero1": {"zero1": {"size": "auto"}},
    "fsdp": {"strategy": "fsdp"},
}


def setup(
    layout: str,
    freeze: tuple[str, ...],
    dtype: torch.dtype = torch.float32,
    objective: Any = OBJECTIVE,
) -> Setup:
    return Setup(LAYOUTS[layout], dtype, freeze=freeze, config=GATED, objective=objective)


def gradient(setting: Setup, group: RankGroup) -> torch.Tensor:
    """The gradient of the gates after the first step's exchange."""
    engine = make_engine(group, setting)
    engine.forward_backward(
        share_of_step(0, setting.micro, group.rank, group.size), StepInfo(0, 20)
    )
    if setting.parallel.get("strategy") == "fsdp" and group.size > 1:
        return engine.parts[GATES].parameter.grad.clone()
    buffer, span, slot = engine.slots[GATES]
    return buffer.gradient(span, slot).clone()


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_gate_gradients_of_two_ranks_are_those_of_one(layout: str) -> None:
    setting = setup(layout, ("weights",))
    right = gradient(setting, RankGroup())
    assert (right != 0).sum() >= 2
    for got in run_ranks(functools.partial(gradient, setting), 2):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-7)


def trained(
    setting: Setup, group: RankGroup
) -> tuple[list[tuple[float, float, float]], dict[str, torch.Tensor], int]:
    engine = make_engine(group, setting)
    seen = train_steps(engine, group, setting.micro, 0, STEPS)
    weights = {name: value.clone() for name, value in engine.weights()}
    if group.size == 1 or setting.parallel.get("strategy") != "fsdp":
        weights |= {
            name: value.clone()
            for name, value in engine.masters.items()
            if name.startswith("objective.")
        }
    return seen, weights, engine.state_bytes


@functools.cache
def alone(
    freeze: tuple[str, ...],
) -> tuple[list[tuple[float, float, float]], dict[str, torch.Tensor], int]:
    return trained(setup("ddp", freeze), RankGroup())


@pytest.mark.parametrize(
    ("layout", "freeze"),
    [("zero1", ("weights",)), ("zero1", ("layers.0",)), ("fsdp", ("weights",)), ("fsdp", ())],
)
def test_ranks_train_gates_like_one_process(layout: str, freeze: tuple[str, ...]) -> None:
    losses, weights, _ = alone(freeze)
    for seen, got, _ in run_ranks(functools.partial(trained, setup(layout, freeze)), 2):
        assert [loss for loss, *_ in seen] == pytest.approx([loss for loss, *_ in losses], rel=1e-5)
        assert [norm for _, norm, _ in seen] == pytest.approx(
            [norm for _, norm, _ in losses], rel=1e-3
        )
        for name in got:
            torch.testing.assert_close(got[name], weights[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layout", ["zero1", "fsdp"])
def test_ranks_hold_gates_like_one_process(layout: str) -> None:
    from headway.model.head_gates import expected_z

    freeze = () if layout == "fsdp" else ("weights",)
    losses, weights, _ = trained(setup("ddp", freeze, objective=HELD), RankGroup())
    target = HELD.target_at(STEPS, 20)
    assert float(1 - expected_z(weights[GATES].double()).mean()) == pytest.approx(target, abs=1e-6)
    setting = setup(layout, freeze, objective=HELD)
    for seen, got, _ in run_ranks(functools.partial(trained, setting), 2):
        assert [loss for loss, *_ in seen] == pytest.approx([loss for loss, *_ in losses], rel=1e-5)
        for name in got:
            torch.testing.assert_close(got[name], weights[name], rtol=1e-3, atol=1e-4)


SPLIT = [
    trial("tensor, frozen weights", 2, {"tensor": 2}, config=TRIAL_GATED, objective=HELD, freeze=("weights",)),
    trial("pipeline", 2, {"pipeline": 2}, config=TRIAL_GATED, objective=HELD),
]  # fmt: skip


def trained_split(group: RankGroup) -> list[Outcome]:
    """What every trial gives on this rank."""
    return [train_trial(setting, group) for setting in SPLIT]


def test_ranks_that_share_layers_or_have_stages_hold_gates_like_one_process() -> None:
    from headway.model.head_gates import expected_z

    right = [train_trial(on_one_process(setting), RankGroup()) for setting in SPLIT]
    target = HELD.target_at(LAYOUT_STEPS, 20)
    for outcomes in run_ranks(trained_split, 2):
        for outcome, expected in zip(outcomes, right, strict=True):
            assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
            gates = outcome.weights[GATES]
            torch.testing.assert_close(gates, expected.weights[GATES], rtol=1e-3, atol=1e-4)
            assert float(1 - expected_z(gates.double()).mean()) == pytest.approx(target, abs=1e-6)


def test_blocks_that_are_computed_again_see_the_same_gates() -> None:
    right, weights, _ = alone(("layers.0",))
    setting = setup("ddp", ("layers.0",))
    again = trained(
        Setup(
            setting.parallel,
            freeze=setting.freeze,
            config=setting.config,
            objective=setting.objective,
            memory={"recompute": 1.0},
        ),
        RankGroup(),
    )
    assert again[0] == right
    assert all(torch.equal(again[1][name], weights[name]) for name in weights)


def test_frozen_weights_have_neither_gradient_nor_state_and_lie_in_the_compute_dtype() -> None:
    engine = make_engine(RankGroup(), setup("ddp", ("weights",), torch.bfloat16))
    train_steps(engine, RankGroup(), 4, 0, 1)
    assert {name for group in engine.groups for name in group.names} == {
        GATES,
        "objective.lambda_1",
        "objective.lambda_2",
    }
    assert engine.state_bytes < 10_000
    for name, parameter in engine.model.named_parameters():
        assert parameter.dtype == (torch.float32 if name == GATES else torch.bfloat16)
        assert parameter.grad is None
        assert parameter.requires_grad == (name == GATES)


def test_gates_are_fp32_beside_16_bit_weights_whether_they_train_or_not() -> None:
    from headway.tasks.next_token import Config as NextToken

    for freeze, objective in (((), OBJECTIVE), (("gates",), NextToken())):
        engine = make_engine(RankGroup(), setup("ddp", freeze, torch.bfloat16, objective))
        log_alpha = engine.model.head_gates.log_alpha
        assert log_alpha.dtype == torch.float32
        assert (log_alpha.bfloat16() != log_alpha).any(), "values that 16 bits would round"
        before = log_alpha.detach().clone()
        train_steps(engine, RankGroup(), 4, 0, 2)
        assert torch.equal(log_alpha, before) == (freeze == ("gates",))
