"""A command line that changes a kind: the recipe's settings of the other kind are left out and named; the user's own are refused."""

from pathlib import Path

import pytest
from support.runs import headway

from headway.config.load import load
from headway.config.shipped import find_recipe
from headway.errors import ConfigError
from headway.train.config import Recipe


def load_noting(name: str, *overrides: str) -> tuple[Recipe, list[str]]:
    notes: list[str] = []
    return load(Recipe, find_recipe(name), overrides, notes.append), notes


@pytest.mark.parametrize(
    ("name", "override", "left_out"),
    [
        ("dpo", "objective.kind=orpo", ['loss_type="sigmoid"', 'reference_logps="cached"']),
        (
            "dpo",
            "objective.kind=simpo",
            ['loss_type="sigmoid"', 'reference_logps="cached"', "beta=0.1"],
        ),
        (
            "sparsify",
            "objective.kind=next_token",
            ["start=0.0", "target=0.6", "warmup=0.8", "window=64", "sinks=4"],
        ),
        (
            "multimodal/align",
            "model.aligner.encoders.image.kind=efficientnet_lite0",
            ["image_size=32", 'stem="convolutions"'],
        ),
        (
            "node/nope_stage1",
            "optim.kind=schedule_free",
            ['schedule.kind="cosine"', "schedule.floor=0.0"],
        ),
        ("node/prulong-stages", "stages.0.objective.kind=next_token", ["start=0.0", "window=1024"]),
    ],
)
def test_settings_of_the_recipes_kind_are_left_out_in_one_line(
    name: str, override: str, left_out: list[str]
) -> None:
    _, notes = load_noting(name, override)
    assert len(notes) == 1
    assert notes[0].startswith(f"{override} leaves out ")
    for setting in left_out:
        assert setting in notes[0]


def test_what_both_kinds_know_stays_unless_it_has_another_meaning() -> None:
    orpo, _ = load_noting("dpo", "objective.kind=orpo")
    assert orpo.objective.model_dump() == {"kind": "orpo", "beta": 0.1}
    # DPO's beta weighs a divergence, SimPO's scales rewards: the recipe's 0.1 would be a wrong value for it.
    simpo, _ = load_noting("dpo", "objective.kind=simpo")
    assert simpo.objective.model_dump()["beta"] == 2.0
    muon, notes = load_noting("pretrain", "optim.kind=muon")
    assert muon.optim.lr == 1e-3
    assert muon.optim.schedule.floor == 0.1
    assert not notes


def test_a_setting_of_the_command_line_stays_or_is_refused() -> None:
    simpo, notes = load_noting("dpo", "objective.kind=simpo", "objective.beta=0.1")
    assert simpo.objective.model_dump()["beta"] == 0.1
    assert "beta" not in notes[0]
    with pytest.raises(ConfigError) as caught:
        load_noting("dpo", "objective.loss_type=ipo", "objective.kind=orpo")
    assert "override objective.loss_type=ipo" in str(caught.value)
    assert "objective.kind orpo takes kind, beta." in str(caught.value)


def test_a_mistake_in_the_file_is_still_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("objective: {kind: dpo, loss_typ: sigmoid}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"objective\.loss_typ is not a setting"):
        load(Recipe, path, ["objective.kind=orpo"])
    path.write_text("objective: {kind: dpo, gamma: 1}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"objective\.kind dpo takes"):
        load(Recipe, path)


def test_python_changes_a_kind_in_the_same_way() -> None:
    recipe = Recipe.load("laptop/dpo").with_({"objective.kind": "orpo"})
    assert recipe.objective.model_dump() == {"kind": "orpo", "beta": 0.1}
    assert (
        Recipe.load(
            {"objective": {"kind": "dpo", "loss_type": "ipo"}}, ["objective.kind=orpo"]
        ).objective.kind
        == "orpo"
    )


def test_the_line_is_on_the_screen() -> None:
    done = headway("config", "show", "dpo", "objective.kind=orpo")
    assert done.returncode == 0
    assert (
        'objective.kind=orpo leaves out loss_type="sigmoid", reference_logps="cached" of the recipe, which are for dpo'
        in done.stderr
    )


def test_a_recipe_to_edit_holds_the_new_kind_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert headway("init", "dpo", "objective.kind=orpo", "--out", str(path)).returncode == 0
    assert load(Recipe, path).objective.model_dump() == {"kind": "orpo", "beta": 0.1}
