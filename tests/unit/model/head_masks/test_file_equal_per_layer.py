"""`--equal-per-layer` is one rule: every verb keeps the same heads, the best of each layer by score, of gates and of soft mask files."""

import json
from pathlib import Path

import pytest
import torch
from support.byte_model import CONFIG, write_model

from headway.checkpoint.stored_model import find_model
from headway.cli import main
from headway.errors import ConfigError
from headway.model.config import HeadGatesConfig
from headway.model.head_masks.choice import MaskChoice, MaskSpec
from headway.model.head_masks.file import read_masks, write_masks
from headway.model.head_masks.gates_file import TrainedGates, write_gates
from headway.model.head_masks.masks import HeadMasks
from headway.workflows.sparsify import write_mask_files

SCORES = torch.tensor([[3.0, 5.0, 9.0, 8.0], [-9.0, -4.0, -5.0, 2.0]])
BEST = ((False, False, True, True), (False, True, False, True))
"""Half of each layer by hand. Over the whole model layer 0 would keep all four; by head index layer 1 would keep heads 0 and 1."""
EQUAL = MaskChoice(equal_per_layer=True)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("gated"), CONFIG.with_(num_kv_heads=4))
    write_gates(folder, HeadGatesConfig(window=6, sinks=2), SCORES)
    return folder


def test_every_verb_keeps_the_best_heads_of_each_layer(
    gated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(gated), "--sparsity", "0.5", "--equal-per-layer", "--json"]
    assert main(["masks", "export", *flags, "--out", str(tmp_path / "masks.tsv")]) == 0
    assert read_masks(tmp_path / "masks.tsv").full == BEST
    capsys.readouterr()
    assert main(["masks", "show", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["full"] == [
        [int(keeps) for keeps in row] for row in BEST
    ]
    # eval long --sparsities, and the mask files of sparsify
    spec = MaskSpec(EQUAL, (0.5,))
    _, variant, *_ = spec.variants(find_model(gated).mask_source())
    assert variant.masks == HeadMasks(BEST, 6, 2)
    (name,) = write_mask_files(gated, spec, tmp_path)
    assert read_masks(tmp_path / name) == HeadMasks(BEST, 6, 2)


def test_soft_mask_files_are_ranked_in_each_layer(
    gated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft = tmp_path / "soft.tsv"
    soft.write_text("0.6\t0.7\t0.9\t0.8\n0.1\t0.4\t0.3\t0.49\n")
    assert read_masks(soft).full == ((True,) * 4, (False,) * 4)
    assert read_masks(soft, equal_per_layer=True).full == BEST
    assert main(["masks", "show", "--masks", str(soft), "--equal-per-layer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["full"] == [
        [int(keeps) for keeps in row] for row in BEST
    ]
    for sparsities in ((), (0.5,)):
        _, variant, *_ = MaskSpec(MaskChoice(str(soft), equal_per_layer=True), sparsities).variants(
            find_model(gated).mask_source()
        )
        assert variant.masks is not None
        assert variant.masks.full == BEST


def test_a_decided_table_ranks_nothing(tmp_path: Path) -> None:
    write_masks(HeadMasks(((True, True), (False, False))), tmp_path / "uneven.tsv")
    with pytest.raises(
        ConfigError,
        match=r"2, 0 full heads in its layers, so heads cannot be ranked for --equal-per-layer",
    ):
        read_masks(tmp_path / "uneven.tsv", equal_per_layer=True)
    even = HeadMasks(((True, False), (False, True)))
    write_masks(even, tmp_path / "even.tsv")
    assert read_masks(tmp_path / "even.tsv", equal_per_layer=True) == even


def test_equal_layers_keep_what_the_gates_expect_to_the_head() -> None:
    # One of three heads is expected to be full; 1 - 2/3 in floating point would keep none.
    gates = TrainedGates(HeadGatesConfig(window=6, sinks=2), torch.tensor([[-20.0, 20.0, -20.0]]))
    assert gates.masks().num_full == gates.masks(equal_per_layer=True).num_full == 1


def test_equal_layers_say_which_sparsity_they_cannot_reach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft = tmp_path / "soft.tsv"
    soft.write_text("0.6\t0.7\n0.1\t0.4\n0.2\t0.3\n")
    gates = TrainedGates(
        HeadGatesConfig(window=6, sinks=2), torch.tensor([[3.0, 5.0], [-9.0, -4.0], [1.0, 2.0]])
    )
    for select in (
        lambda: read_masks(soft, 0.7, equal_per_layer=True),
        lambda: gates.masks(0.7, equal_per_layer=True),
    ):
        caplog.clear()
        # one full head of six is left: a third of a head in each layer
        assert [sum(row) for row in select().full] == [0, 0, 0]
        assert caplog.messages == [
            "--equal-per-layer: sparsity 0.7 cannot be reached with 2 KV heads in every layer, which go in steps of 0.5. "
            "0 of 2 heads stay full in each: sparsity 1."
        ]
    caplog.clear()
    assert (
        gates.masks(0.5, equal_per_layer=True).sparsity
        == read_masks(soft, 0.5, equal_per_layer=True).sparsity
        == 0.5
    )
    assert gates.masks(0.7).num_full == 1
    assert caplog.messages == []
    # two of six heads are expected to be full, and two thirds of a head round up
    assert read_masks(soft, equal_per_layer=True).num_full == 3
    assert "sparsity 0.6667 cannot be reached" in caplog.messages[0]
    assert "1 of 2 heads stay full in each: sparsity 0.5." in caplog.messages[0]
