"""Which generated tasks are worth keeping. In: a task and the index of those kept; out: the reason to drop it, or how similar it is."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from headway.text.self_instruct.similarity import SimilarityIndex, tokens_of
from headway.text.self_instruct.task import Language, Task

LONGER_THAN = 3
AT_MOST = 150
MAX_SIMILARITY = 0.7
NUM_MOST_SIMILAR = 10
HAN_SHARE = 0.3

# What an assistant that sees text alone can neither take in nor hand out.
_MEDIA = {
    "en": re.compile(
        r"\b(?:images?|pictures?|photos?|photographs?|screenshots?|videos?|audios?|recordings?|music|diagrams?|flowcharts?|charts?|graphs?|"
        r"plots?|maps?|draw|sketch|paint|files?|attachments?|attached|hyperlinks?|urls?|click|go to)\b",
        re.IGNORECASE,
    ),
    "zh": re.compile(
        "图片|图像|照片|相片|截图|截屏|视频|音频|录音|音乐|流程图|示意图|图表|曲线图|地图|绘制|画图|画出|画一|附件|文件|链接|网址|点击|播放"
    ),
}
_PLACEHOLDER = re.compile(
    r"[\[<{【（(]\s*(?:insert|your|enter|placeholder|to be filled|fill in|请?插入|请?填写|请?输入|此处|在此)[^\]>}】）)\n]{0,60}[\]>}】）)]"
    r"|_{4,}|\bx{4,}\b|\blorem ipsum\b|\{\{.{0,60}?\}\}|待补充|待填写",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Kept:
    """A task that passed, with its nearest neighbours and its mean similarity to all tasks before it."""

    task: Task
    most_similar: dict[str, float]
    avg_similarity: float

    def record(self) -> dict[str, Any]:
        """The line of tasks.jsonl."""
        return {**self.task.record(), "most_similar": self.most_similar, "avg_similarity": self.avg_similarity}


class Filter:
    """Judges tasks one after another; each task that passes is compared with all later ones."""

    def __init__(self, language: Language, seeds: list[Task]) -> None:
        self._language: Language = language
        self._index = SimilarityIndex()
        self._instructions: list[str] = []
        for seed in seeds:
            self.remember(seed)

    def remember(self, task: Task) -> None:
        """Compare later tasks with this one, which is kept without being judged."""
        if tokens := tokens_of(task.instruction, self._language):
            self._index.add(tokens)
            self._instructions.append(task.instruction)

    def judge(self, task: Task) -> Kept | str:
        """The task as kept, or why it is dropped."""
        if reason := self._reason(task):
            return reason
        scores = self._index.scores(tokens_of(task.instruction, self._language))
        if len(scores) and scores.max() > MAX_SIMILARITY:
            return "too similar"
        nearest = (-scores).argsort(kind="stable")[:NUM_MOST_SIMILAR]
        most_similar = {self._instructions[i]: round(float(scores[i]), 4) for i in nearest}
        self.remember(task)
        return Kept(task, most_similar, round(float(scores.mean()), 4) if len(scores) else 0.0)

    def _reason(self, task: Task) -> str | None:
        text = task.instruction
        length = len(text.split()) if self._language == "en" else sum(not character.isspace() for character in text)
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
    letters = [character for character in text if character.isalpha()]
    num_han = sum("\u3400" <= character <= "\u9fff" for character in letters)
    return (num_han > HAN_SHARE * len(letters)) == (language == "zh")
