"""Train a tokenizer in bounded memory: byte-level BPE, or sentencepiece BPE with byte fallback.

In: texts. Out: a folder with tokenizer.json and its companions, which AutoTokenizer loads; for
sentencepiece also the tokenizer.model. Invariant: every string round-trips byte for byte,
because all 256 bytes are tokens and nothing is normalised. Special tokens of byte-level BPE take
the last ids. Word counts are exact; so are the merges, if the distinct words of the corpus fit
into memory, which the log states.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, DataError
from headway.runtime.optional import need
from headway.runtime.progress import progress
from headway.runtime.temporary import temporary_folder
from headway.tokenizer.bpe_merges import learn_merges
from headway.tokenizer.byte_level import BYTE_TO_CHAR, WORDS, byte_level, spell
from headway.tokenizer.folder import finish
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.sentencepiece_model import SPACE, read_model
from headway.tokenizer.word_counts import WordCounts, WordTable, count_words, select_words

log = logging.getLogger("headway")

END = "<|endoftext|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END, PAD, "<|im_start|>", "<|im_end|>")
LEAST_MEMORY_BYTES = 256 << 20
BASE_MEMORY_BYTES = 160 << 20
"""Set aside for the process itself; the table and the learner share the rest."""
TABLE_SHARE = 0.4
"""Share of the free memory for the table of words while they are counted."""
LEARNER_SHARE = 0.5
"""Share of the free memory for the learner."""
LEARNER_BYTES_PER_BYTE = 72
"""Upper estimate of the memory that `learn_merges` takes per byte of distinct words."""
# A word may begin with one space; longer runs of spaces are separate words. Other white space is
# left to byte fallback.
SENTENCEPIECE_WORDS = r" +(?= [^\s])| ?\p{Han}+| ?[^\s\p{Han}]+| +"
UNKNOWN = "<unk>"
TRAINER_BYTES_PER_BYTE = 64
"""Estimate of the memory that sentencepiece's trainer takes per byte of distinct words."""
BYTES = 256
"""Tokens that every vocabulary has: one for each byte."""
VOCABULARY_LIMIT = 1 << 20
"""Ids are below this, because `bpe_merges` keeps an id in 20 bits."""


def train_bpe(
    documents: Iterable[str],
    *,
    vocab_size: int,
    out: Path,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    max_memory_bytes: int | None = None,
    workers: int = 1,
) -> Tokenizer:
    """Train on texts and save to `out`; `vocab_size` counts bytes, merges and special tokens.

    The first special token ends documents.
    """
    check_vocabulary(vocab_size, special_tokens, BYTES, max_memory_bytes)
    words = counted_words(documents, WORDS, max_memory_bytes, LEARNER_BYTES_PER_BYTE, workers)
    encoded = [word.encode() for word in words.words]

    # Bytes have the first ids, in the order of the characters that spell them.
    ids = sorted(range(BYTES), key=BYTE_TO_CHAR.__getitem__)
    byte_ids = [ids.index(byte) for byte in range(BYTES)]
    wanted = vocab_size - len(special_tokens)
    with progress("learn merges", wanted - BYTES, "merges") as advance:
        merges, tokens = learn_merges(encoded, words.counts, byte_ids, wanted, advance=advance)

    if len(tokens) < wanted:
        raise DataError(
            f"vocab_size is {vocab_size}, but this corpus has pairs that repeat for only "
            f"{len(tokens) + len(special_tokens)} tokens. Give more text or a smaller vocab_size."
        )

    spelled = [spell(token) for token in tokens]
    pairs = [(spelled[m.left], spelled[m.right]) for m in merges]
    tokenizer = _assemble({token: i for i, token in enumerate(spelled)}, pairs, special_tokens)
    tokenizer.save(out)
    return tokenizer


def train_sentencepiece(
    documents: Iterable[str],
    *,
    vocab_size: int,
    out: Path,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    max_memory_bytes: int | None = None,
    workers: int = 1,
    character_coverage: float = 0.9995,
) -> Tokenizer:
    """Train on texts and save to `out`; `vocab_size` counts bytes, pieces and special tokens.

    The first special token ends documents.
    """
    need("sentencepiece", "a sentencepiece tokenizer")
    need("google.protobuf", "a sentencepiece tokenizer")
    check_vocabulary(vocab_size, (*special_tokens, UNKNOWN), BYTES, max_memory_bytes)
    words = counted_words(
        documents, SENTENCEPIECE_WORDS, max_memory_bytes, TRAINER_BYTES_PER_BYTE, workers
    )
    with temporary_folder("sentencepiece") as folder:
        corpus = folder / "words.tsv"
        _write_words(words, corpus)
        model = _train(corpus, vocab_size, special_tokens, character_coverage)
        path = folder / "tokenizer.model"
        path.write_bytes(_with_plain_spaces(model))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": UNKNOWN,
            **_role_tokens(special_tokens),
        }
        tokenizer = read_model(path, config)

    tokenizer.save(out)
    return tokenizer


def check_vocabulary(
    vocab_size: int, special_tokens: Sequence[str], base: int, max_memory_bytes: int | None
) -> None:
    """Refuse impossible settings before any text is read."""
    if len(set(special_tokens)) != len(special_tokens) or "" in special_tokens:
        raise ConfigError(
            f"special tokens are {', '.join(special_tokens)}; each must be given once and not be "
            "empty."
        )

    least = base + len(special_tokens) + 1
    if not least <= vocab_size < VOCABULARY_LIMIT:
        raise ConfigError(
            f"vocab_size is {vocab_size}; it must be at least {least} ({base} bytes and special "
            f"tokens) and under {VOCABULARY_LIMIT}."
        )

    if max_memory_bytes is not None and max_memory_bytes < LEAST_MEMORY_BYTES:
        raise ConfigError(
            f"max_memory is {max_memory_bytes} bytes; it must be at least {LEAST_MEMORY_BYTES} "
            "(256MB)."
        )


def counted_words(
    documents: Iterable[str],
    pattern: str,
    max_memory_bytes: int | None,
    learner_bytes: int,
    workers: int,
) -> WordCounts:
    """Count the words of a corpus within a memory budget, and select what a learner that needs
    `learner_bytes` per byte can hold.
    """
    table_bytes = None
    word_bytes = None
    if max_memory_bytes is not None:
        free = max_memory_bytes - BASE_MEMORY_BYTES
        table_bytes = int(free * TABLE_SHARE)
        word_bytes = int(free * LEARNER_SHARE) // learner_bytes

    with WordTable(table_bytes) as table:
        with progress("count words", unit="bytes") as advance:
            total = count_words(documents, pattern, table, workers=workers, advance=advance)

        if not total:
            raise DataError("the inputs hold no text to train on. Give files with text.")

        spilled = table.spilled
        words = select_words(table, word_bytes)

    log.info(
        "counted %d bytes, %d distinct words%s; they cover %.2f %% of the text%s",
        total,
        len(words.words),
        " (spilled to disk)" if spilled else "",
        100 * words.covered,
        "" if words.covered == 1 else ": the rarest were left out to stay within memory",
    )
    return words


def _assemble(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], special_tokens: Sequence[str]
) -> Tokenizer:
    """A byte-level tokenizer from a learned vocabulary; special tokens take the last ids."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = byte_level(WORDS)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **_role_tokens(special_tokens)}
    return finish(backend, config)


def _role_tokens(special_tokens: Sequence[str]) -> dict[str, str]:
    """The tokens of a tokenizer_config.json that end documents and fill rows."""
    roles: dict[str, str] = {}
    if special_tokens:
        roles["eos_token"] = special_tokens[0]
    if PAD in special_tokens:
        roles["pad_token"] = PAD
    return roles


def _write_words(words: WordCounts, path: Path) -> None:
    """sentencepiece's input format tsv: a word and its count a line.

    Words with the null character or U+2581 are left out: the trainer does not take them as text.
    """
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for word, number in zip(words.words, words.counts, strict=True):
            if not set(word) & {"\x00", SPACE}:
                file.write(f"{word}\t{number}\n")


def _train(
    corpus: Path, vocab_size: int, special_tokens: Sequence[str], character_coverage: float
) -> bytes:
    """The .model that sentencepiece's trainer makes of counted words."""
    from sentencepiece import SentencePieceTrainer

    settings: dict[str, Any] = {
        "input": str(corpus),
        "input_format": "tsv",
        "model_prefix": str(corpus.with_suffix("")),
        "model_type": "bpe",
        "vocab_size": vocab_size,
        "byte_fallback": True,
        "split_digits": True,
        # Texts must come back byte for byte: nothing is normalised, added or removed.
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "character_coverage": character_coverage,
        "max_sentence_length": 1 << 30,
        "minloglevel": 2,
        # sentencepiece insists on an unknown piece. Begin, end and padding are control symbols.
        "unk_id": 0,
        "unk_piece": UNKNOWN,
        "bos_id": -1,
        "eos_id": -1,
        "pad_id": -1,
        "control_symbols": list(special_tokens),
    }
    try:
        SentencePieceTrainer.train(**settings)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        # "... file.cc(123) [condition] Vocabulary size too high (...). ..."
        why = str(error).rsplit("] ", 1)[-1].strip().rstrip(".")
        raise DataError(
            f"vocab_size is {vocab_size}, which this corpus cannot give: {why}."
        ) from None

    return corpus.with_suffix(".model").read_bytes()


def _with_plain_spaces(model: bytes) -> bytes:
    """The model with spaces written as spaces: U+2581, sentencepiece's stand-in, looks the same
    as a real U+2581 in a text.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(model)
    for piece in proto.pieces:
        piece.piece = piece.piece.replace(SPACE, " ")

    proto.normalizer_spec.escape_whitespaces = False
    return proto.SerializeToString()
