"""RULER's tasks, generated as its own generator does: prompts, sizes, answers and scores.

Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?",
arXiv 2404.06654. The prompts and sizes are those of github.com/NVIDIA/RULER (Apache-2.0), from
scripts/data/synthetic/constants.py, scripts/synthetic.yaml and the generators beside them, word for
word: other words would give scores that cannot be compared.

    name, length, files -> Generator -> (rng, units) -> Case

Random numbers are drawn in RULER's order, so the same state of a generator gives the same text.
What differs:

- each case is fitted to its length; RULER fits one, and uses its size for all cases of a length;
- each case draws its question of a question set; RULER takes them in order from the first;
- sentences of essays are cut by a plain rule (`ruler_files.sentences`);
- without word lists, needles are named by headway's own words.

The score is the share of the answers that the model's text holds, whatever their capitals
(`string_match_all`); of qa, whether it holds any of them (`string_match_part`).
"""

from __future__ import annotations

import math
import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headway.errors import ConfigError
from headway.text.long_tasks import Case, Generator, check_group, needle_of
from headway.text.ruler_files import (
    ADJECTIVE_LIST,
    ESSAYS,
    HOTPOT,
    NOUN_LIST,
    SQUAD,
    VERB_LIST,
    RulerFiles,
    RulerQuestions,
    sentences,
)

PREFIX = "ruler_"
GROUP = "ruler"
"""The name for all tasks whose files are there."""
SHUFFLE_SEED = 42
"""Of shuffles that are the same in every case: RULER's default seed."""
SHORT = 4096
"""Below this length lists of common words and their example are smaller."""

NOISE_LINE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
# numpy.linspace(0, 100, 40), rounded.
DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Places of needles in essays, in percent of the sentences."""


@dataclass(frozen=True)
class NeedleShape:
    """What is hidden in what."""

    haystack: str
    """noise, essay or needle."""
    key_kind: str = "words"
    value_kind: str = "numbers"
    """words, numbers or uuids."""
    keys: int = 1
    values: int = 1
    """Of each key."""
    queries: int = 1


NEEDLES = {
    "niah_single_1": NeedleShape("noise"),
    "niah_single_2": NeedleShape("essay"),
    "niah_single_3": NeedleShape("essay", value_kind="uuids"),
    "niah_multikey_1": NeedleShape("essay", keys=4),
    "niah_multikey_2": NeedleShape("needle"),
    "niah_multikey_3": NeedleShape("needle", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": NeedleShape("essay", values=4),
    "niah_multiquery": NeedleShape("essay", keys=4, queries=4),
}
FILES: dict[str, tuple[str, ...]] = {
    **{name: (ESSAYS,) for name, shape in NEEDLES.items() if shape.haystack == "essay"},
    "cwe": (NOUN_LIST, ADJECTIVE_LIST, VERB_LIST),
    "qa_1": (SQUAD,),
    "qa_2": (HOTPOT,),
}
"""What tasks cannot be made without; the others need no file."""
NAMES = tuple(f"{PREFIX}{name}" for name in (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2"))


def missing(task: str, folder: Path | None) -> list[str]:
    """The files that a task of `NAMES` needs and that are not in the folder."""
    files = RulerFiles(folder)
    return [name for name in FILES.get(task.removeprefix(PREFIX), ()) if not files.has(name)]


def check(task: str, tasks: Sequence[str], folder: Path | None) -> None:
    """Refuse an unknown name, a file that is not there, and a task that is asked for twice."""
    check_group(task, tasks, GROUP, NAMES, "RULER")
    absent = missing(task, folder)
    if absent:
        raise ConfigError(
            f"--tasks holds {task}, which needs {' and '.join(absent)} in the folder of "
            "--ruler-data."
        )


def available(folder: Path | None) -> list[str]:
    """The tasks that can be made."""
    return [name for name in NAMES if not missing(name, folder)]


def notes(tasks: Sequence[str], folder: Path | None) -> list[str]:
    """What is left out of the tasks asked for, and what is not as in RULER."""
    lines: list[str] = []
    left_out: dict[str, list[str]] = {}
    if GROUP in tasks:
        for name in NAMES:
            absent = missing(name, folder)
            if absent:
                left_out.setdefault(", ".join(absent), []).append(name)
    if left_out:
        reasons = "; ".join(
            f"{', '.join(names)} (no {absent})" for absent, names in left_out.items()
        )
        lines.append(
            f"RULER tasks left out: {reasons}. Put the files into a folder and give --ruler-data."
        )

    named = any(
        NEEDLES[short].key_kind == "words"
        for task in tasks
        for short in [task.removeprefix(PREFIX)]
        if short in NEEDLES
    )
    if (named or GROUP in tasks) and not RulerFiles(folder).has(ADJECTIVE_LIST, NOUN_LIST):
        lines.append(
            f"RULER's needles have names of headway's own words: no {ADJECTIVE_LIST} and "
            f"{NOUN_LIST} in --ruler-data."
        )
    return lines


def generator(task: str, length: int, count: Callable[[str], int], files: RulerFiles) -> Generator:
    """How cases of a task are made for a length in tokens; `count` counts those of a text."""
    name = task.removeprefix(PREFIX)
    # The last number of each: tokens of an answer, `tokens_to_generate` of constants.py. The one
    # before: the fewest units, here a place for each of four needles.
    if name in NEEDLES:
        return Generator(partial(write_needles, NEEDLES[name], files), 4, 128)
    if name == "vt":
        example = chain_example(count)
        return Generator(partial(write_chain, example), CHAIN, 30)
    if name == "cwe":
        # More words than the lists have come from the large one alone.
        most = max(len(files.listed_words), len(files.english_words))
        write = partial(write_common, files, length < SHORT)
        return Generator(write, 2 * COMMON, 120, most)
    if name == "fwe":
        # At least four words: the dots and the three that are asked for.
        vocabulary = max(4, (length - 50) // 50)
        return Generator(partial(write_frequent, vocabulary), 50, 50)
    if name == "qa_1":
        questions = files.squad
    else:
        questions = files.hotpot
    # All documents that answer a question must be in its text.
    fewest = max(len(question.documents) for question in questions.questions)
    return Generator(partial(write_question, questions), fewest, 32)


def _draw(rng: random.Random, kind: str, files: RulerFiles) -> str:
    """A key or a value."""
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        # Not uuid4(), which draws from the system and not from `rng`.
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return files.key_names[rng.randrange(len(files.key_names))]


def write_needles(
    shape: NeedleShape, files: RulerFiles, rng: random.Random, units: int, depth: float
) -> Case:
    """Needles in `units` lines of noise, words of essays, or other needles."""
    keys: list[str] = []
    values: list[list[str]] = []
    needles: list[str] = []
    for _ in range(shape.keys):
        keys.append(_draw(rng, shape.key_kind, files))
        values.append([])
        for _ in range(shape.values):
            values[-1].append(_draw(rng, shape.value_kind, files))
            needles.append(needle_of(shape.value_kind, keys[-1], values[-1][-1]))
    # Values of one key would otherwise stand next to each other, in the order of the answers.
    random.Random(SHUFFLE_SEED).shuffle(needles)

    if shape.haystack == "essay":
        context = _in_essays(files.essay_words, needles, rng, units)
    else:
        lines = [NOISE_LINE] * units
        if shape.haystack == "needle":
            lines = [
                needle_of(
                    shape.value_kind,
                    _draw(rng, shape.key_kind, files),
                    _draw(rng, shape.value_kind, files),
                )
                for _ in range(units)
            ]
        # From the last to the first, so that an insertion moves none that is still to come.
        indices = sorted(rng.sample(range(units), len(needles)), reverse=True)
        for index, line in zip(indices, needles, strict=True):
            lines.insert(index, line)
        context = "\n".join(lines)

    # Drawn after the haystack, as in RULER: the order of draws decides the text.
    asked = rng.sample(range(shape.keys), shape.queries)
    names = [keys[index] for index in asked]
    query = names[0]
    if len(names) > 1:
        query = f"{', '.join(names[:-1])}, and {names[-1]}"
    noun = shape.value_kind
    if shape.queries * shape.values > 1:
        opening = f"Some special magic {noun} are hidden"
        question = f"What are all the special magic {noun}"
        verb = "are"
    else:
        noun = noun.removesuffix("s")
        opening = f"A special magic {noun} is hidden"
        question = f"What is the special magic {noun}"
        verb = "is"
    start = f" The special magic {noun} for {query} mentioned in the provided text {verb}"
    return Case(
        f"{opening} within the following text. Make sure to memorize it. I will quiz you about the "
        f"{noun} afterwards.\n{context}\n{question} for {query} mentioned in the provided text?"
        f"{start}",
        tuple(value for index in asked for value in values[index]),
        None,
        answer_start=start,
    )


def _in_essays(words: list[str], needles: list[str], rng: random.Random, number: int) -> str:
    """The first words of the essays, which repeat when they end, with needles between sentences."""
    repeats = math.ceil(number / len(words))
    lines = sentences(" ".join((words * repeats)[:number]))
    ends = sorted(int(len(lines) * (depth / 100)) for depth in rng.sample(DEPTHS, len(needles)))

    parts: list[str] = []
    before = 0
    for end, needle in zip(ends, needles, strict=True):
        parts += [" ".join(lines[before:end]), needle]
        before = end
    parts.append(" ".join(lines[before:]))
    return " ".join(parts)


HOPS = 4
CHAIN = HOPS + 1
"""Variables of the chain."""
EXAMPLE_TOKENS = 500
"""Of the solved chain that stands before the question, at most."""
EXAMPLE_LINES = 5
"""Lines of noise of the smallest example."""
EXAMPLE_VALUE = "12345"


def _chain_text(rng: random.Random, units: int, letters: int, value: str | None) -> Case:
    """A chain of assignments among `units` lines of noise; value None: drawn."""
    # Where two are equal all are drawn again: RULER's chain would then assign one name twice.
    names = ["".join(rng.choices(string.ascii_uppercase, k=letters)) for _ in range(CHAIN)]
    while len(set(names)) < CHAIN:
        names = ["".join(rng.choices(string.ascii_uppercase, k=letters)) for _ in range(CHAIN)]
    if value is None:
        value = str(rng.randrange(10000, 99999))
    chain = [f"VAR {names[0]} = {value}"]
    # The blank at the end is RULER's.
    chain += [f"VAR {names[hop + 1]} = VAR {names[hop]} " for hop in range(HOPS)]

    lines = [NOISE_LINE] * units
    # In order, because a variable is assigned before it is used; each insertion moves the next
    # index by one.
    indices = sorted(rng.sample(range(units), CHAIN))
    for num_inserted, (index, assignment) in enumerate(zip(indices, chain, strict=True)):
        lines.insert(index + num_inserted, assignment)
    context = "\n".join(lines).replace(". \n", ".\n")

    start = (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{CHAIN} variables are assigned the value {value}, they are: "
    )
    return Case(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
        f"above.{start}",
        tuple(names),
        None,
        answer_start=start,
    )


def chain_example(count: Callable[[str], int]) -> str:
    """A solved chain of at most `EXAMPLE_TOKENS` tokens, in three-letter names."""
    largest = EXAMPLE_LINES
    low = EXAMPLE_LINES
    high = EXAMPLE_TOKENS
    while low <= high:
        middle = (low + high) // 2
        # One state of the generator for all sizes: they differ in their lines of noise alone.
        case = _chain_text(random.Random(SHUFFLE_SEED), middle, 3, EXAMPLE_VALUE)
        if count(case.prompt) <= EXAMPLE_TOKENS:
            largest = middle
            low = middle + 1
        else:
            high = middle - 1
    case = _chain_text(random.Random(SHUFFLE_SEED), largest, 3, EXAMPLE_VALUE)
    return f"{case.prompt} {' '.join(case.answers)}\n"


def write_chain(example: str, rng: random.Random, units: int, depth: float) -> Case:
    """Variable tracking: one chain of four hops in noise, after a solved example."""
    case = _chain_text(rng, units, 5, None)
    # The example has other names and another number in every case.
    for name in example.split()[-CHAIN:]:
        # As long as before, so that the example keeps about its number of tokens.
        other = "".join(rng.choices(string.ascii_uppercase, k=len(name)))
        example = example.replace(name, other)
    example = example.replace(EXAMPLE_VALUE, str(rng.randrange(10000, 99999)))
    return Case(f"{example}\n{case.prompt}", case.answers, None, answer_start=case.answer_start)


COMMON = 10
"""Words to find in a list."""


def _word_list(
    rng: random.Random, files: RulerFiles, number: int, common_repeats: int, rare_repeats: int
) -> tuple[str, list[str]]:
    """The text of a numbered list, and its common words."""
    words = _shuffled(files)
    if number > len(words):
        words = files.english_words
    if number > len(words):
        raise ConfigError(
            f"{PREFIX}cwe needs {number} different words at this length; the lists in --ruler-data "
            f"have {max(len(words), len(files.listed_words))}. Put english_words.json there, or "
            "give a smaller length."
        )
    # The first ten drawn are the common ones; the shuffle below hides their order.
    drawn = rng.sample(words, number)
    common = drawn[:COMMON]
    listed = common * common_repeats + drawn[COMMON:] * rare_repeats
    random.Random(SHUFFLE_SEED).shuffle(listed)
    return _numbered(listed), common


def _shuffled(files: RulerFiles) -> list[str]:
    words = list(files.listed_words)
    random.Random(SHUFFLE_SEED).shuffle(words)
    return words


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def write_common(
    files: RulerFiles, short: bool, rng: random.Random, units: int, depth: float
) -> Case:
    """Common words: `units` different words, ten of which occur ten times as often (six times where
    the text is short), after a solved example."""
    if short:
        example, solution = _word_list(rng, files, 20, 3, 1)
        text, common = _word_list(rng, files, units, 6, 1)
    else:
        example, solution = _word_list(rng, files, 40, 10, 3)
        text, common = _word_list(rng, files, units, 30, 3)
    opening = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    question = "\nQuestion: What are the 10 most common words in the above list?"
    start = " Answer: The top 10 words that appear most often in the list are:"
    return Case(
        f"{opening}{example}{question}{start} {_numbered(solution)}\n"
        f"{opening}{text}{question}{start}",
        tuple(common),
        None,
        answer_start=start,
    )


CODED_LETTERS = 6
CODED_ANSWERS = 3
ZETA_OF_2 = math.pi**2 / 6


def write_frequent(vocabulary: int, rng: random.Random, units: int, depth: float) -> Case:
    """Frequent words: made-up words of which the one of rank k occurs about units / (zeta(2) k^2)
    times; the first is shown as dots, and the next three are asked for."""
    drawn: set[str] = set()
    while len(drawn) < vocabulary:
        drawn.add("".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS)))
    # A set has another order in every process.
    words = sorted(drawn)
    random.Random(SHUFFLE_SEED).shuffle(words)
    # The most frequent word stands for noise, as in RULER; the question says to ignore it.
    words[0] = "..."

    coded: list[str] = []
    for rank, word in enumerate(words, 1):
        coded += [word] * int(units * rank**-2.0 / ZETA_OF_2)
    random.Random(SHUFFLE_SEED).shuffle(coded)
    start = (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    return Case(
        "Read the following coded text and track the frequency of each coded word. Find the three "
        f"most frequently appeared coded words. {' '.join(coded)}\nQuestion: Do not provide any "
        "explanation. Please ignore the dots '....'. What are the three most frequently appeared "
        f"words in the above coded text?{start}",
        tuple(words[1 : 1 + CODED_ANSWERS]),
        None,
        answer_start=start,
    )


def write_question(questions: RulerQuestions, rng: random.Random, units: int, depth: float) -> Case:
    """A question of the set about `units` documents, its own among them."""
    index = rng.randrange(len(questions.questions))
    return question_case(questions, index, rng, units)


def question_case(questions: RulerQuestions, index: int, rng: random.Random, units: int) -> Case:
    """One question of the set."""
    asked = questions.questions[index]
    documents = questions.documents
    gold = list(asked.documents)
    related = list(asked.related)
    # The distractors of its own article come first, as in RULER; others fill up the rest.
    if units < len(documents):
        if units - len(gold) > len(related):
            taken = {*gold, *related}
            others = [index for index in range(len(documents)) if index not in taken]
            indices = gold + related + rng.sample(others, units - len(gold) - len(related))
        else:
            indices = gold + rng.sample(related, units - len(gold))
        chosen = [documents[index] for index in indices]
    else:
        # A text longer than the whole set repeats its documents.
        repeats = math.ceil(units / len(documents))
        chosen = (list(documents) * repeats)[:units]
    random.Random(SHUFFLE_SEED).shuffle(chosen)

    context = "\n\n".join(
        f"Document {number}:\n{document}" for number, document in enumerate(chosen, 1)
    )
    rule = (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words.\n\n"
    )
    start = " Answer:"
    return Case(
        f"{rule}The following are given documents.\n\n{context}\n\n{rule}Question: {asked.query}"
        f"{start}",
        asked.answers,
        None,
        answer_start=start,
        any_answer=True,
    )
