"""One HTTP request whose answers an engine makes: from its submission to its last byte, or to the
moment nobody waits for it.

    submit -> accepted -> pieces arrive (mailbox)
        -> JSON at the end, or server-sent events as they come

However it ends (answer, error, time limit, a client that is gone or does not read), what the engine
still computes for it is cancelled.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.infer.engine.request import EngineRequest
from headway.infer.engine.text import RequestText
from headway.media.items import MediaRef
from headway.prepare.media_inputs import CellInput
from headway.serve.api_errors import ApiError
from headway.serve.choice import Choice, ChoicePiece, TokenOffsets
from headway.serve.engine_client import Mailbox, RequestStream
from headway.serve.engine_setup import DecodedMedia
from headway.serve.forms import DONE, ENCODE, AnswerForm, usage
from headway.serve.limits import ServeLimits
from headway.serve.metrics import ServeMetrics
from headway.serve.served_model import PreparedPrompt, ServedModel
from headway.serve.tool_calls import ToolCallReader
from headway.serve.workers import WorkerPool

if TYPE_CHECKING:
    from headway.prepare.media_inputs import MediaInputSpec

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy in front must not collect the events
]
EMBEDDINGS_AT_ONCE = 64
"""Texts of one request in the engine at a time: its queue would not take the 2,048 of a request."""
Receive = Callable[[], Any]
Send = Callable[[dict[str, Any]], Any]


class ClientGone(Exception):
    """The client closed its connection; nobody waits for an answer."""


class ServedRequest:
    """A request while it is answered. A context: at its end nothing is left in the engine."""

    def __init__(
        self,
        model: ServedModel,
        metrics: ServeMetrics,
        seconds: float,
        ended: Callable[[ServedRequest], object],
    ) -> None:
        """`seconds`: the time limit. `ended` is called when the request is over."""
        self.model = model
        self.metrics = metrics
        self._ended = ended
        self.started = time.monotonic()
        self.mailbox = Mailbox()
        self.streams: list[RequestStream] = []
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        self.sending_since: float | None = None
        """When the send began that the client has not taken yet."""
        self.abort: Callable[[], object] = lambda: None
        """Closes the connection without waiting for the client."""
        self._watch: asyncio.Task[None] | None = None
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.mailbox.expire)
        self._seconds = seconds
        self._first_counted = 0
        """Streams whose time to the first token was counted."""
        self._is_over = False

    def __enter__(self) -> ServedRequest:
        return self

    def __exit__(self, *_: object) -> None:
        """End the request, once: cancel what the engine still computes, and count how it ended."""
        if self._is_over:
            return

        self._is_over = True
        self._deadline.cancel()
        if self._watch is not None:
            self._watch.cancel()

        for stream in self.streams:
            if not stream.is_done:
                self.model.client.cancel(stream)

        # Counters have the name of the model; an adapter counts as its model.
        model_name = self.model.facts.name
        self.metrics.seconds[model_name].add(time.monotonic() - self.started)
        default_reason = "cancelled" if self.mailbox.is_gone else "error"
        for choice in self.choices:
            self.metrics.ends[model_name, choice.finish or default_reason] += 1

        self._ended(self)

    def watch(self, receive: Receive) -> None:
        """Notice when the client leaves."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue
            self.mailbox.leave()

        self._watch = asyncio.create_task(wait())

    async def decoded(
        self, prompt: PreparedPrompt, decoders: WorkerPool, limits: ServeLimits
    ) -> PreparedPrompt:
        """A prompt with its media as arrays; another process decodes them.

        Ends early where nobody waits or the time is over.
        """
        if not prompt.media:
            return prompt

        # Before the decoding, which would be for nothing.
        self.model.client.check_alive()
        inputs = self.model.facts.media_inputs
        request_media = prompt.requests[0].media
        items: list[tuple[MediaRef, MediaInputSpec]] = []
        for name, ref in prompt.media.items():
            spec = inputs[ref.modality]
            if isinstance(spec, CellInput) and request_media is not None:
                spec = spec.sized(request_media.grids[name])
            items.append((ref, spec))
        # The shape of an array follows from its encoder: the answer is raw bytes of known sizes.
        sizes = [math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for _, spec in items]
        job = ("media", items, limits.media_pixels)
        decoding = asyncio.create_task(decoders.run(job, limits.media_seconds, sum(sizes)))
        decoding.add_done_callback(self._decoding_ended)
        # The mailbox wakes for each of three: the arrays, a client that leaves, the time limit.
        try:
            while not decoding.done():
                await self.mailbox.wait()
                self._check()
            data = decoding.result()
        finally:
            decoding.cancel()

        arrays: dict[str, DecodedMedia] = {}
        offset = 0
        for name, (ref, spec), size in zip(prompt.media, items, sizes, strict=True):
            values = np.frombuffer(data, spec.dtype, math.prod(spec.shape), offset)
            arrays[name] = DecodedMedia(ref.modality, values.reshape(spec.shape))
            offset += size

        return replace(prompt, media={}, decoded=arrays)

    def _decoding_ended(self, decoding: asyncio.Task[bytes]) -> None:
        if not decoding.cancelled():
            decoding.exception()  # known now, also where the request has ended for another reason
        self.mailbox.wake()

    def submit(
        self,
        prompts: Sequence[PreparedPrompt],
        stops: Sequence[str],
        *,
        stream: bool,
        reads_calls: bool = False,
        one_call: bool = False,
    ) -> None:
        """Send all prompts and samples to the engine."""
        tool_format = self.model.tool_format if reads_calls else None
        # A stop text, or the first of several calls, is seen in the text and ends the engine's
        # request early; without them nobody looks at an answer that is not streamed until its end.
        wakes_only_at_end = not stream and not stops and not one_call
        for prompt in prompts:
            self.prompt_tokens += prompt.num_tokens
            for sample, request in enumerate(prompt.requests):
                request_stream = self.model.client.submit(
                    request,
                    self.mailbox,
                    prompt.decoded,
                    wakes_only_at_end=wakes_only_at_end,
                )
                self.streams.append(request_stream)
                text = RequestText(self.model.tokenizer, prompt.tail, stops)
                reader = None
                if tool_format is not None:
                    reader = ToolCallReader(tool_format)

                choice = Choice(
                    len(self.choices),
                    request_stream,
                    text,
                    reader,
                    one_call=one_call,
                    special_ids=self.model.special_ids,
                )
                choice.sample = sample
                choice.echo = prompt.echo
                if request.prompt_logprobs:
                    choice.prompt = request.prompt

                if request.logprobs is not None:
                    # With the prompt's log-probabilities the text begins with the prompt.
                    before = () if request.prompt_logprobs else prompt.tail
                    choice.offsets = TokenOffsets(self.model.tokenizer, before)

                self.choices.append(choice)

    async def accepted(self) -> None:
        """Return when the engine has taken every part; raise if it refused one."""
        # A stream that has failed is done; `_check` raises its error.
        while not all(stream.is_accepted or stream.is_done for stream in self.streams):
            await self.mailbox.wait()
            self._check()
        self._check()
        # Events may have come with the acceptance, and waiting for it has used up their wake-up:
        # the next `wait` must return at once.
        self.mailbox.is_set = True

    def _check(self) -> None:
        """Raise if the request cannot be answered any more."""
        # First, since an error cannot be sent to nobody.
        if self.mailbox.is_gone:
            raise ClientGone

        for stream in self.streams:
            if stream.error is not None:
                raise stream.error

        if self.mailbox.is_expired:
            raise ApiError(
                504,
                f"The answer took longer than {self._seconds:g} s, which is this server's limit.",
                code="timeout",
            )

        if any(stream.finished == "cancelled" for stream in self.streams):
            raise ApiError(500, "The engine cancelled the answer.", code="engine_error")

        # Counted here, because everything that waits for the engine calls `_check`.
        if self._first_counted < len(self.streams):
            self._count_first()

    def _count_first(self) -> None:
        """Count the time to the first token of the streams that have begun since the last call."""
        first_times = sorted(
            stream.first_at for stream in self.streams if stream.first_at is not None
        )
        histogram = self.metrics.first_token[self.model.facts.name]
        # A stream that begins later sorts behind those that were counted.
        for first_at in first_times[self._first_counted :]:
            histogram.add(first_at - self.started)
        self._first_counted = len(first_times)

    async def pieces(self) -> list[tuple[Choice, ChoicePiece]]:
        """What arrived for any choice; waits for something."""
        await self.mailbox.wait()
        self._check()
        arrived: list[tuple[Choice, ChoicePiece]] = []
        for choice in self.choices:
            piece = choice.take()
            if piece is None:
                continue
            if choice.was_cut:
                self.model.client.cancel(choice.stream)
            arrived.append((choice, piece))
        return arrived

    @property
    def is_complete(self) -> bool:
        """Every answer has ended."""
        return all(choice.finish is not None for choice in self.choices)

    async def whole(self, form: AnswerForm) -> dict[str, Any]:
        """The answer as one object."""
        pieces: list[list[ChoicePiece]] = [[] for _ in self.choices]
        while not self.is_complete:
            for choice, piece in await self.pieces():
                pieces[choice.index].append(piece)
        answers = [
            form.collect(choice, choice_pieces)
            for choice, choice_pieces in zip(self.choices, pieces, strict=True)
        ]
        return form.whole(answers, usage(self.choices, self.prompt_tokens))

    async def stream(
        self, form: AnswerForm, send: Send, headers: Sequence[tuple[bytes, bytes]]
    ) -> None:
        """The answer as server-sent events.

        An error after the first byte is an event too, and the last one.
        """
        await self._send(
            send,
            {"type": "http.response.start", "status": 200, "headers": [*EVENT_HEADERS, *headers]},
        )
        try:
            while not self.is_complete:
                # One write for everything that arrived, whichever choice it belongs to.
                events: list[bytes] = []
                for choice, piece in await self.pieces():
                    if not choice.is_begun:
                        choice.is_begun = True
                        events.append(form.begin(choice))
                    events.append(form.events(choice, piece))

                if data := b"".join(events):
                    await self._send(
                        send, {"type": "http.response.body", "body": data, "more_body": True}
                    )
        except ApiError as problem:
            last = f"data: {ENCODE(problem.body())}\n\n".encode()
        else:
            last = DONE
            if form.include_usage:
                last = form.usage_event(usage(self.choices, self.prompt_tokens)) + DONE

        await self._send(send, {"type": "http.response.body", "body": last, "more_body": False})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        """Send, and let `ServeState.look` see since when the client takes nothing."""
        self.sending_since = time.monotonic()
        await send(message)
        self.sending_since = None

    async def vectors(self, requests: Sequence[EngineRequest]) -> list[Sequence[float]]:
        """The mean hidden states of some texts, a part of them at a time."""
        embeddings: list[Sequence[float]] = []
        for first in range(0, len(requests), EMBEDDINGS_AT_ONCE):
            self.streams = [
                self.model.client.submit(request, self.mailbox, wakes_only_at_end=True)
                for request in requests[first : first + EMBEDDINGS_AT_ONCE]
            ]
            while not all(stream.is_done for stream in self.streams):
                await self.mailbox.wait()
                self._check()

            self._check()
            embeddings += [stream.embedding or () for stream in self.streams]
            self.prompt_tokens += sum(stream.prompt_tokens for stream in self.streams)

        return embeddings
