"""Small raw corpora with exact and near duplicates, bad documents and odd files, for tests that compare two ways of reading."""

import gzip
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

HAN = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏"


def texts(count: int, seed: int = 0) -> Iterator[str]:
    """Texts of which about a fifth repeat an earlier one, a third nearly, and some are too short or not text."""
    chance = random.Random(seed)
    words = ["".join(chance.choice("abcdefghijklmnop") for _ in range(6)) for _ in range(500)]
    seen: list[str] = []
    for _ in range(count):
        luck = chance.random()
        if seen and luck < 0.2:
            yield chance.choice(seen[-60:])
        elif seen and luck < 0.5:
            parts = chance.choice(seen[-60:]).split(" ")
            for _ in range(chance.randrange(1, 4)):
                parts[chance.randrange(len(parts))] = chance.choice(words)
            seen.append(" ".join(parts))
            yield seen[-1]
        elif luck < 0.56:
            yield chance.choice(["", "12 34 56 78 90 11", "x", "!!! ??? *** ((("])
        elif luck < 0.66:
            yield "".join(chance.choice(HAN) for _ in range(120))
        else:
            seen.append(" ".join(chance.choice(words) for _ in range(chance.randrange(30, 80))))
            yield seen[-1]


def write_corpus(folder: Path, count: int = 400) -> list[str]:
    """Files of several kinds with the same kind of texts; returns what to give as inputs."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        {"text": text, "id": number} for number, text in enumerate(texts(count))
    ]
    cut = [0, count // 2, count * 5 // 8, count * 6 // 8, count * 7 // 8, count]
    plain, packed, zstd, table, lines = (rows[a:b] for a, b in pairwise(cut))
    (folder / "a.jsonl").write_text(
        "\n" + "".join(json.dumps(row) + "\n\n" for row in plain), encoding="utf-8"
    )
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in packed).encode())
    )
    (folder / "c.jsonl.zst").write_bytes(
        zstandard.compress("".join(json.dumps(row) + "\n" for row in zstd).encode())
    )
    pq.write_table(pa.Table.from_pylist(table), folder / "d.parquet", row_group_size=7)
    (folder / "e.json").write_text(json.dumps(lines), encoding="utf-8")
    giant = " ".join(texts(60, seed=5))
    (folder / "f.txt").write_text(giant, encoding="utf-8")
    return [
        str(folder / name)
        for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.json", "f.txt")
    ]
