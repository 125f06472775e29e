"""An objective, a family and a tracker that live outside the package are used by name, without editing anything of ours."""

import json
from pathlib import Path

import pytest
import torch

from headway.checkpoint.load import open_checkpoint
from headway.config.load import load
from headway.errors import ConfigError
from headway.export.huggingface import export_model
from headway.infer.load import load_model
from headway.train import train
from headway.train.config import Recipe

TINY = (
    "model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "model.ffn_size=24", "model.vocab_size=64", "model.max_seq_len=32",
    "data.seq_len=32", "batch.rows=4", "steps=3", "device=cpu", "optim.lr=1e-2", "optim.schedule.warmup=0",
)  # fmt: skip


def test_an_objective_with_its_own_parameter_trains_and_is_saved(tmp_path: Path) -> None:
    recipe = load(
        Recipe,
        None,
        [
            *TINY,
            f"run.dir={tmp_path}",
            "objective={kind: support.my_lab.squared, power: 1.5}",
            "log.every=1",
        ],
    )
    train(recipe)
    saved = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003")
    scale = saved.read("objective.scale", "master")
    assert scale.item() != 1.5, "the objective's parameter is trained"
    assert "exp_avg" in saved.roles("objective.scale")
    again = load(
        Recipe,
        None,
        [
            *TINY,
            f"run.dir={tmp_path}",
            "objective={kind: support.my_lab.squared, power: 1.5}",
            "steps=4",
        ],
    )
    assert train(again)["steps"] == 4


def test_a_family_of_ones_own_trains_exports_and_loads(tmp_path: Path) -> None:
    train(load(Recipe, None, [*TINY, f"run.dir={tmp_path}", "model.family=support.my_lab.family"]))
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["model_type"] == "my_llama"
    from safetensors import safe_open

    with safe_open(tmp_path / "run" / "final" / "model.safetensors", framework="pt") as file:
        assert all(name.startswith("lab.") for name in file.keys())  # noqa: SIM118 # not a mapping
    saved = open_checkpoint(tmp_path / "run" / "checkpoints" / "latest")
    loaded = load_model(tmp_path / "run" / "checkpoints" / "latest")
    assert torch.equal(loaded.model.head_weight, saved.weight("model.embed_tokens.weight"))


def test_a_checkpoints_word_alone_imports_no_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(load(Recipe, None, [*TINY, f"run.dir={tmp_path}", "model.family=support.my_lab.family"]))
    latest = tmp_path / "run" / "checkpoints" / "latest"
    monkeypatch.setattr(
        "headway.model.families.base.import_user_module", lambda *_: pytest.fail("it was imported")
    )
    load_model(latest)
    said = "names the family 'support.my_lab.family'.*does not import code because a checkpoint names it"
    with pytest.raises(ConfigError, match=said):
        export_model(latest, tmp_path / "exported")
    with pytest.raises(ConfigError, match=said):
        train(
            load(
                Recipe, None, [*TINY, f"run.dir={tmp_path}", "run.name=next", f"init.from={latest}"]
            )
        )
    with pytest.raises(ConfigError, match="does not name this module as its family"):
        export_model(latest, tmp_path / "exported", family="support.my_lab.other")
    monkeypatch.undo()
    export_model(latest, tmp_path / "exported", family="support.my_lab.family")
    assert (
        json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"] == "my_llama"
    )
    again = [
        *TINY,
        f"run.dir={tmp_path}",
        "run.name=next",
        f"init.from={latest}",
        "model.family=support.my_lab.family",
    ]
    assert train(load(Recipe, None, again))["steps"] == 3


def test_a_tracker_of_ones_own_gets_every_logged_step(tmp_path: Path) -> None:
    train(
        load(
            Recipe,
            None,
            [
                *TINY,
                f"run.dir={tmp_path}",
                "track=[{kind: support.my_lab.lines, file: mine.txt}]",
                "log.every=1",
            ],
        )
    )
    assert [
        line.split()[0] for line in (tmp_path / "run" / "mine.txt").read_text().splitlines()
    ] == ["1", "2", "3"]
