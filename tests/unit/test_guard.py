"""benchmarks/guard.py: both sides of a ratio compute the same, and a ratio that fell ends it with exit code 1."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import guard

NAMES = ["first", "second"]


@pytest.mark.parametrize("number", range(10))
def test_both_sides_of_a_ratio_compute_the_same(number: int) -> None:
    pair = guard.pairs(torch.device("cpu"), guard.TINY)[number]
    for ours, theirs in zip(pair.headway(), pair.torch(), strict=True):
        assert ours.shape == theirs.shape
        assert float(theirs.detach().abs().max()) > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_ratio_is_torchs_median_by_headways() -> None:
    pair = guard.Pair("name", lambda: (), lambda: ())
    seconds = iter([9.0, 9.0] * guard.WARM_RUNS + [2.0, 6.0] * (guard.RUNS - 1) + [99.0, 99.0])
    assert guard.ratio_of(pair, lambda function: next(seconds)) == 3.0


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "guard.json"
    guard.record(path, "this GPU", {"first": 1.0, "second": 2.0})
    return path


def measured(values: dict[str, list[float]]) -> Callable[[str], float]:
    """Gives the values of a name one after the other."""
    left = {name: iter(numbers) for name, numbers in values.items()}
    return lambda name: next(left[name])


def test_a_fall_by_more_than_three_percent_is_exit_code_one(recorded: Path) -> None:
    lines: list[str] = []
    slower = measured({"first": [0.98], "second": [1.93, 1.92, 1.91]})
    assert guard.guard("this GPU", slower, NAMES, recorded, say=lines.append) == 1
    assert lines[-1] == "fell by more than 3%: second"
    assert lines[3].split() == ["second", "1.930", "2.000", "-3.5%"]


def test_a_fall_that_another_measurement_does_not_find_is_none(recorded: Path) -> None:
    lines: list[str] = []
    shaken = measured({"first": [0.5, 1.01], "second": [2.5]})
    assert guard.guard("this GPU", shaken, NAMES, recorded, say=lines.append) == 0
    assert lines[-1] == "nothing fell by more than 3%"


def test_a_device_without_recorded_ratios_says_so_and_passes(recorded: Path) -> None:
    lines: list[str] = []
    before = recorded.read_bytes()
    any_ratio = measured({"first": [0.1], "second": [0.1]})
    assert guard.guard("another GPU", any_ratio, NAMES, recorded, say=lines.append) == 0
    assert "No ratios are recorded for this device" in lines[-1]
    assert recorded.read_bytes() == before, "recorded on request only"


def test_recording_keeps_other_devices(recorded: Path) -> None:
    other = measured({"first": [3.0], "second": [4.0]})
    assert guard.guard("another", other, NAMES, recorded, records=True, say=lambda line: None) == 0
    content = json.loads(recorded.read_text())
    assert content["another"]["ratios"] == {"first": 3.0, "second": 4.0}
    assert content["this GPU"]["ratios"] == {"first": 1.0, "second": 2.0}
    assert content["another"]["torch"] == torch.__version__
