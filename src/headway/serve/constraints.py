"""Answers that follow a JSON schema or are a tool call: a schema comes in, a grammar goes out; and
a grammar becomes a `TokenConstraint`.

    HTTP process       schema_grammar, call_grammar -> text, of a bounded size
    grammar process    grammar_check.py: whether the text can be used, by computing its first mask
                       within bounds of time and memory
    engine process     constraint_factory(tokenizer) -> text -> which tokens may follow, per step

llguidance (extra `serve`) does all of it. Its limits bound the steps of a mask, but not the time
that a grammar takes to compile: that is why another process tries it first. What a grammar raises
later ends its own request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.media.schema_branches import without_conditions
from headway.runtime.optional import is_installed
from headway.serve.api_errors import ApiError, bad_field
from headway.serve.tool_calls import CLOSE, OPEN, ToolFormat

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

    from headway.infer.load import LoadedModel
    from headway.tokenizer.load import Tokenizer

MAX_GRAMMAR = 256 << 10
"""Characters of a grammar."""
CHECKED_TOKENS = 8
MAX_FORCED_BYTES = 4096
"""A check follows one answer through the text with which every answer begins, up to this length,
and a few tokens more.
"""
MASK_SECONDS = 1.0
MASK_SECONDS_PER_TOKEN = 0.005
"""CPU time that the masks of one answer may take: so much, and for each of its tokens so much more.

Masks of usual grammars take 0.1 ms.
"""


def schema_grammar(schema: Any) -> str:
    """The grammar of the JSON texts that follow a schema.

    `GrammarChecker` says whether it can be used.
    """
    if len(_json_text(schema, "response_format")) > MAX_GRAMMAR:
        raise bad_field(
            "response_format", f"has a schema of more than {MAX_GRAMMAR >> 10} Ki characters."
        )

    _need("response_format")
    from llguidance import LLMatcher

    # Flexible white space would let a model write spaces until its answer is full.
    try:
        return LLMatcher.grammar_from_json_schema(
            without_conditions(schema), overrides={"whitespace_flexible": False}
        )
    except (ValueError, RecursionError, ConfigError) as error:
        raise bad_field(
            "response_format", f"has a schema that cannot be used: {_line(error)}."
        ) from None


def _json_text(value: Any, field: str) -> str:
    try:
        return json.dumps(value)
    except (ValueError, RecursionError) as error:
        raise bad_field(field, f"has a schema that cannot be used: {_line(error)}.") from None


def call_grammar(form: ToolFormat, tools: Sequence[Mapping[str, Any]], name: str | None) -> str:
    """The grammar of one call of a tool: of `name`, or of any.

    `GrammarChecker` says whether it can be used.
    """
    _need("tool_choice")
    from llguidance import LLMatcher

    functions = [
        tool["function"] for tool in tools if name is None or tool["function"]["name"] == name
    ]

    # As the templates of the two formats write it.
    key = "arguments" if form == "tags" else "parameters"
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                key: function.get("parameters") or {"type": "object"},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for function in functions
    ]
    joined: dict[str, Any] = {"anyOf": schemas}
    if len(schemas) == 1:
        joined = schemas[0]

    schema = _json_text({**joined, "x-guidance": {"whitespace_flexible": False}}, "tools")
    if len(schema) > MAX_GRAMMAR:
        raise bad_field(
            "tools",
            f"have schemas of more than {MAX_GRAMMAR >> 10} Ki "
            "characters, too many for tool_choice.",
        )

    # Llguidance's dialect of Lark: literals in quotes, and %json for a schema.
    start = "call"
    if form == "tags":
        start = f'"{OPEN}\\n" call "\\n{CLOSE}"'
    return LLMatcher.grammar_from_lark(f"start: {start}\ncall: %json {schema}\n")


def _need(field: str) -> None:
    if not is_installed("llguidance"):
        raise ApiError(
            400,
            f"{field} needs llguidance, which this server does not "
            "have. Install headway[serve] there.",
            field,
        )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


class GrammarFault(ConfigError):
    """A grammar that cannot be followed, or no further."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the grammar of the answer cannot be followed: {problem}.")
        self.problem = problem


class GrammarFactory:
    """Makes the constraints of one model: a call with a grammar gives that of one answer."""

    def __init__(
        self, tokenizer: Tokenizer, vocab: int, end_ids: frozenset[int], *, is_timed: bool = True
    ) -> None:
        """`is_timed`: an answer whose masks take too long fails.

        Ranks that share the layers must agree, and their clocks do not.
        """
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.end_ids = end_ids
        self.is_timed = is_timed

    @cached_property
    def guidance_tokenizer(self) -> LLTokenizer:
        """The tokenizer as llguidance has it; takes about a second for a large vocabulary."""
        return _guidance_tokenizer(self.tokenizer, self.vocab, self.end_ids)

    def __call__(self, grammar: str) -> GrammarConstraint:
        """The constraint of a new answer."""
        return GrammarConstraint(
            self.guidance_tokenizer, grammar, self.end_ids, is_timed=self.is_timed
        )

    def warm_up(self) -> None:
        """Do now what the first request would wait for."""
        self.check(schema_grammar({"type": "object"}))

    def check(self, grammar: str) -> None:
        """Compute the first mask of a grammar, and some masks of one answer; what that raises says
        why the grammar cannot be used.
        """
        import numpy as np

        constraint = self(grammar)
        for step in range(CHECKED_TOKENS):
            mask = np.zeros(-(-self.vocab // 32), dtype=np.int32)  # one bit per token
            constraint.fill_mask(mask)
            if step == 0:
                # Faults often stand behind the text with which every answer begins, as that of a
                # tool call.
                constraint.accept_forced_text(self.guidance_tokenizer)
            else:
                # Any allowed token continues the answer; the highest id will do.
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                allowed = np.flatnonzero(bits).tolist()
                text_tokens = [token for token in allowed if token not in self.end_ids]
                if text_tokens:
                    constraint.accept(text_tokens[-1])

            if constraint.is_finished:
                return


def can_constrain(tokenizer: Tokenizer | None, end_ids: frozenset[int]) -> bool:
    """Grammars need llguidance, a tokenizer, and an id that ends a text."""
    return tokenizer is not None and bool(end_ids) and is_installed("llguidance")


def constraint_factory(
    tokenizer: Tokenizer | None, vocab: int, end_ids: frozenset[int], *, is_timed: bool = True
) -> GrammarFactory | None:
    """Makes constraints for a model; None where it cannot have any."""
    if tokenizer is None or not can_constrain(tokenizer, end_ids):
        return None
    return GrammarFactory(tokenizer, vocab, end_ids, is_timed=is_timed)


def constraints_of(loaded: LoadedModel) -> GrammarFactory | None:
    """What makes the constraints of a loaded model, ready for the first grammar.

    Every rank that shares its layers makes its own.
    """
    factory = constraint_factory(
        loaded.tokenizer, loaded.config.vocab, loaded.end_ids, is_timed=loaded.part is None
    )
    if factory is not None:
        factory.warm_up()
    return factory


class _Vocabulary:
    """A tokenizer as llguidance wants one: the bytes of every id, and a function from text to its
    ids.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, end: int) -> None:
        self.eos_token_id = end
        self.bos_token_id = tokenizer.bos_id
        special_ids = set(tokenizer.special_tokens.values())
        self.special_token_ids = sorted(special_ids)

        # A model may have more embeddings than its tokenizer has ids; these have no bytes.
        self.tokens = [b""] * vocab
        for token in range(min(vocab, tokenizer.vocab_size)):
            if token not in special_ids:
                self.tokens[token] = _bytes_of(tokenizer, token)
        for spelled, token in tokenizer.special_tokens.items():
            self.tokens[token] = spelled.encode()

        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text)


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    table = tokenizer._token_bytes
    if table is not None:
        return table.get(token, b"")
    return tokenizer.fast.decode([token]).encode()


def _guidance_tokenizer(tokenizer: Tokenizer, vocab: int, end_ids: frozenset[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped = TokenizerWrapper(_Vocabulary(tokenizer, vocab, min(end_ids)))
    return LLTokenizer(wrapped, n_vocab=vocab, eos_token=sorted(end_ids))


class GrammarConstraint:
    """Which tokens may follow in one answer: `fill_mask` before each token, `accept` after it."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        grammar: str,
        end_ids: frozenset[int],
        *,
        is_timed: bool = True,
    ) -> None:
        from llguidance import LLMatcher

        self._matcher: LLMatcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._end_ids = end_ids
        self._allowance = MASK_SECONDS if is_timed else None
        """CPU seconds that its masks may still take."""
        self._check()

    def fill_mask(self, mask: np.ndarray) -> None:
        """Set the bits of the tokens that may follow."""
        # CPU time: a busy machine must not fail a grammar.
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if self._allowance is not None:
            # A bucket that each token refills a little: long answers may take longer, but never
            # much at once.
            self._allowance += MASK_SECONDS_PER_TOKEN - (time.thread_time() - began)
            if self._allowance < 0:
                raise GrammarFault(
                    "its masks take too long; simplify its patterns, or leave some out"
                )

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        # The engine ends the answer here: no mask follows.
        if token in self._end_ids:
            return
        self._matcher.consume_token(token)
        self._check()

    def accept_forced_text(self, tokenizer: LLTokenizer) -> None:
        """Go to the end of what must follow, unless that is much."""
        forced = self._matcher.compute_ff_bytes()
        if len(forced) <= MAX_FORCED_BYTES:
            self._matcher.consume_tokens(
                tokenizer.greedy_tokenize(forced.decode("utf-8", "ignore"))
            )
        self._check()

    @property
    def is_finished(self) -> bool:
        """The text is complete and nothing may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        # The first part says what happened; a dump of the parser's state follows.
        message = self._matcher.get_error().split("<state>")[0]
        problem = " ".join(message.split())[:300].rstrip(" .;")
        if problem.startswith("NoExtension"):
            problem = "it describes no text that ends"
        raise GrammarFault(problem)
