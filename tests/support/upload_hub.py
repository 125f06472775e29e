"""A small hub on loopback that takes uploads as the hub library sends them: create, preupload, LFS, commit; it can break off.

POST /api/repos/create                          a new repository
GET  /api/models/USER/NAME                      its files with sizes and checksums, and the head of its card
POST /api/models/USER/NAME/preupload/main       which files are large
POST /USER/NAME.git/info/lfs/objects/batch      where large files go; nothing for those that are there
PUT  /lfs/SHA256                                a large file
POST /api/models/USER/NAME/commit/main          all files at once, small ones inside
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ruamel.yaml import YAML

from support.hub_server import git_sha1

TOKEN = "hf_of_a_test"
LARGE = (".safetensors", ".gguf")


@dataclass
class Repository:
    """Its files, whether it is private, and which of them are stored as large ones."""

    files: dict[str, bytes] = field(default_factory=dict)
    is_private: bool = False
    commits: list[str] = field(default_factory=list)


@dataclass
class UploadHub:
    """What the server holds, what it was asked, and how it misbehaves."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by SHA-256, whether a commit names them or not."""
    requests: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    cut_puts: int = 0
    """How many more large files are cut off: the connection closes without an answer."""
    refuse_commit: bool = False
    users: tuple[str, ...] = ("me",)
    """Whom the token may write for."""

    def count(self, pattern: str) -> int:
        return len([request for request in self.requests if re.match(pattern, request)])

    def info(self, name: str) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for path, data in self.repositories[name].files.items():
            entry: dict[str, Any] = {
                "rfilename": path,
                "size": len(data),
                "blobId": git_sha1(data),
            }
            if path.endswith(LARGE):
                sha256 = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        content: dict[str, Any] = {"id": name, "sha": "0" * 40, "siblings": siblings, "tags": []}
        card = self.repositories[name].files.get("README.md", b"").decode()
        head = re.match(r"(?s)---\n(.*?)\n---\n", card)
        if head is not None:
            content["cardData"] = YAML(typ="safe").load(head[1])
        return content


def handler(hub: UploadHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            for key, value in {
                "Content-Length": str(len(data)),
                "Content-Type": "application/json",
                **(headers or {}),
            }.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)

        def body(self) -> bytes:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.bodies.append(content)
            return content

        def is_allowed(self, name: str) -> bool:
            token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return token and name.partition("/")[0] in hub.users

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"GET {path}")
            match = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/main)?", path)
            if match is not None and match[1] in hub.repositories:
                self.answer(200, hub.info(match[1]))
            else:
                self.answer(404, {}, {"X-Error-Code": "RepoNotFound"})

        def do_POST(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"POST {path}")
            body = self.body()
            if path == "/api/repos/create":
                asked = json.loads(body)
                # Without an organisation the repository belongs to the owner of the token.
                name = f"{asked.get('organization') or hub.users[0]}/{asked['name']}"
                if not self.is_allowed(name):
                    self.answer(403, {"error": "You don't have the rights"})
                    return
                private = asked.get("visibility") == "private" or bool(asked.get("private"))
                hub.repositories[name] = Repository({".gitattributes": b"*.gguf\n"}, private)
                self.answer(200, {"url": f"{hub.url}/{name}"})
                return

            if path == "/api/validate-yaml":
                # The head of a card; the hub knows its licences.
                errors = (
                    [{"message": "unknown license"}]
                    if "license: nobodys" in json.loads(body)["content"]
                    else []
                )
                self.answer(400 if errors else 200, {"errors": errors, "warnings": []})
                return

            match = re.fullmatch(
                r"/(?:api/models/)?([\w.-]+/[\w-]+)(?:/(preupload|commit)/main|\.git/info/lfs/objects/(batch))",
                path,
            )
            if match is None or match[1] not in hub.repositories:
                self.answer(404, {}, {"X-Error-Code": "RepoNotFound"})
            elif not self.is_allowed(match[1]):
                self.answer(403, {"error": "You don't have the rights"})
            elif match[2] == "preupload":
                self.preupload(json.loads(body))
            elif match[2] == "commit":
                self.commit(match[1], body)
            else:
                self.batch(json.loads(body))

        def preupload(self, asked: dict[str, Any]) -> None:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in asked["files"]
            ]
            self.answer(200, {"files": files})

        def batch(self, asked: dict[str, Any]) -> None:
            objects: list[dict[str, Any]] = []
            for file in asked["objects"]:
                entry = {"oid": file["oid"], "size": file["size"]}
                if file["oid"] not in hub.objects:
                    entry["actions"] = {"upload": {"href": f"{hub.url}/lfs/{file['oid']}"}}
                objects.append(entry)
            self.answer(200, {"transfer": "basic", "objects": objects})

        def do_PUT(self) -> None:
            hub.requests.append(f"PUT {self.path}")
            content = self.body()
            if hub.cut_puts:
                hub.cut_puts -= 1
                self.close_connection = True
                return
            sha256 = self.path.rpartition("/")[2]
            assert hashlib.sha256(content).hexdigest() == sha256
            # Storage behind the hub must not get the token of the user.
            assert self.headers.get("Authorization") is None
            hub.objects[sha256] = content
            self.answer(200, {})

        def commit(self, name: str, body: bytes) -> None:
            if hub.refuse_commit:
                self.answer(409, {"error": "busy"})
                return
            repository = hub.repositories[name]
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "header":
                    repository.commits.append(value["summary"])
                elif entry["key"] == "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    repository.files[value["path"]] = hub.objects[value["oid"]]
                else:
                    del repository.files[value["path"]]
            oid = hashlib.sha1(body).hexdigest()
            self.answer(200, {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid})

    return Handler


@contextmanager
def serve_upload_hub() -> Iterator[UploadHub]:
    """A hub that takes uploads while the block runs."""
    state = UploadHub()
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
