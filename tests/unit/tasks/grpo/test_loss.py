"""The loss of sampled answers: TRL's own numbers, the formulas written out with plain autograd, and however a step is packed and cut."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.policy_steps import (
    GOLDEN,
    SHIFT,
    answers_of,
    config_of,
    floats,
    policy_step,
    wave_engine,
)
from support.trl_pairs import MODEL, wave
from torch import Tensor

from headway.kernels.policy_scores import DrawnFrom
from headway.model.base import build_frozen_model
from headway.model.transformer import Transformer
from headway.rollout.rows import StepRows, TrainedAnswer, answer_step
from headway.tasks.grpo import Config

DRAWN = DrawnFrom(GOLDEN["temperature"], None)
LONGEST: int = GOLDEN["longest"]
SHAPES = {
    "a row each": StepRows(16, 2, 1),
    "packed": StepRows(32, 9, 1),
    "packed, in one microbatch": StepRows(24, 9, 8),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("entry", GOLDEN["cases"], ids=lambda entry: str(entry["case"]))
def test_loss_and_gradients_are_those_of_trl(entry: dict[str, Any], shape: StepRows) -> None:
    config = config_of(entry["case"])
    engine = wave_engine(config, DRAWN, LONGEST, SHIFT if config.beta else None)
    step = policy_step(engine, answers_of(entry), shape)
    assert step.loss == pytest.approx(entry["loss"], abs=1e-6)
    for (name, gradient), expected in zip(
        sorted(step.gradients.items()), entry["gradients"].values(), strict=True
    ):
        weights = torch.cos(0.3 * torch.arange(gradient.numel()))
        projected = float((gradient.double().flatten() * weights).sum())
        assert projected == pytest.approx(expected, abs=2e-6, rel=2e-5), name


# ---- what TRL has not, written out


class Plain:
    """The answers of the golden file under a plain model, one after another."""

    def __init__(self) -> None:
        model = build_frozen_model(MODEL, wave(0.0).items(), torch.device("cpu"), torch.float32)
        assert isinstance(model, Transformer)
        self.model = model.requires_grad_()
        self.entry = GOLDEN["cases"][0]
        self.advantages: list[float] = GOLDEN["advantages"]
        self.log_probs: list[Tensor] = []
        self.entropies: list[Tensor] = []
        for number in range(len(GOLDEN["answers"])):
            log_p = self.distribution(self.model, number)
            ids = torch.tensor(GOLDEN["answers"][number])
            self.log_probs.append(log_p.gather(1, ids[:, None])[:, 0])
            self.entropies.append(-(log_p.exp() * log_p).sum(-1))
        frozen = build_frozen_model(MODEL, wave(SHIFT).items(), torch.device("cpu"), torch.float32)
        with torch.no_grad():
            self.scored = [
                self.distribution(frozen, number).gather(
                    1, torch.tensor(GOLDEN["answers"][number])[:, None]
                )[:, 0]
                for number in range(len(GOLDEN["answers"]))
            ]
        self.old = [torch.tensor(values) for values in self.entry["old"]]
        self.sampled = [torch.tensor(values) for values in self.entry["sampled"]]

    def distribution(self, model: Any, number: int) -> Tensor:
        """log p of every token of an answer, [n, V]."""
        prompt, answer = GOLDEN["prompts"][number], GOLDEN["answers"][number]
        alone = TrainedAnswer(tuple(prompt), tuple(answer), floats([0.0] * len(answer)), 0.0)
        (batch,) = answer_step([alone], StepRows(16, 2, 1), 0).batch.microbatches
        out = model.forward_batch(batch).head
        places = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        logits = out.hidden[0, places] @ out.weight.t()
        return (logits / DRAWN.temperature).log_softmax(-1)

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        self.model.zero_grad()
        loss.backward()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.model.named_parameters()
        }


def clipped(ratio: Tensor, advantage: Tensor | float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def whole(plain: Plain) -> Tensor:
    """RLOO: one ratio of the whole answer, which counts once."""
    losses = []
    for number, advantage in enumerate(plain.advantages):
        ratio = (plain.log_probs[number] - plain.old[number]).sum().exp()
        losses.append(-clipped(ratio, advantage, 0.2, 0.2))
    return torch.stack(losses).mean()


def token_weighted(plain: Plain, per_token: Callable[[int], Tensor]) -> Tensor:
    """The mean over answers of the mean over their tokens."""
    return torch.stack([per_token(n).mean() for n in range(len(plain.advantages))]).mean()


def policy_of(plain: Plain, number: int, advantage: Tensor | float | None = None) -> Tensor:
    if advantage is None:
        advantage = plain.advantages[number]
    ratio = (plain.log_probs[number] - plain.old[number]).exp()
    return -clipped(ratio, advantage, 0.2, 0.2)


def with_kl(estimate: Callable[[Tensor], Tensor]) -> Callable[[Plain], Tensor]:
    def loss(plain: Plain) -> Tensor:
        def per_token(number: int) -> Tensor:
            difference = plain.scored[number] - plain.log_probs[number]
            return policy_of(plain, number) + 0.3 * estimate(difference)

        return token_weighted(plain, per_token)

    return loss


def longest(plain: Plain) -> Tensor:
    sums = [policy_of(plain, number).sum() for number in range(len(plain.advantages))]
    return torch.stack(sums).sum() / (LONGEST * len(sums))


def taught(weight: float) -> Callable[[Plain], Tensor]:
    def loss(plain: Plain) -> Tensor:
        def per_token(number: int) -> Tensor:
            gain = weight * (plain.scored[number] - plain.old[number])
            return policy_of(plain, number, plain.advantages[number] + gain)

        return token_weighted(plain, per_token)

    return loss


def with_sequence_importance(plain: Plain) -> Tensor:
    def per_token(number: int) -> Tensor:
        differences = plain.old[number] - plain.sampled[number]
        return policy_of(plain, number) * differences.sum().exp().clamp(max=1.5)

    return token_weighted(plain, per_token)


def with_entropy(plain: Plain) -> Tensor:
    policy = torch.cat([policy_of(plain, number) for number in range(len(plain.advantages))])
    return policy.mean() - 0.2 * torch.cat(plain.entropies).mean()


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Plain], Tensor]]] = {
    "rloo": ({"algorithm": "rloo"}, whole),
    "k1": ({"beta": 0.3, "kl": "k1"}, with_kl(lambda d: -d)),
    "k2": ({"beta": 0.3, "kl": "k2"}, with_kl(lambda d: d**2 / 2)),
    "k3": ({"beta": 0.3, "kl": "k3"}, with_kl(lambda d: d.exp() - d - 1)),
    "longest": ({"weighting": "longest"}, longest),
    "teacher": ({"teacher": "x"}, taught(1.0)),
    "teacher, half": ({"teacher": "x", "teacher_weight": 0.5}, taught(0.5)),
    "importance of an answer": (
        {"importance": "sequence", "importance_cap": 1.5},
        with_sequence_importance,
    ),
    "entropy beside tokens": ({"algorithm": "bnpo", "entropy": 0.2}, with_entropy),
}


@pytest.mark.parametrize("shape", [SHAPES["a row each"], SHAPES["packed"]], ids=["rows", "packed"])
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradients_are_those_of_the_formula_under_plain_autograd(
    name: str, shape: StepRows
) -> None:
    settings, formula = FORMULAS[name]
    plain = Plain()
    if name == "importance of an answer":
        wobble = [0.2 * torch.cos(torch.arange(len(old)) + n) for n, old in enumerate(plain.old)]
        plain.sampled = [old - more for old, more in zip(plain.old, wobble, strict=True)]
    answers = [
        replace(answer, logprobs=floats(sampled))
        for answer, sampled in zip(answers_of(plain.entry), plain.sampled, strict=True)
    ]
    config = Config(**settings)
    is_scored = config.beta or config.teacher
    engine = wave_engine(config, DRAWN, LONGEST, SHIFT if is_scored else None)
    step = policy_step(engine, answers, shape)
    loss = formula(plain)
    assert step.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    expected = plain.gradients(loss)
    assert step.gradients.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(step.gradients[parameter], gradient, rtol=1e-4, atol=1e-6)


def test_a_divergence_in_the_reward_adds_nothing_to_the_loss() -> None:
    answers = answers_of(GOLDEN["cases"][0])
    shape = SHAPES["packed"]
    without = policy_step(wave_engine(Config(), DRAWN, LONGEST), answers, shape)
    config = Config(beta=0.3, kl_in="reward")
    got = policy_step(wave_engine(config, DRAWN, LONGEST, SHIFT), answers, shape)
    assert got.loss == pytest.approx(without.loss, abs=1e-7)
    assert got.metrics["kl"] > 0


def test_metrics_by_hand() -> None:
    plain = Plain()
    answers = answers_of(plain.entry)
    # The sampler's numbers differ by 0.25 and -0.5 on the first answer.
    shifted = floats(answers[0].logprobs + floats([0.25, -0.5, 0, 0, 0]))
    answers[0] = replace(answers[0], logprobs=shifted)
    config = Config(importance_cap=1.5)
    metrics = policy_step(wave_engine(config, DRAWN, LONGEST), answers, SHAPES["packed"]).metrics
    num_tokens = sum(len(answer.ids) for answer in answers)
    assert num_tokens == 27
    assert metrics["agreement/mean"] == pytest.approx(0.75 / num_tokens, abs=1e-6)
    assert metrics["agreement/cut"] == pytest.approx(1 / num_tokens)
    entropy = torch.cat(plain.entropies).mean()
    assert metrics["entropy"] == pytest.approx(float(entropy.detach()), abs=1e-5)
    ratios = [(p - old).exp() for p, old in zip(plain.log_probs, plain.old, strict=True)]
    low = sum(int((r < 0.8).sum()) for r, a in zip(ratios, plain.advantages, strict=True) if a < 0)
    high = sum(int((r > 1.2).sum()) for r, a in zip(ratios, plain.advantages, strict=True) if a > 0)
    assert low > 0
    assert high > 0
    assert metrics["clipped/low"] == pytest.approx(low / num_tokens)
    assert metrics["clipped/high"] == pytest.approx(high / num_tokens)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_microbatches_packing_and_empty_rows_change_nothing(algorithm: str) -> None:
    answers = answers_of(GOLDEN["cases"][4])
    config = Config.model_validate({"algorithm": algorithm, "beta": 0.2, "entropy": 0.1})
    results = [
        policy_step(wave_engine(config, DRAWN, LONGEST, SHIFT), answers, shape)
        for shape in (*SHAPES.values(), StepRows(64, 12, 3), StepRows(12, 3, 2))
    ]
    for step in results[1:]:
        assert step.loss == pytest.approx(results[0].loss, abs=1e-6)
        assert step.metrics == pytest.approx(results[0].metrics, abs=1e-5)
        for name, gradient in results[0].gradients.items():
            torch.testing.assert_close(step.gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_step_whose_answers_are_all_masked_has_a_loss_of_zero() -> None:
    answers = [replace(answer, has_loss=False) for answer in answers_of(GOLDEN["cases"][0])]
    for algorithm in ("grpo", "dapo", "dr_grpo"):
        config = Config(algorithm=algorithm, entropy=0.1)  # type: ignore[arg-type]
        step = policy_step(wave_engine(config, DRAWN, LONGEST), answers, SHAPES["packed"])
        assert step.loss == 0.0
        assert all(not gradient.any() for gradient in step.gradients.values())


def test_log_ratios_without_bounds_give_finite_numbers() -> None:
    answers = [
        replace(answer, old=answer.logprobs - 500.0, logprobs=answer.logprobs - 900.0)
        for answer in answers_of(GOLDEN["cases"][0])
    ]
    for settings in ({}, {"algorithm": "cispo"}, {"algorithm": "rloo"}, {"algorithm": "gspo"}):
        config = Config.model_validate({**settings, "importance": "sequence"})
        step = policy_step(wave_engine(config, DRAWN, LONGEST), answers, SHAPES["packed"])
        assert torch.isfinite(torch.tensor(step.loss))
        assert all(bool(gradient.isfinite().all()) for gradient in step.gradients.values())
