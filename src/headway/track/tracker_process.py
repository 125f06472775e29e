"""The process in which a tracker's package runs: `python -m headway.track.tracker_process`. It answers lines of JSON on stdin.

    {"do": "open", "kind", "settings", "run"}   {"do": "log", "step", "values"}   {"do": "event", "name", "text", "step"}
    {"do": "keep", "path", "folder"}            {"do": "finish"}

The package's own output goes to stderr. When stdin ends without `finish`, training was killed: the run is ended as failed, and this process
leaves however long the package takes.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, cast

from headway.config.kinds import kind_config
from headway.errors import first_line
from headway.runtime.stop import SIGNALS
from headway.track.service import FileClient, ServiceClient, ServiceConfig, TrackedRun

LAST_SECONDS = 30.0
"""How long a package may take to end the run of a trainer that was killed."""


def main() -> None:
    """Serve one run."""
    ignore_stop_signals()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the package prints is not an answer
    lines: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, lines), daemon=True).start()
    client: ServiceClient | None = None
    ok = True
    while True:
        line = lines.get()
        message: Any = {"do": "lost"} if line is None else json.loads(line)
        warning = ""
        try:
            if message["do"] == "open":
                client = open_client(message)
            elif client is not None:
                ok = ok and message.get("name") not in ("crash", "hang")
                warning = serve(client, message, ok=ok)
            _send(answers, {"done": True, "id": client.id if client else "", "warning": warning})
        except Exception as problem:  # a package may raise anything; the answer says it and training drops the tracker
            _send(answers, {"failed": f"{type(problem).__name__}: {first_line(problem)[:300]}"})
            raise
        if message["do"] in ("finish", "lost"):
            return


def ignore_stop_signals() -> None:
    """SLURM sends the signal to save to every process of a job; this one ends when training says so, or when stdin ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def open_client(message: dict[str, Any]) -> ServiceClient:
    """Begin or continue the run that the first line describes."""
    config = kind_config("headway.track", message["kind"]).model_validate_json(
        json.dumps(message["settings"])
    )
    run = message["run"]
    return cast(ServiceConfig, config).open(
        TrackedRun(Path(run["folder"]), run["name"], run["id"], run["params"])
    )


def serve(client: ServiceClient, message: dict[str, Any], *, ok: bool) -> str:
    """Do what one later line says; returns a warning, or nothing."""
    if message["do"] == "log":
        client.log(message["step"], message["values"])
    elif message["do"] == "event":
        client.event(message["name"], message["text"], message["step"])
    elif message["do"] == "keep":
        return keep(client, message)
    else:
        client.finish(ok=ok and message["do"] == "finish")
    return ""


def keep(client: ServiceClient, message: dict[str, Any]) -> str:
    """Upload a file. A service that cannot keep it still has the curves: it is a warning."""
    assert isinstance(client, FileClient)
    try:
        client.keep(Path(message["path"]), message["folder"])
    except Exception as problem:
        return f"{message['path']} is not kept there: {type(problem).__name__}: {first_line(problem)[:300]}"
    return ""


def _read(stdin: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in stdin:
        lines.put(line)
    lines.put(None)
    time.sleep(LAST_SECONDS)
    os._exit(1)


def _send(answers: IO[bytes], answer: dict[str, Any]) -> None:
    try:
        answers.write(json.dumps(answer).encode() + b"\n")
    except OSError:
        return  # nobody is there any more


if __name__ == "__main__":
    main()
