"""Nothing that lies in the working directory or in somebody's repository is run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.errors import ConfigError, hide_credentials
from headway.runtime.machine import git_state
from headway.runtime.process import headway_command, safe_environment

SOURCE = Path(__file__).parents[3] / "src" / "headway"
POOL = """
from headway.runtime.process import worker_pool
if __name__ == '__main__':
    with worker_pool(1) as pool:
        print(pool.submit(abs, -3).result())
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder in which every module that Python loads at a start has an evil namesake."""
    for name in ("random", "tempfile", "multiprocessing", "typer", "signal", "runpy", "headway"):
        (tmp_path / f"{name}.py").write_text("open('planted', 'w').close()\nraise SystemExit(9)\n")
    return tmp_path


def run(
    command: list[str], folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_child_of_headway_imports_nothing_from_the_working_directory(planted: Path) -> None:
    done = run(headway_command(["--version"]), planted)
    assert done.returncode == 0 and done.stdout.startswith("headway "), done.stderr
    assert not (planted / "planted").exists()


def test_without_the_protection_the_planted_module_would_run(planted: Path) -> None:
    run([sys.executable, "-m", "headway", "--version"], planted)
    assert (planted / "planted").exists()


def test_workers_import_nothing_from_the_working_directory(planted: Path) -> None:
    script = planted.parent / "pool.py"
    script.write_text(POOL)
    done = run([sys.executable, str(script)], planted)
    assert done.stdout == "3\n", done.stderr
    assert not (planted / "planted").exists()


def test_a_supervised_torchrun_is_protected_and_another_command_is_left_alone() -> None:
    assert safe_environment(
        ["torchrun", "--nproc-per-node", "2", "-m", "headway", "train"], {"A": "1"}
    ) == {
        "A": "1",
        "PYTHONSAFEPATH": "1",
    }
    assert safe_environment(["python", "my_training.py"], {"A": "1"}) == {"A": "1"}


def test_every_start_of_headway_goes_through_one_function() -> None:
    starters = [
        path.name
        for path in SOURCE.rglob("*.py")
        if '"-m", "headway", ' in path.read_text(encoding="utf-8")
    ]
    assert starters == ["process.py"]
    pools = [
        path.name
        for path in SOURCE.rglob("*.py")
        if "ProcessPoolExecutor(" in path.read_text(encoding="utf-8")
    ]
    assert pools == ["process.py"]


def test_no_program_that_a_repository_names_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    evil = tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path}/planted\ncat\n")
    evil.chmod(0o755)
    folder = tmp_path / "repository"

    def git(*arguments: str) -> None:
        line = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
        subprocess.run(line, check=True, capture_output=True)

    folder.mkdir()
    git("init", "-q")
    (folder / "file").write_text("one")
    (folder / ".gitattributes").write_text("file filter=evil\n")
    git("add", ".")
    git("commit", "-qm", "first")
    for key in ("core.fsmonitor", "filter.evil.clean", "filter.evil.process"):
        git("config", key, str(evil))
    git("config", "filter.evil.required", "true")
    (folder / "file").write_text("two")
    os.utime(folder / "file", (1, 1))
    state = git_state(folder)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["changed"] is True
    assert not (tmp_path / "planted").exists()


def test_no_error_shows_the_password_of_an_address() -> None:
    shown = str(
        ConfigError(
            "s3: cannot reach https://user:hunter2@store.example:9000/bucket and http://a:b@c"
        )
    )
    assert hide_credentials("https:/user:hunter2@x/y") == "https:/***@x/y"
    assert shown == "s3: cannot reach https://***@store.example:9000/bucket and http://***@c"
    assert (
        hide_credentials("runs/a@0.3 and https://x.example/@me")
        == "runs/a@0.3 and https://x.example/@me"
    )


def test_workers_do_not_run_a_script_again_that_has_no_guard(tmp_path: Path) -> None:
    script = "from headway.runtime.process import worker_pool\nprint('once')\n"
    script += "with worker_pool(1) as pool:\n    print(pool.submit(abs, -3).result())\n"
    (tmp_path / "script.py").write_text(script + "print(__file__)\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == f"once\n3\n{tmp_path / 'script.py'}\n", done.stderr
