"""A chat endpoint on loopback whose answers depend on the prompt alone and whose faults are chosen by a test."""

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SYLLABLES = ["ba", "ke", "lo", "mi", "nu", "pra", "sto", "ti", "vel", "wor", "zan", "qui"]


def tasks_for(prompt: str, count: int = 4) -> str:
    """An answer with new tasks, the same for the same prompt."""
    draw = random.Random(hashlib.sha256(prompt.encode()).hexdigest())
    word = lambda: "".join(draw.choice(SYLLABLES) for _ in range(3))  # noqa: E731
    return "\n".join(
        f"<|{k}|>\nInstruction: {' '.join(word() for _ in range(7))}\nInput: <none>\nOutput: {word()}"
        for k in range(4, 4 + count)
    )


def completion(text: str, finish: str = "stop") -> bytes:
    """The body of a chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": finish,
    }
    return json.dumps(
        {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 20}}
    ).encode()


class Handler(BaseHTTPRequestHandler):
    """One request; the server's `fault`, called with its number, may answer in place of the model."""

    server: "ChatEndpoint"  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        """Count, remember, answer."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.seen)
            self.server.seen.append(
                {
                    "body": body,
                    "headers": dict(self.headers),
                    "path": self.path,
                    "time": time.monotonic(),
                }
            )
        try:
            if self.server.fault is None or not self.server.fault(self, number):
                self.answer(completion(tasks_for(body["messages"][0]["content"])))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has given up

    def answer(self, body: bytes, status: int = 200, **headers: str) -> bool:
        """Send a whole answer."""
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


Fault = Callable[[Handler, int], bool | None]


class ChatEndpoint(ThreadingHTTPServer):
    """What was asked is in `seen`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, fault: Fault | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault = fault
        self.seen: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """The address to give to a client."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def chat_endpoint(fault: Fault | None = None) -> Iterator[ChatEndpoint]:
    """A server that runs while the block does."""
    server = ChatEndpoint(fault)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
