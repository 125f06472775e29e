"""What a chat does with its turns: old ones are left out when the context is full; answers are made again, questions edited."""

import io
import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.stand_in_chat_server import PAGE

from headway.cli import main
from headway.errors import ConfigError, DataError
from headway.infer.chat import ChatAnswer, ChatSession, read_chats
from headway.infer.chat_engine import EngineResponder
from headway.infer.generate import GenerateOptions, answer_conversations
from headway.infer.load import LoadedModel, load_model
from headway.infer.media import MediaQuestion, answer_media
from headway.infer.sampling import Sampling
from headway.media.items import MediaRef
from headway.model.base import build_frozen_model
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.media_shape import MediaInput, MediaShape
from headway.records.chat import Conversation
from headway.tokenizer.chat_template import Turn

SAMPLED = GenerateOptions(8, sampling=Sampling(1.0, seed=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("model"),
        CONFIG.with_(max_seq_len=256),
        byte_tokenizer("<|im_start|>", "<|im_end|>"),
    )


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.mark.parametrize("options", [GenerateOptions(12), SAMPLED, GenerateOptions(20, ("e",))])
def test_a_chat_says_what_the_plain_conversation_gets(
    loaded: LoadedModel, options: GenerateOptions
) -> None:
    session = ChatSession(loaded, "chatml", options, "Be brief.")
    turns = [Turn("system", "Be brief.")]
    for question in ("hi", "and", "more"):
        turns.append(Turn("user", question))
        alone = answer_conversations(loaded, [Conversation(tuple(turns))], "chatml", options)[0]
        answer = session.ask(question, str)
        assert answer.text == alone.text, (
            "the turns before it lie in the engine's cache, and change nothing"
        )
        assert answer.stats.prompt_tokens == alone.prompt_tokens
        assert answer.stats.new_tokens >= 1
        turns.append(Turn("assistant", answer.text))
    assert answer.stats.cached_tokens >= 64, (
        "whole pages of the turns before it are not computed again"
    )
    facts = session.responder.describe()
    assert 0 < facts["cache_bytes"] <= facts["cache_budget_bytes"]
    assert facts["context"] == 256


def test_when_the_context_is_full_the_oldest_turns_are_left_out_and_never_the_system_message(
    loaded: LoadedModel,
) -> None:
    session = ChatSession(loaded, "chatml", GenerateOptions(8), "S")
    seen: list[int] = []
    for number in range(9):
        seen.append(session.ask(f"question {number}", str).left_out)
    assert seen[0] == 0
    assert seen[-1] > 0
    assert all(0 <= after - before <= 1 for before, after in pairwise(seen))
    assert len(session.turns) == 18 and session.messages()[1]["content"] == "question 0", (
        "they stay in the conversation"
    )
    first = next(
        index for index, turn in enumerate(session.turns) if turn.content == f"question {seen[-1]}"
    )
    sent = [Turn("system", "S"), *session.turns[first:-1]]
    alone = answer_conversations(loaded, [Conversation(tuple(sent))], "chatml", GenerateOptions(8))[
        0
    ]
    assert alone.text == session.turns[-1].content
    with pytest.raises(ConfigError, match="max_seq_len=256"):
        session.ask("long " * 100, str)
    assert len(session.turns) == 18


def test_an_answer_is_made_again_and_a_question_is_edited(loaded: LoadedModel) -> None:
    session = ChatSession(loaded, "chatml", SAMPLED)
    with pytest.raises(ConfigError, match="nothing has been asked"):
        session.regenerate(str)
    first = session.ask("one", str)
    second = session.ask("two", str)
    again = session.regenerate(str)
    assert again.text != second.text and session.regenerate(str).text != again.text, (
        "each draws other tokens"
    )
    assert [turn.content for turn in session.turns[:3]] == ["one", first.text, "two"]
    assert len(session.turns) == 4
    edited = session.edit("three", str)
    other = ChatSession(loaded, "chatml", SAMPLED)
    other.ask("one", str)
    assert other.ask("three", str) == edited
    assert session.turns == other.turns
    session.turns = session.turns[:3]  # the last question was never answered
    assert session.ask("three", str) == edited
    assert session.turns == other.turns


def test_a_saved_conversation_is_loaded_into_another_session(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    session = ChatSession(loaded, "chatml", GenerateOptions(4), "S")
    session.ask("hi", str)
    session.save(tmp_path / "talk.json")
    other = ChatSession(loaded, "chatml", GenerateOptions(4))
    other.load(*read_chats(tmp_path / "talk.json")[0])
    assert other.messages() == session.messages()
    assert other.system == "S"


def test_a_conversation_that_the_chat_page_exported_is_read(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    exported = {"headway_chat": 1, "messages": messages, "conversation": {"turns": {}}}
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(exported))
    turns, _ = read_chats(path)[0]
    assert turns[0] == Turn("system", "S")
    page = (PAGE / "sidebar.js").read_text()
    assert "headway_chat: 1, messages" in page
    assert '"headway_chat"' not in page


@pytest.mark.parametrize("content", ["[", "3", '{"messages": 5}', '{"conversations": []}'])
def test_a_file_that_is_no_conversation_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(content)
    with pytest.raises((ConfigError, DataError), match=r"talk\.json"):
        read_chats(path)


def test_a_conversation_with_pictures_is_refused_by_a_model_of_text(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    messages = [{"role": "user", "content": "<image>\nhi"}]
    path.write_text(json.dumps({"messages": messages, "images": ["a.png"]}))
    turns, media = read_chats(path)[0]
    assert len(media) == 1
    session = ChatSession(loaded, "chatml", GenerateOptions(4))
    with pytest.raises(ConfigError, match="does not take image"):
        session.load(turns, media)


def chat(arguments: list[str], lines: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(
        [
            "chat",
            "--chat-template",
            "chatml",
            "--max-new-tokens",
            "6",
            "--temperature",
            "0",
            *arguments,
        ]
    )


def test_two_models_answer_one_after_the_other(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = tmp_path / "two.json"
    lines = f"hi\n/set temperature 1\n/set seed 4\nmore\n/save {saved}\n/stats\n/model {folder}\nthird\n/load {saved}\n"
    assert chat(["--model", str(folder), "--model", f"{folder}/"], lines, monkeypatch) == 2
    said = capsys.readouterr()
    assert said.out.count(f"[{folder}") == 4, "names where two answer, none where one does"
    assert "holds 2 conversations; 1 are open" in said.err
    assert "tokens/s" in said.err
    assert "cache: " in said.err
    first, second = json.loads(saved.read_text())
    assert first["model"] == str(folder)
    assert first["messages"] == second["messages"]
    assert len(first["messages"]) == 4
    assert (
        chat(
            ["--model", str(folder), "--model", f"{folder}/", "--json"],
            f"/load {saved}\n/edit hey\n",
            monkeypatch,
        )
        == 0
    )
    conversations = json.loads(capsys.readouterr().out)["conversations"]
    assert [conversation["messages"][2]["content"] for conversation in conversations] == [
        "hey",
        "hey",
    ]
    assert len(conversations[0]["messages"]) == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/set warmth 3", "there is no such setting"),
        ("/set temperature", "needs a value; it is 0.0 now"),
        ("/set temperature hot", "must be a number"),
        ("/set top_k 0", "--top-k is 0"),
        ("/set max_tokens 1.5", "whole number"),
        ("/image x.png", "does not take images"),
        ("/audio", "needs the name of a file"),
        ("/model a b c", "names 3 models"),
        ("/model 'a", "No closing quotation"),
        ("/model /nowhere", "not a folder"),
        ("/edit x", "nothing has been asked"),
        ("/load nowhere.json", "nowhere.json: cannot be read"),
        ("/save /nowhere/x.json", "cannot be written"),
    ],
)
def test_a_mistake_in_a_command_is_one_line(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    says: str,
) -> None:
    monkeypatch.setattr(
        "headway.infer.load.load_model",
        lambda path, **_: load_model(path) if "nowhere" in str(path) else loaded,
    )
    assert chat(["--model", "m"], f"{line}\n", monkeypatch) == 2
    said = capsys.readouterr().err.strip()
    assert says in said
    assert said.count("\n") == 0


def test_wrong_options_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, says in (
        ([], "no model is given"),
        (["--model", "a", "--model", "b", "--model", "c"], "3 models are given"),
        (["--url", "ftp://x"], "it must be an address"),
        (["--url", "http://127.0.0.1:1", "--masks", "own"], "--masks has no meaning with --url"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        assert main(["chat", *arguments]) == 2
        assert says in capsys.readouterr().err


def test_commands_change_what_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "/system Speak.\nhi\n/set stop off\n/set top_p 0.5\n/set max_tokens 3\n/set\n/regenerate\n/show\n /slash\n/help\n"
    assert chat(["--model", str(folder), "--stop", "zz", "--json"], lines, monkeypatch) == 0
    said = capsys.readouterr()
    messages = json.loads(said.out)["messages"]
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert messages[3]["content"] == " /slash"
    assert "max_new_tokens 3" in said.err
    assert "top_p          0.5" in said.err
    assert "stop           off" in said.err
    assert "system: Speak." in said.err
    assert "/regenerate " in said.err


def fresh(session: ChatSession, text: str) -> ChatAnswer:
    session.reset()
    return session.ask(text, str)


def test_a_second_ctrl_c_breaks_a_step_and_the_next_answer_is_right(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    responder = EngineResponder(loaded, "chatml")
    session = ChatSession(responder, None, GenerateOptions(12))
    asked, right = next(
        (text, answer) for text in "abcdefgh" if len((answer := fresh(session, text)).text) > 4
    )
    session.reset()
    pressed = iter(range(2))

    def press(piece: str) -> None:
        for _ in pressed:
            signal.raise_signal(signal.SIGINT)

    assert session.ask(asked, press).was_interrupted
    session.reset()
    assert session.ask(asked, str) == right
    once: list[str] = []

    def press_once(piece: str) -> None:
        once.append(piece)
        if len(once) == 2:
            signal.raise_signal(signal.SIGINT)

    session.reset()
    assert responder._engine is not None
    before = responder._engine.stats().generated_tokens
    stopped = session.ask(asked, press_once)
    assert responder._engine.stats().generated_tokens - before < 12, "the rest is not computed"
    assert stopped.was_interrupted
    assert right.text.startswith(stopped.text)
    assert len(stopped.text) < len(right.text)
    session.reset()
    assert session.ask(asked, str) == right


class SomeEncoder:
    """Features that depend on the bytes alone."""

    calls = 0

    def __call__(
        self, loaded: LoadedModel, refs: dict[str, MediaRef], opened: object = None
    ) -> dict[str, np.ndarray]:
        self.calls += len(refs)
        shapes = {
            modality.modality: (modality.vectors, modality.width)
            for modality in loaded.config.media.inputs
        }  # pyright: ignore[reportOptionalMemberAccess]
        return {
            name: np.full(shapes[ref.modality], ref.read()[0] / 8, np.float32)
            for name, ref in refs.items()
        }


def test_pictures_stay_in_the_conversation_as_in_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.with_(max_seq_len=256, media=MediaShape((MediaInput("image", 6, 3),), hidden=8))
    weights = [(spec.name, initial_value(spec, config, 4)) for spec in param_specs(config)]
    model = build_frozen_model(config, weights, torch.device("cpu"), torch.float32)
    loaded = LoadedModel(model, config, byte_tokenizer("<|im_start|>", "<|im_end|>"), tmp_path)
    encode = SomeEncoder()
    monkeypatch.setattr("headway.infer.media.encode_media", encode)
    pictures = [MediaRef("image", data=bytes([number]), name=str(number)) for number in (10, 200)]
    options = GenerateOptions(10)
    session = ChatSession(loaded, "chatml", options)
    assert session.responder.takes == {"image"}
    first = session.ask("what?", str, pictures[:1])
    plain = answer_media(
        loaded, [MediaQuestion((Turn("user", "what?"),), tuple(pictures[:1]))], "chatml", options
    )[0]
    other = answer_media(
        loaded, [MediaQuestion((Turn("user", "what?"),), tuple(pictures[1:]))], "chatml", options
    )[0]
    assert first.text == plain.text != other.text
    second = session.ask("and?", str, pictures[1:])
    turns = (
        Turn("user", "<image>\nwhat?"),
        Turn("assistant", first.text),
        Turn("user", "<image>\nand?"),
    )
    assert (
        second.text
        == answer_media(loaded, [MediaQuestion(turns, tuple(pictures))], "chatml", options)[0].text
    )
    assert session.last_question() == "and?"
    before = encode.calls
    assert (
        session.edit("and?", str) == second and session.media == pictures and encode.calls == before
    ), "features are kept"
    saved = tmp_path / "talk.json"
    session.save(saved)
    copy = ChatSession(loaded, "chatml", options)
    copy.load(*read_chats(saved)[0])
    assert copy.regenerate(str).text == second.text, "greedy"
    left = [session.ask(f"and now, number {number}?", str).left_out for number in range(6)]
    assert left[-1] >= 2 and len(session.media) == 2, (
        "pictures of turns that are left out are left out too"
    )
    sent = MediaQuestion(tuple(session.turns[session.left_out : -1]))
    assert session.turns[-1].content == answer_media(loaded, [sent], "chatml", options)[0].text
    text = ChatSession(loaded, "chatml", options)
    text.ask("no picture", str)
