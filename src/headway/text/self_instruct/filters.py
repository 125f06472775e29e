"""Decides which generated tasks to keep. In: a task and the tasks kept so far; out: the reason
to drop it, or its similarity to them.

`SimilarityIndex` computes exact ROUGE-L of one text against all kept texts at once. The kept
texts are stored one after another in a bit vector V, with a guard bit after each. The
bit-parallel rule for the longest common subsequence (U = V & M; V = (V + U) | (V - U), where M
marks where the next token occurs) runs over all of them in one addition. A carry out of a text
ends in its guard bit, which is then cleared. The zeros left in a text's bits are the length of
the subsequence.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.text.self_instruct.settings import Language
from headway.text.self_instruct.tasks import InstructionTask

_WORD = re.compile(r"\w+")
Scores = np.ndarray[tuple[int], np.dtype[np.float64]]


def tokens_of(text: str, language: Language) -> list[str]:
    """The compared units: lower-case words, or for Chinese every letter and digit."""
    words = _WORD.findall(text.lower())
    if language == "en":
        return words
    return [character for word in words for character in word]


class SimilarityIndex:
    """Kept texts, as tokens; `scores` compares a new text with each of them."""

    def __init__(self) -> None:
        self._positions: dict[str, array[int]] = {}
        """Token -> the bits at which it occurs."""
        self._starts = array("q")
        self._lengths = array("q")
        """Of each text: its first bit, its tokens."""
        self._bits = 0
        """V at the beginning: ones for all tokens, zeros for guard bits."""
        self._size = 0
        """Bits in all."""

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, tokens: list[str]) -> None:
        """Keep a text of at least one token."""
        assert tokens, "a text without tokens is like no other"
        for offset, token in enumerate(tokens):
            self._positions.setdefault(token, array("q")).append(self._size + offset)

        self._starts.append(self._size)
        self._lengths.append(len(tokens))
        self._bits |= ((1 << len(tokens)) - 1) << self._size
        self._size += len(tokens) + 1

    def scores(self, tokens: list[str]) -> Scores:
        """The ROUGE-L F score, 0 to 1, against every kept text in the order they were added."""
        if not len(self):
            return np.zeros(0)

        # Python's integers are the bit vectors: one addition runs over all kept texts in C. The
        # mask with `_bits` clears the guard bits.
        marks = {token: self._mark(token) for token in set(tokens)}
        left = self._bits
        for token in tokens:
            if mark := marks[token]:
                common = left & mark
                left = ((left + common) | (left - common)) & self._bits

        # Count the ones of each text. ROUGE-L's F score is 2 * LCS / (length + length).
        raw = np.frombuffer(left.to_bytes(self._size // 8 + 1, "little"), dtype=np.uint8)
        ones = np.add.reduceat(
            np.unpackbits(raw, bitorder="little").astype(np.int64), np.array(self._starts)
        )
        lengths = np.array(self._lengths)
        return 2.0 * (lengths - ones) / (lengths + len(tokens))

    def _mark(self, token: str) -> int:
        """M: a bit vector with ones where a token occurs."""
        positions = self._positions.get(token)
        if positions is None:
            return 0

        row = np.zeros(self._size + 1, dtype=np.uint8)
        row[np.array(positions)] = 1
        return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")


# The limits of self-instruct (Wang et al. 2022) and Alpaca.
LONGER_THAN = 3
AT_MOST = 150
"""Words of an instruction; characters in Chinese."""
MAX_SIMILARITY = 0.7
"""ROUGE-L to the most similar task."""
NUM_MOST_SIMILAR = 10
"""Similar tasks that a record names."""
HAN_SHARE = 0.3
"""Share of Han characters among the letters above which a text is Chinese."""

# What a text-only assistant can neither receive nor produce.
_MEDIA = {
    "en": re.compile(
        r"\b(?:images?|pictures?|photos?|photographs?|screenshots?|videos?|audios?|recordings?"
        r"|music|diagrams?|flowcharts?|charts?|graphs?|plots?|maps?|draw|sketch|paint|files?"
        r"|attachments?|attached|hyperlinks?|urls?|click|go to)\b",
        re.IGNORECASE,
    ),
    "zh": re.compile(
        "图片|图像|照片|相片|截图|截屏|视频|音频|录音|音乐|流程图|示意图|图表|曲线图|地图"
        "|绘制|画图|画出|画一|附件|文件|链接|网址|点击|播放"
    ),
}
# Blanks that a model leaves where it should write something: "[insert text]", "____", "{{name}}".
_PLACEHOLDER = re.compile(
    r"[\[<{【（(]\s*(?:insert|your|enter|placeholder|to be filled|fill in"
    r"|请?插入|请?填写|请?输入|此处|在此)[^\]>}】）)\n]{0,60}[\]>}】）)]"
    r"|_{4,}|\bx{4,}\b|\blorem ipsum\b|\{\{.{0,60}?\}\}|待补充|待填写",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class KeptTask:
    """A task that passed, with its most similar tasks and its mean similarity to all earlier
    ones.
    """

    task: InstructionTask
    most_similar: dict[str, float]
    avg_similarity: float

    def record(self) -> dict[str, Any]:
        """The line of tasks.jsonl."""
        return {
            **self.task.record(),
            "most_similar": self.most_similar,
            "avg_similarity": self.avg_similarity,
        }


class TaskFilter:
    """Judges tasks one after another; each task that passes is compared with all later ones."""

    def __init__(self, language: Language, seeds: list[InstructionTask]) -> None:
        self._language: Language = language
        self._index = SimilarityIndex()
        self._instructions: list[str] = []
        for seed in seeds:
            self.remember(seed)

    def remember(self, task: InstructionTask) -> None:
        """Keep this task without judging it; later tasks are compared with it."""
        if tokens := tokens_of(task.instruction, self._language):
            self._index.add(tokens)
            self._instructions.append(task.instruction)

    def judge(self, task: InstructionTask) -> KeptTask | str:
        """The kept task, or the reason it is dropped."""
        if reason := self._reason(task):
            return reason

        scores = self._index.scores(tokens_of(task.instruction, self._language))
        if len(scores) and scores.max() > MAX_SIMILARITY:
            return "too similar"

        nearest = (-scores).argsort(kind="stable")[:NUM_MOST_SIMILAR]
        most_similar = {self._instructions[i]: round(float(scores[i]), 4) for i in nearest}
        average = 0.0
        if len(scores):
            average = round(float(scores.mean()), 4)

        self.remember(task)
        return KeptTask(task, most_similar, average)

    def _reason(self, task: InstructionTask) -> str | None:
        """Why a task is dropped whatever the others are."""
        text = task.instruction
        if self._language == "en":
            length = len(text.split())
        else:
            length = sum(not character.isspace() for character in text)

        if length <= LONGER_THAN:
            return "too short"
        if length > AT_MOST:
            return "too long"
        if unicodedata.category(text[0])[0] in "PSZC":
            return "begins with punctuation"
        if not tokens_of(text, self._language):
            return "no words"
        if not _is_in(text, self._language):
            return "other language"
        if not task.output:
            return "no output"
        if _MEDIA[self._language].search(text):
            return "asks for media"
        if any(_PLACEHOLDER.search(part) for part in (text, task.input, task.output)):
            return "placeholder"

        return None


def _is_in(text: str, language: Language) -> bool:
    """Whether a text is in this language, as far as Han characters show it."""
    letters = [character for character in text if character.isalpha()]
    num_han = sum("\u3400" <= character <= "\u9fff" for character in letters)
    return (num_han > HAN_SHARE * len(letters)) == (language == "zh")
