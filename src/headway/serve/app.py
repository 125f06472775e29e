"""The HTTP interface: requests come in; OpenAI's answers, health, counters and the chat page go out.

    POST /v1/chat/completions  /v1/completions  /v1/embeddings      GET /v1/models  /v1/models/NAME
    GET  /health  /metrics  /api/info  /api/live                    GET /  /static/NAME: the page, from the package

`Gate` stands before all of it: who may ask, how often, and whether the server still takes requests. Whatever goes wrong behind it leaves as
OpenAI's error object; a traceback goes to the log alone.
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
INLINE_BYTES = 64 << 10
"""Bodies up to this size are read in the HTTP process: the worst of them takes about 30 ms."""
BODY_READ_SECONDS = 20.0
MOST_READ_BYTES = 1 << 30
DISCARDED_BYTES = 16 << 20
"""Of a body that is too large, so many more are read and dropped: a client that still sends would not see its answer."""
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
        self.inner, self.state = inner, state

    async def __call__(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        status = 0

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            early = self._check(scope)
            if early is not None:
                await early(scope, receive, sending)
            else:
                await self.inner(scope, receive, sending)
        except (ClientGone, ClientDisconnect):
            status = 499
        except Exception as problem:
            if status:  # the head is out; the connection is all that is left to close
                log.exception("serve: %s failed after its answer began", path[:200])
                scope["state"].get("abort", lambda: None)()
            else:
                await _error_response(problem, path)(scope, receive, sending)
        finally:
            shown = path if path in PATHS else "/static" if path.startswith("/static/") else "other"
            self.state.metrics.requests[shown, status] += 1

    def _check(self, scope: Scope) -> Response | None:
        """None: the request may go in; else an answer at once. Raises what refuses it."""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        path, is_page = scope["path"], scope["path"] == "/" or scope["path"].startswith("/static/")
        if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_TARGET:
            raise ApiError(414, "The address is too long.")
        given = _token_of(scope["query_string"]) if path == "/" else None
        access = self.state.access
        refusal = access.check(headers, given, is_page=path == "/")
        # The page holds no secret; it asks for the token itself. The other rules hold for it too.
        if refusal is not None and not (
            refusal.status == 401 and (is_page or path in OPEN_PATHS) and given is None
        ):
            raise ApiError(
                refusal.status,
                refusal.text,
                code="invalid_api_key" if refusal.status == 401 else None,
            )
        if given is not None and access.token is not None:
            answer = RedirectResponse("/", 303, HEADERS)
            answer.headers["Set-Cookie"] = (
                f"{access.cookie}={given}; HttpOnly; SameSite=Strict; Path=/"
            )
            return answer
        if scope["method"] == "POST":
            if self.state.is_draining:
                raise ApiError(
                    503,
                    "The server is stopping and takes no new requests.",
                    code="stopping",
                    retry_seconds=10,
                )
            client = scope.get("client")
            self.state.rate.take(client[0] if client else "")
        return None


def _token_of(query: bytes) -> str | None:
    if b"token=" not in query:
        return None
    return parse_qs(query.decode("latin-1"), max_num_fields=100).get("token", [None])[0]


def _error_response(problem: Exception, path: str) -> Response:
    if isinstance(problem, HTTPException):
        found: Any = problem
        problem = ApiError(
            found.status_code,
            "There is no such path." if found.status_code == 404 else f"{found.detail}.",
        )
    if isinstance(problem, HeadwayError) and not isinstance(problem, ApiError):
        problem = ApiError(400, str(problem))
    if not isinstance(problem, ApiError):
        log.error("serve: %s failed", path[:200], exc_info=problem)
        problem = ApiError(
            500, "The server failed on this request; its log says why.", code="internal_error"
        )
    headers = {
        **HEADERS,
        **problem.headers(),
        **({"WWW-Authenticate": "Bearer"} if problem.status == 401 else {}),
    }
    if problem.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is never read
    return JSONResponse(problem.body(), problem.status, headers)


class _Streamed(Response):
    """An answer that writes itself."""

    def __init__(self, run: Callable[[Any], Awaitable[None]]) -> None:
        self.run = run

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.run(send)


class Api:
    """One method per path."""

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
            await served.accepted()
            if not fields.stream:
                with served:
                    return JSONResponse(await served.whole(form), headers=HEADERS)
        except BaseException:
            served.__exit__()
            raise

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
        if any(len(one) != model.facts.hidden_size for one in vectors):
            raise ApiError(500, "The engine gave no vector.", code="engine_error")
        if not all(math.isfinite(sum(one)) for one in vectors):
            raise ApiError(
                500, "The model gave a vector with values that are not finite.", code="engine_error"
            )
        packed: list[Any] = [list(one) for one in vectors]
        if call.encoding == "base64":
            packed = [
                base64.b64encode(struct.pack(f"<{len(one)}f", *one)).decode() for one in vectors
            ]
        data = [
            {"object": "embedding", "index": number, "embedding": one}
            for number, one in enumerate(packed)
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
            {"object": "list", "data": [self._listed(one) for one in self.state.models.values()]},
            headers=HEADERS,
        )

    async def model(self, request: Request) -> Response:
        """One of them."""
        return JSONResponse(self._listed(self._model(request.path_params["name"])), headers=HEADERS)

    async def health(self, request: Request) -> Response:
        """Whether requests can be answered."""
        # A load balancer asks without a token; reasons may name files.
        is_known = self.state.access.check(request.headers.items()) is None
        found = self.state.health(with_reasons=is_known)
        status = 200 if found["status"] in ("ok", "degraded") else 503
        return JSONResponse(found, status, headers=HEADERS)

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        return PlainTextResponse(
            self.state.metrics_text(), media_type="text/plain; version=0.0.4", headers=HEADERS
        )

    async def info(self, request: Request) -> Response:
        """What the page shows of each model."""
        found = {"version": __version__, "models": self.state.describe_models()}
        return JSONResponse(found, headers={**HEADERS, "Cache-Control": "no-store"})

    async def live(self, request: Request) -> Response:
        """What the server does now."""
        return JSONResponse(self.state.live(), headers={**HEADERS, "Cache-Control": "no-store"})

    async def page(self, request: Request) -> Response:
        """A file of the chat page."""
        found = page_files().get(request.path_params.get("name", "index.html"))
        if found is None:
            raise HTTPException(404)
        return Response(found[0], media_type=found[1], headers={**HEADERS, **PAGE_HEADERS})

    def _model(self, name: str) -> ServedModel:
        found = self.state.models.get(name)
        if found is None:
            known = ", ".join(self.state.models)
            raise ApiError(
                404,
                f"model is {name[:100]!r}; this server has {known}.",
                "model",
                "model_not_found",
            )
        return found

    def _listed(self, model: ServedModel) -> dict[str, Any]:
        found = {
            "id": model.name,
            "object": "model",
            "created": self.state.created,
            "owned_by": "headway",
        }
        found |= {"root": model.facts.name, "parent": model.facts.name if model.adapter else None}
        return {**found, "max_model_len": model.facts.context}

    async def _read(self, request: Request, kind: str) -> Any:
        """The call of a request. A large body is read in another process: its JSON may take seconds."""
        body = await self._body(request)
        if len(body) <= INLINE_BYTES:
            return read_body(kind, body, self.state.limits.max_n)
        job = ("body", kind, body, self.state.limits.max_n)
        # Nothing but json and pydantic has read these bytes in the other process, so its answer may be unpickled.
        return pickle.loads(
            await self.state.body_readers.run(job, BODY_READ_SECONDS, MOST_READ_BYTES)
        )

    async def _body(self, request: Request) -> bytes:
        """The body of a request, within its limits of bytes and seconds."""
        most = self.state.limits.body_bytes
        given = request.headers.get("content-length", "0")
        body, size = bytearray(), 0
        is_large = given.isdecimal() and int(given[:20]) > most
        try:
            async with asyncio.timeout(self.state.limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    is_large = is_large or size > most
                    if size > most + DISCARDED_BYTES:
                        break
                    if not is_large:
                        body += part
        except TimeoutError:
            raise ApiError(
                408,
                f"The body did not arrive within {self.state.limits.body_seconds:g} s.",
                code="timeout",
            ) from None
        if is_large:
            raise ApiError(
                413,
                f"The body has more than {most} bytes, which is this server's limit.",
                code="request_too_large",
            )
        if not body:
            raise bad_field("body", "is empty; it must be a JSON object.")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "The body is compressed; send it as it is.")
        return bytes(body)
