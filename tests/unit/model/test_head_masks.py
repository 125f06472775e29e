"""Mask files: what is written is read back, foreign files are understood, damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.errors import ConfigError, DataError
from headway.model.config import ModelConfig
from headway.model.head_masks.file import read_masks, write_masks
from headway.model.head_masks.masks import HeadMasks, num_full_heads, select_at_sparsity
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


def test_heads_of_a_layer() -> None:
    masks = HeadMasks(FULL)
    assert (masks.full_heads(0), masks.streaming_heads(0), masks.full_heads(1)) == (
        (0, 2),
        (1,),
        (2,),
    )
    assert masks.num_full == 3
    assert masks.sparsity == 0.5


@pytest.mark.parametrize(
    ("total", "sparsity", "kept"),
    [(256, 0.7, 76), (10, 0.9, 1), (10, 0.7, 3), (8, 0.0, 8), (8, 1.0, 0), (30, 0.1, 27)],
)
def test_the_number_of_full_heads_is_exact(total: int, sparsity: float, kept: int) -> None:
    assert num_full_heads(total, sparsity) == kept


def test_heads_are_ranked_over_the_whole_model_and_ties_go_to_the_first() -> None:
    scores = ((-9.0, -8.0, 1.0, -9.0), (-9.0, 2.0, 3.0, -8.0))
    assert select_at_sparsity(scores, 0.5).full == (
        (False, True, True, False),
        (False, True, True, False),
    )
    assert select_at_sparsity(scores, 0.25).num_full == 6
    assert select_at_sparsity(((0.0, 0.0), (0.0, 0.0)), 0.25).full == ((True, True), (True, False))


def test_equal_per_layer_gives_every_layer_the_same_count() -> None:
    scores = ((5.0, 4.0, 3.0, 2.0), (1.0, 0.0, -1.0, -2.0), (9.0, 9.0, 9.0, 9.0))
    assert [sum(row) for row in select_at_sparsity(scores, 0.5).full] == [2, 0, 4]
    equal = select_at_sparsity(scores, 0.5, equal_per_layer=True)
    assert [sum(row) for row in equal.full] == [2, 2, 2]
    assert equal.full[1] == (True, True, False, False)
    assert [
        sum(row) for row in select_at_sparsity(((1.0, 2.0),) * 2, 0.25, equal_per_layer=True).full
    ] == [2, 2]  # 1.5 each rounds up


def duo_folder(at: Path) -> Path:
    values = [[0.93, 0.04, 0.51], [0.2, 0.1, 1.0]]
    at.mkdir()
    (at / "full_attention_heads.tsv").write_text(
        "\n".join("\t".join(f"{v:.18e}" for v in row) for row in values) + "\n"
    )
    (at / "config.json").write_text(json.dumps({"sink_size": 64, "recent_size": 256, "lr": 0.02}))
    return at


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


def test_masks_of_another_model_are_refused() -> None:
    HeadMasks(FULL).check(ModelConfig(num_layers=2, num_heads=6, num_kv_heads=3, hidden_size=96))
    with pytest.raises(ConfigError, match="2 layers of 3 KV heads; the model has 4 layers of 4"):
        HeadMasks(FULL).check(ModelConfig())
    with pytest.raises(ConfigError, match="no such file"):
        read_masks("/nowhere/masks.tsv")
