"""Raw numbers of gates: every column is what its header says, counted by hand from the definition of the hard concrete."""

import math
from pathlib import Path

import pytest
import torch

from headway.model.config import HeadGatesConfig
from headway.model.head_masks.gates_file import RAW_COLUMNS, TrainedGates


def test_every_raw_column_holds_what_its_header_says(tmp_path: Path) -> None:
    gates = TrainedGates(
        HeadGatesConfig(window=8, sinks=2), torch.tensor([[3.0, -2.0, 0.0], [1.0, 2.0, -4.0]])
    )
    gates.write_raw(tmp_path / "raw.tsv")
    head, *lines = (tmp_path / "raw.tsv").read_text().splitlines()
    assert (
        head.split("\t")
        == ["layer", "head", "log_alpha", "expected_z", "p_streaming", "p_full"]
        == list(RAW_COLUMNS)
    )
    rows = [
        dict(zip(head.split("\t"), map(float, line.split("\t")), strict=True)) for line in lines
    ]
    assert [(row["layer"], row["head"], row["log_alpha"]) for row in rows] == [
        (0, 0, 3.0), (0, 1, -2.0), (0, 2, 0.0), (1, 0, 1.0), (1, 1, 2.0), (1, 2, -4.0),
    ]  # fmt: skip
    # tau log(0.1 / 1.1) = -1.598596: z is 0 below it, 1 above its negative
    edge = 2 / 3 * math.log(11)
    for row in rows:
        assert row["p_streaming"] == pytest.approx(1 / (1 + math.exp(row["log_alpha"] + edge)))
        assert row["p_full"] == pytest.approx(1 / (1 + math.exp(edge - row["log_alpha"])))
        assert row["p_full"] < row["expected_z"] < 1 - row["p_streaming"]
    assert rows[0]["p_full"] == pytest.approx(0.80239, abs=1e-4)
    assert rows[0]["p_streaming"] == pytest.approx(0.00997, abs=1e-4)
    assert rows[2]["expected_z"] == pytest.approx(0.5)
