"""Fuzz target over pictures, sounds, videos, tars and the records that name them: damaged copies are validated and decoded."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.fuzzing import HOSTILE_TEXTS, Target, mutate_bytes, mutate_file, mutate_value, run_verb

TURNS = [
    {"role": "user", "content": "<image>\n<audio>What?"},
    {"role": "assistant", "content": "{}"},
]
PARTS = [
    {"type": "image_url", "image_url": {"url": "a.png"}},
    {"type": "audio", "audio": "a.wav"},
    {"type": "text", "text": "What?"},
]
RECORDS: list[dict[str, Any]] = [
    {"text": "a", "image": "a.png", "audio": "a.flac", "video": "a.avi"},
    {"messages": TURNS, "images": ["a.jpg"], "audios": ["a.ogg"]},
    {"messages": [{"role": "user", "content": PARTS}, TURNS[1]]},
    {
        "image": "a.webp",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat?"},
            {"from": "gpt", "value": "A cat."},
        ],
    },
    {"instruction": "a", "response": '{"diagnostic": {}}', "audio": "a.mp3"},
    {"file_name": "a.png", "caption": "b"},
]


def media_target() -> Target:
    """Every kind of media file, and the verb that decodes them."""
    return Target("media", _case, _make)


def _make(folder: Path) -> None:
    import numpy as np
    import soundfile
    from PIL import Image

    good = folder / "good"
    if good.exists():
        return
    good.mkdir()
    wave = (0.5 * np.sin(np.arange(8000) / 5)).astype(np.float32)
    for kind in ("wav", "flac", "ogg", "mp3"):
        soundfile.write(good / f"a.{kind}", wave, 8000)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    for name, options in (
        ("a.png", {}),
        ("a.jpg", {}),
        ("a.webp", {}),
        ("b.webp", {"lossless": True}),
    ):
        Image.fromarray(pixels).save(good / name, **options)
    Image.fromarray(pixels).quantize(7).save(good / "b.png")
    _make_film(good / "a.avi", pixels)
    with tarfile.open(good / "a.tar", "w") as archive:
        for name in ("a.png", "a.wav"):
            archive.add(good / name, name)
        text = tarfile.TarInfo("a.json")
        text.size = 14
        archive.addfile(text, io.BytesIO(b'{"text": "abc"}'[:14]))
    record = {
        "text": "x",
        "image": "data:image/png;base64,"
        + base64.b64encode((good / "a.png").read_bytes()).decode(),
    }
    (good / "a.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (*RECORDS, record)), encoding="utf-8"
    )


def _make_film(path: Path, pixels: Any) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = 32
        stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(4):
            container.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(
                        pixels[:30, :30].repeat(2, 0).repeat(2, 1)[:32, :32].copy(), format="rgb24"
                    )
                )
            )
        container.mux(stream.encode())


def _case(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    source = rng.choice(sorted((folder / "good").iterdir()))
    inner = random.Random(rng.random())
    how = rng.random()
    schema = ["--schema", "purrsight_v3"] if rng.random() < 0.3 else []
    record = inner.choice(RECORDS)
    name = source.name
    if how < 0.4:
        name = "x.jsonl"
        record = mutate_value(record, inner)
        if inner.random() < 0.3:
            record = {
                "text": "a",
                inner.choice(("image", "audio", "video")): inner.choice(HOSTILE_TEXTS),
            }
    elif source.suffix not in (".jsonl", ".tar"):
        key = {"png": "image", "jpg": "image", "webp": "image", "avi": "video"}.get(
            source.suffix[1:], "audio"
        )
        name = "x.jsonl"
        record = {"text": "a", key: source.name}

    def call() -> int:
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(folder / "good", work)
        os.chdir(work)
        if how >= 0.4:
            mutate_file(work / source.name, inner)
        if (
            how >= 0.9 and (work / source.name).is_file()
        ):  # a header that lies: a few bytes near the beginning
            data = (work / source.name).read_bytes()
            (work / source.name).write_bytes(mutate_bytes(data[:64], inner) + data[64:])
        (work / "x.jsonl").write_text(
            json.dumps(record) + "\n", encoding="utf-8", errors="surrogatepass"
        )
        return run_verb(["data", "validate", name, "--kind", "multimodal", *schema])

    return f"validate {name}, {source.name} damaged: {str(record)[:200]}", call
