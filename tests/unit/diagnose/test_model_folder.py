"""`headway doctor model` says of a folder what is known, what is not, and what it can be used for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.byte_model import byte_tokenizer

from headway.cli import main
from headway.diagnose.model_folder import ModelReport, examine_model
from headway.export.huggingface import export_huggingface
from headway.model.config import ModelConfig
from headway.model.layout import param_specs

CONFIG = ModelConfig(vocab_size=512, hidden_size=32, num_layers=2, num_heads=4, ffn_size=48)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole Llama with a tokenizer."""
    byte_tokenizer().save(tmp_path / "tokenizer")
    weights = ((spec.name, torch.zeros(spec.shape)) for spec in param_specs(CONFIG))
    out = tmp_path / "model"
    export_huggingface(CONFIG, weights, out, tokenizer=tmp_path / "tokenizer")
    # Later changes of a test would be damage.
    (out / "headway_digests.json").unlink()
    return out


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def look(folder: Path) -> ModelReport:
    return examine_model(folder, compares=False)


def states(report: ModelReport) -> dict[str, str]:
    return {fact.key: fact.state for fact in report.keys}


def test_a_whole_folder_can_be_used_for_everything(folder: Path) -> None:
    report = look(folder)
    assert report.is_usable
    assert report.family == "llama"
    assert set(report.uses.values()) == {"yes"}
    assert states(report)["rope_theta"] == "read"
    assert states(report)["torch_dtype"] == "no effect"


def test_every_key_is_read_or_has_no_effect_or_is_unknown(folder: Path) -> None:
    change_config(folder, curl_of_attention=3, license="mit", attention_bias=False)
    report = look(folder)
    assert not report.is_usable
    assert set(states(report)) == set(json.loads((folder / "config.json").read_text()))
    assert [key for key, state in states(report).items() if state == "unknown"] == [
        "curl_of_attention"
    ]
    assert any("curl_of_attention" in check.detail for check in report.checks)


def test_missing_extra_and_wrong_tensors_are_all_listed(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, path, {"format": "pt"})
    lines = [check.detail for check in look(folder).checks if check.state == "fail"]
    assert len(lines) == 3
    assert "model.norm.weight" in lines[0]
    assert "model.layers.7" in lines[1]
    assert "[3, 3]" in lines[2]


def test_config_json_alone_is_enough(tmp_path: Path, folder: Path) -> None:
    alone = tmp_path / "alone" / "config.json"
    alone.parent.mkdir()
    alone.write_bytes((folder / "config.json").read_bytes())
    report = look(alone)
    assert report.is_usable
    assert report.uses["generate"] == "no weights here"
    assert report.uses["train"] == "yes"


def test_a_type_that_nobody_knows_and_a_path_without_a_config_end_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(folder, model_type="curl_net")
    assert main(["doctor", "model", str(folder), "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert "curl_net" in report["checks"][0]["detail"]
    assert main(["doctor", "model", str(folder / "none")]) == 2


def test_a_family_says_what_it_agrees_on_with_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    assert main(["doctor", "model", str(folder), "--json"]) == 0
    agreement = json.loads(capsys.readouterr().out)["agreement"]
    assert agreement["greedy"]
    assert agreement["export"]
    assert agreement["logits"] < 1e-5


def test_an_absent_key_that_transformers_understands_otherwise_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from headway.model.families import _config_json

    path = folder / "config.json"
    settings = json.loads(path.read_text())
    del settings["rms_norm_eps"]
    path.write_text(json.dumps(settings))
    monkeypatch.setitem(_config_json.DEFAULTS, "rms_norm_eps", 1e-3)
    report = examine_model(folder)
    assert any(check.name == "defaults" and "norm_eps" in check.detail for check in report.checks)


def test_a_folder_with_a_vision_tower_says_whether_pictures_are_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from support.small_vision import write_vision

    folder = write_vision(tmp_path, kind="qwen3_vl")
    assert examine_model(folder, compares=False).uses["pictures"] == "yes"
    (folder / "preprocessor_config.json").unlink()
    answer = examine_model(folder, compares=False).uses["pictures"]
    assert "no such file; it says how pictures become patches" in answer
