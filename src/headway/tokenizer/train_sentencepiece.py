"""Train a sentencepiece BPE tokenizer with byte fallback, in bounded memory.

In: texts. Out: a folder with tokenizer.model, the equal tokenizer.json and their companions. Nothing is normalised, no space is put
before a text, digits stand alone, and spaces are kept as they are (not as U+2581), so every string round-trips byte for byte.
What is exact: word counts; the sentencepiece trainer then sees each distinct word once with its count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headway.errors import DataError
from headway.runtime.temporary import temporary_folder
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.sentencepiece_model import SPACE, read_model
from headway.tokenizer.train_bpe import PAD, SPECIAL_TOKENS, check_request, counted_words
from headway.tokenizer.words import Words

# A word may begin with one space; longer runs of spaces are words of their own. Other white space is left to byte fallback.
WORDS = r" +(?= [^\s])| ?\p{Han}+| ?[^\s\p{Han}]+| +"
UNKNOWN = "<unk>"
TRAINER_BYTES_PER_BYTE = 64


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
    """Train on texts and save to `out`; `vocab_size` counts bytes, pieces and special tokens. The first special token ends documents."""
    check_request(vocab_size, (*special_tokens, UNKNOWN), 256, max_memory_bytes)
    words = counted_words(documents, WORDS, max_memory_bytes, TRAINER_BYTES_PER_BYTE, workers)
    with temporary_folder("sentencepiece") as folder:
        corpus = folder / "words.tsv"
        _write_words(words, corpus)
        model = _train(corpus, vocab_size, special_tokens, character_coverage)
        path = folder / "tokenizer.model"
        path.write_bytes(_with_plain_spaces(model))
        roles = {"eos_token": special_tokens[0]} if special_tokens else {}
        roles |= {"pad_token": PAD} if PAD in special_tokens else {}
        tokenizer = read_model(path, {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": UNKNOWN, **roles})
    tokenizer.save(out)
    return tokenizer


def _write_words(words: Words, path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for word, number in zip(words.words, words.counts, strict=True):
            if not set(word) & {"\x00", SPACE}:
                file.write(f"{word}\t{number}\n")


def _train(corpus: Path, vocab_size: int, special_tokens: Sequence[str], character_coverage: float) -> bytes:
    from sentencepiece import SentencePieceTrainer

    settings: dict[str, Any] = {
        "input": str(corpus), "input_format": "tsv", "model_prefix": str(corpus.with_suffix("")), "model_type": "bpe",
        "vocab_size": vocab_size, "byte_fallback": True, "split_digits": True, "normalization_rule_name": "identity",
        "add_dummy_prefix": False, "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True,
        "character_coverage": character_coverage, "max_sentence_length": 1 << 30, "minloglevel": 2,
        "unk_id": 0, "unk_piece": UNKNOWN, "bos_id": -1, "eos_id": -1, "pad_id": -1, "control_symbols": list(special_tokens),
    }  # fmt: skip
    try:
        SentencePieceTrainer.train(**settings)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        why = str(error).rsplit("] ", 1)[-1].strip().rstrip(".")
        raise DataError(f"vocab_size is {vocab_size}, which this corpus cannot give: {why}.") from None
    return corpus.with_suffix(".model").read_bytes()


def _with_plain_spaces(model: bytes) -> bytes:
    """The model with spaces written as spaces: U+2581, sentencepiece's stand-in, could not be told from a real U+2581 in a text."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(model)
    for piece in proto.pieces:
        piece.piece = piece.piece.replace(SPACE, " ")
    proto.normalizer_spec.escape_whitespaces = False
    return proto.SerializeToString()
