"""What the `make.py` of a release is made of: commands, runs that are killed between checkpoints, one reproducible archive."""

import hashlib
import json
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import torch
from safetensors import safe_open

WORDS = "the a model reads text and learns to answer plain questions in short sentences 模型 读 文字 学会 回答".split()  # noqa: SIM905


def headway(*arguments: str) -> list[str]:
    """A command of the headway that is on the Python path."""
    return [sys.executable, "-m", "headway", *arguments]


def sentence(seed: int, length: int) -> str:
    """A sentence that depends on its arguments alone."""
    return (
        " ".join(WORDS[(seed * 7 + i * (seed % 5 + 1)) % len(WORDS)] for i in range(length)) + "."
    )


def write_lines(path: Path, records: list[dict[str, object]]) -> None:
    """One JSON object a line."""
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )


def interrupt(
    folder: Path, recipe: str, run: Path, steps: int, checkpoints: str = "checkpoints/step-*"
) -> None:
    """Train a recipe and kill it once it has logged so many steps and finished a checkpoint that matches the pattern."""

    def has_checkpoint() -> bool:
        return any((path / "manifest.json").exists() for path in run.glob(checkpoints))

    process = subprocess.Popen(headway("train", recipe), cwd=folder, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    while process.poll() is None and (
        (run / "metrics.jsonl").read_bytes().count(b"\n") < steps or not has_checkpoint()
    ):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def metrics_of(run: Path) -> list[dict[str, object]]:
    """The metrics of a run, without the times."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "time"} for record in records]


def weights_of(run: Path) -> dict[str, str]:
    """Checksums of every tensor of the final model."""
    checksums: dict[str, str] = {}
    for path in sorted((run / "final").rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                content = (
                    file.get_tensor(name)
                    .contiguous()
                    .reshape(-1)
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )
                checksums[f"{path.relative_to(run / 'final')}:{name}"] = hashlib.sha256(
                    content
                ).hexdigest()
    return checksums


def machine() -> dict[str, object]:
    """On which processor and torch numbers are comparable bit for bit."""
    return {
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
    }


def pack(folder: Path) -> None:
    """FOLDER.tar.xz, without what names the machine."""
    for name in ("environment.json", "command.txt", "lock.json", "logs"):
        for path in [*folder.rglob(name)]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    with tarfile.open(f"{folder}.tar.xz", "w:xz") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name, filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry
