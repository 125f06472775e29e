"""Values of a sandbox arrive as they were, and whatever else arrives is no value."""

import importlib.util
import json
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import pytest

import headway.rewards.sandbox.plain as plain
from headway.rewards.sandbox.plain import NoValueError, decode, read_values

PROGRAM = Path(plain.__file__).with_name("program.py")
spec = importlib.util.spec_from_file_location("sandbox_program", PROGRAM)
assert spec is not None and spec.loader is not None
program: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)


@pytest.mark.parametrize(
    "value",
    [None, False, 1 << 64, -0.1, float("inf"), 1j, "ü\ud800", b"\xff", [1, [2]], (1, (2.5,)), {1, 2},
     frozenset("a"), {"a": [1], 2: (3,)}],
)  # fmt: skip
def test_a_value_arrives_as_it_was(value: object) -> None:
    arrived = decode(json.loads(program.as_json(program.encode(value, 0))))
    assert arrived == value
    assert type(arrived) is type(value)


def test_a_subclass_arrives_as_its_base() -> None:
    assert decode(program.encode(Counter("aab"), 0)) == {"a": 2, "b": 1}
    assert decode(program.encode(namedtuple("P", "x")(3), 0)) == (3,)


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True


def test_an_object_of_the_program_is_no_value() -> None:
    with pytest.raises(TypeError):
        program.encode([AlwaysEqual()], 0)


@pytest.mark.parametrize(
    "encoded",
    [
        None, [], 3, "int", ["int", 3], ["int", "0x"], ["bool", "true"], ["bool", 1], ["str", 3], ["list", "abc"],
        ["list", {"a": 1}], ["set", [["list", []]]], ["dict", [[["int", "0x1"]]]], ["float", "one"],
        ["bytes", "xyz"], ["object", "x"], ["complex", "1"], ["dict", 3],
    ],
)  # fmt: skip
def test_what_is_no_encoded_value_is_refused(encoded: object) -> None:
    with pytest.raises(NoValueError):
        decode(encoded)


@pytest.mark.parametrize(
    "text",
    ["", "passed", "[]", '{"values": 3}', '{"values": []}', '{"values": [["none"]]}{"values": [["none"]]}', "[" * 99999],
)  # fmt: skip
def test_anything_but_one_object_with_all_values_is_refused(text: str) -> None:
    with pytest.raises(NoValueError):
        read_values(text, 1)


def test_a_number_of_any_length_arrives() -> None:
    assert decode(program.encode(-(1 << 40_000), 0)) == -(1 << 40_000)
