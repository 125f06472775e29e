"""One HTTP request whose answers an engine makes: from its submission to its last byte, or to the moment nobody waits for it.

    submit -> accepted -> pieces arrive (mailbox) -> JSON at the end, or server-sent events as they come

However it ends (answer, error, time limit, a client that is gone or does not read), what the engine still computes for it is cancelled.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headway.infer.engine.request import EngineRequest
from headway.infer.engine.text import RequestText
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

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy in front must not collect the events
]
EMBEDDINGS_AT_ONCE = 64
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
        self.model, self.metrics, self._ended = model, metrics, ended
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
        self._is_over = False

    def __enter__(self) -> ServedRequest:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._deadline.cancel()
        if self._watch is not None:
            self._watch.cancel()
        for stream in self.streams:
            if not stream.is_done:
                self.model.client.cancel(stream)
        self.metrics.seconds[self.model.facts.name].add(time.monotonic() - self.started)
        for choice in self.choices:
            self.metrics.ends[
                self.model.facts.name,
                choice.finish or ("cancelled" if self.mailbox.is_gone else "error"),
            ] += 1
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
        """A prompt with its media as arrays; another process decodes them. Ends early where nobody waits or the time is over."""
        if not prompt.media:
            return prompt
        self.model.client.check_alive()
        inputs = self.model.facts.media_inputs
        items = [(ref, inputs[ref.modality]) for ref in prompt.media.values()]
        sizes = [math.prod(source.shape) * np.dtype(source.dtype).itemsize for _, source in items]
        job = ("media", items, limits.media_pixels)
        decoding = asyncio.create_task(decoders.run(job, limits.media_seconds, sum(sizes)))
        decoding.add_done_callback(self._decoding_ended)
        try:
            while not decoding.done():
                await self.mailbox.wait()
                self._check()
            data = decoding.result()
        finally:
            decoding.cancel()
        arrays: dict[str, DecodedMedia] = {}
        offset = 0
        for name, (ref, source), size in zip(prompt.media, items, sizes, strict=True):
            array = np.frombuffer(data, source.dtype, math.prod(source.shape), offset).reshape(
                source.shape
            )
            arrays[name] = DecodedMedia(ref.modality, array)
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
        form = self.model.tool_format if reads_calls else None
        for prompt in prompts:
            self.prompt_tokens += prompt.num_tokens
            for sample, request in enumerate(prompt.requests):
                is_lazy = not stream and not stops and not one_call
                found = self.model.client.submit(
                    request, self.mailbox, prompt.decoded, is_lazy=is_lazy
                )
                self.streams.append(found)
                text = RequestText(self.model.tokenizer, prompt.tail, stops)
                reader = None if form is None else ToolCallReader(form)
                choice = Choice(
                    len(self.choices),
                    found,
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
        while not all(stream.is_accepted or stream.is_done for stream in self.streams):
            await self.mailbox.wait()
            self._check()
        self._check()
        self.mailbox.is_set = True  # events may have come with the acceptance

    def _check(self) -> None:
        """Raise if the request cannot be answered any more."""
        if self.mailbox.is_gone:
            raise ClientGone
        problem = next((stream.error for stream in self.streams if stream.error is not None), None)
        if problem is not None:
            raise problem
        if self.mailbox.is_expired:
            raise ApiError(
                504,
                f"The answer took longer than {self._seconds:g} s, which is this server's limit.",
                code="timeout",
            )
        if any(stream.finished == "cancelled" for stream in self.streams):
            raise ApiError(500, "The engine cancelled the answer.", code="engine_error")
        if self._first_counted < len(self.streams):
            self._count_first()

    def _count_first(self) -> None:
        begun = sorted(stream.first_at for stream in self.streams if stream.first_at is not None)
        for at in begun[self._first_counted :]:
            self.metrics.first_token[self.model.facts.name].add(at - self.started)
        self._first_counted = len(begun)

    async def pieces(self) -> list[tuple[Choice, ChoicePiece]]:
        """What arrived for any choice; waits for something."""
        await self.mailbox.wait()
        self._check()
        found: list[tuple[Choice, ChoicePiece]] = []
        for choice in self.choices:
            piece = choice.take()
            if piece is not None:
                if choice.was_cut:
                    self.model.client.cancel(choice.stream)
                found.append((choice, piece))
        return found

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
        made = [
            form.collect(choice, found) for choice, found in zip(self.choices, pieces, strict=True)
        ]
        return form.whole(made, usage(self.choices, self.prompt_tokens))

    async def stream(
        self, form: AnswerForm, send: Send, headers: Sequence[tuple[bytes, bytes]]
    ) -> None:
        """The answer as server-sent events. An error after the first byte is an event too, and the last one."""
        await self._send(
            send,
            {"type": "http.response.start", "status": 200, "headers": [*EVENT_HEADERS, *headers]},
        )
        try:
            while not self.is_complete:
                said: list[bytes] = []
                for choice, piece in await self.pieces():
                    if not choice.is_begun:
                        choice.is_begun = True
                        said.append(form.begin(choice))
                    said.append(form.events(choice, piece))
                if data := b"".join(said):
                    await self._send(
                        send, {"type": "http.response.body", "body": data, "more_body": True}
                    )
        except ApiError as problem:
            last = f"data: {ENCODE(problem.body())}\n\n".encode()
        else:
            last = (
                form.usage_event(usage(self.choices, self.prompt_tokens))
                if form.include_usage
                else b""
            ) + DONE
        await self._send(send, {"type": "http.response.body", "body": last, "more_body": False})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        self.sending_since = time.monotonic()
        await send(message)
        self.sending_since = None

    async def vectors(self, requests: Sequence[EngineRequest]) -> list[Sequence[float]]:
        """The mean hidden states of some texts, a part of them at a time."""
        found: list[Sequence[float]] = []
        for first in range(0, len(requests), EMBEDDINGS_AT_ONCE):
            some = [
                self.model.client.submit(one, self.mailbox, is_lazy=True)
                for one in requests[first : first + EMBEDDINGS_AT_ONCE]
            ]
            self.streams = some
            while not all(stream.is_done for stream in some):
                await self.mailbox.wait()
                self._check()
            self._check()
            found += [stream.embedding or () for stream in some]
            self.prompt_tokens += sum(stream.prompt_tokens for stream in some)
        return found
