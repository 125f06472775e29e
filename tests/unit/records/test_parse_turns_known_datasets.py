"""The files people bring: their shapes are read, and no key that carries content is lost unseen."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import headway

from headway.errors import ConfigError, DataError
from headway.prepare.validate import ValidateOptions, validate
from headway.records.chat import parse_conversation
from headway.records.preference import parse_preference
from headway.records.unpaired import parse_unpaired
from headway.text.document import Record
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat_template import Call, Turn

USER = Turn("user", "Hi")
BOT = Turn("assistant", "Hello")
MORE = [USER, BOT, Turn("user", "Bye"), Turn("assistant", "Ciao")]


def record(data: dict[str, Any]) -> Record:
    return Record(data, "d.jsonl", 4)


MOSS_TURN = {
    "Human": "<|Human|>: Hi<eoh>\n",
    "Inner Thoughts": "<|Inner Thoughts|>: None<eot>\n",
    "Commands": "<|Commands|>: None<eoc>\n",
    "Tool Responses": "<|Results|>: None<eor>\n",
    "MOSS": "<|MOSS|>: Hello<eom>\n",
}
CHAT_SHAPES: dict[str, tuple[dict[str, Any], list[Turn]]] = {
    "Firefly": ({"kind": "NLI", "input": "Hi", "target": "Hello"}, [USER, BOT]),
    "Firefly rounds": (
        {
            "conversation_id": 1,
            "category": "x",
            "conversation": [
                {"human": "Hi", "assistant": "Hello"},
                {"human": "Bye", "assistant": "Ciao"},
            ],
        },
        MORE,
    ),
    "MOSS 003": (
        {
            "conversation_id": 1,
            "meta_instruction": "Be kind.",
            "num_turns": 2,
            "chat": {
                "turn_2": {"Human": "<|Human|>: Bye<eoh>\n", "MOSS": "<|MOSS|>: Ciao<eom>\n"},
                "turn_1": MOSS_TURN,
            },
            "category": "x",
        },
        [Turn("system", "Be kind."), *MORE],
    ),
    "MOSS 002": (
        {
            "id": 0,
            "prefix": "Be kind.",
            "num_turns": 2,
            "plain_text": "[Human]: Hi<eoh>\n[MOSS]: Hello<eoa>\n[Human]: Bye<eoh>\n[MOSS]: Ciao<eoa>\n",
        },
        [Turn("system", "Be kind."), *MORE],
    ),
    "BELLE": ({"instruction": "Hi", "input": "", "output": "Hello"}, [USER, BOT]),
    "BELLE rounds": (
        {
            "instruction": "Human:Hi\nAssistant:Hello\nHuman:Bye\nAssistant:\n",
            "input": "",
            "output": "Ciao",
        },
        MORE,
    ),
    "BELLE 3.5M": (
        {
            "id": "a",
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "assistant", "value": "Hello"},
            ],
        },
        [USER, BOT],
    ),
    "Dolly": (
        {"instruction": "Sort", "context": "b a", "response": "a b", "category": "qa"},
        [Turn("user", "Sort", "b a"), Turn("assistant", "a b")],
    ),
    "question, answer": ({"question": "Hi", "answer": "Hello"}, [USER, BOT]),
    "OpenOrca": (
        {"id": "1", "system_prompt": "s", "question": "Hi", "response": "Hello"},
        [Turn("system", "s"), USER, BOT],
    ),
    "MetaMath": (
        {"query": "Hi", "response": "Hello", "type": "GSM", "original_question": "H"},
        [USER, BOT],
    ),
    "problem, solution": ({"problem": "Hi", "solution": "Hello", "level": "1"}, [USER, BOT]),
    "ShareGPT items": (
        {"id": "x", "items": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        [USER, BOT],
    ),
    "TRL": (
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "completion": [{"role": "assistant", "content": "Hello"}],
        },
        [USER, BOT],
    ),
    "text and turns": (
        {"prompt": "Hi", "completion": [{"role": "assistant", "content": "Hello"}]},
        [USER, BOT],
    ),
    "history": ({"prompt": "Bye", "response": "Ciao", "history": [["Hi", "Hello"]]}, MORE),
    "history of turns": (
        {
            "query": "Bye",
            "response": "Ciao",
            "history": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ],
        },
        MORE,
    ),
    "old OpenAI call": (
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": "",
                    "function_call": {"name": "f", "arguments": '{"a": 1}'},
                },
            ]
        },
        [USER, Turn("assistant", "", calls=(Call("f", {"a": 1}),))],
    ),
    "only an input": ({"instruction": "", "input": "Hi", "output": "Hello"}, [USER, BOT]),
    "KTO, liked": ({"prompt": "Hi", "completion": "Hello", "label": True}, [USER, BOT]),
    "null columns": (
        {"messages": None, "prompt": "Hi", "completion": "Hello", "history": None, "tools": None},
        [USER, BOT],
    ),
}


@pytest.mark.parametrize("name", CHAT_SHAPES)
def test_the_shape_of_a_known_chat_dataset_is_read(name: str) -> None:
    data, turns = CHAT_SHAPES[name]
    assert list(parse_conversation(record(data)).turns) == turns


DIALOGUE = [{"role": "user", "content": "Hi"}]
GOOD = {"role": "assistant", "content": "Hello"}
POOR = {"role": "assistant", "content": "No"}
PAIR_SHAPES: dict[str, tuple[dict[str, Any], list[Turn]]] = {
    "hh-rlhf": (
        {
            "chosen": "\n\nHuman: Hi\n\nAssistant: Hello",
            "rejected": "\n\nHuman: Hi\n\nAssistant: No",
        },
        [USER],
    ),
    "full-hh-rlhf": (
        {
            "prompt": "\n\nHuman: Hi\n\nAssistant:",
            "response": "Hello",
            "chosen": "Hello",
            "rejected": "No",
        },
        [USER],
    ),
    "UltraFeedback": (
        {
            "prompt": "Hi",
            "prompt_id": "f",
            "chosen": [*DIALOGUE, GOOD],
            "rejected": [*DIALOGUE, POOR],
            "messages": [*DIALOGUE, GOOD],
            "score_chosen": 8.0,
            "score_rejected": 2.0,
        },
        [USER],
    ),
    "answers under a text": ({"prompt": "Hi", "chosen": [GOOD], "rejected": [POOR]}, [USER]),
    "history and system": (
        {
            "system": "s",
            "history": [["a", "b"]],
            "prompt": "Hi",
            "chosen": "Hello",
            "rejected": "No",
        },
        [Turn("system", "s"), Turn("user", "a"), Turn("assistant", "b"), USER],
    ),
    "system of whole dialogues": (
        {"system": "s", "chosen": [*DIALOGUE, GOOD], "rejected": [*DIALOGUE, POOR]},
        [Turn("system", "s"), USER],
    ),
    "instruction": (
        {"instruction": "Hi", "input": "x", "chosen": "Hello", "rejected": "No"},
        [Turn("user", "Hi", "x")],
    ),
}


@pytest.mark.parametrize("name", PAIR_SHAPES)
def test_the_shape_of_a_known_preference_dataset_is_read(name: str) -> None:
    data, prompt = PAIR_SHAPES[name]
    pair = parse_preference(record(data))
    assert (list(pair.prompt), pair.chosen, pair.rejected) == (
        prompt,
        (BOT,),
        (Turn("assistant", "No"),),
    )


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"prompt": "Hi", "response": "Hello", "label": False},
            "label is false, which marks a bad answer; learn from good and bad ones with objective kto",
        ),
        ({"messages": TURNS, "history": [["a", "b"]]}, "history carries content that is not read"),
        (
            {"prompt": "Hi", "response": "Hello", "question": "Who?"},
            "question carries content that is not read",
        ),
        (
            {"question": "Hi", "answer": "4", "solution": "2+2=4"},
            "solution carries content that is not read .* --keys solution=",
        ),
        (
            {
                "messages": TURNS,
                "chosen": TURNS,
                "rejected": [TURNS[0], {"role": "assistant", "content": "No"}],
            },
            "set kind: preference",
        ),
        ({"messages": TURNS, "images": ["a.png"]}, "images is not text"),
        (
            {"instruction": "Hi", "input": "x", "context": "y", "output": "z"},
            "context carries content",
        ),
        (
            {"messages": [TURNS[0], {**TURNS[1], "reasoning_content": "Hm."}]},
            "write it into the content, as in <think>",
        ),
        (
            {"messages": [{**TURNS[0], "images": ["a.png"]}, TURNS[1]]},
            r"messages\[0\]: images carries content",
        ),
        (
            {"chat": {"turn_1": {**MOSS_TURN, "Commands": "<|Commands|>: Search(x)<eoc>"}}},
            "Commands holds 'Search.* --drop-bad .* --keys",
        ),
        (
            {"plain_text": "[Human]: Hi<eoh>\n[Commands]: f()<eoc>\n[MOSS]: Hello<eoa>"},
            "Commands holds 'f.* --drop-bad .* --keys",
        ),
    ],
)
def test_content_under_a_key_that_is_not_read_is_refused_with_the_remedy(
    data: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse_conversation(record(data))
    assert str(caught.value).startswith("d.jsonl:4: ")
    assert "\n" not in str(caught.value)


def test_what_plugins_of_moss_wrote_is_ignored_where_the_refusal_says_so() -> None:
    data = {
        "chat": {
            "turn_1": {
                **MOSS_TURN,
                "Commands": "<|Commands|>: Search(x)<eoc>",
                "Tool Responses": "<|Results|>: y<eor>",
            }
        }
    }
    with pytest.raises(DataError) as caught:
        parse_conversation(record(data))
    remedy = str(caught.value).partition("--keys '")[2].partition("'")[0]
    assert list(parse_conversation(record(data), KeyMap.parse(remedy)).turns) == [USER, BOT]


QUESTION = "\n\nHuman: Hi\n\nAssistant:"


@pytest.mark.parametrize(
    "data",
    [
        {"chosen": QUESTION, "rejected": f"{QUESTION} No"},
        {"chosen": f"{QUESTION}  \n", "rejected": f"{QUESTION} No"},
        {"chosen": "", "rejected": f"{QUESTION} No"},
        {"prompt": "Hi", "chosen": " ", "rejected": "No"},
        {"chosen": [TURNS[0], {"role": "assistant", "content": ""}], "rejected": TURNS},
    ],
)
def test_an_empty_chosen_answer_is_called_that(data: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"d\.jsonl:4: chosen is an empty answer.* --drop-bad"):
        parse_preference(record(data))
    swapped = {**data, "chosen": data["rejected"], "rejected": data["chosen"]}
    with pytest.raises(DataError, match=r"d\.jsonl:4: rejected is an empty answer"):
        parse_preference(record(swapped))


def test_an_empty_labelled_answer_is_called_that() -> None:
    with pytest.raises(
        DataError, match="completion is an empty answer: the text ends with `Assistant:`"
    ):
        parse_unpaired(record({"completion": QUESTION, "label": True}))


def test_an_answer_that_is_a_dialogue_stays_one_answer() -> None:
    play = "Human: Knock.\n\nAssistant: Who is there?"
    assert parse_conversation(record({"instruction": "Write a play", "output": play})).turns[
        1
    ] == Turn("assistant", play)
    assert parse_preference(
        record({"prompt": "Write a play", "chosen": play, "rejected": "No"})
    ).chosen == (Turn("assistant", play),)


def test_keys_name_what_no_known_shape_has() -> None:
    data = {
        "titel": "x",
        "frage": "Hi",
        "antwort": {"text": "Hello", "sterne": 5},
        "answer": "short",
        "note": "n",
    }
    keys = KeyMap.parse("prompt=frage, response=antwort.text,system=regeln?,answer=,note=")
    conversation = parse_conversation(record(data), keys)
    assert list(conversation.turns) == [USER, BOT]
    assert conversation.unread == (
        "antwort.sterne",
        "titel",
    )
    turns = {"talk": [{"who": "A", "says": "Hi"}, {"who": "B", "says": "Hello"}]}
    names = KeyMap.parse("messages=talk,role=who,content=says,user=A,assistant=B")
    assert list(parse_conversation(record(turns), names).turns) == [USER, BOT]
    pair = parse_preference(
        record({"q": "Hi", "good": "Hello", "bad": "No"}),
        KeyMap.of({"prompt": "q", "chosen": "good", "rejected": "bad"}),
    )
    assert pair.prompt == (USER,)
    assert pair.chosen == (BOT,)


def test_a_record_without_a_named_key_is_refused_with_the_keys_it_has() -> None:
    keys = KeyMap.parse("prompt=frage,response=antwort")
    with pytest.raises(
        DataError, match="no key 'frage', which keys give for prompt; its keys are question"
    ):
        parse_conversation(record({"question": "Hi"}), keys)


def test_a_key_for_an_unknown_part_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="names 'frage', which is not one of messages, prompt"):
        KeyMap.parse("frage=prompt")


@pytest.mark.parametrize("text", ["prompt", "prompt=a,prompt=b", "=a"])
def test_keys_that_are_no_pairs_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write NAME=KEY pairs"):
        KeyMap.parse(text)


def test_keys_that_are_not_read_are_named_by_validate_and_by_the_build(tmp_path: Path) -> None:
    rows = [
        {"question": "Hi", "answer": "Hello", "id": i, "messages": None}
        | ({"topic": "x"} if i else {})
        for i in range(3)
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = headway("data", "validate", str(tmp_path / "d.jsonl"), "--kind", "chat")
    assert done.returncode == 0
    assert "unread keys: id (3 records), topic (2 records)" in done.stdout
    counted = json.loads(
        headway("data", "validate", str(tmp_path / "d.jsonl"), "--kind", "chat", "--json").stdout
    )
    assert counted["unread"] == {"id": 3, "topic": 2}


def test_a_record_of_a_list_on_one_line_is_named_by_its_number(tmp_path: Path) -> None:
    good = {"instruction": "Hi", "output": "Hello"}
    (tmp_path / "one.json").write_text(
        json.dumps([good, good, {"instruction": "Hi", "output": ""}, good])
    )
    (bad_record,) = validate([tmp_path / "one.json"], ValidateOptions("chat")).bad
    assert bad_record.place == f"{tmp_path / 'one.json'}:1 (record 3)"
    assert bad_record.message == "turn 1 (assistant) is empty."
    (tmp_path / "cut.json").write_text(json.dumps([good, good])[:-20])
    (bad_record,) = validate([tmp_path / "cut.json"], ValidateOptions("chat")).bad
    assert (bad_record.line, bad_record.record) == (1, 2)
    assert "not valid JSON" in bad_record.message


def test_flags_of_validate_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"instruction": "Hi", "output": "Hello"}\n')
    for options, message in (
        (("--kind", "chat", "--text-key", "x"), "--text-key has no meaning with --kind chat"),
        (("--keys", "prompt=a"), "--keys has no meaning with --kind text"),
        (("--kind", "chat", "--template", "tokenizer"), "--template tokenizer needs a tokenizer"),
    ):
        done = headway("data", "validate", str(tmp_path / "d.jsonl"), *options)
        assert done.returncode == 2
        assert message in done.stderr
    tools = {
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        "tools": [{"name": "f"}],
    }
    (tmp_path / "t.jsonl").write_text(json.dumps(tools) + "\n")
    done = headway(
        "data", "validate", str(tmp_path / "t.jsonl"), "--kind", "chat", "--template", "llama3"
    )
    assert done.returncode == 1
    assert (
        "chat template llama3 refuses the conversation: it has no place for tool definitions"
        in done.stdout
    )
