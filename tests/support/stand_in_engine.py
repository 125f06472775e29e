"""An engine process without torch: it answers with text that the prompt itself names. `python -m support.stand_in_engine`.

"... [[hello]] ..."     the answer is `hello`; without brackets, the prompt itself
"[sleep]"               one token every 20 ms
"[die]"                 the process ends at once
"[kill]"                it is killed
"[raise]"               the engine raises an error in a step
"[panic]"               the engine raises what is no Exception while it takes the request

A model whose path is "gone" is no folder while the file `gone` is in the folder HEADWAY_TEST_ENGINES; while `hold` is there, engines wait
before they load.
"[wait]"                no token ever comes
"""

import os
import re
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.infer.engine.request import (
    EngineEvent,
    EngineRequest,
    EngineStats,
    QueueFull,
    TokenLogprobs,
)
from headway.serve.engine_process import main
from headway.serve.engine_setup import EngineFacts, EngineSetup
from headway.tokenizer.chat_template import BUILT_IN
from support.chat_tokenizer import byte_tokenizer

CONTEXT = 4096
WIDTH = 4
NAMED = re.compile(r"\[\[(.*)\]\]", re.DOTALL)
SLEEP_SECONDS = 0.02


class Panic(BaseException):
    """Like a panic of a library in Rust."""


@dataclass
class Answering:
    """One request."""

    number: int
    request: EngineRequest
    text: str
    left: deque[int] = field(default_factory=deque)
    num_generated: int = 0


class StandInEngine:
    """Gives every running request one token per step."""

    def __init__(self, setup: EngineSetup) -> None:
        self.tokenizer = tokenizer()
        self.options = setup.options
        self.waiting: deque[Answering] = deque()
        self.running: dict[int, Answering] = {}
        self.next = 0
        self.generated = 0
        self.ended: list[EngineEvent] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.ended)

    def submit(self, request: EngineRequest) -> int:
        if len(self.waiting) >= max(1, self.options.max_waiting):
            raise QueueFull(
                f"{len(self.waiting)} requests are waiting; no more are taken now. Try again later."
            )
        if request.constraint is not None and "refuse me" in request.constraint:
            raise ConfigError("the grammar is refused.")
        text = self.tokenizer.decode(request.prompt)
        if "[panic]" in text:
            raise Panic("an injected panic")
        said = text
        named = NAMED.search(text)
        if named:
            said = named[1]
        answer = Answering(
            self.next, request, text, deque(self.tokenizer.encode((request.adapter or "") + said))
        )
        self.waiting.append(answer)
        self.next += 1
        return answer.number

    def cancel(self, request: int) -> None:
        if self.running.pop(request, None) is not None or any(
            waiting.number == request for waiting in self.waiting
        ):
            self.waiting = deque(waiting for waiting in self.waiting if waiting.number != request)
            self.ended.append(EngineEvent(request, (), finished="cancelled"))

    def step(self) -> list[EngineEvent]:
        while self.waiting and len(self.running) < self.options.max_running:
            request = self.waiting.popleft()
            self.running[request.number] = request
        events = self.ended
        self.ended = []
        for request in list(self.running.values()):
            if "[die]" in request.text:
                os._exit(3)
            if "[kill]" in request.text:
                os.kill(os.getpid(), signal.SIGKILL)
            if "[raise]" in request.text:
                raise RuntimeError("an injected error")
            if "[wait]" not in request.text:
                events.append(self.token(request))
        if any(
            mark in answering.text
            for answering in self.running.values()
            for mark in ("[sleep]", "[wait]")
        ):
            time.sleep(SLEEP_SECONDS)
        return events

    def token(self, answering: Answering) -> EngineEvent:
        request = answering.request
        if request.embed:
            del self.running[answering.number]
            return EngineEvent(
                answering.number,
                (),
                finished="eos",
                embedding=(float(len(request.prompt)), 1.0, 2.0, 3.0),
            )
        prompt = None
        if request.prompt_logprobs and not answering.num_generated:
            prompt = (
                None,
                *(TokenLogprobs(token, -2.0, ((token, -2.0),)) for token in request.prompt[1:]),
            )
        eos = self.tokenizer.eos_id
        assert eos is not None
        tokens: tuple[int, ...] = ()
        if request.max_new_tokens:
            token = eos
            if answering.left:
                token = answering.left.popleft()
            tokens = (token,)
        answering.num_generated += 1
        self.generated += len(tokens)
        finished = None
        if eos in tokens:
            finished = "eos"
        elif request.stop_ids & {*tokens}:
            finished = "stop"
        elif answering.num_generated >= request.max_new_tokens:
            finished = "length"
        if finished is not None:
            del self.running[answering.number]
        logprobs = None
        if request.logprobs is not None:
            logprobs = tuple(
                TokenLogprobs(token, -0.5, ((token, -0.5), (7, -1.5))[: request.logprobs])
                for token in tokens
            )
        return EngineEvent(
            answering.number, tokens, logprobs, finished, cached_tokens=3, prompt_logprobs=prompt
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            len(self.running), len(self.waiting), 100, 1000, 0, 0, self.generated, 0, 0, 0
        )


def tokenizer() -> Any:
    """One id per byte, with ChatML."""
    bytes_tokenizer = byte_tokenizer()
    return bytes_tokenizer.with_chat_template(BUILT_IN["chatml"].export(bytes_tokenizer))


def opening(setup: EngineSetup) -> Any:
    """What `open_engine` returns for a real model."""
    signs = Path(os.environ.get("HEADWAY_TEST_ENGINES", "nowhere"))
    while (signs / "hold").exists():
        time.sleep(0.01)
    if setup.path == "gone" and (signs / "gone").exists():
        raise ConfigError("model is 'gone', which is not a folder.")
    if setup.path == "broken":
        raise ConfigError("model is 'broken', which is not a folder.")
    with_template = tokenizer()
    chosen = with_template
    if setup.path == "no-template":
        chosen = with_template.with_chat_template(None)
    facts = EngineFacts(
        setup.name,
        chosen,
        CONTEXT,
        320,
        WIDTH,
        frozenset([with_template.eos_id]),
        "cpu",
        "float32",
        0,
        tuple(setup.adapters),
        constraints=True,
    )
    return StandInEngine(setup), facts, lambda request, refs: request


if __name__ == "__main__":
    raise SystemExit(main(opening))
