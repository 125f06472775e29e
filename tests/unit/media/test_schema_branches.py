"""A schema without conditions allows exactly what the schema with them allows."""

import itertools
import json
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.media.schema import AnswerSchema, load_schema
from headway.media.schema_branches import closed_schema, without_conditions


def classification(schema: AnswerSchema) -> dict[str, Any]:
    return schema.rules["properties"]["diagnostic"]["properties"]["classification"]


def test_the_branches_of_purrsight_allow_what_its_condition_allows() -> None:
    rules = classification(load_schema("purrsight_v3"))
    branches = without_conditions(rules)
    assert "if" not in json.dumps(branches).replace('"ifs', "")
    assert len(branches["anyOf"]) == 3
    with_condition = AnswerSchema(rules)
    without = AnswerSchema(branches)
    names = ["ethogram_group", "affective_state", "arousal_level"]
    lists = [[*rules["properties"][name]["enum"], "unknown"] for name in names]
    allowed = 0
    for values in itertools.product(*lists, range(7)):
        answer = json.dumps(dict(zip([*names, "risk_rating"], values, strict=True)))
        assert with_condition.is_valid(answer) is without.is_valid(answer), answer
        allowed += with_condition.is_valid(answer)
    # By hand: 4 x 6 x 3 combinations; 12 of the 24 pairs ask for a risk of 4 or 5, the others allow 1 to 5.
    assert allowed == 3 * (12 * 2 + 12 * 5)


def test_then_and_else_both_count() -> None:
    rules = {
        "type": "object",
        "required": ["kind"],
        "properties": {
            "kind": {"enum": ["a", "b", "c"]},
            "size": {"type": "integer", "minimum": 0},
        },
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"properties": {"size": {"maximum": 3}}, "required": ["size"]},
        "else": {"properties": {"size": {"minimum": 7}}},
    }
    with_condition = AnswerSchema(rules)
    without = AnswerSchema(without_conditions(rules))
    for kind, size in itertools.product("abcd", [None, -1, 0, 3, 4, 7]):
        answer = json.dumps({"kind": kind} if size is None else {"kind": kind, "size": size})
        assert with_condition.is_valid(answer) is without.is_valid(answer), answer


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"if": {"properties": {"kind": {"pattern": "^a"}}}}, "list of values"),
        ({"if": {"properties": {"size": {"const": 1}}}}, "'size' to be required"),
        ({"if": {"not": {}}}, "'not' in a condition"),
        ({"required": []}, "'kind' to be required"),
    ],
)
def test_conditions_that_are_not_about_lists_are_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    rules = {
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": ["a", "b"]}, "size": {"type": "integer"}},
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["size"]},
        **changes,
    }
    with pytest.raises(ConfigError, match=named):
        without_conditions(rules)


def test_closed_objects_have_no_other_keys() -> None:
    closed = closed_schema(load_schema("purrsight_v3").rules)
    assert closed["additionalProperties"] is False
    assert classification(AnswerSchema(closed))["additionalProperties"] is False
    assert (
        closed_schema({"type": "object", "properties": {}, "additionalProperties": True})[
            "additionalProperties"
        ]
        is True
    )


def test_properties_that_are_called_like_rules_stay() -> None:
    rules = {
        "type": "object",
        "properties": {"if": {"type": "string"}, "enum": {"type": "integer"}},
    }
    assert without_conditions(rules) == rules
