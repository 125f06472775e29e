"""The HTTP interface: requests come in; OpenAI's answers, health, counters and the chat page go
out.

    POST /v1/chat/completions  /v1/completions  /v1/embeddings
    GET  /v1/models  /v1/models/NAME
    GET  /health  /metrics  /api/info  /api/live
    GET  /  /static/NAME: the chat page, from the package

`Gate` stands before all of it: who may ask, how often, and whether the server still takes requests.
Whatever goes wrong behind it leaves as OpenAI's error object; a traceback goes to the log alone.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import pickle
import struct
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route, Router

from headway import __version__
from headway.errors import HeadwayError
from headway.serve.api_errors import ApiError, bad_field
from headway.serve.chat_request import ChatCall
from headway.serve.forms import AnswerForm, ChatForm, TextForm
from headway.serve.generation_fields import GenerationFields
from headway.serve.page_files import PAGE_HEADERS, page_files
from headway.serve.serve_state import ServeState
from headway.serve.served_model import PreparedPrompt, ServedModel
from headway.serve.served_request import ClientGone
from headway.serve.text_request import EmbeddingCall, TextCall
from headway.serve.worker_process import read_body

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/health",
    "/metrics",
    "/api/info",
    "/api/live",
    "/",
)
OPEN_PATHS = ("/health",)
"""Answered without a token: a load balancer asks for it."""
MAX_TARGET = 8192
"""Bytes of a path and its query."""
INLINE_BYTES = 64 << 10
"""Bodies up to this size are read in the HTTP process: the worst of them takes about 30 ms."""
BODY_READ_SECONDS = 20.0
"""For the process that reads a large body."""
MOST_READ_BYTES = 1 << 30
"""Of the call that this process sends back."""
DISCARDED_BYTES = 16 << 20
"""Of a body that is too large, so many more are read and dropped: a client that still sends would
not see its answer.
"""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
log = logging.getLogger("headway")
Scope = dict[str, Any]


def build_app(state: ServeState) -> Gate:
    """The ASGI application of a server."""
    api = Api(state)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.text, methods=["POST"]),
        Route("/v1/embeddings", api.embeddings, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/api/info", api.info),
        Route("/api/live", api.live),
        Route("/", api.page),
        Route("/static/{name}", api.page),
    ]
    return Gate(Router(routes, redirect_slashes=False), state)


class Gate:
    """Decides which requests are answered, and turns every failure into an answer."""

    def __init__(self, inner: Router, state: ServeState) -> None:
        self.inner = inner
        self.state = state

    async def __call__(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        # Web sockets and the lifespan protocol, both of which uvicorn has switched off.
        if scope["type"] != "http":
            return

        path = scope["path"]
        # 0 until the head of an answer is out: an error can still become an answer.
        status = 0

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            early_answer = self._check(scope)
            if early_answer is not None:
                await early_answer(scope, receive, sending)
            else:
                await self.inner(scope, receive, sending)
        except (ClientGone, ClientDisconnect):
            # nginx's "client closed request"; nothing is sent, it is for the counters.
            status = 499
        except Exception as problem:
            if status:  # the head is out; the connection is all that is left to close
                log.exception("serve: %s failed after its answer began", path[:200])
                scope["state"].get("abort", lambda: None)()
            else:
                await _error_response(problem, path)(scope, receive, sending)
        finally:
            # Counters have one label per known path: clients must not be able to create more.
            if path in PATHS:
                shown = path
            elif path.startswith("/static/"):
                shown = "/static"
            else:
                shown = "other"

            self.state.metrics.requests[shown, status] += 1

    def _check(self, scope: Scope) -> Response | None:
        """None: the request may go in; else an answer at once. Raises what refuses it."""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        path = scope["path"]
        is_page = path == "/" or path.startswith("/static/")
        if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_TARGET:
            raise ApiError(414, "The address is too long.")

        token = None
        if path == "/":
            token = _token_of(scope["query_string"])

        access = self.state.access
        refusal = access.check(headers, token, is_page=path == "/")
        if refusal is not None:
            # The page holds no secret; it asks for the token itself. The other rules hold for it
            # too, and a wrong token in its address is refused.
            needs_no_token = (is_page or path in OPEN_PATHS) and token is None
            if refusal.status != 401:
                raise ApiError(refusal.status, refusal.text)
            if not needs_no_token:
                raise ApiError(401, refusal.text, code="invalid_api_key")

        if token is not None and access.token is not None:
            # The token moves from the address, which histories and proxies record, to a cookie.
            answer = RedirectResponse("/", 303, HEADERS)
            answer.headers["Set-Cookie"] = (
                f"{access.cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
            )
            return answer

        # Requests that cost work. Health, counters and the page stay available while the server
        # stops.
        if scope["method"] == "POST":
            if self.state.is_draining:
                raise ApiError(
                    503,
                    "The server is stopping and takes no new requests.",
                    code="stopping",
                    retry_seconds=10,
                )

            client = scope.get("client")
            address = client[0] if client else ""
            self.state.rate.take(address)

        return None


def _token_of(query: bytes) -> str | None:
    """The token in the query of the page's address."""
    if b"token=" not in query:
        return None
    return parse_qs(query.decode("latin-1"), max_num_fields=100).get("token", [None])[0]


def _error_response(problem: Exception, path: str) -> Response:
    """What a client gets for an exception; one that is not ours is logged with its traceback."""
    if isinstance(problem, ApiError):
        error = problem
    elif isinstance(problem, HTTPException):
        # Any: where starlette is not installed, a type checker knows nothing of its exception.
        http_problem: Any = problem
        message = f"{http_problem.detail}."
        if http_problem.status_code == 404:
            message = "There is no such path."
        error = ApiError(http_problem.status_code, message)
    elif isinstance(problem, HeadwayError):
        error = ApiError(400, str(problem))
    else:
        # A bug: its text may hold paths and values, which are for the log and not for the client.
        log.error("serve: %s failed", path[:200], exc_info=problem)
        error = ApiError(
            500, "The server failed on this request; its log says why.", code="internal_error"
        )

    headers = {**HEADERS, **error.headers()}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is never read
    return JSONResponse(error.body(), error.status, headers)


class _Streamed(Response):
    """An answer that writes itself."""

    def __init__(self, run: Callable[[Any], Awaitable[None]]) -> None:
        self.run = run

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.run(send)


class Api:
    """What each path answers: one method per path, behind `Gate`."""

    def __init__(self, state: ServeState) -> None:
        self.state = state

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation."""
        call: ChatCall = await self._read(request, "chat")
        model = self._model(call.model)
        prompt = await model.chat(call)
        form = ChatForm(model, call.fields.include_usage, call.fields.logprobs is not None)
        return await self._answer(
            request, model, [prompt], call.fields, form, bool(call.tools), not call.parallel_calls
        )

    async def text(self, request: Request) -> Response:
        """Continuations of prompts."""
        call: TextCall = await self._read(request, "completion")
        model = self._model(call.model)
        prompts = await model.text(call)
        form = TextForm(model, call.fields.include_usage, call.fields.logprobs is not None)
        return await self._answer(request, model, prompts, call.fields, form)

    async def _answer(
        self,
        request: Request,
        model: ServedModel,
        prompts: list[PreparedPrompt],
        fields: GenerationFields,
        form: AnswerForm,
        reads_calls: bool = False,
        one_call: bool = False,
    ) -> Response:
        """Have the engine answer, and send it whole or as a stream."""
        served = self.state.begin(model)
        # How connections.py closes this connection; tests without it have none.
        served.abort = request.scope.get("state", {}).get("abort", served.abort)
        try:
            served.watch(request.receive)
            prompts = [
                await served.decoded(prompt, self.state.decoders, self.state.limits)
                for prompt in prompts
            ]
            served.submit(
                prompts,
                fields.stops,
                stream=fields.stream,
                reads_calls=reads_calls,
                one_call=one_call and reads_calls,
            )

            # Before the head of a stream leaves: a refusal of the engine is still an answer with
            # its status.
            await served.accepted()
            if not fields.stream:
                with served:
                    return JSONResponse(await served.whole(form), headers=HEADERS)
        except BaseException:
            # Also when the task is cancelled: the engine must not compute for nobody.
            served.__exit__()
            raise

        # From here on the stream ends the request: it runs after this method has returned.
        async def run(send: Any) -> None:
            with served:
                await served.stream(form, send, RAW_HEADERS)

        return _Streamed(run)

    async def embeddings(self, request: Request) -> Response:
        """Vectors of texts."""
        call: EmbeddingCall = await self._read(request, "embedding")
        model = self._model(call.model)
        requests = await model.embeddings(call)
        with self.state.begin(model) as served:
            served.watch(request.receive)
            vectors = await served.vectors(requests)
            used = served.prompt_tokens

        if any(len(vector) != model.facts.hidden_size for vector in vectors):
            raise ApiError(500, "The engine gave no vector.", code="engine_error")

        # One sum per vector: it is not finite if any value is not.
        if not all(math.isfinite(sum(vector)) for vector in vectors):
            raise ApiError(
                500, "The model gave a vector with values that are not finite.", code="engine_error"
            )

        # base64 is what OpenAI's own client asks for: little-endian fp32, shorter than JSON.
        packed: list[Any] = [list(vector) for vector in vectors]
        if call.encoding == "base64":
            packed = [
                base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
                for vector in vectors
            ]

        data = [
            {"object": "embedding", "index": number, "embedding": vector}
            for number, vector in enumerate(packed)
        ]
        body = {
            "object": "list",
            "data": data,
            "model": model.name,
            "usage": {"prompt_tokens": used, "total_tokens": used},
        }
        return JSONResponse(body, headers=HEADERS)

    async def models(self, request: Request) -> Response:
        """Every model and adapter."""
        return JSONResponse(
            {
                "object": "list",
                "data": [self._listed(model) for model in self.state.models.values()],
            },
            headers=HEADERS,
        )

    async def model(self, request: Request) -> Response:
        """One model or adapter."""
        return JSONResponse(self._listed(self._model(request.path_params["name"])), headers=HEADERS)

    async def health(self, request: Request) -> Response:
        """Whether requests can be answered."""
        # A load balancer asks without a token; reasons may name files.
        is_known = self.state.access.check(request.headers.items()) is None
        report = self.state.health(with_reasons=is_known)
        status = 200 if report["status"] in ("ok", "degraded") else 503
        return JSONResponse(report, status, headers=HEADERS)

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        return PlainTextResponse(
            self.state.metrics_text(), media_type="text/plain; version=0.0.4", headers=HEADERS
        )

    async def info(self, request: Request) -> Response:
        """What the page shows of each model."""
        models = self.state.describe_models()
        return JSONResponse(
            {"version": __version__, "models": models},
            headers={**HEADERS, "Cache-Control": "no-store"},
        )

    async def live(self, request: Request) -> Response:
        """What the server does now."""
        return JSONResponse(self.state.live(), headers={**HEADERS, "Cache-Control": "no-store"})

    async def page(self, request: Request) -> Response:
        """A file of the chat page."""
        file = page_files().get(request.path_params.get("name", "index.html"))
        if file is None:
            raise HTTPException(404)
        content, media_type = file
        return Response(content, media_type=media_type, headers={**HEADERS, **PAGE_HEADERS})

    def _model(self, name: str) -> ServedModel:
        """The model or adapter of a name that a client gave."""
        model = self.state.models.get(name)
        if model is None:
            known = ", ".join(self.state.models)
            raise ApiError(
                404,
                f"model is {name[:100]!r}; this server has {known}.",
                "model",
                "model_not_found",
            )
        return model

    def _listed(self, model: ServedModel) -> dict[str, Any]:
        """OpenAI's model object; `root`, `parent` and `max_model_len` are vLLM's additions."""
        return {
            "id": model.name,
            "object": "model",
            "created": self.state.created,
            "owned_by": "headway",
            "root": model.facts.name,
            "parent": model.facts.name if model.adapter else None,
            "max_model_len": model.facts.context,
        }

    async def _read(self, request: Request, kind: str) -> Any:
        """The call of a request.

        A large body is read in another process: its JSON may take seconds.
        """
        body = await self._body(request)
        if len(body) <= INLINE_BYTES:
            return read_body(kind, body, self.state.limits.max_n)
        job = ("body", kind, body, self.state.limits.max_n)

        # Nothing but json and pydantic has read these bytes in the other process, so its answer
        # may be unpickled.
        packed = await self.state.body_readers.run(job, BODY_READ_SECONDS, MOST_READ_BYTES)
        return pickle.loads(packed)

    async def _body(self, request: Request) -> bytes:
        """The body of a request, within its limits of bytes and seconds."""
        most_bytes = self.state.limits.body_bytes
        declared_length = request.headers.get("content-length", "0")
        body = bytearray()
        size = 0
        # A declared length is believed where it is too large; otherwise the bytes are counted.
        is_large = declared_length.isdecimal() and int(declared_length[:20]) > most_bytes
        try:
            async with asyncio.timeout(self.state.limits.body_seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    is_large = is_large or size > most_bytes
                    # A client that sends even more is cut off; it may not see its answer.
                    if size > most_bytes + DISCARDED_BYTES:
                        break
                    if not is_large:
                        body += chunk
        except TimeoutError:
            raise ApiError(
                408,
                f"The body did not arrive within {self.state.limits.body_seconds:g} s.",
                code="timeout",
            ) from None

        if is_large:
            raise ApiError(
                413,
                f"The body has more than {most_bytes} bytes, which is this server's limit.",
                code="request_too_large",
            )

        if not body:
            raise bad_field("body", "is empty; it must be a JSON object.")

        # A few compressed bytes can become gigabytes.
        if request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "The body is compressed; send it as it is.")
        return bytes(body)
