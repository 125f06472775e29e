"""LongBench v2: its prompt, the cut in the middle, the letter of an answer, damaged files."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.cli import main
from headway.errors import ConfigError
from headway.eval.long_cases import make_cases
from headway.eval.options import LongPlan, LongQuestions
from headway.text import longbench


def entry(number: int, length: str = "short", **changes: Any) -> dict[str, Any]:
    """A question as in data.json."""
    choices = {f"choice_{letter}": f" pick {letter} " for letter in "ABCD"}
    return {
        "_id": str(number),
        "question": f"Which one is {number}? ",
        "answer": "B",
        "length": length,
        "context": f" Begin {number}. " + "middle " * 400 + "End. ",
        **choices,
        **changes,
    }


def write(folder: Path, entries: Any) -> Path:
    """A file of questions."""
    file = folder / "data.json"
    file.write_text(json.dumps(entries))
    return file


def test_a_prompt_is_longbenchs_word_for_word(tmp_path: Path) -> None:
    (question,) = longbench.read_questions(write(tmp_path, [entry(1, context=" The text. ")]))
    assert question.prompt == (
        "Please read the following text and answer the question below.\n\n<text>\nThe text.\n</text>\n\n"
        "What is the correct answer to this question: Which one is 1?\nChoices:\n(A) pick A\n(B) pick B\n"
        '(C) pick C\n(D) pick D\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
    )


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is B**", "B"),
        ("The correct answer is A, no: The correct answer is (C)", "C"),
        ("the correct answer is (B)", None),
        ("B", None),
    ],
)
def test_the_letter_of_an_answer_is_read_as_longbench_reads_it(
    answer: str, letter: str | None
) -> None:
    assert longbench.chosen(answer) == letter
    case = longbench.ChoiceCase("", ("B",), None)
    assert case.score(answer) == (letter == "B")


@pytest.mark.parametrize("template", [None, "chatml"])
def test_long_texts_lose_their_middle_and_short_ones_nothing(
    tmp_path: Path, template: str | None
) -> None:
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    file = write(tmp_path, [entry(1), entry(2, context="Short.")])
    questions = LongQuestions((0.0,), samples=2, template=template, longbench=file)
    cut, whole = make_cases(tokenizer, LongPlan(("longbench_v2_short",), (1000,), questions))
    assert 1000 - 128 - 2 <= len(cut.ids) <= 1000 - 128
    assert cut.case.prompt.startswith("Please read the following text")
    assert cut.case.prompt.endswith('(insert answer here)".')
    assert "Begin 1." in cut.case.prompt
    assert "(A) pick A" in cut.case.prompt
    assert "<text>\nShort.\n</text>" in whole.case.prompt
    assert {case.new_tokens for case in (cut, whole)} == {128}


def test_questions_are_drawn_by_class_and_seed(tmp_path: Path) -> None:
    entries = [entry(number, ("short", "medium", "long")[number % 3]) for number in range(30)]
    questions = longbench.read_questions(write(tmp_path, entries))
    drawn = longbench.draw_questions(questions, "longbench_v2_long", 4, 0)
    assert len(drawn) == 4
    assert {question.length_class for question in drawn} == {"long"}
    assert longbench.draw_questions(questions, "longbench_v2_long", 4, 0) == drawn
    others = [longbench.draw_questions(questions, "longbench_v2_long", 4, seed) for seed in (1, 2)]
    assert any(other != drawn for other in others)
    whole = longbench.draw_questions(questions, "longbench_v2_long", 99, 0)
    assert whole == [question for question in questions if question.length_class == "long"]


def test_one_name_stands_for_all_classes(tmp_path: Path) -> None:
    questions = LongQuestions(longbench=write(tmp_path, []))
    assert LongPlan(("longbench_v2",), (1000,), questions).resolved().tasks == longbench.NAMES


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "must be a list of questions"),
        ([1], "question 1 must be an object"),
        ([entry(1), entry(2, context=3)], "question 2: context must be a text"),
        ([entry(1, length="tiny")], "length must be one of short, medium, long"),
        ([entry(1, answer="AB")], "answer must be one of A, B, C, D"),
        ([entry(1, length="long")], "has no question of length short"),
    ],
)
def test_a_damaged_file_of_questions_is_one_clear_line(
    tmp_path: Path, entries: Any, said: str
) -> None:
    questions = LongQuestions(longbench=write(tmp_path, entries))
    with pytest.raises(ConfigError) as refused:
        make_cases(byte_tokenizer(), LongPlan(("longbench_v2_short",), (1000,), questions))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (("longbench_v2_x",), "there are longbench_v2, longbench_v2_short"),
        (("longbench_v2_long",), "Give --longbench data.json"),
        (("longbench_v2_long", "longbench_v2"), "holds it already"),
    ],
)
def test_wrong_names_and_a_missing_file_are_refused(tasks: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LongPlan(tasks, (1000,))


def test_a_length_without_room_for_an_answer_is_refused(tmp_path: Path) -> None:
    questions = LongQuestions(longbench=write(tmp_path, [entry(1)]))
    with pytest.raises(ConfigError, match="--lengths holds 120; longbench_v2 needs more tokens"):
        make_cases(byte_tokenizer(), LongPlan(("longbench_v2_short",), (120,), questions))


def test_eval_long_answers_every_class_and_measures_again_when_the_file_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.eval.long_report.can_draw", lambda: False)
    model = write_model(tmp_path / "model", CONFIG.with_(max_seq_len=800))
    entries = [entry(number, ("short", "medium", "long")[number % 3]) for number in range(6)]
    out = tmp_path / "report"
    arguments = [
        "eval", "long", "--device", "cpu", "--model", str(model), "--tasks", "longbench_v2", "--lengths", "700", "--depths", "0",
        "--samples", "2", "--longbench", str(write(tmp_path, entries)), "--out", str(out), "--json",
    ]  # fmt: skip
    keys: list[str] = []
    for context in (None, None, "Another text. "):
        if context is not None:
            write(
                tmp_path,
                [entry(number, e["length"], context=context) for number, e in enumerate(entries)],
            )
        assert main(arguments) == 0
        printed = json.loads(capsys.readouterr().out)
        keys.append(json.loads((out / "parts/full.json").read_text())["key"])
    assert keys[0] == keys[1] != keys[2]
    cells = printed["variants"][0]["cells"]
    assert [(cell["task"], cell["cases"]) for cell in cells] == [
        ("longbench_v2_short", 2),
        ("longbench_v2_medium", 2),
        ("longbench_v2_long", 2),
    ]
    assert set(printed["critical"]) == set(longbench.NAMES)
    assert "| longbench_v2_medium | 0.000 |" in (out / "report.md").read_text()
