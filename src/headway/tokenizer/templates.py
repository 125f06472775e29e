"""How a conversation is written down: templates turn turns into pieces, each plain text or a special token, each a loss target or not.

    chatml, one turn    <|im_start|> "assistant\\n" | "Hello." <|im_end|> | "\\n"
                                no loss             |   loss (target)     | no loss

Invariant: of an assistant turn exactly the answer and the tokens that end it are targets; of every other turn nothing is. What somebody
typed is a text piece, so it never becomes a special token. A role a template has no place for is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from headway.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Call:
    """A tool the assistant calls."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class Turn:
    """What one speaker says."""

    role: Role
    content: str
    context: str = ""
    """Material an instruction speaks of (Alpaca's `input`); templates without a place for it write it below the content."""
    calls: tuple[Call, ...] = ()
    learn: bool = True
    """False: an assistant turn that is context only and carries no loss."""


@dataclass(frozen=True)
class Token:
    """A special token: by its spelling, or by the role (`bos`, `eos`) it has in the tokenizer; an optional one is left out if missing."""

    spelling: str = ""
    role: Literal["", "bos", "eos"] = ""
    optional: bool = False


@dataclass(frozen=True)
class Glued:
    """Text that continues what stands before it: a sentencepiece tokenizer puts no space in front."""

    text: str


Part = str | Token | Glued


class Piece(NamedTuple):
    """A stretch of text or one special token, and whether it is a loss target."""

    part: Part
    target: bool = False


class Template(Protocol):
    """Writes conversations down as pieces."""

    @property
    def name(self) -> str:
        """What `--template` calls it."""
        ...

    def pieces(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[Piece]:
        """A whole conversation, for training."""
        ...

    def prompt(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[Piece]:
        """A conversation up to where the assistant's next answer begins, for generation."""
        ...


@dataclass(frozen=True)
class Frame:
    """What stands around the content of a turn: `end` belongs to the turn (and to the loss, for the assistant), `gap` does not."""

    before: tuple[Part, ...]
    end: tuple[Part, ...]
    gap: tuple[Part, ...] = ()


@dataclass(frozen=True)
class TurnTemplate:
    """A template that frames each turn by its role."""

    name: str
    frames: Mapping[str, Frame]
    begin: tuple[Part, ...] = ()
    finish: tuple[Part, ...] = ()
    """After the last turn; a target if that was the assistant's."""
    default_system: str | None = None
    strip: bool = False
    """The format defines content without white space around it."""
    tool_prompt: str | None = None
    """System text that lists the tools, with `{tools}` in it; None: the format has no place for tool definitions."""
    call_format: str = '{{"name": {name}, "arguments": {arguments}}}'
    is_text: bool = True
    """False: no text is read back as its tokens, so it has no form in jinja."""
    tool_joint: str | None = None
    """Written between the results of several tools in one frame; None: each has a frame of its own."""

    def pieces(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[Piece]:
        """A whole conversation, for training."""
        found = self._framed(turns, tools)
        last = turns[-1] if turns else None
        return found + [Piece(part, last is not None and last.role == "assistant" and last.learn) for part in self.finish]

    def prompt(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[Piece]:
        """A conversation up to where the assistant's next answer begins, for generation."""
        found = [Piece(piece.part) for piece in self._framed(turns, tools)]
        return found + [Piece(part) for part in self.frames["assistant"].before]

    def _framed(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        found = [Piece(part) for part in self.begin]
        for turn in self._joined(self._with_system(turns, tools)):
            if turn.role not in self.frames:
                raise DataError(f"template {self.name} has no place for a {turn.role} turn; choose another template, such as chatml.")
            frame = self.frames[turn.role]
            loss = turn.role == "assistant" and turn.learn
            found += [Piece(part) for part in frame.before]
            found += [Piece(self._content(turn), loss), *(Piece(part, loss) for part in frame.end)]
            found += [Piece(part) for part in frame.gap]
        return found

    def _with_system(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
        has_system = bool(turns) and turns[0].role == "system"
        system = turns[0].content if has_system else self.default_system
        if tools:
            if self.tool_prompt is None:
                raise DataError(f"template {self.name} has no place for tool definitions; choose chatml, qwen or the tokenizer's own.")
            listed = self.tool_prompt.replace("{tools}", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
            system = f"{system}\n\n{listed}" if system else listed
        rest = list(turns[1:]) if has_system else list(turns)
        return rest if system is None else [Turn("system", system), *rest]

    def _joined(self, turns: list[Turn]) -> list[Turn]:
        found: list[Turn] = []
        for turn in turns:
            if self.tool_joint is not None and found and turn.role == found[-1].role == "tool":
                turn = Turn("tool", found.pop().content + self.tool_joint + turn.content)
            found.append(turn)
        return found

    def _content(self, turn: Turn) -> str:
        content = f"{turn.content}\n{turn.context}" if turn.context else turn.content
        content = content.strip() if self.strip else content
        calls = [
            self.call_format.format(
                name=json.dumps(call.name, ensure_ascii=False), arguments=json.dumps(call.arguments, ensure_ascii=False)
            )
            for call in turn.calls
        ]
        return "\n".join(([content] if content or not calls else []) + calls)


@dataclass(frozen=True)
class AlpacaTemplate:
    """The sections of Stanford Alpaca; a system turn takes the place of the preamble. Needs no special token but the end of text."""

    name: str = "alpaca"
    preamble: str = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    preamble_with_input: str = (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request."
    )
    question: str = "\n\n### Instruction:\n"
    response: str = "\n\n### Response:"
    end: Token = field(default_factory=lambda: Token(role="eos"))

    def pieces(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[Piece]:
        """A whole conversation, for training."""
        if tools:
            raise DataError("template alpaca has no place for tool definitions; choose chatml, qwen or the tokenizer's own.")
        found = [Piece(Token(role="bos", optional=True))]
        rest = list(turns)
        with_input = bool(rest) and rest[0].role == "user" and bool(rest[0].context)
        system = rest.pop(0).content if rest and rest[0].role == "system" else (self.preamble_with_input if with_input else self.preamble)
        found.append(Piece(system))
        for turn in rest:
            if turn.role == "user":
                given = f"\n\n### Input:\n{turn.context}" if turn.context else ""
                found.append(Piece(f"{self.question}{turn.content}{given}"))
            elif turn.role == "assistant" and not turn.calls:
                found += [*self._header(), Piece(turn.content, turn.learn), Piece(self.end, turn.learn)]
            else:
                raise DataError(f"template alpaca has no place for a {turn.role} turn here; choose another template, such as chatml.")
        return found

    def prompt(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[Piece]:
        """A conversation up to where the assistant's next answer begins, for generation."""
        return [Piece(piece.part) for piece in self.pieces(turns, tools)] + self._header()

    def _header(self) -> list[Piece]:
        return [Piece(self.response)]


def _chatml(role: str) -> Frame:
    return Frame((Token("<|im_start|>"), f"{role}\n"), (Token("<|im_end|>"),), ("\n",))


def _llama3(role: str) -> Frame:
    return Frame((Token("<|start_header_id|>"), role, Token("<|end_header_id|>"), "\n\n"), (Token("<|eot_id|>"),))


def _zero2all(role: str) -> Frame:
    return Frame((Token("<|im_start|>"), role, Token("<|role_end|>")), (Token("<|im_end|>"),))


TOOL_PROMPT = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
CALL_FORMAT = '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
QWEN_TOOL = Frame((Token("<|im_start|>"), "user\n<tool_response>\n"), ("\n</tool_response>", Token("<|im_end|>")), ("\n",))

BUILT_IN: dict[str, Template] = {
    "chatml": TurnTemplate("chatml", {role: _chatml(role) for role in ROLES}, tool_prompt=TOOL_PROMPT, call_format=CALL_FORMAT),
    "qwen": TurnTemplate(
        "qwen",
        {role: _chatml(role) for role in ("system", "user", "assistant")} | {"tool": QWEN_TOOL},
        default_system="You are a helpful assistant.",
        tool_prompt=TOOL_PROMPT,
        call_format=CALL_FORMAT,
        tool_joint="\n</tool_response>\n<tool_response>\n",
    ),
    "llama3": TurnTemplate(
        "llama3",
        {role: _llama3(role) for role in ("system", "user", "assistant")} | {"tool": _llama3("ipython")},
        begin=(Token("<|begin_of_text|>"),),
        strip=True,
        call_format='{{"name": {name}, "parameters": {arguments}}}',
    ),
    "alpaca": AlpacaTemplate(),
    "internlm": TurnTemplate(
        "internlm",
        {
            "system": Frame(("<|System|>:",), (Glued("\n"),)),
            "user": Frame(("<|User|>:",), (Token("<eoh>"), Glued("\n"))),
            "assistant": Frame(("<|Bot|>:",), (Token("<eoa>"), Glued("\n"))),
        },
        begin=(Token(role="bos"),),
        finish=(Token(role="eos"),),
    ),
    # The ids that InternLM's own tools/alpaca_tokenizer.py writes (103167, 103166, 13), as V7_sft.model spells them.
    "internlm_alpaca": TurnTemplate(
        "internlm_alpaca",
        {
            "system": Frame(("<|System|>:",), (Token("<0x0A>"),)),
            "user": Frame(("<|User|>:",), (Token("<TOKENS_UNUSED_140>"), Token("<0x0A>"))),
            "assistant": Frame(("<|Bot|>:",), (Token("<TOKENS_UNUSED_139>"), Token("<0x0A>"))),
        },
        begin=(Token(role="bos"),),
        finish=(Token(role="eos"),),
        is_text=False,
    ),
    "zero2all": TurnTemplate(
        "zero2all",
        {role: _zero2all(role) for role in ROLES},
        begin=(Token("<|beginoftext|>"),),
        default_system="You are a helpful assistant.",
        strip=True,
    ),
}
