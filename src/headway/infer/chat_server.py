"""Answers of a chat from a running `headway serve`, or any server with OpenAI's API: messages go
over HTTP, pieces of text come back.

    turns, media -> POST /v1/chat/completions (stream) -> server-sent events -> pieces of text

Nothing but the Python library is needed. Redirects are not followed: the token goes to the given
address alone.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast
from urllib.parse import urlsplit

from headway.errors import ConfigError, HeadwayError
from headway.infer.chat import ChatAnswer, ChatStats, ContextFull
from headway.infer.generate_options import GenerateOptions, Say
from headway.media.items import MediaRef, Modality
from headway.records.encode_media import MARK
from headway.tokenizer.chat_template import Turn

log = logging.getLogger("headway")

CONNECT_SECONDS = 20.0
ANSWER_SECONDS = 600.0
"""Between two pieces of an answer; a busy server lets a request wait."""
LARGEST_BODY = 16 << 20
"""Bytes of an answer, or of one line of a stream, that are read at most."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
SOUNDS = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg"}
"""First bytes of sound files -> OpenAI's name of the format."""


class ServerError(HeadwayError):
    """A server that does not answer, or not as expected."""

    exit_code = 1


class ChatServer:
    """The address of a server, its token, and requests to it."""

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        # `port` raises where it is no number; a user name would be a secret in a URL.
        try:
            port = parts.port
        except ValueError:
            port = -1
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or port == -1
            or parts.username is not None
        ):
            raise ConfigError(
                f"--url is {url[:200]!r}; it must be an address such as http://127.0.0.1:8000."
            )
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._is_secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port
        # People give the address with or without the /v1 of OpenAI's clients.
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._token = token
        if token and not self._is_secure and parts.hostname not in LOOPBACK:
            log.warning(
                "%s: the token is sent without encryption. Use https, or an ssh tunnel, where "
                "others can listen.",
                self.url,
            )

    def connect(self, seconds: float = CONNECT_SECONDS) -> http.client.HTTPConnection:
        """A connection that opens with its first request."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=seconds)

    def request(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        body: Mapping[str, Any] | None = None,
    ) -> http.client.HTTPResponse:
        """Send a request; what is no answer is an error of one line."""
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            connection.request(
                "GET" if data is None else "POST", self._prefix + path, data, headers
            )
            answer = connection.getresponse()
            if answer.status == 200:
                return answer
            said = answer.read(LARGEST_BODY)
        except (OSError, http.client.HTTPException) as problem:
            raise ServerError(
                f"{self.url}: does not answer: {problem or type(problem).__name__}. Is headway "
                "serve running there?"
            ) from None
        raise self._refusal(answer.status, said)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path of the server."""
        with closing(self.connect()) as connection:
            answer = self.request(connection, path)
            try:
                value = json.loads(answer.read(LARGEST_BODY))
            except (OSError, ValueError, http.client.HTTPException):
                value = None
        if not isinstance(value, dict):
            raise ServerError(
                f"{self.url}{path}: is not what a server of models answers. Give the address of "
                "headway serve."
            )
        return cast(dict[str, Any], value)

    def models(self) -> list[str]:
        """Names of the models that the server lists."""
        listed = self.get("/v1/models").get("data")
        if isinstance(listed, list):
            return [
                str(model["id"]) for model in listed if isinstance(model, dict) and "id" in model
            ]
        return []

    def _refusal(self, status: int, body: bytes) -> HeadwayError:
        """The error that an answer other than 200 stands for, with what the server says."""
        # OpenAI's shape has an object under `error`, other servers a text, proxies a page of HTML.
        try:
            error: Any = json.loads(body)["error"]
        except (ValueError, TypeError, KeyError):
            error = None
        if isinstance(error, dict):
            said = error.get("message")
        else:
            said = error
        if said:
            line = " ".join(str(said).split())[:500]
        else:
            line = f"HTTP {status}"
        if status in (401, 403):
            hint = "Set HEADWAY_SERVE_TOKEN to the server's token."
            if self._token:
                hint = "HEADWAY_SERVE_TOKEN is not the server's."
            return ConfigError(f"{self.url}: needs a token. {hint}")
        if isinstance(error, dict) and error.get("code") == "context_length_exceeded":
            return ContextFull(line)
        # 429 is a full queue: nothing is wrong with the request.
        if status < 500 and status != 429:
            return ConfigError(f"{self.url}: {line}")
        return ServerError(f"{self.url}: {line}")


class ServerResponder:
    """One model of a server, asked over HTTP."""

    def __init__(self, server: ChatServer, name: str) -> None:
        self.server = server
        self.name = name
        self._facts = self._find_facts()

    def _find_facts(self) -> dict[str, Any]:
        """What the server says about the model or the model of its adapter; {} where it says
        nothing.
        """
        try:
            models = self.server.get("/api/info").get("models")
        except ConfigError:  # another server with OpenAI's API
            return {}
        listed = []
        if isinstance(models, list):
            listed = [model for model in models if isinstance(model, dict)]
        return next(
            (
                model
                for model in listed
                if model.get("name") == self.name or self.name in (model.get("adapters") or ())
            ),
            {},
        )

    @property
    def takes(self) -> frozenset[Modality]:
        """Kinds of media that the model takes; none where the server does not say."""
        kinds: list[tuple[Modality, str]] = [("image", "images"), ("audio", "audio")]
        return frozenset(kind for kind, key in kinds if self._facts.get(key))

    def answer(
        self,
        turns: Sequence[Turn],
        media: Sequence[MediaRef],
        options: GenerateOptions,
        say: Say,
        *,
        attempt: int = 0,
        is_last_try: bool = False,
    ) -> ChatAnswer:
        """The next turn."""
        sampling = options.sampling
        settings: dict[str, Any] = {
            "model": self.name,
            "messages": list(_messages(turns, media)),
            "max_tokens": options.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # another attempt at the same question draws other numbers
            "seed": sampling.seed + attempt,
            "stop": list(options.stop) or None,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # Servers other than headway's may refuse null.
        body = {key: value for key, value in settings.items() if value is not None}
        said = list[str]()
        usage = dict[str, Any]()
        begun = first = time.monotonic()
        was_interrupted = was_cut = False
        with closing(self.server.connect(ANSWER_SECONDS)) as connection:
            try:
                for event in self._events(connection, body):
                    usage = event.get("usage") or usage
                    was_cut = was_cut or any(
                        choice.get("finish_reason") == "length"
                        for choice in event.get("choices") or ()
                    )
                    piece = _piece(event)
                    if piece:
                        if not said:
                            first = time.monotonic()
                        said.append(piece)
                        say(piece)
            except KeyboardInterrupt:
                # The connection is closed below, by which the server knows that nobody reads on.
                was_interrupted = True
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        stats = ChatStats(
            usage.get("prompt_tokens") or 0,
            cached,
            usage.get("completion_tokens") or len(said),
            first - begun,
            time.monotonic() - begun,
        )
        return ChatAnswer("".join(said), was_interrupted, was_cut, stats=stats)

    def _events(
        self, connection: http.client.HTTPConnection, body: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """The server-sent events of an answer; an error where the stream ends too early."""
        answer = self.server.request(connection, "/v1/chat/completions", body)
        is_complete = False
        try:
            while line := answer.readline(LARGEST_BODY):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    message = event["error"].get("message", event["error"])
                    raise ServerError(f"{self.server.url}: {str(message)[:500]}")
                is_complete = is_complete or any(
                    choice.get("finish_reason") for choice in event.get("choices") or ()
                )
                yield event
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            is_complete = False
        # Some servers end without [DONE]; an answer with a finish reason is complete all the same.
        if not is_complete:
            raise ServerError(
                f"{self.server.url}: the connection ended before the answer was complete. Ask "
                "again."
            )

    def describe(self) -> dict[str, Any]:
        """Context of the model, cache of the server."""
        facts: dict[str, Any] = {"context": self._facts.get("context_length")}
        try:
            live = self.server.get("/api/live")
        except HeadwayError:
            return facts
        return facts | {
            key: live[key] for key in ("cache_bytes", "cache_budget_bytes") if key in live
        }


def _piece(event: Mapping[str, Any]) -> str:
    """The text that an event adds to the answer; "" where it adds none."""
    choices = event.get("choices") or ()
    content = None
    if choices:
        content = (choices[0].get("delta") or {}).get("content")
    return content if isinstance(content, str) else ""


def _messages(turns: Sequence[Turn], media: Sequence[MediaRef]) -> Iterator[dict[str, Any]]:
    """Turns in OpenAI's shape; marks of media become parts."""
    # Marks and media of a kind are in the same order.
    waiting = {
        kind: iter([ref for ref in media if ref.modality == kind])
        for kind in ("image", "audio", "video")
    }
    for turn in turns:
        if not media or not MARK.search(turn.content):
            yield {"role": turn.role, "content": turn.content}
            continue
        parts: list[dict[str, Any]] = []
        for number, text in enumerate(MARK.split(turn.content)):  # text, kind, text, kind, ...
            if number % 2:
                parts.append(_part(next(waiting[text])))
            elif text:
                parts.append({"type": "text", "text": text})
        yield {"role": turn.role, "content": parts}


def _part(ref: MediaRef) -> dict[str, Any]:
    """A picture or a sound as a part of a message, with the format that its first bytes show."""
    data = ref.read()
    written = base64.b64encode(data).decode()
    if ref.modality == "image":
        if data.startswith(b"\xff\xd8"):
            kind = "jpeg"
        elif data[8:12] == b"WEBP":
            kind = "webp"
        else:
            kind = "png"
        return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{written}"}}
    # mp3 has no fixed first bytes, so it is what is left.
    return {
        "type": "input_audio",
        "input_audio": {
            "data": written,
            "format": SOUNDS.get(data[:4], "m4a" if data[4:8] == b"ftyp" else "mp3"),
        },
    }
