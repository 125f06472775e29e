"""`headway chat --url`: the same chat over HTTP, and one line for whatever a server does wrong."""

import io
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stand_in_chat_server import StandInChatServer, stand_in_chat_server

from headway.cli import main
from headway.cli._chat_commands import Chat
from headway.cli._chat_screen import QuietAnswer
from headway.errors import ConfigError, DataError
from headway.infer.chat import ChatSession
from headway.infer.chat_server import ChatServer, ServerError, ServerResponder
from headway.infer.generate import GenerateOptions
from headway.infer.sampling import Sampling
from headway.media.items import MediaRef


@pytest.fixture(scope="module")
def running() -> Iterator[StandInChatServer]:
    with stand_in_chat_server() as server:
        yield server


@pytest.fixture
def double(running: StandInChatServer) -> StandInChatServer:
    running.answers = {}
    running.bodies = []
    running.token = None
    running.fits = 1_000
    running.failures = 0
    running.cut_after = None
    return running


def session(double: StandInChatServer, token: str | None = None) -> ChatSession:
    options = GenerateOptions(8, ("x",), sampling=Sampling(0.5, 4, None, 7))
    return ChatSession(
        ServerResponder(ChatServer(double.address, token), "cat"), None, options, "S"
    )


def test_an_answer_comes_in_pieces_with_its_figures(double: StandInChatServer) -> None:
    said: list[str] = []
    talk = session(double)
    answer = talk.ask("hi 你", said.append)
    assert answer.text == "You said: hi 你" == "".join(said)
    assert len(said) > 1
    assert answer.stats.new_tokens == 4
    assert answer.stats.cached_tokens == 7
    body = double.bodies[0]
    assert body["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi 你"},
    ]
    assert (body["max_tokens"], body["temperature"], body["top_k"], body["seed"], body["stop"]) == (
        8,
        0.5,
        4,
        7,
        ["x"],
    )
    assert "top_p" not in body
    talk.regenerate(str)
    assert double.bodies[1]["seed"] == 8, "another draw"
    assert talk.responder.describe() == {
        "context": 4096,
        "cache_bytes": 3 << 20,
        "cache_budget_bytes": 1 << 30,
    }


def test_a_full_context_leaves_the_oldest_turns_out(double: StandInChatServer) -> None:
    talk = session(double)
    talk.ask("one", str)
    talk.ask("two", str)
    double.fits = 4
    assert talk.ask("three", str).left_out == 1
    assert [message["content"] for message in double.bodies[-1]["messages"]] == [
        "S",
        "two",
        "You said: two",
        "three",
    ]
    double.fits = 1
    with pytest.raises(ConfigError, match="too long"):
        talk.ask("four", str)
    assert len(talk.turns) == 6


def test_pictures_and_sounds_are_parts(double: StandInChatServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "b.wav").write_bytes(b"RIFF....WAVE")
    talk = session(double)
    assert talk.responder.takes == {"image", "audio"}
    talk.ask(
        "what?", str, [MediaRef("image", tmp_path / "a.png"), MediaRef("audio", tmp_path / "b.wav")]
    )
    parts = double.bodies[0]["messages"][1]["content"]
    assert [part["type"] for part in parts] == ["image_url", "input_audio", "text"]
    assert parts[2]["text"] == "\nwhat?"
    assert parts[0]["image_url"]["url"] == "data:image/png;base64,iVBORw=="
    assert parts[1]["input_audio"]["format"] == "wav"
    talk.ask("and?", str)
    assert double.bodies[1]["messages"][1]["content"] == parts
    assert talk.last_question() == "and?"


@pytest.mark.parametrize("fault", ["queue", "cut", "token", "gone"])
def test_what_a_server_does_wrong_is_one_line_and_the_conversation_is_as_before(
    double: StandInChatServer, fault: str
) -> None:
    talk = session(double)
    talk.ask("one", str)
    if fault == "queue":
        double.failures = 1
    elif fault == "cut":
        double.cut_after = 1
    elif fault == "token":
        double.token = "secret"
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            talk.responder.server = ChatServer(f"http://127.0.0.1:{free.getsockname()[1]}")  # pyright: ignore[reportAttributeAccessIssue]
    says = {
        "queue": "The queue is full",
        "cut": "connection ended",
        "token": "Set HEADWAY_SERVE_TOKEN",
        "gone": "does not answer",
    }[fault]
    with pytest.raises((ServerError, ConfigError), match=says):
        talk.ask("two", str)
    assert len(talk.turns) == 2


def test_ctrl_c_closes_the_connection_and_keeps_what_was_said(double: StandInChatServer) -> None:
    def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    talk = session(double)
    assert talk.ask("hello there", interrupt).was_interrupted
    assert talk.turns[-1].content == "You "


def test_the_verb_talks_to_a_server(
    double: StandInChatServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    double.token = "secret"
    monkeypatch.setenv("HEADWAY_SERVE_TOKEN", "secret")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/model cat dog\nmore\n"))
    assert main(["chat", "--url", double.address, "--json"]) == 0
    conversations = json.loads(capsys.readouterr().out)["conversations"]
    assert [conversation["model"] for conversation in conversations] == ["cat", "dog"]
    assert conversations[1]["messages"][1]["content"] == "You said: hi"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", "--url", double.address, "--model", "cow"]) == 2
    assert "has cat, dog" in capsys.readouterr().err


def test_a_token_that_others_could_read_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    ChatServer("http://127.0.0.1:1", "secret")
    ChatServer("https://models.example", "secret")
    assert caplog.text == ""
    ChatServer("http://models.example", "secret")
    assert "without encryption" in caplog.text
    assert "secret" not in caplog.text


def test_a_picture_that_cannot_be_read_does_not_stop_the_next_question(
    double: StandInChatServer, tmp_path: Path
) -> None:
    talk = Chat([session(double)], QuietAnswer(), lambda names: [])
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG")
    talk.respond(f"/image '{picture}'")
    double.failures = 1
    with pytest.raises(ServerError, match="queue is full"):
        talk.ask("what?")
    assert len(talk.waiting) == 1, "it goes with the next try"
    picture.unlink()
    with pytest.raises(DataError, match=r"a\.png: cannot be read"):
        talk.ask("what?")
    assert talk.waiting == []
    assert talk.sessions[0].turns == []
    talk.ask("what?")
    assert len(talk.sessions[0].turns) == 2
