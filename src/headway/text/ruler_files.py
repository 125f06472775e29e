"""Texts that tasks of RULER are made of: a folder of files comes in, words, essays and questions
go out.

The files have the names and forms that RULER's own scripts download (github.com/NVIDIA/RULER,
scripts/data/synthetic/json); its word lists are those of the package `wonderwords`. headway ships
none of them.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.config.regular_file import regular_only
from headway.errors import ConfigError
from headway.runtime.json_file import load_json
from headway.text.long_tasks import ADJECTIVES, NOUNS

ESSAYS = "PaulGrahamEssays.json"
NOUN_LIST = "nounlist.txt"
ADJECTIVE_LIST = "adjectivelist.txt"
VERB_LIST = "verblist.txt"
ENGLISH_WORDS = "english_words.json"
SQUAD = "squad.json"
HOTPOT = "hotpotqa.json"
SENTENCE_END = re.compile(r"(?<=[.!?])([\"')\]]*) ")


@dataclass(frozen=True)
class RulerQuestion:
    """A question about documents."""

    query: str
    answers: tuple[str, ...]
    """Any of them is right."""
    documents: tuple[int, ...]
    """Those that come first: they hold the answer."""
    related: tuple[int, ...] = ()
    """Distractors that are taken before others."""


@dataclass(frozen=True)
class RulerQuestions:
    """A question set and the documents of all its questions."""

    questions: tuple[RulerQuestion, ...]
    documents: tuple[str, ...]


class KeyNames:
    """All names `adjective-noun`, sorted, without a list of the millions of them."""

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        # Names of `teeny` and `teeny-tiny` stand among each other; other adjectives' do not mix.
        self._blocks: list[list[str]] = []
        for adjective in sorted(set(adjectives), key=lambda word: f"{word}-"):
            if self._blocks and f"{adjective}-".startswith(f"{self._blocks[-1][0]}-"):
                self._blocks[-1].append(adjective)
            else:
                self._blocks.append([adjective])
        sizes = [len(block) * len(self._nouns) for block in self._blocks]
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        number = bisect.bisect_right(self._ends, index)
        block = self._blocks[number]
        within = index - (self._ends[number] - len(block) * len(self._nouns))
        if len(block) == 1:
            return f"{block[0]}-{self._nouns[within]}"
        return sorted(f"{first}-{noun}" for first in block for noun in self._nouns)[within]


@dataclass(frozen=True)
class RulerFiles:
    """The folder, or None; a file is read when it is first needed."""

    folder: Path | None

    def has(self, *names: str) -> bool:
        """Whether all of these are there."""
        return self.folder is not None and all((self.folder / name).is_file() for name in names)

    def file(self, name: str) -> Path:
        """A file of the folder."""
        assert self.folder is not None
        return self.folder / name

    @cached_property
    def essay_words(self) -> list[str]:
        """The words of all essays."""
        path = self.file(ESSAYS)
        content = _json(path)
        if not isinstance(content, dict) or not str(content.get("text", "")).strip():
            raise ConfigError(f'{path}: must be an object {{"text": "..."}} with all essays.')
        return str(content["text"]).split()

    @cached_property
    def key_names(self) -> KeyNames:
        """The names of needles; of headway's own words without the lists."""
        if not self.has(ADJECTIVE_LIST, NOUN_LIST):
            return KeyNames(ADJECTIVES, NOUNS)
        return KeyNames(_lines(self.file(ADJECTIVE_LIST)), _lines(self.file(NOUN_LIST)))

    @cached_property
    def listed_words(self) -> list[str]:
        """All nouns, adjectives and verbs, sorted."""
        names = (NOUN_LIST, ADJECTIVE_LIST, VERB_LIST)
        return sorted({word for name in names for word in _lines(self.file(name))})

    @cached_property
    def english_words(self) -> list[str]:
        """A larger list, for texts with more words than `listed_words`; empty without its file."""
        if not self.has(ENGLISH_WORDS):
            return []
        path = self.file(ENGLISH_WORDS)
        content = _json(path)
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: must be an object whose values are words.")
        return [str(word) for word in content.values()]

    @cached_property
    def squad(self) -> RulerQuestions:
        """SQuAD 2.0; a question's paragraph, and the others of its article as related ones."""
        path = self.file(SQUAD)
        content = _json(path)
        try:
            articles = [
                [str(part["context"]) for part in entry["paragraphs"]] for entry in content["data"]
            ]
            # Without repeats and sorted, as in RULER: draws of other documents go by their number.
            documents = sorted({text for article in articles for text in article})
            index_of = {text: index for index, text in enumerate(documents)}
            questions = [
                question
                for entry, article in zip(content["data"], articles, strict=True)
                for question in _squad_questions(entry, [index_of[text] for text in article])
            ]
        except (KeyError, TypeError) as problem:
            raise ConfigError(f"{path}: not questions of SQuAD 2.0: {problem!r}.") from None
        return _question_set(path, questions, documents)

    @cached_property
    def hotpot(self) -> RulerQuestions:
        """HotpotQA with distractors; a question's documents are all ten of its context."""
        path = self.file(HOTPOT)
        content = _json(path)
        try:
            contexts = [
                [f"{title}\n{''.join(lines)}" for title, lines in entry["context"]]
                for entry in content
            ]
            documents = sorted({text for context in contexts for text in context})
            index_of = {text: index for index, text in enumerate(documents)}
            questions = [
                RulerQuestion(
                    str(entry["question"]),
                    (str(entry["answer"]),),
                    tuple(index_of[text] for text in context),
                )
                for entry, context in zip(content, contexts, strict=True)
            ]
        except (KeyError, TypeError, ValueError) as problem:
            raise ConfigError(f"{path}: not questions of HotpotQA: {problem!r}.") from None
        return _question_set(path, questions, documents)


def _squad_questions(entry: Mapping[str, Any], article: list[int]) -> Iterator[RulerQuestion]:
    """The questions of an article that have an answer. `article`: the document number of each
    paragraph."""
    for part, document in zip(entry["paragraphs"], article, strict=True):
        related = tuple(other for other in article if other != document)
        for question in part["qas"]:
            # SQuAD 2.0 has questions without an answer, to which no text would be right.
            if question["is_impossible"]:
                continue
            answers = tuple(str(answer["text"]) for answer in question["answers"])
            yield RulerQuestion(str(question["question"]), answers, (document,), related)


def _question_set(
    path: Path, questions: list[RulerQuestion], documents: list[str]
) -> RulerQuestions:
    answered = tuple(question for question in questions if question.answers)
    if not answered:
        raise ConfigError(f"{path}: holds no question with an answer.")
    return RulerQuestions(answered, tuple(documents))


def sentences(text: str) -> list[str]:
    """The sentences of a text whose words are separated by single spaces.

    RULER cuts with NLTK's punkt, which knows abbreviations; a cut more or less moves a needle by
    part of a sentence and changes nothing else.
    """
    cut = SENTENCE_END.sub(lambda match: f"{match[1]}\n", text.strip())
    return cut.split("\n")


def _json(path: Path) -> Any:
    try:
        return load_json(path)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror or problem}.") from None
    except ValueError as problem:
        raise ConfigError(f"{path}: not JSON: {' '.join(str(problem).split())[:200]}.") from None


def _lines(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8", opener=regular_only) as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: cannot be read: {problem}.") from None
    words = [line.strip() for line in text.splitlines() if line.strip()]
    if not words:
        raise ConfigError(f"{path}: holds no words; it must have one per line.")
    return words
