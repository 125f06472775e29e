"""The objective that holds the share of streaming heads to a moving aim."""

from __future__ import annotations

import pytest
import torch
from support.batches import make_batch, make_step

from headway.errors import ConfigError
from headway.model.config import HeadGatesConfig, ModelConfig
from headway.model.head_gates import expected_z, probability_zero, sample
from headway.model.init import initial_value
from headway.model.layout import GATES
from headway.optim.adamw import Config as AdamW
from headway.optim.groups import hypers
from headway.optim.schedule import Schedule
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.parallel.flat.engine import FlatEngine
from headway.runtime.seed import derive
from headway.tasks.base import StepInfo
from headway.tasks.head_sparsity import Config
from headway.tasks.next_token import Config as NextToken

SHAPE = ModelConfig(
    hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=4, ffn_size=16, vocab_size=32, max_seq_len=32,
    head_gates=HeadGatesConfig(window=4, sinks=2),
)  # fmt: skip
OPTIM = AdamW(lr=1e-3, schedule=Schedule(warmup=0.1, floor=0.01))


def engine_of(
    config: Config, freeze: tuple[str, ...] = ("weights",), shape: ModelConfig = SHAPE
) -> FlatEngine:
    engine = assemble(EngineSpec(shape, config, OPTIM, chunk_tokens=64, seed=3, freeze=freeze))
    assert isinstance(engine, FlatEngine)
    engine.fill(
        (name, initial_value(spec, shape, 1))
        for name, spec in engine.specs.items()
        if spec.start != "given"
    )
    return engine


def test_the_aim_moves_linearly_or_in_the_logarithm_and_then_stays() -> None:
    linear = Config(start=0.1, target=0.7, warmup=0.8)
    assert [linear.target_at(step, 100) for step in (0, 40, 80, 99)] == pytest.approx(
        [0.1, 0.4, 0.7, 0.7]
    )
    assert linear.target_at(0, 7) == 0.1
    assert linear.target_at(6, 7) == 0.7
    # 0.8 of 7 steps is 5.6: the aim takes 6 steps, so that after 5 it is five sixths of the way
    assert [linear.target_at(step, 7) for step in (1, 3, 5)] == pytest.approx([0.2, 0.4, 0.6])
    assert Config(start=0.0, target=0.5, warmup=0.3).target_at(1, 4) == 0.25  # 1.2 steps are two
    logarithmic = Config(start=0.0, target=0.75, warmup=10, warmup_shape="logarithmic")
    assert [logarithmic.target_at(step, 1000) for step in (0, 5, 10, 500)] == pytest.approx(
        [0.0, 0.5, 0.75, 0.75]
    )
    assert Config(start=0.2, target=0.7, warmup=0).target_at(0, 10) == 0.7


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="control is hold, which has no multipliers, and reg_lr"):
        Config(control="hold", reg_lr=0.5)
    with pytest.raises(ValueError, match="log\\(1 - 1\\) is undefined"):
        Config(target=1.0, warmup_shape="logarithmic")
    with pytest.raises(ValueError, match="a fraction is at most 1"):
        Config(warmup=1.5)


@pytest.mark.parametrize("measure", ["sampled", "expected_z", "expected_l0"])
def test_the_loss_is_next_token_plus_both_terms_over_all_microbatches(measure: str) -> None:
    config = Config.model_validate({"start": 0.6, "target": 0.6, "measure": measure})
    engine = engine_of(config)
    engine.fill(
        [("objective.lambda_1", torch.tensor(0.5)), ("objective.lambda_2", torch.tensor(3.0))]
    )
    engine.fill([(GATES, torch.linspace(-2, 2, 16).view(4, 4))])
    alpha = torch.linspace(-2, 2, 16)
    result = engine.forward_backward(
        make_step(make_batch([[24], [20]], seq_len=24, vocab=32), 2), StepInfo(5, 10)
    )
    drawn = [
        1 - sample(alpha.view(4, 4), derive(3, "gates", 5, number))[0].mean() for number in range(2)
    ]
    seen = {
        "sampled": drawn,
        "expected_z": [1 - expected_z(alpha).mean()] * 2,
        "expected_l0": [probability_zero(alpha).mean()] * 2,
    }[measure]
    constraint = sum(0.5 * (s - 0.6) + 3.0 * (s - 0.6) ** 2 for s in seen) / 2
    nll, targets = result.metrics["nll"]
    assert float(result.loss) == pytest.approx(float(nll / targets + constraint), rel=1e-5)
    assert float(result.metrics["sparsity"][0] / 2) == pytest.approx(float(sum(seen) / 2), rel=1e-5)
    gap = sum(float(s) - 0.6 for s in seen) / 2
    buffer, span, slot = engine.slots["objective.lambda_1"]
    assert float(buffer.gradient(span, slot)) == pytest.approx(gap, rel=1e-4)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_logged_lambdas_are_those_of_the_loss_however_many_microbatches(
    microbatches: int,
) -> None:
    config = Config(start=0.6, target=0.6)
    engine = engine_of(config)
    engine.fill(
        [("objective.lambda_1", torch.tensor(0.5)), ("objective.lambda_2", torch.tensor(3.0))]
    )
    result = engine.forward_backward(
        make_step(make_batch([[24], [20]], seq_len=24, vocab=32), microbatches), StepInfo(5, 10)
    )
    # moves the lambdas before the meter reads the metrics
    engine.update(hypers(AdamW(), engine.groups, 0, 10))
    seen = {
        name: float(result.metrics[name][0] / result.metrics[name][1])
        for name in ("lambda_1", "lambda_2")
    }
    assert seen == {"lambda_1": 0.5, "lambda_2": 3.0}


def test_lambdas_ascend_gates_descend_each_at_its_own_rate_with_its_own_decay() -> None:
    config = Config(mask_lr=0.5, reg_lr=0.25, mask_weight_decay=0.0, reg_weight_decay=0.2)
    engine = engine_of(config, freeze=())
    numbers = hypers(OPTIM, engine.groups, 50, 100)
    by_name = {name: numbers[group.name] for group in engine.groups for name in group.names}
    share = by_name["model.norm.weight"].lr / 1e-3
    assert by_name[GATES].lr == pytest.approx(0.5 * share)
    assert (by_name[GATES].weight_decay, by_name[GATES].maximize) == (0.0, False)
    assert by_name["objective.lambda_2"].lr == pytest.approx(0.25 * share)
    assert (by_name["objective.lambda_2"].weight_decay, by_name["objective.lambda_2"].maximize) == (
        0.2,
        True,
    )
    assert (by_name[GATES].betas, by_name["objective.lambda_2"].betas) == ((0.7, 0.95), (0.0, 0.99))
    assert next(iter(numbers.values())).lr == pytest.approx(1e-3 * share), (
        "the rate that is shown is the weights'"
    )
    assert "objective.lambda_1" not in engine_of(Config(linear_term=False)).shapes


def test_a_main_rate_of_zero_leaves_the_gates_their_own() -> None:
    engine = engine_of(Config())
    numbers = hypers(OPTIM.model_copy(update={"lr": 0.0}), engine.groups, 50, 100)
    assert all(hyper.lr > 0 for hyper in numbers.values())


@pytest.mark.parametrize("measure", ["sampled", "expected_z"])
def test_the_sparsity_comes_to_its_target_within_two_hundredths(measure: str) -> None:
    steps = 150
    gaps = list[float]()
    engine = engine_of(
        Config.model_validate(
            {"target": 0.7, "warmup": 0.7, "measure": measure, "mask_lr": 0.5, "reg_lr": 0.5}
        )
    )
    for index in range(steps):
        result = engine.forward_backward(
            make_step(make_batch([[20]] * 2, seq_len=20, vocab=32, seed=index), 2),
            StepInfo(index, steps),
        )
        engine.update(hypers(OPTIM, engine.groups, index, steps))
        (seen, weight) = result.metrics["sparsity"]
        (aim, _) = result.metrics["sparsity_target"]
        gaps.append(float((seen - aim) / weight))
    log_alpha = engine.masters[GATES]
    assert float(1 - expected_z(log_alpha).mean()) == pytest.approx(0.7, abs=0.02)
    # a draw of 16 gates is noisy; their mean is not
    assert abs(sum(gaps[-30:]) / 30) < 0.02
    assert 0 <= gaps[0] < 0.1


@pytest.mark.parametrize("steps", [10, 40, 200])
def test_held_gates_expect_their_target_in_every_step_of_a_run_of_any_length(steps: int) -> None:
    config = Config(control="hold", target=0.7)
    engine = engine_of(config)
    assert not any(name.startswith("objective") for name in engine.shapes)
    gaps = list[float]()
    for index in range(steps):
        result = engine.forward_backward(
            make_step(make_batch([[20]] * 2, seq_len=20, vocab=32, seed=index), 2),
            StepInfo(index, steps),
        )
        engine.update(hypers(OPTIM, engine.groups, index, steps))
        (seen, weight) = result.metrics["expected_sparsity"]
        (aim, _) = result.metrics["sparsity_target"]
        gaps.append(float((seen - aim) / weight))
    # of 16 gates, at least 0.4 of one is expected to stream: none is certain
    assert max(map(abs, gaps)) < 0.026
    assert max(map(abs, gaps[steps // 10 :])) < 1e-5
    log_alpha = engine.masters[GATES]
    assert float(1 - expected_z(log_alpha).mean()) == pytest.approx(0.7, abs=1e-5)
    assert float(log_alpha.std()) > 0.1, "the loss tells heads apart"


def test_the_rate_of_held_gates_falls_with_the_steps_of_a_run() -> None:
    engine = engine_of(Config(control="hold", mask_lr=0.5))
    (group,) = [group for group in engine.groups if GATES in group.names]
    constant = OPTIM.model_copy(update={"schedule": Schedule(kind="constant", warmup=0)})
    rates = [hypers(constant, [group], 0, steps)[group.name].lr for steps in (10, 40, 100, 1000)]
    assert rates == pytest.approx([0.5, 0.5, 0.2, 0.02])


def test_averaging_optimizers_and_held_gates_are_refused_together() -> None:
    from headway.optim.schedule_free import Config as ScheduleFree

    spec = EngineSpec(SHAPE, Config(control="hold"), ScheduleFree(), freeze=("weights",))
    with pytest.raises(
        ConfigError, match=r"which averages weights, and objective\.control is hold"
    ):
        assemble(spec)


def test_gates_without_an_aim_and_an_aim_without_gates_are_refused() -> None:
    with pytest.raises(ConfigError, match="the objective has no target sparsity for them"):
        assemble(EngineSpec(SHAPE, NextToken(), OPTIM))
    assemble(EngineSpec(SHAPE, NextToken(), OPTIM, freeze=("gates",)))
    with pytest.raises(ConfigError, match="freeze contains the head gates"):
        assemble(EngineSpec(SHAPE, Config(), OPTIM, freeze=("gates",)))
