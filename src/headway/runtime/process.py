"""Which process of how many this is, read from what the launcher left in the environment. Alone it is rank 0 of 1."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headway.config.user_code import UserFiles
from headway.errors import LaunchError, first_line

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

MAX_OPEN_FILES = 1 << 20
PARENT_SECONDS = 0.5
PR_SET_PDEATHSIG = 1
LAUNCHER_PID = "HEADWAY_LAUNCHER_PID"
FAILURE_FILE = "HEADWAY_FAILURE_FILE"
"""Set by headway's launcher for each rank it starts: the launcher's process id, and the file in which a rank reports why it failed."""
SECRET_NAME = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY", re.IGNORECASE)
SAFE_PATH = "PYTHONSAFEPATH"
"""A variable of Python: the working directory is not searched for modules."""
KILL_AT_STEP = "HEADWAY_KILL_AT_STEP"
"""Set by `headway verify resume`: the last rank kills itself after this step."""
SUPERVISOR = "HEADWAY_SUPERVISOR"
RESTARTS = "HEADWAY_RESTARTS"
OUTCOME_FILE = "HEADWAY_OUTCOME_FILE"
"""Set by `headway supervise` for what it starts: its name for the job, how often it started it again, where an exit code is left that a
launcher in between may not pass on."""


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    node: int = 0
    num_nodes: int = 1

    @property
    def is_first(self) -> bool:
        """Rank 0 writes what is written once: logs, metrics, manifests."""
        return self.rank == 0


@dataclass(frozen=True)
class LauncherVariables:
    """The variables one launcher sets; `local_rank` must be among them where it distinguishes this launcher's processes."""

    program: str
    rank: str
    world: str
    local_rank: str
    local_world: str | None = None
    node: str | None = None
    num_nodes: str | None = None
    needs_local_rank: bool = True


# The innermost launcher comes first: torchrun and mpirun are themselves started inside a SLURM step.
# SLURM's STEP variables exist only below srun: in a batch script SLURM_PROCID is 0 although the other tasks were not started.
LAUNCHERS = (
    LauncherVariables(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        local_world="LOCAL_WORLD_SIZE",
        node="GROUP_RANK",
        num_nodes="GROUP_WORLD_SIZE",
        needs_local_rank=False,
    ),
    LauncherVariables(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    LauncherVariables(
        "mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", local_world="MPI_LOCALNRANKS"
    ),
    LauncherVariables(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        node="SLURM_NODEID",
        num_nodes="SLURM_STEP_NUM_NODES",
    ),
)


def from_environment(environment: Mapping[str, str] | None = None) -> Process:
    """This process as torchrun, OpenMPI, MPICH / Intel MPI or SLURM describe it."""
    given = os.environ if environment is None else environment
    for launcher in LAUNCHERS:
        needed = [launcher.rank, launcher.world] + (
            [launcher.local_rank] if launcher.needs_local_rank else []
        )
        if all(name in given for name in needed):
            return _read(launcher, given)
    if (
        given.get("SLURM_PROCID", "0") != "0"
    ):  # 0 in a batch script or an allocation's shell, where no other tasks were started
        raise LaunchError(
            f"SLURM_PROCID is {given['SLURM_PROCID']} and SLURM_STEP_NUM_TASKS is not set, so it would start a second run next to "
            "task 0. Start the ranks with srun or torchrun and pass their environment on, or unset SLURM_PROCID."
        )
    return Process()


def _read(launcher: LauncherVariables, given: Mapping[str, str]) -> Process:
    def number(name: str | None, default: int) -> int:
        if name is None or name not in given:
            return default
        if not given[name].isdecimal():
            raise LaunchError(
                f"environment variable {name} is {given[name]!r}; it must be a whole number. Unset it or use torchrun."
            )
        return int(given[name])

    rank, world = number(launcher.rank, 0), number(launcher.world, 1)
    if rank >= world:
        raise LaunchError(
            f"{launcher.rank} is {rank}; it must be below {launcher.world}={world}. Unset both or use torchrun."
        )
    local_rank = number(launcher.local_rank, 0)
    local_world = max(1, number(launcher.local_world, 1))
    node = number(launcher.node, rank // local_world)
    num_nodes = number(launcher.num_nodes, -(-world // local_world))
    return Process(rank, local_rank, world, node, max(1, num_nodes))


def headway_command(arguments: Sequence[str]) -> list[str]:
    """The command line that runs headway again; -P keeps Python from importing from the working directory."""
    return [sys.executable, "-P", "-m", "headway", *arguments]


def start_module(
    module: str,
    variables: Mapping[str, str],
    errors: IO[bytes] | None,
    *,
    keeps_secrets: bool = True,
) -> subprocess.Popen[bytes]:
    """Run a module of headway in a process of its own session, talking over pipes: a Ctrl-C meant for this process does not reach it.

    `errors`: where its stderr goes; None: to this process's. A process that reads hostile bytes gets no variable that is named like a
    secret (`keeps_secrets=False`).
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if keeps_secrets or not SECRET_NAME.search(name)
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**environment, **variables},
        start_new_session=True,
    )


def safe_environment(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for a command that starts headway by way of another launcher (torchrun -m headway): the same protection."""
    starts_headway = ("-m", "headway") in itertools.pairwise(command)
    return {**environment, SAFE_PATH: "1"} if starts_headway else dict(environment)


@contextmanager
def worker_pool(
    workers: int, begin: Callable[..., None] | None = None, given: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Worker processes for pure computing; `begin(*given)` runs first in each. Like `headway_command`, they import nothing from the working
    directory. Spawned, not forked: this process may hold threads (tokenizers, torch) that a fork would break. However this process ends,
    they end too."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with _safe_path(), _without_script():
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(
            workers,
            mp_context=context,
            initializer=_begin_worker,
            initargs=(os.getpid(), UserFiles(), begin, given),
        )
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_worker(
    parent: int, files: UserFiles, begin: Callable[..., None] | None, given: tuple[Any, ...]
) -> None:
    """A worker waits for work on a pipe of which it holds both ends, so it would never notice that the process that gives it is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="headway-parent", daemon=True).start()
    if begin is not None:
        begin(*given)


class ChildFailureError(Exception):
    """A function that ran in a separate process gave no result; says why."""


def run_in_child(work: Callable[..., Any], given: tuple[Any, ...], timeout_seconds: float) -> Any:
    """Call a function in a new process, spawned like those of `worker_pool`, and return its answer. When this returns, the process is gone
    and everything it held is free. Raises ChildFailureError if it fails, is killed or takes too long."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(
        target=_answer, args=(sender, os.getpid(), UserFiles(), work, given)
    )  # no daemon: the compiler may start processes there
    try:
        with _safe_path(), _without_script():
            child.start()
        sender.close()
        if not receiver.poll(timeout_seconds):
            raise ChildFailureError(f"no answer within {timeout_seconds:.0f} s")
        try:
            answer, problem = receiver.recv()
        except EOFError:
            child.join(5)
            raise ChildFailureError(
                f"it ended without an answer (exit code {child.exitcode})"
            ) from None
    finally:
        if child.is_alive():
            child.kill()
        if child.pid is not None:
            child.join()
        receiver.close()
    if problem is not None:
        raise ChildFailureError(problem)
    return answer


def _answer(
    sender: Any, parent: int, files: UserFiles, work: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    _end_with(parent)
    try:
        sender.send((work(*given), None))
    except Exception as error:  # the parent decides what follows
        sender.send((None, first_line(error, 300)))


@contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that are started meanwhile do not import from the working directory."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SAFE_PATH, None)
        else:
            os.environ[SAFE_PATH] = before


@contextmanager
def _without_script() -> Iterator[None]:
    """Processes that are started meanwhile do not run the user's script again.

    A spawned process runs the script of its parent first, up to `if __name__ == "__main__"`. A script without that line would train or
    tokenize again in every worker, and no worker would ever be ready.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if (
        main is None or file is None or getattr(main, "__spec__", None) is not None
    ):  # a notebook, or `python -m headway`
        yield
        return
    del main.__file__  # where spawned processes look for the script
    try:
        yield
    finally:
        main.__file__ = file


def failure_file() -> Path | None:
    """The file in which this rank reports why it failed; None where headway's launcher did not start it."""
    given = os.environ.get(FAILURE_FILE)
    return Path(given) if given else None


def end_with_launcher() -> None:
    """Ask the kernel to kill this process when the launcher that started it is gone, so that nothing is orphaned."""
    given = os.environ.get(LAUNCHER_PID)
    if given is not None:
        _end_with(int(given))


def _end_with(parent: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the request stood
        os._exit(1)


def kill_at_step() -> int | None:
    """After which step this process is to be killed; None = never."""
    given = os.environ.get(KILL_AT_STEP)
    return int(given) if given else None


def supervisor() -> str | None:
    """The name a supervisor gave to this job; None where it is not supervised."""
    return os.environ.get(SUPERVISOR)


def restarted_job() -> tuple[str | None, bool]:
    """The name of this job with its supervisor, headway or torchrun; and whether this start is a restart."""
    name = os.environ.get(SUPERVISOR) or os.environ.get("TORCHELASTIC_RUN_ID")
    return name, any(
        int(os.environ.get(count, "0") or 0) > 0
        for count in (RESTARTS, "TORCHELASTIC_RESTART_COUNT")
    )


def end_with_supervisor() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent under a supervisor has ended."""
    if os.environ.get(SUPERVISOR) and sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def leave_outcome(code: int) -> None:
    """Leave an exit code for the supervisor, where it decides whether to start again."""
    path = os.environ.get(OUTCOME_FILE)
    if path:
        try:
            Path(path).write_text(str(code), encoding="utf-8")
        except OSError:
            return  # a full disk; where no launcher is in between the supervisor has the code itself


def set_environment(settings: Mapping[str, str]) -> None:
    """Change this process's environment, for what libraries read when they start."""
    os.environ.update(settings)


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Change this process's environment for a while; children that start later do not see it."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def boot_id() -> str:
    """This boot of this machine and the namespace of its process ids, in which an id means one process; empty if not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname() if not Path("/proc/self").exists() else ""


def process_start(pid: int) -> str | None:
    """When a process began; None if it has ended, or where the system does not say."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return None
    return None if fields[0] in "ZXx" else fields[19]


def most_open_files() -> int:
    """How many files and connections this process may have open at once."""
    try:
        import resource
    except ImportError:
        return MAX_OPEN_FILES
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    return soft


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one; a system that refuses is left alone."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            return
