"""Which parameters train, decay and learn at which rate, by hand."""

from typing import Any

import pytest

from headway.model.layout import ParamSpec, in_groups
from headway.optim.adamw import Config as AdamW
from headway.optim.base import GroupRule, Hyper
from headway.optim.groups import hypers, make_groups, matching, trainable
from headway.optim.schedule import Schedule
from headway.tasks.base import ParameterRule

UP = "model.layers.0.mlp.experts.up_proj.weight"
UP_BIAS = "model.layers.0.mlp.experts.up_proj.bias"
NORM = "model.norm.weight"
ROUTER_BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"
LAMBDA = "objective.lambda_1"
SPECS = {
    UP: ParamSpec(UP, (4, 8, 6), groups=in_groups("linear", "expert")),
    UP_BIAS: ParamSpec(UP_BIAS, (4, 8), groups=in_groups("bias", "expert")),
    ROUTER_BIAS: ParamSpec(ROUTER_BIAS, (4,), groups=in_groups("router_bias")),
    NORM: ParamSpec(NORM, (6,), groups=in_groups("norm")),
    LAMBDA: ParamSpec(LAMBDA, (), groups=in_groups("objective")),
}
HALFWAY = Schedule(kind="constant", warmup=4)
"""At step 1 the rate is half of the peak."""


def hyper_of(name: str, config: AdamW, rules: tuple[ParameterRule, ...] = (), **more: Any) -> Hyper:
    groups = make_groups(config, SPECS, trainable(SPECS, (), ()), rules)
    (group,) = (group for group in groups if name in group.names)
    return hypers(config, groups, 1, 100, **more)[group.name]


def test_a_balancing_bias_never_trains() -> None:
    assert trainable(SPECS, (), ()) == {UP, UP_BIAS, NORM, LAMBDA}
    assert ROUTER_BIAS not in trainable(SPECS, (), ("*mlp.gate*", NORM))


def test_biases_of_stacked_experts_are_no_matrices_and_do_not_decay() -> None:
    assert matching("matrices", SPECS) == {UP}
    config = AdamW(lr=1.0, weight_decay=0.1, schedule=HALFWAY)
    assert [hyper_of(name, config).weight_decay for name in (UP, UP_BIAS, NORM)] == [0.1, 0.0, 0.0]


def test_a_groups_rate_follows_the_schedule_and_the_factor_of_the_batch() -> None:
    rules = (GroupRule(match=(UP,), lr=0.2), GroupRule(match=(NORM,), lr_factor=3.0))
    config = AdamW(lr=0.01, schedule=HALFWAY, groups=rules)
    assert [hyper_of(name, config).lr for name in (UP, NORM, UP_BIAS)] == pytest.approx(
        [0.1, 0.015, 0.005]
    )
    assert [
        hyper_of(name, config, lr_factor=4.0).lr for name in (UP, NORM, UP_BIAS)
    ] == pytest.approx([0.4, 0.06, 0.02])


def test_an_objectives_rule_has_its_own_rate_decay_and_direction() -> None:
    rule = ParameterRule(("objective",), 2.0, 0.3, (0.5, 0.6), maximize=True)
    hyper = hyper_of(LAMBDA, AdamW(lr=0.01, weight_decay=0.1, schedule=HALFWAY), (rule,))
    assert (hyper.lr, hyper.weight_decay, hyper.betas, hyper.maximize) == (
        1.0,
        0.3,
        (0.5, 0.6),
        True,
    )
