"""Answers that follow a JSON schema or are a tool call: a schema comes in, a grammar goes out; and a grammar becomes a `TokenConstraint`.

    HTTP process      schema_grammar, call_grammar -> text, checked by llguidance before anything is computed
    engine process    constraint_factory(tokenizer) -> text -> which tokens may follow, at each step

llguidance (extra `serve`) does both. Its limits bound what a hostile schema can cost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.runtime.optional import is_installed
from headway.serve.api_errors import ApiError, bad_field
from headway.serve.tool_calls import CLOSE, OPEN, ToolFormat

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLTokenizer

    from headway.infer.engine.request import ConstraintFactory
    from headway.infer.load import LoadedModel
    from headway.tokenizer.load import Tokenizer

MAX_GRAMMAR = 256 << 10
"""Characters of a grammar."""


def schema_grammar(schema: Any) -> str:
    """The grammar of the JSON texts that follow a schema."""
    if len(json.dumps(schema)) > MAX_GRAMMAR:
        raise bad_field("response_format", f"has a schema of more than {MAX_GRAMMAR >> 10} Ki characters.")
    _need("response_format")
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    except (ValueError, RecursionError) as error:
        raise bad_field("response_format", f"has a schema that cannot be used: {_line(error)}.") from None
    return _checked(grammar, "response_format")


def call_grammar(form: ToolFormat, tools: Sequence[Mapping[str, Any]], name: str | None) -> str:
    """The grammar of one call of a tool: of `name`, or of any."""
    _need("tool_choice")
    from llguidance import LLMatcher

    functions = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    key = "arguments" if form == "tags" else "parameters"
    schemas = [
        {
            "type": "object",
            "properties": {"name": {"const": one["name"]}, key: one.get("parameters") or {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for one in functions
    ]
    schema = json.dumps({**(schemas[0] if len(schemas) == 1 else {"anyOf": schemas}), "x-guidance": {"whitespace_flexible": False}})
    if len(schema) > MAX_GRAMMAR:
        raise bad_field("tools", f"have schemas of more than {MAX_GRAMMAR >> 10} Ki characters, too many for tool_choice.")
    around = (f'"{OPEN}\\n" ', f' "\\n{CLOSE}"') if form == "tags" else ("", "")
    return _checked(LLMatcher.grammar_from_lark(f"start: {around[0]}call{around[1]}\ncall: %json {schema}\n"), "tool_choice")


def _need(field: str) -> None:
    if not is_installed("llguidance"):
        raise ApiError(400, f"{field} needs llguidance, which this server does not have. Install headway[serve] there.", field)


def _checked(grammar: str, field: str) -> str:
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(grammar)
    if problem:
        raise bad_field(field, f"cannot be used as a grammar: {' '.join(problem.split())[:300]}.")
    return grammar


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def constraint_factory(tokenizer: Tokenizer | None, vocab: int, end_ids: frozenset[int]) -> ConstraintFactory | None:
    """Makes constraints for a model; None where llguidance or a tokenizer is missing, or no id ends a text."""
    if tokenizer is None or not end_ids or not is_installed("llguidance"):
        return None
    found: list[LLTokenizer] = []

    def make(grammar: str) -> GrammarConstraint:
        if not found:  # takes about a second for a large vocabulary
            found.append(_guidance_tokenizer(tokenizer, vocab, end_ids))
        return GrammarConstraint(found[0], grammar, end_ids)

    return make


def constraints_of(loaded: LoadedModel) -> ConstraintFactory | None:
    """Of a loaded model; every rank that shares its layers makes its own."""
    return constraint_factory(loaded.tokenizer, loaded.config.vocab, loaded.end_ids)


class _Vocabulary:
    """A tokenizer as llguidance wants one: the bytes of every id, and a function from text to ids."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        special = set(tokenizer.special_tokens.values())
        self.special_token_ids = sorted(special)
        self.tokens = [
            b"" if number >= tokenizer.vocab_size or number in special else _bytes_of(tokenizer, number) for number in range(vocab)
        ]
        for spelled, number in tokenizer.special_tokens.items():
            self.tokens[number] = spelled.encode()
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def _bytes_of(tokenizer: Tokenizer, number: int) -> bytes:
    table = tokenizer._token_bytes
    if table is not None:
        return table.get(number, b"")
    return tokenizer.fast.decode([number]).encode()


def _guidance_tokenizer(tokenizer: Tokenizer, vocab: int, end_ids: frozenset[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped = TokenizerWrapper(_Vocabulary(tokenizer, vocab, min(end_ids)))
    return LLTokenizer(wrapped, n_vocab=vocab, eos_token=sorted(end_ids))


class GrammarConstraint:
    """Which tokens may follow in one answer."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str, end_ids: frozenset[int]) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._end_ids = end_ids
        self._check()

    def fill_mask(self, mask: np.ndarray) -> None:
        """Set the bits of the tokens that may follow."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def accept(self, token: int) -> None:
        """The next token of the answer."""
        if token in self._end_ids:
            return
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_finished(self) -> bool:
        """The text is complete and nothing may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(f"the grammar of an answer cannot be followed: {' '.join(self._matcher.get_error().split())[:300]}.")
