"""Which folders are runs, and the state of each."""

import json
import os
import socket
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.board_runs import append_record, make_run

from headway.board import curves
from headway.board.runs import StatusReader, find_runs, flat_values, planned_steps
from headway.board.watch import Board, LocalSource, newest_valid_loss


def beat(
    folder: Path, *, pid: int, progress: float = 0.0, host: str = "", moment: float = 0.0
) -> None:
    folder_of_beats = folder / "logs" / "heartbeat"
    folder_of_beats.mkdir(parents=True, exist_ok=True)
    now = time.time()
    values = {
        "rank": 0,
        "pid": pid,
        "host": host or socket.gethostname(),
        "step": 3,
        "phase": "step",
        "progress_at": now - progress,
        "at": now - moment,
    }
    (folder_of_beats / "rank-00000.json").write_text(json.dumps(values))


def test_runs_are_found_below_a_folder_but_not_in_checkpoints_or_behind_links(
    tmp_path: Path,
) -> None:
    make_run(tmp_path / "a", 1)
    make_run(tmp_path / "deep" / "b", 1)
    make_run(tmp_path / "a" / "checkpoints" / "step-00000001" / "odd", 1)
    make_run(tmp_path / "elsewhere" / ".hidden", 1)
    os.symlink(tmp_path / "a", tmp_path / "link")
    os.symlink(tmp_path, tmp_path / "deep" / "loop")
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["a", "deep/b"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]


@pytest.mark.parametrize(
    ("harm", "state"),
    [("none", "done"), ("no end", "failed"), ("stopped", "stopped"), ("crash", "failed"), ("live", "live"), ("stalled", "stalled"),
     ("killed", "failed"), ("live elsewhere", "live"), ("silent elsewhere", "failed")],
)  # fmt: skip
def test_the_state_of_a_run(tmp_path: Path, harm: str, state: str) -> None:
    folder = make_run(tmp_path / "run", 5, done=harm == "none")
    events = folder / "events.jsonl"
    more = {"stopped": "finish", "crash": "crash"}.get(harm)
    if more is not None:
        events.write_text(
            events.read_text()
            + json.dumps({"time": 1.0, "event": more, "step": 5, "text": ""})
            + "\n"
        )
    if harm in ("live", "stalled"):
        beat(folder, pid=os.getpid(), progress=9999.0 if harm == "stalled" else 1.0)
    elif harm == "killed":
        beat(folder, pid=2**22 - 3)
    elif harm.endswith("elsewhere"):
        beat(folder, pid=1, host="another-host", moment=100.0 if harm.startswith("silent") else 1.0)
    status = StatusReader(folder, is_here=not harm.endswith("elsewhere")).read(
        {"step": 5.0, "step_seconds": 0.2}
    )
    assert (status.state, status.step, status.total_steps) == (state, 5, 5)


def test_a_stage_takes_its_state_from_the_run(tmp_path: Path) -> None:
    home = make_run(tmp_path / "run", 5, done=False)
    stage = make_run(home / "stages" / "01-first", 5, done=False)
    (stage / "events.jsonl").unlink()
    beat(home, pid=os.getpid())
    assert StatusReader(stage).read({}).state == "live"
    (stage / "summary.json").write_text("{}")
    assert StatusReader(stage).read({}).state == "done"


def test_planned_steps_are_those_of_all_stages() -> None:
    assert planned_steps({"steps": 5}) == 5
    assert planned_steps({}) is None
    assert planned_steps({"steps": None}) is None
    assert planned_steps({"steps": 3, "stages": [{"name": "a"}, {"name": "b", "steps": 6}]}) == 9


def test_settings_are_flattened_into_dotted_names() -> None:
    settings = {"a": {"b": 1}, "c": [1, 2], "d": [{"e": 1}], "f": {}}
    assert dict(flat_values(settings)) == {"a.b": 1, "c": [1, 2], "d.0.e": 1, "f": {}}


@pytest.mark.slow
def test_a_long_run_is_indexed_by_another_process_or_here_where_none_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "INLINE_BYTES", 1000)
    make_run(tmp_path / "runs" / "one", 500)
    for cache in ("cache", "file"):
        if cache == "file":  # no folder can be made there
            (tmp_path / "file").write_text("")
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with Board([LocalSource(tmp_path / "runs")]) as board:
            (run,) = board.want(list(board.runs))
            assert run.is_indexing
            assert run.curves.is_partial
            assert board.wait_until(lambda run=run: not run.is_indexing, 60.0)
            assert run.curves.index.rows == 500
            assert not run.curves.is_partial
            assert run.curves.reads_here == (cache == "file")


def test_a_run_counts_as_indexing_until_its_curves_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "one", 5)
    source = LocalSource(tmp_path)
    board = Board([source])
    board.look(source)
    (run,) = board.runs.values()
    finished: Future[None] = Future()
    finished.set_result(None)
    run.building = finished
    seen: list[bool] = []
    monkeypatch.setattr(run.curves, "built", lambda: seen.append(run.is_indexing))
    board.look(source)
    assert seen == [True]
    assert not run.is_indexing


def test_a_board_follows_new_steps_new_runs_and_removed_ones(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", 5, done=False)
    beat(folder, pid=os.getpid())
    source = LocalSource(tmp_path)
    board = Board([source])
    board.look(source)
    (run,) = board.runs.values()
    assert (run.name, run.status.state, run.status.step) == ("one", "live", 5)
    before = board.version
    board.look(source)
    assert board.rows(before)["runs"] == []
    append_record(folder, 6)
    board.look(source)
    (row,) = board.rows(before)["runs"]
    assert row["step"] == 6
    assert row["version"] > before
    board._found_at.clear()
    make_run(tmp_path / "two", 1)
    board.look(source)
    assert {run.name for run in board.runs.values()} == {"one", "two"}
    for path in sorted((tmp_path / "two").iterdir()):
        path.unlink()
    board._found_at.clear()
    board.look(source)
    assert {run.name for run in board.runs.values()} == {"one"}
    board.close()


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([("start", ""), ("crash", "out of memory\nat step 5")], "out of memory"),
        ([("crash", "of an earlier start"), ("start", "")], "killed, or its machine failed"),
    ],
)
def test_a_failed_run_says_why(tmp_path: Path, events: list[tuple[str, str]], cause: str) -> None:
    folder = make_run(tmp_path / "run", 5, done=False)
    lines = [
        json.dumps({"time": 1.0, "event": kind, "step": 5, "text": text}) for kind, text in events
    ]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    status = StatusReader(folder).read({})
    assert status.state == "failed"
    assert status.cause.startswith(cause)
    assert "\n" not in status.cause
    make_run(tmp_path / "done", 5)
    assert StatusReader(tmp_path / "done").read({}).cause == ""


@pytest.mark.parametrize("name", ["valid/loss", "valid/books/loss"])
def test_the_newest_validation_loss_is_listed_while_a_run_lives(name: str) -> None:
    assert (
        newest_valid_loss(
            {"loss": 3.0, "valid_at_start/loss": 9.0, name: 2.5, "valid/perplexity": 12.0}
        )
        == 2.5
    )
    assert newest_valid_loss({"loss": 3.0, "valid/perplexity": 12.0}) is None
