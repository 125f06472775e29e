"""Output that nobody can read costs a run nothing: a reader that has left, a full disk behind a redirection, a closed descriptor."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_command import Forked
from support.runs import make_stores, tiny_settings


@pytest.fixture(params=["closed pipe", "full"])
def dead(request: pytest.FixtureRequest) -> Iterator[int]:
    if request.param == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, descriptor = os.pipe()
        os.close(reading)
    yield descriptor
    os.close(descriptor)


def test_training_continues_when_its_log_cannot_be_written(tmp_path: Path, dead: int) -> None:
    make_stores(tmp_path)
    code = Forked(
        "train", *tiny_settings(tmp_path, "quiet"), "steps=4", "log.every=1", out=dead, err=dead
    ).wait()
    assert code == 0
    assert (tmp_path / "quiet" / "checkpoints" / "step-00000004" / "manifest.json").is_file()
    assert "4/4" in (tmp_path / "quiet" / "train.log").read_text(), (
        "the log in the run folder is whole"
    )


def test_json_that_cannot_be_written_leaves_the_exit_code_of_training(
    tmp_path: Path, dead: int
) -> None:
    make_stores(tmp_path)
    done = Forked("train", *tiny_settings(tmp_path, "json"), "steps=2", "--json", out=dead)
    assert done.wait() == 0
    assert "standard output" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_supervisor_nobody_reads_restarts_its_command(tmp_path: Path, dead: int) -> None:
    state = tmp_path / "crashed"
    script = f"import os, sys; p = {str(state)!r}; sys.exit(0) if os.path.exists(p) else (open(p, 'w').close(), sys.exit(1))"
    code = Forked(
        "supervise", "--backoff", "0", "--", sys.executable, "-c", script, out=dead, err=dead
    ).wait()
    assert code == 0
    assert state.exists()


def test_a_verb_whose_reader_has_left_ends_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = Forked("list", "--json", out=writing)
    os.close(writing)
    assert done.wait() == 0
    assert done.stderr == ""


def test_a_result_for_a_full_disk_is_one_error() -> None:
    with open("/dev/full", "wb") as full:
        done = Forked("list", out=full.fileno())
        assert done.wait() == 1
    assert (
        done.stderr
        == "error: standard output cannot be written: No space left on device. Free some space or choose another disk.\n"
    )


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2>&- >&- <&-"])
def test_a_fresh_interpreter_ends_with_the_right_code(tmp_path: Path, redirection: str) -> None:
    """At its very end the interpreter flushes what is left, and turns a failure into exit code 120."""
    out = tmp_path / "config.yaml"
    line = f'"$0" -m headway config show steps=3 {redirection}' + (
        "" if ">&- <" in redirection else f" > {out}"
    )
    done = subprocess.run(["sh", "-c", line, sys.executable], timeout=60, check=False)
    assert done.returncode == 0
    if out.exists():
        assert "steps: 3" in out.read_text()


def test_a_second_line_is_written_once_the_stream_works_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from headway.runtime.output import Lossy

    class Flaky:
        works = False
        lines = list[str]()

        def write(self, text: str) -> int:
            if not self.works:
                raise OSError(28, "No space left on device")
            self.lines.append(text)
            return len(text)

        def flush(self) -> None: ...

    stream = Flaky()
    lossy = Lossy(stream)  # type: ignore[arg-type]
    lossy.write("lost\n")
    stream.works = True
    lossy.write("seen\n")
    assert stream.lines == ["seen\n"]


def test_json_of_list_is_whole_on_a_working_output() -> None:
    done = Forked("list", "--json")
    assert done.wait() == 0
    assert json.loads(done.stdout)
