"""Streamed text: the pieces joined are the text, no piece cuts a character, and nothing after a stop text is ever shown."""

import json
from pathlib import Path

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.cli import main
from headway.errors import ConfigError, DataError
from headway.infer.generate import GenerateOptions, answer, answer_conversations, generate
from headway.infer.load import LoadedModel, load_model
from headway.infer.messages import read_messages
from headway.infer.sampling import Sampling
from headway.records.chat import Conversation
from headway.tokenizer.chat import Turn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    return write_model(
        tmp_path_factory.mktemp("model"),
        CONFIG.with_(max_seq_len=256),
        tokenizer.with_chat_template(chatml),
    )


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("stop", [(), ("e", "的")])
def test_streaming_changes_nothing_about_what_is_generated(
    loaded: LoadedModel, temperature: float, stop: tuple[str, ...]
) -> None:
    options = GenerateOptions(24, stop, sampling=Sampling(temperature, seed=3))
    prompts = ["the cat", "a", "the cat"]
    pieces: dict[int, list[str]] = {number: [] for number in range(len(prompts))}
    results = generate(loaded, prompts, options, lambda number, piece: pieces[number].append(piece))
    assert results == generate(loaded, prompts, options)
    assert ["".join(pieces[number]) for number in pieces] == [result.text for result in results]
    assert stop or max(map(len, pieces.values())) > 3
    asked = answer(loaded, prompts, "chatml", options, on_text=lambda *_: None)
    assert asked == answer(loaded, prompts, "chatml", options)


def test_a_system_message_and_earlier_turns_are_part_of_the_prompt(loaded: LoadedModel) -> None:
    options = GenerateOptions(4)
    (plain,), (told,) = (
        answer(loaded, ["hi"], "chatml", options, system=system) for system in (None, "Be brief.")
    )
    assert told.prompt_tokens == plain.prompt_tokens + len("\nsystem\nBe brief.") + 2
    turns = (Turn("system", "Be brief."), Turn("user", "hi"))
    assert answer_conversations(loaded, [Conversation(turns)], "chatml", options) == [told]
    longer = Conversation((*turns, Turn("assistant", "Hello."), Turn("user", "And now?")))
    assert (
        answer_conversations(loaded, [longer], "chatml", options)[0].prompt_tokens
        > told.prompt_tokens
    )


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


USER = {"role": "user", "content": "hi"}
TWO = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": [{"type": "text", "text": "c"}]},
]


@pytest.mark.parametrize(
    ("name", "value", "turns"),
    [
        ("x.json", {"messages": [USER]}, [1]),
        ("x.json", [USER], [1]),
        ("x.json", [{"messages": [USER]}, TWO], [1, 3]),
        ("x.jsonl", f"{json.dumps({'messages': TWO})}\n\n{json.dumps([USER])}\n", [3, 1]),
    ],
)
def test_conversations_are_read_from_either_kind_of_file(
    tmp_path: Path, name: str, value: object, turns: list[int]
) -> None:
    messages = read_messages(write(tmp_path / name, value))
    assert [len(message.turns) for message in messages] == turns
    assert [len(message.turns) for message in read_messages(tmp_path / name, "Be brief.")] == [
        number + 1 for number in turns
    ]
    assert messages[-1].turns[-1].role == "user"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("x.json", {"messages": TWO[:2]}, "the last message is the assistant's"),
        ("x.json", {"prompt": "hi"}, "not a conversation"),
        ("x.json", [], "no conversation"),
        ("x.json", "{", "not JSON"),
        (
            "x.jsonl",
            '{"messages": [{"role": "user", "content": "a"}]}\nnot json\n',
            "x.jsonl:2: not JSON",
        ),
        ("x.jsonl", '{"messages": [{"role": "robot", "content": "a"}]}\n', "role is 'robot'"),
        (
            "x.json",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "text only",
        ),
        ("x.json", [{"role": "system", "content": "x"}, USER], "--system is given"),
        ("x.txt", "hi", "must be a .json or .jsonl file"),
        ("x.json", "[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(
    tmp_path: Path, name: str, value: object, says: str
) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        read_messages(write(tmp_path / name, value), "Be brief.")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_verb_prints_the_same_streamed_and_at_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = str(write(tmp_path / "m.json", [{"messages": [USER]}, TWO]))
    for ask in (
        ["--prompt", "a", "--prompt", "你"],
        ["--prompt", "a", "--system", "Be brief."],
        ["--messages", messages],
    ):
        said: list[str] = []
        for stream in ("--stream", "--no-stream"):
            assert (
                main(["generate", "--model", str(folder), *ask, "--max-new-tokens", "12", stream])
                == 0
            )
            said.append(capsys.readouterr().out)
        assert said[0] == said[1]
        assert said[0].endswith("\n")
        assert len(said[0]) > 12


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--messages", "missing.json"], "missing.json: No such file"),
        (["--messages", "m.json", "--prompt", "a"], "--messages and a prompt are both given"),
        (["--prompt", "a", "--json", "--stream"], "--stream has no meaning with --json"),
        (["--prompt", "a", "--system", "x", "--special"], "the template writes the special tokens"),
        ([], "no prompt is given"),
    ],
)
def test_contradictory_options_of_generate_are_refused_in_one_line(
    folder: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(folder), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
