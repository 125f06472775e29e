"""On Windows the command and the import each say in one line that WSL is needed, before anything that Windows lacks is imported."""

import subprocess
import sys

import pytest

SIMULATED = "import sys; sys.platform = 'win32'; [sys.modules.__setitem__(name, None) for name in ('fcntl', 'resource')]; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SIMULATED + code], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("argv", [r"C:\\Users\\me\\Scripts\\headway.exe", "headway"])
def test_the_command_names_wsl(argv: str) -> None:
    done = run(f"sys.argv = [{argv!r}, 'train']; from headway.__main__ import run; run()")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: headway runs on Linux and macOS. On Windows use it inside WSL"
    )
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_the_import_names_wsl() -> None:
    done = run("import headway")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: headway runs on Linux and macOS.")
