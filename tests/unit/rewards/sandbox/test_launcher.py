"""A program in a sandbox meets nothing of this machine, and nothing of it is left."""

import os
import platform
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sandboxes import LIMITS, why_no_sandbox

from headway.rewards.sandbox import launcher
from headway.rewards.sandbox.client import SandboxClient, SandboxRefusal
from headway.rewards.sandbox.expression import Step
from headway.rewards.sandbox.trials import RunResult

needs_sandbox = pytest.mark.skipif(why_no_sandbox() is not None, reason=str(why_no_sandbox()))


@pytest.fixture(scope="module")
def client() -> Iterator[SandboxClient]:
    opened = SandboxClient(LIMITS)
    yield opened
    opened.close()


def output(client: SandboxClient, program: str, stdin: str = "", seconds: float = 20.0) -> str:
    result = client.run(program, None, stdin, seconds)
    assert result.status == "ended"
    return result.output


@needs_sandbox
def test_a_program_reads_stdin_and_prints(client: SandboxClient) -> None:
    assert client.run("print(input()[::-1])", None, "abc", 20.0) == RunResult("ended", 0, "cba\n")


@needs_sandbox
def test_the_mask_of_a_shell_does_not_matter() -> None:
    mask = os.umask(0o077)
    try:
        with_mask = SandboxClient(LIMITS)
        try:
            assert output(with_mask, "print(7)") == "7\n"
        finally:
            with_mask.close()
    finally:
        os.umask(mask)


@needs_sandbox
def test_an_exit_code_arrives(client: SandboxClient) -> None:
    assert client.run("import sys; sys.exit(3)", None, "", 20.0).code == 3


@needs_sandbox
def test_the_root_has_libraries_and_tmp_alone(client: SandboxClient) -> None:
    names = set(output(client, "import os; print(*os.listdir('/'))").split())
    assert not names & {"proc", "sys", "home", "var", "run", "boot", "mnt", "srv"}
    assert output(client, "import os; print(os.listdir('/tmp'), os.getcwd())") == "[] /tmp\n"
    assert output(client, "import os; print(os.listdir('/etc'))").strip() in (
        "['ld.so.cache']",
        "[]",
    )


@needs_sandbox
def test_the_environment_is_empty_but_for_five_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_OWN_VARIABLE", "seen")
    opened = SandboxClient(LIMITS)
    try:
        names = output(opened, "import os; print(*os.environ)").split()
    finally:
        opened.close()
    assert sorted(names) == ["HOME", "LANG", "PATH", "PYTHONHASHSEED", "TMPDIR"]


@needs_sandbox
def test_no_file_is_open_but_stdin_stdout_stderr(client: SandboxClient) -> None:
    program = """
import os
for number in range(64):
    try:
        os.fstat(number)
        print(number)
    except OSError:
        pass
"""
    assert output(client, program).split() == ["0", "1", "2"]


@needs_sandbox
def test_nothing_outside_of_tmp_can_be_written(client: SandboxClient) -> None:
    program = """
import os, sys
for folder in ("/", "/dev", "/etc", "/usr/lib", os.path.dirname(os.__file__)):
    try:
        open(folder + "/new", "w")
        print("wrote", folder)
    except OSError:
        pass
"""
    assert output(client, program) == ""


@needs_sandbox
def test_tmp_is_bounded_and_empty_again(client: SandboxClient) -> None:
    program = """
written = 0
try:
    for number in range(100):
        with open(f"/tmp/{number}", "wb") as file:
            for _ in range(4):
                written += file.write(bytes(1 << 20))
except OSError as problem:
    print(problem.errno, written >> 20)
"""
    errno, written = output(client, program).split()
    assert errno == "28"
    assert int(written) <= 16
    assert output(client, "import os; print(os.listdir('/tmp'))") == "[]\n"


@needs_sandbox
def test_no_socket_reaches_this_machine(client: SandboxClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), 2)
    print("connected")
except OSError as problem:
    print(type(problem).__name__)
for family in (16, 17, 38, 40):
    try:
        socket.socket(family, socket.SOCK_RAW)
        print("family", family)
    except OSError:
        pass
"""
        assert "connected" not in output(client, program)
        assert "family" not in output(client, program)


CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, *values):
    result = getattr(libc, name)(*values)
    print(name, result, ctypes.get_errno())
refused("ptrace", 16, 1, 0, 0)
refused("unshare", 0x10000000)
refused("mount", b"none", b"/tmp", b"tmpfs", 0, None)
refused("memfd_create", b"x", 0)
refused("shmget", 0, 4096, 0o1600)
refused("process_vm_readv", 1, None, 0, None, 0, 0)
refused("setuid", 0)
"""


@needs_sandbox
def test_calls_to_other_processes_and_mounts_are_refused(client: SandboxClient) -> None:
    for line in output(client, CALLS).splitlines():
        assert line.split()[1] == "-1", line


@needs_sandbox
def test_it_has_no_rights_and_gets_none(client: SandboxClient) -> None:
    program = """
import ctypes
libc = ctypes.CDLL(None)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
libc.capget(header, data)
print(list(data), libc.prctl(39, 0, 0, 0, 0), libc.prctl(23, 21, 0, 0, 0))
"""
    # No capability, no new privileges, and CAP_SYS_ADMIN is out of bounds.
    assert output(client, program) == "[0, 0, 0, 0, 0, 0] 1 0\n"


@needs_sandbox
def test_it_sees_itself_and_the_first_process_alone(client: SandboxClient) -> None:
    program = """
import os, signal
print(os.getpid(), os.getppid(), os.getuid())
for number in (1, 9):
    try:
        os.kill(1, number)
    except PermissionError:
        pass
print("alive")
"""
    assert output(client, program) == "2 1 1000\nalive\n"


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ntime.sleep(100)",
        "import os\nos.close(1)\nimport time\ntime.sleep(100)",
    ],
)
def test_all_of_it_ends_at_the_limit(client: SandboxClient, program: str) -> None:
    started = time.monotonic()
    assert client.run(program, None, "", 0.7).status == "time"
    assert time.monotonic() - started < 5
    assert output(client, "print(1)") == "1\n"


@needs_sandbox
def test_a_process_that_it_leaves_behind_ends_with_it(client: SandboxClient) -> None:
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint('x')"
    )
    started = time.monotonic()
    assert output(client, program) == "x\n"
    assert time.monotonic() - started < 10


@needs_sandbox
def test_processes_are_bounded(client: SandboxClient) -> None:
    program = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(100)
        count += 1
except OSError:
    print(count)
"""
    assert int(output(client, program)) < LIMITS["processes"]


@needs_sandbox
def test_memory_is_bounded(client: SandboxClient) -> None:
    program = "try:\n    x = bytearray(2 << 30)\nexcept MemoryError:\n    print('no')"
    assert output(client, program) == "no\n"


@needs_sandbox
def test_a_large_output_ends_the_program(client: SandboxClient) -> None:
    assert client.run("while True: print('x' * 1000)", None, "", 20.0).status == "output"


@needs_sandbox
def test_values_are_sent_apart_from_what_is_printed(client: SandboxClient) -> None:
    steps = [Step("run", "x = 3"), Step("value", "f(x)")]
    program = 'print(\'{"values": [["int", "0x9"]]}\')\ndef f(x):\n    print(x)\n    return x'
    result = client.run(program, steps, "", 20.0)
    assert result.output == '{"values": [["int", "0x3"]]}'


@needs_sandbox
def test_the_library_of_python_works(client: SandboxClient) -> None:
    program = """
import collections, heapq, hashlib, itertools, json, math, random, re, sqlite3, subprocess, threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Lock
Lock()
with ThreadPoolExecutor(2) as pool:
    print(list(pool.map(abs, [-1, -2])))
exit()
"""
    assert output(client, program) == "[1, 2]\n"


@needs_sandbox
def test_two_launchers_work_at_the_same_time() -> None:
    clients = [SandboxClient(LIMITS) for _ in range(2)]
    outputs: list[str] = []

    def work(client: SandboxClient) -> None:
        for number in range(3):
            outputs.append(output(client, f"print({number})"))

    threads = [threading.Thread(target=work, args=(each,)) for each in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in clients:
        each.close()
    assert sorted(outputs) == ["0\n", "0\n", "1\n", "1\n", "2\n", "2\n"]


@needs_sandbox
def test_further_folders_can_be_read_and_imported(tmp_path: Path) -> None:
    (tmp_path / "my_package.py").write_text("value = 7\n")
    os.chmod(tmp_path, 0o755)
    opened = SandboxClient({**LIMITS, "folders": [str(tmp_path)]})
    try:
        assert output(opened, "import my_package; print(my_package.value)") == "7\n"
        assert opened.run(f"open({str(tmp_path / 'x')!r}, 'w')", None, "", 20.0).code == 1
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("machine", "release", "words"),
    [
        ("riscv64", "6.1.0", "riscv64"),
        ("x86_64", "5.4.0-generic", "5.14"),
        ("x86_64", "4.18", "5.14"),
    ],
)
def test_a_system_without_sandboxes_is_named(
    monkeypatch: pytest.MonkeyPatch, machine: str, release: str, words: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "release", lambda: release)
    with pytest.raises(launcher.SystemRefusal, match=words):
        launcher.check_system()


def test_a_launcher_that_ends_is_one_line() -> None:
    opened = SandboxClient(LIMITS)
    opened._process = opened._start()
    opened._process.kill()
    opened._process.wait()
    with pytest.raises(SandboxRefusal, match="has ended"):
        opened.run("", None, "", 5.0)
