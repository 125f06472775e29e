"""torch's flight recorder: NCCL keeps its last collectives in memory and writes them out, a file for each rank, when one takes too long.

    rank 0  ... all_reduce 16 done   all_reduce 17 waits ─┐
    rank 1  ... all_reduce 16 done   (never came)         ├─▶ logs/flight-rank-N ─▶ one sentence: who waited in what, and who was missing

The host does not wait in an NCCL collective, so that a heartbeat cannot name it; these files can. They are pickles of plain values, and
are read by a reader that accepts nothing else: a file with anything more is left alone.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headway.config.regular_file import regular_only

FILE = re.compile(r"flight-rank-(\d+)")
SETTINGS = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DESYNC_DEBUG": "1",
}
MAX_NAMED = 8


def flight_recorder(run_dir: Path) -> dict[str, str]:
    """Variables that turn it on; its files can also be read with `python -m torch.distributed.flight_recorder.fr_trace`."""
    return {
        **SETTINGS,
        "TORCH_FR_DUMP_TEMP_FILE": str((run_dir / "logs" / "flight-rank-").absolute()),
    }


@dataclass(frozen=True)
class Collective:
    """One exchange of one rank in a group of ranks; all ranks of the group number them the same."""

    group: str
    number: int
    name: str
    shape: str
    is_done: bool

    def describe(self) -> str:
        """As one line of text."""
        return (
            f"{self.name} {self.number}"
            + (f" of {self.shape}" if self.shape else "")
            + (f" in {self.group}" if self.group else "")
        )


class _PlainValues(pickle.Unpickler):
    """Unpickles only numbers, texts, lists and dicts."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not a plain value")


def read_flight(path: Path) -> list[Collective]:
    """The collectives in a dump, oldest first; none where it cannot be read: its process died while writing, or it is another file."""
    try:
        with open(path, "rb", opener=regular_only) as file:
            entries = _PlainValues(file).load()["entries"]
        return [
            _collective(one)
            for one in sorted(entries, key=lambda one: one["record_id"])
            if not one.get("is_p2p")
        ]
    except (
        OSError,
        pickle.UnpicklingError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        MemoryError,
    ):
        return []


def _collective(entry: dict[str, Any]) -> Collective:
    sizes = [" x ".join(map(str, size)) or "1" for size in entry.get("input_sizes", [])]
    kinds = list(entry.get("input_dtypes", []))
    shape = ", ".join(sizes) if len(sizes) <= 2 else f"{len(sizes)} tensors"
    return Collective(
        group=str(entry["process_group"][1]),
        number=int(entry["collective_seq_id"]),
        name=str(entry["profiling_name"]).rpartition(":")[2],
        shape=f"{shape} {kinds[0]}".strip() if kinds else shape,
        is_done=entry["state"] == "completed" or bool(entry.get("retired")),
    )


def explain_flight(logs: Path, since: float = 0.0) -> str:
    """Which ranks waited in which collective and which never joined it, from the dumps written after `since`; empty without dumps."""
    if not logs.is_dir():
        return ""
    dumps = {
        int(match.group(1)): path
        for path in logs.iterdir()
        if (match := FILE.fullmatch(path.name)) and path.stat().st_mtime >= since
    }
    seen = {rank: found for rank, path in sorted(dumps.items()) if (found := read_flight(path))}
    waiting = {
        rank: next(one for one in found if not one.is_done)
        for rank, found in seen.items()
        if not all(one.is_done for one in found)
    }
    if not waiting:
        return ""
    first = min(waiting.values(), key=lambda one: one.number)
    lines = [f"rank {rank} waited in {one.describe()}" for rank, one in waiting.items()][:MAX_NAMED]
    for rank, found in seen.items():
        last = max((one.number for one in found if one.group == first.group), default=None)
        if last is None or last < first.number:
            lines.append(
                f"rank {rank} never came to {first.name} {first.number}"
                + (f", its last was {last}" if last is not None else "")
            )
    return f"NCCL: {'; '.join(lines)}. (logs/flight-rank-*)"
