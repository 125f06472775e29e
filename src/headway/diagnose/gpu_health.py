"""GPU health and topology as nvidia-smi reports them: rows of a fixed query come in, checks go out.
Nothing here starts CUDA.

nvidia-smi --query-gpu=index,name,... --format=csv,noheader,nounits
                       one row per GPU; `[N/A]` where a GPU does not say
nvidia-smi topo -m     how each pair is connected: NV18, PIX, PXB, PHB, NODE, SYS
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway.diagnose.check import Check
from headway.runtime.progress import quantity

QUERY: tuple[str, ...] = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "utilization.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.corrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.failure",
    "remapped_rows.pending",
    "clocks_throttle_reasons.active",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
NEW_NAMES = {"clocks_throttle_reasons.active": "clocks_event_reasons.active"}
"""Fields that newer drivers call otherwise."""
TIMEOUT_SECONDS = 30
HOT_CELSIUS = 85
MANY_CORRECTED = 1000
"""ECC errors since the driver was loaded; some are normal."""
BUSY_MEMORY_SHARE = 0.5
"""Of the memory in use from which on a GPU is somebody else's."""
LINKS = {
    "NV": "NVLink",
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe across host bridges",
    "SYS": "across CPU sockets",
}
# Bits of NVML's clocks event reasons. Idle (1), application clocks (2), a power cap (4) and
# display clocks (256) are normal.
SLOWED = {
    0x8: "hardware slowdown",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake (hardware)",
    0x10: "sync boost",
}
SLOWED_BY_HARDWARE = 0x8 | 0x40 | 0x80
"""The machine's cooling or power fails."""
SLOWED_BY_SOFTWARE = 0x20 | 0x10


@dataclass(frozen=True)
class GpuHealth:
    """One row of the query; None where the GPU does not say."""

    index: int
    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    celsius: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    utilisation: float | None = None
    uncorrected_errors: int | None = None
    corrected_errors: int | None = None
    pages_pending: bool = False
    remap_failed: bool = False
    remap_pending: bool = False
    throttle_bits: int = 0
    link: tuple[int, int] | None = None
    """PCIe generation and width now."""
    best_link: tuple[int, int] | None = None

    @property
    def slowed_by(self) -> list[str]:
        """The reasons for lower clocks that are a fault."""
        return [words for bit, words in SLOWED.items() if self.throttle_bits & bit]


def read_gpu_health() -> tuple[list[GpuHealth], Check | None]:
    """The GPUs of this machine, and what is wrong if nvidia-smi does not answer.

    No GPUs and no check without a driver.
    """
    fields = list(QUERY)
    while True:
        text, problem = _ask([f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        if text is not None:
            return parse_gpu_health(text, fields), None

        # Drivers rename fields and drop old ones; each refusal names one of them.
        unknown = None
        if problem is not None:
            unknown = re.search(r'Field "([\w.]+)" is not a valid field', problem.detail)
        if unknown is None or unknown[1] not in fields:
            return [], problem

        index = fields.index(unknown[1])
        if unknown[1] in NEW_NAMES:
            fields[index] = NEW_NAMES[unknown[1]]
        else:
            del fields[index]


def _ask(arguments: Sequence[str]) -> tuple[str | None, Check | None]:
    """What nvidia-smi prints, or what is wrong; neither without a driver or without GPUs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, None

    try:
        completed = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        detail = f"nvidia-smi did not answer within {TIMEOUT_SECONDS} s; a GPU may hang"
        return None, Check(
            "gpu health",
            "fail",
            detail,
            "Look for Xid errors in dmesg; reset the GPU or restart the machine.",
        )
    except OSError as error:
        return None, Check(
            "gpu health",
            "warn",
            f"nvidia-smi cannot be run: {error.strerror}",
            "Repair the driver's installation.",
        )

    if completed.returncode != 0:
        lines = (completed.stdout + completed.stderr).strip().splitlines() or [
            f"exit code {completed.returncode}"
        ]
        # A driver without a GPU, as in many containers, is no fault.
        if "no devices were found" in lines[0].lower():
            return None, None
        return None, Check(
            "gpu health",
            "fail",
            f"nvidia-smi failed: {lines[0][:200]}",
            "Repair the driver, or restart the machine.",
        )

    return completed.stdout, None


def parse_gpu_health(text: str, fields: Sequence[str] = QUERY) -> list[GpuHealth]:
    """The rows of the query.

    A line that is no row is skipped, a field that was not asked for is unknown.
    """
    old_names = {new: old for old, new in NEW_NAMES.items()}
    gpus: list[GpuHealth] = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        # Such as a warning of the driver.
        if len(row) != len(fields) or not row[0].strip().isdecimal():
            continue

        value = dict.fromkeys(QUERY, "")
        for name, field in zip(fields, row, strict=True):
            value[old_names.get(name, name)] = field.strip()

        percent = _number(value["utilization.gpu"])
        gpus.append(
            GpuHealth(
                index=int(value["index"]),
                name=value["name"],
                memory_bytes=_mebibytes(value["memory.total"]),
                used_bytes=_mebibytes(value["memory.used"]),
                celsius=_number(value["temperature.gpu"]),
                watts=_number(value["power.draw"]),
                limit_watts=_number(value["power.limit"]),
                utilisation=None if percent is None else percent / 100,
                uncorrected_errors=_count(value["ecc.errors.uncorrected.volatile.total"]),
                corrected_errors=_count(value["ecc.errors.corrected.volatile.total"]),
                pages_pending=_yes(value["retired_pages.pending"]),
                remap_failed=_yes(value["remapped_rows.failure"]),
                remap_pending=_yes(value["remapped_rows.pending"]),
                throttle_bits=_bits(value["clocks_throttle_reasons.active"]),
                link=_link(value["pcie.link.gen.current"], value["pcie.link.width.current"]),
                best_link=_link(value["pcie.link.gen.max"], value["pcie.link.width.max"]),
            )
        )

    return gpus


def _number(text: str) -> float | None:
    """A number, or None for `[N/A]` and the like."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    return None


def _count(text: str) -> int | None:
    value = _number(text)
    if value is None:
        return None
    return int(value)


def _mebibytes(text: str) -> int | None:
    value = _number(text)
    if value is None:
        return None
    return int(value * 2**20)


def _yes(text: str) -> bool:
    return text.lower() == "yes" or (text.isdecimal() and int(text) > 0)


def _bits(text: str) -> int:
    if re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return int(text, 16)
    return 0


def _link(generation: str, width: str) -> tuple[int, int] | None:
    generation_number = _count(generation)
    width_number = _count(width)
    if generation_number is None or width_number is None:
        return None
    return (generation_number, width_number)


def health_checks(gpus: Sequence[GpuHealth]) -> Iterator[Check]:
    """One line per GPU: the worst finding decides the state, every finding is named."""
    for gpu in gpus:
        yield _health(gpu)
    names = Counter(gpu.name for gpu in gpus)
    if len(names) > 1:
        detail = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield Check(
            "gpu types",
            "warn",
            f"different GPUs: {detail}",
            "Every step waits for the slowest: choose one type (--gpus A800).",
        )


def _health(gpu: GpuHealth) -> Check:
    """One line about a GPU: what it is, every finding, and the remedies."""
    faults = list(_faults(gpu))
    doubts = list(_doubts(gpu))
    state = "ok"
    if faults:
        state = "fail"
    elif doubts:
        state = "warn"

    findings = [finding for finding, _ in (*faults, *doubts)]
    detail = "; ".join([_describe(gpu), *findings])
    # Two findings may have one remedy.
    remedies = list(dict.fromkeys(remedy for _, remedy in (*faults, *doubts)))
    return Check(f"gpu {gpu.index} health", state, detail, " ".join(remedies) or None)


def _describe(gpu: GpuHealth) -> str:
    """What is worth knowing of a GPU without a finding."""
    parts = [gpu.name]
    if gpu.memory_bytes is not None:
        parts.append(quantity(gpu.memory_bytes, "bytes"))
    if gpu.celsius is not None:
        parts.append(f"{gpu.celsius:.0f} °C")

    if gpu.watts is not None:
        power = f"{gpu.watts:.0f} W"
        if gpu.limit_watts is not None:
            power += f" of {gpu.limit_watts:.0f} W"
        parts.append(power)

    if gpu.uncorrected_errors is None:
        parts.append("no ECC")
    elif not gpu.uncorrected_errors and not gpu.corrected_errors:
        parts.append("no ECC errors")

    return ", ".join(parts)


def _faults(gpu: GpuHealth) -> Iterator[tuple[str, str]]:
    """What must be repaired before a run, and how."""
    if gpu.uncorrected_errors:
        yield (
            f"{gpu.uncorrected_errors} uncorrected ECC errors since the driver was loaded",
            "Reset or replace this GPU; leave it out with --gpus.",
        )
    if gpu.remap_failed:
        yield "its memory has no spare rows left", "Replace this GPU; leave it out with --gpus."
    if gpu.throttle_bits & SLOWED_BY_HARDWARE:
        yield f"slowed by {', '.join(gpu.slowed_by)}", "Check cooling and power of this machine."


def _doubts(gpu: GpuHealth) -> Iterator[tuple[str, str]]:
    """What makes a GPU slower or less certain, and what to do."""
    if gpu.pages_pending or gpu.remap_pending:
        yield (
            "faulty memory is replaced at the next reset",
            "Reset the GPU (nvidia-smi --gpu-reset) before a long run.",
        )

    if gpu.corrected_errors is not None and gpu.corrected_errors > MANY_CORRECTED:
        yield (
            f"{gpu.corrected_errors} corrected ECC errors",
            "Watch this GPU; its memory may be failing.",
        )

    # `_faults` names all reasons where one of them is a fault.
    is_fault = gpu.throttle_bits & SLOWED_BY_HARDWARE
    if gpu.throttle_bits & SLOWED_BY_SOFTWARE and not is_fault:
        yield (
            f"slowed by {', '.join(gpu.slowed_by)}",
            "Check cooling, and power limits (nvidia-smi -q -d PERFORMANCE).",
        )

    if gpu.celsius is not None and gpu.celsius >= HOT_CELSIUS:
        yield f"hot ({gpu.celsius:.0f} °C)", "Check cooling; it slows down at its limit."

    # The width alone: an idle GPU lowers its generation to save power.
    if gpu.link is not None and gpu.best_link is not None and gpu.link[1] < gpu.best_link[1]:
        yield (
            f"PCIe x{gpu.link[1]} of x{gpu.best_link[1]}",
            "Check how the card is seated, or the riser.",
        )

    if (
        gpu.memory_bytes
        and gpu.used_bytes is not None
        and gpu.used_bytes > BUSY_MEMORY_SHARE * gpu.memory_bytes
    ):
        yield (
            f"{gpu.used_bytes / gpu.memory_bytes:.0%} of its memory is in use",
            "End that process (nvidia-smi shows it) or choose another GPU.",
        )


def read_topology() -> Check | None:
    """How the GPUs are connected; None without nvidia-smi or with fewer than two GPUs."""
    text, _ = _ask(["topo", "-m"])
    if text is None:
        return None
    return topology_check(parse_topology(text))


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The link of each pair of GPUs, i < j, as in nvidia-smi's matrix.

            GPU0    GPU1    CPU Affinity
    GPU0     X      NV18    0-31
    GPU1    NV18     X      0-31
    """
    # Some versions underline the heading with escape sequences.
    plain_text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [re.split(r"\t+|\s{2,}", line.strip()) for line in plain_text.splitlines()]

    # The heading begins with GPU0 as the first row does, whose next cell is X.
    heading: list[str] = []
    for cells in lines:
        if cells[0] == "GPU0" and (len(cells) < 2 or not cells[1].startswith("X")):
            heading = cells
            break
    columns = [cell for cell in heading if re.fullmatch(r"GPU\d+", cell)]

    links: dict[tuple[int, int], str] = {}
    for cells in lines:
        row = re.fullmatch(r"GPU(\d+)", cells[0])
        if row is None or cells is heading:
            continue
        for name, link in zip(columns, cells[1:], strict=False):
            pair = (int(row[1]), int(name.removeprefix("GPU")))
            if pair[0] < pair[1]:
                links[pair] = link.strip()

    return links


def topology_check(links: Mapping[tuple[int, int], str]) -> Check | None:
    """One line: how many pairs are connected how.

    A mixture with NVLink, or a path across sockets, is a warning.
    """
    if not links:
        return None

    # NV12 and NV18 are one kind: the number is that of links between the two.
    kinds = Counter("NV" if re.fullmatch(r"NV\d+", link) else link for link in links.values())
    detail = ", ".join(
        f"{count} of {len(links)} pairs: {LINKS.get(kind, kind)}"
        for kind, count in kinds.most_common()
    )
    exact = sorted({link for link in links.values() if re.fullmatch(r"NV\d+", link)})
    if exact:
        detail += f" ({', '.join(exact)})"

    if "NV" in kinds and len(kinds) > 1:
        remedy = "Put tensor and context ranks on GPUs that NVLink connects (--gpus names them)."
        return Check("gpu topology", "warn", detail, remedy)

    if "SYS" in kinds:
        return Check(
            "gpu topology",
            "warn",
            detail,
            "Prefer strategy ddp or zero1 over tensor parallelism here; pick GPUs of one socket.",
        )

    return Check("gpu topology", "ok", detail)
