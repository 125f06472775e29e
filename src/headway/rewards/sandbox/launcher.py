"""The process that starts sandboxes: `python -m headway.rewards.sandbox.launcher`. Jobs on stdin,
results on stdout; its environment is empty.

    in     {"program", "steps", "stdin", "limits": {...}}
    out    {"status": "ended" | "time" | "output", "code": ..., "output": ...}, or {"refused": ...}

Each program runs under its own user, process, network, mount, IPC, host name and cgroup namespaces.
Its root is a small file system in memory with Python's library, read-only, and /tmp, of limited
size. There is no /proc, no /sys, no network device. The first process of the namespace ends with
the program, and the kernel ends all others then.
"""

from __future__ import annotations

import marshal
import os
import platform
import resource
import select
import signal
import socket
import stat
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from headway.rewards.messages import read_message, write_message
from headway.rewards.sandbox import kernel

ROOT = "/proc"
"""Where the new root is mounted: a folder that every Linux has, and that holds no library."""
INNER_USER = 1000
"""The user that a program runs as, inside its namespace."""
NOBODY = 65534
"""Who that is outside, where root starts the sandbox: a user that owns nothing."""
START_SECONDS = 20.0
"""For namespaces and mounts, on a machine that is busy."""
VALUES_FILE = 4
LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    # The order of sets is the same in every run, so that an answer has one score.
    "PYTHONHASHSEED": "0",
    "TMPDIR": "/tmp",
}
FEW_FILES = 64
"""Open files of a program."""
ROOT_OPTIONS = "size=1m,nr_inodes=1k,mode=755"
"""Small: it holds empty folders and links, on which the rest is mounted."""


class SystemRefusal(Exception):
    """The system does not offer what a sandbox needs; says what."""


def main() -> int:
    """Run jobs until stdin ends."""
    messages = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)

    harness = Path(__file__).with_name("program.py").read_text(encoding="utf-8")
    while (job := read_message(messages)) is not None:
        try:
            check_system()
            result = SandboxRun(job, harness).run()
        except (SystemRefusal, OSError) as problem:
            result = {"refused": str(problem)}
        write_message(answers, result)
    return 0


def check_system() -> None:
    """Refuse systems on which no sandbox can be made."""
    if not sys.platform.startswith("linux"):
        raise SystemRefusal(f"programs run on Linux only, and this is {sys.platform}")
    if platform.machine() not in kernel.NUMBERS:
        raise SystemRefusal(
            f"the processor is {platform.machine()}; it must be {' or '.join(kernel.NUMBERS)}"
        )
    release = platform.release().split(".")
    version = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release[:2])
    if version < kernel.OLDEST:
        raise SystemRefusal(f"Linux is {platform.release()}; it must be 5.14 or newer")


class SandboxRun:
    """One run of a program, seen from the launcher."""

    def __init__(self, job: dict[str, Any], harness: str) -> None:
        self.limits: dict[str, Any] = job["limits"]
        self.harness = harness
        self.reads_stdin = job["steps"] is None
        # Known before the root changes, in which links of /usr/bin do not exist.
        self.interpreter = interpreter()
        inner = {
            "program": job["program"],
            "steps": job["steps"],
            "folders": self.limits["folders"],
        }
        self.job_file = _memory_file("job", marshal.dumps(inner))
        self.stdin_file = _memory_file("stdin", job["stdin"].encode("utf-8", "replace"))
        self.output, self.output_end = os.pipe()
        self.reports, self.reports_end = os.pipe()
        self.mapped, self.mapped_end = os.pipe()

    def run(self) -> dict[str, Any]:
        """Run the program to its end, or end it."""
        builder = os.fork()
        if builder == 0:
            self._build()
        first: int | None = None
        status = ""
        try:
            for end in (self.output_end, self.reports_end):
                os.close(end)
            first = self._start()
            status, output = self._read_output(builder)
        finally:
            # The end of the first process ends all others. Without one, nothing runs yet.
            if status != "ended":
                with suppress(ProcessLookupError):
                    os.kill(first or builder, signal.SIGKILL)
            _, code = os.waitpid(builder, 0)
            for file in (
                self.job_file,
                self.stdin_file,
                self.output,
                self.reports,
                self.mapped,
                self.mapped_end,
            ):
                os.close(file)
        return {
            "status": status,
            "code": os.waitstatus_to_exitcode(code),
            "output": output.decode("utf-8", "replace"),
        }

    def _start(self) -> int:
        """Wait until the program is started; the number of the first process."""
        deadline = time.monotonic() + START_SECONDS
        received = bytearray()
        first: int | None = None
        while (line := _next_line(self.reports, received, deadline)) is not None:
            word, _, text = line.partition(" ")
            if word == "builder":
                self._map_users(text)
                os.write(self.mapped_end, b"x")
            elif word == "first":
                first = int(text)
            else:
                raise SystemRefusal(text)
        if first is None:
            raise SystemRefusal("the process that makes it ended early")
        return first

    def _map_users(self, builder: str) -> None:
        """Give the new user namespace its users: one, or for root two, of which the program is the
        one that owns nothing.
        """
        user = os.getuid()
        group = os.getgid()
        folder = f"/proc/{builder}"
        maps = (f"{INNER_USER} {user} 1", f"{INNER_USER} {group} 1")
        if user == 0:
            both = f"0 0 1\n{INNER_USER} {NOBODY} 1"
            maps = (both, both)
        else:
            _write(f"{folder}/setgroups", "deny")
        _write(f"{folder}/uid_map", maps[0])
        _write(f"{folder}/gid_map", maps[1])

    def _read_output(self, builder: int) -> tuple[str, bytes]:
        """What the program wrote until all of it ended, and how that came."""
        deadline = time.monotonic() + self.limits["seconds"]
        output = bytearray()
        ended = os.pidfd_open(builder)
        try:
            poll = select.poll()
            poll.register(self.output, select.POLLIN)
            poll.register(ended, select.POLLIN)
            while True:
                remaining = deadline - time.monotonic()
                # What it printed until then does not count.
                if remaining <= 0:
                    return "time", b""
                ready = [number for number, _ in poll.poll(remaining * 1000)]
                if self.output in ready:
                    piece = os.read(self.output, 1 << 16)
                    output += piece
                    if len(output) > self.limits["output_bytes"]:
                        return "output", b""
                    if not piece:
                        poll.unregister(self.output)
                elif ended in ready:
                    # Nothing is left in the pipe, and nobody is left to write.
                    return "ended", bytes(output)
        finally:
            os.close(ended)

    def _build(self) -> NoReturn:
        """In the builder: make the namespaces, then start the first process in them."""
        code = 1
        try:
            # Nobody may look into this process.
            kernel.control(kernel.NO_DUMPS, 0)
            kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)
            os.setsid()
            code = self._build_steps()
        except OSError as problem:
            self._report(f"problem {_reason(problem)}")
        except Exception as problem:
            self._report(f"problem {type(problem).__name__}: {problem}")
        finally:
            os._exit(code)

    def _build_steps(self) -> int:
        # The user of the program must be able to enter what is made here, whatever mask the shell
        # that started headway has.
        os.umask(0o022)
        if os.getuid() == 0:
            os.setgroups([])
        # Its number where /proc is mounted; os.getpid() may be that of an inner namespace.
        number = os.readlink("/proc/self")
        kernel.unshare(kernel.NEW_USER, "a new user namespace")
        # What may be looked into belongs to the new namespace, else the launcher cannot map it.
        kernel.control(kernel.NO_DUMPS, 1)
        self._report(f"builder {number}")
        os.close(self.mapped_end)
        if not os.read(self.mapped, 1):
            return 1
        kernel.control(kernel.NO_DUMPS, 0)
        others = kernel.ALL_NAMESPACES & ~kernel.NEW_USER
        kernel.unshare(others, "new mount, network, process, IPC, host name, cgroup namespaces")
        socket.sethostname("sandbox")
        self._make_root()

        first = os.fork()
        if first == 0:
            self._be_first()
        self._report(f"first {first}")
        for file in (self.reports_end, self.output_end):
            os.close(file)
        _, status = os.waitpid(first, 0)
        code = os.waitstatus_to_exitcode(status)
        return code if 0 <= code < 256 else 1

    def _make_root(self) -> None:
        """A root of libraries, devices and /tmp, and nothing else."""
        kernel.mount("none", "/", None, kernel.MOUNT_RECURSIVE | kernel.MOUNT_PRIVATE)
        plain = kernel.MOUNT_NO_SETUID | kernel.MOUNT_NO_DEVICES
        folders = self._visible_folders()
        kernel.mount("tmpfs", ROOT, "tmpfs", plain, ROOT_OPTIONS)
        # Before the folders: one of the user may lie below /tmp.
        for folder in ("/tmp", "/dev"):
            os.makedirs(ROOT + folder)
        size = f"size={self.limits['disk_bytes']},nr_inodes=4k,mode=1777"
        kernel.mount("tmpfs", f"{ROOT}/tmp", "tmpfs", plain, size)
        restricted = kernel.ATTRIBUTE_NO_SETUID | kernel.ATTRIBUTE_NO_DEVICES
        for path in folders:
            if os.path.islink(path):
                _make_parents(path)
                os.symlink(os.readlink(path), ROOT + path)
                continue
            _mount_again(path, restricted)
        for path in DEVICES:
            _mount_again(path, kernel.ATTRIBUTE_NO_SETUID)
        # Semaphores of multiprocessing are files there.
        os.symlink("/tmp", f"{ROOT}/dev/shm")
        kernel.pivot_to(ROOT)
        kernel.mount(
            "none",
            "/",
            None,
            kernel.MOUNT_REMOUNT | kernel.MOUNT_BIND | kernel.MOUNT_READ_ONLY | plain,
        )
        os.chdir("/tmp")

    def _visible_folders(self) -> list[str]:
        """What a program may read: the system's libraries, Python, and the user's folders."""
        prefix = sys.base_prefix
        wanted = [
            *LIBRARIES,
            "/etc/ld.so.cache",
            f"{prefix}/lib",
            f"{prefix}/lib64",
            sysconfig.get_path("stdlib"),
            f"{sys.base_exec_prefix}/lib",
            self.interpreter,
            *self.limits["folders"],
        ]
        folders: list[str] = []
        for path in dict.fromkeys(os.path.abspath(name) for name in wanted):
            if not os.path.exists(path):
                continue
            # A part of what is there already; a link to it may have another name.
            inside = any(f"{os.path.realpath(path)}/".startswith(f"{known}/") for known in folders)
            if inside and not (os.path.islink(path) and path in LIBRARIES):
                continue
            folders.append(path)
        return folders

    def _be_first(self) -> NoReturn:
        """The first process of the namespace: wait for the program, and collect its orphans."""
        code = 1
        try:
            kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)
            kernel.drop_bounding()
            program = os.fork()
            if program == 0:
                self._be_program()
            os.closerange(0, 256)
            while True:
                ended, status = os.wait()
                if ended == program:
                    code = os.waitstatus_to_exitcode(status)
                    break
        finally:
            os._exit(code if 0 <= code < 256 else 1)

    def _be_program(self) -> NoReturn:
        """Give up all rights and become Python with the program."""
        try:
            os.setresgid(INNER_USER, INNER_USER, INNER_USER)
            os.setresuid(INNER_USER, INNER_USER, INNER_USER)
            self._set_limits()
            kernel.drop_capabilities()
            kernel.control(kernel.NO_NEW_PRIVILEGES, 1)
            self._place_files()
            kernel.filter_system_calls()
            # -S and -s: Python's library alone; -P: nothing from the working directory.
            arguments = ["python", "-s", "-S", "-P", "-B", "-c", self.harness]
            os.execve(self.interpreter, arguments, ENVIRONMENT)
        except OSError as problem:
            self._report(f"problem {_reason(problem)}")
        finally:
            os._exit(1)

    def _set_limits(self) -> None:
        limits = self.limits
        seconds = int(limits["seconds"]) + 1
        for kind, value in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_NPROC, limits["processes"]),
            (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
            (resource.RLIMIT_NOFILE, FEW_FILES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            # A limit of the system may be lower.
            _, most = resource.getrlimit(kind)
            if most != resource.RLIM_INFINITY:
                value = min(value, most)
            resource.setrlimit(kind, (value, value))

    def _place_files(self) -> None:
        """Stdin, stdout, stderr, the job and the values under their numbers; nothing else."""
        # First out of the way: a number below may be the target of another one.
        null = os.dup(os.open(os.devnull, os.O_RDWR))
        files = [null, null, null, self.job_file, null]
        if self.reads_stdin:
            files[0] = self.stdin_file
            files[1] = self.output_end
        else:
            files[VALUES_FILE] = self.output_end
        import fcntl

        copies = [fcntl.fcntl(file, fcntl.F_DUPFD, 20) for file in files]
        reports = fcntl.fcntl(self.reports_end, fcntl.F_DUPFD_CLOEXEC, 20)
        for number, copy in enumerate(copies):
            os.dup2(copy, number, inheritable=True)
        # Its end tells the launcher that the program has started.
        os.dup2(reports, VALUES_FILE + 1, inheritable=False)
        self.reports_end = VALUES_FILE + 1
        os.closerange(VALUES_FILE + 2, 4096)

    def _report(self, line: str) -> None:
        with suppress(OSError):
            os.write(self.reports_end, f"{line}\n".encode())


def interpreter() -> str:
    """Python itself, without the links of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _reason(problem: OSError) -> str:
    """What failed, in one line; errors of `kernel` name their call themselves."""
    text = problem.strerror or str(problem)
    if problem.filename is not None:
        text = f"{problem.filename}: {text}"
    return " ".join(text.split())


def _memory_file(name: str, content: bytes) -> int:
    """A file in memory that holds this, read from its start."""
    file = os.memfd_create(name)
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(file, remaining) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _next_line(file: int, received: bytearray, deadline: float) -> str | None:
    """The next line of a pipe; None at its end."""
    while b"\n" not in received:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([file], [], [], remaining)[0]:
            raise SystemRefusal(f"it was not ready within {START_SECONDS:g} s")
        piece = os.read(file, 4096)
        if not piece:
            return None
        received += piece
    line, _, rest = bytes(received).partition(b"\n")
    received[:] = rest
    return line.decode("utf-8", "replace")


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as problem:
        raise SystemRefusal(f"users of a new user namespace ({path}): {problem.strerror}") from None


def _make_parents(path: str) -> None:
    os.makedirs(os.path.dirname(ROOT + path), mode=0o755, exist_ok=True)


def _mount_again(path: str, attributes: int) -> None:
    """Show a file or folder under the same path, read-only."""
    target = ROOT + path
    _make_parents(path)
    if stat.S_ISDIR(os.stat(path).st_mode):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(path, target, None, kernel.MOUNT_BIND | kernel.MOUNT_RECURSIVE)
    kernel.make_read_only(target, attributes)


if __name__ == "__main__":
    sys.exit(main())
