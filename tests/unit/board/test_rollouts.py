"""The board's view of a journal: numbers as counted by hand, pages of answers, journals that are cut off, damaged or hostile."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from support.board_runs import EVIL_ANSWER, add_rollout, make_run, serving_board

from headway.board import rollouts as rollouts_module
from headway.board.open import open_sources
from headway.board.report import write_html_report
from headway.board.rollouts import RolloutFollower, RolloutOrder
from headway.rollout.journal import FILE, RolloutJournal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three batches, of which the last has no rewards yet."""
    folder = make_run(tmp_path / "run", 3)
    add_rollout(folder, 0, [0.0, 1.0, 0.5, 0.5])
    add_rollout(folder, 1, [1.0, 1.0, -1.0, 0.25])
    add_rollout(folder, 2, None)
    return folder


def view(folder: Path, order: RolloutOrder = "sampled", batch: int | None = None, first: int = 0) -> Any:  # fmt: skip
    found = RolloutFollower(folder).view(order, batch, first)
    assert found is not None
    return found


def texts(page: Any) -> list[str]:
    return [answer["text"].strip() for answer in page["answers"]]


def add_line(folder: Path, record: Any) -> None:
    """A line with the right checksum, whatever is in it."""
    data = json.dumps(record).encode()
    with (folder / FILE).open("ab") as file:
        file.write(b"%08x " % zlib.crc32(data) + data + b"\n")


def test_distributions_are_those_of_the_answers(run: Path) -> None:
    figures = view(run)["figures"]
    assert (figures["batch"], figures["step"]) == ([0, 1, 2], [1, 2, 3])
    first = figures["reward"][0]
    assert (first["low"], first["median"], first["mean"], first["high"]) == (0.0, 0.5, 0.5, 1.0)
    assert figures["reward"][2] is None
    # Of two prompts of two answers, one has equal rewards in both batches.
    assert figures["no_signal"] == [0.5, 0.5, None]
    assert figures["failed"] == [1, 1, 0]
    assert figures["cut"] == [0.25, 0.25, 0.25]
    # Answers of 1, 2, 3 and 4 ids.
    tokens = figures["tokens"][0]
    assert (tokens["low"], tokens["mean"], tokens["high"]) == (1.0, 2.5, 4.0)
    assert (figures["bad_lines"], figures["partial"], figures["updates"]) == (0, False, 1)


def test_answers_stand_beside_what_they_earned(run: Path) -> None:
    page = view(run, batch=1)["page"]
    assert texts(page) == ["answer 1.0", "answer 1.1", "answer 1.2", "answer 1.3"]
    first = page["answers"][0]
    assert (first["question"].strip(), first["reward"], first["step"]) == ("question 1a", 1.0, 2)
    assert first["parts"] == {"number": 1.0, "format": 0.5}
    assert page["answers"][3]["problems"] == ["number: it raised "]
    assert sum(page["rewards"]["counts"]) == 4
    newest = view(run)["page"]
    assert (newest["batch"], newest["answers"][0]["reward"]) == (2, None)


def test_answers_come_by_reward_within_a_step_and_over_the_run(run: Path) -> None:
    assert texts(view(run, "best", 1)["page"])[:2] == ["answer 1.0", "answer 1.1"]
    assert texts(view(run, "worst", 1)["page"])[:2] == ["answer 1.2", "answer 1.3"]
    best = view(run, "best_of_run")["page"]
    assert [answer["reward"] for answer in best["answers"]] == [1, 1, 1, 0.5, 0.5, 0.25, 0, -1]
    worst = view(run, "worst_of_run")["page"]
    assert [answer["reward"] for answer in worst["answers"]][:3] == [-1, 0, 0.25]
    assert (best["total"], worst["total"]) == (8, 8)


def test_pages_of_answers_follow_each_other(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1)
    add_rollout(folder, 0, [float(number) for number in range(50)])
    shown: list[str] = []
    for first in (0, 20, 40, 60):
        page = view(folder, first=first)["page"]
        assert page["total"] == 50
        shown += texts(page)
    assert shown == [f"answer 0.{index}" for index in range(50)]


def test_what_is_added_or_taken_back_is_seen_at_the_next_look(run: Path) -> None:
    follower = RolloutFollower(run)

    def batches() -> Any:
        found = follower.view("best_of_run", None, 0)
        assert found is not None
        return found["figures"]["batch"], found["page"]["total"]

    assert batches() == ([0, 1, 2], 8)
    add_rollout(run, 3, [0.0, 0.0, 0.0, 2.0])
    assert batches() == ([0, 1, 2, 3], 12)
    # A half-written line waits for its end.
    whole = (run / FILE).read_bytes()
    (run / FILE).write_bytes(whole + b"0123abcd {")
    assert batches() == ([0, 1, 2, 3], 12)
    # A run that resumes with other settings removes batches, and samples them anew.
    (run / FILE).write_bytes(whole)
    RolloutJournal.open(run).forget_from(1)
    add_rollout(run, 1, [3.0, 0.0, 0.0, 0.0], "again")
    assert batches() == ([0, 1], 8)
    found = follower.view("best_of_run", None, 0)
    assert found is not None
    assert texts(found["page"])[0] == "answer 1.0 again"


def test_lines_that_are_no_records_are_counted_and_left_out(run: Path) -> None:
    content = bytearray((run / FILE).read_bytes())
    content[40] ^= 1  # the first line, so the rewards after it have no answers
    (run / FILE).write_bytes(content)
    for record in (
        [], {}, {"kind": "answers"}, {"kind": "answers", "batch": 9, "version": 0, "answers": [3], "prompts": 1, "seconds": 0},
        {"kind": "rewards", "batch": 1, "totals": ["much"]}, {"kind": "rewards", "batch": 1, "totals": [1]},
    ):  # fmt: skip
        add_line(run, record)
    figures = view(run)["figures"]
    assert figures["batch"] == [1, 2]
    assert figures["bad_lines"] == 7


def test_a_long_journal_is_read_in_pieces(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [len(line) for line in (run / FILE).read_bytes().splitlines(True)]
    monkeypatch.setattr(rollouts_module, "LOOK_BYTES", max(sizes) + 1)
    follower = RolloutFollower(run)
    looks: list[Any] = [follower.view("sampled", None, 0) for _ in range(10)]
    assert looks[0]["figures"]["partial"]
    assert not looks[-1]["figures"]["partial"]
    assert looks[-1]["figures"]["batch"] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "none"])
def test_a_journal_that_is_no_file_of_the_run_is_not_opened(tmp_path: Path, kind: str) -> None:
    other = make_run(tmp_path / "other", 1)
    add_rollout(other, 0, [1.0, 0.0])
    folder = make_run(tmp_path / "run", 1)
    path = folder / FILE
    if kind == "link":
        path.symlink_to(other / FILE)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    assert RolloutFollower(folder).view("sampled", None, 0) is None


def test_a_server_sends_figures_and_pages_and_refuses_other_orders(run: Path) -> None:
    with serving_board(run.parent) as (client, _):
        (identity,) = [row["id"] for row in client.json("/api/state")["runs"]]
        found = client.json(f"/api/rollouts?run={identity}&order=best&batch=1")
        assert found["figures"]["batch"] == [0, 1, 2]
        assert texts(found["page"])[0] == "answer 1.0"
        for wrong in ("order=cheapest", "batch=nan", "from=x"):
            status, content, _ = client.get(f"/api/rollouts?run={identity}&{wrong}")
            assert (status, list(json.loads(content))) == (400, ["error"])
        assert client.get("/api/rollouts?run=nothing")[0] == 404


def test_a_report_holds_the_answers_as_text(run: Path) -> None:
    add_rollout(run, 3, [0.0, 5.0], EVIL_ANSWER)
    out = run.parent / "report.html"
    write_html_report(open_sources([str(run)]), out)
    page = out.read_text(encoding="utf-8")
    assert "<img" not in page
    assert "answer 3.1" in page
    assert "question 3a" in page
