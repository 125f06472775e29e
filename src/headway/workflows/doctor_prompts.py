"""`headway doctor data` of a recipe whose rows are sampled: a resolved recipe comes in; checks of its
prompts and rewards, a few prompts with what sampled answers earn, and how many of these prompts a
policy could learn from, go out.

Trains nothing and makes no run folder. Answers are sampled from the weights that the run would
start from; without any there are prompts alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from headway.data.open import OpenData
from headway.diagnose.check import Check
from headway.errors import HeadwayError
from headway.eval.rewards import open_reward_model
from headway.rewards.base import RewardAnswer
from headway.rewards.panel import RewardPanel
from headway.rollout.prompts import PromptSource, RolloutPrompt
from headway.runtime.device import choose_compute
from headway.train.resolve import Resolved

if TYPE_CHECKING:
    from headway.infer.generate import Generation

MOST_ANSWERS = 8
"""Sampled answers to a prompt that is shown, where a group of the run has more."""
MOST_WITHOUT_SIGNAL = 0.8
"""The share of prompts without signal above which the prompts do not suit the model."""
CUT = ("length", "context")
"""Why an answer ended that the model did not end."""


@dataclass(frozen=True)
class JudgedAnswer:
    """A sampled answer and what it earned."""

    text: str
    reward: float | None
    """None: no reward is configured."""
    parts: dict[str, float]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt as the model reads it, and answers to it."""

    number: int
    place: str
    tokens: int
    text: str
    answers: tuple[JudgedAnswer, ...] = ()
    has_signal: bool | None = None
    """Whether its answers earn different rewards, so that training on them teaches something; None
    without rewards.
    """


@dataclass(frozen=True)
class SampledSignal:
    """From how many of the prompts that are shown the model could learn."""

    prompts: int
    answers: int
    """To each of them; a group of the run may have more."""
    without_signal: float
    """The share of prompts whose answers all earn the same."""


@dataclass(frozen=True)
class PromptCheckup:
    """What was found in prompts and rewards."""

    checks: tuple[Check, ...]
    prompts: tuple[ShownPrompt, ...]
    signal: SampledSignal | None = None
    """None where no answers were sampled, or no reward scores them."""


def check_prompts(
    resolved: Resolved, data: OpenData, count: int, wanted: Sequence[int] = ()
) -> PromptCheckup:
    """The checks, and up to `count` prompts of the training data, spread over it."""
    sources = [member.selection.source for member in data.train]
    prompts = [
        prompt
        for source in sources
        if isinstance(source, PromptSource)
        for prompt in source.prompts
    ]
    checks = [_lengths(resolved, prompts), _repeats(prompts)]

    numbers = [number for number in wanted if number < len(prompts)]
    # Over all of it: data is often sorted, and its beginning then says little about the rest.
    if not wanted and count:
        numbers = np.unique(np.linspace(0, len(prompts) - 1, count).astype(np.int64)).tolist()
    shown = [_show(resolved, prompts, number) for number in numbers]
    try:
        answers = _sample(resolved, [prompts[number] for number in numbers])
        rewarded, check = _judge(resolved, prompts, numbers, answers)
    except HeadwayError as problem:
        checks.append(
            Check("rewards", "fail", str(problem), "Correct it; training would stop too.")
        )
        return PromptCheckup(tuple(checks), tuple(shown))

    checks.append(check)
    if not rewarded:
        return PromptCheckup(tuple(checks), tuple(shown))
    shown = [
        replace(prompt, answers=judged, has_signal=_has_signal(judged))
        for prompt, judged in zip(shown, rewarded, strict=True)
    ]
    signal = SampledSignal(
        len(shown), len(rewarded[0]), fmean(not prompt.has_signal for prompt in shown)
    )
    checks.append(_signal_check(signal, resolved.recipe.rollout.samples))
    return PromptCheckup(tuple(checks), tuple(shown), signal)


def _lengths(resolved: Resolved, prompts: Sequence[RolloutPrompt]) -> Check:
    lengths = [len(prompt.ids) for prompt in prompts]
    room = resolved.recipe.data.seq_len - resolved.recipe.rollout.max_new_tokens
    return Check(
        "prompts",
        "ok",
        f"{len(prompts):,} prompts of {min(lengths)} to {max(lengths)} tokens "
        f"(median {median(lengths):.0f}); {room} fit beside an answer of "
        f"{resolved.recipe.rollout.max_new_tokens}",
    )


def _repeats(prompts: Sequence[RolloutPrompt]) -> Check:
    """The same prompt twice may stand on both sides of a split."""
    counts = Counter(prompt.ids for prompt in prompts)
    repeated = sum(count - 1 for count in counts.values())
    if not repeated:
        return Check("repeated prompts", "ok", "no prompt is there twice")
    return Check(
        "repeated prompts",
        "warn",
        f"{repeated:,} of {len(prompts):,} prompts are there again",
        "Remove them: a held-out prompt that is also trained on measures nothing.",
    )


def _show(resolved: Resolved, prompts: Sequence[RolloutPrompt], number: int) -> ShownPrompt:
    tokenizer = resolved.tokenizer
    assert tokenizer is not None
    prompt = prompts[number]
    text = tokenizer.decode(list(prompt.ids), skip_special=False)
    return ShownPrompt(number, prompt.place, len(prompt.ids), text)


def _sample(resolved: Resolved, prompts: Sequence[RolloutPrompt]) -> list[list[Generation]]:
    """The answers to each prompt, drawn as the run draws them."""
    source = resolved.recipe.init.source
    if source is None or not prompts:
        return []
    from headway.infer.generate import GenerateOptions, generate_from_ids
    from headway.infer.load import load_model
    from headway.infer.sampling import Sampling

    compute = choose_compute(resolved.recipe.device, resolved.recipe.precision)
    loaded = load_model(source, device=compute.device, dtype=compute.dtype)
    rollout = resolved.recipe.rollout
    samples = min(rollout.samples, MOST_ANSWERS)
    options = GenerateOptions(
        max_new_tokens=rollout.max_new_tokens,
        sampling=Sampling(
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            seed=resolved.recipe.seed,
        ),
        rows=samples,
    )
    inputs = [
        (f"{prompt.place} {sample}", list(prompt.ids))
        for prompt in prompts
        for sample in range(samples)
    ]
    generations = generate_from_ids(loaded, inputs, options)
    return [generations[first : first + samples] for first in range(0, len(inputs), samples)]


def _judge(
    resolved: Resolved,
    prompts: Sequence[RolloutPrompt],
    numbers: Sequence[int],
    answers: Sequence[Sequence[Generation]],
) -> tuple[list[tuple[JudgedAnswer, ...]], Check]:
    """The answers with their rewards. Refuses records that a reward cannot read."""
    recipe = resolved.recipe
    if not recipe.reward:
        return [], Check("rewards", "ok", "none: the teacher judges answers token by token")
    with RewardPanel(recipe.reward, None, recipe.rollout.workers, open_reward_model) as panel:
        panel.check({name for prompt in prompts for name in prompt.record})
        names = ", ".join(panel.names)
        if not answers:
            return [], Check("rewards", "ok", f"{names}: the columns that they read are there")

        requests: list[RewardAnswer] = []
        for number, generations in zip(numbers, answers, strict=True):
            prompt = prompts[number]
            for generation in generations:
                requests.append(
                    RewardAnswer(
                        len(requests),
                        prompt.messages,
                        generation.text,
                        prompt.record,
                        tokens=len(generation.token_ids),
                        finished=generation.stopped_by not in CUT,
                    )
                )
        scores = panel.score(requests)
    judged = [
        JudgedAnswer(request.text, score.total, score.parts, score.problems)
        for request, score in zip(requests, scores, strict=True)
    ]
    samples = len(answers[0])
    groups = [tuple(judged[first : first + samples]) for first in range(0, len(judged), samples)]
    return groups, _verdict(names, groups)


def _has_signal(answers: Sequence[JudgedAnswer]) -> bool:
    """Whether an advantage, which compares answers to one prompt, is anything but 0."""
    return len({answer.reward for answer in answers}) > 1


def _signal_check(signal: SampledSignal, samples: int) -> Check:
    """Whether there is anything to learn from these prompts."""
    count = round(signal.without_signal * signal.prompts)
    detail = (
        f"{count} of {signal.prompts} prompts ({signal.without_signal:.0%}) without signal: all "
        f"{signal.answers} answers to each earn the same, which teaches nothing"
    )
    if samples > signal.answers:
        detail += f"; of {samples} answers, as in the run, fewer do"
    if signal.without_signal <= MOST_WITHOUT_SIGNAL:
        return Check("signal", "ok", detail)
    return Check(
        "signal",
        "warn",
        detail,
        "Look at more prompts (--samples 20). If most have none, choose easier or harder prompts, "
        "or a reward with more steps.",
    )


def _verdict(names: str, groups: Sequence[tuple[JudgedAnswer, ...]]) -> Check:
    """What the rewards of these few answers say about training."""
    answers = [answer for group in groups for answer in group]
    rewards = [answer.reward or 0.0 for answer in answers]
    detail = (
        f"{names}: {len(answers)} sampled answers to {len(groups)} prompts earn "
        f"{fmean(rewards):.3g} on average, {min(rewards):.3g} to {max(rewards):.3g}"
    )
    problems = [problem for answer in answers for problem in answer.problems]
    if problems:
        return Check(
            "rewards",
            "warn",
            f"{detail}; {len(problems)} could not be judged: {problems[0]}",
            "Look at the records and at the settings of the reward.",
        )
    return Check("rewards", "ok", detail)
