"""Load on `headway serve` over loopback: many clients for a while, beside the engine alone on the same work.

Clients stream answers, ask for whole ones, leave in the middle, send bodies that are no requests, and read slowly. Reported: tokens/s
(from the engine's counter, so the same for HTTP and without), time to first token, answers by kind and status, memory of both processes
over time, and whether the cache stayed within its budget. `--check` compares greedy and seeded answers under load with the same alone.

    PYTHONPATH=src python benchmarks/serve_load.py --shape tiny --clients 64 --seconds 60 --faults --check          # a laptop
    PYTHONPATH=src python benchmarks/serve_load.py --shape 1b --prompt 128 --new 1024 --clients 64 --seconds 40 --engine --out load.json
    PYTHONPATH=src python benchmarks/serve_load.py --shape paced --prompt 128 --new 1024 --seconds 20      # HTTP alone, 26.6k tokens/s
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SERVER = "from headway.serve import engine_client; engine_client.ENGINE_MODULE = 'serve_load_engine'; from headway.__main__ import run; run()"
MALFORMED = (
    b"{",
    b"[]",
    b"{}",
    b'{"model": "m"}',
    b'{"model": "m", "prompt": 3}',
    b"\xff" * 100,
    b'{"model": "m", "prompt": "a", "n": 1000}',
)
USAGE = re.compile(rb'"completion_tokens":(\d+)')
DONE = b"data: [DONE]"


@dataclass
class Seen:
    """What clients saw."""

    answers: Counter[str] = field(default_factory=Counter)
    first_token: list[float] = field(default_factory=list)
    tokens: int = 0
    problems: list[str] = field(default_factory=list)


def span(text: str) -> tuple[int, int]:
    """`128` or `16:512`."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


class Work:
    """Requests of mixed lengths, from a seed."""

    def __init__(self, options: argparse.Namespace, vocab: int, seed: int) -> None:
        self.options, self.vocab, self.rng = options, vocab, random.Random(seed)

    def sizes(self) -> tuple[int, int]:
        """Tokens of a prompt and of its answer."""
        return self.rng.randint(*self.options.prompt), self.rng.randint(*self.options.new)

    def ids(self, size: int) -> list[int]:
        """A prompt that no other has."""
        return [self.rng.randrange(self.vocab - 2) for _ in range(size)]

    def body(self, **fields: Any) -> dict[str, Any]:
        """A request for a continuation of exactly its length."""
        prompt, new = self.sizes()
        asked = {
            "model": "m",
            "prompt": self.ids(prompt),
            "max_tokens": new,
            "ignore_eos": True,
            "temperature": self.options.temperature,
        }
        return {**asked, "seed": self.rng.randrange(1 << 30), **fields}


class Client:
    """A small HTTP/1.1 client: one connection per request, reading as fast as bytes come."""

    def __init__(self, port: int, seen: Seen) -> None:
        self.port, self.seen = port, seen

    async def open(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    async def ask(
        self,
        kind: str,
        body: dict[str, Any] | bytes,
        *,
        leave_after: int | None = None,
        pause: float = 0.0,
    ) -> bytes:
        """One request; the bytes of its answer. `leave_after`: bytes after which the client is gone; `pause`: seconds between reads."""
        began = time.perf_counter()
        found = bytearray()
        try:
            reader, writer = await self.open(
                body if isinstance(body, bytes) else json.dumps(body).encode()
            )
            try:
                while part := await reader.read(1024 if pause else 65536):
                    if b"data: " in part and b"data: " not in found:
                        self.seen.first_token.append(time.perf_counter() - began)
                    found += part
                    if leave_after is not None and len(found) > leave_after:
                        break
                    if pause:
                        await asyncio.sleep(pause)
            finally:
                writer.close()
        except OSError as problem:
            self.seen.answers[f"{kind}: {type(problem).__name__}"] += 1
            return bytes(found)
        status = found[9:12].decode("ascii", "replace") or "none"
        used = USAGE.search(found, max(0, len(found) - 2000))
        if used is not None:
            self.seen.tokens += int(used[1])
        is_cut = kind in ("stream", "slow reader") and status == "200" and DONE not in found
        self.seen.answers[f"{kind}: {status}{' cut' if is_cut else ''}"] += 1
        return bytes(found)


async def one_client(client: Client, work: Work, until: float, faults: bool) -> None:
    """Ask until the time is over."""
    rng = work.rng
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    while time.monotonic() < until:
        draw = rng.random() if faults else 1.0
        if draw < 0.08:
            await client.ask("leaves", work.body(**streamed), leave_after=rng.randrange(300, 3000))
        elif draw < 0.16:
            await client.ask("malformed", rng.choice(MALFORMED))
        elif draw < 0.20:
            await client.ask("slow reader", work.body(**streamed), pause=0.02)
        elif draw < 0.30:
            await client.ask("whole", work.body())
        else:
            await client.ask("stream", work.body(**streamed))


def references(work: Work) -> list[dict[str, Any]]:
    """Requests whose answers must not depend on the load: greedy and seeded."""
    made = [work.body(temperature=0.0 if number % 2 else 1.0) for number in range(12)]
    return [{**one, "max_tokens": min(48, one["max_tokens"])} for one in made]


async def texts_of(client: Client, asked: list[dict[str, Any]]) -> list[str]:
    """The answers to some requests, one after the other."""
    texts: list[str] = []
    for one in asked:
        found = await client.ask("check", one)
        texts.append(json.loads(found[found.index(b"\r\n\r\n") + 4 :])["choices"][0]["text"])
    return texts


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    try:
        return (
            next(
                int(line.split()[1])
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line.startswith("VmRSS")
            )
            / 1024
        )
    except (OSError, StopIteration):
        return 0.0


def child_of(pid: int) -> int:
    """The process that another started."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid:
            return int(status.parent.name)
    raise SystemExit(f"the server {pid} has no engine process")


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def live(port: int) -> dict[str, Any]:
    """What the server says of itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET /api/live HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
    )
    found = await reader.read()
    writer.close()
    return json.loads(found[found.index(b"\r\n\r\n") + 4 :])


async def generated(port: int) -> int:
    """The engine's counter of tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
    )
    text = (await reader.read()).decode()
    writer.close()
    return int(re.findall(r"^headway_generated_tokens_total\{.*\} (\d+)$", text, re.MULTILINE)[0])


async def watch(
    port: int, pids: dict[str, int], samples: list[dict[str, float]], problems: list[str]
) -> None:
    """Look at memory and the cache once a second."""
    while True:
        now = await live(port)
        if now["cache_bytes"] > now["cache_budget_bytes"]:
            problems.append(f"cache: {now['cache_bytes']} bytes of {now['cache_budget_bytes']}")
        sample = {f"{name}_mib": resident_mib(pid) for name, pid in pids.items()}
        samples.append(
            {
                **sample,
                "cache_bytes": now["cache_bytes"],
                "running": now["running"],
                "waiting": now["waiting"],
            }
        )
        await asyncio.sleep(1)


async def load(
    port: int, pids: dict[str, int], vocab: int, options: argparse.Namespace
) -> dict[str, Any]:
    """All clients for a while."""
    seen, samples = Seen(), []
    client = Client(port, seen)
    asked = references(Work(options, vocab, 999)) if options.check else []
    alone = await texts_of(client, asked)
    until = time.monotonic() + options.warmup + options.seconds
    clients = [
        asyncio.create_task(one_client(client, Work(options, vocab, number), until, options.faults))
        for number in range(options.clients)
    ]
    await asyncio.sleep(options.warmup)
    watching = asyncio.create_task(watch(port, pids, samples, seen.problems))
    first, began = await generated(port), time.perf_counter()
    cpu = {name: cpu_seconds(pid) for name, pid in pids.items()}
    seen.first_token.clear()
    under_load = await texts_of(client, asked)
    await asyncio.sleep(max(0.0, options.seconds - (time.perf_counter() - began)))
    last, passed = await generated(port), time.perf_counter() - began
    cpu = {name: round((cpu_seconds(pid) - cpu[name]) / passed, 3) for name, pid in pids.items()}
    await asyncio.gather(*clients)
    watching.cancel()
    seen.problems += [
        f"answer {number} differs under load"
        for number, (a, b) in enumerate(zip(alone, under_load, strict=True))
        if a != b
    ]
    waited = sorted(seen.first_token)
    quarter = max(1, len(samples) // 4)
    memory = {
        name: [
            round(statistics.mean(one[f"{name}_mib"] for one in part), 1)
            for part in (samples[:quarter], samples[-quarter:])
        ]
        for name in pids
    }
    return {
        "tokens_per_second": (last - first) / passed,
        "seconds": passed,
        "cores_used": cpu,
        "first_token_p50": waited[len(waited) // 2] if waited else None,
        "first_token_p99": waited[int(len(waited) * 0.99)] if waited else None,
        "answers": dict(sorted(seen.answers.items())),
        "tokens_received": seen.tokens,
        "checked": len(asked),
        "problems": seen.problems,
        "memory_mib_first_and_last_quarter": memory,
        "cache_bytes_most": max((one["cache_bytes"] for one in samples), default=0),
        "running_most": max((one["running"] for one in samples), default=0),
    }


def setup_of(options: argparse.Namespace) -> Any:
    """The engine of both runs."""
    from headway.infer.engine.request import EngineOptions
    from headway.serve.engine_setup import EngineSetup

    cache = None if options.cache_gib is None else int(options.cache_gib * (1 << 30))
    limits = EngineOptions(
        cache_bytes=cache, max_running=options.max_running, compile_blocks=options.compile
    )
    return EngineSetup("m", options.shape, limits, device=options.device)


def run_engine(options: argparse.Namespace) -> dict[str, Any]:
    """The engine without HTTP."""
    from serve_load_engine import SHAPES, time_engine

    from headway.infer.engine.request import EngineRequest
    from headway.infer.sampling import Sampling

    work = Work(options, SHAPES[options.shape]["vocab_size"], 1)

    def request() -> EngineRequest:
        prompt, new = work.sizes()
        sampling = Sampling(options.temperature, seed=work.rng.randrange(1 << 30))
        return EngineRequest(tuple(work.ids(prompt)), new, sampling, ignore_eos=True)

    return time_engine(setup_of(options), request, options.clients, options.warmup, options.seconds)


def run_http(options: argparse.Namespace) -> dict[str, Any]:
    """A server in processes of its own, and the clients here."""
    from serve_load_engine import SHAPES

    command = [
        sys.executable,
        "-c",
        SERVER,
        "serve",
        "--model",
        f"m={options.shape}",
        "--port",
        "0",
        "--json",
        "--device",
        options.device,
    ]
    command += [
        "--max-running",
        str(options.max_running),
        "--max-connections",
        str(options.clients + 64),
    ]
    command += ["--compile"] if options.compile else []
    command += [] if options.cache_gib is None else ["--cache-gib", str(options.cache_gib)]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert server.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = server.stdout.readline().decode()
            if not line:
                raise SystemExit(f"the server ended with {server.wait()}")
            text += line
        pids = {"http": server.pid, "engine": child_of(server.pid)}
        return asyncio.run(
            load(json.loads(text)["port"], pids, SHAPES[options.shape]["vocab_size"], options)
        )
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="tiny", choices=("tiny", "small", "1b", "paced"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warmup", type=float, default=10)
    parser.add_argument(
        "--prompt", type=span, default=(4, 200), help="tokens of a prompt: 128 or 4:200"
    )
    parser.add_argument("--new", type=span, default=(4, 200), help="tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--cache-gib", type=float)
    parser.add_argument("--compile", action="store_true", help="compile decoding steps")
    parser.add_argument(
        "--faults", action="store_true", help="clients that leave, read slowly or send nonsense"
    )
    parser.add_argument("--check", action="store_true", help="answers under load equal those alone")
    parser.add_argument(
        "--engine",
        action="store_true",
        help="measure the engine alone too, first, in a process of its own",
    )
    parser.add_argument("--engine-only", action="store_true", help="measure only that")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `headway` sets it: idle threads sleep
    if options.engine_only:
        print(json.dumps(run_engine(options)))
        return
    found: dict[str, Any] = {
        "shape": options.shape,
        "clients": options.clients,
        "prompt": options.prompt,
        "new": options.new,
    }
    if options.engine:
        alone = [*sys.argv[1:], "--engine-only"]
        done = subprocess.run(
            [sys.executable, __file__, *alone], stdout=subprocess.PIPE, check=True
        )
        found["engine"] = json.loads(done.stdout.splitlines()[-1])
    found["http"] = run_http(options)
    if options.engine:
        found["ratio"] = found["http"]["tokens_per_second"] / found["engine"]["tokens_per_second"]
    print(json.dumps(found, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
