"""A small hub on loopback that speaks what the hub library asks: descriptions, trees, revisions, files in ranges; it can misbehave."""

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 4096,
    "data/train-00000-of-00001.jsonl": b'{"text": "from the hub"}\n',
}


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def commit_of(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@dataclass
class Hub:
    """What the server holds, what it was asked, and how it misbehaves."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    requests: list[str] = field(default_factory=list)
    cut_after: int | None = None
    wrong: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    gone_after_cut: bool = False
    """After a cut connection no file is given any more."""
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Other revisions by name; their commits are made from the name."""
    refusal: tuple[int, str] | None = None
    """Answer every question about the repository with this status and error code."""
    slow_seconds: float = 0.0
    """Pause after each piece of 64 KiB of a file."""

    def content(self, revision: str) -> dict[str, bytes] | None:
        """The files of a branch, tag or commit."""
        if revision in ("main", COMMIT):
            return self.files
        return next(
            (
                files
                for name, files in self.revisions.items()
                if revision in (name, commit_of(name))
            ),
            None,
        )

    def etag(self, name: str, data: bytes) -> str:
        if name.endswith(".safetensors"):
            return hashlib.sha256(data).hexdigest()
        return git_sha1(data)

    def info(self, revision: str) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": len(data)}
            for name, data in (self.content(revision) or {}).items()
        ]
        if revision in self.revisions:
            sha = commit_of(revision)
        elif len(revision) == 40:
            sha = revision
        else:
            sha = COMMIT
        return {
            "id": "org/name",
            "sha": sha,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": siblings,
        }


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(
            self, status: int, data: bytes, headers: dict[str, str], cut: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.slow_seconds:
                for start in range(0, len(data), 1 << 16):
                    try:
                        self.wfile.write(data[start : start + (1 << 16)])
                    except OSError:
                        return  # who asked is gone
                    time.sleep(hub.slow_seconds)
            else:
                self.wfile.write(data[:cut])
            if cut is not None and cut < len(data):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.requests.append(
                f"{self.command} {self.path} {self.headers.get('Range') or ''}".strip()
            )
            path = self.path.partition("?")[0]
            if hub.refusal is not None and "org/name" in path:
                status, error_code = hub.refusal
                headers = {}
                if error_code:
                    headers["X-Error-Code"] = error_code
                self.answer(status, b"{}", headers)
                return
            described = re.fullmatch(
                r"/api/(?:models|datasets)/org/name(?:/revision/([\w.%-]+))?", path
            )
            if described:
                revision = described[1] or "main"
                if hub.content(revision) is None:
                    self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                    return
                self.answer(
                    200,
                    json.dumps(hub.info(revision)).encode(),
                    {"Content-Type": "application/json"},
                )
                return
            tree = re.fullmatch(r"/api/(?:models|datasets)/org/name/tree/([\w.-]+)", path)
            if tree:
                files = hub.content(tree[1]) or {}
                listed = [
                    {"type": "file", "path": n, "size": len(d), "oid": git_sha1(d)}
                    for n, d in files.items()
                ]
                self.answer(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})
                return
            match = re.fullmatch(r"(?:/datasets)?/org/name/resolve/([\w.-]+)/(.+)", path)
            if match is None:
                headers = {"X-Error-Code": "RepoNotFound", "X-Repo-Commit": COMMIT}
                self.answer(404, b"{}", headers)
                return
            revision, name = match.groups()
            files = hub.content(revision) or {}
            if name not in files:
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
                self.answer(404, b"{}", headers)
                return
            self.send_file(name, files[name], revision)

        def send_file(self, name: str, data: bytes, commit: str) -> None:
            if (
                name in hub.missing or (hub.gone_after_cut and hub.cut_after is None)
            ) and self.command == "GET":
                self.answer(403, b"{}", {})
                return
            headers = {
                "ETag": f'"{hub.etag(name, data)}"',
                "X-Repo-Commit": commit,
                "Accept-Ranges": "bytes",
            }
            if name in hub.wrong:
                data = bytes([data[0] ^ 1]) + data[1:]
            status = 200
            part = data
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if wanted:
                status = 206
                start = int(wanted[1])
                stop = len(data)
                if wanted[2]:
                    stop = int(wanted[2]) + 1
                part = data[start:stop]
                headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
            # Only one answer is cut, and none of the small ones.
            cut = None
            if self.command == "GET" and len(part) > 1000:
                cut = hub.cut_after
                hub.cut_after = None
            self.answer(status, part, headers, cut)

    return Handler


@contextmanager
def using_hub(url: str, home: Path) -> Iterator[None]:
    """The hub library of this process with another HF_ENDPOINT and HF_HOME, which it reads when it is imported."""
    from huggingface_hub import constants

    changes = {
        "ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}", "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_DISABLE_XET": True,
    }  # fmt: skip
    before = {name: getattr(constants, name) for name in changes}
    for name, value in changes.items():
        setattr(constants, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(constants, name, value)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub that answers while the block runs."""
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
