"""The process that owns a model and its device: `python -m headway.serve.engine_process`. Commands on stdin, events on stdout.

    in     EngineSetup, then lists of ("submit", id, EngineRequest, media) and ("cancel", id)
    out    ("ready", EngineFacts) or ("failed", exit code, message); then ("accepted", id), ("refused", id, status, message, code),
           ("events", [(id, tokens, logprobs, finished, cached, more), ...]) once per step, ("stats", {...}) about once a second

The loop receives, steps and sends; it has no other thread. The end of stdin is the end of the process. What libraries print goes to stderr.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headway.errors import HeadwayError, first_line
from headway.infer.engine.request import EngineEvent, EngineRequest, EngineStats, PromptMedia, QueueFull, RequestTooLarge, TokenLogprobs
from headway.media.items import MediaRef
from headway.runtime.stop import SIGNALS
from headway.serve.engine_setup import EngineFacts, EngineSetup
from headway.serve.frames import FrameReader, pack, widen_pipe

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel

STATS_SECONDS = 0.5
READ_BYTES = 1 << 20
log = logging.getLogger("headway")
Encode = Callable[[EngineRequest, Sequence[MediaRef]], EngineRequest]
"""Puts the features of media into a request."""


class ServableEngine(Protocol):
    """What the loop needs of an engine."""

    @property
    def busy(self) -> bool: ...

    def submit(self, request: EngineRequest) -> int: ...

    def cancel(self, request: int) -> None: ...

    def step(self) -> list[EngineEvent]: ...

    def stats(self) -> EngineStats: ...


OpenedEngine = tuple[ServableEngine, EngineFacts, Encode]


def main(opening: Callable[[EngineSetup], OpenedEngine] | None = None) -> int:
    """Serve one model until stdin ends. `opening` loads it; `open_engine` by default."""
    for number in SIGNALS:  # the HTTP process decides when this one ends
        signal.signal(number, signal.SIG_IGN)
    channel = EngineChannel(os.dup(0), os.dup(1))
    os.dup2(2, 1)  # what libraries print is no message
    found = channel.first()
    if found is None:
        return 0
    try:
        engine, facts, encode = (opening or open_engine)(found)
    except HeadwayError as problem:
        channel.send([("failed", problem.exit_code, str(problem))])
        return 0
    except Exception as problem:
        log.exception("%s: the model cannot be loaded", found.name)
        channel.send([("failed", 1, f"{found.path}: {type(problem).__name__}: {first_line(problem)}.")])
        return 0
    channel.send([("ready", facts)])
    EngineLoop(engine, channel, encode).run()
    return 0


def open_engine(setup: EngineSetup) -> OpenedEngine:
    """Load a model. Returns its engine, what clients may know of it, and what puts media into a request."""
    from headway.infer.engine.ranks import build_engine, load_on_ranks
    from headway.model.layout import num_parameters
    from headway.serve.constraints import constraints_of

    loaded = load_on_ranks(setup.path, setup.tensor, setup.device, setup.precision)
    if setup.masks is not None:
        loaded = loaded.with_mask_choice(setup.masks)
    engine = build_engine(loaded, setup.options, {name: Path(path) for name, path in setup.adapters.items()}, constraints_of)
    engine.warm_up()
    # a request that leaves its length open may fill the context, but never more than the cache
    room = min(engine.context, engine.cache.pool.num_pages * setup.options.page_tokens)
    if room < engine.context:
        log.warning("%s: the cache has room for %d tokens of the context of %d. Raise --cache-gib.", setup.name, room, engine.context)
    media = loaded.config.media
    facts = EngineFacts(
        name=setup.name,
        tokenizer=loaded.tokenizer,
        context=room,
        vocab=loaded.config.vocab,
        hidden_size=loaded.config.hidden_size,
        end_ids=loaded.end_ids,
        device=str(loaded.device),
        dtype=str(loaded.model.head_weight.dtype).removeprefix("torch."),
        parameters=num_parameters(loaded.config),
        adapters=tuple(setup.adapters),
        masks=None if (masks := loaded.describe_masks()) is None else {**masks, "from": Path(str(masks["from"])).name},
        media={one.modality: one.tokens for one in media.inputs} if media is not None else {},
        media_missing=media.missing if media is not None else False,
        constraints=constraints_of(loaded) is not None,
    )
    return engine, facts, MediaEncoding(loaded)


class MediaEncoding:
    """Turns the pictures and sounds of a request into features; each encoder is opened once."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._encoders: dict[str, Any] = {}

    def __call__(self, request: EngineRequest, refs: Sequence[MediaRef]) -> EngineRequest:
        from headway.infer.media import encode_media

        assert request.media is not None
        features = encode_media(self.loaded, {ref.content_hash(): ref for ref in refs}, self._encoders)
        return replace(request, media=PromptMedia(request.media.items, features))


class EngineChannel:
    """The two pipes to the HTTP process."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing
        self._reader = FrameReader()
        self._waiting: list[Any] = []
        self.is_closed = False
        widen_pipe(reading)
        widen_pipe(writing)

    def first(self) -> EngineSetup | None:
        """The first message; None if the pipe is closed before."""
        while not self._waiting and not self.is_closed:
            self._read()
        return self._waiting.pop(0) if self._waiting else None

    def receive(self, timeout: float) -> list[Any]:
        """The commands that have arrived; waits for some, if none has."""
        if not self._waiting and select.select([self.reading], [], [], timeout)[0]:
            self._read()
        found, self._waiting = self._waiting, []
        return [command for frame in found for command in frame]

    def send(self, messages: Sequence[Any]) -> None:
        """Send messages; waits while the pipe is full."""
        data = memoryview(b"".join(map(pack, messages)))
        try:
            while data:
                data = data[os.write(self.writing, data) :]
        except BrokenPipeError:
            self.is_closed = True

    def _read(self) -> None:
        data = os.read(self.reading, READ_BYTES)
        if not data:
            self.is_closed = True
        self._waiting += self._reader.feed(data)


class EngineLoop:
    """Receives commands, steps the engine, sends what it made."""

    def __init__(self, engine: ServableEngine, channel: EngineChannel, encode: Encode) -> None:
        self.engine, self.channel, self.encode = engine, channel, encode
        self._theirs: dict[int, int] = {}
        """Number in the engine -> the client's number."""
        self._ours: dict[int, int] = {}

    def run(self) -> None:
        """Serve until the HTTP process closes the pipe."""
        next_stats = 0.0
        while not self.channel.is_closed:
            is_busy = self.engine.busy
            messages: list[Any] = []
            for command in self.channel.receive(0.0 if is_busy else STATS_SECONDS):
                if command[0] == "submit":
                    messages.append(self._submit(*command[1:]))
                elif command[1] in self._ours:
                    self.engine.cancel(self._ours[command[1]])
            if self.engine.busy:
                events = [self._event(one) for one in self.engine.step()]
                if events:
                    messages.append(("events", events))
            if (now := time.monotonic()) >= next_stats or (is_busy and not self.engine.busy):
                messages.append(("stats", asdict(self.engine.stats())))
                next_stats = now + STATS_SECONDS
            if messages:
                self.channel.send(messages)

    def _submit(self, number: int, request: EngineRequest, refs: Sequence[MediaRef]) -> tuple[Any, ...]:
        try:
            given = self.encode(request, refs) if request.media is not None else request
            found = self.engine.submit(given)
        except QueueFull as problem:
            return "refused", number, 429, str(problem), "queue_full"
        except RequestTooLarge as problem:
            return "refused", number, 400, str(problem), "context_length_exceeded"
        except HeadwayError as problem:
            return "refused", number, 400, str(problem), None
        self._theirs[found], self._ours[number] = number, found
        return "accepted", number

    def _event(self, event: EngineEvent) -> tuple[Any, ...]:
        number = self._theirs[event.request]
        more: dict[str, Any] | None = None
        if event.finished is not None:
            del self._theirs[event.request], self._ours[number]
        if event.embedding is not None or event.prompt_logprobs is not None or event.error is not None:
            more = {"embedding": event.embedding, "error": event.error}
            if event.prompt_logprobs is not None:
                more["prompt_logprobs"] = [None if one is None else _plain(one) for one in event.prompt_logprobs]
        logprobs = None if event.logprobs is None else [_plain(one) for one in event.logprobs]
        return number, event.tokens, logprobs, event.finished, event.cached_tokens, more


def _plain(one: TokenLogprobs) -> tuple[int, float, tuple[tuple[int, float], ...]]:
    return one.token, one.logprob, one.top


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    raise SystemExit(main())
