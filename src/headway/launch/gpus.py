"""Which GPUs a run uses: a request (`0,1`, `GPU-…`, `A800`, `auto`, `none`) and the list of devices
come in, CUDA_VISIBLE_DEVICES goes out.

Ids are those of nvidia-smi; if CUDA_VISIBLE_DEVICES is already set, they index its entries. Nothing
here starts CUDA.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headway.errors import LaunchError
from headway.runtime.device import CHOSEN_GPUS
from headway.runtime.machine import peak_flops

BUSY_MEMORY_SHARE = 0.05
"""A GPU with more of its memory in use is busy. Drivers and displays use a little of it."""
BUSY_UTILISATION = 0.10
"""A GPU on which kernels run for more of the time is busy."""
NVIDIA_SMI_SECONDS = 60
UUID_START = "GPU-"
"""CUDA takes a prefix of a UUID, but this alone names none."""
QUERY = ("index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu")


@dataclass(frozen=True)
class Gpu:
    """One device as nvidia-smi lists it; unknown values are None."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    utilisation: float | None = None

    @property
    def busy(self) -> str | None:
        """Why `auto` skips it; None if it is free."""
        memory = self.memory_bytes
        used = self.used_bytes
        if memory and used is not None and used > BUSY_MEMORY_SHARE * memory:
            return f"{used / memory:.0%} of its memory is in use (limit {BUSY_MEMORY_SHARE:.0%})"
        if self.utilisation is not None and self.utilisation > BUSY_UTILISATION:
            return f"it is {self.utilisation:.0%} busy (limit {BUSY_UTILISATION:.0%})"
        return None


@dataclass(frozen=True)
class GpuChoice:
    """The GPUs of a run, the variables that make CUDA see them, and notes for the user."""

    gpus: tuple[Gpu, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def read_gpus() -> list[Gpu]:
    """The devices of this machine, from nvidia-smi; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"nvidia-smi did not answer within {NVIDIA_SMI_SECONDS} s; a GPU may hang. "
            "Check dmesg, or use --gpus none."
        ) from None
    if process.returncode != 0:
        lines = (process.stdout + process.stderr).strip().splitlines()
        # A machine with a driver and no GPU is a machine without GPUs.
        if lines and "no devices were found" in lines[0].lower():
            return []
        raise LaunchError(
            f"nvidia-smi failed: {lines[0] if lines else process.returncode}. "
            "Repair the driver, or use --gpus none."
        )
    return parse_gpus(process.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """The devices in the output of nvidia-smi."""
    gpus: list[Gpu] = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        # A line of another form is no device, e.g. a warning of the driver.
        if len(row) != len(QUERY):
            continue
        index, uuid, name, total, used, rate = (field.strip() for field in row)
        percent = _number(rate)
        gpus.append(
            Gpu(
                int(index),
                uuid,
                name,
                _mebibytes(total),
                _mebibytes(used),
                None if percent is None else percent / 100,
            )
        )
    return gpus


def _number(text: str) -> float | None:
    """None for `[N/A]` and other non-numbers."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    return None


def _mebibytes(text: str) -> int | None:
    value = _number(text)
    if value is None:
        return None
    return int(value * 2**20)


def choose_gpus(
    request: str, environment: Mapping[str, str], devices: Callable[[], list[Gpu]] = read_gpus
) -> GpuChoice:
    """Choose the requested GPUs; an unknown one is refused with a list of the known ones."""
    # An empty list hides all GPUs; an empty CHOSEN_GPUS says that none was requested.
    if request.strip().lower() == "none":
        return GpuChoice(
            (),
            {"CUDA_VISIBLE_DEVICES": "", CHOSEN_GPUS: ""},
            ("--gpus none: computing on the CPU",),
        )

    available = visible(devices(), environment.get("CUDA_VISIBLE_DEVICES"))
    notes: list[str] = []
    if request.strip().lower() == "auto":
        if not available:
            return GpuChoice((), {}, ("no GPU is visible here: computing on the CPU",))
        chosen = [gpu for gpu in available if gpu.busy is None]
        for gpu in available:
            if gpu.busy:
                notes.append(f"GPU {gpu.index} ({gpu.name}) is skipped: {gpu.busy}")
        if not chosen:
            raise LaunchError(
                f"gpus is 'auto'; no GPU is free: {'; '.join(notes)}. "
                "Wait, or name the GPUs to share them."
            )
    else:
        chosen = _named(request, available)

    names = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in chosen)
    visible_ids = ",".join(str(gpu.index) for gpu in chosen)
    # CUDA counts the fastest GPU first unless it is asked for the order of nvidia-smi.
    settings = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible_ids,
        CHOSEN_GPUS: request.strip(),
    }
    return GpuChoice(
        tuple(chosen), settings, (*notes, f"GPUs of this run: {names}"), tuple(_mixed(chosen))
    )


def visible(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """The devices in CUDA_VISIBLE_DEVICES, in its order.

    As in CUDA, an unknown entry ends the list.
    """
    if setting is None:
        return list(gpus)
    listed: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        # nvidia-smi does not list slices as devices, so they cannot be matched here.
        if entry.startswith("MIG-"):
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES holds the MIG slice {entry}; --gpus chooses whole GPUs. "
                "Leave --gpus out and give --nproc 1."
            )
        matches: list[Gpu] = []
        for gpu in gpus:
            is_uuid = len(entry) > len(UUID_START) and gpu.uuid.startswith(entry)
            if is_uuid or entry == str(gpu.index):
                matches.append(gpu)
        # CUDA ignores all entries after one that it does not know.
        if len(matches) != 1:
            break
        listed.append(matches[0])
    return listed


def _named(request: str, available: Sequence[Gpu]) -> list[Gpu]:
    parts = [part.strip() for part in request.split(",")]
    if not all(parts):
        raise LaunchError(
            f"gpus is {request!r}; an entry is empty. Write ids (0,1), UUIDs (GPU-...), a type "
            "(A800), auto or none."
        )
    chosen: list[Gpu] = []
    for part in parts:
        for gpu in _match(part, available):
            # `0,A800` may name GPU 0 by its id and by its type.
            if gpu in chosen:
                raise LaunchError(
                    f"gpus is {request!r}; GPU {gpu.index} is named twice. Name it once."
                )
            chosen.append(gpu)
    return chosen


def _match(part: str, available: Sequence[Gpu]) -> list[Gpu]:
    """The devices that one entry names: the n-th visible one, a UUID (a prefix is enough), or every
    device of a type.
    """
    if part.isdecimal():
        matches = list(available[int(part) : int(part) + 1])
        problem = "there is no such GPU"
    elif part.upper().startswith(UUID_START):
        matches = [gpu for gpu in available if gpu.uuid.lower().startswith(part.lower())]
        problem = "no GPU has this UUID"
        if len(matches) > 1:
            problem = "more than one UUID has this prefix"
            matches = []
    else:
        matches = [gpu for gpu in available if is_type(part, gpu.name)]
        problem = "no GPU is of this type"
    if not matches:
        raise LaunchError(f"gpus is {part!r}; {problem}. {_listing(available)}")
    return matches


def is_type(kind: str, name: str) -> bool:
    """Whether a device's name contains the words of a type, whole and in this order: A40 does not
    match A4000.
    """
    words = _words(name)
    wanted = _words(kind)
    if not wanted:
        return False
    starts = range(len(words) - len(wanted) + 1)
    return any(words[start : start + len(wanted)] == wanted for start in starts)


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word]


def _listing(available: Sequence[Gpu]) -> str:
    if not available:
        return "No GPU is visible here; use --gpus none to compute on the CPU."
    names = [f"{index} {gpu.name} {gpu.uuid[:12]}" for index, gpu in enumerate(available)]
    return f"Visible GPUs: {', '.join(names)}."


def _mixed(chosen: Sequence[Gpu]) -> list[str]:
    """A warning if the types differ: every step takes as long as on the slowest device."""
    names = list(dict.fromkeys(gpu.name for gpu in chosen))
    if len(names) < 2:
        return []
    # Older GPUs have no bf16; which of two is slower shows in fp16 as well.
    peaks = {name: peak_flops(name, "bf16") or peak_flops(name, "fp16") for name in names}
    known = {name: peak for name, peak in peaks.items() if peak is not None}
    if len(known) < len(names):
        unknown = ", ".join(name for name in names if name not in known)
        return [
            f"the GPUs are of different types ({', '.join(names)}); "
            f"the slowest is unknown (no peak for {unknown})"
        ]
    slowest = min(known, key=lambda name: known[name])
    return [
        f"the GPUs are of different types ({', '.join(names)}); each step waits for the slowest, "
        f"{slowest} ({known[slowest] / 1e12:.0f} TFLOP/s)"
    ]
