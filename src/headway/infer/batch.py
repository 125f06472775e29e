"""A file of prompts comes in, a file of answers goes out: in order, in constant memory, continued
after a kill.

    line -> prompt ids -> n requests of the engine -> texts -> line of the output

The engine always has more requests than it runs at once. Lines are written in the order of the
input, so a long answer holds back the lines behind it, at most `WINDOW` of them. What a line
becomes depends on its prompt and the seed alone: it is what `generate` gives for the prompt, and
the k-th of n samples is what `generate` gives for the k-th time it has the prompt.
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
from headway.infer.generate import conversation_name, prompt_ids
from headway.infer.generate_options import GenerateOptions
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
    """Prompts are questions in this chat template; None: they are continued. Messages always have
    one."""
    system: str | None = None
    samples: int = 1
    """Answers to each line."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"--n is {self.samples}; it must be 1 or more.")
        if self.samples > 1 and self.generate.sampling.temperature == 0:
            raise ConfigError(
                f"--n is {self.samples} with temperature 0, which gives the same answer each "
                "time. Set --temperature."
            )

    def settings(self, loaded: LoadedModel, path: Path) -> dict[str, Any]:
        """What decides the answers, as plain values."""
        sampling = self.generate.sampling
        masks = loaded.describe_masks()
        values: dict[str, Any] = {
            "model": str(loaded.path),
            "input": str(path),
            "n": self.samples,
            "max_new_tokens": self.generate.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop": list(self.generate.stop),
            "special": self.generate.special,
            "template": self.template,
            "system": self.system,
            "masks": None if masks is None else json.loads(json.dumps(masks, default=str)),
        }
        return {**values, **content_of(loaded)}


@dataclass(frozen=True)
class BatchReport:
    """What a batch job did."""

    output: str
    lines: int
    """Lines in the output now."""
    answered: int
    """Lines that this run answered; the others were there before."""
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
    # Refuses a model without a tokenizer, or a wrong template, before any file is touched.
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
    proposed = None
    if job.engine.options.speculation is not None:
        proposed = {"proposed": stats.proposed_tokens, "accepted": stats.accepted_tokens}
    return BatchReport(
        str(output),
        file.kept + job.done,
        job.done,
        job.failed,
        stats.prompt_tokens + stats.cached_tokens,
        stats.generated_tokens,
        round(time.monotonic() - begun, 3),
        proposed,
    )


class _Answer:
    """One request while its text grows."""

    def __init__(self, text: RequestText) -> None:
        self.text = text
        self.said = list[str]()
        self.tokens = 0
        self.stopped_by: str | None = None

    def add(self, event: EngineEvent) -> None:
        self.said.append(self.text.add(event.tokens))
        self.tokens = self.text.num_tokens

    def finish(self, reason: str) -> None:
        self.said.append(self.text.finish())
        # A stop text may have come in the same event as the end of the request.
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
        return self.error is not None or all(
            answer.stopped_by is not None for answer in self.answers
        )

    def values(self) -> dict[str, Any]:
        if self.error is not None:
            return self.line.answered({ERROR: self.error})
        return self.line.answered({GENERATIONS: [answer.values() for answer in self.answers]})


class _BatchJob:
    """Feeds the engine and puts its answers in order."""

    def __init__(
        self, loaded: LoadedModel, options: BatchOptions, engine_options: EngineOptions
    ) -> None:
        self.loaded = loaded
        self.tokenizer = loaded.require_tokenizer()
        self.options = options
        self._template: tuple[ChatTemplate, tuple[int, ...]] | None = None
        if options.template is not None:
            self._chat_template()  # a wrong name is refused before any line
        # The engine need not bound its queue: `run` bounds what it submits.
        self.engine = build_engine(loaded, replace(engine_options, max_waiting=1 << 30))
        self._open: dict[int, tuple[_OpenLine, _Answer]] = {}
        self.done = self.failed = 0

    def run(self, lines: Iterator[BatchLine]) -> Iterator[dict[str, Any]]:
        """The lines of the output, in order."""
        waiting: deque[_OpenLine] = deque()
        # Enough requests that a slot never waits for the next line, few enough to bound memory.
        ahead = 2 * self.engine.options.max_running
        ended = False
        while True:
            while not ended and len(waiting) < WINDOW and len(self._open) < ahead:
                line = next(lines, None)
                if line is None:
                    ended = True
                else:
                    waiting.append(self._start(line))

            # In the order of the input: a line behind one that is not complete waits.
            while waiting and waiting[0].is_complete:
                complete = waiting.popleft()
                self.done += 1
                self.failed += complete.error is not None
                yield complete.values()

            if not waiting and ended:
                return
            for event in self.engine.step():
                self._take(event)

    def _start(self, line: BatchLine) -> _OpenLine:
        """Submit the requests of a line; a line that cannot be asked is complete with its error."""
        open_line = _OpenLine(line)
        numbers: list[int] = []
        try:
            if line.record is None or line.problem is not None:
                raise DataError(f"{line.place}: {line.problem}.")
            name, ids, ends = self._prompt(line.record, line.place)
            generate = self.options.generate
            stops = frozenset((*generate.stop_ids, *ends))
            for sample in range(self.options.samples):
                # The key of the k-th time that `generate` has the prompt: the same samples.
                request = EngineRequest(
                    tuple(ids),
                    generate.max_new_tokens,
                    generate.sampling,
                    key=f"{sample}:{name}",
                    stop_ids=stops,
                )
                numbers.append(self.engine.submit(request))
                answer = _Answer(RequestText(self.tokenizer, ids[-CONTEXT:], generate.stop))
                open_line.answers.append(answer)
                self._open[numbers[-1]] = (open_line, answer)
        except (DataError, ConfigError) as problem:
            # The line gets the error instead of an answer; the job continues.
            text = str(problem)
            if text.startswith(line.place):
                open_line.error = text
            else:
                open_line.error = f"{line.place}: {text}"
            # samples of this line that were submitted before the one that failed
            for number in numbers:
                self.engine.cancel(number)
        return open_line

    def _prompt(self, record: dict[str, Any], place: str) -> tuple[str, list[int], tuple[int, ...]]:
        """Name and ids of a prompt, and the ids that end its answer. Names are those of `generate`:
        they decide the samples."""
        options = self.options
        if isinstance(record.get("messages"), list):
            conversation = conversation_of(record, place, options.system)
        else:
            key = next((key for key in TEXT_KEYS if key in record), None)
            if key is None:
                raise DataError(f"{place}: has none of the keys prompt, messages and text.")
            text = record[key]
            if not isinstance(text, str) or not text:
                raise DataError(
                    f"{place}: {key} is {json.dumps(text, ensure_ascii=False)[:80]}; a text that "
                    "is not empty is expected."
                )
            # `text` is always continued; `prompt` is a question where a template is set.
            if key == "text" or options.template is None:
                return text, prompt_ids(self.tokenizer, text, special=options.generate.special), ()
            before = ()
            if options.system is not None:
                before = (Turn("system", options.system),)
            conversation = Conversation((*before, Turn("user", text)))
        template, ends = self._chat_template()
        ids = render_prompt(conversation.turns, template, self.tokenizer, conversation.tools)
        return conversation_name(conversation.turns), ids, ends

    def _chat_template(self) -> tuple[ChatTemplate, tuple[int, ...]]:
        """The template, and the ids that end an answer in it."""
        if self._template is None:
            template = find_template(self.options.template or "tokenizer", self.tokenizer)
            self._template = template, answer_end(template, self.tokenizer)
        return self._template

    def _take(self, event: EngineEvent) -> None:
        """Add an event to the answer it belongs to."""
        pending = self._open.get(event.request)
        if pending is None:
            return  # the last event of a request that was cancelled at a stop text
        line, answer = pending
        answer.add(event)
        if event.error is not None:
            line.error = f"{line.line.place}: {event.error}"
        if event.finished is not None or answer.text.stopped:
            answer.finish(event.finished or "stop")
            del self._open[event.request]
            # The engine knows nothing of stop texts, and would continue.
            if event.finished is None:
                self.engine.cancel(event.request)
