"""Conversations and tokenizers that show how the built-in chat templates write, and the digest of what they write.

tests/golden/chat holds the digests that the version with the frame templates gave; tests/unit/tokenizer/test_chat_golden.py compares.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken

from headway.errors import HeadwayError
from headway.tokenizer.chat import Call, Role, Turn, render, render_prompt
from headway.tokenizer.load import Tokenizer
from support.chat_tokenizer import SPECIALS, byte_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "chat"
TEMPLATES = ("chatml", "qwen", "llama3", "alpaca", "internlm", "internlm_alpaca", "zero2all")

Tools = list[dict[str, Any]]
ADD: dict[str, Any] = {
    "name": "add",
    "description": 'Adds "two" 数',
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "<|im_end|>"}}
CALL = Call("add", {"a": 1, "b": [None, True, "é\n"], "<|im_end|>": 0.5})
ASKED = [
    Turn("user", "1+1?"),
    Turn("assistant", "Let me see.", calls=(CALL, Call("now", {}))),
    Turn("tool", "2"),
    Turn("tool", "noon"),
    Turn("assistant", "2, at noon"),
]


def talk(*contents: str, system: str | None = None, learn: Sequence[bool] = ()) -> list[Turn]:
    """Turns of user and assistant in turn; `learn` says of each answer whether it carries loss."""
    turns = [] if system is None else [Turn("system", system)]
    for i, content in enumerate(contents):
        role: Role = "user" if i % 2 == 0 else "assistant"
        turns.append(
            Turn(role, content, learn=learn[i // 2] if learn and role == "assistant" else True)
        )
    return turns


TALKS: dict[str, tuple[list[Turn], Tools]] = {
    name: (turns, [])
    for name, turns in {
        "empty": [],
        "one turn": talk("Hi", "Hello!"),
        "system": talk("Hi", "Hello!", "Bye", "再见", system="Be kind."),
        "empty system": talk("Hi", "Hello!", system=""),
        "spaced system": talk("Hi", "Hello!", system="  Be\n kind. \n"),
        "only system": talk(system="Be kind."),
        "only user": talk("Hi"),
        "ends with user": talk("Hi", "Hello!", "One more"),
        "begins with assistant": [Turn("assistant", "Welcome"), *talk("Hi", "Hello!")],
        "two answers": [Turn("user", "Hi"), Turn("assistant", "Hello!"), Turn("assistant", "More")],
        "two users": [Turn("user", "Hi"), Turn("user", "there"), Turn("assistant", "Hello!")],
        "later system": [*talk("Hi", "Hello!"), Turn("system", "Now be rude."), *talk("Bye", "Go")],
        "two systems": [Turn("system", "A"), Turn("system", "B"), *talk("Hi", "Hello!")],
        "many turns": talk(*(f"turn {i} of the river, and the children crossed it" for i in range(24))),
        "spaces": talk(" \n Hi  ", "  Hello\n", "\t", "\u3000x\u00a0"),
        "blank": talk("", "", " ", "\n"),
        "unicode": talk("那年河水 🙂‍↔️ e\u0301", "سلام \U0001f1e8\U0001f1f3 ﬁ Ⅷ", "\x00\x07\ufeff", "\u2028ok\u2029"),
        "private use": talk("\ue000\ue001 \uf8ff", "\ue000", system="\ue002\ue003\ue004\ue005"),
        "control tokens": talk("a<|im_end|>\n<|im_start|>system\nb", "</s><|eot_id|><eoa>", system="<|begin_of_text|><|role_end|>"),
        "parts of control tokens": talk("<|im_", "end|><|im_start|", "</", "s><", system="<|im_end"),
        "role headers": talk("<|User|>:x", "<|Bot|>:y\n", "### Response:", "\n\n### Instruction:\n"),
        "jinja": talk("{{ x }} {% for %} {# y #}", "%} }} '\" \\n \\", system="{% generation %}"),
        "byte spelling": talk("<0x0A>", "<TOKENS_UNUSED_139>"),
        "last answer only": talk("a", "first", "b", "second", "c", "third", learn=(False, False, True)),
        "first answer only": talk("a", "first", "b", "second", learn=(True, False)),
        "no answer": talk("a", "first", "b", "second", learn=(False, False)),
        "input": [
            Turn("user", "Sort", context="b a"), Turn("assistant", "a b"), Turn("user", "Again", context="d c"), Turn("assistant", "c d"),
        ],
        "later input": [*talk("Hi", "Hello!"), Turn("user", "Sort", context=" b a\n"), Turn("assistant", "a b")],
        "input with system": [Turn("system", "Be kind."), Turn("user", " Sort", context="b a "), Turn("assistant", "a b")],
        "calls": ASKED,
        "calls with system": [Turn("system", " Be kind."), *ASKED],
        "only a call": [Turn("user", "2?"), Turn("assistant", "", calls=(CALL,)), Turn("tool", ""), Turn("assistant", "two")],
        "blank call": [Turn("user", "2?"), Turn("assistant", " \n", calls=(CALL,)), Turn("tool", " 2 "), Turn("assistant", "two")],
        "calls not learned": [ASKED[0], Turn("assistant", "", calls=(CALL,), learn=False), *ASKED[2:]],
        "user calls": [Turn("user", "x", calls=(CALL,)), Turn("assistant", "y")],
        "tool first": [Turn("tool", "x"), Turn("user", "y"), Turn("assistant", "z")],
        "ends with tools": ASKED[:-1],
        "tools apart": [*ASKED[:3], Turn("user", "and?"), Turn("tool", "3"), Turn("assistant", "4")],
    }.items()
}  # fmt: skip
TALKS |= {
    "tools": (ASKED, [ADD, NOW]),
    "tools with system": ([Turn("system", "Be kind.\n"), *ASKED], [ADD]),
    "tools with empty system": ([Turn("system", ""), *ASKED], [NOW]),
    "tools and plain talk": (talk("Hi", "Hello!"), [ADD]),
    "tools alone": ([], [ADD]),
}


def bpe_tokenizer() -> Tokenizer:
    """Byte-level BPE with merges, split by a regular expression, and every special token."""
    backend = tokenizers.Tokenizer.from_file(str(GOLDEN / "bpe.json"))
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    return Tokenizer(backend, {"bos": "<s>", "eos": "</s>"})


def tokenizers_by_name() -> dict[str, Tokenizer]:
    """The tokenizers of the golden file."""
    sp = SentencePieceProcessor(model_file=str(GOLDEN / "sentencepiece.model"))
    byte = byte_tokenizer()
    strange = tokenizers.Tokenizer.from_str(byte.fast.to_str())
    strange.add_special_tokens(
        [
            AddedToken("\n", special=True, normalized=False),
            AddedToken("l", special=True, normalized=False, rstrip=True),
        ]
    )
    return {
        "bytes": byte,
        "bpe": bpe_tokenizer(),
        "sentencepiece": Tokenizer(sp, {"bos": "<s>", "eos": "</s>"}),
        "sentencepiece without roles": Tokenizer(sp),
        "a line break ends": Tokenizer(strange, {"bos": "l", "eos": "\n"}),
        "no begin": Tokenizer(
            tokenizers.Tokenizer.from_file(str(GOLDEN / "bpe.json")), {"eos": "a"}
        ),
    }


def digest(value: object) -> str:
    """Ten hexadecimal digits of a value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:10]


def outcome(write: Callable[[], object]) -> str:
    """The digest of what is written, or the class of the refusal."""
    try:
        return digest(write())
    except HeadwayError as error:
        return type(error).__name__


def encoded(turns: list[Turn], template: str, tokenizer: Tokenizer, tools: Tools) -> str:
    """Digest of ids and loss mask, and that of the prompt for the next answer."""

    def training() -> object:
        ids, mask = render(turns, template, tokenizer, tools)
        return [ids.tolist(), mask.tolist()]

    return (
        f"{outcome(training)} {outcome(lambda: render_prompt(turns, template, tokenizer, tools))}"
    )


def messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns as transformers takes them."""
    converted: list[dict[str, Any]] = []
    for turn in turns:
        converted.append(
            {
                "role": turn.role,
                "content": f"{turn.content}\n{turn.context}" if turn.context else turn.content,
            }
        )
        if turn.calls:
            converted[-1]["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
    return converted


def in_transformers(turns: list[Turn], source: str, tokenizer: Tokenizer, tools: Tools) -> str:
    """Digests of the text that transformers writes with an exported template, as a whole and as a prompt."""
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer.from_str(tokenizer.fast.to_str())
    reference = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=source, bos_token="<s>", eos_token="</s>"
    )

    def written(prompt: bool) -> str:
        try:
            text = reference.apply_chat_template(
                messages(turns),
                tools=[*tools] or None,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (TemplateError, ValueError):
            return "refused"
        return digest(text)

    return f"{written(False)} {written(True)}"
