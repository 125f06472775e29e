"""Facts about this machine: processors, memory, GPU peak FLOP/s, GPU load.

Unknown values are None, never a guess.
"""

import functools
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from headway import __version__

PACKAGES = (
    "torch", "numpy", "safetensors", "tokenizers", "sentencepiece", "transformers", "pyarrow",
    "pydantic", "ruamel.yaml", "typer", "rich", "jinja2", "tensorboard", "zstandard",
    "huggingface_hub", "triton",
)  # fmt: skip
"""Packages whose versions environment.json records."""
GIT_SECONDS = 10
"""How long a call of git may take, e.g. on a slow network file system."""

# Dense peak in TFLOP/s (bf16, fp16, tf32, fp32) from NVIDIA's data sheets, fp32 accumulation; None
# where the device has no such unit or the sheet does not say. Patterns match a whole device name: a
# laptop part, a MIG slice or a cut-down variant is not its namesake.
PEAKS: tuple[tuple[str, tuple[float | None, float | None, float | None, float | None]], ...] = (
    (r"A[18]00-(SXM4?-(40|80)GB|PCIE-(40|80)GB)|A[18]00 (40|80)GB PCIe", (312, 312, 156, 19.5)),
    (r"H[18]00 PCIe|H100.* HBM2e", (756, 756, 378, 51)),
    (r"H100 NVL", (835, 835, 417, 60)),
    (r"H800|H[18]00( SXM5)?( \d+GB)? HBM3", (989, 989, 494, 67)),
    (r"H200 NVL", (836, 836, 418, 60)),
    (r"H200( SXM)?( 141GB)?( HBM3e)?", (989, 989, 494, 67)),
    (r"GH200( \d+GB?)?( HBM3e?)?", (989, 989, 494, 67)),
    (r"H20(-3e)?( \d+GB)?", (148, 148, 74, 44)),
    (r"B200( \d+GB)?", (2250, 2250, None, None)),
    (r"GB200( \d+GB)?", (2500, 2500, None, None)),
    (r"L40S", (362, 362, 183, 91.6)),
    (r"L40", (181, 181, 90.5, 90.5)),
    (r"L4", (121, 121, 60, 30.3)),
    (r"A10", (125, 125, 62.5, 31.2)),
    (r"A30", (165, 165, 82, 10.3)),
    (r"A40", (150, 150, 74.8, 37.4)),
    (r"RTX A6000", (155, 155, 77.4, 38.7)),
    (r"RTX 6000 Ada Generation", (364, 364, 182, 91.1)),
    (r"RTX 5090", (210, 210, 105, 105)),
    (r"RTX 4090", (165, 165, 82.6, 82.6)),
    (r"RTX 3090", (71, 71, 35.6, 35.6)),
    (r"V100-SXM2-\d+GB", (None, 125, None, 15.7)),
    (r"V100-PCIE-\d+GB", (None, 112, None, 14)),
    (r"T4", (None, 65, None, 8.1)),
)
KINDS = ("bf16", "fp16", "tf32", "fp32")
"""The columns of PEAKS."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a GPU by the name torch gives it, in bf16, fp16, tf32 or fp32.

    None if it is not known.
    """
    name = re.sub(r"^NVIDIA ", "", device_name.strip())
    name = re.sub(r"^(NVIDIA|Tesla|GeForce) ", "", name)
    if " MIG " in name:
        return None  # a slice of a GPU has a share of its peak that the name does not say
    for pattern, peaks in PEAKS:
        if re.fullmatch(pattern, name):
            peak = peaks[KINDS.index(dtype)]
            if peak is None:
                return None
            return peak * 1e12
    return None


@dataclass(frozen=True)
class GpuLoad:
    """The load of a GPU now; None where the driver does not say."""

    utilisation: float | None = None
    """Share of the last sampling period with a kernel running, 0 to 1."""
    power_watts: float | None = None


def gpu_load(index: int = 0) -> GpuLoad:
    """Ask the driver about CUDA device `index` of this process (microseconds; needs the package
    nvidia-ml-py).
    """
    handle = _nvml_handle(index)
    if handle is None:
        return GpuLoad()
    import pynvml

    def ask(question: Any) -> Any:
        try:
            return question(handle)
        except pynvml.NVMLError:
            return None

    rates = ask(pynvml.nvmlDeviceGetUtilizationRates)
    power = ask(pynvml.nvmlDeviceGetPowerUsage)
    return GpuLoad(
        utilisation=None if rates is None else rates.gpu / 100,  # from percent
        power_watts=None if power is None else power / 1000,  # from milliwatts
    )


@functools.cache
def _nvml_handle(index: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # By UUID, because CUDA_VISIBLE_DEVICES renumbers devices for torch but not for the driver.
        return pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        )
    except pynvml.NVMLError:
        return None


def resident_bytes() -> int | None:
    """Memory this process holds in RAM now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def ram_bytes() -> tuple[int | None, int | None]:
    """RAM this process may use: all of it, and what is available now.

    In a container or a batch job that is what its group has.
    """
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
        except (ValueError, OSError):
            return None, None

    # In kilobytes: "MemTotal:       65802148 kB".
    total = int(fields["MemTotal"].split()[0]) * 1024
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used in _group_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return total, available


def _group_limits(root: Path, membership: Path) -> list[tuple[int, int]]:
    """(limit, what is used and cannot be given back) of this process's control groups that have a
    limit, version 2 or 1.
    """
    try:
        paths = dict(line.split(":", 2)[1:] for line in membership.read_text().splitlines())
    except (OSError, ValueError):
        return []

    version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    version_2 = ("memory.max", "memory.current", "inactive_file")
    limits: list[tuple[int, int]] = []
    for controller, base, names in (("", root, version_2), ("memory", root / "memory", version_1)):
        limit_file, usage_file, cache_entry = names
        # The limits of all groups above count as well.
        innermost = Path(paths.get(controller, "/").lstrip("/"))
        for group in (innermost, *innermost.parents):
            folder = base / group
            try:
                limit = int((folder / limit_file).read_text())  # "max" is not a number
                used = int((folder / usage_file).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                entries = dict(line.split() for line in lines)
            except (OSError, ValueError):
                continue
            # Cached pages of files are counted as used, but the kernel drops them on demand.
            limits.append((limit, used - int(entries.get(cache_entry, 0))))
    return limits


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not say."""
    try:
        match = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        match = None
    if match:
        return match.group(1).strip()
    return platform.processor() or platform.machine()


def has_fast_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies bf16 matrices by instructions of their own (AVX-512 BF16,
    AMX); False where the system does not say."""
    try:
        match = re.search(r"^flags\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return False
    if match is None:
        return False
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(match[1].split())


def usable_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None without a driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    if match:
        return match.group(1)
    return None


def describe() -> dict[str, Any]:
    """This machine in plain data: Python, torch, CUDA, driver, GPUs, CPU, RAM.

    Nothing that names its user or host.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus: list[dict[str, Any]] = []
    for index in range(num_gpus):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "gpus": gpus,
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": ram_bytes()[0],
    }


@functools.cache
def package_version(name: str) -> str | None:
    """The installed version of a package, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """What environment.json holds: headway, git commit, packages, command line, machine.

    No environment variables, so no secrets.
    """
    versions = {name: package_version(name) for name in PACKAGES}
    return {
        "headway": __version__,
        "git": git_state(Path.cwd()),
        "packages": {name: version for name, version in versions.items() if version is not None},
        "command": sys.argv,
        "machine": describe(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit a folder is at and whether tracked files differ from it.

    None outside of a repository or without git.

    A repository of unknown origin may name programs in its config (a file-system monitor, hooks,
    filters): none of them runs.
    """
    safe = [
        "git",
        "--no-optional-locks",
        "-c",
        "core.fsmonitor=false",
        "-c",
        f"core.hooksPath={os.devnull}",
        "-C",
        str(folder),
    ]

    def git(*arguments: str, filters: Sequence[str] = ()) -> str | None:
        switched_off: list[str] = []
        for key in filters:
            switched_off += ["-c", f"{key}="]
        try:
            process = subprocess.run(
                [*safe, *switched_off, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=GIT_SECONDS,
                check=False,
            )
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return None
        if process.returncode == 0:
            return process.stdout.strip()
        return None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None

    # `status` runs the filters of changed files, each by the program that the config names.
    filters = git(
        "config", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process|required)$"
    )
    changed = git(
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--ignore-submodules=all",
        filters=(filters or "").splitlines(),
    )
    return {"commit": commit, "changed": bool(changed)}


COMMIT_FILE = "commit.txt"
"""The file of the package with the commit that it was built from; setup.py writes it."""
SHORT_COMMIT = 12
"""Digits of a commit in a version line."""


def source_commit() -> str | None:
    """The commit of headway's own source: that of its checkout, or the one it was built from.

    `modified` follows where tracked files differ from it; None where nothing is known.
    """
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    # Other repositories hold installed packages, too: a .venv inside of a project. Only a
    # checkout of headway has its source at src/headway, beside .git.
    if (package.parent.name, package.name) == ("src", "headway") and (checkout / ".git").exists():
        state = git_state(checkout)
        if state is not None:
            suffix = ", modified" if state["changed"] else ""
            return f"commit {state['commit'][:SHORT_COMMIT]}{suffix}"

    try:
        recorded = (package / COMMIT_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    # The file has a commit and perhaps the word; anything else was not written by a build.
    if re.fullmatch(r"[0-9a-f]{7,64}(, modified)?", recorded) is None:
        return None
    return f"commit {recorded}"


CUDA_TORCH = (
    "pip install --force-reinstall 'torch=={}' (PyPI's build for Linux has CUDA; others: "
    "https://pytorch.org/get-started)"
)
"""A remedy: how to get a torch with CUDA in this version."""


def torch_release() -> str | None:
    """The installed version of torch without the name of its build: 2.13.0 for 2.13.0+cpu."""
    version = package_version("torch")
    if version is None:
        return None
    return version.partition("+")[0]


def cuda_of_torch() -> str | None:
    """The CUDA version the installed torch was built for; None: it has no CUDA.

    Read from its version file: loading torch takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"(?m)^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text)
    if match:
        return match[1]
    return None
