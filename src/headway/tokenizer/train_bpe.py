"""Train a byte-level BPE tokenizer in bounded memory.

In: texts. Out: a folder with tokenizer.json and its companions, which AutoTokenizer loads. The base is the 256 bytes, so every string
round-trips byte for byte; cuts between words are those of `presplit.WORDS`; special tokens take the last ids.
What is exact: word counts always; merges are those of the whole corpus if its distinct words fit the memory, which the log states.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from headway.errors import ConfigError, DataError
from headway.runtime.progress import progress
from headway.tokenizer.byte_alphabet import BYTE_TO_CHAR, spell
from headway.tokenizer.folder import finish
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.merges import learn_merges
from headway.tokenizer.presplit import WORDS, byte_level
from headway.tokenizer.words import Words, WordTable, count_words, fit

log = logging.getLogger("headway")

END, PAD = "<|endoftext|>", "<|pad|>"
SPECIAL_TOKENS = (END, PAD, "<|im_start|>", "<|im_end|>")
LEAST_MEMORY_BYTES = 256 << 20
BASE_MEMORY_BYTES = 160 << 20
LEARNER_BYTES_PER_BYTE = 72


def train_bpe(
    documents: Iterable[str],
    *,
    vocab_size: int,
    out: Path,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    max_memory_bytes: int | None = None,
    workers: int = 1,
) -> Tokenizer:
    """Train on texts and save to `out`; `vocab_size` counts bytes, merges and special tokens. The first special token ends documents."""
    check_request(vocab_size, special_tokens, 256, max_memory_bytes)
    words = counted_words(documents, WORDS, max_memory_bytes, LEARNER_BYTES_PER_BYTE, workers)
    encoded = [word.encode() for word in words.words]
    ids = sorted(range(256), key=BYTE_TO_CHAR.__getitem__)
    byte_ids = [ids.index(byte) for byte in range(256)]
    wanted = vocab_size - len(special_tokens)
    with progress("learn merges", wanted - 256, "merges") as advance:
        merges, tokens = learn_merges(encoded, words.counts, byte_ids, wanted, advance=advance)
    if len(tokens) < wanted:
        raise DataError(
            f"vocab_size is {vocab_size}, but this corpus has pairs that repeat for only {len(tokens) + len(special_tokens)} tokens. "
            "Give more text or ask for fewer."
        )
    spelled = [spell(token) for token in tokens]
    pairs = [(spelled[m.left], spelled[m.right]) for m in merges]
    tokenizer = _assemble({token: i for i, token in enumerate(spelled)}, pairs, special_tokens)
    tokenizer.save(out)
    return tokenizer


def check_request(vocab_size: int, special_tokens: Sequence[str], base: int, max_memory_bytes: int | None) -> None:
    """Refuse a vocabulary that cannot be, before any text is read."""
    if len(set(special_tokens)) != len(special_tokens) or "" in special_tokens:
        raise ConfigError(f"special tokens are {', '.join(special_tokens)}; each must be there once and not empty.")
    least = base + len(special_tokens) + 1
    if not least <= vocab_size < 1 << 20:
        raise ConfigError(f"vocab_size is {vocab_size}; it must be at least {least} ({base} bytes and special tokens) and under 1048576.")
    if max_memory_bytes is not None and max_memory_bytes < LEAST_MEMORY_BYTES:
        raise ConfigError(f"max_memory is {max_memory_bytes} bytes; it must be at least {LEAST_MEMORY_BYTES} (256MB).")


def counted_words(documents: Iterable[str], pattern: str, max_memory_bytes: int | None, learner_bytes: int, workers: int) -> Words:
    """Count the words of a corpus within a memory budget, and keep what a learner that needs `learner_bytes` per byte can hold."""
    free = None if max_memory_bytes is None else max_memory_bytes - BASE_MEMORY_BYTES
    with WordTable(None if free is None else int(free * 0.4)) as table:
        with progress("count words", unit="bytes") as advance:
            total = count_words(documents, pattern, table, workers=workers, advance=advance)
        if not total:
            raise DataError("there is no text to train on; the inputs hold no characters.")
        spilled = table.spilled
        words = fit(table, None if free is None else int(free * 0.5) // learner_bytes)
    log.info(
        "counted %d bytes, %d distinct words%s; they cover %.2f %% of the text%s",
        total, len(words.words), " (in pieces, on disk)" if spilled else "", 100 * words.covered,
        "" if words.covered == 1 else ": the rarest were left out to stay within memory",
    )  # fmt: skip
    return words


def _assemble(vocabulary: dict[str, int], merges: list[tuple[str, str]], special_tokens: Sequence[str]) -> Tokenizer:
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = byte_level(WORDS)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    roles = {"eos_token": special_tokens[0]} if special_tokens else {}
    if PAD in special_tokens:
        roles["pad_token"] = PAD
    return finish(backend, {"tokenizer_class": "PreTrainedTokenizerFast", **roles})
