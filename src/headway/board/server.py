"""The web server of a board: HTTP requests come in; the page, JSON, packed curves or a picture go
out. It only reads.

    /  /NAME.js  /NAME.css             the page, from the package; nothing is loaded from elsewhere
    /api/state?since=N                 runs that changed
    /api/series?run=..&metric=..       curves, down-sampled for a window
    /api/metrics?run=..                names of metrics
    /api/details?run=ID                settings, events, checkpoints, reports
    /api/log?run=ID                    end of the log
    /api/rollouts?run=ID&order=..      distributions of sampled answers, and a page of them
    /api/file?run=ID&path=..           a picture of a report

Every answer carries a content security policy that allows the page's own files and nothing else.
Requests are bounded in size and time.
"""

from __future__ import annotations

import gzip
import json
import logging
import socket
import sys
import threading
import time
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from headway import __version__
from headway.board.answers import BadRequest, answer
from headway.board.watch import Board
from headway.errors import LaunchError
from headway.runtime.web_access import Access, ConnectionTable, Refusal

TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
VENDORED = ("uPlot.iife.min.js", "uPlot.min.css", "markdown-it.umd.min.js", "purify.min.js")
"""The libraries of the page; `headway/vendor` has their versions, checksums and licences."""
SOCKET_SECONDS = 20.0
"""That a client may send or take nothing."""
REQUEST_SECONDS = 30.0
"""From the first byte of a request, or the end of the answer before it, to the end of its head."""
MAX_CONNECTIONS = 256
MAX_TARGET = 32 << 10
"""Bytes of an address; it may name hundreds of runs and metrics."""
GZIP_FROM = 4096
"""Bytes of an answer; smaller ones are not worth it."""
log = logging.getLogger("headway")


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Address -> content and type of the page's files."""
    contents: dict[str, tuple[bytes, str]] = {}
    vendor = files("headway").joinpath("vendor")
    libraries = (vendor.joinpath(name) for name in VENDORED)
    for file in (*files("headway.board").joinpath("page").iterdir(), *libraries):
        suffix = file.name[file.name.rfind(".") :]
        if suffix in TYPES:
            contents[f"/{file.name}"] = (file.read_bytes(), TYPES[suffix])
        elif file.name == "board.html":
            contents["/"] = (file.read_bytes(), "text/html; charset=utf-8")
    return contents


class BoardServer(ThreadingHTTPServer):
    """Serves one board to several people at once."""

    # A client that keeps its connection open does not keep the board from ending.
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], board: Board, access: Access) -> None:
        self.board = board
        self.access = access
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: dict[socket.socket, float] = {}
        """Connections and when the request that is being read must be complete; infinity while it
        is answered.
        """
        self._table = ConnectionTable(MAX_CONNECTIONS)
        self._guard = threading.Lock()
        try:
            super().__init__((address[0].strip("[]"), address[1]), BoardRequest)
        except OSError as problem:
            raise LaunchError(
                f"cannot listen on {address[0]}:{address[1]}: {problem.strerror}. Choose another "
                "--port (0: any free one)."
            ) from None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a connection.

        Where there are too many, one whose request never completes gives way.
        """
        now = time.monotonic()
        with self._guard:
            is_taken, closed = self._table.add(request, str(client_address[0]), now)
            # None of the others may give way: the new one is closed unread.
            if not is_taken:
                return False
            self._open[request] = now + REQUEST_SECONDS
        if isinstance(closed, socket.socket):
            _hang_up(closed)
        return True

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection."""
        with self._guard:
            self._open.pop(request, None)
            self._table.remove(request)
        super().shutdown_request(request)

    def expect(self, connection: socket.socket, deadline: float) -> None:
        """When the request on a connection must be complete."""
        with self._guard:
            if connection not in self._open:
                return
            self._open[connection] = deadline
            if deadline == float("inf"):
                self._table.begin_answer(connection)
            else:
                self._table.end_answer(connection, time.monotonic())

    def service_actions(self) -> None:
        """Called twice a second: cut the connections of clients that send a request too slowly."""
        now = time.monotonic()
        with self._guard:
            late_connections = [
                connection for connection, deadline in self._open.items() if deadline < now
            ]
        for connection in late_connections:
            _hang_up(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error; another one is logged."""
        problem = sys.exc_info()[1]
        if not isinstance(problem, (ConnectionError, TimeoutError, OSError)):
            log.exception("board: a request failed")


def _hang_up(connection: socket.socket) -> None:
    """End a connection; the thread that reads from it notices."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the client was faster


class BoardRequest(BaseHTTPRequestHandler):
    """One connection, in a thread of its own; its requests are answered one after the other."""

    server: BoardServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_SECONDS
    server_version = f"headway/{__version__}"
    sys_version = ""

    def handle_one_request(self) -> None:
        """Read a request within its time."""
        self.server.expect(self.connection, time.monotonic() + REQUEST_SECONDS)
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer a request."""
        self.server.expect(self.connection, float("inf"))
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            # Its bytes would be taken for the next request.
            self.close_connection = True  # a body is never read

        if len(self.path) > MAX_TARGET:
            self._send_text(414, "The address is too long.")
            return

        address = urlsplit(self.path)
        try:
            query = parse_qs(
                address.query, keep_blank_values=True, max_num_fields=2000, errors="replace"
            )
        except ValueError:
            self._send_text(400, "Too many fields in the address.")
            return

        token = query.get("token", [None])[0]
        page = page_files().get(address.path)
        # Before anything else is looked at: files of the page need the token, too.
        refusal = self.server.access.check(self.headers.items(), token, is_page=address.path == "/")
        if refusal is not None:
            self._refuse(refusal)
        elif address.path == "/" and token is not None and self.server.access.token is not None:
            # The token moves from the address, which histories record, to a cookie.
            cookie = self.server.access.cookie
            self._send(
                303,
                b"",
                "text/plain",
                {
                    "Location": "/",
                    "Set-Cookie": f"{cookie}={token}; HttpOnly; SameSite=Strict; Path=/",
                },
            )
        elif page is not None:
            self._send(200, page[0], page[1], {"Cache-Control": "no-cache"})
        elif address.path.startswith("/api/"):
            self._answer(address.path.removeprefix("/api/"), query)
        else:
            self._send_text(404, "There is no such page.")

    do_HEAD = do_GET

    def _refuse(self, refusal: Refusal) -> None:
        self.close_connection = True
        self._send_text(refusal.status, refusal.text)

    def _answer(self, name: str, query: dict[str, list[str]]) -> None:
        self.server.board.touch()
        try:
            content, kind = answer(self.server.board, name, query)
        except BadRequest as problem:
            self._send_text(problem.status, str(problem))
            return
        self._send(200, content, kind, {"Cache-Control": "no-store"})

    def _send_text(self, status: int, text: str) -> None:
        self._send(status, json.dumps({"error": text}).encode(), "application/json")

    def _send(
        self, status: int, content: bytes, kind: str, more: dict[str, str] | None = None
    ) -> None:
        """Send an answer with the headers that every answer has, compressed where that is worth
        it.
        """
        headers = {
            "Content-Type": kind,
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            **(more or {}),
        }

        # A request whose first line is no HTTP has no headers.
        accepts_gzip = False
        if getattr(self, "headers", None) is not None:
            accepts_gzip = "gzip" in self.headers.get("Accept-Encoding", "")
        is_text = kind.startswith(("text/", "application/json"))
        if accepts_gzip and is_text and len(content) >= GZIP_FROM:
            content = gzip.compress(content, 1)
            headers["Content-Encoding"] = "gzip"

        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)

        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")

        self.end_headers()
        # HTTP: HEAD has the headers of GET, the length of its body included.
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Mistakes that the standard library finds get the same headers as every answer."""
        self.close_connection = True
        self._send_text(code, message or HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: an address may hold a token."""
