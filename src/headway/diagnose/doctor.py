"""Is this machine ready? Each check is one line: ok, warn (works, but less well) or fail (training
cannot work), with a remedy.

Nothing is installed, downloaded or left behind. The GPUs only run small cases that try the
attention kernels. The fast part of these checks is in `host.py`; `preflight.py` compares hosts,
`rank_checks.py` measures between ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from headway.data.config import default_cache_dir
from headway.diagnose.check import Check
from headway.diagnose.disk_speed import speed_check
from headway.diagnose.gpu_health import read_topology
from headway.diagnose.host import HostNeeds, cores_check, host_checks
from headway.runtime.machine import (
    CUDA_TORCH,
    PACKAGES,
    cpu_name,
    driver_version,
    package_version,
    peak_flops,
    ram_bytes,
    torch_release,
    usable_cores,
)
from headway.runtime.optional import EXTRAS, how_to_get
from headway.runtime.progress import quantity
from headway.runtime.storage import existing_ancestor

MIN_PYTHON = (3, 11)
LOW_RAM_BYTES = 2e9
LOW_GPU_SHARE = 0.5
"""Of a GPU's memory; less is free where another process uses it."""
MAX_CLOCK_SKEW_SECONDS = 5.0
"""Between this machine and the file server of the run folder."""


@dataclass(frozen=True)
class DoctorPlan:
    """What to look at: the folder of future runs, the cache of data, a port that should be free,
    and the ranks that run here.
    """

    run_dir: Path | None = None
    cache_dir: Path | None = None
    port: int | None = None
    ranks: int = 1
    cores: int | None = None
    """Cores of all ranks here together; None = those of this process."""

    @property
    def folder(self) -> Path:
        """The folder for runs; default: the working folder."""
        if self.run_dir is not None:
            return self.run_dir
        return Path.cwd()


def examine(plan: DoctorPlan, environment: Mapping[str, str]) -> list[Check]:
    """Check everything headway needs on this machine."""
    checks = [_python(), *_packages()]
    # Without torch the packages above say so; the doctor must not fail on it.
    if importlib.util.find_spec("torch") is not None:
        checks += [*_devices(), _attention(), _compiler()]

    _, of_host = host_checks(plan.folder, HostNeeds(plan.ranks, port=plan.port), environment)
    checks += [_memory(), *of_host]
    if (links := read_topology()) is not None:
        checks.append(links)

    # `host_checks` has a line about the run folder only where it cannot be written.
    if not any(check.name == "run folder" for check in of_host):
        checks += [*_folder_clock(plan.folder), speed_check("run folder speed", plan.folder)]
        cache = plan.cache_dir or default_cache_dir()
        # The same folder would be measured twice.
        if existing_ancestor(cache) != existing_ancestor(plan.folder):
            checks.append(speed_check("data cache speed", cache))

    cores = plan.cores
    if cores is None:
        cores = usable_cores()
    return [*checks, *cores_check(plan.ranks, cores), _tensorboard()]


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        return Check(
            "python",
            "fail",
            f"{version}; headway needs 3.11 or newer",
            "Make a virtual environment with a newer Python.",
        )
    return Check("python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def requirements() -> dict[str, str]:
    """The version range that headway needs of each package, such as `>=2.11,<2.14`.

    Empty if unknown.
    """
    try:
        lines = metadata.requires("headway") or []
    except metadata.PackageNotFoundError:
        # Run from a source tree that is not installed: the names are known, the ranges are not.
        names = [name for name in PACKAGES if name != "triton" and name not in EXTRAS]
        return dict.fromkeys(names, "")

    from packaging.requirements import Requirement

    # Markers leave out other systems and the extras, which nobody must have.
    needed = [Requirement(line) for line in lines]
    return {
        requirement.name: str(requirement.specifier)
        for requirement in needed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def _packages() -> Iterator[Check]:
    """A line for each package that is missing or of another version; one line if all are right."""
    if importlib.util.find_spec("packaging") is None:
        yield Check("packages", "fail", "packaging is not installed", "Run pip install packaging.")
        return

    from packaging.specifiers import SpecifierSet

    needed = requirements()
    num_wrong = 0
    for name, versions in needed.items():
        version = package_version(name)
        if version is None or not SpecifierSet(versions).contains(version, prereleases=True):
            num_wrong += 1
            have = "is not installed"
            if version is not None:
                have = f"is at {version}"

            yield Check(
                f"package {name}",
                "fail",
                f"{have}; headway needs {name}{versions}",
                f"Run pip install '{name}{versions}'.",
            )

    if not num_wrong:
        yield Check(
            "packages",
            "ok",
            f"{len(needed)} packages at supported versions, torch {package_version('torch')}",
        )


def _devices() -> Iterator[Check]:
    """The CPU; the GPUs, or why torch finds none although there is a driver."""
    import torch

    yield Check("cpu", "ok", f"{cpu_name()}, {usable_cores()} cores")
    driver = driver_version()
    # torch says in a warning why it finds no device.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_cuda = torch.cuda.is_available()

    # A driver without a usable torch is a mistake worth a warning; no driver is a CPU machine.
    if not has_cuda:
        if driver is None:
            yield Check("gpu", "ok", "none here: CPU only")
        elif torch.version.cuda is None:
            detail = (
                f"the NVIDIA driver {driver} is here, but torch "
                f"{torch.__version__} was built without CUDA"
            )
            yield Check(
                "gpu",
                "warn",
                detail,
                f"Install a CUDA build of torch: {CUDA_TORCH.format(torch_release())}.",
            )
        else:
            reason = ""
            if caught:
                reason = f": {str(caught[0].message).splitlines()[0]}"

            detail = (
                f"the NVIDIA driver {driver} is here, but torch for CUDA {torch.version.cuda} "
                f"finds no device{reason}"
            )
            yield Check(
                "gpu",
                "warn",
                detail,
                "Update the driver, or check CUDA_VISIBLE_DEVICES and the container's GPU access.",
            )

        return

    yield Check(
        "cuda", "ok", f"torch for CUDA {torch.version.cuda}, driver {driver or 'version unknown'}"
    )
    if torch.distributed.is_nccl_available():
        from torch.cuda import nccl

        yield Check("nccl", "ok", ".".join(map(str, nccl.version())))
    elif torch.cuda.device_count() > 1:
        yield Check(
            "nccl",
            "fail",
            "this torch has no NCCL, so several GPUs cannot train together",
            "Install torch from PyPI.",
        )

    for index in range(torch.cuda.device_count()):
        yield from _gpu(index)


def _gpu(index: int) -> Iterator[Check]:
    """Memory, speed and number formats of one GPU."""
    import torch

    name = f"gpu {index}"
    properties = torch.cuda.get_device_properties(index)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        yield Check(
            name,
            "fail",
            f"{properties.name}: {str(error).splitlines()[0]}",
            "Run nvidia-smi; end the process that hangs there, or reset the GPU.",
        )
        return

    # From a table of known GPUs: an unknown one has no peak, not a guessed one.
    peak = peak_flops(properties.name, "bf16")
    speed = "peak unknown"
    if peak is not None:
        speed = f"{peak / 1e12:.0f} TFLOP/s in bf16"

    detail = (
        f"{properties.name}, {quantity(free, 'bytes')} of {quantity(total, 'bytes')} free, {speed}"
    )
    if free < LOW_GPU_SHARE * total:
        yield Check(
            name,
            "warn",
            f"{detail}; another process uses its memory",
            "End that process (nvidia-smi shows it) or choose another GPU.",
        )
    else:
        yield Check(name, "ok", detail)

    # Emulated bf16 works, slowly.
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Check(
            f"{name} bf16",
            "warn",
            f"{properties.name} has no bf16 arithmetic",
            "Use precision: fp32 there.",
        )


def _attention() -> Check:
    """Which attention kernels work, by running each of them on a small case."""
    import torch

    from headway.kernels.attention import working_backends

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tried = working_backends(device)
    working = [name for name, ok, _ in tried if ok]
    detail = f"on {device}: " + (", ".join(working) or "none works")
    failed = "; ".join(f"{name}: {reason}" for name, ok, reason in tried if not ok)
    if failed:
        detail += f" (not here: {failed})"
    if working:
        return Check("attention kernels", "ok", detail)
    return Check("attention kernels", "fail", detail, "Install a torch build made for this device.")


def _compiler() -> Check:
    """torch.compile needs a C++ compiler, Python's headers and, for a GPU, triton."""
    import torch

    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return Check(
            "compile",
            "warn",
            "no C++ compiler, so torch.compile cannot work",
            "Install one (apt-get install g++) or run without compile.",
        )

    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return Check(
            "compile",
            "warn",
            "Python's headers are missing, so torch.compile may not work",
            "Install them (apt-get install python3-dev).",
        )

    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        return Check(
            "compile",
            "warn",
            "triton is not installed, so torch.compile cannot use the GPU",
            "Run pip install triton.",
        )

    return Check("compile", "ok", f"{compiler} and Python's headers")


def _memory() -> Check:
    total, available = ram_bytes()
    if total is None:
        return Check("memory", "ok", "unknown on this system")
    if available is None:
        return Check("memory", "ok", f"{quantity(total, 'bytes')}")
    detail = f"{quantity(available, 'bytes')} of {quantity(total, 'bytes')} available"
    if available < LOW_RAM_BYTES:
        return Check(
            "memory", "warn", detail, "End other programs or choose a smaller model and batch."
        )
    return Check("memory", "ok", detail)


def _folder_clock(folder: Path) -> Iterator[Check]:
    """Whether the run folder can be written, and its file server has this machine's time."""
    with tempfile.TemporaryFile(dir=existing_ancestor(folder)) as probe:
        probe.write(b"0")
        probe.flush()
        # The time of a new file is that of its server.
        skew = abs(os.fstat(probe.fileno()).st_mtime - time.time())

    if skew > MAX_CLOCK_SKEW_SECONDS:
        detail = f"{folder} can be written, but its clock differs by {skew:.0f} s"
        yield Check(
            "run folder",
            "warn",
            detail,
            "Synchronise the clocks of this machine and its file server (NTP).",
        )
    else:
        yield Check("run folder", "ok", f"{folder} can be written")


def _tensorboard() -> Check:
    try:
        # Imported, not looked up: a broken installation must not stop a run later.
        importlib.import_module("tensorboard")
    except ImportError as error:
        if (command := how_to_get("tensorboard")) is not None:
            return Check(
                "tensorboard", "ok", f"is not installed; runs write metrics.jsonl only ({command})"
            )

        return Check(
            "tensorboard",
            "warn",
            f"cannot be imported: {error}",
            "Run pip install tensorboard, or train without that tracker.",
        )

    return Check("tensorboard", "ok", package_version("tensorboard") or "version unknown")
