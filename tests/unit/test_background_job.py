"""The tests themselves as a background job: a shell starts it with SIGINT ignored, and every process that a test starts inherits that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

IGNORING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
TESTS = """
import signal, subprocess, sys

def test_this_process_and_what_it_starts_can_be_interrupted():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    program = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(20)"
    assert subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode == -signal.SIGINT
"""


@pytest.mark.parametrize(
    "workers", [[], pytest.param(["-n", "1"], marks=pytest.mark.slow)], ids=["alone", "in a worker"]
)
def test_tests_that_interrupt_what_they_start_work_where_the_shell_ignores_sigint(
    tmp_path: Path, workers: list[str]
) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "test_interrupts.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        (root / "tests/conftest.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    command = [
        sys.executable,
        "-c",
        IGNORING,
        "-m",
        "pytest",
        "-c",
        str(root / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        *workers,
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }
    done = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
