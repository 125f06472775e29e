"""The Modelfile of Ollama next to a GGUF file: `ollama create NAME -f Modelfile` reads it.

Ollama's templates are Go's, and a model's chat template is jinja. The Go template is made from what
the jinja template writes around the turns of small conversations, and kept only if its pieces, put
together again, give exactly what the jinja template writes for a longer one.
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
"""Contents of turns that no template writes itself, so that `_cut` finds them in its text: five
questions and answers, and a system prompt.
"""
QUOTES = '"""'
"""Around a Modelfile's texts of several lines. A text that contains them cannot be written."""


@dataclass(frozen=True)
class TurnTexts:
    """What a chat template writes around the contents of turns.

    With a system prompt `before_system` takes the place of `begin`.
    """

    begin: str
    """Before the first question's `before_user`, without a system prompt."""
    before_system: str
    after_system: str
    before_user: str
    after_user: str
    """To where the answer begins, with the header of the assistant's turn."""
    after_answer: str

    def text(self, system: str | None, contents: Sequence[str]) -> str:
        """A conversation: questions and answers in turn, a question last."""
        text = self.begin
        if system is not None:
            text = self.before_system + system + self.after_system
        for number, content in enumerate(contents):
            if number % 2:
                text += content + self.after_answer
            else:
                text += self.before_user + content + self.after_user
        return text

    def go(self, begin_token: str) -> str:
        """The same as a Go template; `begin_token` is left out, because llama.cpp adds it."""
        begin = self.begin.removeprefix(begin_token)
        before_system = self.before_system.removeprefix(begin_token)
        # Go drops nothing between its actions, so a line break here would be one in every prompt.
        return (
            "{{ if .System }}"
            + f"{before_system}{{{{ .System }}}}{self.after_system}"
            + "{{ else }}"
            + begin
            + "{{ end }}"
            + "{{ range .Messages }}"
            + '{{ if eq .Role "user" }}'
            + f"{self.before_user}{{{{ .Content }}}}{self.after_user}"
            + '{{ else if eq .Role "assistant" }}'
            + f"{{{{ .Content }}}}{self.after_answer}"
            + "{{ end }}"
            + "{{ end }}"
        )


def write_modelfile(
    gguf: Path, tokenizer: Tokenizer, config: ModelConfig, end_ids: Collection[int]
) -> Path:
    """Write the Modelfile next to a GGUF file: NAME.Modelfile. It names the file, the template,
    what ends an answer and the context.
    """
    lines = [f"# ollama create NAME -f {gguf.stem}.{FILE}", f"FROM ./{gguf.name}"]

    template = None
    texts = turn_texts(tokenizer)
    # Braces in a turn's texts would be actions of the Go template.
    if texts is not None and not _holds_braces(texts):
        begin_ids = bos_ids(tokenizer)
        begin_token = tokenizer.decode(begin_ids) if begin_ids else ""
        template = texts.go(begin_token)
    if template is not None and QUOTES not in template:
        lines.append(f"TEMPLATE {QUOTES}{template}{QUOTES}")
    elif tokenizer.chat_template is not None:
        lines.append(
            "# The chat template has no equivalent here; Ollama uses the one inside the GGUF file "
            "where it can read it."
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
    """Tokens that end an answer: those that end a text, and the one that the chat template ends an
    answer with.
    """
    ends = set(end_ids)
    if tokenizer.eos_id is not None:
        ends.add(tokenizer.eos_id)
    if tokenizer.chat_template is not None:
        try:
            ends |= set(answer_end("tokenizer", tokenizer))
        except HeadwayError:  # a template whose answers have no certain end
            pass

    # Only special tokens: an ordinary one would also end answers that merely contain its text.
    token_of = {number: token for token, number in tokenizer.special_tokens.items()}
    return [token_of[number] for number in sorted(ends) if number in token_of]


def turn_texts(tokenizer: Tokenizer) -> TurnTexts | None:
    """What the tokenizer's chat template writes around turns; None without one, or where it is not
    the same around every turn.
    """
    if tokenizer.chat_template is None:
        return None
    # The first, third and fifth of the contents are questions, the others answers.
    *contents, system = MARKS
    question = contents[:1]
    try:
        # Each comment names the pieces that the cut gives.
        # begin + before_user, after_user
        alone = _cut(_written(tokenizer, None, question), question)
        # before_system, after_system + before_user, after_user
        with_system = _cut(_written(tokenizer, system, question), [system, *question])
        # begin + before_user, after_user, after_answer + before_user, after_user
        longer = _cut(_written(tokenizer, None, contents[:3]), contents[:3])
        if alone is None or with_system is None or longer is None:
            return None

        # Three pieces end with `before_user`. If they share more than that, some text moves from
        # the pieces before it into `before_user`, and conversations are the same.
        before_user = _common_end(alone[0], with_system[1], longer[2])
        texts = TurnTexts(
            begin=alone[0].removesuffix(before_user),
            before_system=with_system[0],
            after_system=with_system[1].removesuffix(before_user),
            before_user=before_user,
            after_user=alone[1],
            after_answer=longer[2].removesuffix(before_user),
        )

        # A template may treat later turns in another way. Five turns show that it does not.
        for system_prompt in (None, system):
            written = _written(tokenizer, system_prompt, contents)
            if texts.text(system_prompt, contents) != written:
                return None
    except HeadwayError:  # a template without a place for one of these turns
        return None
    return texts


def _written(tokenizer: Tokenizer, system: str | None, contents: Sequence[str]) -> str:
    """What the tokenizer's chat template writes for questions and answers in turn, up to where the
    next answer begins.
    """
    turns: list[Turn] = []
    if system is not None:
        turns.append(Turn("system", system))
    for number, content in enumerate(contents):
        turns.append(Turn("assistant" if number % 2 else "user", content))
    # "tokenizer" names the tokenizer's own jinja template.
    template = find_template("tokenizer", tokenizer)
    return "".join(_spelled(segment.part) for segment in template.prompt(turns))


def _spelled(part: str | ControlToken | ContinuedText) -> str:
    if isinstance(part, ControlToken):
        return part.spelling
    if isinstance(part, ContinuedText):
        return part.text
    return part


def _cut(text: str, marks: Sequence[str]) -> list[str] | None:
    """What is before, between and after marks that each occur once, in this order; else None."""
    pieces: list[str] = []
    for mark in marks:
        if text.count(mark) != 1:
            return None
        before, _, text = text.partition(mark)
        pieces.append(before)
    return [*pieces, text]


def _common_end(*texts: str) -> str:
    """The longest text that all of them end with."""
    shortest = min(texts, key=len)
    for start in range(len(shortest)):
        end = shortest[start:]
        if all(text.endswith(end) for text in texts):
            return end
    return ""
