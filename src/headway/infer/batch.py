"""A file of prompts comes in, a file of answers goes out: in order, in constant memory, continued after a kill.

    line -> prompt ids -> n requests of the engine -> texts -> line of the output

The engine always has more requests than it runs at once. Lines are written in the order of the input, so a long answer holds back the
lines behind it, at most `WINDOW` of them. What a line becomes depends on its prompt and the seed alone: it is what `generate` gives for
the prompt, and the k-th of n samples is what `generate` gives for the k-th time it has the prompt.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, DataError
from headway.infer.batch_files import ERROR, GENERATIONS, BatchLine, BatchOutput, read_lines
from headway.infer.content import content_of
from headway.infer.engine.ranks import build_engine
from headway.infer.engine.request import EngineEvent, EngineOptions, EngineRequest
from headway.infer.engine.text import CONTEXT, RequestText
from headway.infer.generate import GenerateOptions, prompt_ids
from headway.infer.load import LoadedModel
from headway.infer.messages import conversation_of
from headway.records.chat import Conversation
from headway.runtime.progress import progress
from headway.tokenizer.chat import ChatTemplate, Turn, answer_end, find_template, render_prompt

WINDOW = 1024
"""Lines that are in work or wait for a line before them."""
TEXT_KEYS = ("prompt", "text")


@dataclass(frozen=True)
class BatchOptions:
    """How every line is answered."""

    generate: GenerateOptions = field(default_factory=GenerateOptions)
    template: str | None = None
    """Prompts are questions in this chat template; None: they are continued. Messages always have one."""
    system: str | None = None
    samples: int = 1
    """Answers to each line."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"--n is {self.samples}; it must be 1 or more.")
        if self.samples > 1 and self.generate.sampling.temperature == 0:
            raise ConfigError(
                f"--n is {self.samples} with temperature 0, which gives the same answer each time. Set --temperature."
            )

    def settings(self, loaded: LoadedModel, path: Path) -> dict[str, Any]:
        """What decides the answers, as plain values."""
        sampling, masks = self.generate.sampling, loaded.describe_masks()
        values: dict[str, Any] = {
            "model": str(loaded.path), "input": str(path), "n": self.samples, "max_new_tokens": self.generate.max_new_tokens,
            "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "seed": sampling.seed,
            "stop": list(self.generate.stop), "special": self.generate.special, "template": self.template, "system": self.system,
            "masks": None if masks is None else json.loads(json.dumps(masks, default=str)),
        }  # fmt: skip
        return {**values, **content_of(loaded)}


@dataclass(frozen=True)
class BatchReport:
    """What a batch job did."""

    output: str
    lines: int
    """In the output now."""
    answered: int
    """Now; the others were there."""
    failed: int
    """Of those answered now: lines with an error instead of an answer."""
    prompt_tokens: int
    generated_tokens: int
    seconds: float
    speculated: dict[str, int] | None = None
    """Tokens that were proposed and accepted, with speculation."""


def answer_file(
    loaded: LoadedModel,
    path: Path,
    output: Path,
    options: BatchOptions,
    engine_options: EngineOptions | None = None,
) -> BatchReport:
    """Answer every line of `path` in `output`. Lines that are there already are kept."""
    if engine_options is None:
        running = 64 if loaded.device.type == "cuda" else 16
        engine_options = EngineOptions(
            max_running=running,
            prefill_tokens=options.generate.chunk_tokens,
            speculation=options.generate.speculation,
        )
    job = _BatchJob(loaded, options, engine_options)
    begun = time.monotonic()
    if path.absolute() == output.absolute():
        raise ConfigError(
            f"--input and --output are both {path}. Give another file for the answers."
        )
    if not path.is_file():
        raise ConfigError(f"--input is {str(path)!r}; there is no such file.")
    with (
        BatchOutput(output, options.settings(loaded, path)) as file,
        progress(f"answer {path.name}", unit="lines") as advance,
    ):
        lines = read_lines(path)
        file.skip(lines)
        advance(file.kept)
        for values in job.run(lines):
            file.write(values)
            advance(1)
    stats = job.engine.stats()
    proposed = (
        None
        if job.engine.options.speculation is None
        else {"proposed": stats.proposed_tokens, "accepted": stats.accepted_tokens}
    )
    return BatchReport(
        str(output), file.kept + job.done, job.done, job.failed, stats.prompt_tokens + stats.cached_tokens, stats.generated_tokens,
        round(time.monotonic() - begun, 3), proposed,
    )  # fmt: skip


class _Answer:
    """One request while its text grows."""

    def __init__(self, text: RequestText) -> None:
        self.text, self.said, self.tokens = text, list[str](), 0
        self.stopped_by: str | None = None

    def add(self, event: EngineEvent) -> None:
        self.said.append(self.text.add(event.tokens))
        self.tokens = self.text.num_tokens

    def finish(self, reason: str) -> None:
        self.said.append(self.text.finish())
        self.stopped_by = "stop" if self.text.stopped else reason

    def values(self) -> dict[str, Any]:
        return {"text": "".join(self.said), "stopped_by": self.stopped_by, "tokens": self.tokens}


@dataclass
class _OpenLine:
    """A line whose answers are on their way."""

    line: BatchLine
    answers: list[_Answer] = field(default_factory=list)
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is not None or all(one.stopped_by is not None for one in self.answers)

    def values(self) -> dict[str, Any]:
        if self.error is not None:
            return self.line.answered({ERROR: self.error})
        return self.line.answered({GENERATIONS: [one.values() for one in self.answers]})


class _BatchJob:
    """Feeds the engine and puts its answers in order."""

    def __init__(
        self, loaded: LoadedModel, options: BatchOptions, engine_options: EngineOptions
    ) -> None:
        if loaded.tokenizer is None:
            raise ConfigError(
                f"{loaded.path}: holds no tokenizer. Put tokenizer.json and tokenizer_config.json there."
            )
        self.loaded, self.tokenizer, self.options = loaded, loaded.tokenizer, options
        self._template: tuple[ChatTemplate, tuple[int, ...]] | None = None
        if options.template is not None:
            self._chat_template()  # a wrong name is refused before any line
        self.engine = build_engine(loaded, replace(engine_options, max_waiting=1 << 30))
        self._open: dict[int, tuple[_OpenLine, _Answer]] = {}
        self.done = self.failed = 0

    def run(self, lines: Iterator[BatchLine]) -> Iterator[dict[str, Any]]:
        """The lines of the output, in order."""
        waiting: deque[_OpenLine] = deque()
        ahead = 2 * self.engine.options.max_running
        ended = False
        while True:
            while not ended and len(waiting) < WINDOW and len(self._open) < ahead:
                line = next(lines, None)
                if line is None:
                    ended = True
                else:
                    waiting.append(self._start(line))
            while waiting and waiting[0].is_complete:
                found = waiting.popleft()
                self.done += 1
                self.failed += found.error is not None
                yield found.values()
            if not waiting and ended:
                return
            for event in self.engine.step():
                self._take(event)

    def _start(self, line: BatchLine) -> _OpenLine:
        found = _OpenLine(line)
        numbers: list[int] = []
        try:
            if line.record is None or line.problem is not None:
                raise DataError(f"{line.place}: {line.problem}.")
            name, ids, ends = self._prompt(line.record, line.place)
            generate = self.options.generate
            stops = frozenset((*generate.stop_ids, *ends))
            for sample in range(self.options.samples):
                request = EngineRequest(
                    tuple(ids),
                    generate.max_new_tokens,
                    generate.sampling,
                    key=f"{sample}:{name}",
                    stop_ids=stops,
                )
                numbers.append(self.engine.submit(request))
                answer = _Answer(RequestText(self.tokenizer, ids[-CONTEXT:], generate.stop))
                found.answers.append(answer)
                self._open[numbers[-1]] = (found, answer)
        except (DataError, ConfigError) as problem:
            text = str(problem)
            found.error = text if text.startswith(line.place) else f"{line.place}: {text}"
            for number in numbers:
                self.engine.cancel(number)
        return found

    def _prompt(self, record: dict[str, Any], place: str) -> tuple[str, list[int], tuple[int, ...]]:
        """Name and ids of a prompt, and the ids that end its answer. Names are those of `generate`: they decide the samples."""
        options = self.options
        if isinstance(record.get("messages"), list):
            found = conversation_of(record, place, options.system)
        else:
            key = next((key for key in TEXT_KEYS if key in record), None)
            if key is None:
                raise DataError(f"{place}: has none of the keys prompt, messages and text.")
            text = record[key]
            if not isinstance(text, str) or not text:
                raise DataError(
                    f"{place}: {key} is {json.dumps(text, ensure_ascii=False)[:80]}; a text that is not empty is expected."
                )
            if key == "text" or options.template is None:
                return text, prompt_ids(self.tokenizer, text, special=options.generate.special), ()
            before = () if options.system is None else (Turn("system", options.system),)
            found = Conversation((*before, Turn("user", text)))
        template, ends = self._chat_template()
        name = (
            found.turns[0].content
            if len(found.turns) == 1
            else json.dumps([turn.content for turn in found.turns])
        )
        return name, render_prompt(found.turns, template, self.tokenizer, found.tools), ends

    def _chat_template(self) -> tuple[ChatTemplate, tuple[int, ...]]:
        """The template, and the ids that end an answer in it."""
        if self._template is None:
            found = find_template(self.options.template or "tokenizer", self.tokenizer)
            self._template = found, answer_end(found, self.tokenizer)
        return self._template

    def _take(self, event: EngineEvent) -> None:
        held = self._open.get(event.request)
        if held is None:
            return
        line, answer = held
        answer.add(event)
        if event.error is not None:
            line.error = f"{line.line.place}: {event.error}"
        if event.finished is not None or answer.text.stopped:
            answer.finish(event.finished or "stop")
            del self._open[event.request]
            if event.finished is None:
                self.engine.cancel(event.request)
