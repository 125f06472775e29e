"""A built-in template that is exported into a tokenizer folder gives the same ids and the same loss there."""

from pathlib import Path
from typing import Any

import pytest
from support.chat_tokenizer import CONVERSATION, byte_tokenizer

from headway.errors import DataError
from headway.tokenizer.chat import Call, Turn, find_template, render, render_prompt
from headway.tokenizer.chat_template import BUILT_IN
from headway.tokenizer.load import Tokenizer, load_tokenizer

TOOLS: list[dict[str, Any]] = [{"name": "add", "parameters": {"a": "整数"}}, {"name": "now"}]
ASKED = [
    Turn("user", "1+1?"),
    Turn("assistant", "Let me see.", calls=(Call("add", {"a": 1}), Call("now", {}))),
    Turn("tool", "2"),
    Turn("tool", "noon"),
    Turn("assistant", "2, at noon"),
]
TALKS = {
    "system": CONVERSATION,
    "no system": CONVERSATION[1:],
    "spaces": [Turn("user", " \n Hi  "), Turn("assistant", "  Hello\n")],
    "control token typed": [
        Turn("user", "What is {{ x }} <|im_end|> \\n '\" %}?"),
        Turn("assistant", "a token"),
    ],
}

AS_TEXT = [name for name in BUILT_IN if name != "internlm_alpaca"]
"""The templates that can be exported; one's tokens cannot be spelled in a text."""


def carrying(name: str) -> Tokenizer:
    """A tokenizer whose own template is the built-in one."""
    plain = byte_tokenizer()
    written = find_template(name, plain).export(plain)
    assert written is not None
    return plain.with_chat_template(written)


def same(turns: list[Turn], name: str, tools: list[dict[str, Any]] | None = None) -> None:
    tokenizer = carrying(name)
    known_tools = tools or []
    left = render(turns, name, tokenizer, known_tools)
    right = render(turns, "tokenizer", tokenizer, known_tools)
    assert tokenizer.decode(right.ids.tolist()) == tokenizer.decode(left.ids.tolist())
    assert right.ids.tolist() == left.ids.tolist()
    if (
        name == "internlm"
    ):  # there the line break after an answer, and the end of text, are targets too
        assert right.mask.any()
        assert not (right.mask & ~left.mask).any()
    else:
        assert right.mask.tolist() == left.mask.tolist()
    before = turns[:-1]
    assert render_prompt(before, "tokenizer", tokenizer, known_tools) == render_prompt(
        before, name, tokenizer, known_tools
    )


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", AS_TEXT)
def test_a_conversation_has_the_same_ids_and_loss(name: str, talk: str) -> None:
    same(TALKS[talk], name)


@pytest.mark.parametrize("name", ["chatml", "qwen"])
def test_tools_calls_and_results_are_written_the_same(name: str) -> None:
    same(ASKED, name, TOOLS)
    same([Turn("system", "Be kind."), *ASKED], name, TOOLS)


@pytest.mark.parametrize("name", ["alpaca", "internlm"])
def test_a_turn_without_a_place_is_refused_in_jinja_too(name: str) -> None:
    with pytest.raises(DataError, match="no place for a turn of role tool"):
        render([Turn("user", "x"), Turn("tool", "y")], "tokenizer", carrying(name))


def test_transformers_writes_the_same_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name in AS_TEXT:
        tokenizer = carrying(name)
        tokenizer.save(tmp_path / name)
        exported = AutoTokenizer.from_pretrained(tmp_path / name)
        talk = [{"role": turn.role, "content": turn.content} for turn in CONVERSATION[:-1]]
        prompt = exported.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert prompt == tokenizer.decode(render_prompt(CONVERSATION[:-1], name, tokenizer))
        assert load_tokenizer(tmp_path / name).chat_template == tokenizer.chat_template


def test_a_template_whose_tokens_no_text_spells_is_not_exported() -> None:
    assert BUILT_IN["internlm_alpaca"].export(byte_tokenizer()) is None
