"""A corpus with planted duplicates, cleaned and tokenized by one process and by a Ray cluster of this machine, one worker of it killed.

    python benchmarks/many_machines.py make CORPUS --bytes 500MB TEXT...     varied text from real files, with exact and near duplicates
    python benchmarks/many_machines.py show CORPUS --tokenizer T --out OUT [--on ray --workers 4] [--kill]
    python benchmarks/many_machines.py memory FOLDER --documents 1048576 --max-memory 16MB        one task that looks for near duplicates

`show` prints one JSON line: seconds of each verb, the peak memory of each process, how many tasks were done again, digests of the output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from headway.text.sample import parse_bytes

SHARDS = 8


def passages(paths: list[str]) -> list[str]:
    """Pieces of real text: records of .jsonl files, paragraphs of .txt files."""
    found: list[str] = []
    for path in map(Path, paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts = (
            [str(json.loads(line).get("text", "")) for line in text.splitlines() if line]
            if path.suffix == ".jsonl"
            else text.split("\n\n")
        )
        found += [
            sentence
            for part in parts
            for sentence in re.findall(r"[^.。!?\n]{20,400}[.。!?\n]?", part)
        ]
    return found


def documents(sentences: list[str], total_bytes: int, chance: random.Random) -> Iterator[str]:
    """New documents of shuffled sentences; one in ten repeats an earlier one, one in ten nearly."""
    recent: list[str] = []
    size = 0
    while size < total_bytes:
        luck = chance.random()
        if recent and luck < 0.1:
            text = chance.choice(recent)
        elif recent and luck < 0.2:
            words = chance.choice(recent).split(" ")
            for _ in range(max(1, len(words) // 40)):
                words[chance.randrange(len(words))] = chance.choice("abcdefgh") * 5
            text = " ".join(words)
        else:
            text = " ".join(chance.choice(sentences) for _ in range(chance.randrange(4, 40)))
            recent.append(text)
            recent = recent[-20_000:]
        size += len(text.encode())
        yield text


def make(arguments: argparse.Namespace) -> None:
    arguments.corpus.mkdir(parents=True)
    files = [
        open(arguments.corpus / f"part-{number}.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        for number in range(SHARDS)
    ]
    total = parse_bytes(arguments.bytes, "--bytes")
    written, count = 0, 0
    for text in documents(passages(arguments.text), total, random.Random(0)):
        line = json.dumps({"text": text, "id": count}, ensure_ascii=False) + "\n"
        files[min(SHARDS - 1, written * SHARDS // total)].write(line)
        written += len(line.encode())
        count += 1
    for file in files:
        file.close()
    print(
        json.dumps(
            {
                "documents": count,
                "bytes": sum(path.stat().st_size for path in arguments.corpus.iterdir()),
            }
        )
    )


def peaks_below(root: int) -> dict[int, tuple[str, int]]:
    """Peak resident memory of a process and all below it: id -> (name, bytes)."""
    parents, found = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = dict(
                    line.partition(":")[::2]
                    for line in Path(f"/proc/{entry}/status").read_text().splitlines()
                )
                name = (
                    Path(f"/proc/{entry}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")[:60]
                )
            except OSError:
                continue
            parents[int(entry)] = int(status["PPid"])
            if "VmHWM" in status:
                found[int(entry)] = (name, int(status["VmHWM"].split()[0]) << 10)
    below = {root}
    for _ in range(8):
        below |= {pid for pid, parent in parents.items() if parent in below}
    return {pid: found[pid] for pid in below if pid in found}


def run_verb(words: list[str], kill: bool) -> dict[str, object]:
    """Run a verb of headway; with `kill`, one Ray worker is killed when the first tasks are done."""
    began, cpu_before = time.monotonic(), sum(os.times()[2:4])
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "headway", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert child.stderr is not None
    peaks: dict[int, tuple[str, int]] = {}
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(child.stderr or ()))
    reader.start()
    killed = None
    work = Path(f"{words[words.index('--out') + 1] if '--out' in words else words[-1]}.work/done")
    while child.poll() is None:
        for pid, (name, peak) in peaks_below(child.pid).items():
            peaks[pid] = (name if "IDLE" not in name else peaks.get(pid, (name, 0))[0], peak)
        tasks = [
            pid
            for pid, (name, _) in peaks.items()
            if name.startswith("ray::run_task") and Path(f"/proc/{pid}").exists()
        ]
        if (
            kill
            and killed is None
            and tasks
            and work.is_dir()
            and sum(not name.startswith(".") for name in os.listdir(work)) >= 3
        ):
            killed = tasks[0]
            os.kill(killed, signal.SIGKILL)
        time.sleep(0.2)
    reader.join()
    seconds = time.monotonic() - began
    cpu = sum(os.times()[2:4]) - cpu_before
    print("".join(lines), file=sys.stderr)
    assert child.returncode == 0, lines
    workers = sorted((peak >> 20 for name, peak in peaks.values() if "ray::" in name), reverse=True)
    again = sum("is done again" in line for line in lines)
    return {
        "seconds": round(seconds, 1),
        "driver_mb": peaks[child.pid][1] >> 20,
        "ray_workers_mb": workers,
        "killed": killed,
        "again": again,
        "cpu_seconds": round(cpu, 1),
    }


def show(arguments: argparse.Namespace) -> None:
    on = (
        [
            "--on",
            arguments.on,
            "--workers",
            str(arguments.workers),
            "--task-size",
            arguments.task_size,
        ]
        if arguments.on
        else []
    )
    arguments.out.mkdir(parents=True)
    cleaned, store = arguments.out / "clean.jsonl", arguments.out / "store"
    files = sorted(str(path) for path in arguments.corpus.glob("*.jsonl"))
    corpus_bytes = sum(os.path.getsize(file) for file in files)
    found: dict[str, object] = {
        "on": arguments.on or "one process",
        "corpus_bytes": corpus_bytes,
        "load_before": os.getloadavg()[0],
    }
    found["clean"] = run_verb(["data", "clean", *on, *files, str(cleaned)], arguments.kill)
    workers = [] if on else ["--workers", "1"]
    os.chdir(arguments.out)
    command = [
        "data",
        "tokenize",
        *on,
        *workers,
        "--input",
        "clean.jsonl",
        "--tokenizer",
        str(arguments.tokenizer),
        "--out",
        "store",
    ]
    found["tokenize"] = run_verb(command, arguments.kill)
    for path in [cleaned, *sorted(store.iterdir())]:
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    print(json.dumps(found))


def memory(arguments: argparse.Namespace) -> None:
    """Peak memory of one reduce task over random band keys of many documents; one in fifty keys is shared by several."""
    import numpy as np

    from headway.runtime.storage import write_sealed
    from headway.text.tasks import dedup
    from headway.text.tasks.signatures import RUN_DOCUMENTS

    work, runs, bands = arguments.folder, arguments.documents // RUN_DOCUMENTS, 16
    random_ = np.random.default_rng(0)
    for run in range(runs):
        folder = work / "done" / f"map-{run}"
        folder.mkdir(parents=True)
        keys = random_.integers(0, 1 << 63, RUN_DOCUMENTS * bands, dtype=np.uint64) * np.uint64(2)
        shared = len(keys) // 50
        keys[:shared] = random_.integers(0, 1 << 20, shared, dtype=np.uint64) << np.uint64(44)
        order = np.argsort(keys)
        np.save(folder / "keys-0000.npy", keys[order])
        np.save(folder / "keys-rows-0000.npy", (order // bands).astype(np.uint32))
        np.save(
            folder / "entries-0000.npy",
            random_.integers(0, 256, (RUN_DOCUMENTS, 128), dtype=np.uint8),
        )
    (work / "runs.json").write_text(
        json.dumps({"values": [[f"map-{run}", 0, RUN_DOCUMENTS] for run in range(runs)]})
    )
    write_sealed(work / "alive.bin", np.packbits(np.ones(runs * RUN_DOCUMENTS, np.bool_)).tobytes())
    batch = dedup.records_at_once(parse_bytes(arguments.max_memory, "--max-memory"))
    ranges = -(-runs * RUN_DOCUMENTS * bands // batch)
    given = {
        "runs": "runs.json",
        "alive": "alive.bin",
        "similarity": 0.8,
        "batch": batch,
        "low": 0,
        "high": (1 << 64) // ranges,
    }
    child = (
        os.fork()
    )  # its peak begins with the memory it has in use, not with what making the files took
    if child == 0:
        Path("/proc/self/clear_refs").write_text("5")
        before = peaks_below(os.getpid())[os.getpid()][1] >> 20
        (work / "out").mkdir()
        dedup.near_range(given, work, work / "out")
        print(
            json.dumps(
                {
                    "ranges": ranges,
                    "before_mb": before,
                    "peak_mb": peaks_below(os.getpid())[os.getpid()][1] >> 20,
                }
            ),
            flush=True,
        )
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    making = verbs.add_parser("make")
    making.add_argument("corpus", type=Path)
    making.add_argument("text", nargs="+")
    making.add_argument("--bytes", default="1GB")
    making.set_defaults(run=make)
    showing = verbs.add_parser("show")
    showing.add_argument("corpus", type=Path)
    showing.add_argument("--tokenizer", type=Path, required=True)
    showing.add_argument("--out", type=Path, required=True)
    showing.add_argument("--on")
    showing.add_argument("--workers", type=int, default=4)
    showing.add_argument("--task-size", default="4MB")
    showing.add_argument("--kill", action="store_true")
    showing.set_defaults(run=show)
    remembering = verbs.add_parser("memory")
    remembering.add_argument("folder", type=Path)
    remembering.add_argument("--documents", type=int, default=1 << 20)
    remembering.add_argument("--max-memory", default="16MB")
    remembering.set_defaults(run=memory)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
