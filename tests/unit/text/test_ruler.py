"""RULER's tasks: shapes and sizes as RULER's generator gives them, lengths, scores, files that are missing or wrong."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.text import ruler
from headway.text.long_tasks import Case, fit
from headway.text.ruler_files import KeyNames, RulerFiles, RulerQuestion, RulerQuestions, sentences

FREE = [
    "ruler_niah_single_1",
    "ruler_niah_multikey_2",
    "ruler_niah_multikey_3",
    "ruler_vt",
    "ruler_fwe",
]
NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.(?=\s)")
# Of each task: needles in the text (None: as many as its lines), answers, and the beginning of the prompt.
NEEDLES = {
    "ruler_niah_single_1": (1, 1, "A special magic number is hidden within"),
    "ruler_niah_single_2": (1, 1, "A special magic number is hidden within"),
    "ruler_niah_single_3": (1, 1, "A special magic uuid is hidden within"),
    "ruler_niah_multikey_1": (4, 1, "A special magic number is hidden within"),
    "ruler_niah_multikey_2": (None, 1, "A special magic number is hidden within"),
    "ruler_niah_multikey_3": (None, 1, "A special magic uuid is hidden within"),
    "ruler_niah_multivalue": (4, 4, "Some special magic numbers are hidden within"),
    "ruler_niah_multiquery": (4, 4, "Some special magic numbers are hidden within"),
}


def words_of(text: str) -> int:
    """Tokens, for these tests."""
    return len(text.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RULER's files, small."""
    place = tmp_path_factory.mktemp("ruler")
    text = " ".join(f"Essay line {index} has words\n and more of them." for index in range(50))
    (place / "PaulGrahamEssays.json").write_text(json.dumps({"text": text}))
    for kind in ("noun", "adjective", "verb"):
        lines = "".join(f"{kind}{index}\n" for index in range(2000))
        (place / f"{kind}list.txt").write_text(lines)
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {part} of article {article}.",
                    "qas": [
                        {
                            "question": f"Where is {article}-{part}?",
                            "is_impossible": False,
                            "answers": [{"text": f"Paragraph {part}"}, {"text": "here"}],
                        },
                        {"question": "No answer?", "is_impossible": True, "answers": []},
                    ],
                }
                for part in range(3)
            ]
        }
        for article in range(4)
    ]
    (place / "squad.json").write_text(json.dumps({"data": articles}))
    hotpot = [
        {
            "question": f"Who is {index}?",
            "answer": f"person {index}",
            "context": [[f"Title {index} {part}", ["A line.", " More."]] for part in range(10)],
        }
        for index in range(5)
    ]
    (place / "hotpotqa.json").write_text(json.dumps(hotpot))
    return place


def written(task: str, folder: Path | None, seed: int = 0, units: int = 60) -> Case:
    generator = ruler.generator(task, 4096, words_of, RulerFiles(folder))
    return generator.write(random.Random(seed), units, 0.0)


def test_without_files_five_tasks_are_made_and_with_them_thirteen(folder: Path) -> None:
    assert ruler.available(None) == FREE
    assert ruler.available(folder) == list(ruler.NAMES)
    assert len(ruler.NAMES) == 13


@pytest.mark.parametrize("task", NEEDLES)
def test_needles_are_as_many_as_rulers_and_hold_the_answers(folder: Path, task: str) -> None:
    needles, answers, opening = NEEDLES[task]
    units = 60
    case = written(task, folder, units=units)
    found = NEEDLE.findall(case.prompt)
    assert len(found) == (units + 1 if needles is None else needles)
    assert len(case.answers) == answers
    assert case.prompt.startswith(opening)
    asked = case.answer_start.split(" for ")[1].split(" mentioned")[0]
    queries = asked.replace("and ", "").split(", ")
    by_key: dict[str, list[str]] = {}
    for _, key, value in found:
        by_key.setdefault(key, []).append(value)
    assert sorted(case.answers) == sorted(value for key in queries for value in by_key[key])


def test_a_prompt_without_files_is_rulers_word_for_word() -> None:
    case = written("ruler_niah_single_1", None, units=4)
    (key,) = {key for _, key, _ in NEEDLE.findall(case.prompt)}
    (value,) = case.answers
    noise = (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    lines = case.prompt.split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert Counter(lines[1:-1]) == {
        noise: 4,
        f"One of the special magic numbers for {key} is: {value}.": 1,
    }
    assert lines[-1] == (
        f"What is the special magic number for {key} mentioned in the provided text? The special "
        f"magic number for {key} mentioned in the provided text is"
    )


def test_variable_tracking_has_one_chain_of_four_hops_after_a_solved_example() -> None:
    case = written("ruler_vt", None)
    example, asked = case.prompt.split("\n\nMemorize")
    value = re.findall(r"the value (\d+)", asked)[0]
    held: list[str] = []
    for name, assigned in re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", asked):
        assert assigned == (held[-1] if held else value)
        held.append(name)
    assert tuple(held) == case.answers
    assert len(held) == 5
    assert len(example.rsplit("they are: ", 1)[1].split()) == 5
    assert words_of(example) <= ruler.EXAMPLE_TOKENS + 5
    assert example != written("ruler_vt", None, seed=1).prompt.split("\n\nMemorize")[0]


@pytest.mark.parametrize(("length", "common", "rare"), [(2048, 6, 1), (4096, 30, 3)])
def test_common_words_occur_as_often_as_rulers(
    folder: Path, length: int, common: int, rare: int
) -> None:
    generator = ruler.generator("ruler_cwe", length, words_of, RulerFiles(folder))
    case = generator.write(random.Random(0), 50, 0.0)
    listed = case.prompt.rsplit("most often.\n", 1)[1].split("\n")[0]
    counts = Counter(re.findall(r"\d+\. (\S+)", listed))
    assert len(counts) == 50
    assert {word for word, number in counts.items() if number == common} == set(case.answers)
    assert sorted(set(counts.values())) == [rare, common]


def test_more_common_words_than_the_lists_have_need_the_large_list(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs 7000 different words .* have 6000.*english_words"
    ):
        written("ruler_cwe", folder, units=7000)


def test_a_length_that_the_words_cannot_fill_is_refused_and_one_just_below_is_not(
    tmp_path: Path,
) -> None:
    for kind in ("noun", "adjective", "verb"):
        lines = "".join(f"{kind}{index}\n" for index in range(100))
        (tmp_path / f"{kind}list.txt").write_text(lines)

    def fitted(length: int) -> Case:
        generator = ruler.generator("ruler_cwe", length, words_of, RulerFiles(tmp_path))
        case, _ = fit(
            "ruler_cwe",
            # Long texts have more tokens per word than the short ones that estimates start from.
            lambda case: words_of(case.prompt) + max(0, words_of(case.prompt) - 1500),
            length,
            0.0,
            (0,),
            generator=generator,
        )
        return case

    assert words_of(fitted(4100).prompt) > 2600
    with pytest.raises(ConfigError, match=r"ruler_cwe fills only \d+ tokens with the files"):
        fitted(8000)


def test_frequent_words_fall_with_the_square_of_their_rank() -> None:
    case = written("ruler_fwe", None, units=1000)
    coded = case.prompt.split("appeared coded words. ", 1)[1].split("\nQuestion")[0]
    counts = Counter(coded.split())
    assert [word for word, _ in counts.most_common(4)] == ["...", *case.answers]
    assert [number for _, number in counts.most_common(4)] == [607, 151, 67, 37]


def test_questions_are_asked_among_documents_that_hold_their_answer(folder: Path) -> None:
    for task, own in (("ruler_qa_1", 1), ("ruler_qa_2", 10)):
        case = written(task, folder, units=11)
        assert len(re.findall(r"Document \d+:\n", case.prompt)) == 11
        question = case.prompt.rsplit("Question: ", 1)[1]
        number = re.findall(r"\d+", question)
        if own == 1:
            assert f"Paragraph {number[1]} of article {number[0]}." in case.prompt
            assert "No answer" not in case.prompt
        else:
            assert all(f"Title {number[0]} {part}\n" in case.prompt for part in range(own))


def test_a_question_takes_its_article_first_and_repeats_documents_when_they_end() -> None:
    asked = RulerQuestion("?", ("a",), (1,), (0, 2))
    questions = RulerQuestions((asked,), ("d0", "d1", "d2", "d3", "d4"))

    def documents(units: int) -> list[str]:
        case = ruler.question_case(questions, 0, random.Random(0), units)
        return sorted(re.findall(r"Document \d+:\n(\w+)", case.prompt))

    assert documents(1) == ["d1"]
    assert documents(3) == ["d0", "d1", "d2"]
    assert documents(7) == ["d0", "d0", "d1", "d1", "d2", "d3", "d4"]


def test_scores_are_the_share_of_answers_and_of_questions_any_answer(folder: Path) -> None:
    case = Case("", ("One", "two"), None)
    assert [case.score(text) for text in ("ONE and Two", "two", "three")] == [1.0, 0.5, 0.0]
    case = written("ruler_qa_1", folder, units=2)
    assert len(case.answers) == 2
    assert case.score("it is HERE") == 1.0
    assert case.score("elsewise") == 0.0


@pytest.mark.parametrize("task", ruler.NAMES)
def test_cases_fill_their_length_with_room_for_the_answer_and_follow_their_seed(
    folder: Path, task: str
) -> None:
    generator = ruler.generator(task, 3000, words_of, RulerFiles(folder))
    assert generator.answer_tokens is not None

    def fitted(seed: int) -> tuple[Case, int]:
        return fit(
            task,
            lambda case: words_of(case.prompt),
            3000,
            0.5,
            (seed,),
            room=generator.answer_tokens or 0,
            generator=generator,
        )

    case, tokens = fitted(1)
    assert tokens == words_of(case.prompt)
    assert 0.9 * 3000 <= tokens + generator.answer_tokens <= 3000
    assert fitted(1)[0] == case
    assert fitted(2)[0] != case


def test_names_of_needles_are_sorted_as_one_list() -> None:
    adjectives = ["tall", "teeny-tiny", "teeny", "tidy"]
    nouns = ["ant", "zebra", "tip", "tree"]
    names = KeyNames(adjectives, nouns)
    expected = sorted(f"{first}-{noun}" for first in adjectives for noun in nouns)
    assert [names[index] for index in range(len(names))] == expected


def test_sentences_end_at_a_stop_and_keep_quotes() -> None:
    assert sentences('He said "no." Then? Yes') == ['He said "no."', "Then?", "Yes"]


def test_what_is_left_out_is_said_in_one_line(folder: Path, tmp_path: Path) -> None:
    left_out, names = ruler.notes([ruler.GROUP], None)
    assert left_out.startswith("RULER tasks left out: ruler_niah_single_2, ruler_niah_single_3")
    assert "ruler_qa_1 (no squad.json)" in left_out
    assert "\n" not in left_out
    assert "headway's own words" in names
    assert ruler.notes([ruler.GROUP], folder) == []
    assert ruler.notes(["key_value"], None) == []


@pytest.mark.parametrize(
    ("name", "content", "task", "said"),
    [
        ("squad.json", "[]", "ruler_qa_1", "not questions of SQuAD 2.0"),
        ("squad.json", '{"data": []}', "ruler_qa_1", "holds no question"),
        ("hotpotqa.json", "{", "ruler_qa_2", "not JSON"),
        ("hotpotqa.json", '[{"question": 1}]', "ruler_qa_2", "not questions of HotpotQA"),
        ("PaulGrahamEssays.json", '{"text": " "}', "ruler_niah_single_2", "must be an object"),
    ],
)
def test_a_damaged_file_is_one_clear_line(
    tmp_path: Path, name: str, content: str, task: str, said: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as refused:
        written(task, tmp_path)
    assert said in str(refused.value)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)
