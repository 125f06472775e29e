"""The cases of a long-context plan: tasks, lengths, depths and samples come in, prompts with their
ids go out.

    task, length, depth, sample -> seed -> text that fills the length -> ids with the begin token, or
                                                                         in a chat template

A case leaves room for its answer. The same plan, tokenizer and files give the same cases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headway.eval.options import LongPlan
from headway.text import helmet, longbench, ruler
from headway.text.long_tasks import Case, Generator, find_task, fit, smallest
from headway.text.ruler_files import RulerFiles

FROM_FILES = frozenset((*ruler.NAMES, *longbench.NAMES, *helmet.NAMES))
"""Tasks whose prompts may change under the same plan, with the files that they are made of."""

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer


@dataclass(frozen=True)
class LongCase:
    """A case of a plan: its task, length and depth, and the prompt's ids."""

    task: str
    length: int
    depth: float
    """Of the plan. `case.depth` is the exact one, or None for a task without a depth."""
    case: Case
    ids: list[int]
    new_tokens: int
    """The most tokens that its answer may have."""


def make_cases(tokenizer: Tokenizer, plan: LongPlan) -> list[LongCase]:
    """The cases of a plan; each leaves room for its answer inside the length."""
    plan = plan.resolved()
    ids_of = prompts_of(tokenizer, plan)
    files = RulerFiles(plan.questions.ruler_data)
    cases: list[LongCase] = []
    choices: list[longbench.ChoiceQuestion] = []
    if plan.questions.longbench is not None and set(plan.tasks) & set(longbench.NAMES):
        choices = longbench.read_questions(plan.questions.longbench)
    for task in plan.tasks:
        if task in longbench.NAMES:
            cases += _longbench_cases(task, choices, tokenizer, plan, ids_of)
            continue
        if task in helmet.NAMES:
            cases += _helmet_cases(task, tokenizer, plan, ids_of)
            continue
        for length in plan.lengths:
            generator = _generator(task, length, tokenizer, files)
            for depth in plan.questions.depths:
                for sample in range(plan.questions.samples):
                    seed = (plan.questions.seed, length, depth, sample)
                    # The room for the answer must be known before the prompt is fitted to the rest.
                    answer_tokens = generator.answer_tokens
                    if answer_tokens is None:
                        shortest = smallest(task, depth, seed, generator)
                        answer_tokens = _answer_tokens(shortest, tokenizer)
                    case, _ = fit(
                        task,
                        lambda case: len(ids_of(case)),
                        length,
                        depth,
                        seed,
                        room=answer_tokens,
                        generator=generator,
                    )
                    cases.append(LongCase(task, length, depth, case, ids_of(case), answer_tokens))
    return cases


def _longbench_cases(
    task: str,
    choices: list[longbench.ChoiceQuestion],
    tokenizer: Tokenizer,
    plan: LongPlan,
    ids_of: Callable[[Case], list[int]],
) -> list[LongCase]:
    """Questions of one length class, cut to every length; as many as another task has cases."""
    number = len(plan.questions.depths) * plan.questions.samples
    questions = longbench.draw_questions(choices, task, number, plan.questions.seed)
    cases: list[LongCase] = []
    for length in plan.lengths:
        for question in questions:
            case = longbench.cut_case(
                question,
                length,
                tokenizer.encode,
                tokenizer.decode,
                lambda case: len(ids_of(case)),
            )
            cases.append(LongCase(task, length, 0.0, case, ids_of(case), longbench.ANSWER_TOKENS))
    return cases


def _helmet_cases(
    task: str, tokenizer: Tokenizer, plan: LongPlan, ids_of: Callable[[Case], list[int]]
) -> list[LongCase]:
    """Questions of HELMET at every length; as many as another task has cases."""
    folder = plan.questions.helmet
    assert folder is not None, "its tasks were refused without one"
    number = len(plan.questions.depths) * plan.questions.samples
    cases: list[LongCase] = []
    for length in plan.lengths:
        for question in helmet.read_questions(task, length, number, plan.questions.seed, folder):
            case = helmet.cut_case(
                question,
                task,
                length,
                tokenizer.encode,
                tokenizer.decode,
                lambda case: len(ids_of(case)),
            )
            new_tokens = helmet.answer_tokens(task)
            cases.append(LongCase(task, length, 0.0, case, ids_of(case), new_tokens))
    return cases


def _generator(task: str, length: int, tokenizer: Tokenizer, files: RulerFiles) -> Generator:
    """How cases of a task are made for a length."""
    if task in ruler.NAMES:
        return ruler.generator(task, length, lambda text: len(tokenizer.encode(text)), files)
    return Generator(find_task(task))


def prompts_in_words(tokenizer: Tokenizer, plan: LongPlan) -> str:
    """The form of the prompts, in words."""
    from headway.tokenizer.chat import expected_bos_ids

    if plan.questions.template is not None:
        return f"questions in chat template {plan.questions.template}"
    before = expected_bos_ids(tokenizer, plan.questions.bos)
    if before:
        return f"text after {tokenizer.decode(before)}"
    return "text with no begin token"


def prompts_of(tokenizer: Tokenizer, plan: LongPlan) -> Callable[[Case], list[int]]:
    """How a case becomes the ids of a prompt: plain text after the begin token, or a question in a
    chat and the answer's beginning.
    """
    from headway.tokenizer.chat import (
        Segment,
        Turn,
        encode_segments,
        expected_bos_ids,
        find_template,
    )

    if plan.questions.template is None:
        before = expected_bos_ids(tokenizer, plan.questions.bos)
        return lambda case: [*before, *tokenizer.encode(case.prompt)]

    template = find_template(plan.questions.template, tokenizer)

    def chat_prompt(case: Case) -> list[int]:
        # The assistant's turn is open and begins with the beginning of the answer, so that chat
        # models and others continue the same words.
        pieces = [*template.prompt([Turn("user", case.question)]), Segment(case.answer_start)]
        (rendered,) = encode_segments([pieces], template.name, tokenizer)
        if isinstance(rendered, Exception):
            raise rendered
        return rendered.ids.tolist()

    return chat_prompt


def _answer_tokens(case: Case, tokenizer: Tokenizer) -> int:
    """Room for the answers, with words between them."""
    answers = len(tokenizer.encode(" " + ", ".join(case.answers)))
    # A case with stop texts has one bare answer, which the stop ends.
    if case.stop:
        return answers + 2
    return answers + answers // 2 + 8


def prompts_key(cases: Sequence[LongCase]) -> str:
    """A hash of the ids of all prompts."""
    digest = hashlib.sha256()
    for case in cases:
        digest.update(np.asarray([len(case.ids), *case.ids], np.int64).tobytes())
    return digest.hexdigest()
