"""How fast a board opens and follows, and what it costs: many long runs come in; seconds and bytes go out, as JSON.

    PYTHONPATH=src python3 benchmarks/board.py --runs 50 --points 100000 --viewers 20 --seconds 60

It writes runs with the fields of real records, starts `headway board` twice (without and with its cached index), asks for what the page
asks for with every run chosen, appends to one run and waits for the new step, then lets viewers poll like the page does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

METRICS = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu_full", "memory_bytes")


def write_runs(root: Path, runs: int, points: int) -> None:
    """Write runs."""
    rng = random.Random(5)
    rest = [_rest(step, rng) for step in range(1, points + 1)]
    for number in range(runs):
        folder = root / f"group-{number % 5}" / f"run-{number:03}"
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(
            f"run: {{name: run-{number:03}}}\noptim: {{lr: {1e-3 * (1 + number)}}}\nsteps: {points}\n"
        )
        events = [
            {"time": 1e9, "event": "start", "step": 0, "text": ""},
            {"time": 1e9, "event": "finish", "step": points, "text": ""},
        ]
        (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
        (folder / "summary.json").write_text(
            json.dumps({"steps": points, "seconds": 1.0, "checkpoint": None})
        )
        with open(folder / "metrics.jsonl", "w") as file:
            for step in range(1, points + 1):
                loss = (
                    2
                    + 6 / (1 + step / 2000)
                    + rng.gauss(0, 0.05)
                    + (5 if step % 33_333 == 0 else 0)
                )
                file.write(
                    f'{{"step": {step}, "loss": {loss!r}, "grad_norm": {rng.random()!r}, {rest[step - 1]}'
                )


def _rest(step: int, rng: random.Random) -> str:
    """The fields of a record that all runs share."""
    fields: dict[str, Any] = {
        "loss_scale": 1.0, "nll": rng.random(), "accuracy": rng.random(), "targets/web": 4096, "loss/web": rng.random(),
        "targets/code": 4096,         "loss/code": rng.random(), "accuracy/web": rng.random(), "accuracy/code": rng.random(),
        "lr": 1e-3 * rng.random(),
        "adam_beta2": 0.95,
        "micro_num": 8, "num_consumed_tokens": 524288 * step, "num_samples_in_batch": 301, "largest_length": 4096, "largest_batch": 8,
        "smallest_batch": 3, "epoch": 0, "tokens": 524288, "inf_nan_skip_batches": 0,
    }  # fmt: skip
    names = ("step_seconds", "tokens_per_second", "tgs", "tflops", "mfu_full", "mfu_causal", "fwd_bwd_time", "data_wait_seconds",
             "save_stall_seconds", "data_wait_share", "memory_bytes", "gpu_utilisation", "gpu_power_watts", "eta_seconds")  # fmt: skip
    fields["time"] = {name: rng.random() * 100 for name in names}
    return json.dumps(fields)[1:] + "\n"


class Server:
    """A `headway board` process."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.begun = time.monotonic()
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-P", "-m", "headway", "board", str(root), "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert self.process.stdout is not None
        found = re.search(r":(\d+)/", self.process.stdout.readline())
        assert found is not None, "headway board did not start"
        self.port = int(found[1])

    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def cpu_seconds(self) -> float:
        """Processor time of the server process: on a busy machine more telling than the clock."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Resident bytes of the server process, without the processes that build indexes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) << 10

    def stop(self) -> float:
        begun = time.monotonic()
        self.process.send_signal(
            signal.SIGTERM
        )  # a process started in the background ignores Ctrl-C
        self.process.wait(30)
        return time.monotonic() - begun


class Viewer:
    """Asks what the page asks."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.version = 0
        self.bytes = 0

    def get(self, path: str) -> bytes:
        self.connection.request("GET", path)
        answer = self.connection.getresponse()
        content = answer.read()
        assert answer.status == 200, (path, answer.status, content[:200])
        self.bytes += len(content)
        return content

    def state(self) -> list[dict[str, Any]]:
        found = json.loads(self.get(f"/api/state?since={self.version}"))
        self.version = found["version"]
        return found["runs"]

    def charts(
        self, runs: list[str], points: int, metrics: tuple[str, ...] = METRICS
    ) -> list[dict[str, Any]]:
        heads: list[dict[str, Any]] = []
        for metric in metrics:
            query = "&".join(f"run={run}" for run in runs)
            content = self.get(f"/api/series?{query}&metric={metric}&points={points}")
            (length,) = struct.unpack_from("<I", content)
            heads += json.loads(content[4 : 4 + length])["series"]
        return heads

    def open(self) -> list[dict[str, Any]]:
        """The page with every run chosen: its files, the list, the names, six charts of all runs."""
        page = self.get("/").decode()
        for name in re.findall(r'(?:src|href)="(/[^"]+)"', page):
            self.get(name)
        runs = [run["id"] for run in self.state()]
        self.get("/api/metrics?" + "&".join(f"run={run}" for run in runs))
        return self.charts(runs, max(120, min(2000, 24_000 // len(runs))))


def measure_open(root: Path, cache: Path, *, wait: bool = True) -> tuple[dict[str, Any], Server]:
    server = Server(root, cache)
    viewer = Viewer(server.port)
    listening = server.seconds()
    heads = viewer.open()
    found = {
        "listening_seconds": listening,
        "open_seconds": server.seconds(),
        "cpu_seconds": server.cpu_seconds(),
    }
    found |= {
        "load_average": os.getloadavg()[0],
        "points": sum(one["n"] for one in heads),
        "bytes_to_open": viewer.bytes,
    }
    found["partial_curves"] = sum(one["partial"] for one in heads)
    runs = sorted({one["run"] for one in heads})
    while wait and any(one["partial"] for one in viewer.charts(runs, 120, ("loss",))):
        time.sleep(0.5)
    found |= {
        "complete_seconds": server.seconds() if wait else None,
        "memory_bytes": server.memory(),
    }
    return found, server


def measure_live(server: Server, folder: Path, points: int) -> float:
    """Seconds from a written step to the answer that has it."""
    viewer = Viewer(server.port)
    (run,) = [one["id"] for one in viewer.state() if one["name"].endswith(folder.name)]
    viewer.charts([run], 100, ("loss",))
    worst = 0.0
    for more in range(1, 6):
        time.sleep(0.37)
        line = f'{{"step": {points + more}, "loss": 0.5, {_rest(points + more, random.Random(1))}'
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(line)
        begun = time.monotonic()
        while not any(one["step"] == points + more for one in viewer.state()):
            time.sleep(0.05)
        (head,) = viewer.charts([run], 100, ("loss",))
        assert head["total"] == points + more, head
        worst = max(worst, time.monotonic() - begun)
    return worst


def measure_viewers(
    server: Server, folder: Path, points: int, viewers: int, seconds: float
) -> dict[str, Any]:
    """Memory and answer times while viewers poll once a second and one run writes ten steps a second."""
    over, slowest, asked = threading.Event(), [0.0], [0]

    def watch() -> None:
        viewer = Viewer(server.port)
        runs = [run["id"] for run in viewer.state()][:8]
        viewer.charts(runs, 800)
        while not over.wait(1.0):
            begun = time.monotonic()
            changed = [run["id"] for run in viewer.state() if run["id"] in runs]
            if changed:
                viewer.charts(changed, 800)
            slowest[0] = max(slowest[0], time.monotonic() - begun)
            asked[0] += 1

    threads = [threading.Thread(target=watch) for _ in range(viewers)]
    for thread in threads:
        thread.start()
    memory: list[int] = []
    begun, step, rest = time.monotonic(), points + 10, _rest(1, random.Random(1))
    while time.monotonic() - begun < seconds:
        step += 1
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(f'{{"step": {step}, "loss": 0.5, {rest}')
        time.sleep(0.1)
        memory.append(server.memory())
    over.set()
    for thread in threads:
        thread.join()
    third = max(1, len(memory) // 3)
    return {
        "viewers": viewers, "seconds": seconds, "polls": asked[0], "slowest_poll_seconds": slowest[0],
        "memory_first_third_bytes": max(memory[:third]), "memory_last_third_bytes": max(memory[-third:]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--indexed",
        type=Path,
        help="A complete cache of these runs: the first start is not waited for.",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="Where the runs are, or are written and kept; default: a temporary folder.",
    )
    given = parser.parse_args()
    root = given.folder or Path(tempfile.mkdtemp(prefix="board-"))
    try:
        runs = root / "runs"
        begun = time.monotonic()
        if not runs.exists():
            write_runs(runs, given.runs, given.points)
        size = sum(one.stat().st_size for one in runs.rglob("metrics.jsonl"))
        print(f"wrote {size / 1e9:.2f} GB in {time.monotonic() - begun:.0f} s", file=sys.stderr)
        cache = root / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        result: dict[str, Any] = {
            "runs": given.runs,
            "points_each": given.points,
            "metrics_bytes": size,
        }
        result["first_start"], server = measure_open(runs, cache, wait=given.indexed is None)
        print(json.dumps(result), file=sys.stderr)
        result["stop_seconds"] = server.stop()
        result["second_start"], server = measure_open(runs, given.indexed or cache)
        print(json.dumps(result), file=sys.stderr)
        result["cache_bytes"] = (
            sum(one.stat().st_size for one in cache.rglob("*") if one.is_file())
            if given.indexed is None
            else None
        )
        folder = runs / "group-0" / "run-000"
        with open(folder / "metrics.jsonl", "rb") as file:
            before = file.seek(0, os.SEEK_END)
        points = given.points
        try:
            result["live_seconds"] = measure_live(server, folder, points)
            result["many"] = measure_viewers(server, folder, points, given.viewers, given.seconds)
        finally:
            os.truncate(folder / "metrics.jsonl", before)
        server.stop()
        print(json.dumps(result, indent=2))
    finally:
        if given.folder is None:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
