"""The journal of sampled answers: what was added is read again, whatever a kill, a full disk or a damaged line left."""

import errno
import json
import os
import resource
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.errors import DataError
from headway.rollout.journal import (
    DAMAGED_FILE,
    FILE,
    KeptIds,
    RewardedBatch,
    RolloutJournal,
    SampledAnswer,
    SampledBatch,
    ScoredBatch,
    read_journal,
)


def sampled(batch: int, text: str = "Käse \ud800 \x00\n") -> SampledBatch:
    """Two answers, one of a text that no encoding of its own has."""
    answers = tuple(
        SampledAnswer(
            7,
            number,
            (3 + batch, 70_000, number),
            np.array([-0.1, -2.5e-8, -1e4 - number], np.float32),
            "length" if number else "eos",
            text,
        )
        for number in range(2)
    )
    return SampledBatch(batch, 2 * batch, f"digest {batch}", ("a", "b"), answers, 0.25)


def rewarded(batch: int, total: float = 0.1) -> RewardedBatch:
    return RewardedBatch(
        batch, "rewards", (total, -1.0), ({"math": total}, {}), ((), ("it failed",)), 0.5
    )


def scored(batch: int) -> ScoredBatch:
    old = tuple(np.array([-0.5, -0.25, n], np.float32) for n in range(2))
    return ScoredBatch(batch, 2 * batch, old, (0.1, 1 / 3))


def plain(record: SampledBatch | None) -> object:
    """A batch with lists for its arrays, which cannot be compared as they are."""
    assert record is not None
    answers = [(a.prompt, a.sample, a.ids, a.logprobs.tolist(), a.finished, a.text) for a in record.answers]  # fmt: skip
    return (record.batch, record.version, record.digest, record.prompts, record.seconds, answers)


def filled(folder: Path, batches: int = 3) -> RolloutJournal:
    journal = RolloutJournal.open(folder)
    for batch in range(batches):
        journal.add(sampled(batch))
        journal.add(rewarded(batch))
        journal.add(scored(batch))
    return journal


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    for journal in (filled(tmp_path), RolloutJournal.open(tmp_path)):
        for batch in range(3):
            assert plain(journal.answers(batch)) == plain(sampled(batch))
            assert journal.rewards(batch) == rewarded(batch)
            scores = journal.scores(batch)
            assert scores is not None
            assert [values.tolist() for values in scores.old] == [
                values.tolist() for values in scored(batch).old
            ]
            assert (scores.version, scores.divergence) == (2 * batch, (0.1, 1 / 3))
        assert journal.answers(3) is None
        assert journal.rewards(3) is None
        assert journal.scores(3) is None


def test_kept_ids_are_read_again(tmp_path: Path) -> None:
    """Ascending for each token, from any part of a large vocabulary."""
    kept = KeptIds(
        np.array([3, 1, 2], np.int32), np.array([0, 17, 151_000, 5, 4, 151_935], np.int32)
    )
    cut = sampled(0)
    cut = replace(cut, answers=tuple(replace(answer, kept=kept) for answer in cut.answers))
    RolloutJournal.open(tmp_path).add(cut)
    found = RolloutJournal.open(tmp_path).answers(0)
    assert found is not None
    for answer in found.answers:
        assert answer.kept is not None
        assert [ids.tolist() for ids in answer.kept.of_tokens()] == [
            [0, 17, 151_000],
            [5],
            [4, 151_935],
        ]


def test_a_folder_without_a_journal_has_no_batches_and_gets_no_file(tmp_path: Path) -> None:
    assert RolloutJournal.open(tmp_path).answers(0) is None
    assert list(read_journal(tmp_path)) == []
    RolloutJournal.open(tmp_path).forget_from(0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [1, 5, 40, -1])
def test_what_a_kill_left_of_a_line_is_removed(
    left: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, 2)
    path = tmp_path / FILE
    whole = path.read_bytes()
    (tmp_path / "other").mkdir()
    filled(tmp_path / "other", 3)
    line = (tmp_path / "other" / FILE).read_bytes()[len(whole) :].splitlines(True)[0]
    path.write_bytes(whole + line[:left])
    journal = RolloutJournal.open(tmp_path)
    assert path.read_bytes() == whole
    assert journal.answers(2) is None
    assert journal.rewards(1) == rewarded(1)
    assert "no whole line" in caplog.text
    journal.add(sampled(2))
    assert plain(RolloutJournal.open(tmp_path).answers(2)) == plain(sampled(2))


def damage(path: Path, index: int) -> list[bytes]:
    """Flip a bit of a line; returns the lines as they are now."""
    lines = path.read_bytes().splitlines(True)
    line = bytearray(lines[index])
    line[30] ^= 1
    lines[index] = bytes(line)
    path.write_bytes(b"".join(lines))
    return lines


def test_a_line_that_was_damaged_ends_what_is_known_and_later_lines_are_kept_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    path = tmp_path / FILE
    lines = damage(path, 4)
    journal = RolloutJournal.open(tmp_path)
    assert plain(journal.answers(1)) == plain(sampled(1))
    assert journal.rewards(1) is None
    assert journal.answers(2) is None
    assert path.read_bytes() == b"".join(lines[:4])
    assert (tmp_path / DAMAGED_FILE).read_bytes() == b"".join(lines[4:])
    assert len(caplog.messages) == 1
    assert "line 5 is damaged; it and what follows (4 whole lines)" in caplog.text
    journal.add(rewarded(1))
    assert RolloutJournal.open(tmp_path).rewards(1) == rewarded(1)


def test_a_reader_leaves_out_the_damaged_line_alone_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    path = tmp_path / FILE
    content = b"".join(damage(path, 4))
    batches = list(read_journal(tmp_path))
    assert [each.batch for each, _ in batches] == [0, 1, 2]
    assert [rewards for _, rewards in batches] == [rewarded(0), None, rewarded(2)]
    assert path.read_bytes() == content
    assert caplog.messages == [f"{path}: line 5 is damaged and left out"]


def test_a_journal_says_what_made_its_answers(tmp_path: Path) -> None:
    batch = replace(sampled(0), start=3, tokenizer="words", templates=("one", "two"), seed=17)
    mask = np.array([True, False, True])
    batch = replace(batch, answers=(replace(batch.answers[0], mask=mask), batch.answers[1]))
    RolloutJournal.open(tmp_path).add(batch)
    known = RolloutJournal.open(tmp_path).answers(0)
    assert known is not None
    assert (known.start, known.first_step, known.seed) == (3, 4, 17)
    assert (known.tokenizer, known.templates) == ("words", ("one", "two"))
    assert known.answers[0].mask is not None
    assert known.answers[0].mask.tolist() == [True, False, True]
    assert known.answers[1].mask is None


def test_a_journal_of_the_first_release_is_read(tmp_path: Path) -> None:
    """Its lines have no mask, seed, tokenizer or templates."""
    record = json.loads(_line_of(tmp_path, sampled(4)))
    for name in ("start", "seed", "tokenizer", "templates"):
        del record[name]
    for entry in record["answers"]:
        del entry["mask"]
    data = json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass")
    (tmp_path / FILE).write_bytes(b"%08x " % zlib.crc32(data) + data + b"\n")
    journal = RolloutJournal.open(tmp_path)
    known = journal.answers(4)
    assert plain(known) == plain(sampled(4))
    assert known is not None
    assert known.first_step == known.version + 1
    assert (known.seed, known.tokenizer, known.templates) == (None, "", ())
    assert known.answers[0].mask is None


def _line_of(folder: Path, batch: SampledBatch) -> str:
    """The JSON of a line."""
    (folder / "line").mkdir()
    RolloutJournal.open(folder / "line").add(batch)
    line = (folder / "line" / FILE).read_bytes()
    return line[9:].decode("utf-8", "surrogatepass")


def test_a_line_that_changes_while_the_run_is_open_is_refused(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    path = tmp_path / FILE
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="line at byte 0 was changed"):
        journal.answers(0)
    assert journal.rewards(2) == rewarded(2)


def test_a_batch_that_is_forgotten_takes_all_later_ones_with_it(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    size = sum(map(len, (tmp_path / FILE).read_bytes().splitlines(True)[:3]))
    journal.forget_from(1)
    assert (tmp_path / FILE).stat().st_size == size
    for each in (journal, RolloutJournal.open(tmp_path)):
        assert plain(each.answers(0)) == plain(sampled(0))
        assert each.answers(1) is None
        assert each.answers(2) is None
    journal.add(sampled(1, "again"))
    assert RolloutJournal.open(tmp_path).answers(1) is not None
    assert RolloutJournal.open(tmp_path).rewards(1) is None


def test_new_answers_of_a_batch_have_no_rewards_of_the_old_ones(tmp_path: Path) -> None:
    journal = filled(tmp_path, 1)
    journal.add(sampled(0, "again"))
    for each in (journal, RolloutJournal.open(tmp_path)):
        assert plain(each.answers(0)) == plain(sampled(0, "again"))
        assert each.rewards(0) is None
        assert each.scores(0) is None


def test_rewards_that_were_asked_again_replace_the_first_ones(tmp_path: Path) -> None:
    journal = filled(tmp_path, 2)
    journal.add(rewarded(0, 0.75))
    for each in (journal, RolloutJournal.open(tmp_path)):
        assert each.rewards(0) == rewarded(0, 0.75)


def test_a_batch_keeps_what_is_left_of_it_where_a_later_one_is_forgotten(tmp_path: Path) -> None:
    """Its rewards were asked again after the later batch was sampled: that line goes with the later ones."""
    journal = filled(tmp_path, 2)
    journal.add(rewarded(0, 0.75))
    journal.forget_from(1)
    for each in (journal, RolloutJournal.open(tmp_path)):
        assert plain(each.answers(0)) == plain(sampled(0))
        assert each.rewards(0) in (None, rewarded(0))
        assert each.answers(1) is None
    assert journal.rewards(0) == RolloutJournal.open(tmp_path).rewards(0)


def limited_disk(size: int, work: Callable[[], None]) -> int:
    """Do `work` in a process whose files cannot grow beyond a size; its exit code, 3 where it met that."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            work()
            code = 0
        except OSError as problem:
            if problem.errno == errno.EFBIG:
                code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("room", [0, 10, 200])
def test_a_full_disk_leaves_whole_lines(room: int, tmp_path: Path) -> None:
    journal = filled(tmp_path, 2)
    whole = (tmp_path / FILE).read_bytes()
    assert limited_disk(len(whole) + room, lambda: journal.add(sampled(2))) == 3
    assert (tmp_path / FILE).read_bytes() == whole
    journal.add(sampled(2))
    assert plain(RolloutJournal.open(tmp_path).answers(2)) == plain(sampled(2))


def test_reading_a_journal_changes_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / FILE
    content = path.read_bytes() + b"0123abcd {"
    path.write_bytes(content)
    path.chmod(0o400)
    batches = list(read_journal(tmp_path))
    assert [each.batch for each, _ in batches] == [0, 1, 2]
    assert [rewards for _, rewards in batches] == [rewarded(batch) for batch in range(3)]
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == [FILE]
