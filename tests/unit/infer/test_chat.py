"""`headway chat`: turns add up, Ctrl-C ends an answer and not the conversation, and what is saved can be read and trained on."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.cli import main
from headway.errors import ConfigError
from headway.infer.chat import ChatSession
from headway.infer.generate import GenerateOptions
from headway.infer.load import LoadedModel, load_model
from headway.infer.messages import read_messages
from headway.infer.sampling import Sampling
from headway.records.chat import parse_conversation
from headway.text.document import Record


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


def test_each_answer_sees_the_whole_conversation(loaded: LoadedModel) -> None:
    session = ChatSession(loaded, "chatml", GenerateOptions(8), "Be brief.")
    said: list[str] = []
    first = session.ask("hi", said.append)
    assert first.text == "".join(said)
    assert not first.was_interrupted
    assert session.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.text},
    ]
    other = ChatSession(loaded, "chatml", GenerateOptions(8), "Be brief.")
    assert session.ask("and", said.append) != other.ask("and", said.append), (
        "the earlier turns count"
    )
    session.reset()
    assert session.ask("hi", said.append) == first


def test_an_interrupted_answer_stays_in_the_conversation(loaded: LoadedModel) -> None:
    session = ChatSession(loaded, "chatml", GenerateOptions(40, sampling=Sampling(9.0, seed=1)))
    said: list[str] = []

    def interrupt(piece: str) -> None:
        said.append(piece)
        if len(said) == 3:
            raise KeyboardInterrupt

    answer = session.ask("hi", interrupt)
    assert answer.was_interrupted
    assert answer.text == "".join(said)
    assert [turn.role for turn in session.turns] == ["user", "assistant"]
    assert session.turns[-1].content == answer.text


def test_what_does_not_fit_leaves_the_conversation_as_it_was(loaded: LoadedModel) -> None:
    session = ChatSession(loaded, "chatml", GenerateOptions(4))
    session.ask("hi", str)
    before = list(session.turns)
    with pytest.raises(ConfigError, match="max_seq_len=256"):
        session.ask("long " * 100, str)
    assert session.turns == before


def test_a_model_without_a_chat_template_says_what_to_give(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"no chat template.*Give --chat-template"):
        ChatSession(loaded, None, GenerateOptions(4))


def chat(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(
        [
            "chat",
            "--model",
            str(folder),
            "--chat-template",
            "chatml",
            "--max-new-tokens",
            "6",
            "--temperature",
            "0",
            *more,
        ]
    )


def test_lines_of_a_pipe_are_questions(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = tmp_path / "talk.json"
    assert (
        chat(folder, f"hi\n\nthere\n/save {saved}\n/reset\nhi\n/exit\nnever asked\n", monkeypatch)
        == 0
    )
    out = capsys.readouterr().out
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    first = messages[1]["content"]
    second = messages[3]["content"]
    assert out == f"{first}\n{second}\n{first}\n", (
        "after /reset the same question gets the same answer; no prompts in a pipe"
    )
    assert (
        parse_conversation(Record(json.loads(saved.read_text()), "talk.json", 1)).turns[-1].content
        == second
    )
    saved.write_text(json.dumps({"messages": messages[:3]}))
    assert len(read_messages(saved)[0].turns) == 3


def test_an_answer_that_was_cut_is_marked_beside_it(
    folder: Path,
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chat(folder, "hi\n", monkeypatch, "--max-new-tokens", "1") == 0
    said = capsys.readouterr()
    assert said.err.endswith("[cut after 1 tokens: --max-new-tokens is 1]\n")
    assert "cut" not in said.out
    assert chat(folder, "hi\n", monkeypatch) == 0
    assert "cut" not in capsys.readouterr().err, "the model ends this answer itself"
    # A seed whose answer does not end before the context does.
    answers = (
        ChatSession(loaded, "chatml", GenerateOptions(300, sampling=Sampling(9.0, seed=seed))).ask(
            "h" * 180, str
        )
        for seed in range(9)
    )
    full = next(answer for answer in answers if answer.was_cut)
    assert full.stats.prompt_tokens + full.stats.new_tokens == 256, "the context ends it"


def test_a_conversation_is_printed_as_json_from_the_last_system_prompt_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        chat(folder, "hi\n/system Speak.\nhi\n", monkeypatch, "--system", "Be brief.", "--json")
        == 0
    )
    messages = json.loads(capsys.readouterr().out)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "Speak."


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/nope", "/nope is not a command"),
        ("/save x.txt", "ends in .json"),
        ("/save", "needs the name"),
    ],
)
def test_a_wrong_command_in_a_pipe_is_an_error(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    says: str,
) -> None:
    assert chat(folder, f"{line}\n", monkeypatch) == 2
    assert says in capsys.readouterr().err


def test_a_person_goes_on_after_a_mistake_and_after_ctrl_c_at_the_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def typed() -> Iterator[str]:
        yield "/nope"
        raise KeyboardInterrupt

    lines = typed()
    left = iter(["hi"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            pass
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(
        sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})()
    )
    assert (
        main(["chat", "--model", str(folder), "--chat-template", "chatml", "--max-new-tokens", "6"])
        == 0
    )
    said = capsys.readouterr()
    assert "/nope is not a command" in said.err
    assert "Ctrl-D leaves." in said.err
    assert said.out.strip()


@pytest.mark.drill
def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(folder: Path) -> None:
    ours, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "headway",
        "chat",
        "--model",
        str(folder),
        "--chat-template",
        "chatml",
        "--max-new-tokens",
        "200",
    ]
    child = subprocess.Popen(
        [*command, "--temperature", "0"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        close_fds=True,
    )
    os.close(terminal)
    seen = ""

    def until(text: str, seconds: float = 60) -> None:
        nonlocal seen
        end = time.monotonic() + seconds
        while text not in seen:
            assert time.monotonic() < end, seen
            seen += os.read(ours, 4096).decode("utf-8", "replace")

    until("> ")
    os.write(ours, b"hi\n")
    seen = ""
    until("hi\r\n")
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    until("> ")
    os.write(ours, b"\x04")
    assert child.wait(20) == 0
    os.close(ours)
