"""The process that owns a model and its device: `python -m headway.serve.engine_process`. Commands
on stdin, events on stdout.

    in     EngineSetup, then lists of
           ("submit", id, EngineRequest, decoded media) and ("cancel", id)
    out    ("ready", EngineFacts) or ("failed", exit code, message); then
           ("accepted", id), ("refused", id, status, message, code),
           ("events", [(id, tokens, logprobs, finished, cached, more), ...]) once per step,
           ("stats", {...}) about once a second;
           ("ended", reason) where the engine itself failed, before the process ends with 1

Whatever a request raises while it is taken refuses that request alone. The loop receives, steps and
sends; it has no other thread. The end of stdin is the end of the process. What libraries print goes
to stderr.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headway.errors import ConfigError, HeadwayError, first_line
from headway.infer.engine.request import (
    EngineEvent,
    EngineRequest,
    EngineStats,
    QueueFull,
    RequestTooLarge,
    TokenLogprobs,
)
from headway.runtime.stop import SIGNALS
from headway.serve.engine_setup import DecodedMedia, EngineFacts, EngineSetup
from headway.serve.frames import FrameReader, pack, widen_pipe

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.model.encoders.base import FrozenMediaEncoder
    from headway.prepare.media_inputs import MediaInputSpec

STATS_SECONDS = 0.5
READ_BYTES = 1 << 20
log = logging.getLogger("headway")
ENCODED_AT_ONCE = 8
"""Pictures or sounds in one call of an encoder, between two steps of the engine."""
USUAL_PIXELS = 512
"""Of a side of a picture that clients send often."""
KEPT_FEATURE_BYTES = 256 << 20
"""Features of pictures and sounds that are kept for the next requests."""
Encode = Callable[[EngineRequest, Mapping[str, DecodedMedia]], EngineRequest | None]
"""Puts the features of media into a request; None: call it again after the next step."""


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

    # Messages have a descriptor of their own: what libraries print to stdout goes to stderr.
    channel = EngineChannel(os.dup(0), os.dup(1))
    os.dup2(2, 1)
    setup = channel.first()
    if setup is None:
        return 0

    try:
        engine, facts, encode = (opening or open_engine)(setup)
    except HeadwayError as problem:
        channel.send([("failed", problem.exit_code, str(problem))])
        return 0
    except Exception as problem:
        log.exception("%s: the model cannot be loaded", setup.name)
        channel.send(
            [("failed", 1, f"{setup.path}: {type(problem).__name__}: {first_line(problem)}.")]
        )
        return 0

    channel.send([("ready", facts)])
    try:
        EngineLoop(engine, channel, encode).run()
    except Exception as problem:
        log.exception("%s: the engine failed", setup.name)
        channel.send([("ended", _reason(problem))])
        return 1

    return 0


def _reason(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {first_line(problem)}"


def open_engine(setup: EngineSetup) -> OpenedEngine:
    """Load a model.

    Returns its engine, what clients may know of it, and what puts media into a request.
    """
    from headway.infer.engine.ranks import build_engine, load_on_ranks
    from headway.model.layout import num_parameters
    from headway.serve.constraints import can_constrain, constraints_of

    loaded = load_on_ranks(setup.path, setup.tensor, setup.device, setup.precision)
    if setup.masks is not None:
        loaded = loaded.with_mask_choice(setup.masks)

    engine = build_engine(
        loaded,
        setup.options,
        {name: Path(path) for name, path in setup.adapters.items()},
        constraints_of,
    )
    # Before the first request: kernels are compiled, decoding steps recorded.
    engine.warm_up()

    # A request that leaves its length open may fill the context, but never more than the cache.
    room = min(engine.context, engine.cache.pool.num_pages * setup.options.page_tokens)
    if room < engine.context:
        log.warning(
            "%s: the cache has room for %d tokens of the context of %d. Raise --cache-gib.",
            setup.name,
            room,
            engine.context,
        )

    media_tokens: dict[str, int] = {}
    media = loaded.config.media
    if media is not None:
        media_tokens = {media_input.modality: media_input.tokens for media_input in media.inputs}
    native = None
    if loaded.config.vision is not None:
        native = loaded.config.vision.positions
        media_tokens = dict(native.tokens)

    masks = loaded.describe_masks()
    if masks is not None:
        # Clients see the name of a file, not where it lies.
        masks = {**masks, "from": Path(str(masks["from"])).name}

    encoding = MediaEncoding(loaded)
    try:
        encoding.warm_up()
    except (HeadwayError, RuntimeError) as problem:  # CUDA's lack of memory is a RuntimeError
        # Requests without media are answered; one with media fails with its own reason.
        log.warning("%s: pictures and sounds may fail: %s", setup.name, first_line(problem))
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
        masks=masks,
        media=media_tokens,
        media_missing=media is not None and media.missing,
        native=native,
        constraints=can_constrain(loaded.tokenizer, loaded.end_ids),
        fingerprint="" if loaded.tokenizer is None else loaded.tokenizer.fingerprint,
        media_inputs=encoding.inputs,
        media_problem=encoding.problem,
    )
    return engine, facts, encoding


class MediaEncoding:
    """Turns the decoded pictures and sounds of a request into features, a few at a time: others'
    tokens wait for one call only.

    Features are kept for a while: samples of one prompt, and the next turns of a conversation, hold
    the same pictures.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        from headway.infer.media import encoder_of

        self.loaded = loaded
        self.encoders: dict[str, FrozenMediaEncoder] = {}
        self.problem = ""
        self._features: OrderedDict[str, np.ndarray] = OrderedDict()
        shape = loaded.config.media
        try:
            if shape is not None:
                for media_input in shape.inputs:
                    self.encoders[media_input.modality] = encoder_of(loaded, media_input)
        except HeadwayError as problem:
            # The model still answers questions without media.
            log.warning("%s", problem)
            self.problem = str(problem)

    @property
    def inputs(self) -> dict[str, MediaInputSpec]:
        """How each encoder reads an item."""
        if self.loaded.config.vision is not None:
            from headway.prepare.media_inputs import CellInput

            return {"image": CellInput(self.loaded.config.vision.spec)}
        return {modality: encoder.input for modality, encoder in self.encoders.items()}

    def warm_up(self) -> None:
        """Run every encoder once with one item and once with many: kernels are chosen and memory is
        taken now."""
        # On a CPU only the first call takes long, whatever its size.
        is_on_gpu = self.loaded.device.type == "cuda"
        counts = [ENCODED_AT_ONCE, 1] if is_on_gpu else [1]
        for encoder in self.encoders.values():
            item = np.zeros(encoder.input.shape, encoder.input.dtype)
            for count in counts:
                encoder.encode(np.stack([item] * count))

        vision = self.loaded.config.vision
        if vision is not None:
            from headway.infer.media import encode_cells

            sides = [USUAL_PIXELS, 1] if is_on_gpu else [1]
            for side in sides:
                # `fit` makes it as large as the smallest picture that the model takes.
                grid = vision.spec.fit(side, side, "made-up picture")
                rows, columns = grid
                cells = np.zeros((rows * columns, *vision.spec.cell_shape), np.uint8)
                encode_cells(self.loaded, grid, cells)

    def __call__(
        self, request: EngineRequest, media: Mapping[str, DecodedMedia]
    ) -> EngineRequest | None:
        """The request with its features; None where another call is needed."""
        missing = [name for name in media if name not in self._features]
        is_encoded = False
        assert request.media is not None
        if missing and self.loaded.config.vision is not None:
            from headway.infer.media import encode_cells

            # One picture at a time: each has its own size.
            name = missing[0]
            grid = request.media.grids[name]
            self._features[name] = encode_cells(self.loaded, grid, media[name].array.copy())
            is_encoded = True
        for modality, encoder in self.encoders.items():
            names = [name for name in missing if media[name].modality == modality][:ENCODED_AT_ONCE]
            if names:
                features = encoder.encode(np.stack([media[name].array for name in names]))
                self._features |= dict(zip(names, features, strict=True))
                # One call of one encoder; the rest follows after the engine's next step.
                is_encoded = True
                break
        if missing and not is_encoded:
            raise ConfigError(self.problem or f"the model takes {', '.join(self.encoders)} only.")

        if any(name not in self._features for name in media):
            return None

        features = {name: self._features[name] for name in media}
        # The least recently used are dropped, and only now: a request whose features are more
        # than what is kept still gets all of its own.
        for name in features:
            self._features.move_to_end(name)
        while sum(array.nbytes for array in self._features.values()) > KEPT_FEATURE_BYTES:
            self._features.popitem(last=False)

        return replace(request, media=replace(request.media, features=features))


class EngineChannel:
    """The two pipes to the HTTP process: commands come in, messages go out."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading = reading
        self.writing = writing
        self._reader = FrameReader()
        self._waiting: list[Any] = []
        self.is_closed = False
        widen_pipe(reading)
        widen_pipe(writing)

    def first(self) -> EngineSetup | None:
        """The first message; None if the pipe is closed before."""
        while not self._waiting and not self.is_closed:
            self._read()
        if self._waiting:
            return self._waiting.pop(0)
        return None

    def receive(self, timeout: float) -> list[Any]:
        """The commands that have arrived; waits for some, if none has."""
        if not self._waiting and select.select([self.reading], [], [], timeout)[0]:
            self._read()
        frames = self._waiting
        self._waiting = []
        commands: list[Any] = []
        for frame in frames:
            commands += frame
        return commands

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
        self.engine = engine
        self.channel = channel
        self.encode = encode
        self._clients_number: dict[int, int] = {}
        """Number in the engine -> the client's number."""
        self._engines_number: dict[int, int] = {}
        self._encoding: dict[int, tuple[EngineRequest, Mapping[str, DecodedMedia]]] = {}
        """Requests whose media are being encoded, by the client's number, oldest first."""
        self._next_stats = 0.0

    def run(self) -> None:
        """Serve until the HTTP process closes the pipe."""
        while not self.channel.is_closed:
            is_idle = not self.engine.busy and not self._encoding
            timeout = STATS_SECONDS if is_idle else 0.0
            messages = self.round(self.channel.receive(timeout))
            if messages:
                self.channel.send(messages)

    def round(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Take commands and compute one step; what the HTTP process must know."""
        was_busy = self.engine.busy
        messages: list[Any] = []
        for command in commands:
            if command[0] == "submit":
                messages += self._submit(*command[1:])
            else:
                self._cancel(command[1])

        # One call of an encoder per step, so that pictures do not stop the tokens of others.
        if self._encoding:
            number, (request, media) = next(iter(self._encoding.items()))
            messages += self._submit(number, request, media)

        if self.engine.busy:
            packed = map(self._event, self.engine.step())
            events = [event for event in packed if event is not None]
            if events:
                messages.append(("events", events))

        # Also when it becomes idle: the last numbers would stand as those of now.
        now = time.monotonic()
        if now >= self._next_stats or (was_busy and not self.engine.busy):
            messages.append(("stats", asdict(self.engine.stats())))
            self._next_stats = now + STATS_SECONDS

        return messages

    def _submit(
        self, number: int, request: EngineRequest, media: Mapping[str, DecodedMedia]
    ) -> list[tuple[Any, ...]]:
        """Give a request to the engine: what the HTTP process must know of it.

        Whatever it raises is the error of this request alone.
        """
        if request.media is not None and number not in self._encoding and self._encoding:
            # Others' media are being encoded; requests with media keep their order.
            self._encoding[number] = request, media
            return []

        try:
            encoded: EngineRequest | None = request
            if request.media is not None:
                encoded = self.encode(request, media)

            if encoded is None:
                self._encoding[number] = request, media
                return []

            self._encoding.pop(number, None)
            engines_number = self.engine.submit(encoded)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as problem:  # a panic in a Rust library is no Exception
            self._encoding.pop(number, None)
            return [("refused", number, *_refusal(problem))]

        self._clients_number[engines_number] = number
        self._engines_number[number] = engines_number
        return [("accepted", number)]

    def _cancel(self, number: int) -> None:
        self._encoding.pop(number, None)
        if number in self._engines_number:
            self.engine.cancel(self._engines_number[number])

    def _event(self, event: EngineEvent) -> tuple[Any, ...] | None:
        """An event as it is sent; None for a request that was refused while it was taken."""
        number = self._clients_number.get(event.request)
        if number is None:
            return None

        if event.finished is not None:
            del self._clients_number[event.request]
            del self._engines_number[number]

        # What few events have travels in a mapping, so that the usual ones stay small.
        more: dict[str, Any] | None = None
        if (
            event.embedding is not None
            or event.prompt_logprobs is not None
            or event.error is not None
        ):
            more = {"embedding": event.embedding, "error": event.error}
            if event.prompt_logprobs is not None:
                more["prompt_logprobs"] = [
                    None if logprob is None else _plain(logprob)
                    for logprob in event.prompt_logprobs
                ]

        logprobs = None
        if event.logprobs is not None:
            logprobs = [_plain(logprob) for logprob in event.logprobs]
        return number, event.tokens, logprobs, event.finished, event.cached_tokens, more


def _refusal(problem: BaseException) -> tuple[int, str, str | None]:
    """Status, message and code of a request that raised this."""
    if isinstance(problem, QueueFull):
        return 429, str(problem), "queue_full"
    if isinstance(problem, RequestTooLarge):
        return 400, str(problem), "context_length_exceeded"
    if isinstance(problem, HeadwayError):
        return 400, str(problem), None
    log.error("a request failed before it was computed", exc_info=problem)
    return 500, f"The engine could not take the request: {_reason(problem)}", "engine_error"


def _plain(logprobs: TokenLogprobs) -> tuple[int, float, tuple[tuple[int, float], ...]]:
    """As a tuple, which pickle writes without the name of a class."""
    return logprobs.token, logprobs.logprob, logprobs.top


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    raise SystemExit(main())
