"""Values are what they are written as: text is no number, a number no switch, and a place past a list's end is none."""

import pytest

from headway.config.load import load
from headway.config.yaml_reader import parse_yaml
from headway.errors import ConfigError
from headway.train.config import Recipe


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed='7'", "seed"),
        ("seed=7.5", "seed"),
        ("optim.lr='1e-3'", "optim.lr"),
        ("deterministic=1", "deterministic"),
        ("model.tie_embeddings='true'", "model.tie_embeddings"),
        ("run.name=7", "run.name"),
        ("optim.lr=.inf", "optim.lr"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_key(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key if ".inf" not in override else "recipe|optim"):
        load(Recipe, None, [override])


@pytest.mark.parametrize("index", [1, 2, 7])
def test_a_place_past_the_end_of_a_list_is_one_line(index: int) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.train is a list of length 1; use an index below 1"
    ):
        load(Recipe, None, ["data.train=[a]", f"data.train.{index}=b"])
    assert load(Recipe, None, ["data.train=[a]", "data.train.0=b"]).data.train[0].path == "b"  # pyright: ignore


def laughs(levels: int) -> str:
    """Each level ten times the one before it."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\n---\nseed: 2\n", "a second document begins"),
        (laughs(6), "values after aliases are expanded"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than 32 levels deep"),
        ("a: *b", "has no anchor above it"),
        ("a: !!python/object:os.system {}", "is not supported"),
        ("a: 1\na: 2", "duplicate key"),
        ("a: " + "9" * 500, "a number of 500 characters"),
    ],
    ids=["documents", "aliases", "depth", "unknown alias", "tag", "duplicate", "digits"],
)
def test_what_no_recipe_is_is_refused_at_once(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_yaml(text, "recipe.yaml")


def test_aliases_and_merges_mean_what_they_mean_in_yaml() -> None:
    text = "base: &base {a: 1, b: [x]}\none: {<<: *base, a: 2}\ntwo: *base\nlist: [*base, 3]\n"
    base = {"a": 1, "b": ["x"]}
    assert parse_yaml(text, "recipe.yaml") == {
        "base": base,
        "one": {"a": 2, "b": ["x"]},
        "two": base,
        "list": [base, 3],
    }
    assert parse_yaml("[0x1f, 0o17, 1e-3, .5, no, 'no', ~, 2020-01-01]", "v") == [
        31,
        15,
        1e-3,
        0.5,
        "no",
        "no",
        None,
        "2020-01-01",
    ]
