"""A damaged side file costs its own content and nothing else: a run starts and ends, with a warning."""

import json
from pathlib import Path

import pytest
from support.runs import headway, make_stores, tiny_settings

from headway.runtime.temporary import temporary_name
from headway.train.health import read_healed, repair_healed

NONSENSE = b"\x00\xff{not json\n"


def test_records_that_lack_everything_do_not_block_the_end(tmp_path: Path) -> None:
    make_stores(tmp_path)
    settings = tiny_settings(tmp_path, "run")
    assert headway("train", *settings, "steps=3").returncode == 0
    run = tmp_path / "run"
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    odd = b'{"step": 2}\n{"step": 2, "loss": "x", "time": 3, "valid": [1], "num_samples_in_batch": null}\n'
    (run / "metrics.jsonl").write_bytes(lines[0] + NONSENSE + odd + lines[2])
    for name in ("crash.json", "job.txt", "supervisor.json"):
        (run / "logs" / name).write_bytes(b"[1]")
    (run / "stop.json").write_bytes(NONSENSE)
    (run / "events.jsonl").write_bytes(NONSENSE + (run / "events.jsonl").read_bytes())
    done = headway("train", *settings, "steps=5")
    assert done.returncode == 0, done.stderr
    assert "dropped 1 damaged lines" in done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["first_loss"] == json.loads(lines[0])["loss"]


def test_a_damaged_summary_is_written_anew(tmp_path: Path) -> None:
    make_stores(tmp_path)
    settings = [*tiny_settings(tmp_path, "run"), "steps=2"]
    assert headway("train", *settings).returncode == 0
    whole = json.loads((tmp_path / "run" / "summary.json").read_text())
    (tmp_path / "run" / "summary.json").write_bytes(NONSENSE)
    assert headway("train", *settings).returncode == 0
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["last_loss"]
        == whole["last_loss"]
    )


ENTRY = {"batches": [3, 4], "bad_step": 5, "to_step": 2, "reason": "spike", "documents": {}}


@pytest.mark.parametrize("content", [NONSENSE, b"{}", b'[{"batches": "x"}]', b"[" * 100_000, b""])
def test_a_damaged_heal_file_is_rebuilt_from_the_events(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "heal.json").write_bytes(content)
    event = {"event": "spike", "healed": ENTRY}
    (tmp_path / "events.jsonl").write_bytes(NONSENSE + json.dumps(event).encode() + b"\n[2]\n")
    assert read_healed(tmp_path) == [ENTRY]
    assert "heal.json is damaged; events.jsonl lists 1 rollbacks" in caplog.text
    repair_healed(tmp_path)
    caplog.clear()
    assert read_healed(tmp_path) == [ENTRY]
    assert not caplog.text
    assert (tmp_path / "heal.json.damaged").read_bytes() == content


def test_a_whole_heal_file_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "heal.json").write_text(json.dumps([ENTRY], indent=3))
    repair_healed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["heal.json"]


def test_damaged_stages_are_counted_by_their_folders(tmp_path: Path) -> None:
    make_stores(tmp_path)
    settings = [
        *tiny_settings(tmp_path, "run"),
        "stages=[{name: one, steps: 2}, {name: two, steps: 2}]",
    ]
    assert headway("train", *settings).returncode == 0
    (tmp_path / "run" / "stages.json").write_bytes(NONSENSE)
    done = headway("train", *settings)
    assert done.returncode == 0, done.stderr
    assert "stages.json is damaged" in done.stderr
    assert "2 stages are done" in done.stderr
    assert [
        stage["state"]
        for stage in json.loads((tmp_path / "run" / "stages.json").read_text())["stages"]
    ] == ["done", "done"]


def test_a_run_killed_in_its_export_finishes_where_process_ids_repeat(tmp_path: Path) -> None:
    """In a container the process that resumes has the id of the one that was killed."""
    make_stores(tmp_path)
    settings = tiny_settings(tmp_path, "run")
    assert headway("train", *settings, "steps=2").returncode == 0
    run = tmp_path / "run"
    (run / "summary.json").unlink()
    for pid in range(1, 40_000, 500):
        (run / f".tmp-final-{pid}").mkdir()
    left = [temporary_name(run / "final") for _ in range(2)]
    for path in left:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"0" * 1000)
    assert headway("train", *settings, "steps=2").returncode == 0
    assert (run / "summary.json").exists()
    assert not list(run.glob(".tmp-*"))
