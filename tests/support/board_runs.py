"""Run folders for tests of the board, written the way a run writes them."""

import json
import math
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headway.board.server import BoardServer
from headway.board.watch import Board, LocalSource
from headway.rollout.journal import (
    RewardedBatch,
    RolloutJournal,
    SampledAnswer,
    SampledBatch,
)
from headway.runtime.web_access import Access
from headway.track.metrics_file import MetricsFile


def record(step: int, seed: float = 0.0) -> dict[str, Any]:
    """A step's record with the fields of a real one."""
    numbers: dict[str, Any] = {
        "step": step, "loss": 2.0 + 5.0 / (1 + step / 50) + 0.1 * math.sin(step * 1.7 + seed),
        "grad_norm": 1.0 + 0.1 * math.cos(step + seed),
        "lr": 1e-3 / (1 + step / 1000), "loss/web": 3.0 + seed, "loss/code": 2.0, "num_consumed_tokens": 4096 * step, "epoch": 0,
        "time": {"step_seconds": 0.25, "tokens_per_second": 16384.0 + step % 7, "mfu_full": 0.4, "memory_bytes": 1 << 33,
                 "eta_seconds": 60.0},
    }  # fmt: skip
    if step % 10 == 0:
        numbers["valid"] = {"valid": {"loss": 3.0 - step / 1e6, "tokens": 100}}
    return numbers


def make_run(
    folder: Path, steps: int, *, seed: float = 0.0, done: bool = True, lr: float = 1e-3
) -> Path:
    """A run folder with `steps` records."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(
        f"run: {{name: {folder.name}}}\noptim: {{kind: adamw, lr: {lr}}}\nsteps: {steps}\n"
    )
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record(step, seed)) + "\n" for step in range(1, steps + 1))
    events = [{"time": 1.0e9, "event": "start", "step": 0, "text": "begins"}]
    if done:
        events.append({"time": 1.0e9 + 60, "event": "finish", "step": steps, "text": "done"})
        (folder / "summary.json").write_text(
            json.dumps({"steps": steps, "seconds": 60.0, "checkpoint": None, "best_loss": 2.0})
        )
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "train.log").write_text("2026-01-01 INFO begins\n2026-01-01 INFO done\n")
    return folder


EVIL_ANSWER = "<img src=x onerror=alert(1)><script>alert(2)</script> \u202e \x00 \x1b[31m"
"""An answer that would like to be a page."""


def add_rollout(folder: Path, batch: int, rewards: list[float] | None, text: str = "") -> None:
    """A batch of two prompts in the journal of a run, with as many answers as rewards."""
    count = 4 if rewards is None else len(rewards)
    answers = tuple(
        SampledAnswer(
            prompt=10 * batch + index // (count // 2),
            sample=index % (count // 2),
            ids=(1,) * (index + 1),
            logprobs=np.full(index + 1, -0.5, np.float32),
            finished="length" if index == count - 1 else "eos",
            text=f"answer {batch}.{index} {text}",
        )
        for index in range(count)
    )
    journal = RolloutJournal.open(folder)
    questions = (f"question {batch}a {text}", f"question {batch}b")
    journal.add(SampledBatch(batch, batch, "d", ("x", "y"), answers, 2.0, questions, start=batch))
    if rewards is not None:
        parts = tuple({"number": reward, "format": 0.5} for reward in rewards)
        problems = ((),) * (count - 1) + ((f"number: it raised {text}",),)
        journal.add(RewardedBatch(batch, "r", tuple(rewards), parts, problems, 0.5))


def append_record(folder: Path, step: int, **more: Any) -> None:
    """Another step, written as a run writes it."""
    MetricsFile(folder / "metrics.jsonl").write(record(step) | more)


def unpack(content: bytes) -> list[dict[str, Any]]:
    """The curves of an answer, read as the page reads them."""
    (length,) = struct.unpack_from("<I", content)
    head = json.loads(content[4 : 4 + length])
    offset = 4 + length
    assert offset % 8 == 0

    def take(count: int) -> tuple[float, ...]:
        nonlocal offset
        values = struct.unpack_from(f"<{count}d", content, offset)
        offset += 8 * count
        return values

    for series in head["series"]:
        series["x"], series["y"], series["mean_x"], series["mean_y"], series["bad_x"] = (
            take(series[key]) for key in ("n", "n", "means", "means", "bad")
        )
    assert offset == len(content)
    return head["series"]


class Client:
    """Asks a board."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers=headers or {}, method=method
        )
        opener = urllib.request.build_opener(_NoRedirect())
        try:
            with opener.open(request, timeout=20) as answer:
                return answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as answer:
            with answer:
                return answer.code, answer.read(), dict(answer.headers)

    def json(self, path: str) -> Any:
        status, content, _ = self.get(path)
        assert status == 200, (path, status, content)
        return json.loads(content)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


@contextmanager
def serving_board(
    root: Path, *, host: str = "127.0.0.1", token: str | None = None
) -> Iterator[tuple[Client, Board]]:
    """A board of a folder on a free port. With another `host` it still listens on loopback, under that host's rules."""
    with Board([LocalSource(root)]) as board:
        server = BoardServer(("127.0.0.1", 0), board, Access(host, token))
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        try:
            yield Client(server.port), board
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
