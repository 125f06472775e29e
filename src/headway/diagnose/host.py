"""Facts and fast checks of one host: versions, disk, shared memory, open files, ports, network
variables, GPU health. Loads no torch.

In: a folder for runs and what the job needs here. Out: `HostFacts`, which are compared with those
of other hosts, and checks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import headway
from headway.diagnose.check import Check
from headway.diagnose.gpu_health import GpuHealth, health_checks, read_gpu_health
from headway.errors import ConfigError
from headway.runtime.machine import PACKAGES, cuda_of_torch, driver_version, package_version
from headway.runtime.progress import quantity
from headway.runtime.storage import check_writable, free_bytes

# LOW: works, but not for long; NO: cannot work.
LOW_DISK_BYTES = 10e9
NO_DISK_BYTES = 0.5e9
SHARED_MEMORY = Path("/dev/shm")
LOW_SHARED_MEMORY_BYTES = 1e9
NO_SHARED_MEMORY_BYTES = 0.1e9
LOW_OPEN_FILES = 4096
NO_OPEN_FILES = 256
OPEN_FILES_PER_RANK = 16
"""Needed on top of NO_OPEN_FILES for each rank of the host."""
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
DEAD_VARIABLES = {
    "NCCL_TIMEOUT": "Neither NCCL nor torch reads it: set parallel.timeout_seconds.",
    "NCCL_ASYNC_ERROR_HANDLING": "It is called TORCH_NCCL_ASYNC_ERROR_HANDLING now.",
    "NCCL_BLOCKING_WAIT": "It is called TORCH_NCCL_BLOCKING_WAIT now.",
}
"""Variables that were read once, and what to set now."""
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables that name network interfaces."""


@dataclass(frozen=True)
class HostFacts:
    """What must be equal, or nearly, on all hosts of a job."""

    host: str
    python: str
    packages: dict[str, str]
    code: str
    """Digest of headway's own source files."""
    cuda: str | None = None
    driver: str | None = None
    nccl: str | None = None
    gpus: tuple[str, ...] = ()
    same: dict[str, str] = field(default_factory=dict)
    """Other values that must be equal everywhere, such as the digest of the recipe."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> HostFacts:
        """The facts that `to_json` described."""
        return HostFacts(**{**data, "gpus": tuple(data["gpus"])})


@dataclass(frozen=True)
class HostNeeds:
    """What a job needs of each host; the defaults ask for nothing."""

    ranks: int = 1
    gpu_ranks: bool = False
    """Every rank has a GPU of its own."""
    port: int | None = None
    """A port that must be free here."""
    same: Mapping[str, str] = field(default_factory=dict)


def host_facts(gpus: tuple[str, ...] = (), same: Mapping[str, str] | None = None) -> HostFacts:
    """The facts of this host."""
    packages = {"headway": headway.__version__}
    for name in PACKAGES:
        if (version := package_version(name)) is not None:
            packages[name] = version

    cuda = None
    if importlib.util.find_spec("torch") is not None:
        cuda = cuda_of_torch()

    # The wheel that torch brings; its name has CUDA's version.
    nccl_versions = [version for name in NCCL_PACKAGES if (version := package_version(name))]
    return HostFacts(
        host=socket.gethostname(),
        python=platform.python_version(),
        packages=packages,
        code=_code_digest(),
        cuda=cuda,
        driver=driver_version(),
        nccl=nccl_versions[0] if nccl_versions else None,
        gpus=gpus,
        same=dict(same or {}),
    )


def _code_digest() -> str:
    """Hosts with the same version may still have different code, in a source tree."""
    root = Path(headway.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        # With names: a file that was renamed is other code.
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def host_checks(
    folder: Path, needs: HostNeeds, environment: Mapping[str, str]
) -> tuple[HostFacts, list[Check]]:
    """The facts of this host and its fast checks: about a second, most of it nvidia-smi."""
    gpus, problem = read_gpu_health()
    checks = [
        *disk_checks(folder),
        *shared_memory_check(),
        *open_files_check(needs.ranks),
        *variable_checks(environment),
    ]
    if needs.port is not None:
        checks.append(port_check(needs.port))
    if problem is not None:
        checks.append(problem)

    # A job may have some of a host's GPUs; the others are somebody else's business.
    chosen = visible_gpus(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    checks += [*health_checks(chosen), *gpu_count_check(len(chosen), needs)]
    return host_facts(tuple(gpu.name for gpu in chosen), needs.same), checks


def visible_gpus(gpus: list[GpuHealth], setting: str | None) -> list[GpuHealth]:
    """The GPUs that CUDA_VISIBLE_DEVICES names by index.

    All of them where it is unset or names them otherwise.
    """
    if setting is None:
        return gpus

    # UUIDs and MIG devices are names that the query above does not have.
    entries = [entry.strip() for entry in setting.split(",") if entry.strip()]
    if not all(entry.isdecimal() for entry in entries):
        return gpus
    return [gpu for gpu in gpus if str(gpu.index) in entries]


def gpu_count_check(count: int, needs: HostNeeds) -> Iterator[Check]:
    """Whether each rank gets a GPU."""
    if needs.gpu_ranks and count < needs.ranks:
        detail = f"{count} visible, {needs.ranks} ranks need one each"
        yield Check(
            "gpu count",
            "fail",
            detail,
            "Start fewer ranks on this host, or check CUDA_VISIBLE_DEVICES and the driver.",
        )


def disk_checks(folder: Path) -> Iterator[Check]:
    """Space at the folder of runs, and whether it can be written."""
    free = free_bytes(folder)
    detail = f"{quantity(free, 'bytes')} free at {folder}"
    if free < NO_DISK_BYTES:
        yield Check("disk", "fail", detail, "Free some space or choose another run.dir.")
    elif free < LOW_DISK_BYTES:
        yield Check(
            "disk",
            "warn",
            detail,
            "Checkpoints take 12 bytes per parameter each: free some "
            "space or choose another run.dir.",
        )
    else:
        yield Check("disk", "ok", detail)

    try:
        check_writable(folder)
    except ConfigError as error:
        yield Check("run folder", "fail", str(error), "Choose another run.dir.")


def shared_memory_check(folder: Path = SHARED_MEMORY) -> Iterator[Check]:
    """Free shared memory, through which NCCL and loader processes on one host exchange.

    Containers often have 64 MB.
    """
    if not folder.is_dir():
        return

    free = shutil.disk_usage(folder).free
    detail = f"{quantity(free, 'bytes')} free in {folder}"
    if free >= LOW_SHARED_MEMORY_BYTES:
        yield Check("shared memory", "ok", detail)
        return
    state = "fail" if free < NO_SHARED_MEMORY_BYTES else "warn"
    remedy = "Start the container with --ipc=host or --shm-size=16g, or empty the folder."
    yield Check("shared memory", state, detail, remedy)


def open_files_check(ranks: int = 1) -> Iterator[Check]:
    """The limit of open files per process. headway raises the soft limit to the hard one when it
    starts.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        yield Check("open files", "ok", "no limit")
        return

    state = "ok"
    remedy = None
    if hard < LOW_OPEN_FILES:
        state = "warn"
        remedy = "Raise the hard limit (ulimit -Hn 65536, or nofile in /etc/security/limits.conf)."
    if hard < NO_OPEN_FILES + OPEN_FILES_PER_RANK * ranks:
        state = "fail"
        remedy = "Raise the hard limit (ulimit -Hn 65536, or nofile in /etc/security/limits.conf)."
    yield Check("open files", state, f"at most {hard} per process", remedy)


def variable_checks(environment: Mapping[str, str]) -> Iterator[Check]:
    """Variables of the network that name no interface or that nothing reads."""
    interfaces = {name for _, name in socket.if_nameindex()}
    for variable in INTERFACES:
        value = environment.get(variable, "")
        # ^ excludes interfaces: one that is not here does no harm.
        if not value or value.startswith("^"):
            continue

        # NCCL: `eth` is every interface that begins so, `=eth0` this one. gloo takes whole names.
        wanted_names = tuple(part for part in value.lstrip("=").split(",") if part)
        if value.startswith("=") or variable == "GLOO_SOCKET_IFNAME":
            has_one = not interfaces.isdisjoint(wanted_names)
        else:
            has_one = any(name.startswith(wanted_names) for name in interfaces)
        if not has_one:
            yield Check(
                variable,
                "fail",
                f"is {value!r}; this host has {', '.join(sorted(interfaces))}",
                "Name an interface of this host, or unset it.",
            )

    for variable, words in DEAD_VARIABLES.items():
        if variable in environment:
            yield Check(variable, "warn", "is set, but has no effect", words)


def port_check(port: int, host: str = "") -> Check:
    """Whether a server may listen on a port of this host now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A port whose last user ended a moment ago is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Check(
                f"port {port}",
                "fail",
                f"cannot be used: {error.strerror}",
                "Choose another port for --master, or end its user.",
            )

    return Check(f"port {port}", "ok", "is free")


def cores_check(ranks: int, cores: int) -> Iterator[Check]:
    """Whether every rank has a core."""
    if ranks > cores:
        yield Check(
            "cores",
            "warn",
            f"{cores} cores for {ranks} ranks",
            "Ask for more CPUs per task; loading data will be slow.",
        )
