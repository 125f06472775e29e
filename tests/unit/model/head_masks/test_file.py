"""Mask files: what is written is read back, foreign files are understood, damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.errors import ConfigError, DataError
from headway.model.head_masks.file import read_masks, write_masks
from headway.model.head_masks.masks import HeadMasks
from headway.runtime.digests import DIGESTS

FULL = ((True, False, True), (False, False, True))


def test_a_written_file_is_read_back_the_same(tmp_path: Path) -> None:
    for masks in (HeadMasks(FULL, 1024, 128), HeadMasks(FULL, 64, 0), HeadMasks(FULL)):
        write_masks(masks, tmp_path / "masks.tsv")
        assert read_masks(tmp_path / "masks.tsv") == masks
        assert read_masks(tmp_path) == masks


def test_the_table_has_no_header_and_python_numbers(tmp_path: Path) -> None:
    write_masks(HeadMasks(FULL, 8, 2), tmp_path / "masks_sp0.5.tsv")
    assert (tmp_path / "masks_sp0.5.tsv").read_text() == "1.0\t0.0\t1.0\n0.0\t0.0\t1.0\n"


def duo_folder(folder: Path) -> Path:
    values = [[0.93, 0.04, 0.51], [0.2, 0.1, 1.0]]
    folder.mkdir()
    (folder / "full_attention_heads.tsv").write_text(
        "\n".join("\t".join(f"{v:.18e}" for v in row) for row in values) + "\n"
    )
    (folder / "config.json").write_text(
        json.dumps({"sink_size": 64, "recent_size": 256, "lr": 0.02})
    )
    return folder


def test_a_pattern_of_duoattention_is_read_with_its_window_and_sinks(tmp_path: Path) -> None:
    masks = read_masks(duo_folder(tmp_path / "duo"))
    assert masks == HeadMasks(FULL, 256, 64)
    assert read_masks(tmp_path / "duo" / "full_attention_heads.tsv") == masks


def test_soft_values_are_cut_at_the_sparsity_asked_for(tmp_path: Path) -> None:
    folder = duo_folder(tmp_path / "duo")
    assert read_masks(folder, 0.75).full == ((False, False, False), (False, False, True))
    assert read_masks(folder, 0.0).num_full == 6


def test_hard_values_cannot_be_cut_elsewhere(tmp_path: Path) -> None:
    write_masks(HeadMasks(FULL), tmp_path / "masks.tsv")
    assert read_masks(tmp_path / "masks.tsv", 0.5).full == FULL
    with pytest.raises(
        ConfigError, match=r"only 0 and 1 at sparsity 0\.5000.*export again with --sparsity 0\.2"
    ):
        read_masks(tmp_path / "masks.tsv", 0.2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("1.0\t0.0\n1.0\n", "row 2 has 1 numbers and the first has 2"),
        ("1.0\tx\n", "line 1"),
        ("1.0\t3.5\n", r"contains 3\.5"),
        ("nan\t0.0\n", "contains nan"),
        ("layer\thead\tlog_alpha\n0\t0\t4.0\n", "raw export"),
        ("\xff\xfe", "line 1"),
    ],
)
def test_a_damaged_table_is_named_with_its_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "masks.tsv").write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        read_masks(tmp_path / "masks.tsv")
    assert "masks.tsv" in str(caught.value)


def test_damage_beside_the_table_is_named(tmp_path: Path) -> None:
    write_masks(HeadMasks(FULL, 8, 0), tmp_path / "masks.tsv")
    (tmp_path / DIGESTS).unlink()
    (tmp_path / "masks.json").write_text('{"window": 0}')
    with pytest.raises(DataError, match="window is 0"):
        read_masks(tmp_path / "masks.tsv")
    (tmp_path / "masks.json").write_text("{")
    with pytest.raises(DataError, match="JSON"):
        read_masks(tmp_path / "masks.tsv")


def test_a_file_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_masks("/nowhere/masks.tsv")
