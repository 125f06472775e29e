"""The board's numbers are those of metrics.jsonl: columns, following a file that grows or is cut, the sealed index, down-sampling."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.board_runs import append_record, make_run, record

from headway.board import curves as curves_module
from headway.board import index as index_module
from headway.board.curves import RunCurves, Window
from headway.board.downsample import downsample
from headway.board.index import MetricIndex, build_index, cache_folder
from headway.board.preview import last_record, sample_records
from headway.board.records import RecordBlock
from headway.track.base import flatten
from headway.track.metrics_file import MetricsFile, read_metrics


def expected(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Every number of a metrics.jsonl by name, read with the project's own reader."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(path):
        for name, value in flatten(
            {key: value for key, value in row.items() if key != "non_finite"}
        ).items():
            if isinstance(value, (int, float)):
                curves.setdefault(name, []).append((row["step"], float(value)))
    return curves


def shown(curves: RunCurves) -> dict[str, list[tuple[int, float]]]:
    """Every number the board can show, at full zoom."""
    points: dict[str, list[tuple[int, float]]] = {}
    for name in curves.names():
        if name != "step":
            x, y = curves.points(name, "step")
            points[name] = [(int(a), b) for a, b in zip(x, y, strict=True)]
    return points


def test_every_number_of_the_file_is_shown_exactly(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 300) / "metrics.jsonl"
    curves = RunCurves(path)
    curves.update()
    assert shown(curves) == expected(path)
    assert curves.index.names()["valid/loss"] == 30


def test_zoomed_windows_together_show_every_point(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 5000) / "metrics.jsonl"
    curves = RunCurves(path)
    curves.update()
    whole = curves.view("loss", Window(points=1000))
    assert whole.total == 5000
    assert 900 <= len(whole.x) <= 1010
    seen: dict[float, float] = {}
    for start in range(0, 5000, 500):
        part = curves.view("loss", Window(points=1000, start=start, end=start + 500))
        seen |= dict(zip(part.x, part.y, strict=True))
    assert seen == {float(step): value for step, value in expected(path)["loss"]}


def test_values_that_json_cannot_hold_come_back(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(
        {
            "step": 1,
            "loss": float("nan"),
            "valid": {"valid": {"loss": float("inf")}},
            "time": {"mfu": float("-inf")},
        }
    )
    file.write(
        {
            "step": 2,
            "loss": 1.0,
            "note": None,
            "valid": {"a": {"loss": 1.0}, "b": {"loss": float("nan")}},
        }
    )
    block = RecordBlock()
    block.add((tmp_path / "metrics.jsonl").read_bytes())
    values = {name: list(column.values) for name, column in block.columns.items()}
    assert str(values["loss"]) == "[nan, 1.0]"
    assert values["valid/loss"] == [float("inf")]
    assert values["mfu"] == [float("-inf")]
    assert values["valid/a/loss"] == [1.0]
    assert str(values["valid/b/loss"]) == "[nan]"
    assert "note" not in values
    curve = downsample(np.array([1.0, 2.0]), np.array([np.nan, 1.0]))
    assert list(curve.not_finite_x) == [1.0]
    assert list(curve.y) == [1.0]


def test_a_file_that_grows_is_read_from_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", 100)
    path = folder / "metrics.jsonl"
    index = MetricIndex(path)
    index.update()
    with open(path, "ab") as file:  # half a line
        file.write(b'{"step": 101, "lo')
    assert not index.update()
    assert index.rows == 100
    with open(path, "ab") as file:
        file.write(b'ss": 7.5}\n')
    before = index.place.offset
    assert index.update()
    assert index.rows == 101
    assert index.column("loss")[1][-1] == 7.5
    assert before < index.place.offset == path.stat().st_size


@pytest.mark.parametrize("how", ["truncated", "rewritten in place", "replaced"])
def test_a_file_that_was_cut_is_read_again(tmp_path: Path, how: str) -> None:
    folder = make_run(tmp_path / "run", 100)
    path = folder / "metrics.jsonl"
    curves = RunCurves(path)
    curves.update()
    MetricsFile(path).truncate_after(50)
    if how == "rewritten in place":  # longer than before, with other numbers: only the bytes differ
        for step in range(51, 120):
            append_record(folder, step, loss=float(step))
    elif how == "replaced":
        content = path.read_bytes()
        os.replace(path, tmp_path / "old")
        path.write_bytes(content)
    assert curves.update()
    assert shown(curves) == expected(path)


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 1}\n\xff\xfe not json\n[1]\n{"no": "step"}\n'
        + b"[" * 100_000
        + b'\n{"step": 2, "loss": 2}\n'
    )
    index = MetricIndex(path)
    index.update()
    assert list(index.column("loss")[1]) == [1.0, 2.0]
    assert index.state.damaged + index.tail.damaged == 4


def test_numbers_of_every_kind_become_floats() -> None:
    block = RecordBlock()
    block.add(
        b'{"step": 1, "a": 1, "b": true, "s": "x", "time": {"c": 2, "d": "t", "e": {"f": 1}}}\n{"step": 2, "a": 1'
        + b"0" * 400
        + b', "b": 0}\n'
    )
    values = {name: list(column.values) for name, column in block.columns.items()}
    assert values == {
        "step": [1.0, 2.0],
        "a": [1.0, float("inf")],
        "b": [1.0, 0.0],
        "c": [2.0],
        "e/f": [1.0],
    }
    assert block.newest()["s"] == "x"
    assert block.newest()["d"] == "t"


def test_a_second_start_takes_the_sealed_index_and_reads_only_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", 400)
    path = folder / "metrics.jsonl"
    monkeypatch.setattr(index_module, "SEGMENT_ROWS", 150)
    build_index(path, cache_folder(path))
    assert len(MetricIndex(path).state.segments) >= 1
    size = path.stat().st_size
    append_record(folder, 401)
    index = MetricIndex(path)
    assert index.place.offset == size
    assert index.rows == 400
    curves = RunCurves(path)
    curves.update()
    assert shown(curves) == expected(path)
    assert curves.newest()["step"] == 401.0


@pytest.mark.parametrize("harm", ["index", "column", "gone"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, harm: str) -> None:
    path = make_run(tmp_path / "run", 200) / "metrics.jsonl"
    folder = cache_folder(path)
    build_index(path, folder)
    curves = RunCurves(path)
    for file in folder.iterdir():
        if (file.name == "index.json") == (harm == "index"):
            if harm == "gone":
                file.unlink()
            else:
                content = bytearray(file.read_bytes())
                content[-3] ^= 1
                file.write_bytes(content)
    if harm == "index":
        curves = RunCurves(path)
    curves.update()
    assert shown(curves) == expected(path)


def test_growing_rows_are_sealed_and_leave_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "SEAL_ROWS", 50)
    folder = make_run(tmp_path / "run", 60)
    curves = RunCurves(folder / "metrics.jsonl")
    curves.update()
    assert curves.index.tail.rows == curves.index.tail.first_row == 60
    for step in range(61, 200):
        append_record(folder, step)
        curves.update()
    assert len(curves.index.state.segments) == 3
    assert shown(curves) == expected(folder / "metrics.jsonl")


def test_a_first_look_has_true_numbers_before_the_index_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path / "run", 3000) / "metrics.jsonl"
    monkeypatch.setattr(curves_module, "INLINE_BYTES", 1000)
    curves = RunCurves(path)
    assert curves.is_partial
    assert not curves.update()
    some = shown(curves)["loss"]
    every = expected(path)["loss"]
    assert some[0] == every[0]
    assert some[-1] == every[-1]
    assert 250 < len(some) < 400
    assert set(some) < set(every)
    assert curves.newest()["step"] == 3000.0
    build_index(path, cache_folder(path))
    curves.built()
    assert not curves.is_partial
    assert shown(curves) == expected(path)


def test_short_files_have_a_first_look_too(tmp_path: Path) -> None:
    for content, steps in (
        (b"", 0),
        (b'{"step": 1}', 0),
        (b'{"step": 1}\n', 1),
        (b'{"step": 1}\n{"step": 2}\n{"st', 2),
    ):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(content)
        assert sample_records(path).rows == steps
        assert last_record(path).newest().get("step") == (float(steps) if steps else None)
    assert last_record(tmp_path / "missing").rows == 0


def test_time_and_tokens_are_axes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # every tenth step is logged
    path.write_text("".join(json.dumps(record(step)) + "\n" for step in (10, 20, 30)))
    curves = RunCurves(path)
    curves.update()
    assert list(curves.points("loss", "time")[0]) == [0.25, 2.75, 5.25]
    assert list(curves.points("loss", "tokens")[0]) == [40960.0, 81920.0, 122880.0]


def test_a_spike_of_one_step_is_visible_at_any_width() -> None:
    generator = np.random.default_rng(3)
    for length in (2001, 9_999, 100_000):
        y = generator.normal(size=length)
        for spike in (0, 1, length // 3, length - 2, length - 1):
            spiked = y.copy()
            spiked[spike] = 99.0
            for points in (4, 100, 1000, 2000):
                curve = downsample(np.arange(length, dtype=float), spiked, points)
                assert (float(spike), 99.0) in zip(curve.x, curve.y, strict=True)
                assert len(curve.x) <= points + 6
                assert curve.x[0] == 0
                assert curve.x[-1] == length - 1
                assert np.all(np.diff(curve.x) > 0)
        assert np.isclose(
            np.mean(downsample(np.arange(length, dtype=float), y, 1000).mean_y), y.mean(), atol=0.05
        )


def test_steps_that_run_backwards_are_put_in_order() -> None:
    curve = downsample(np.array([1.0, 5.0, 3.0]), np.array([1.0, 5.0, 3.0]))
    assert list(curve.x) == [1.0, 3.0, 5.0] == list(curve.y)
