"""LongBench v2: multiple-choice questions about long texts, from its file.

Bai et al. 2024, "LongBench v2: Towards Deeper Understanding and Reasoning on Realistic Long-context
Multitasks", arXiv 2412.15204. The prompt (prompts/0shot.txt), the cut in the middle, the 128 tokens
of an answer and the way a choice is read are those of github.com/THUDM/LongBench (MIT, pred.py);
other words would give scores that cannot be compared. headway answers with the likeliest tokens,
where pred.py draws at temperature 0.1.

    data.json -> questions by length class (short, medium, long) -> prompt cut to a length -> Case
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.runtime.json_file import load_json
from headway.text.long_tasks import Case, check_group, cut_to_fit

GROUP = "longbench_v2"
"""The name for all length classes."""
CLASSES = ("short", "medium", "long")
NAMES = tuple(f"{GROUP}_{name}" for name in CLASSES)
ANSWER_TOKENS = 128
LARGEST_BYTES = 2**31
CHOICES = "ABCD"
TEXT_KEYS = ("context", "question", *(f"choice_{letter}" for letter in CHOICES))


@dataclass(frozen=True)
class ChoiceCase(Case):
    """A question with choices: one letter is right."""

    def score(self, text: str) -> float:
        """1 where the text says that the correct answer is the expected letter."""
        return float(chosen(text) == self.answers[0])


def chosen(text: str) -> str | None:
    """The letter that an answer names; None where it names none in the form asked for."""
    # Models write the letter in bold; pred.py removes the stars, too.
    plain = text.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        match = re.search(pattern, plain)
        if match:
            return match[1]
    return None


@dataclass(frozen=True)
class ChoiceQuestion:
    """One entry of the file."""

    length_class: str
    prompt: str
    answer: str

    def case(self, prompt: str) -> ChoiceCase:
        """With this prompt, whole or cut."""
        return ChoiceCase(prompt, (self.answer,), None)


def check(task: str, tasks: tuple[str, ...], file: Path | None) -> None:
    """Refuse an unknown name, no file, and a class that is asked for twice."""
    check_group(task, tasks, GROUP, NAMES, "LongBench v2")
    if file is None:
        raise ConfigError(
            f"--tasks holds {task}, which needs the file of LongBench v2. Give --longbench "
            "data.json."
        )


def read_questions(file: Path) -> list[ChoiceQuestion]:
    """All questions of the file."""
    try:
        entries = load_json(file, LARGEST_BYTES)
    except OSError as problem:
        raise ConfigError(f"{file}: cannot be read: {problem.strerror or problem}.") from None
    except ValueError as problem:
        raise ConfigError(f"{file}: not JSON: {' '.join(str(problem).split())[:200]}.") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: must be a list of questions, as data.json of LongBench v2 is.")
    return [_question(file, number, entry) for number, entry in enumerate(entries, 1)]


def _question(file: Path, number: int, entry: Any) -> ChoiceQuestion:
    where = f"{file}: question {number}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object.")
    for key in TEXT_KEYS:
        if not isinstance(entry.get(key), str):
            raise ConfigError(f"{where}: {key} must be a text.")
    if entry.get("length") not in CLASSES:
        raise ConfigError(f"{where}: length must be one of {', '.join(CLASSES)}.")
    if entry.get("answer") not in tuple(CHOICES):
        raise ConfigError(f"{where}: answer must be one of {', '.join(CHOICES)}.")

    choices = "".join(f"({letter}) {entry[f'choice_{letter}'].strip()}\n" for letter in CHOICES)
    prompt = (
        "Please read the following text and answer the question below.\n\n"
        f"<text>\n{entry['context'].strip()}\n</text>\n\n"
        f"What is the correct answer to this question: {entry['question'].strip()}\n"
        f"Choices:\n{choices}\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    return ChoiceQuestion(entry["length"], prompt, entry["answer"])


def draw_questions(
    questions: list[ChoiceQuestion], task: str, number: int, seed: int
) -> list[ChoiceQuestion]:
    """Questions of a task's class, in the order of the file; all where there are no more."""
    length_class = task.removeprefix(f"{GROUP}_")
    indices = [index for index, entry in enumerate(questions) if entry.length_class == length_class]
    if not indices:
        raise ConfigError(
            f"--tasks holds {task}, and the file of --longbench has no question of length "
            f"{length_class}. Leave the task out."
        )
    # By task, so that a class has the same questions whichever others are asked for.
    if number < len(indices):
        indices = sorted(random.Random(f"{task}-{seed}").sample(indices, number))
    return [questions[index] for index in indices]


def cut_case(
    question: ChoiceQuestion,
    length: int,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    count: Callable[[Case], int],
) -> Case:
    """The question in at most `length` tokens with room for its answer.

    A prompt that is too long keeps its two ends. `count` counts a case with all that stands around
    its prompt.
    """

    def cut(ids: list[int], keep: int) -> Case:
        half = keep // 2
        return question.case(decode(ids[:half]) + decode(ids[-half:]))

    case = cut_to_fit(
        question.case(question.prompt),
        lambda: encode(question.prompt),
        cut,
        count,
        length - ANSWER_TOKENS,
        2,
    )
    if case is None:
        raise ConfigError(
            f"--lengths holds {length}; {GROUP} needs more tokens for its {ANSWER_TOKENS} of "
            "an answer. Give a greater length."
        )
    return case
