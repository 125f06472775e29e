"""A real S3 server over HTTP on loopback (moto), and a proxy before it that breaks requests as a test says."""

import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Fault = Callable[[str, str], int | float | None]
"""(method, path) -> an HTTP status to answer instead, seconds to wait before passing on (float), -1 to cut the line, None = pass on."""


@dataclass
class Store:
    """What a test sees of the server."""

    url: str
    requests: list[tuple[str, str]] = field(default_factory=list)
    fault: Fault = lambda method, path: None
    bytes_sent: int = 0

    def count(self, method: str, part: str = "") -> int:
        return sum(how == method and part in path for how, path in self.requests)


@contextmanager
def serve_s3(monkeypatch: pytest.MonkeyPatch, bucket: str = "bucket") -> Iterator[Store]:
    """Start both, point the environment at the proxy, make a bucket."""
    server_module = pytest.importorskip("moto.server", reason="needs moto (pip install '.[dev]')")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy, store = _proxy(port)
    threading.Thread(
        target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    values = {
        "AWS_ENDPOINT_URL": store.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(logging.getLogger("werkzeug"), "disabled", True)  # a line for every request
    try:
        connection = http.client.HTTPConnection(host, port)
        for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{bucket}")):
            connection.request(method, path)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
        connection.close()
        yield store
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()


def _proxy(port: int) -> tuple[ThreadingHTTPServer, Store]:
    store = Store("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body of an answer in one go: in two, each waits 40 ms for the client's acknowledgement

        def _pass(self) -> None:
            store.requests.append((self.command, self.path))
            fault = store.fault(self.command, self.path)
            if isinstance(fault, float):
                time.sleep(fault)
            elif fault == -1:
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if isinstance(fault, int):
                self._answer(
                    fault,
                    b"<Error><Code>InternalError</Code><Message>injected</Message></Error>",
                    {},
                )
                return
            store.bytes_sent += len(body)
            headers = {
                key: value
                for key, value in self.headers.items()
                if key.lower() not in ("connection", "expect")
            }
            # closed whatever happens: a client that gave up must leave no socket behind
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
                connection.request(self.command, self.path, body, headers)
                with connection.getresponse() as answer:
                    content = answer.read()
                    status = answer.status
                    answer_headers = dict(answer.getheaders())
            self._answer(status, content, answer_headers)

        def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            length = str(len(content))
            for key, value in headers.items():
                if key.lower() == "content-length" and self.command == "HEAD":
                    length = value
                elif key.lower() not in (
                    "content-length",
                    "connection",
                    "transfer-encoding",
                    "server",
                    "date",
                ):
                    self.send_header(key, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass

        def handle_expect_100(self) -> bool:
            self.send_response_only(100)
            self.end_headers()
            self.wfile.flush()
            return True

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that gave up

    proxy = Quiet(("127.0.0.1", 0), Handler)
    store.url = f"http://127.0.0.1:{proxy.server_address[1]}"
    return proxy, store
