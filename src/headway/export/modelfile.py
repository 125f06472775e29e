"""The Modelfile of Ollama next to a GGUF file: `ollama create NAME -f Modelfile` reads it.

Ollama's templates are Go's, and a model's chat template is jinja. The Go template is made from what the jinja template writes around the
turns of small conversations, and kept only if its pieces, put together again, give exactly what the jinja template writes for a longer one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import HeadwayError
from headway.runtime.storage import write_atomic
from headway.tokenizer.chat import answer_end, bos_ids, find_template
from headway.tokenizer.chat_template import ContinuedText, ControlToken, Turn

if TYPE_CHECKING:
    from headway.model.config import ModelConfig
    from headway.tokenizer.load import Tokenizer

FILE = "Modelfile"
MARKS = (
    "\x01one\x01",
    "\x01two\x01",
    "\x01three\x01",
    "\x01four\x01",
    "\x01five\x01",
    "\x01six\x01",
)
QUOTES = '"""'


@dataclass(frozen=True)
class TurnTexts:
    """What a chat template writes around the contents of turns."""

    begin: str
    """Before the first question, without a system prompt."""
    before_system: str
    after_system: str
    before_user: str
    after_user: str
    """To where the answer begins."""
    after_answer: str

    def text(self, system: str | None, contents: Sequence[str]) -> str:
        """A conversation: questions and answers in turn, a question last."""
        parts = [self.begin if system is None else self.before_system + system + self.after_system]
        for number, content in enumerate(contents):
            parts.append(
                content + self.after_answer
                if number % 2
                else self.before_user + content + self.after_user
            )
        return "".join(parts)

    def go(self, begin_token: str) -> str:
        """The same as a Go template; `begin_token` is left out, because llama.cpp adds it."""
        begin, before = (
            self.begin.removeprefix(begin_token),
            self.before_system.removeprefix(begin_token),
        )
        return (
            f"{{{{ if .System }}}}{before}{{{{ .System }}}}{self.after_system}{{{{ else }}}}{begin}{{{{ end }}}}"
            f'{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{self.before_user}{{{{ .Content }}}}{self.after_user}'
            f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{self.after_answer}{{{{ end }}}}{{{{ end }}}}'
        )


def write_modelfile(
    gguf: Path, tokenizer: Tokenizer, config: ModelConfig, end_ids: Collection[int]
) -> Path:
    """Write the Modelfile next to a GGUF file: NAME.Modelfile. It names the file, the template, what ends an answer and the context."""
    lines = [f"# ollama create NAME -f {gguf.stem}.{FILE}", f"FROM ./{gguf.name}"]
    texts = turn_texts(tokenizer)
    begin = bos_ids(tokenizer)
    go = "" if texts is None else texts.go(tokenizer.decode(begin) if begin else "")
    if texts is not None and QUOTES not in go and not _holds_braces(texts):
        lines.append(f"TEMPLATE {QUOTES}{go}{QUOTES}")
    elif tokenizer.chat_template is not None:
        lines.append(
            "# The chat template has no equivalent here; Ollama uses the one inside the GGUF file where it can read it."
        )
    else:
        lines.append(f"TEMPLATE {QUOTES}{{{{ .Prompt }}}}{QUOTES}")
    for stop in _stops(tokenizer, end_ids):
        lines.append(f"PARAMETER stop {_quoted(stop)}")
    lines.append(f"PARAMETER num_ctx {config.max_seq_len}")
    path = gguf.with_name(f"{gguf.stem}.{FILE}")
    write_atomic(path, "\n".join(lines) + "\n")
    return path


def _holds_braces(texts: TurnTexts) -> bool:
    return any("{{" in text or "}}" in text for text in vars(texts).values())


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _stops(tokenizer: Tokenizer, end_ids: Collection[int]) -> list[str]:
    """Tokens that end an answer: those that end a text, and the one that the chat template ends an answer with."""
    named = {number: token for token, number in tokenizer.special_tokens.items()}
    ends = set(end_ids) | ({tokenizer.eos_id} if tokenizer.eos_id is not None else set())
    if tokenizer.chat_template is not None:
        try:
            ends |= set(answer_end("tokenizer", tokenizer))
        except HeadwayError:  # a template whose answers have no certain end
            pass
    return [named[number] for number in sorted(ends) if number in named]


def turn_texts(tokenizer: Tokenizer) -> TurnTexts | None:
    """What the tokenizer's chat template writes around turns; None without one, or where it is not the same around every turn."""
    if tokenizer.chat_template is None:
        return None
    one, two, three, four, five, six = MARKS
    try:
        alone = _cut(_written(tokenizer, None, [one]), [one])
        told = _cut(_written(tokenizer, six, [one]), [six, one])
        longer = _cut(_written(tokenizer, None, [one, two, three]), [one, two, three])
        if alone is None or told is None or longer is None:
            return None
        before_user = _common_end(alone[0], told[1], longer[2])
        made = TurnTexts(
            begin=alone[0].removesuffix(before_user),
            before_system=told[0],
            after_system=told[1].removesuffix(before_user),
            before_user=before_user,
            after_user=alone[1],
            after_answer=longer[2].removesuffix(before_user),
        )
        contents = [one, two, three, four, five]
        same = all(
            made.text(system, contents) == _written(tokenizer, system, contents)
            for system in (None, six)
        )
    except HeadwayError:  # a template without a place for one of these turns
        return None
    return made if same else None


def _written(tokenizer: Tokenizer, system: str | None, contents: Sequence[str]) -> str:
    turns = [Turn("system", system)] if system is not None else []
    turns += [
        Turn("assistant" if number % 2 else "user", content)
        for number, content in enumerate(contents)
    ]
    template = find_template("tokenizer", tokenizer)
    return "".join(_spelled(segment.part) for segment in template.prompt(turns))


def _spelled(part: str | ControlToken | ContinuedText) -> str:
    if isinstance(part, ControlToken):
        return part.spelling
    return part.text if isinstance(part, ContinuedText) else part


def _cut(text: str, marks: Sequence[str]) -> list[str] | None:
    """What stands around marks that each occur once, in this order."""
    found: list[str] = []
    for mark in marks:
        if text.count(mark) != 1:
            return None
        before, _, text = text.partition(mark)
        found.append(before)
    return [*found, text]


def _common_end(*texts: str) -> str:
    same = 0
    while all(len(text) > same for text in texts) and len({text[-same - 1] for text in texts}) == 1:
        same += 1
    return texts[0][len(texts[0]) - same :]
