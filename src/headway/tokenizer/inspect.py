"""What a tokenizer is like: its size, how well it compresses each language, its longest tokens,
and whether it keeps every text.

In: a tokenizer, and the user's texts where given. Out: a `TokenizerReport`; `lost` names the
texts that decoding did not give back byte for byte. `refuse_unknown` stops a build whose
tokenizer knows no character of the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headway.errors import DataError
from headway.tokenizer.load import Tokenizer

LONGEST = 20
"""Tokens in the list of the longest ones."""
SAMPLE_TEXTS = 64
SAMPLE_CHARACTERS = 4096
"""What `refuse_unknown` looks at: these many texts, and of each its beginning."""
BATCH_CHARACTERS = 1 << 20
"""Texts are encoded in batches of about this size, so that a corpus is never in memory."""

SAMPLES: dict[str, tuple[str, ...]] = {
    "English": (
        "The river had frozen early that year, and by the second week of December the children "
        "were crossing it on foot. Nobody in the village could remember when the ferry had last "
        "stayed tied to its post before Christmas, though several of the older people claimed that "
        "their parents had. It was, everyone agreed, good for the school and bad for the mill.",
        "Results are reported as the mean of five runs with different seeds; differences below "
        "0.3 points are within the noise, and we draw no conclusion from them.",
    ),
    "Chinese": (
        "那年河水结冰很早，到了十二月的第二个星期，孩子们已经踩着冰面过河上学了。"
        "村里没有人记得渡船上一次在冬至以前就停在岸边是什么时候，"
        "虽然几位老人说他们的父母见过。大家都觉得，这对学校是好事，对磨坊却不是。",
        "实验结果是五次不同随机种子的平均值；差距小于零点三的，都在误差范围之内，我们不作任何结论。",
    ),
    "code": (
        "def moving_average(values, window):\n"
        '    """Average of the last `window` values at each position."""\n'
        "    total = 0.0\n"
        "    result = []\n"
        "    for i, value in enumerate(values):\n"
        "        total += value\n"
        "        if i >= window:\n"
        "            total -= values[i - window]\n"
        "        result.append(total / min(i + 1, window))\n"
        "    return result\n",
        "#include <stdio.h>\n"
        "\n"
        "int main(void) {\n"
        "\tfor (int i = 0; i < 10; ++i) {\n"
        '\t\tprintf("%d\\n", i * i);\n'
        "\t}\n"
        "\treturn 0;\n"
        "}\n",
    ),
}
# Texts that tokenizers are known to lose: spaces at the ends and in runs, controls, composed and
# decomposed letters, joined emoji.
HARD_TEXTS = (
    "",
    " ",
    "  two  spaces  ",
    "\ttab\n\n\nlines \r\n",
    "\x00\x01\x7f",
    "e\u0301 é ﬁ Ａ①",
    "👩‍👩‍👧‍👦🇨🇳👍🏽",
    "\u2581 \u3000\u200b\ufeff",
    "<s></s><unk><|endoftext|><|im_start|>[INST]",
    "123456789 1e-5 ３",
    "\U0010ffff\ue000",
    "汉字カタカナ한국어العربية",
    "''' don't '' \\n",
)


@dataclass(frozen=True)
class Compression:
    """How many tokens some texts take."""

    texts: int
    bytes: int
    characters: int
    tokens: int

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes that one token stands for, on average."""
        return self.bytes / max(1, self.tokens)


@dataclass(frozen=True)
class TokenizerReport:
    """What was found; `lost` lists texts, or where they are, that decoding did not give back."""

    vocab_size: int
    model_vocab_size: int
    special_tokens: dict[str, int]
    roles: dict[str, str]
    fingerprint: str
    compression: dict[str, Compression]
    longest: list[tuple[int, str]]
    lost: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        rates = {
            name: {**vars(measured), "bytes_per_token": round(measured.bytes_per_token, 4)}
            for name, measured in self.compression.items()
        }
        longest = [{"id": number, "token": token} for number, token in self.longest]
        return {**vars(self), "compression": rates, "longest": longest, "round_trip": not self.lost}


def inspect(
    tokenizer: Tokenizer, texts: Mapping[str, Iterable[tuple[str, str]]] | None = None
) -> TokenizerReport:
    """Report on a tokenizer; `texts` are the user's by name, each a stream of (location, text)."""
    lost: list[str] = []
    compression: dict[str, Compression] = {}
    for name, samples in SAMPLES.items():
        compression[name] = measure(tokenizer, ((repr(text[:40]), text) for text in samples), lost)

    measure(tokenizer, ((repr(text), text) for text in HARD_TEXTS), lost)
    for name, user_texts in (texts or {}).items():
        compression[name] = measure(tokenizer, user_texts, lost)

    return TokenizerReport(
        tokenizer.vocab_size,
        tokenizer.model_vocab_size,
        tokenizer.special_tokens,
        tokenizer.roles,
        tokenizer.fingerprint,
        compression,
        longest_tokens(tokenizer),
        lost,
    )


def longest_tokens(tokenizer: Tokenizer, count: int = LONGEST) -> list[tuple[int, str]]:
    """The ids whose text is longest in bytes, special tokens aside."""
    special = set(tokenizer.special_tokens.values())
    sizes: list[tuple[int, int]] = []
    for number in tokenizer.fast.get_vocab(with_added_tokens=False).values():
        if number not in special:
            sizes.append((-len(tokenizer.decode_bytes([number])), number))
    return [(number, tokenizer.decode([number])) for _, number in sorted(sizes)[:count]]


def measure(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]], lost: list[str]) -> Compression:
    """How texts compress; the locations of those that decoding does not give back are appended
    to `lost`.
    """
    count = 0
    size = 0
    characters = 0
    tokens = 0
    for batch in _batches(texts):
        encoded = tokenizer.encode_batch([text for _, text in batch])
        for (location, text), ids in zip(batch, encoded, strict=True):
            data = text.encode()
            count += 1
            size += len(data)
            characters += len(text)
            tokens += len(ids)
            if tokenizer.decode_bytes(ids) != data:
                lost.append(location)

    return Compression(count, size, characters, tokens)


def _batches(texts: Iterable[tuple[str, str]]) -> Iterable[list[tuple[str, str]]]:
    """Texts in lists of about `BATCH_CHARACTERS`."""
    batch: list[tuple[str, str]] = []
    size = 0
    for item in texts:
        batch.append(item)
        size += len(item[1])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0

    if batch:
        yield batch


def unknown_ids(tokenizer: Tokenizer) -> set[int]:
    """The ids of the unknown token; none where every text has other ids."""
    backend: Any = tokenizer.backend
    if tokenizer.is_sentencepiece:
        if backend.unk_id() >= 0:
            return {backend.unk_id()}
        return set()

    # The model and the config may name different ones.
    named = {getattr(backend.model, "unk_token", None), tokenizer.roles.get("unk")} - {None}
    return {number for name in named if (number := backend.token_to_id(name)) is not None}


def refuse_unknown(tokenizer: Tokenizer, path: object, texts: Iterable[str]) -> None:
    """Refuse a tokenizer that encodes the first texts as unknown tokens only."""
    unknown = unknown_ids(tokenizer)
    if not unknown:
        return

    sample = [text[:SAMPLE_CHARACTERS] for text in islice(texts, SAMPLE_TEXTS) if text.strip()]
    tokens = [token for ids in tokenizer.encode_batch(sample) for token in ids]
    if tokens and all(token in unknown for token in tokens):
        raise DataError(
            f"the tokenizer {path} knows no character of the text: all {len(tokens)} tokens of "
            f"the first {len(sample)} documents are its unknown token. The text begins "
            f"{sample[0][:40]!r}. Use the tokenizer that belongs to this data."
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
