"""`--masks own|none|FILE`: a model that was trained under masks is read under them by default, and every result says so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model import CONFIG, write_model

from headway.cli import main
from headway.errors import ConfigError
from headway.eval.harness_model import HarnessModel
from headway.infer.load import load_model
from headway.model.config import HeadGatesConfig
from headway.model.head_masks.choice import MaskChoice, MaskSpec
from headway.model.head_masks.file import write_masks
from headway.model.head_masks.gates_file import write_gates
from headway.model.head_masks.masks import HeadMasks

TEXT = "the cat sat on the mat and then it went away over the hills and far away, to the sea, and never came back again"
GATES = torch.tensor([[9.0, -7.0], [-8.0, -6.0]])
OWN = HeadMasks(((True, False), (False, False)), 6, 2)
"""What these gates have come to."""
SHOWN = {"from": "own", "full_heads": 1, "heads": 4, "sparsity": 0.75, "window": 6, "sinks": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain"), CONFIG.with_(max_seq_len=160))


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with gates beside them."""
    folder = write_model(tmp_path_factory.mktemp("gated"), CONFIG.with_(max_seq_len=160))
    write_gates(folder, HeadGatesConfig(window=6, sinks=2), GATES)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_perplexity_and_generation_use_a_models_own_masks_and_say_so(
    plain: Path, gated: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_masks(OWN, tmp_path / "same.tsv")
    for verb, key in (
        (("eval", "ppl", "--data", str(text)), "loss"),
        (("generate", "--prompt", TEXT, "--max-new-tokens", "8"), "token_ids"),
    ):
        full = result(capsys, *verb, "--model", str(plain))
        default = result(capsys, *verb, "--model", str(gated))
        assert (
            default[key]
            == result(capsys, *verb, "--model", str(plain), "--masks", str(tmp_path / "same.tsv"))[
                key
            ]
            != full[key]
        )
        assert default["masks"] == SHOWN
        assert default[key] == result(capsys, *verb, "--model", str(gated), "--masks", "own")[key]
        without = result(capsys, *verb, "--model", str(gated), "--masks", "none")
        assert (without[key], without["masks"], full["masks"]) == (full[key], None, None)
    options = ["--model", str(gated), "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu"]
    assert main(["generate", *options]) == 0
    said = capsys.readouterr().err
    assert "masks own (1 of 4 heads full, window 6, sinks 2)" in said
    assert "Use --masks none to ignore them" in said


def test_models_side_by_side_are_each_read_under_their_own_masks(
    plain: Path, gated: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = ["eval", "compare", str(plain), str(gated), "--data", str(text)]
    models = result(capsys, *verb, "--out", str(tmp_path / "report"))["models"]
    assert [report["masks"] for report in models] == [None, SHOWN]
    alone = [
        result(capsys, "eval", "ppl", "--model", str(folder), "--data", str(text))["loss"]
        for folder in (plain, gated)
    ]
    losses = [report["datasets"]["text.txt"]["loss"] for report in models]
    assert losses == alone
    assert losses[0] != losses[1]
    assert (
        "| none | own (1 of 4 heads full, window 6, sinks 2) | none |"
        in (tmp_path / "report" / "report.md").read_text()
    )
    without = result(capsys, *verb, "--masks", "none")["models"]
    assert [report["datasets"]["text.txt"]["loss"] for report in without] == [losses[0]] * 2


def test_long_questions_are_asked_in_full_and_under_the_models_own_masks(
    gated: Path, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = [
        "eval",
        "long",
        "--tasks",
        "key_value",
        "--lengths",
        "128",
        "--samples",
        "1",
        "--depths",
        "0",
    ]
    variants = result(capsys, *verb, "--model", str(gated))["variants"]
    assert [
        (variant["name"], variant["masks_from"], variant["sparsity"])
        for variant in variants
        if variant["kind"] in ("full", "masks")
    ] == [
        ("full", None, 0.0),
        ("own", "own", 0.75),
    ]
    assert [
        variant["name"]
        for variant in result(capsys, *verb, "--model", str(gated), "--masks", "none")["variants"]
    ] == ["full"]
    assert [
        variant["name"] for variant in result(capsys, *verb, "--model", str(plain))["variants"]
    ] == ["full"]


def test_tasks_of_the_harness_are_answered_under_the_chosen_masks(gated: Path) -> None:
    loaded = load_model(gated)
    pairs = [(TEXT, " and"), (TEXT, " cat")]
    under_masks = HarnessModel(loaded.with_mask_choice(MaskChoice(None))).loglikelihood(pairs)
    none = HarnessModel(loaded.with_mask_choice(MaskChoice("none"))).loglikelihood(pairs)
    assert under_masks == HarnessModel(loaded.with_masks(OWN)).loglikelihood(pairs)
    assert none == HarnessModel(loaded).loglikelihood(pairs) != under_masks


def test_a_table_in_the_folder_is_the_models_own_where_it_has_no_gates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path, CONFIG)
    write_masks(OWN, folder / "masks.tsv")
    assert load_model(folder).with_mask_choice(MaskChoice()).masks == OWN
    # With gates these decide, and a table that differs is reported.
    write_gates(folder, HeadGatesConfig(window=6, sinks=2), -GATES)
    assert load_model(folder).with_mask_choice(MaskChoice()).masks == HeadMasks(
        ((False, True), (True, True)), 6, 2
    )
    assert "differs" not in caplog.text
    write_masks(OWN, folder / "masks.tsv")
    assert load_model(folder).with_mask_choice(MaskChoice()).masks == HeadMasks(
        ((False, True), (True, True)), 6, 2
    )
    assert "masks.tsv: differs from the gates of the model, which are used" in caplog.text


def test_window_and_sinks_of_own_masks_can_be_changed(gated: Path) -> None:
    chosen = load_model(gated).with_mask_choice(MaskChoice("own", stream_window=9, stream_sinks=0))
    assert (chosen.masks, chosen.masks_from) == (OWN.with_reach(9, 0), "own")


def test_options_of_masks_that_contradict_each_other_are_refused_in_one_line(
    plain: Path, gated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--model", str(plain), "--masks", "own"], "--masks is own"),
        (
            ["--model", str(gated), "--masks", "none", "--stream-window", "8"],
            "--stream-window is given with --masks none",
        ),
        (
            ["--model", str(plain), "--equal-per-layer"],
            "--equal-per-layer is given without --masks",
        ),
    ):
        assert main(["generate", "--prompt", "a", "--device", "cpu", *arguments]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1
        assert message in error[0]


def test_sparsities_without_masks_are_refused() -> None:
    with pytest.raises(ConfigError, match="--sparsities is given with --masks none"):
        MaskSpec(MaskChoice("none"), (0.5,))
