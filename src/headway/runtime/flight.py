"""torch's flight recorder: NCCL keeps its last collectives in memory and writes them out, a file
for each rank, when one takes too long.

    rank 0  ... all_reduce 16 done   all_reduce 17 waits ─┐
    rank 1  ... all_reduce 16 done   (never came)         ├─▶ logs/flight-rank-N ─▶ one sentence:
                                                              who waited in what, who was missing

The host does not wait in an NCCL collective, so that a heartbeat cannot name it; these files can.
They are pickles of plain values, and are read by a reader that accepts nothing else: a file with
anything more is left alone.
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
"""Variables of torch: how many collectives it keeps, and that it writes them on a timeout."""
MAX_NAMED = 8
"""Ranks that the sentence names as waiting; thousands may."""


def flight_recorder(run_dir: Path) -> dict[str, str]:
    """Variables that turn it on.

    Its files can also be read with `python -m torch.distributed.flight_recorder.fr_trace`.
    """
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
        text = f"{self.name} {self.number}"
        if self.shape:
            text += f" of {self.shape}"
        if self.group:
            text += f" in {self.group}"
        return text


class _PlainValues(pickle.Unpickler):
    """Unpickles only numbers, texts, lists and dicts."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not a plain value")


def read_flight(path: Path) -> list[Collective]:
    """The collectives in a dump, oldest first.

    Empty where it cannot be read: its process died while writing, or it is another file.
    """
    try:
        with open(path, "rb", opener=regular_only) as file:
            entries = _PlainValues(file).load()["entries"]
        entries = sorted(entries, key=lambda entry: entry["record_id"])
        # Sends between two ranks have numbers of their own, which others do not share.
        return [_collective(entry) for entry in entries if not entry.get("is_p2p")]
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
    """One entry of torch's dump, in the words of `Collective`."""
    sizes = [" x ".join(map(str, size)) or "1" for size in entry.get("input_sizes", [])]
    shape = ", ".join(sizes)
    if len(sizes) > 2:
        shape = f"{len(sizes)} tensors"
    dtypes = list(entry.get("input_dtypes", []))
    if dtypes:
        shape = f"{shape} {dtypes[0]}".strip()
    return Collective(
        group=str(entry["process_group"][1]),
        number=int(entry["collective_seq_id"]),
        name=str(entry["profiling_name"]).rpartition(":")[2],  # of "nccl:all_reduce"
        shape=shape,
        is_done=entry["state"] == "completed" or bool(entry.get("retired")),
    )


def explain_flight(logs: Path, since: float = 0.0) -> str:
    """Which ranks waited in which collective and which never joined it, from the dumps written
    after `since`; empty without dumps.
    """
    if not logs.is_dir():
        return ""
    dumps: dict[int, Path] = {}
    for path in logs.iterdir():
        match = FILE.fullmatch(path.name)
        if match and path.stat().st_mtime >= since:
            dumps[int(match.group(1))] = path

    by_rank = {rank: read_flight(path) for rank, path in sorted(dumps.items())}
    by_rank = {rank: collectives for rank, collectives in by_rank.items() if collectives}

    # Collectives of a group run in order: the first that is not done is the one a rank hangs in.
    waiting: dict[int, Collective] = {}
    for rank, collectives in by_rank.items():
        unfinished = [collective for collective in collectives if not collective.is_done]
        if unfinished:
            waiting[rank] = unfinished[0]
    if not waiting:
        return ""

    # Ranks may hang in different collectives. The one with the lowest number holds up the others.
    first = min(waiting.values(), key=lambda collective: collective.number)
    lines = [f"rank {rank} waited in {waited.describe()}" for rank, waited in waiting.items()]
    lines = lines[:MAX_NAMED]
    for rank, collectives in by_rank.items():
        numbers = [item.number for item in collectives if item.group == first.group]
        last = max(numbers, default=None)
        if last is None:
            lines.append(f"rank {rank} never came to {first.name} {first.number}")
        elif last < first.number:
            lines.append(
                f"rank {rank} never came to {first.name} {first.number}, its last was {last}"
            )
    return f"NCCL: {'; '.join(lines)}. (logs/flight-rank-*)"
