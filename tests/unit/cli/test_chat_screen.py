"""Answers on a terminal: Markdown is drawn block by block, fits narrow screens, and a model's control characters never reach it."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from headway.cli import chat as verb
from headway.cli._chat_commands import COMMANDS, _help, _path, completions
from headway.cli._chat_screen import MarkdownAnswer, PlainAnswer, _complete_length, harmless

TEXT = "# Title\n\nSome **bold** text with <b>tags</b>.\n\n```py\nx = 1\n\ny = 2\n```\n\n- one\n- two [link](https://e.org)\n"


def drawn(text: str, width: int, size: int = 3) -> str:
    file = io.StringIO()
    screen = MarkdownAnswer(
        Console(file=file, width=width, height=12, force_terminal=False, highlight=False)
    )
    screen.begin(None)
    for start in range(0, len(text), size):
        screen.say(text[start : start + size])
    screen.end()
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 100])
def test_markdown_is_drawn_whole_at_any_width_however_it_arrives(width: int) -> None:
    whole = drawn(TEXT, width, len(TEXT))
    assert drawn(TEXT, width, 1) == whole == drawn(TEXT, width, 7)
    assert all(len(line) <= width for line in whole.splitlines())
    for word in ("Title", "bold", "<b>tags</b>", "x = 1", "y = 2", "one", "https://e.org"):
        assert word in whole
    assert "**" not in whole
    assert "```" not in whole


def test_blocks_end_at_blank_lines_outside_of_code() -> None:
    assert _complete_length("a\n\nb") == 3
    assert _complete_length("a\nb") == 0
    assert _complete_length("```\na\n\nb") == 0
    assert _complete_length("a\n\n```\nb\n\nc\n```\n\nd") == len("a\n\n```\nb\n\nc\n```\n\n")
    assert _complete_length("~~~\n```\n\n") == 0, "another sign does not end the code"


def test_control_characters_do_not_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b]0;title\x07b\x1b[2Jc\x9b1md\r\u202ee\tf\n"
    assert "\x1b" not in drawn(evil, 80)
    assert "\x9b" not in drawn(evil, 80)
    assert harmless("a\tb\n你🙂") == "a\tb\n你🙂"
    PlainAnswer(is_terminal=True).say(evil)
    assert "\x1b" not in capsys.readouterr().out
    PlainAnswer(is_terminal=False).say("a\x07b\u202e")
    assert capsys.readouterr().out == "a\x07b\u202e", "a pipe gets the text as it is"


def test_a_text_of_several_lines_is_typed_with_backslashes_or_quotes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def typed(*lines: str) -> str:
        left = iter(lines[1:])
        monkeypatch.setattr("builtins.input", lambda prompt: next(left))
        return verb._text(lines[0])

    assert typed("one") == "one"
    assert typed("one\\", "two\\", "three") == "one\ntwo\nthree"
    assert typed('"""one', "", 'two"""') == "one\n\ntwo"
    assert (
        typed('"""', "/not a command", '"""') == "/not a command" or typed('"""/x', '"""') == " /x"
    )


@pytest.mark.parametrize("width", [24, 59, 60, 120])
def test_the_help_fits_the_terminal(width: int) -> None:
    text = _help(width)
    assert all(len(line) < width for line in text.splitlines())
    assert all(name in text for name in COMMANDS if name != "/help")


def test_commands_settings_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / ".hidden").write_text("")
    assert completions("/re") == ["/reset", "/regenerate"]
    assert completions("/set t") == [
        "/set temperature ",
        "/set top_k ",
        "/set top_p ",
    ]
    assert completions(f"/load {tmp_path}/") == [
        f"/load {tmp_path}/folder/",
        f"/load {tmp_path}/talk.json",
    ]
    assert completions(f"/load {tmp_path}/.h") == [f"/load {tmp_path}/.hidden"]
    assert (
        completions("hello")
        == completions("/load /nowhere/x")
        == completions("/image ~nobody-here/x")
        == []
    )
    assert _path(f"'{tmp_path}/a b'") == tmp_path / "a b"
    assert _path("~/x").is_absolute()
