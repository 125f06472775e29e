"""Self-instruct tasks: seed tasks, the prompt made from them, and the parser for the model's
answer.

Tasks have Alpaca's form. A prompt numbers them `<|k|>`, a mark that task texts rarely contain;
examples are 1 to 3, new tasks start at 4.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import get_args

from headway.errors import DataError
from headway.runtime.seed import derive
from headway.text.document import Record
from headway.text.read import read_records
from headway.text.self_instruct.settings import Language

LANGUAGES: tuple[Language, ...] = get_args(Language)
SEEDS_PER_PROMPT = 3
"""Examples in a prompt."""


@dataclass(frozen=True)
class InstructionTask:
    """An instruction, the input it is about (may be empty), and the answer."""

    instruction: str
    input: str
    output: str

    def record(self) -> dict[str, str]:
        """The task as an Alpaca record."""
        return {"instruction": self.instruction, "input": self.input, "output": self.output}


def load_seeds(language: Language, path: Path | None = None) -> list[InstructionTask]:
    """The seed tasks of a file in Alpaca's form, or headway's built-in ones of that language."""
    if path is None:
        with as_file(files("headway.text.self_instruct") / f"seeds_{language}.jsonl") as built_in:
            return _read_seeds(built_in)
    return _read_seeds(path)


def fingerprint(tasks: Sequence[InstructionTask]) -> str:
    """A digest of seed tasks, by which a journal notices that they were changed."""
    return hashlib.sha256(
        json.dumps([task.record() for task in tasks], ensure_ascii=False).encode()
    ).hexdigest()[:16]


def _read_seeds(path: Path) -> list[InstructionTask]:
    """The seed tasks of a file; too few are refused before any request is sent."""
    tasks = [_task(record) for record in read_records([path])]
    if len(tasks) < SEEDS_PER_PROMPT:
        raise DataError(f"{path}: {len(tasks)} seed tasks; at least {SEEDS_PER_PROMPT} are needed.")
    return tasks


def _task(record: Record) -> InstructionTask:
    values = {key: record.data.get(key) or "" for key in ("instruction", "input", "output")}
    for key, value in values.items():
        if not isinstance(value, str) or (key != "input" and not value.strip()):
            raise DataError(
                f"{record.place}: {key} must be a text; a seed task is {{instruction, input, "
                f"output}}, where input may be empty."
            )
    return InstructionTask(**{key: str(value).strip() for key, value in values.items()})


NO_INPUT = {"en": "<none>", "zh": "<无>"}
LABELS = {"en": ("Instruction:", "Input:", "Output:"), "zh": ("指令：", "输入：", "输出：")}

REQUEST = {
    "en": """You write training tasks for an assistant that works with text alone. Below are {given} examples.
Write {wanted} new tasks, numbered <|{first}|> to <|{last}|>, each in exactly the form of the examples.

- Make the tasks as different as you can: other verbs and subjects, questions as well as orders, daily life as well as work and science.
- Ask only for what can be read and answered as text.
- An instruction has one or two sentences. An input is concrete and complete, never a blank to fill in; write {none} if none is needed.
- Give the full and correct answer as the output.
- Write in English and add nothing before, between or after the tasks.""",
    "zh": """请为一个只处理文字的助手编写训练任务。下面有 {given} 个示例。
请再写 {wanted} 个新任务，编号从 <|{first}|> 到 <|{last}|>，格式与示例完全相同。

- 任务之间差别要尽量大：换用不同的动词和主题，既有提问也有要求，既涉及日常生活，也涉及工作与科学。
- 只要求能够用文字阅读和回答的内容。
- 指令为一到两句话。输入要具体、完整，不要留空让人填写；不需要输入时写 {none}。
- 输出要给出完整、正确的答案。
- 用中文书写，任务前后和中间不要添加任何其他内容。""",
}

# Models decorate the form with Markdown (**Instruction:**) and other colons; both are accepted.
_NUMBER = re.compile(r"^[ \t*#]*<\|\s*\d+\s*\|>[.:：、*]*", re.MULTILINE)
_LABEL = re.compile(
    r"^[ \t*#]*(?:(?P<instruction>Instruction|指令)|(?P<input>Input|输入)"
    r"|(?P<output>Output|输出))[ \t*]*[:：]",
    re.MULTILINE | re.IGNORECASE,
)
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
"""What a reasoning model writes before its answer."""
_NOTHING = frozenset({"", "none", "n/a", "noinput", "no input", "无", "没有", "空"})
"""How models write that a task needs no input."""


def make_prompt(
    seeds: Sequence[InstructionTask], language: Language, per_request: int, seed: int, number: int
) -> str:
    """The prompt of one request; the examples depend only on the seed and the request number."""
    # A restart must send the same prompt for the same number.
    examples = random.Random(derive(seed, "self-instruct", number)).sample(
        list(seeds), SEEDS_PER_PROMPT
    )
    first = len(examples) + 1
    head = REQUEST[language].format(
        given=len(examples),
        wanted=per_request,
        first=first,
        last=first + per_request - 1,
        none=NO_INPUT[language],
    )
    shown = [f"<|{k}|>\n{_show(task, language)}" for k, task in enumerate(examples, start=1)]
    return "\n\n".join([head, *shown])


def _show(task: InstructionTask, language: Language) -> str:
    values = (task.instruction, task.input or NO_INPUT[language], task.output)
    return "\n".join(
        f"{label} {value}" for label, value in zip(LABELS[language], values, strict=True)
    )


def parse_answer(answer: str, was_cut: bool) -> tuple[list[InstructionTask], Counter[str]]:
    """The tasks of an answer in order, and counts of the parts that are not tasks.

    The last task of a truncated answer is dropped.
    """
    # What is before the first number is small talk of the model.
    pieces = _NUMBER.split(_THOUGHT.sub("", answer))[1:]
    dropped: Counter[str] = Counter()
    if was_cut and pieces:
        pieces = pieces[:-1]
        dropped["cut off"] += 1

    tasks: list[InstructionTask] = []
    for piece in pieces:
        if task := _parse_task(piece):
            tasks.append(task)
        else:
            dropped["unreadable"] += 1

    # Counted as dropped, so that such answers count towards giving up.
    if not pieces and not dropped:
        dropped["no task in the answer"] += 1

    return tasks, dropped


def _parse_task(piece: str) -> InstructionTask | None:
    """The task in what follows a number: the texts after the first instruction label, the input
    label, if any, and the first output label. Later labels belong to the output.
    """
    labels = list(_LABEL.finditer(piece))
    instruction_label = next((k for k, label in enumerate(labels) if label["instruction"]), None)
    if instruction_label is None:
        return None

    output_label = next(
        (k for k in range(instruction_label + 1, len(labels)) if labels[k]["output"]), None
    )
    if output_label is None:
        return None

    input_label = next(
        (k for k in range(instruction_label + 1, output_label) if labels[k]["input"]), None
    )
    instruction_end = output_label
    about = ""
    if input_label is not None:
        instruction_end = input_label
        about = _clean(piece[labels[input_label].end() : labels[output_label].start()])
    if about.strip("<>()（）[].。 ").lower() in _NOTHING:
        about = ""

    instruction = _clean(piece[labels[instruction_label].end() : labels[instruction_end].start()])
    output = _clean(piece[labels[output_label].end() :])
    return InstructionTask(instruction, about, output)


def _clean(text: str) -> str:
    # A lone surrogate is valid in a JSON escape but not in UTF-8.
    return text.encode("utf-8", "replace").decode().strip(" \t\r\n*")
