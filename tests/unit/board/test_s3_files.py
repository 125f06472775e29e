"""Runs in S3, from a real server on loopback."""

from pathlib import Path

import pytest
from support.board_runs import append_record, make_run
from support.s3_server import serve_s3

from headway.board.mirror import MirrorSource
from headway.board.open import list_runs, open_sources
from headway.board.watch import Board
from headway.errors import LaunchError
from headway.runtime.paths import S3Path
from headway.runtime.s3 import S3


def upload(folder: Path, prefix: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            S3().write(S3Path("bucket", f"{prefix}/{path.relative_to(folder)}"), path.read_bytes())


@pytest.mark.slow
def test_runs_in_s3_are_listed_and_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serve_s3(monkeypatch) as store:
        folder = make_run(tmp_path / "one", 20)
        step = folder / "checkpoints" / "step-00000010"
        step.mkdir(parents=True)
        (step / "manifest.json").write_text("{}")
        (step / "rank-00000.safetensors").write_bytes(b"0" * 1000)
        upload(folder, "lab/runs/one")
        (source,) = open_sources(["s3://bucket/lab"])
        assert isinstance(source, MirrorSource)
        board = Board([source])
        source.refresh()
        board.look(source)
        (run,) = board.runs.values()
        assert (run.name, run.status.state, run.status.step) == ("runs/one", "done", 20)
        board.want([run.id])
        append_record(folder, 21, loss=0.5)
        upload(folder, "lab/runs/one")
        asked = len(store.requests)
        source._next = 0.0
        source.refresh()
        board.look(source)
        x, y = run.curves.points("loss", "step")
        assert (x[-1], y[-1], len(x)) == (21.0, 0.5, 21)
        assert not any("safetensors" in path for _, path in store.requests[asked:] if "GET" in _)
        from headway.board.details import read_checkpoints

        (saved,) = read_checkpoints(run.folder)
        assert (saved["step"], saved["bytes"], saved["complete"]) == (10, 1002, True)
        board.close()
        with pytest.raises(LaunchError, match="no runs there"):
            list_runs(open_sources(["s3://bucket/nothing"]))
        with pytest.raises(LaunchError, match="refuses"):
            list_runs(open_sources(["s3://no-such-bucket/x"]))
