"""Processes: which rank of how many this one is, how headway starts others, and what a supervisor
says in the environment.

`from_environment` reads the variables of the launcher; a process that no launcher started is rank 0
of 1.

Two protections hold for every process that headway starts. It imports nothing from the working
directory (a file `random.py` in there would replace Python's). And it ends when its parent ends,
however that happens, so that nothing keeps a GPU.
"""

from __future__ import annotations

import atexit
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
from typing import IO, TYPE_CHECKING, Any, NoReturn

from headway.config.user_code import UserFiles
from headway.errors import LaunchError, first_line
from headway.runtime.output import flush_streams

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

MAX_OPEN_FILES = 1 << 20
"""Beyond this many, a limit of open files is as good as none."""
PARENT_SECONDS = 0.5
"""How often a worker looks whether its parent is still there."""
ANSWER_SECONDS = 5.0
"""How long a child that closed its pipe without an answer may take to leave its exit code."""
PR_SET_PDEATHSIG = 1
"""prctl's option of Linux: the signal that a process gets when its parent ends."""
LAUNCHER_PID = "HEADWAY_LAUNCHER_PID"
FAILURE_FILE = "HEADWAY_FAILURE_FILE"
"""Set by headway's launcher for each rank it starts: the launcher's process id, and the file in
which a rank reports why it failed.
"""
SECRET_NAME = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY", re.IGNORECASE)
"""Matches names of environment variables that may hold a secret."""
SAFE_PATH = "PYTHONSAFEPATH"
"""A variable of Python: the working directory is not searched for modules."""
KILL_AT_STEP = "HEADWAY_KILL_AT_STEP"
"""Set by `headway verify resume`: the last rank kills itself after this step."""
SUPERVISOR = "HEADWAY_SUPERVISOR"
RESTARTS = "HEADWAY_RESTARTS"
OUTCOME_FILE = "HEADWAY_OUTCOME_FILE"
"""Set by `headway supervise` for what it starts: its name for the job, how often it started it
again, where an exit code is left that a launcher in between may not pass on.
"""


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
    """The variables one launcher sets."""

    program: str
    rank: str
    world: str
    local_rank: str
    local_world: str | None = None
    node: str | None = None
    num_nodes: str | None = None
    needs_local_rank: bool = True
    """Whether `local_rank` must be set too before this launcher is taken for the one that started
    this process.
    """


# The innermost launcher comes first: torchrun and mpirun are themselves started inside a SLURM
# step. SLURM's STEP variables exist only below srun: in a batch script SLURM_PROCID is 0 although
# the other tasks were not started.
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
    variables = os.environ if environment is None else environment
    for launcher in LAUNCHERS:
        needed = [launcher.rank, launcher.world]
        if launcher.needs_local_rank:
            needed.append(launcher.local_rank)
        if all(name in variables for name in needed):
            return _read(launcher, variables)

    # It is 0 in a batch script or an allocation's shell, where no other tasks were started. Any
    # other number is a task of srun that has lost the rest of its variables.
    slurm_task = variables.get("SLURM_PROCID", "0")
    if slurm_task != "0":
        raise LaunchError(
            f"SLURM_PROCID is {slurm_task} and SLURM_STEP_NUM_TASKS is not set, so it would start "
            "a second run next to task 0. Start the ranks with srun or torchrun and pass their "
            "environment on, or unset SLURM_PROCID."
        )
    return Process()


def _read(launcher: LauncherVariables, variables: Mapping[str, str]) -> Process:
    def number(name: str | None, default: int) -> int:
        if name is None or name not in variables:
            return default
        if not variables[name].isdecimal():
            raise LaunchError(
                f"environment variable {name} is {variables[name]!r}; it must be a whole number. "
                "Unset it or use torchrun."
            )
        return int(variables[name])

    rank = number(launcher.rank, 0)
    world = number(launcher.world, 1)
    if rank >= world:
        raise LaunchError(
            f"{launcher.rank} is {rank}; it must be below {launcher.world}={world}. "
            "Unset both or use torchrun."
        )
    local_rank = number(launcher.local_rank, 0)
    local_world = max(1, number(launcher.local_world, 1))
    # MPI names no node. Its ranks are taken to fill one node after the other.
    node = number(launcher.node, rank // local_world)
    num_nodes = number(launcher.num_nodes, -(-world // local_world))
    return Process(rank, local_rank, world, node, max(1, num_nodes))


def headway_command(arguments: Sequence[str]) -> list[str]:
    """The command line that runs headway again.

    -P keeps Python from importing from the working directory.
    """
    return [sys.executable, "-P", "-m", "headway", *arguments]


def start_module(
    module: str,
    variables: Mapping[str, str],
    errors: IO[bytes] | None,
    *,
    keeps_secrets: bool = True,
) -> subprocess.Popen[bytes]:
    """Run a module of headway in a process of its own session, talking over pipes: a Ctrl-C meant
    for this process does not reach it.

    `errors`: where its stderr goes; None: to this process's. A process that reads hostile bytes
    gets no variable that is named like a secret (`keeps_secrets=False`).
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
    """The variables for a command that starts headway by way of another launcher (torchrun -m
    headway): the same protection.
    """
    if ("-m", "headway") in itertools.pairwise(command):
        return {**environment, SAFE_PATH: "1"}
    return dict(environment)


@contextmanager
def worker_pool(
    workers: int, begin: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Worker processes for pure computing; `begin(*given)` runs first in each.

    Like `headway_command`, they import nothing from the working directory. Spawned, not forked:
    this process may hold threads (tokenizers, torch) that a fork would break. However this process
    ends, they end too.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with _safe_path(), _without_script():
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(
            workers,
            mp_context=context,
            initializer=_begin_worker,
            initargs=(os.getpid(), UserFiles(), begin, arguments),
        )
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_worker(
    parent: int, files: UserFiles, begin: Callable[..., None] | None, arguments: tuple[Any, ...]
) -> None:
    """The first call in a worker.

    A worker waits for work on a pipe of which it holds both ends, so it would never notice that its
    parent is gone: a thread looks. `files` has done its work when it arrives: unpickling it has
    imported the user's modules here.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="headway-parent", daemon=True).start()
    if begin is not None:
        begin(*arguments)


class ChildFailureError(Exception):
    """A function that ran in a separate process gave no result; says why."""


def run_in_child(
    work: Callable[..., Any], arguments: tuple[Any, ...], timeout_seconds: float
) -> Any:
    """Call a function in a new process, spawned like those of `worker_pool`, and return its answer.

    When this returns, the process is gone and everything it held is free. Raises ChildFailureError
    if it fails, is killed or takes too long.
    """
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    # Not a daemon: torch's compiler may start processes there, which a daemon must not.
    child = context.Process(
        target=_answer, args=(sender, os.getpid(), UserFiles(), work, arguments)
    )
    try:
        with _safe_path(), _without_script():
            child.start()
        # With the only other end in the child, its death ends the wait below.
        sender.close()

        if not receiver.poll(timeout_seconds):
            raise ChildFailureError(f"no answer within {timeout_seconds:.0f} s")
        try:
            answer, problem = receiver.recv()
        except EOFError:
            child.join(ANSWER_SECONDS)
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
    sender: Any, parent: int, files: UserFiles, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    _end_with(parent)
    try:
        sender.send((work(*arguments), None))
    except Exception as error:  # the parent raises it
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

    A spawned process runs the script of its parent first, up to `if __name__ == "__main__"`. A
    script without that line would train or tokenize again in every worker, and no worker would ever
    be ready.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    # A notebook has no file. A module, as in `python -m headway`, is imported by its name.
    if main is None or file is None or getattr(main, "__spec__", None) is not None:
        yield
        return

    # This is where multiprocessing looks for the script of the parent.
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def failure_file() -> Path | None:
    """The file in which this rank reports why it failed.

    None where headway's launcher did not start it.
    """
    path = os.environ.get(FAILURE_FILE)
    if path:
        return Path(path)
    return None


def end_with_launcher() -> None:
    """Ask the kernel to kill this process when the launcher that started it is gone, so that
    nothing is orphaned.
    """
    launcher_pid = os.environ.get(LAUNCHER_PID)
    if launcher_pid is not None:
        _end_with(int(launcher_pid))


def _end_with(parent: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the kernel was asked.
    if os.getppid() != parent:
        os._exit(1)


_group_was_started = False
"""Whether this process has joined a process group."""


def meeting_point() -> tuple[str, int] | None:
    """Host and port where rank 0 waits for the others; None if the launcher has not said it."""
    host = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT", "")
    if host is None or not port.isdecimal():
        return None
    return host, int(port)


def remember_group() -> None:
    """This process joins a process group, so `end_process` leaves out the interpreter's shutdown."""
    global _group_was_started
    _group_was_started = True


def end_process(code: int) -> NoReturn:
    """End the process of a command with this exit code.

    A process that was one of several ranks leaves out the interpreter's shutdown. Threads of gloo
    live as long as anything refers to a group, hold tensors that belong to Python, and abort the
    process if they drop one while the interpreter goes down: finished work would count as failed.
    """
    if _group_was_started:
        # What the shutdown does before it takes the interpreter apart, in its order.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        flush_streams()
        os._exit(code)
    sys.exit(code)


def kill_at_step() -> int | None:
    """After which step this process is to be killed; None = never."""
    step = os.environ.get(KILL_AT_STEP)
    if step:
        return int(step)
    return None


def supervisor() -> str | None:
    """The name a supervisor gave to this job; None where it is not supervised."""
    return os.environ.get(SUPERVISOR)


def restarted_job() -> tuple[str | None, bool]:
    """The name of this job with its supervisor (headway or torchrun); whether it is a restart."""
    name = os.environ.get(SUPERVISOR) or os.environ.get("TORCHELASTIC_RUN_ID")
    counts = [os.environ.get(RESTARTS), os.environ.get("TORCHELASTIC_RESTART_COUNT")]
    is_restart = any(int(count or 0) > 0 for count in counts)
    return name, is_restart


def end_with_supervisor() -> None:
    """Ask the kernel for SIGTERM when the parent of this process under a supervisor ends."""
    if os.environ.get(SUPERVISOR) and sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def leave_outcome(code: int) -> None:
    """Leave an exit code for the supervisor, where it decides whether to start again."""
    path = os.environ.get(OUTCOME_FILE)
    if path:
        try:
            Path(path).write_text(str(code), encoding="utf-8")
        except OSError:
            # A full disk. Without a launcher in between, the supervisor has the code anyway.
            return


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
    """This boot of this machine and the namespace of its process ids, in which an id means one
    process; empty if not known.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        if not Path("/proc/self").exists():
            return socket.gethostname()
        return ""


def process_start(pid: int) -> str | None:
    """When a process began; None if it has ended, or where the system does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name of the program stands in parentheses and may hold spaces and parentheses itself: the
    # fields after it are counted from the last one. They begin with field 3 of proc(5), the state;
    # field 22 is the start time in clock ticks since boot.
    fields = text.rpartition(")")[2].split()
    state = fields[0]
    if state in "ZXx":  # a zombie, or dead
        return None
    return fields[19]


def process_age_seconds() -> float | None:
    """How long this process has run; None where the system does not say."""
    start = process_start(os.getpid())
    if start is None or sys.platform == "win32":
        return None
    # Both count from the boot of the machine, with the time in which it slept.
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return since_boot - int(start) / os.sysconf("SC_CLK_TCK")


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
    if hard == resource.RLIM_INFINITY:
        limit = MAX_OPEN_FILES
    else:
        limit = min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (ValueError, OSError):
            return
