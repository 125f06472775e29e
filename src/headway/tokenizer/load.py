"""Text to ids and back: one class over a `tokenizers` tokenizer or a sentencepiece model, of any
origin.

In: a folder (of headway or Hugging Face), a tokenizer.json, a sentencepiece .model or a
.tiktoken file. Out: a `Tokenizer`. Invariant: special tokens written in a text are ordinary text
unless `allowed_special` names them, and nothing is added to a text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from headway.errors import ConfigError, DataError
from headway.tokenizer.byte_level import unspell

if TYPE_CHECKING:
    import tokenizers
    from sentencepiece import SentencePieceProcessor

    from headway.tokenizer.split_points import SplitPoints, TextPiece
    from headway.tokenizer.word_ids import Ids, WordIds

MODEL_MULTIPLE = 64
"""The rows of an embedding are a multiple of this."""
WHOLE_CHARACTERS = 1 << 18
"""Texts longer than this are encoded in pieces, in parallel and with bounded memory."""
BYTE_TOKEN_CHARACTERS = len("<0x0A>")
"""Characters of a token that stands for a byte, in vocabularies with byte fallback."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with its rules; equal `fingerprint` means equal ids for every text."""

    backend: tokenizers.Tokenizer | SentencePieceProcessor
    roles: dict[str, str] = field(default_factory=dict)
    """`bos`, `eos`, `pad`, `unk` -> the token that has this role."""
    config: dict[str, Any] = field(default_factory=dict)
    """tokenizer_config.json, so that saving keeps what headway does not read."""
    chat_template: str | None = None

    def __post_init__(self) -> None:
        import tokenizers

        # A special token typed in a text must be ordinary text. The flag is not part of the file
        # format, so it is set on every backend, from a file or pickled to a worker.
        if isinstance(self.backend, tokenizers.Tokenizer):
            self.backend.encode_special_tokens = True

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, so that a worker process also runs __post_init__.
        return Tokenizer, (self.backend, self.roles, self.config, self.chat_template)

    @cached_property
    def fast(self) -> tokenizers.Tokenizer:
        """The same vocabulary and rules as a `tokenizers` tokenizer; a sentencepiece model is
        converted on first use.
        """
        import tokenizers

        if isinstance(self.backend, tokenizers.Tokenizer):
            return self.backend

        from headway.tokenizer.sentencepiece_model import content_of, convert

        converted = convert(content_of(self.backend))
        converted.encode_special_tokens = True
        return converted

    @cached_property
    def vocab_size(self) -> int:
        """How many ids exist: one more than the highest."""
        if self.is_sentencepiece:
            return self.backend.get_piece_size()  # pyright: ignore[reportAttributeAccessIssue]
        return max(self.fast.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def model_vocab_size(self) -> int:
        """The rows of a model's embedding: `vocab_size` rounded up to a multiple of 64."""
        return -(-self.vocab_size // MODEL_MULTIPLE) * MODEL_MULTIPLE

    @property
    def is_sentencepiece(self) -> bool:
        """Whether the backend is a sentencepiece processor."""
        return type(self.backend).__module__.startswith("sentencepiece")

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Every special token and its id, in the order of ids."""
        if self.is_sentencepiece:
            sp: Any = self.backend
            ids = {
                sp.id_to_piece(i): i
                for i in range(sp.get_piece_size())
                if sp.is_control(i) or sp.is_unknown(i)
            }
        else:
            ids = {
                token.content: number
                for number, token in self.fast.get_added_tokens_decoder().items()
                if token.special
            }

        return dict(sorted(ids.items(), key=lambda item: item[1]))

    @property
    def bos_id(self) -> int | None:
        """The id that begins a document, where the tokenizer has one."""
        return self.token_to_id(self.roles.get("bos"))

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, where the tokenizer has one."""
        return self.token_to_id(self.roles.get("eos"))

    @property
    def pad_id(self) -> int | None:
        """The id that fills a row, where the tokenizer has one."""
        return self.token_to_id(self.roles.get("pad"))

    def token_to_id(self, token: str | None) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        if token is None:
            return None
        if self.is_sentencepiece:
            sp: Any = self.backend
            number: int = sp.piece_to_id(token)
            # sentencepiece answers the unknown id for a piece that it does not have.
            return number if sp.id_to_piece(number) == token else None
        return self.fast.token_to_id(token)

    def encode(
        self, text: str, *, allowed_special: Collection[str] | Literal["all"] = ()
    ) -> list[int]:
        """Ids of a text.

        Special tokens in it are ordinary text, save those named in `allowed_special`.
        """
        if allowed_special == "all":
            allowed = frozenset(self.special_tokens)
        else:
            allowed = frozenset(allowed_special)

        unknown = sorted(allowed - self.special_tokens.keys())
        if unknown:
            raise ConfigError(
                f"allowed_special names {unknown[0]!r}; the special tokens are "
                f"{', '.join(self.special_tokens) or 'none'}."
            )

        # The usual case needs no clone of the tokenizer.
        if not any(token in text for token in allowed):
            return self.encode_batch([text])[0]

        return self._allowing(allowed).encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, in parallel threads; no special token is added, and none in the
        texts is recognised.
        """
        if all(len(text) <= WHOLE_CHARACTERS for text in texts):
            return self._encode(self.backend, texts)
        return [
            [number for piece in self.pieces([text]) for number in self.encode_pieces([piece])[0]]
            for text in texts
        ]

    def pieces(self, blocks: Iterable[str]) -> Iterator[TextPiece]:
        """A text that comes in blocks, in pieces for `encode_pieces`; one that is not long is
        one piece.
        """
        from headway.tokenizer.split_points import TextPiece, blocks_of

        parts = (part for block in blocks for part in blocks_of(block))
        begin = next(parts, "")

        # Looks one block ahead: only then is known whether a short beginning is the whole text.
        if len(begin) <= WHOLE_CHARACTERS:
            following = next(parts, None)
            if following is None:
                yield TextPiece(begin)
                return

            begin += following

        yield from self.split_points.pieces(chain([begin], parts))

    @cached_property
    def split_points(self) -> SplitPoints:
        """Where long texts can be split without changing their ids."""
        from headway.tokenizer.split_points import split_points

        return split_points(self)

    def encode_pieces(self, pieces: Sequence[TextPiece]) -> list[list[int]]:
        """Ids of pieces that `split_points` made, in parallel threads: the ids of a text are
        those of its pieces in a row.
        """
        # A tokenizer may put a space before a text. Pieces that continue a text go to a backend
        # that does not. Each backend encodes its pieces in one batch, and the results are merged
        # back into the order of `pieces`.
        first_texts = [piece.text for piece in pieces if piece.first]
        other_texts = [piece.text for piece in pieces if not piece.first]
        first_ids = iter(self._encode(self.backend, first_texts))
        other_ids = iter(())
        if other_texts:
            other_ids = iter(self._encode(self.split_points.continued, other_texts))
        return [next(first_ids if piece.first else other_ids) for piece in pieces]

    def encode_on_one_core(self, piece: TextPiece) -> Ids:
        """Ids of a piece that `split_points` made, without a thread. For workers that encode much:
        they keep a table of the words they have seen.
        """
        ids = None
        if self._word_ids is not None:
            ids = self._word_ids.encode(piece.text)
        if ids is None:
            ids = np.array(self.encode_pieces([piece])[0], np.uint32)
        return ids

    @cached_property
    def _word_ids(self) -> WordIds | None:
        if self.is_sentencepiece:
            return None

        from headway.tokenizer.word_ids import word_ids

        return word_ids(self.fast)

    def _encode(
        self, backend: tokenizers.Tokenizer | SentencePieceProcessor, texts: Sequence[str]
    ) -> list[list[int]]:
        """Ids of texts by a backend, which may be another one than this tokenizer's."""
        try:
            if self.is_sentencepiece:
                from headway.tokenizer.sentencepiece_model import encode_batch

                return encode_batch(backend, texts)  # pyright: ignore[reportArgumentType]

            fast_backend: Any = backend
            return [
                encoding.ids
                for encoding in fast_backend.encode_batch_fast(
                    list(texts), add_special_tokens=False
                )
            ]
        except (TypeError, UnicodeEncodeError) as error:
            raise DataError(
                f"text cannot be tokenized: {error}. Texts must be Unicode without lone surrogates."
            ) from None

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of some ids; bytes that are no UTF-8 (an id sequence cut inside a character)
        show as U+FFFD.
        """
        # Joining bytes first shows a character whose bytes are in several tokens.
        if self.is_sentencepiece or self._token_bytes is not None:
            return self.decode_bytes(ids, skip_special=skip_special).decode(
                "utf-8", errors="replace"
            )
        return self.fast.decode(list(ids), skip_special_tokens=skip_special)

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """The bytes of some ids, exact even where an id sequence is cut inside a character."""
        table = self._token_bytes
        if table is None:
            return self.fast.decode(list(ids), skip_special_tokens=skip_special).encode()

        dropped = frozenset[int]()
        if skip_special:
            dropped = self._special_ids

        try:
            joined = b"".join([table[i] for i in ids if i not in dropped])
        except KeyError as missing:
            raise DataError(
                f"id {missing.args[0]} is not in the vocabulary of {self.vocab_size} ids."
            ) from None

        if self._strips_first_space and joined.startswith(b" "):
            return joined[1:]

        return joined

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over vocabulary, merges, special tokens, normaliser and pre-tokenizer: what
        decides the ids of a text. Stores and caches keep it, so its input must never change.
        """
        packed = json.dumps(
            canonical(self.fast), ensure_ascii=True, separators=(",", ":"), sort_keys=True
        )
        return hashlib.sha256(packed.encode()).hexdigest()

    def with_chat_template(self, template: str | None) -> Tokenizer:
        """The same tokenizer with another chat template."""
        return Tokenizer(self.backend, self.roles, self.config, template)

    def save(self, folder: Path) -> None:
        """Write a folder that `load_tokenizer` and `AutoTokenizer.from_pretrained` read back
        with the same ids.
        """
        from headway.tokenizer.folder import write_folder

        write_folder(self, Path(folder))

    def _allowing(self, allowed: frozenset[str]) -> tokenizers.Tokenizer:
        """A clone that recognises only the allowed special tokens, cutting text around them as
        the original would.
        """
        # The dataclass is frozen, so the cache is put into its __dict__, as cached_property does.
        clones: dict[frozenset[str], tokenizers.Tokenizer] = self.__dict__.setdefault("_clones", {})
        if allowed not in clones:
            import tokenizers

            content = json.loads(self.fast.to_str())
            # `encode_special_tokens` ignores tokens marked as special. An allowed one loses the
            # mark, so it is recognised as any other added token.
            for token in content["added_tokens"]:
                token["special"] = token["special"] and token["content"] not in allowed

            clones[allowed] = tokenizers.Tokenizer.from_str(json.dumps(content))
            clones[allowed].encode_special_tokens = True

        return clones[allowed]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _token_bytes(self) -> dict[int, bytes] | None:
        return token_bytes(self.fast)

    @cached_property
    def _strips_first_space(self) -> bool:
        return strips_first_space(self.fast)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Open a tokenizer: a folder, a tokenizer.json, a sentencepiece .model, a .tiktoken file or
    the id of a model on the hub.
    """
    from headway.text.hub import is_hub_id, local_or_hub
    from headway.tokenizer import folder

    path = Path(path)
    if not path.exists() and is_hub_id(str(path)):
        path = local_or_hub(path, tokenizer=True)
    if path.is_dir():
        return folder.read_folder(path)

    if not path.is_file():
        raise ConfigError(
            f"tokenizer is {str(path)!r}, which does not exist; give a folder, a tokenizer.json "
            "or a sentencepiece .model."
        )

    folder.check_files(path.parent)
    if path.suffix == ".json":
        return folder.read_tokenizer_json(path)

    if path.suffix == ".model":
        from headway.tokenizer.sentencepiece_model import read_model

        return read_model(path)

    if path.suffix == ".tiktoken":
        from headway.tokenizer.tiktoken_ranks import read_ranks

        return read_ranks(path)

    raise ConfigError(
        f"tokenizer is {str(path)!r}; it must be a folder, a tokenizer.json, a sentencepiece "
        ".model or a .tiktoken file."
    )


MODEL_RULES = (
    "unk_token",
    "unk_id",
    "byte_fallback",
    "ignore_merges",
    "dropout",
    "fuse_unk",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "max_input_chars_per_word",
)
"""Fields of the model in a tokenizer.json that decide the ids of a text."""


def canonical(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """What decides the ids of a text, in one spelling whichever tool wrote the file."""
    content = json.loads(backend.to_str())
    model = content["model"]

    vocabulary = backend.get_vocab(with_added_tokens=True)
    # A unigram model lists [piece, score]; its scores decide ids as merges do for BPE.
    scores = None
    if isinstance(model.get("vocab"), list):
        scores = model["vocab"]

    # Older files write a merge as "left right", newer ones as a list.
    merges = [
        list(merge) if isinstance(merge, list) else merge.split(" ")
        for merge in model.get("merges", [])
    ]
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    added = sorted(
        [token["id"], token["content"], *(token[flag] for flag in flags)]
        for token in content["added_tokens"]
    )
    return {
        "type": model.get("type"),
        "vocab": sorted(vocabulary.items(), key=lambda item: (item[1], item[0])),
        "scores": scores,
        "merges": merges,
        # Tools write an absent rule as null, false, "" or not at all.
        "rules": {rule: model.get(rule) or None for rule in MODEL_RULES},
        "special": added,
        "normalizer": _plain(content.get("normalizer")),
        "pre_tokenizer": _plain(content.get("pre_tokenizer")),
    }


def token_bytes(backend: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """The bytes each id stands for, or None where the decoder is neither byte-level nor
    byte-fallback.
    """
    kinds = {part["type"]: part for part in _decoders(backend)}
    if not kinds.keys() & {"ByteLevel", "ByteFallback"}:
        return None

    table: dict[int, bytes] = {}
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if "ByteLevel" in kinds:
        for token, number in vocabulary.items():
            spelled = unspell(token)
            table[number] = token.encode() if spelled is None else spelled
    else:
        replaces = any(
            part["type"] == "Replace" and part["pattern"] == {"String": "▁"}
            for part in _decoders(backend)
        )
        for token, number in vocabulary.items():
            if _is_byte(token):
                table[number] = bytes([int(token[3:5], 16)])
            elif replaces:
                table[number] = token.replace("▁", " ").encode()
            else:
                table[number] = token.encode()

    # Added tokens stand for their own text in both spellings.
    for number, token in backend.get_added_tokens_decoder().items():
        table[number] = token.content.encode()
    return table


def strips_first_space(backend: tokenizers.Tokenizer) -> bool:
    """Whether decoding drops the space that encoding put before the text."""
    return any(part["type"] == "Strip" and part.get("start") for part in _decoders(backend))


def _is_byte(token: str) -> bool:
    return len(token) == BYTE_TOKEN_CHARACTERS and token.startswith("<0x") and token.endswith(">")


def _decoders(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of the decoder, as tokenizer.json writes them."""
    decoder = {}
    if backend.decoder is not None:
        decoder = json.loads(backend.decoder.__getstate__())
    if decoder.get("type") == "Sequence":
        return decoder["decoders"]
    if decoder:
        return [decoder]
    return []


def _plain(part: Any) -> Any:
    """A normaliser or pre-tokenizer without what does not change ids (`trim_offsets`); a sequence
    of one step is that step.
    """
    if isinstance(part, list):
        return [_plain(step) for step in cast(list[Any], part)]
    if not isinstance(part, dict):
        return part

    fields = {
        name: _plain(value)
        for name, value in cast(dict[str, Any], part).items()
        if name != "trim_offsets"
    }
    for key in ("pretokenizers", "normalizers"):
        if fields.get("type") == "Sequence" and len(fields.get(key, ())) == 1:
            return fields[key][0]

    return fields
