"""Recipes: what is accepted, and what a mistake looks like."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import headway

from headway.config.kinds import kind_names
from headway.config.load import dump_yaml, load
from headway.config.section import differences
from headway.errors import ConfigError
from headway.train.config import Recipe


def recipe_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (
            "optim:\n  lr: 1e-3\n  wieght_decay: 0.1\n",
            3,
            ["optim.wieght_decay is not a setting", "did you mean 'weight_decay'"],
        ),
        ("modle: {}\n", 1, ["modle is not a setting", "did you mean 'model'"]),
        ("model:\n  hidden_size: wide\n", 2, ['model.hidden_size is "wide"', "integer"]),
        ("objective:\n  kind: next_tokens\n", 1, ["'next_tokens'", "did you mean 'next_token'"]),
        (
            "objective:\n  kind: next_token\n  z_los: 1\n",
            3,
            ["objective.z_los", "did you mean 'z_loss'"],
        ),
        ("seed: 1\nseed: 2\n", 2, ["duplicate key", "once"]),
        ("model: {preset: llama-1t}\n", 1, ["preset is 'llama-1t'", "llama-1b"]),
        (
            "model: {num_heads: 3, hidden_size: 256}\n",
            1,
            ["num_heads is 3", "must divide hidden_size=256"],
        ),
        ("optim: {betas: [0.9, 1.0]}\n", 1, ["optim.betas is [0.9, 1.0]", "below 1"]),
        ("steps: [\n", 2, ["not YAML"]),
        ("track: [{kind: tensorbord}]\n", 1, ["'tensorbord'", "did you mean 'tensorboard'"]),
    ],
)
def test_a_mistake_names_key_value_expectation_and_line(
    tmp_path: Path, text: str, line: int, words: list[str]
) -> None:
    path = recipe_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(Recipe, path)
    message = str(caught.value)
    assert f"{path}:{line}" in message
    for word in words:
        assert word.lower() in message.lower()


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Recipe, recipe_file(tmp_path, "sede: 1\noptim: {lr: fast}\n"))
    assert len(str(caught.value).splitlines()) == 2


def test_yaml_is_1_2_so_exponents_are_numbers_and_no_is_text(tmp_path: Path) -> None:
    recipe = load(Recipe, recipe_file(tmp_path, "optim: {lr: 3e-4}\nrun: {name: no}\n"))
    assert recipe.optim.lr == 3e-4
    assert recipe.run.name == "no"


def test_overrides_win_over_the_file_and_reach_into_lists(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, "seed: 1\ndata: {train: [{path: a}, {path: b}]}\n")
    recipe = load(
        Recipe,
        path,
        [
            "seed=7",
            "data.train.1.min_length=9",
            "optim.schedule.kind=linear",
            "objective.z_loss=1e-4",
        ],
    )
    assert recipe.seed == 7
    assert recipe.data.train is not None
    assert recipe.data.train[1].min_length == 9
    assert recipe.optim.schedule.kind == "linear"


@pytest.mark.parametrize(
    "override", ["seed", "=3", "data.train.5.path=x", "seed.x=1", "data.train.0.limit.x=3"]
)
def test_an_override_that_cannot_be_applied_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        load(Recipe, recipe_file(tmp_path, "seed: 1\ndata: {train: [a]}\n"), [override])


def test_a_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = load(
        Recipe,
        None,
        [
            "model.preset=llama-1b",
            "data.train=[a@0.3, b@0.7]",
            "track=[{kind: tensorboard}]",
            "init.from=x",
        ],
    )
    again = load(Recipe, recipe_file(tmp_path, dump_yaml(recipe)))
    assert again == recipe


def test_fixed_and_free_differences_are_separated() -> None:
    old = load(Recipe, None, ["seed=1", "optim.lr=1e-3", "model.num_layers=2", "steps=10"])
    new = load(Recipe, None, ["seed=2", "optim.lr=1e-4", "model.num_layers=3", "steps=20"])
    fixed, free = differences(old, new)
    assert {line.split(":")[0] for line in fixed} == {"seed", "model.num_layers"}
    assert {line.split(":")[0] for line in free} == {"optim.lr", "steps"}


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(Recipe).seed = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_the_schema_describes_every_section_and_kind() -> None:
    schema = Recipe.model_json_schema(by_alias=True)
    assert set(schema["properties"]) >= {
        "run",
        "model",
        "data",
        "objective",
        "optim",
        "batch",
        "steps",
        "track",
    }
    kinds = [
        option["properties"]["kind"].get("const")
        for option in schema["properties"]["objective"]["anyOf"]
    ]
    assert "next_token" in kinds
    undescribed = [
        name
        for name, entry in schema["properties"].items()
        if not (entry.get("description") or "$ref" in entry)
    ]
    assert not undescribed


def test_configuration_and_help_never_import_torch() -> None:
    script = "import sys, headway, headway.train.config, headway.cli; headway.cli.build_app(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "override", "said"),
    [
        (
            "batch: {tokens: 8192, micro_rows: 2}",
            "batch.rows=2",
            "batch.rows=2 replaces batch.tokens=8192",
        ),
        (
            "batch: {rows_per_rank: 2, accumulate: 3}",
            "batch.rows=8",
            "batch.rows=8 replaces batch.rows_per_rank=2",
        ),
        (
            "batch: {rows: 4}",
            "batch.rows_per_rank=2",
            "batch.rows_per_rank=2 replaces batch.rows=4",
        ),
        ("epochs: 2", "steps=5", "steps=5 replaces epochs=2"),
        (
            "data: {valid: {sets: {a: x}}}",
            "data.valid.fraction=0.1",
            "data.valid.fraction=0.1 replaces data.valid.sets",
        ),
        ("train: [norms]", "freeze=[embeddings]", "replaces train=['norms']"),
    ],
)
def test_an_override_replaces_the_recipes_other_way_to_say_it_and_says_so(
    tmp_path: Path, text: str, override: str, said: str
) -> None:
    notes: list[str] = []
    load(Recipe, recipe_file(tmp_path, text), [override], notes.append)
    assert said in notes[0]
    assert "recipe.yaml:1" in notes[0]


def test_two_overrides_that_contradict_each_other_are_still_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has tokens and rows"):
        load(Recipe, None, ["batch.rows=2", "batch.tokens=512"])
    assert load(Recipe, recipe_file(tmp_path, "epochs: 2"), ["steps=null"]).epochs == 2


def test_a_replaced_form_is_shown_on_the_screen(tmp_path: Path) -> None:
    done = headway(
        "config", "show", str(recipe_file(tmp_path, "batch: {tokens: 8192}")), "batch.rows=2"
    )
    assert done.returncode == 0
    assert "batch.rows=2 replaces batch.tokens=8192" in done.stderr


@pytest.mark.parametrize(
    ("value", "meant"), [("true", 1.0), ("false", "none"), ("0.5", 0.5), ("selective", "selective")]
)
def test_recompute_takes_the_switch_that_other_systems_have(value: str, meant: float | str) -> None:
    assert load(Recipe, None, [f"memory.recompute={value}"]).memory.recompute == meant


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("[all]", "all"),
        ("all", "all"),
        ("model", ("model",)),
        ("[model, optimizer]", ("model", "optimizer")),
    ],
)
def test_content_is_a_list_a_name_or_all(value: str, meant: object) -> None:
    assert load(Recipe, None, ["init.from=x", f"init.content={value}"]).init.content == meant


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "parallel.hook.kind=torch_style",
            "parallel.hook.state=x",
            "parallel.hook={kind: compress}",
        ],
        ["optim.schedule.zero_steps=3", "optim=adamw"],
    ],
)
def test_a_later_override_may_take_the_place_of_an_earlier_one(overrides: list[str]) -> None:
    load(Recipe, None, overrides)


@pytest.mark.parametrize(
    "setting", ["checkpoint.to", "run.dir", "run.name", "init.from", "init.masks", "tokenizer"]
)
def test_a_path_that_no_file_system_takes_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="at most 255 bytes"):
        load(Recipe, None, [f"{setting}={'é' * 200}"])


def test_integers_beyond_63_bits_and_endless_steps_are_refused() -> None:
    for override in (
        "seed=9223372036854775808",
        "heal.window=9223372036854775807",
        "adapter.rank=100000000000000",
    ):
        with pytest.raises(ConfigError, match=r"must be smaller|less than or equal"):
            load(Recipe, None, [override])
    with pytest.raises(ConfigError, match=r"the maximum is .* tokens\. Lower it"):
        load(Recipe, None, ["batch.rows=100000000000000"]).batch.resolve(512, 1)


@pytest.mark.parametrize("package", ["tasks", "optim", "parallel.hooks", "track"])
def test_every_module_with_a_config_class_is_a_listed_kind(package: str) -> None:
    folder = Path(__file__).parents[3] / "src" / "headway" / package.replace(".", "/")
    modules = {path.stem: path for path in folder.glob("*.py")}
    modules |= {path.parent.name: path for path in folder.glob("*/__init__.py")}
    classes = {
        name: [
            node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
        ]
        for name, path in modules.items()
    }
    assert sorted(name for name, source in classes.items() if "Config" in source) == sorted(
        kind_names(f"headway.{package}")
    )
