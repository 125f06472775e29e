"""RULER's tasks beside RULER's own generators (tests/golden/ruler): the same seed and size give the same prompt, word for word."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from headway.text import ruler
from headway.text.long_tasks import Case
from headway.text.ruler_files import RulerFiles

GOLDEN = Path(__file__).parents[2] / "golden/ruler"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
CASES: list[dict[str, Any]] = EXPECTED["cases"]


def words_of(text: str) -> int:
    """Tokens, as the golden file counts them."""
    return len(text.split())


def lines_of_noise(text: str) -> int:
    return text.count(ruler.NOISE_LINE)


def written(expected: dict[str, Any]) -> Case:
    """The case of a task for the seed and the size with which RULER made its own."""
    files = RulerFiles(GOLDEN / "files")
    rng = random.Random(expected["seed"])
    size = expected["size"]
    if "question" in expected:
        # RULER takes the questions of a set in order; headway draws them first.
        questions = {"qa_1": files.squad, "qa_2": files.hotpot}[expected["task"]]
        return ruler.question_case(questions, expected["question"], rng, size)
    count = words_of
    if expected["task"] == "vt":
        # Fits the solved example to the golden's size.
        most = EXPECTED["example_lines"]
        count = lambda text: ruler.EXAMPLE_TOKENS + lines_of_noise(text) - most  # noqa: E731
    generator = ruler.generator(f"ruler_{expected['task']}", expected["length"], count, files)
    return generator.write(rng, size, 0.0)


@pytest.mark.parametrize("task", [name.removeprefix(ruler.PREFIX) for name in ruler.NAMES])
def test_prompts_and_answers_are_rulers_word_for_word(task: str) -> None:
    expected_cases = [case for case in CASES if case["task"] == task]
    assert len(expected_cases) in (6, 12)
    for expected in expected_cases:
        case = written(expected)
        assert case.prompt.startswith(expected["begin"])
        assert case.prompt.endswith(expected["end"])
        assert list(case.answers) == expected["answers"]
        assert hashlib.sha256(case.prompt.encode()).hexdigest() == expected["sha256"]


def test_the_solved_example_has_as_many_lines_as_rulers() -> None:
    assert lines_of_noise(ruler.chain_example(words_of)) == EXPECTED["example"]["lines"] == 22


def test_the_golden_file_has_every_task_in_two_sizes_and_three_seeds() -> None:
    kinds = {(case["task"], case["seed"], case["size"], case["length"]) for case in CASES}
    assert len(kinds) == len(CASES) == 6 * 11 + 12 * 2
    assert len({case["sha256"] for case in CASES}) == len(CASES)
