"""A stand-in for `headway serve`: the chat page's files and an API in OpenAI's shape whose answers a test chooses by its question."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import headway
from headway.serve.page_files import POLICY, page_files

PAGE = Path(headway.__file__).parent / "serve" / "page"


class StandInChatServer(ThreadingHTTPServer):
    """Answers every question with what `answers` has for its text, else with `You said: TEXT`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.answers: dict[str, str] = {}
        self.bodies: list[dict[str, Any]] = []
        """Every request for an answer."""
        self.token: str | None = None
        self.seconds_per_piece = 0.0
        self.fits = 1_000
        """Messages that the context holds."""
        self.failures = 0
        """Requests that fail before one succeeds."""
        self.cut_after: int | None = None
        """Pieces after which the connection ends."""
        self.disconnects = 0

    @property
    def address(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Request(BaseHTTPRequestHandler):
    server: StandInChatServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        name = "index.html" if self.path == "/" else self.path.removeprefix("/static/")
        if name in page_files():
            self._send(200, *page_files()[name])
        elif not self._is_allowed():
            return
        elif self.path == "/v1/models":
            self._json(
                200,
                {
                    "object": "list",
                    "data": [{"id": name, "object": "model"} for name in ("cat", "dog")],
                },
            )
        elif self.path == "/api/info":
            facts = {"context_length": 4096, "has_template": True, "adapters": [], "masks": False}
            models = [
                {"name": "cat", "images": True, "audio": True, **facts},
                {"name": "dog", "images": False, "audio": False, **facts},
            ]
            self._json(200, {"version": "0.1.0", "models": models})
        elif self.path == "/api/live":
            live = {
                "running": 1,
                "waiting": 0,
                "tokens_per_second": 321.5,
                "cache_bytes": 3 << 20,
                "cache_budget_bytes": 1 << 30,
            }
            self._json(200, live)
        else:
            self._json(404, {"error": {"message": "There is no such page."}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            return
        self.server.bodies.append(body)
        if self.server.failures > 0:
            self.server.failures -= 1
            self._json(
                429,
                {"error": {"message": "The queue is full.", "code": None}},
                {"Retry-After": "1"},
            )
            return
        if len(body["messages"]) > self.server.fits:
            self._json(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
            return
        self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        last = body["messages"][-1]["content"]
        asked = last if isinstance(last, str) else "".join(part.get("text", "") for part in last)
        text = self.server.answers.get(asked, f"You said: {asked}")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
        try:
            for number, piece in enumerate(pieces):
                if number == self.server.cut_after:
                    return
                self._event(
                    {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
                )
                time.sleep(self.server.seconds_per_piece)
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            self._event(
                {
                    "choices": [],
                    "usage": {
                        "completion_tokens": len(pieces),
                        "prompt_tokens_details": {"cached_tokens": 7},
                    },
                }
            )
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.disconnects += 1

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _is_allowed(self) -> bool:
        if (
            self.server.token is None
            or self.headers.get("Authorization") == f"Bearer {self.server.token}"
        ):
            return True
        self._json(401, {"error": {"message": "A token is needed."}})
        return False

    def _json(self, status: int, value: Any, more: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", more)

    def _send(
        self, status: int, content: bytes, kind: str, more: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": POLICY,
            **(more or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def stand_in_chat_server() -> Iterator[StandInChatServer]:
    """A running stand-in."""
    server = StandInChatServer()
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
