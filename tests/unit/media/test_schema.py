"""Answers are checked against a JSON schema; PurrSight's report and its rule about risk ship with headway."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.media.schema import AnswerSchema, load_schema

REPORT: dict[str, Any] = {
    "diagnostic": {
        "physical_markers": {
            "ears": "forward",
            "tail": "upright",
            "posture": "relaxed",
            "vocalization": "purr",
        },
        "classification": {
            "ethogram_group": "maintenance",
            "affective_state": "content",
            "arousal_level": "low",
            "risk_rating": 1,
        },
    },
    "behavioral_summary": "The cat rests.",
    "human_actionable_insight": "让它休息。",
}


def changed(**values: Any) -> str:
    report = copy.deepcopy(REPORT)
    report["diagnostic"]["classification"] |= values
    return json.dumps(report, ensure_ascii=False)


PURRSIGHT = load_schema("purrsight_v3")


def test_purrsights_report_follows_its_schema() -> None:
    assert PURRSIGHT.problems(json.dumps(REPORT)) == []


@pytest.mark.parametrize(
    "values",
    [
        {"ethogram_group": "agonistic"},
        {"affective_state": "distressed"},
        {"affective_state": "aggressive"},
    ],
)
def test_a_troubled_cat_has_a_risk_of_at_least_four(values: dict[str, str]) -> None:
    assert PURRSIGHT.problems(changed(**values)) == [
        "answer.diagnostic.classification.risk_rating is 1; it must be at least 4"
    ]
    assert PURRSIGHT.is_valid(changed(**values, risk_rating=4))


@pytest.mark.parametrize("rating", [6, 2.5, True])
def test_a_risk_is_a_whole_number_up_to_five(rating: Any) -> None:
    assert not PURRSIGHT.is_valid(changed(risk_rating=rating))


def test_a_value_that_is_not_among_the_choices_is_named_by_its_key() -> None:
    assert "ears" in PURRSIGHT.problems(json.dumps(REPORT).replace("forward", "up"))[0]


def test_answers_that_are_no_json_or_lack_keys_are_not_valid() -> None:
    assert PURRSIGHT.problems("the cat is fine")[0].startswith("the answer is not JSON")
    answers = [json.dumps(REPORT), "{}", "x", json.dumps(REPORT)]
    assert [PURRSIGHT.is_valid(answer) for answer in answers] == [True, False, False, True]


@pytest.mark.parametrize(
    ("rules", "good", "bad"),
    [
        ({"type": "integer"}, "3", "3.5"),
        ({"type": ["integer", "null"]}, "null", '"x"'),
        ({"enum": ["a", 1]}, "1", "true"),
        ({"const": {"a": [1]}}, '{"a": [1]}', '{"a": [2]}'),
        ({"required": ["a"]}, '{"a": 1}', "{}"),
        (
            {"properties": {"a": {"type": "string"}}, "additionalProperties": False},
            '{"a": ""}',
            '{"b": ""}',
        ),
        ({"items": {"type": "number"}, "minItems": 1, "maxItems": 2}, "[1, 2.5]", "[1, 2, 3]"),
        ({"items": {"type": "number"}}, "[]", '["x"]'),
        ({"minLength": 2, "maxLength": 3}, '"ab"', '"abcd"'),
        ({"pattern": "^a+$"}, '"aa"', '"ab"'),
        ({"minimum": 1, "maximum": 2}, "1.5", "2.5"),
        ({"anyOf": [{"type": "string"}, {"minimum": 5}]}, "6", "4"),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, "2", "3"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"minimum": 0}}, "0", "-1"),
    ],
)
def test_each_rule_accepts_and_refuses(rules: dict[str, Any], good: str, bad: str) -> None:
    schema = AnswerSchema(rules)
    assert schema.problems(good) == []
    assert schema.problems(bad)


@pytest.mark.parametrize(
    "rules",
    [{"$ref": "#/x"}, {"oneOf": []}, {"type": "text"}, {"type": []}, {"type": 3}, {"properties": {"a": 3}}, {"pattern": "("},
     {"minimum": "x"}, {"items": {"format": "date"}}, {"minLength": True}],
)  # fmt: skip
def test_rules_that_are_not_supported_are_refused_when_loaded(rules: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AnswerSchema(rules)


def test_a_missing_file_names_the_shipped_schemas(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of purrsight_v3"):
        load_schema(tmp_path / "none.json")
    (tmp_path / "a.json").write_text('{"type": "object"}')
    assert load_schema(tmp_path / "a.json").is_valid("{}")


def test_deep_answers_are_refused() -> None:
    assert AnswerSchema({"type": "array"}).problems("[" * 100_000)
