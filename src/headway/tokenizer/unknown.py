"""Whether a tokenizer knows the text it is given: one that turns everything into its unknown token is refused before a store is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from headway.errors import DataError
from headway.tokenizer.load import Tokenizer

SAMPLE_TEXTS = 64
SAMPLE_CHARACTERS = 4096


def unknown_ids(tokenizer: Tokenizer) -> set[int]:
    """The ids that stand for what the tokenizer does not know; none where it knows everything."""
    backend: Any = tokenizer.backend
    if tokenizer.is_sentencepiece:
        return {backend.unk_id()} if backend.unk_id() >= 0 else set()
    named = {getattr(backend.model, "unk_token", None), tokenizer.roles.get("unk")} - {None}
    return {found for name in named if (found := backend.token_to_id(name)) is not None}


def refuse_unknown(tokenizer: Tokenizer, path: object, texts: Iterable[str]) -> None:
    """Refuse a tokenizer that knows no character of the first texts."""
    unknown = unknown_ids(tokenizer)
    if not unknown:
        return
    sample = [text[:SAMPLE_CHARACTERS] for text in islice(texts, SAMPLE_TEXTS) if text.strip()]
    found = [token for ids in tokenizer.encode_batch(sample) for token in ids]
    if found and all(token in unknown for token in found):
        raise DataError(
            f"the tokenizer {path} knows no character of the text: all {len(found)} tokens of the first {len(sample)} documents are its "
            f"unknown token. The text begins {sample[0][:40]!r}. Use the tokenizer that belongs to this data."
        )


def texts_in(record: object) -> Iterator[str]:
    """Every text in a record, however deep."""
    if isinstance(record, str):
        yield record
    elif isinstance(record, dict):
        for value in record.values():
            yield from texts_in(value)
    elif isinstance(record, (list, tuple)):
        for value in record:
            yield from texts_in(value)
