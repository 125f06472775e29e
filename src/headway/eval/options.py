"""What evaluations take, and the options of `headway eval` and `headway sparsify`.

A module of its own, because the command line imports it for every help, without numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headway.config.options import (
    PROMPT_TEMPLATE_HELP,
    TEMPLATE_FLAGS,
    inner_options,
    option,
    parse_numbers,
)
from headway.errors import ConfigError
from headway.infer.generate_options import GenerateOptions
from headway.infer.sampling import Sampling
from headway.text import helmet, longbench, ruler
from headway.text.long_tasks import find_task, task_names
from headway.text.record_keys import KEYS_HELP, KEYS_METAVAR, KeyMap

# Bounds against typing errors, which would otherwise end in an overflow or never.
MAX_DOCUMENTS = 10**12
MAX_PER_PROMPT = 10_000
MAX_QUESTIONS = 10**6
MAX_ROWS = 2**16
MAX_TOKENS = 2**40
MAX_DIGITS = 12
CHUNKS = 8
"""A prompt is read in about this many chunks."""
MAX_CHUNK = 4096
"""Tokens of the largest chunk."""
ANSWERED_ROWS = 64
"""Prompts that are answered at once, where no number is given and the memory is enough."""
MEASURED_ROWS = 4
"""Prompts whose cache and speed are measured, where no number is given."""
BOS = (
    "Put the begin token before each window; default: if the tokenizer or its chat template does.",
    "--bos/--no-bos",
)
"""Help and flags."""


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents of ids."""

    split: str = option(
        "file", "A .txt file is one document (file), or each of its lines is one (line)."
    )
    text_key: str | None = option(
        None, "Key that holds the text of a record; default: the suite's key, else text."
    )
    bos: bool | None = option(None, *BOS)
    max_samples: int | None = option(
        None, "Score only the first documents of each dataset, this many."
    )
    by: str | None = option(
        None,
        "Also split each dataset: by file, or by this key of its records (nested: meta.source).",
    )

    def __post_init__(self) -> None:
        if self.split not in ("file", "line"):
            raise ConfigError(f"--split is {self.split!r}; it must be 'file' or 'line'.")
        if self.max_samples is not None and not 1 <= self.max_samples <= MAX_DOCUMENTS:
            raise ConfigError(
                f"--max-samples is {self.max_samples}; it must be from 1 to {MAX_DOCUMENTS}."
            )


@dataclass(frozen=True)
class ContinuationOptions:
    """Texts to generate besides the scores."""

    prompts: tuple[str, ...] = option((), "Also continue this text; may be repeated.", "--prompt")
    per_prompt: int | None = option(None, "Continuations of each prompt; default: 1.", "--samples")
    max_new_tokens: int = option(64, "Maximum tokens of a continuation.")
    temperature: float = option(
        0.8, "Temperature of the continuations; 0 takes the most likely token each time."
    )
    seed: int = option(0, "Seed of the continuations.")
    template: str | None = option(None, PROMPT_TEMPLATE_HELP, *TEMPLATE_FLAGS)
    """None: a prompt is continued."""

    def check(self) -> None:
        """Refuse impossible values, once all prompts are known."""
        if self.per_prompt is not None and not self.prompts:
            raise ConfigError(
                f"--samples is {self.per_prompt}, but there is no prompt to continue. Give "
                "--prompt TEXT."
            )
        if self.per_prompt is not None and not 1 <= self.per_prompt <= MAX_PER_PROMPT:
            raise ConfigError(
                f"--samples is {self.per_prompt}; it must be from 1 to {MAX_PER_PROMPT}."
            )
        if self.template is not None and not self.prompts:
            raise ConfigError(
                f"--chat-template is {self.template!r}, and there is no prompt. Give --prompt or "
                "--prompts-file."
            )
        if "" in self.prompts:
            raise ConfigError("a prompt is empty. Give some text.")
        # Refuses a wrong temperature, seed or length.
        if self.prompts:
            self.options()

    def options(self) -> GenerateOptions:
        """How to generate."""
        sampling = Sampling(self.temperature, seed=self.seed)
        return GenerateOptions(self.max_new_tokens, sampling=sampling)


@dataclass(frozen=True)
class RewardSource:
    """Where candidates come from and how records are read."""

    path: str = option(
        ...,
        "Pairs, conversations or generations: .jsonl (or any records), or a store of preference "
        "pairs.",
        "--data",
        "--input",
    )
    chat_template: str | None = option(
        None,
        "Chat template of records: a name, tokenizer or a .jinja file; default: the model's own, "
        "else chatml.",
        *TEMPLATE_FLAGS,
    )
    keys: KeyMap = option(
        KeyMap(), KEYS_HELP, written=None, read=KeyMap.parse, metavar=KEYS_METAVAR
    )
    max_length: int | None = option(
        None, "Tokens of a conversation; longer ones are cut; default: the model's max_seq_len."
    )
    limit: int | None = option(None, "Only the first records, this many.", min=1)
    drop_bad: bool = option(
        False,
        "Leave out and count records that cannot be read instead of refusing them.",
        "--drop-bad",
    )


def _task_names(texts: Sequence[str]) -> list[str]:
    """The names in options that are repeated, have commas, or both."""
    return [name for text in texts for name in text.split(",") if name]


@dataclass(frozen=True)
class HarnessPlan:
    """Which tasks, and how much of them."""

    tasks: Sequence[str] = option(
        ...,
        "Names or patterns of tasks (`lm-eval ls tasks`); repeated or comma separated.",
        read=_task_names,
        written_type=list[str],
    )
    task_dir: Path | None = option(
        None, "A folder with your own tasks as YAML; code that they name is run."
    )
    limit: int | None = option(None, "Only the first documents of each task, this many.")
    shots: int | None = option(
        None, "Few-shot examples before each question; default: as each task says."
    )
    online: bool = option(
        False,
        "Let tasks download their data from the hub; else it must be on this machine.",
        "--online",
    )

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("no task is given. Use --tasks NAME, several times or with commas.")
        for name, value, least in (("--limit", self.limit, 1), ("--shots", self.shots, 0)):
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more.")
        if self.task_dir is not None and not self.task_dir.is_dir():
            raise ConfigError(
                f"--task-dir is {str(self.task_dir)!r}, which is not a folder. Give a folder of "
                "tasks in YAML."
            )


def not_different(flag: str, values: Sequence[object]) -> ConfigError:
    """The error of a list that is empty or repeats a value."""
    shown = ", ".join(map(str, values)) or "empty"
    return ConfigError(f"{flag} is {shown}; give one or more different values.")


@dataclass(frozen=True)
class LongQuestions:
    """How questions in long prompts are asked."""

    depths: tuple[float, ...] = option(
        (0.0, 0.25, 0.5, 0.75, 1.0),
        "Positions of the answer, 0 = the beginning, comma separated.",
        written="0,0.25,0.5,0.75,1",
        read=lambda text: parse_numbers("--depths", text),
    )
    samples: int = option(2, "Questions per task, length and depth.")
    seed: int = option(0, "Seed of the questions and of random masks.")
    chunk_tokens: int | None = option(
        None, "Prefill chunk in tokens; default: length/8, at most 4096."
    )
    rows: int | None = option(
        None,
        "Prompts computed at once; default: as many as the memory takes, up to 64. Cache and speed "
        "are measured with this many, else with 4.",
    )
    template: str | None = option(
        None,
        "Ask in this chat template: a name, tokenizer (the model's own) or a .jinja file; "
        "default: plain text.",
        *TEMPLATE_FLAGS,
    )
    bos: bool | None = option(None, *BOS)
    """Of prompts and of texts. A template has its own."""
    ruler_data: Path | None = option(
        None, "A folder with the essays, word lists and question sets of RULER's tasks."
    )
    longbench: Path | None = option(None, "data.json of LongBench v2, for its tasks.")
    helmet: Path | None = option(
        None, "The folder data of HELMET, with json_kv and ruler, for its recall tasks."
    )

    def __post_init__(self) -> None:
        if self.helmet is not None and not self.helmet.is_dir():
            raise ConfigError(
                f"--helmet is {str(self.helmet)!r}, which is not a folder. Give the folder data of "
                "HELMET."
            )
        if self.longbench is not None and not self.longbench.is_file():
            raise ConfigError(
                f"--longbench is {str(self.longbench)!r}, which is not a file. Give data.json of "
                "LongBench v2."
            )
        if self.ruler_data is not None and not self.ruler_data.is_dir():
            raise ConfigError(
                f"--ruler-data is {str(self.ruler_data)!r}, which is not a folder. Give a folder "
                "with RULER's files."
            )
        if not self.depths or len(set(self.depths)) < len(self.depths):
            raise not_different("--depths", self.depths)
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise ConfigError(
                f"--depths is {', '.join(map(str, self.depths))}; depths must be between 0 (the "
                "beginning) and 1 (the end)."
            )
        for name, value, most in (
            ("--samples", self.samples, MAX_QUESTIONS),
            ("--chunk-tokens", self.chunk_tokens, MAX_TOKENS),
            ("--rows", self.rows, MAX_ROWS),
        ):
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be from 1 to {most}.")

    @property
    def answered_rows(self) -> int:
        """Prompts that are answered at once, at most."""
        if self.rows is None:
            return ANSWERED_ROWS
        return self.rows

    @property
    def measured_rows(self) -> int:
        """Prompts whose cache and speed are measured."""
        if self.rows is None:
            return MEASURED_ROWS
        return self.rows


def parse_lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens separated by commas; k means 1024."""
    return tuple(map(_parse_tokens, text.split(",")))


def _parse_tokens(text: str) -> int:
    """`4096` or `4k` -> 4096."""
    digits = text.strip().lower()
    scale = 1
    if digits.endswith("k"):
        digits = digits[:-1]
        scale = 1024
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS):
        raise ConfigError(
            f"--lengths holds {text!r}; write whole numbers of tokens, 4096 or 4k, comma separated."
        )
    return int(digits) * scale


def _long_tasks(text: str | None) -> tuple[str, ...]:
    if text is None:
        return tuple(task_names())
    return tuple(text.split(","))


@dataclass(frozen=True)
class LongPlan:
    """The tasks and lengths to evaluate, and how questions are asked."""

    tasks: tuple[str, ...] = option(
        ...,
        "Tasks, comma separated; default: all of headway's. needle_* hide numbers, passkey, "
        "key_value, variable_tracking, common_words; ruler is all of RULER's, ruler_vt one; "
        "longbench_v2 or longbench_v2_short; helmet or helmet_json_kv.",
        written=None,
        read=_long_tasks,
    )
    """May be empty if texts are scored."""
    lengths: tuple[int, ...] = option(
        ...,
        "Tokens of the prompts, comma separated; 4k means 4096.",
        written="4096",
        read=parse_lengths,
    )
    questions: LongQuestions = inner_options(LongQuestions())

    def __post_init__(self) -> None:
        if len(set(self.tasks)) < len(self.tasks):
            raise not_different("--tasks", self.tasks)
        if not self.lengths or len(set(self.lengths)) < len(self.lengths):
            raise not_different("--lengths", self.lengths)
        for task in self.tasks:
            if task.startswith(ruler.GROUP):
                ruler.check(task, self.tasks, self.questions.ruler_data)
            elif task.startswith(longbench.GROUP):
                longbench.check(task, self.tasks, self.questions.longbench)
            elif task.startswith(helmet.GROUP):
                helmet.check(task, self.tasks, self.lengths, self.questions.helmet)
            else:
                find_task(task)
        if min(self.lengths) < 1:
            raise ConfigError(f"--lengths holds {min(self.lengths)}; a length is 1 or more.")

    def resolved(self) -> LongPlan:
        """With the names of tasks for those of groups; of RULER's and HELMET's, those whose files are
        there."""
        tasks: list[str] = []
        for task in self.tasks:
            if task == ruler.GROUP:
                tasks += ruler.available(self.questions.ruler_data)
            elif task == longbench.GROUP:
                tasks += longbench.NAMES
            elif task == helmet.GROUP:
                tasks += helmet.available(self.lengths, self.questions.helmet)
            else:
                tasks.append(task)
        return replace(self, tasks=tuple(tasks))

    def chunk(self, length: int) -> int:
        """Tokens of a prompt of this length that go through the model at once."""
        if self.questions.chunk_tokens is not None:
            return self.questions.chunk_tokens
        # Several chunks even of a short prompt, so that masks evict while it is read.
        return min(MAX_CHUNK, max(1, length // CHUNKS))

    def whole(self) -> list[int]:
        """Lengths that go through the model in one chunk, so that nothing is evicted while a prompt
        is read.
        """
        return [length for length in self.lengths if self.chunk(length) >= length]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        questions = asdict(self.questions)
        # How many are answered at once changes no number.
        questions["rows"] = self.questions.measured_rows
        # Left out where they say nothing: results are found by these values.
        for name in ("ruler_data", "longbench", "helmet"):
            path = questions.pop(name)
            if path is not None:
                questions[name] = str(path)
        return {"tasks": self.tasks, "lengths": self.lengths, **questions}


ATTENTION_TASKS = ("needle_single", "needle_multi_key", "passkey", "key_value")
"""Tasks with one answer in one place."""


@dataclass(frozen=True)
class AttentionPlan:
    """Prompts with one needle each, at some distances from the question."""

    task: str = option("needle_single", f"Which prompts: {', '.join(ATTENTION_TASKS)}.")
    lengths: tuple[int, ...] = option(
        (1024,), "Tokens of the prompts, comma separated; 4k means 4096.",
        written="1024", read=parse_lengths,
    )  # fmt: skip
    depths: tuple[float, ...] = option(
        (0.0, 0.25, 0.5, 0.75, 1.0),
        "Positions of the needle, 0 = the beginning, comma separated.",
        written="0,0.25,0.5,0.75,1",
        read=lambda text: parse_numbers("--depths", text),
    )
    samples: int = option(4, "Prompts per length and depth.")
    seed: int = option(0, "Seed of the prompts.")
    template: str | None = option(
        None,
        "Ask in this chat template: a name, tokenizer (the model's own) or a .jinja file; "
        "default: plain text.",
        *TEMPLATE_FLAGS,
    )
    bos: bool | None = option(None, *BOS)

    def __post_init__(self) -> None:
        if self.task not in ATTENTION_TASKS:
            raise ConfigError(
                f"--task is {self.task!r}; it must be one of {', '.join(ATTENTION_TASKS)}."
            )
        self.prompts()

    def prompts(self) -> LongPlan:
        """The prompts, as `eval long` makes them; wrong numbers are refused."""
        questions = LongQuestions(
            self.depths, self.samples, self.seed, template=self.template, bos=self.bos
        )
        return LongPlan((self.task,), self.lengths, questions)
