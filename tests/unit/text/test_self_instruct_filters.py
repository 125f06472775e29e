"""Seed tasks, prompts, answers, similarity and filters of self-instruct."""

import random
from itertools import product

import numpy as np
import pytest

from headway.text.self_instruct.filters import (
    MAX_SIMILARITY,
    KeptTask,
    SimilarityIndex,
    TaskFilter,
    tokens_of,
)
from headway.text.self_instruct.tasks import (
    LANGUAGES,
    InstructionTask,
    Language,
    load_seeds,
    make_prompt,
    parse_answer,
)


def slow_rouge_l(words: list[str], other: list[str]) -> float:
    table = np.zeros((len(words) + 1, len(other) + 1), dtype=int)
    for i, j in product(range(len(words)), range(len(other))):
        table[i + 1, j + 1] = (
            table[i, j] + 1 if words[i] == other[j] else max(table[i, j + 1], table[i + 1, j])
        )
    return 2 * table[-1, -1] / (len(words) + len(other))


@pytest.mark.parametrize("seed", range(5))
def test_similarity_to_all_kept_equals_the_textbook_table(seed: int) -> None:
    draw = random.Random(seed)
    texts = [
        [draw.choice("abcdefgh") for _ in range(draw.choice([1, 2, 7, 63, 64, 65, 150]))]
        for _ in range(25)
    ]
    index = SimilarityIndex()
    for count, text in enumerate(texts):
        np.testing.assert_allclose(
            index.scores(text), [slow_rouge_l(text, kept) for kept in texts[:count]], atol=1e-12
        )
        index.add(text)


def test_chinese_is_compared_per_character_and_english_per_word() -> None:
    assert tokens_of("写一首诗，2 行。", "zh") == list("写一首诗2行")
    assert tokens_of("Write a poem, 2 lines!", "en") == ["write", "a", "poem", "2", "lines"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_own_seed_tasks_pass_their_own_filters_one_after_another(language: Language) -> None:
    seeds = load_seeds(language)
    assert len(seeds) == 30
    judge = TaskFilter(language, [])
    verdicts = {seed.instruction: judge.judge(seed) for seed in seeds}
    assert {text: verdict for text, verdict in verdicts.items() if isinstance(verdict, str)} == {}


@pytest.mark.parametrize("language", LANGUAGES)
def test_tasks_written_like_the_examples_are_read_back(language: Language) -> None:
    seeds = load_seeds(language)
    prompt = make_prompt(seeds, language, per_request=20, seed=1, number=7)
    tasks, dropped = parse_answer(prompt, was_cut=False)
    assert len(tasks) == 3
    assert set(tasks) <= set(seeds)
    assert not dropped
    assert "<|4|>" in prompt
    assert "<|23|>" in prompt
    assert (
        make_prompt(seeds, language, 20, 1, 7) == prompt != make_prompt(seeds, language, 20, 1, 8)
    )


def test_answers_with_markdown_thoughts_and_cut_ends_are_read() -> None:
    answer = (
        "<think>\n<|1|>\nInstruction: no\nOutput: no\n</think>Sure!\n**<|4|>.**\n**Instruction:** Name two rivers.\n**Input:** <none>\n"
        "**Output:** Rhine\nElbe\n<|5|>\nnothing here\n<|6|>\nInstruction: Say it.\nInput: a\nb\nOutput: c\n<|7|>\nInstruction: half"
    )
    tasks, dropped = parse_answer(answer, was_cut=True)
    assert tasks == [
        InstructionTask("Name two rivers.", "", "Rhine\nElbe"),
        InstructionTask("Say it.", "a\nb", "c"),
    ]
    assert dropped == {"unreadable": 1, "cut off": 1}
    assert parse_answer("I cannot do that.", was_cut=False) == ([], {"no task in the answer": 1})
    assert parse_answer("", was_cut=True) == ([], {"no task in the answer": 1})


@pytest.mark.parametrize(
    ("language", "task", "reason"),
    [
        ("en", InstructionTask("Name three rivers", "", "x"), "too short"),
        ("en", InstructionTask("", "", "x"), "too short"),
        ("en", InstructionTask("word " * 151, "", "x"), "too long"),
        ("en", InstructionTask("'Tis what to do now", "", "x"), "begins with punctuation"),
        ("en", InstructionTask("Describe the picture in detail", "", "x"), "asks for media"),
        (
            "en",
            InstructionTask("Write an answer to this letter", "Dear [your name]", "x"),
            "placeholder",
        ),
        ("en", InstructionTask("Write an answer to this letter", "", "Dear ____,"), "placeholder"),
        ("en", InstructionTask("Write an answer to this letter", "", ""), "no output"),
        ("en", InstructionTask("请 写 一封 回信 给 他", "", "x"), "other language"),
        (
            "en",
            InstructionTask("List the capitals of northern Europe please", "", "x"),
            "too similar",
        ),
        ("zh", InstructionTask("写诗吧", "", "x"), "too short"),
        ("zh", InstructionTask("写" * 151, "", "x"), "too long"),
        ("zh", InstructionTask("，请写一首诗", "", "x"), "begins with punctuation"),
        ("zh", InstructionTask("描述这张图片的内容", "", "x"), "asks for media"),
        ("zh", InstructionTask("给【请填写姓名】写一封信", "", "x"), "placeholder"),
        ("zh", InstructionTask("Write a poem for me", "", "x"), "other language"),
        ("zh", InstructionTask("介绍北欧各国的首都吧", "", "x"), "too similar"),
    ],
)
def test_each_bad_task_is_dropped_for_its_reason(
    language: Language, task: InstructionTask, reason: str
) -> None:
    known = {"en": "List the capitals of northern Europe", "zh": "介绍北欧各国的首都"}
    assert TaskFilter(language, [InstructionTask(known[language], "", "x")]).judge(task) == reason


def test_a_kept_task_names_its_neighbours_and_joins_them() -> None:
    judge = TaskFilter(
        "en",
        [
            InstructionTask("List five green vegetables for soup", "", "x"),
            InstructionTask("Who wrote this sonnet about summer", "", "x"),
        ],
    )
    kept = judge.judge(InstructionTask("List five kinds of tree", "", "Oak"))
    assert isinstance(kept, KeptTask)
    scores = [2 * 2 / 11, 0.0]
    assert list(kept.most_similar.values()) == pytest.approx(scores, abs=1e-4)
    assert kept.avg_similarity == pytest.approx(sum(scores) / 2, abs=1e-4)
    assert max(kept.most_similar.values()) <= MAX_SIMILARITY
    assert judge.judge(InstructionTask("List five kinds of tree", "", "Elm")) == "too similar"


def test_limits_of_length_are_open_below_and_closed_above() -> None:
    assert isinstance(
        TaskFilter("en", []).judge(InstructionTask("Name three long rivers", "", "x")), KeptTask
    )
    assert isinstance(
        TaskFilter("en", []).judge(InstructionTask(" ".join(f"w{i}" for i in range(150)), "", "x")),
        KeptTask,
    )
    assert isinstance(TaskFilter("zh", []).judge(InstructionTask("写首小诗", "", "x")), KeptTask)
