"""Attacks on `headway serve` over loopback, and what honest clients see meanwhile. Two tiny models with random weights, one of them with an
encoder for pictures; every attack is bounded in count and time.

    PYTHONPATH=src python benchmarks/serve_attacks.py                     # all attacks, one after the other
    PYTHONPATH=src python benchmarks/serve_attacks.py pictures kills      # some
    PYTHONPATH=../older/src python benchmarks/serve_attacks.py            # the same on another version

    pictures    forty PNG files of 64 megapixels in one request
    bodies      a body of 30 MB that is ten million empty lists
    silence     1,100 connections that never send a request, and 64 honest clients
    schemas     a schema that names itself, sent twice, and a list of lists
    kills       the engine of one of two models is killed twice

Printed per attack: the answers of the attack; how long /health and short completions of both models took meanwhile; what is left.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

MOST_SECONDS = 150.0
"""Of one request."""
KINDS = ("health", "other model", "same model")
PROBE_SECONDS = 0.1


def build_models(folder: Path) -> tuple[Path, Path]:
    """A model of texts, and one of texts and pictures."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from transformers import ViTConfig, ViTModel

    from headway.export.huggingface import export_huggingface
    from headway.model.config import ModelConfig
    from headway.model.init import initial_value
    from headway.model.layout import param_specs
    from headway.model.media_shape import MediaInput, MediaShape
    from headway.tokenizer.load import Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
    )
    Tokenizer(backend, {"bos": "<s>", "eos": "</s>"}).save(folder / "tokenizer")
    encoder = folder / "encoder"
    ViTModel(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=32,
            patch_size=8,
        )
    ).save_pretrained(encoder)
    settings = {
        "do_resize": True,
        "size": {"height": 32, "width": 32},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (encoder / "preprocessor_config.json").write_text(json.dumps(settings))
    config = ModelConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=48,
        vocab_size=320,
        max_seq_len=2048,
    )
    described = json.dumps({"kind": "huggingface", "path": str(encoder), "pool": "mean"})
    pictures = config.with_(
        media=MediaShape((MediaInput("image", 16, 2, encoder=described),), hidden=16, missing=False)
    )
    for name, shape in (("texts", config), ("pictures", pictures)):
        weights = ((spec.name, initial_value(spec, shape, 4)) for spec in param_specs(shape))
        export_huggingface(shape, weights, folder / name, tokenizer=folder / "tokenizer")
    return folder / "texts", folder / "pictures"


class Server:
    """A running server."""

    def __init__(self, texts: Path, pictures: Path, log: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "headway",
            "serve",
            "--port",
            "0",
            "--json",
            "--device",
            "cpu",
            "--cache-gib",
            "0.05",
        ]
        command += [
            "--model",
            f"texts={texts}",
            "--model",
            f"pictures={pictures}",
            "--chat-template",
            "chatml",
        ]
        self.log = log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline().decode()
            if not line:
                raise SystemExit(f"the server did not start: {log.read_text()}")
            text += line
        self.port = int(json.loads(text)["port"])

    def engines(self) -> list[int]:
        """Process ids of the engines, in the order of their start."""
        listed = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "engine_process"],
            capture_output=True,
            text=True,
            check=False,
        )
        return sorted(map(int, listed.stdout.split()))

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


async def ask(
    port: int, method: str, path: str, body: bytes = b"", seconds: float = MOST_SECONDS
) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own: status, headers and body; status 0 where there is no answer."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0, {}, b""
    top, _, rest = answer.partition(b"\r\n\r\n")
    lines = top.decode("latin-1").split("\r\n")
    if not lines[0].startswith("HTTP/"):
        return 0, {}, b""
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines[1:])
    }
    return int(lines[0].split()[1]), headers, rest


def completion(model: str = "texts") -> bytes:
    return json.dumps({"model": model, "prompt": "Hello", "max_tokens": 4}).encode()


def reason(body: bytes) -> str:
    """The message of an error."""
    try:
        return json.loads(body)["error"]["message"][:160]
    except (ValueError, KeyError, TypeError):
        return body[:80].decode("utf-8", "replace")


class Probe:
    """An honest client: /health and short completions of both models, again and again."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.statuses: dict[str, Counter[int]] = {kind: Counter() for kind in KINDS}
        self._ended = False

    async def run(self) -> None:
        """Ask until `end`."""

        async def repeat(kind: str, method: str, path: str, body: bytes) -> None:
            while not self._ended:
                began = time.monotonic()
                status, _, _ = await ask(self.port, method, path, body, 120)
                self.seconds[kind].append(time.monotonic() - began)
                self.statuses[kind][status] += 1
                await asyncio.sleep(PROBE_SECONDS)

        await asyncio.gather(
            repeat("health", "GET", "/health", b""),
            repeat("other model", "POST", "/v1/completions", completion("texts")),
            repeat("same model", "POST", "/v1/completions", completion("pictures")),
        )

    def end(self) -> None:
        """No more requests."""
        self._ended = True

    def report(self) -> None:
        for kind, seconds in self.seconds.items():
            median, worst = statistics.median(seconds) * 1e3, max(seconds) * 1e3
            print(
                f"  {kind:11} {len(seconds)} asked, statuses {dict(self.statuses[kind])}, median {median:.0f} ms, worst {worst:.0f} ms"
            )


async def probed(server: Server, attack: Awaitable[None]) -> None:
    """An attack with an honest client beside it."""
    probe = Probe(server.port)
    asking = asyncio.create_task(probe.run())
    await asyncio.sleep(0.5)
    await attack
    await asyncio.sleep(0.5)
    probe.end()
    await asking
    probe.report()


async def pictures(server: Server) -> None:
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (8000, 8000), (1, 2, 3)).save(data, "PNG")
    files: list[str] = []
    for number in range(40):  # different files of the same size
        picture = data.getvalue() + bytes([number])
        files.append("data:image/png;base64," + base64.b64encode(picture).decode())
    content = [{"type": "image_url", "image_url": {"url": url}} for url in files]
    body = json.dumps(
        {"model": "pictures", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    ).encode()
    print(f"  a body of {len(body) / 2**20:.1f} MiB")
    began = time.monotonic()
    status, _, answer = await ask(server.port, "POST", "/v1/chat/completions", body)
    print(f"  attack: {status} after {time.monotonic() - began:.1f} s: {reason(answer)}")
    for side, count in ((7000, 4), (2000, 20)):
        data = io.BytesIO()
        Image.new("RGB", (side, side), (1, 2, 3)).save(data, "PNG")
        urls = [
            "data:image/png;base64," + base64.b64encode(data.getvalue() + bytes([n])).decode()
            for n in range(count)
        ]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = json.dumps(
            {
                "model": "pictures",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 4,
            }
        ).encode()
        began = time.monotonic()
        status, _, answer = await ask(server.port, "POST", "/v1/chat/completions", body)
        shown = "" if status == 200 else reason(answer)
        print(
            f"  {count} pictures of {side} x {side}: {status} after {time.monotonic() - began:.1f} s {shown}"
        )


async def bodies(server: Server) -> None:
    body = b'{"model": "texts", "prompt": [' + b"[]," * ((30 << 20) // 3) + b"0]}"
    began = time.monotonic()
    status, _, answer = await ask(server.port, "POST", "/v1/completions", body)
    print(f"  attack: {status} after {time.monotonic() - began:.1f} s: {reason(answer)}")


async def silence(server: Server) -> None:
    held: list[Any] = []
    for _ in range(1100):
        held.append(await asyncio.open_connection("127.0.0.1", server.port))
    began = time.monotonic()
    answers = await asyncio.gather(
        *(ask(server.port, "POST", "/v1/completions", completion(), 60) for _ in range(64))
    )
    print(
        f"  64 honest clients: {dict(Counter(status for status, _, _ in answers))} within {time.monotonic() - began:.1f} s"
    )
    for _, writer in held:
        writer.close()


async def schemas(server: Server) -> None:
    for schema in ({"$ref": "#"}, {"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": "?"}]
        body = json.dumps(
            {"model": "pictures", "messages": messages, "response_format": form, "max_tokens": 8}
        ).encode()
        status, _, answer = await ask(server.port, "POST", "/v1/chat/completions", body, 60)
        print(f"  {json.dumps(schema)}: {status} {'' if status == 200 else reason(answer)}")
        await until_answered(server, "pictures", 30)


async def kills(server: Server) -> None:
    for _ in range(2):
        engines = server.engines()
        if len(engines) < 2:
            print(
                f"  engines left: {len(engines)}; the server {'runs' if server.process.poll() is None else 'has ended'}"
            )
            return
        os.kill(max(engines), signal.SIGKILL)
        await asyncio.sleep(0.2)
        status, headers, answer = await ask(
            server.port, "POST", "/v1/completions", completion("pictures"), 30
        )
        print(
            f"  killed; its next request: {status}, Retry-After {headers.get('retry-after')}: {reason(answer)}"
        )
        _, _, health = await ask(server.port, "GET", "/health", b"", 30)
        print(f"  /health: {health.decode('utf-8', 'replace')[:220]}")
        await until_answered(server, "pictures", 60)


async def until_answered(server: Server, model: str, seconds: float) -> None:
    """Wait for a model that may have to be loaded again."""
    began = time.monotonic()
    while server.process.poll() is None and time.monotonic() - began < seconds:
        if (await ask(server.port, "POST", "/v1/completions", completion(model), 30))[0] == 200:
            print(f"  {model} answers {time.monotonic() - began:.1f} s later")
            return
        await asyncio.sleep(0.2)
    print(
        f"  {model} does not answer; the server {'runs' if server.process.poll() is None else 'has ended'}"
    )


ATTACKS: dict[str, Callable[[Server], Awaitable[None]]] = {
    "pictures": pictures,
    "bodies": bodies,
    "silence": silence,
    "schemas": schemas,
    "kills": kills,
}


def main() -> int:
    """Run the attacks, each on a server of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("attacks", nargs="*", help=f"some of {', '.join(ATTACKS)}; default: all")
    chosen = parser.parse_args().attacks or list(ATTACKS)
    import headway

    print(f"headway in {Path(headway.__file__).parent}")
    with tempfile.TemporaryDirectory() as folder:
        models = build_models(Path(folder))
        for name in chosen:
            print(f"{name}:")
            server = Server(*models, Path(folder) / "log")
            try:
                asyncio.run(probed(server, ATTACKS[name](server)))
                left = (
                    "runs"
                    if server.process.poll() is None
                    else f"ended with code {server.process.returncode}"
                )
                print(f"  the server {left}")
            finally:
                server.close()
            errors = [
                line
                for line in server.log.read_text(errors="replace").splitlines()
                if re.search("error|killed|failed", line)
            ]
            for line in errors[:6]:
                print(f"  log: {line[:200]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
