"""`headway data tokenize` beside raw `tokenizers.encode_batch` on the same cores and texts: bytes of text per second.

    python benchmarks/tokenizing.py [--rounds 5] [--megabytes 40] [--json]

Texts of 1 to 4 KB come from the Python standard library. The two take turns, so that whatever else the machine does hits both alike.
The target is 1.5 times the raw rate, reading, writing and starting worker processes included. (A script called tokenize.py would hide the
standard library's module of that name from every script beside it.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

from headway.prepare.build import BuildOptions, build_store
from headway.runtime.machine import usable_cores
from headway.tokenizer.load import load_tokenizer
from headway.tokenizer.train import train_bpe

TARGET = 1.5


def texts(megabytes: int) -> list[str]:
    """Pieces of 1 to 4 KB of the standard library, repeated to the wanted size."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        size = 1000 + 157 * len(found) % 3000
        found += [text[at : at + size] for at in range(0, len(text), size)]
    wanted: list[str] = []
    left = megabytes * 1_000_000
    while left > 0:
        text = found[len(wanted) % len(found)]
        wanted.append(text)
        left -= len(text)
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--vocab-size", type=int, default=16000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    documents = texts(given.megabytes)
    size = sum(len(text.encode()) for text in documents)
    raw: list[float] = []
    ours: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        corpus, tokenizer = Path(folder) / "corpus.jsonl", Path(folder) / "tokenizer"
        corpus.write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8"
        )
        train_bpe(iter(documents[:4000]), vocab_size=given.vocab_size, out=tokenizer)
        backend = load_tokenizer(tokenizer).fast
        for number in range(given.rounds):
            began = time.perf_counter()
            backend.encode_batch(documents, add_special_tokens=False)
            raw.append(size / (time.perf_counter() - began))
            began = time.perf_counter()
            build_store(
                [corpus],
                tokenizer,
                Path(folder) / f"store-{number}",
                BuildOptions(workers=usable_cores()),
            )
            ours.append(size / (time.perf_counter() - began))
            if not given.json:
                print(
                    f"round {number}: encode_batch {raw[-1] / 1e6:.2f} MB/s, headway {ours[-1] / 1e6:.2f} MB/s"
                )
    ratio = statistics.median(a / b for a, b in zip(ours, raw, strict=True))
    result = {
        "cores": usable_cores(),
        "encode_batch_bytes_s": statistics.median(raw),
        "headway_bytes_s": statistics.median(ours),
        "ratio": ratio,
    }
    print(
        json.dumps(result, indent=2)
        if given.json
        else f"ratio {ratio:.2f} on {usable_cores()} cores; target {TARGET}"
    )


if __name__ == "__main__":
    main()
