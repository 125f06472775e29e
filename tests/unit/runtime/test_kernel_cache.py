"""Compiled kernels are kept below the user's cache folder, unless the user says otherwise or nothing can be written there."""

import os
from pathlib import Path

import pytest

from headway.runtime import kernel_cache
from headway.runtime.kernel_cache import INDUCTOR, TRITON, keep_kernels


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; nothing is set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Set first, so that what the function sets is taken back.
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path


def test_kernels_lie_below_the_users_cache_folder(cache: Path) -> None:
    keep_kernels()
    folder = Path(os.environ[INDUCTOR])
    assert folder.parent == cache / "headway" / "kernels"
    assert Path(os.environ[TRITON]) == folder / "triton"
    assert not folder.exists(), "it is made by what compiles"
    keep_kernels()
    assert Path(os.environ[INDUCTOR]) == folder


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv(TRITON, "/triton")
    keep_kernels()
    assert os.environ[TRITON] == "/triton"
    monkeypatch.delenv(TRITON)
    monkeypatch.setenv(INDUCTOR, "/inductor")
    keep_kernels()
    assert os.environ[INDUCTOR] == "/inductor"
    assert TRITON not in os.environ, "Inductor puts Triton's kernels beside its own"


def test_a_home_that_cannot_be_written_leaves_the_libraries_their_own_choice(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    file = cache / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file / "below"))
    keep_kernels()
    assert INDUCTOR not in os.environ


def test_another_processor_has_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    this = kernel_cache._processor()
    assert this == kernel_cache._processor()
    monkeypatch.setattr("platform.machine", lambda: "another")
    assert kernel_cache._processor() != this
