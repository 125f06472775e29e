"""Only regular files are opened where a user names one; a pipe that the shell has opened is read once."""

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headway.config.regular_file import NOT_A_FILE
from headway.errors import HeadwayError
from headway.infer.batch_files import BatchOutput, read_lines, settings_file
from headway.infer.generate import read_prompts
from headway.launch.slurm_plan import read_elements
from headway.model.loading.untrusted import open_pickled
from headway.rollout.journal import FILE, RolloutJournal, read_journal
from headway.store.memory_map import map_file
from headway.text.raw import RawFile
from headway.text.ruler_files import _lines
from headway.text.section import FileSection

pytestmark = pytest.mark.timeout(30)


def read_stream(raw: RawFile) -> bytes:
    with raw.open() as stream:
        return stream.read()


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "the journal of a resumed run": (FILE, lambda path: RolloutJournal.open(path.parent)),
    "the journal of a report": (FILE, lambda path: list(read_journal(path.parent))),
    "prompts": ("prompts.txt", read_prompts),
    "lines of a batch": ("lines.jsonl", lambda path: list(read_lines(path))),
    "a file of data": ("data.jsonl", lambda path: read_stream(RawFile.at(path))),
    "a part of a file of data": ("data.jsonl", lambda path: FileSection(path, 0, 9).open()),
    "a shard of a store": ("tokens-00000.bin", map_file),
    "pickled weights": ("pytorch_model.bin", open_pickled),
    "words": ("nouns.txt", _lines),
    "a set of overrides": ("sets.txt", lambda path: read_elements([str(path)])),
}


@pytest.mark.parametrize("name", READERS)
def test_nobody_waits_for_a_named_pipe(tmp_path: Path, name: str) -> None:
    file, reader = READERS[name]
    pipe = tmp_path / file
    os.mkfifo(pipe)
    with pytest.raises((OSError, HeadwayError), match="a device or a pipe"):
        reader(pipe)


def test_answers_are_not_written_into_a_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "answers.jsonl"
    os.mkfifo(pipe)
    with (
        pytest.raises(HeadwayError, match=NOT_A_FILE) as refusal,
        BatchOutput(pipe, {"model": "m"}),
    ):
        pass
    assert "\n" not in str(refusal.value)
    assert not settings_file(pipe).exists()


def test_prompts_come_from_a_pipe_that_the_shell_opened() -> None:
    with ExitStack() as opened:
        reading, writing = os.pipe()
        opened.callback(os.close, reading)

        def write() -> None:
            with open(writing, "w") as pipe:
                pipe.write("one\n")
                pipe.flush()
                pipe.write("two\n")

        writer = threading.Thread(target=write)
        writer.start()
        opened.callback(writer.join)
        # What `--prompts-file <(command)` names.
        assert read_prompts(Path(f"/dev/fd/{reading}")) == ["one", "two"]


def test_a_file_that_the_shell_opened_is_read_from_its_start(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    with open(file, "rb") as stream:
        path = Path(f"/dev/fd/{stream.fileno()}")
        assert read_prompts(path) == ["one", "two"]
        assert read_prompts(path) == ["one", "two"], "a second reader finds the same"


def test_a_descriptor_that_nobody_opened_is_one_line() -> None:
    with pytest.raises(HeadwayError, match="prompts-file is '/dev/fd/987'") as refusal:
        read_prompts(Path("/dev/fd/987"))
    assert "\n" not in str(refusal.value)
