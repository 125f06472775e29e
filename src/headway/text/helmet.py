"""The recall tasks of HELMET, from its files.

Yen et al. 2024, "HELMET: How to Evaluate Long-Context Language Models Effectively and Thoroughly",
arXiv 2410.02694. The four files of a length, the prompts, the two solved examples of json_kv, the
tokens of an answer, the draw of the questions and the scores are those of
github.com/princeton-nlp/HELMET (MIT; configs/recall.yaml, data.py, utils.py): other words would give
scores that cannot be compared.

    helmet_json_kv       json_kv/test_k1800_dep6.jsonl           the value of a key in a JSON object
    helmet_niah_mk_2     ruler/niah_multikey_2/validation_131072.jsonl     RULER's needles, as HELMET
    helmet_niah_mk_3     ruler/niah_multikey_3/validation_131072.jsonl     made and stored them
    helmet_niah_mv       ruler/niah_multivalue/validation_131072.jsonl

The score of json_kv: whether the normalised answer (lower case, without punctuation, articles and
further blanks) is part of the normalised text. HELMET also tries the text behind "Corresponding
value:", which is a part of the whole one. The score of the others: the share of the answers that the
text holds, whatever their capitals.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.regular_file import regular_only
from headway.errors import ConfigError
from headway.text.long_tasks import Case, check_group, cut_to_fit

GROUP = "helmet"
"""The name for all tasks whose files are there."""
JSON_KV = "helmet_json_kv"
KEYS = {8192: 105, 16384: 220, 32768: 440, 65536: 900, 131072: 1800}
"""Keys of the JSON object of each length, which its file is named by."""
SHOTS = 2
"""Solved examples of json_kv."""
LARGEST_LINE = 1 << 26
"""Bytes of a question; at 131,072 tokens it has less than one MiB."""


@dataclass(frozen=True)
class NeedleFile:
    """One of RULER's tasks as HELMET stores it."""

    folder: str
    answer_tokens: int
    has_several: bool = False
    """The question is for all values of a key."""


NEEDLES = {
    "helmet_niah_mk_2": NeedleFile("niah_multikey_2", 50),
    "helmet_niah_mk_3": NeedleFile("niah_multikey_3", 100),
    "helmet_niah_mv": NeedleFile("niah_multivalue", 50, has_several=True),
}
NAMES = (JSON_KV, *NEEDLES)


@dataclass(frozen=True)
class RecallCase(Case):
    """A question of json_kv."""

    def score(self, text: str) -> float:
        """1 where the text holds an answer, both normalised."""
        plain = normalised(text)
        return float(any(normalised(answer) in plain for answer in self.answers))


def normalised(text: str) -> str:
    """Lower case, without punctuation, without articles, words separated by one blank."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


@dataclass(frozen=True)
class RecallQuestion:
    """One line of a file. Its prompt is `before`, the context and `after`."""

    before: str
    context: str
    after: str
    start: str
    """How the prompt ends: the beginning of the answer."""
    answers: tuple[str, ...]
    is_normalised: bool

    def case(self, context: str) -> Case:
        """With this context, whole or cut."""
        prompt = f"{self.before}{context}{self.after}\n{self.start}"
        kind = RecallCase if self.is_normalised else Case
        return kind(prompt, self.answers, None, answer_start=self.start)


def answer_tokens(task: str) -> int:
    """Tokens that an answer may have."""
    if task == JSON_KV:
        return 100
    return NEEDLES[task].answer_tokens


def file_name(task: str, length: int) -> str | None:
    """The file of a task and length in the folder; None: HELMET has none of that length."""
    if task != JSON_KV:
        return f"ruler/{NEEDLES[task].folder}/validation_{length}.jsonl"
    if length not in KEYS:
        return None
    return f"json_kv/test_k{KEYS[length]}_dep6.jsonl"


def _root(folder: Path) -> Path:
    """Where json_kv and ruler are: a checkout of HELMET has them in its folder data."""
    if (folder / "data").is_dir():
        return folder / "data"
    return folder


def missing(task: str, lengths: Sequence[int], folder: Path | None) -> list[str]:
    """What a task of `NAMES` lacks, in words."""
    if folder is None:
        return ["the folder of --helmet"]
    absent: list[str] = []
    for length in lengths:
        name = file_name(task, length)
        if name is None:
            absent.append(f"a file of {length} tokens (there are {', '.join(map(str, KEYS))})")
        elif not (_root(folder) / name).is_file():
            absent.append(name)
    return absent


def available(lengths: Sequence[int], folder: Path | None) -> list[str]:
    """The tasks whose files of all lengths are there."""
    return [name for name in NAMES if not missing(name, lengths, folder)]


def check(task: str, tasks: Sequence[str], lengths: Sequence[int], folder: Path | None) -> None:
    """Refuse an unknown name, files that are not there, and a task that is asked for twice."""
    check_group(task, tasks, GROUP, NAMES, "HELMET")
    if folder is None:
        raise ConfigError(
            f"--tasks holds {task}, which needs HELMET's files. Give --helmet DIR, its folder data."
        )
    names = [task]
    if task == GROUP:
        if available(lengths, folder):
            return
        names = list(NAMES)
    absent = [part for name in names for part in missing(name, lengths, folder)]
    if absent:
        raise ConfigError(
            f"--tasks holds {task}; in the folder of --helmet, {str(folder)!r}, there is not: "
            f"{', '.join(dict.fromkeys(absent))}. Put it there, or give other --lengths."
        )


def notes(tasks: Sequence[str], lengths: Sequence[int], folder: Path | None) -> list[str]:
    """What is left out of all tasks."""
    if GROUP not in tasks:
        return []
    left_out: list[str] = []
    for name in NAMES:
        absent = missing(name, lengths, folder)
        if absent:
            left_out.append(f"{name} (no {', '.join(absent)})")
    if not left_out:
        return []
    return [f"HELMET tasks left out: {'; '.join(left_out)}. Put the files into --helmet."]


def read_questions(
    task: str, length: int, number: int, seed: int, folder: Path
) -> list[RecallQuestion]:
    """Questions of a task and length, drawn as HELMET draws them; all where there are no more."""
    # Imported here: the command line imports this module for every help.
    import numpy as np

    name = file_name(task, length)
    assert name is not None, "lengths without a file were refused"
    file = _root(folder) / name
    lines = _lines(file)
    # The permutation by which the package datasets shuffles, as HELMET does.
    order = np.random.default_rng(seed).permutation(len(lines))[:number]
    return [_question(task, file, *lines[place]) for place in order.tolist()]


def _lines(file: Path) -> list[tuple[int, bytes]]:
    """The lines with a question, each with its number."""
    lines: list[tuple[int, bytes]] = []
    try:
        with open(file, "rb", opener=regular_only) as stream:
            number = 0
            while line := stream.readline(LARGEST_LINE + 1):
                number += 1
                if len(line) > LARGEST_LINE:
                    raise ConfigError(
                        f"{file}:{number}: has more than {LARGEST_LINE >> 20} MiB; a question is "
                        "far shorter. Download the file again."
                    )
                if line.strip():
                    lines.append((number, line))
    except OSError as problem:
        raise ConfigError(f"{file}: cannot be read: {problem.strerror or problem}.") from None
    if not lines:
        raise ConfigError(f"{file}: holds no question. Download the file again.")
    return lines


def _question(task: str, file: Path, number: int, line: bytes) -> RecallQuestion:
    where = f"{file}:{number}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{where}: not JSON: {' '.join(str(problem).split())[:200]}.") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be an object with a question.")
    if task == JSON_KV:
        return _key_value(where, entry)
    return _needle(where, entry, NEEDLES[task])


def _key_value(where: str, entry: dict[str, Any]) -> RecallQuestion:
    """A question for the value of a key, after solved ones about other keys."""
    demos = entry.get("demos")
    if not isinstance(demos, list) or len(demos) < SHOTS:
        raise ConfigError(f"{where}: demos must be a list of {SHOTS} or more [key, value].")
    solved = ""
    for demo in demos[:SHOTS]:
        if not (isinstance(demo, list) and len(demo) == 2 and all(map(_is_text, demo))):
            raise ConfigError(f"{where}: demos must hold [key, value], both texts.")
        key, value = demo
        solved += f"Key: {key}\nCorresponding value: {value}\n\n"
    return RecallQuestion(
        "",
        _text(where, entry, "context"),
        "\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n"
        f"{solved}Key: {_text(where, entry, 'question')}",
        "Corresponding value:",
        _answers(where, entry, "answer"),
        is_normalised=True,
    )


def _needle(where: str, entry: dict[str, Any], shape: NeedleFile) -> RecallQuestion:
    """A question for one needle, or for all of a key."""
    kind = _text(where, entry, "type_needle_v")
    query = _text(where, entry, "query")
    opening = f"A special magic {kind} is hidden"
    question = f"What is the special magic {kind}"
    verb = "is"
    if shape.has_several:
        opening = f"Some special magic {kind} are hidden"
        question = f"What are all the special magic {kind}"
        verb = "are"
    return RecallQuestion(
        f"{opening} within the following text. Make sure to memorize it. I will quiz you about the "
        f"{kind} afterwards.\n",
        _text(where, entry, "context"),
        f"\n{question} for {query} mentioned in the provided text?",
        f"The special magic {kind} for {query} mentioned in the provided text {verb}",
        _answers(where, entry, "answer" if "answer" in entry else "outputs"),
        is_normalised=False,
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _text(where: str, entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} must be a text.")
    return value


def _answers(where: str, entry: dict[str, Any], key: str) -> tuple[str, ...]:
    value = entry.get(key)
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value or not all(map(_is_text, value)):
        raise ConfigError(f"{where}: {key} must be a text, or a list of texts.")
    return tuple(value)


def cut_case(
    question: RecallQuestion,
    task: str,
    length: int,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    count: Callable[[Case], int],
) -> Case:
    """The question in at most `length` tokens with room for its answer.

    A context that is too long loses its end, as HELMET cuts it. `count` counts a case with all that
    stands around its prompt.
    """
    case = cut_to_fit(
        question.case(question.context),
        lambda: encode(question.context),
        lambda ids, keep: question.case(decode(ids[:keep])),
        count,
        length - answer_tokens(task),
        1,
    )
    if case is None:
        raise ConfigError(
            f"--lengths holds {length}; {task} needs more tokens for its question and answer. Give "
            "a greater length."
        )
    return case
