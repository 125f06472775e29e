"""Prompts as the loader reads them: a document of one token is one prompt, so a row is a prompt.

    records -> turns -> ids by the chat template        `Prompt`, held in memory
    a microbatch      extra[prompt]  int64 [B]           its number, -1 for an empty row

Shuffling, splits, mixtures, epochs and the cursor are those of documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headway.data.groups import Columns, GroupSource
from headway.errors import ConfigError, DataError
from headway.prepare.detect import format_of, local_path
from headway.records.base import RecordFields, RecordKind, parse_record, record_kind
from headway.runtime.process import from_environment
from headway.store.source import Ids, Longs
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat import find_template, render_prompt

if TYPE_CHECKING:
    from headway.data.config import SourceConfig
    from headway.data.rows import RowLayout, RowPieces
    from headway.tokenizer.load import Tokenizer

log = logging.getLogger("headway")

PROMPT = "prompt"
"""The column of a batch of prompts: the number of each row's prompt, over all sources."""
SEQ_LEN = 2
"""Of rows of prompts: the prompt and one token of padding, the shortest row there is."""


@dataclass(frozen=True)
class RolloutPrompt:
    """One prompt, ready to be answered."""

    ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...]
    """Its turns with `role` and `content`, as rewards read them."""
    record: Mapping[str, Any]
    """All columns of its record."""
    place: str
    """File and line."""
    template: str = ""
    """Digest of the chat template that made its ids."""

    @property
    def question(self) -> str:
        """Its last turn, as people read it."""
        return str(self.messages[-1]["content"])

    @cached_property
    def digest(self) -> str:
        """Of its ids and its record."""
        text = json.dumps([list(self.ids), self.record], sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class PromptSource(GroupSource):
    """Prompts of one source of a recipe, each a document of one token."""

    unit: ClassVar[str] = "prompt"
    total: ClassVar[str | None] = "prompts"
    keeps_whole: ClassVar[bool] = False

    def __init__(self, name: str, prompts: Sequence[RolloutPrompt], first_number: int) -> None:
        self.name = name
        # There is no token store behind it; `content_key` says what the prompts are.
        self.fingerprint = None
        self.prompts = tuple(prompts)
        self.first_number = first_number
        self.num_documents = len(self.prompts)
        self.num_tokens = len(self.prompts)

    @cached_property
    def max_id(self) -> int:
        return 0

    @cached_property
    def content_key(self) -> str:
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(prompt.digest.encode())
        return f"prompts-{digest.hexdigest()}"

    def lengths(self, first: int, last: int) -> Longs:
        return np.ones(max(0, min(last, self.num_documents) - first), np.int64)

    def first_at(self, token: int) -> int:
        return min(token, self.num_documents)

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        return np.zeros(max(0, min(stop, 1) - start), np.uint32)

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, None]:
        """Tokens of 0: the ids of a prompt are in `prompts`."""
        return np.zeros(int(lengths.sum()), np.uint32), None

    def empty_columns(self, num_rows: int, layout: RowLayout) -> Columns:
        # The last batch of an epoch may have fewer prompts than rows; those rows keep the -1.
        return {PROMPT: np.full(num_rows, -1, np.int64)}

    def fill_columns(self, columns: Columns, pieces: RowPieces, layout: RowLayout) -> None:
        # Each document is one token, so a piece is a whole prompt and a row has one.
        columns[PROMPT][pieces.rows] = self.first_number + pieces.document


def _kind_of(source: SourceConfig, path: str) -> RecordKind:
    """The kind of a source, which must be one of prompts."""
    kind = record_kind("prompt")
    # A path that does not exist has no kind yet; reading it says so.
    if kind.files([path]) and format_of(path) != "raw":
        raise ConfigError(
            f"data: {source.path} is a token store, whose records are gone; rollouts need the "
            "columns that rewards read. Give the raw records."
        )
    if source.kind not in ("auto", kind.name):
        kind = record_kind(source.kind)
    if kind.has_tokens:
        raise ConfigError(
            f"data: {source.path} is of kind {source.kind}, and rollouts answer prompts. "
            "Use kind: prompt; the answers of its records are then columns."
        )
    return kind


def read_prompts(
    source: SourceConfig,
    cache_dir: Any,
    tokenizer: Tokenizer,
    *,
    longest: int,
    first_number: int = 0,
) -> PromptSource:
    """The prompts of one source.

    `longest`: tokens of a prompt that leave room for an answer in a row. Longer prompts are left
    out with a line in the log.
    """
    path = local_path(source.path, cache_dir)
    kind = _kind_of(source, path)
    fields = RecordFields(keys=KeyMap.of(source.keys))
    template = find_template(source.chat_template, tokenizer)

    template_digest = hashlib.sha256(template.cache_key.encode()).hexdigest()[:16]
    prompts: list[RolloutPrompt] = []
    num_long = 0
    num_bad = 0
    # `limit` counts records as it does elsewhere, also those that are left out below.
    for record in islice(kind.read(kind.files([path])), source.limit):
        try:
            example = parse_record(kind, record, fields)
            ids = render_prompt(example.turns, template, tokenizer, example.tools)
        except DataError:
            if not source.drop_bad:
                raise
            num_bad += 1
            continue
        if len(ids) > longest:
            num_long += 1
            continue
        messages = tuple(
            # The model sees the context of a turn, so rewards and judges see it, too.
            {"role": turn.role, "content": turn.content + turn.context}
            for turn in example.turns
        )
        prompts.append(
            RolloutPrompt(tuple(ids), messages, record.data, record.place, template_digest)
        )

    if not prompts:
        raise ConfigError(
            f"data: {source.path} has no prompt of at most {longest} tokens "
            f"({num_long} are longer, {num_bad} cannot be read). data.seq_len must hold a prompt "
            "and rollout.max_new_tokens: raise it, or lower rollout.max_new_tokens."
        )
    if num_long or num_bad:
        # Every rank reads the prompts; one of them says what it left out.
        say = log.warning if from_environment().is_first else log.debug
        say(
            "%s: %d prompts are left out: %d leave no room for an answer (data.seq_len), "
            "%d cannot be read",
            source.path,
            num_long + num_bad,
            num_long,
            num_bad,
        )
    return PromptSource(source.path, prompts, first_number)
