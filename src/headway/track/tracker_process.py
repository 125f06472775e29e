"""The process in which a tracker's package runs: `python -m headway.track.tracker_process`.

It answers lines of JSON on stdin.

    {"do": "open", "kind", "settings", "run"}
    {"do": "log", "step", "values"}
    {"do": "event", "name", "text", "step"}
    {"do": "keep", "path", "folder"}
    {"do": "finish"}

The package's own output goes to stderr. When stdin ends without `finish`, training was killed: the
run is ended as failed, and this process leaves however long the package takes.
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
    # What the package prints is no answer: standard output becomes standard error, and only this
    # copy still leads to the trainer.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lines: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, lines), daemon=True).start()

    client: ServiceClient | None = None
    ok = True
    while True:
        line = lines.get()
        message: Any = {"do": "lost"}
        if line is not None:
            message = json.loads(line)
        warning = ""
        try:
            if message["do"] == "open":
                client = open_client(message)
            elif client is not None:
                # A run that crashed once is marked as failed in the service.
                ok = ok and message.get("name") not in ("crash", "hang")
                warning = serve(client, message, ok=ok)
            _send(answers, {"done": True, "id": client.id if client else "", "warning": warning})
        except Exception as problem:
            # A package may raise anything. The answer says it, and training drops the tracker.
            _send(answers, {"failed": f"{type(problem).__name__}: {first_line(problem)[:300]}"})
            raise  # the whole traceback goes to the log of the tracker
        if message["do"] in ("finish", "lost"):
            return


def ignore_stop_signals() -> None:
    """SLURM sends the signal to save to every process of a job.

    This one ends when training says so, or when stdin ends.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def open_client(message: dict[str, Any]) -> ServiceClient:
    """Begin or continue the run that the first line describes."""
    # From JSON again: settings are strict, and a tuple or a path is a list or a text there.
    kind = kind_config("headway.track", message["kind"])
    config = kind.model_validate_json(json.dumps(message["settings"]))
    run = message["run"]
    tracked = TrackedRun(Path(run["folder"]), run["name"], run["id"], run["params"])
    return cast(ServiceConfig, config).open(tracked)


def serve(client: ServiceClient, message: dict[str, Any], *, ok: bool) -> str:
    """Do what one later line says; returns a warning, or nothing."""
    if message["do"] == "log":
        client.log(message["step"], message["values"])
    elif message["do"] == "event":
        client.event(message["name"], message["text"], message["step"])
    elif message["do"] == "keep":
        return keep(client, message)
    else:
        # `finish`, or `lost` if the trainer was killed: a run that was killed is not ok.
        client.finish(ok=ok and message["do"] == "finish")
    return ""


def keep(client: ServiceClient, message: dict[str, Any]) -> str:
    """Upload a file. A service that cannot keep it still has the curves: it is a warning."""
    assert isinstance(client, FileClient)
    try:
        client.keep(Path(message["path"]), message["folder"])
    except Exception as problem:
        reason = f"{type(problem).__name__}: {first_line(problem)[:300]}"
        return f"{message['path']} is not kept there: {reason}"
    return ""


def _read(stdin: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    """Read lines in a thread, so that the end of the trainer is noticed while the package works."""
    for line in stdin:
        lines.put(line)
    lines.put(None)
    # The main thread now ends the run in the service; a package that hangs is left behind.
    time.sleep(LAST_SECONDS)
    os._exit(1)


def _send(answers: IO[bytes], answer: dict[str, Any]) -> None:
    try:
        answers.write(json.dumps(answer).encode() + b"\n")
    except OSError:
        return  # nobody is there any more


if __name__ == "__main__":
    main()
