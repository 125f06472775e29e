"""A task as Alpaca writes it, the seed tasks that come with headway, and seed tasks of the user's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal, get_args

from headway.errors import DataError
from headway.text.document import Record
from headway.text.read import read_records

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
SEEDS_PER_PROMPT = 3


@dataclass(frozen=True)
class Task:
    """What is asked, what it is asked about (may be empty), and the answer."""

    instruction: str
    input: str
    output: str

    def record(self) -> dict[str, str]:
        """The task as an Alpaca record."""
        return {"instruction": self.instruction, "input": self.input, "output": self.output}


def load_seeds(language: Language, path: Path | None = None) -> list[Task]:
    """The seed tasks of a file in Alpaca's form, or headway's own of that language."""
    if path is None:
        with as_file(files("headway.text.self_instruct") / f"seeds_{language}.jsonl") as own:
            return _read(own)
    return _read(path)


def fingerprint(tasks: Sequence[Task]) -> str:
    """A digest of the tasks, to know them again."""
    return hashlib.sha256(json.dumps([task.record() for task in tasks], ensure_ascii=False).encode()).hexdigest()[:16]


def _read(path: Path) -> list[Task]:
    tasks = [_task(record) for record in read_records([path])]
    if len(tasks) < SEEDS_PER_PROMPT:
        raise DataError(f"{path}: {len(tasks)} seed tasks; at least {SEEDS_PER_PROMPT} are needed.")
    return tasks


def _task(record: Record) -> Task:
    values = {key: record.data.get(key) or "" for key in ("instruction", "input", "output")}
    for key, value in values.items():
        if not isinstance(value, str) or (key != "input" and not value.strip()):
            raise DataError(
                f"{record.place}: {key} must be a text; a seed task is {{instruction, input, output}}, where input may be empty."
            )
    return Task(**{key: str(value).strip() for key, value in values.items()})
