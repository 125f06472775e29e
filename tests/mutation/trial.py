"""One mutant, one verdict: tests run in a fork of this process, on a copy of the tree in which one function is changed.

The parent has torch and whatever else the tests load from outside in memory, but nothing of headway, so that a fork imports the changed
package within a second. The working tree is never touched; children of the tests find the copy through PYTHONPATH.
"""

from __future__ import annotations

import compileall
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from catalogue import Mutant
from source import PACKAGE

COPIED = ("src", "tests", "recipes", "docs", "benchmarks", "pyproject.toml", "Makefile")
PAGES = "*.md"
OPTIONS = (
    "-x",
    "-m",
    "not drill and not gpu and not cluster",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--no-header",
    "--tb=short",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
PRELOADED = "import support.ranks, support.runs, headway.train.build, headway.cli, hypothesis, pytest_timeout"
MOST_BYTES = 6 << 30
"""Memory of one trial: a mutant may fill it without end."""
KILLED, SURVIVED, BROKEN = "killed", "survived", "broken"


class Copy:
    """A copy of the tree for one trial at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".pytest_cache", "mutation")
        for name in (*COPIED, *(page.name for page in root.glob(PAGES))):
            source = root / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignored)
            elif source.is_file():
                shutil.copy2(source, folder / name)
        compileall.compile_dir(folder / PACKAGE, quiet=2)

    def change(self, mutant: Mutant) -> None:
        """Put the mutant in; the old bytecode goes, since a file of the same second and size would be taken for the same."""
        path = mutant.source(self.folder)
        self.restored = (path, path.read_text(encoding="utf-8"))
        _drop_bytecode(path)
        path.write_text(mutant.text, encoding="utf-8")

    def restore(self) -> None:
        """Take the mutant out."""
        path, text = self.restored
        _drop_bytecode(path)
        path.write_text(text, encoding="utf-8")
        compileall.compile_file(path, quiet=2, force=True)


def _drop_bytecode(path: Path) -> None:
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def preload(root: Path) -> None:
    """Load here what the tests load from outside the tree."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    program = f"{PRELOADED}\nimport sys, json\nprint(json.dumps(list(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    own = ("headway", "support", "__main__", "__mp_main__")
    for name in json.loads(done.stdout.splitlines()[-1]):
        if name.partition(".")[0] not in own and name not in sys.modules:
            try:
                importlib.import_module(name)
            except Exception:  # a module that only another one can load
                continue
    assert not any(name.partition(".")[0] == "headway" for name in sys.modules)


class Trial:
    """Tests under way in a fork."""

    def __init__(
        self,
        copy: Copy,
        targets: Sequence[str],
        module: str | None,
        limit_seconds: float,
        stop_at_first: bool = True,
    ) -> None:
        self.copy, self.began, self.limit = copy, time.monotonic(), limit_seconds
        self.answer = copy.folder / "answer.json"
        self.answer.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(copy.folder, targets, module, stop_at_first)

    def result(self) -> dict[str, Any] | None:
        """The outcome once the fork has ended, or was ended because it took too long."""
        seconds = time.monotonic() - self.began
        ended = os.waitpid(self.pid, os.WNOHANG)[0]
        if not ended and seconds <= self.limit:
            return None
        self.stop()
        if not ended:
            os.waitpid(self.pid, 0)
            # a test that no longer ends has noticed
            return {
                "outcome": KILLED,
                "by": f"no end after {self.limit:.0f} s",
                "seconds": round(seconds, 1),
                "failed": [],
            }
        found: dict[str, Any] = {
            "outcome": BROKEN,
            "by": "the process of the tests died",
            "failed": [],
        }
        if self.answer.exists():
            found = json.loads(self.answer.read_text(encoding="utf-8"))
        return {**found, "seconds": round(seconds, 1)}

    def stop(self) -> None:
        """End it and whatever its tests have started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Recorder:
    """Which tests failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        self.passed += report.when == "call" and report.passed


def _run(folder: Path, targets: Sequence[str], module: str | None, stop_at_first: bool) -> None:
    """In the fork: run pytest and leave the answer in a file."""
    found: dict[str, Any] = {"outcome": BROKEN, "by": "", "failed": []}
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        sys.dont_write_bytecode = True
        sys.modules["__main__"] = ModuleType(
            "__main__"
        )  # processes that tests spawn run the main module again
        source = str(folder / "src")
        sys.path[:] = [source, *(path for path in sys.path if path != str(Path(__file__).parent))]
        os.environ.update(
            PYTHONPATH=source,
            PYTHONDONTWRITEBYTECODE="1",
            HYPOTHESIS_STORAGE_DIRECTORY=str(folder / ".hypothesis"),
            COLUMNS="120",
        )
        found = _answer(targets, module, stop_at_first)
    except BaseException as problem:
        found["by"] = f"{type(problem).__name__}: {problem}"
    finally:
        (folder / "answer.json").write_text(json.dumps(found), encoding="utf-8")
        os._exit(0)


def _answer(targets: Sequence[str], module: str | None, stop_at_first: bool) -> dict[str, Any]:
    import pytest

    if module is not None:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as problem:
            if (problem.name or "").startswith("headway"):
                raise
    recorder = Recorder()
    options = OPTIONS if stop_at_first else OPTIONS[1:]
    code = int(pytest.main([*options, *targets], plugins=[recorder]))
    if code == 1 and recorder.failed:
        return {"outcome": KILLED, "by": recorder.failed[0], "failed": recorder.failed}
    if code == 0:
        return {"outcome": SURVIVED, "by": "", "failed": [], "passed": recorder.passed}
    return {
        "outcome": BROKEN,
        "by": f"pytest ended with {code}; see the output",
        "failed": recorder.failed,
    }
