"""Chat and preference records of every shape become the same turns; what is missing is named with file and line."""

from typing import Any

import pytest

from headway.errors import DataError
from headway.records.chat import parse_conversation
from headway.records.preference import parse_preference
from headway.text.document import Record
from headway.tokenizer.chat_template import Call, Turn

QUESTION = Turn("user", "Hi")
ANSWER = Turn("assistant", "Hello")


def record(**data: Any) -> Record:
    return Record(data, "chat.jsonl", 7)


@pytest.mark.parametrize(
    ("data", "turns"),
    [
        ({"instruction": "Hi", "output": "Hello"}, [QUESTION, ANSWER]),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, [QUESTION, ANSWER]),
        (
            {"instruction": "Sort", "input": "b a", "output": "a b"},
            [Turn("user", "Sort", context="b a"), Turn("assistant", "a b")],
        ),
        (
            {
                "instruction": "Hi",
                "output": "Hello",
                "system": "Be kind.",
                "history": [["a", "b"], ["c", "d"]],
            },
            [
                Turn("system", "Be kind."),
                Turn("user", "a"),
                Turn("assistant", "b"),
                Turn("user", "c"),
                Turn("assistant", "d"),
                QUESTION,
                ANSWER,
            ],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello"},
                ]
            },
            [QUESTION, ANSWER],
        ),
        (
            {
                "id": "x",
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "assistant", "value": "Hello"},
                ],
            },
            [QUESTION, ANSWER],
        ),
        (
            {
                "conversations": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hello"},
                ]
            },
            [QUESTION, ANSWER],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hello"},
                ]
            },
            [QUESTION, ANSWER],
        ),
        (
            {
                "messages": [
                    {"role": "developer", "content": "s"},
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hello"},
                ]
            },
            [Turn("system", "s"), QUESTION, ANSWER],
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "H"}, {"type": "text", "value": "i"}],
                        "loss_weight": 0.0,
                    },
                    {"role": "assistant", "content": "no", "loss_weight": 0.0},
                    {"role": "assistant", "content": "Hello", "weight": 1},
                ]
            },
            [QUESTION, Turn("assistant", "no", learn=False), ANSWER],
        ),
        (
            {
                "conversation": [
                    {"system": "s", "input": "Hi", "output": "Hello"},
                    {"input": "a", "output": "b"},
                ]
            },
            [Turn("system", "s"), QUESTION, ANSWER, Turn("user", "a"), Turn("assistant", "b")],
        ),
        ({"prompt": "Hi", "completion": "Hello"}, [QUESTION, ANSWER]),
        ({"prompt": "Hi", "response": "Hello"}, [QUESTION, ANSWER]),
    ],
)
def test_every_shape_of_a_conversation_is_known(data: dict[str, Any], turns: list[Turn]) -> None:
    assert list(parse_conversation(record(**data)).turns) == turns


def test_tool_calls_of_both_worlds_are_the_same() -> None:
    call = '{"name": "add", "arguments": {"a": 2}}'
    sharegpt = parse_conversation(
        record(
            conversations=[
                {"from": "human", "value": "2?"},
                {"from": "function_call", "value": call},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "four"},
            ],
            tools='[{"name": "add"}]',
        )
    )
    function = {"name": "add", "arguments": '{"a": 2}'}
    openai = parse_conversation(
        record(
            messages=[
                {"role": "user", "content": "2?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": function}],
                },
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": "four"},
            ],
            tools=[{"name": "add"}],
        )
    )
    assert sharegpt == openai
    assert sharegpt.turns[1] == Turn("assistant", "", calls=(Call("add", {"a": 2}),))
    assert sharegpt.tools == ({"name": "add"},)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"text": "x"}, "its keys are text. Expected Alpaca"),
        ({}, "its keys are none"),
        ({"instruction": "Hi"}, "instruction without output"),
        ({"instruction": "Hi", "output": 3}, "output is of type int"),
        ({"instruction": "Hi", "output": ""}, r"turn 1 \(assistant\) is empty"),
        ({"instruction": " ", "output": "x"}, r"turn 0 \(user\) is empty"),
        (
            {"instruction": "Hi", "output": "x", "history": ["a"]},
            r"history\[0\] must be \[question, answer\]",
        ),
        ({"messages": []}, "messages must be a list of turns"),
        ({"messages": "Hi"}, "messages must be a list of turns"),
        ({"messages": ["Hi"]}, r"messages\[0\] must be an object"),
        ({"messages": [{"content": "Hi"}]}, "has no speaker"),
        ({"messages": [{"role": "user"}]}, "has no 'content'; its keys are role"),
        (
            {"messages": [{"role": "narrator", "content": "x"}]},
            "role is 'narrator'; it must be one of user",
        ),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "no turn of the assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "a part of type 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "loss_weight": 1}]},
            "only the assistant's turns carry loss",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "weight is 0.5; it must be 0 or 1",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "must name a function",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "assistant", "content": "a"},
                ],
                "system": "t",
            },
            "two system prompts",
        ),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "lone surrogate"),
        (
            {"instruction": "Hi", "output": "x", "tools": "[1]"},
            "tools must be a list of JSON objects",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_named_with_file_and_line(
    data: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse_conversation(record(**data))
    assert str(caught.value).startswith("chat.jsonl:7: ")
    assert "\n" not in str(caught.value)


GOOD = Turn("assistant", "Hello")
POOR = Turn("assistant", "Go away")


@pytest.mark.parametrize(
    "data",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"},
        {"question": "Hi", "chosen": "Hello", "rejected": "Go away"},
        {"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "Go away"},
        {
            "chosen": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ],
            "rejected": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Go away"},
            ],
        },
        {
            "prompt": "Hi",
            "chosen": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ],
            "rejected": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Go away"},
            ],
        },
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "chosen": [{"role": "assistant", "content": "Hello"}],
            "rejected": [{"role": "assistant", "content": "Go away"}],
        },
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Hello"},
            "rejected": {"from": "gpt", "value": "Go away"},
        },
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": [{"from": "gpt", "value": "Hello"}],
            "rejected": [{"from": "gpt", "value": "Go away"}],
        },
    ],
)
def test_every_shape_of_a_preference_pair_is_known(data: dict[str, Any]) -> None:
    pair = parse_preference(record(**data))
    assert (pair.prompt, pair.chosen, pair.rejected) == ((QUESTION,), (GOOD,), (POOR,))


def test_the_shared_beginning_of_two_conversations_is_the_prompt() -> None:
    first = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    pair = parse_preference(
        record(
            chosen=[*first, {"role": "assistant", "content": "d"}],
            rejected=[*first, {"role": "assistant", "content": "e"}],
        )
    )
    assert [turn.content for turn in pair.prompt] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prompt": "Hi", "chosen": "a"}, "no rejected; its keys are prompt, chosen"),
        ({"chosen": "a", "rejected": "b"}, "no prompt"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, "are the same"),
        ({"prompt": "Hi", "chosen": "a", "rejected": ""}, r"rejected is an empty answer"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, r"turn 0 \(user\) is empty"),
        (
            {
                "conversations": [{"from": "human", "value": "Hi"}],
                "chosen": {"from": "human", "value": "a"},
                "rejected": "b",
            },
            "chosen must be an answer of the assistant",
        ),
        (
            {
                "chosen": [{"role": "assistant", "content": "a"}],
                "rejected": [{"role": "assistant", "content": "b"}],
            },
            "no prompt; its keys are chosen, rejected",
        ),
        (
            {
                "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}],
                "chosen": "a",
                "rejected": "b",
            },
            "the prompt ends with the assistant",
        ),
    ],
)
def test_pairs_that_cannot_be_compared_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse_preference(record(**data))
    assert str(caught.value).startswith("chat.jsonl:7: ")
