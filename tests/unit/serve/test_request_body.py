"""Bodies of requests as models: which field an error names, what null and empty values mean, what is kept as it was sent."""

import json
from typing import Any

import pytest

from headway.serve.api_errors import ApiError
from headway.serve.chat_request import read_chat
from headway.serve.request_body import MAX_DEPTH, MAX_VALUES
from headway.serve.text_request import read_completion, read_embedding

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def chat(**fields: Any) -> Any:
    """A conversation with these fields, read."""
    return read_chat(json.dumps({**HELLO, **fields}).encode(), max_n=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "model is missing; it must be a text."),
        ({"temperature": 3}, "temperature is 3; it must be a number from 0 to 2."),
        ({"n": 9}, "n is 9; it must be a whole number from 1 to 8."),
        ({"messages": [None]}, "messages[0] is null; it must be an object."),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text is 3; it must be a text.",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "n"}}},
            "response_format.json_schema is not supported by this server. Leave it out.",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "name": "Al"}]},
            "messages[0].name is not supported by this server. Leave it out.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text is missing; it must be a text.",
        ),
        (
            {"tools": [{"function": {"name": "f", "odd": 1}}]},
            "tools[0].function.odd is not supported by this server. Leave it out.",
        ),
        ({"stream_options": 3}, "stream_options is 3; it must be an object."),
    ],
)
def test_an_error_names_the_field_its_value_and_what_it_must_be(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert str(caught.value) == message
    assert caught.value.status == 400
    assert caught.value.param == message.split()[0]


def test_null_and_empty_unknown_fields_are_missing_fields() -> None:
    nothing = {"temperature": None, "seed": None, "tools": None, "odd": [], "odder": {}, "o": None}
    fields = chat(**nothing).fields
    assert fields.sampling.temperature == 1.0
    assert fields.max_tokens is None


def test_an_empty_field_that_other_objects_have_is_a_missing_field() -> None:
    part = {"type": "text", "text": "a", "image_url": {}, "input_audio": []}
    user = {"role": "user", "content": [part], "refusal": [], "name": {}}
    assistant = {"role": "assistant", "content": "b", "tool_call_id": {}}
    call = chat(
        messages=[user, assistant, user], response_format={"type": "text", "json_schema": {}}
    )
    assert [turn.content for turn in call.turns] == ["a", "b", "a"]


def test_a_whole_number_may_be_written_as_a_float() -> None:
    assert chat(max_tokens=16.0).fields.max_tokens == 16


def test_tools_and_schemas_stay_as_they_were_sent() -> None:
    tool = {"function": {"strict": None, "parameters": {"b": 1, "a": None}, "name": "f"}}
    assert json.dumps(chat(tools=[tool]).tools) == json.dumps([tool])
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    assert chat(response_format=form).schema == {}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ([1, 2], ((1, 2),)),
        (["a", [1]], ("a", (1,))),
        ([[1], [2]], ((1,), (2,))),
    ],
)
def test_prompts_are_texts_or_ids(prompt: Any, expected: Any) -> None:
    body = json.dumps({"model": "m", "prompt": prompt, "input": prompt}).encode()
    with pytest.raises(ApiError, match="input is not supported"):
        read_completion(body, 8)
    assert (
        read_completion(json.dumps({"model": "m", "prompt": prompt}).encode(), 8).prompts
        == expected
    )
    assert read_embedding(json.dumps({"model": "m", "input": prompt}).encode()).inputs == expected


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [True], [-1], [1.0], {}, 3, ["a", None]])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match=r"prompt is .*; it must be a text, a list of token ids"):
        read_completion(json.dumps({"model": "m", "prompt": prompt}).encode(), 8)


def nested(content: Any, levels: int) -> Any:
    """A value inside lists."""
    for _ in range(levels):
        content = [content]
    return content


def test_bodies_are_bounded_in_depth_and_in_values() -> None:
    # The body itself and `metadata` are two levels.
    chat(metadata=nested("x", MAX_DEPTH - 1))
    chat(metadata=nested([1], MAX_DEPTH - 1))
    for value in ("x", None, {"a": 1}):
        with pytest.raises(ApiError, match="nested deeper"):
            chat(metadata=nested(value, MAX_DEPTH))
    chat(metadata=[1] * (MAX_VALUES + 1))
    for many in (["x"] * MAX_VALUES, [None] * MAX_VALUES, {str(n): n for n in range(MAX_VALUES)}):
        with pytest.raises(ApiError, match="holds more than"):
            chat(metadata=many)
