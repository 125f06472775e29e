"""Tokenizers of the published kinds, trained on a small corpus, and random texts that are hard to split."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.tokenizer.byte_level import CL100K, QWEN, WORDS, byte_level
from headway.tokenizer.folder import finish
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.train import train_sentencepiece

CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALPHABET = [
    *"abzABZ",
    *"éßΩжأक한ア々〇",
    "\u0301",
    "\u093c",
    *"中文数学",
    *"0179²",
    *"  \n\n\r\t\u00a0\u3000",
    *"'’.,!?-_/()[]<>|:;\"",
    *"，。！《》…—",
    "🙂",
]
WORDS_OF_TEXT = [
    "the",
    "don't",
    "WE'LL",
    " it's",
    "naïve",
    "  ",
    "\n\n",
    "\r\n",
    " \n ",
    "中文。",
    "数学，",
    "<think>",
    "  \n",
    "x1234",
    "…\n",
    "\t\t",
    "'S",
    "ﬁ",
]


def random_text(seed: int, length: int = 60) -> str:
    rng = random.Random(seed)
    return "".join(
        rng.choice(ALPHABET) if rng.random() < 0.6 else rng.choice(WORDS_OF_TEXT)
        for _ in range(length)
    )


CORPUS = [random_text(seed, 300) for seed in range(1000, 1040)] + [
    "the cat don't sit, it's the 中文 数学 of the the\n\nthe  end\n"
] * 50


def byte_bpe(
    pre_tokenizer: Any, normalizer: Any = None, added: list[Any] | None = None
) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    from tokenizers.pre_tokenizers import ByteLevel

    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=700, initial_alphabet=ByteLevel.alphabet(), show_progress=False
        ),
    )
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(added or [])
    return finish(backend, {"eos_token": "<|end|>"})


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def sequence(*steps: Any) -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def llama_like(**extra: Any) -> Tokenizer:
    """A BPE of characters with byte fallback that puts a space before a text, as converted sentencepiece models do."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, trainers

    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256))],
        show_progress=False,
        max_token_length=8,
    )
    backend.train_from_iterator((word for text in CORPUS for word in text.split()), trainer)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for key, value in extra.items():
        setattr(backend, key, value)
    return finish(backend, {"bos_token": "<s>"})


def sentencepiece(folder: Path, **settings: Any) -> Tokenizer:
    from sentencepiece import SentencePieceTrainer

    from headway.tokenizer.sentencepiece_model import read_model

    (folder / "corpus").write_text(
        "\n".join(" ".join(text.split()) for text in CORPUS), encoding="utf-8"
    )
    SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        input=str(folder / "corpus"), model_prefix=str(folder / "m"), model_type="bpe", vocab_size=600, minloglevel=2,
        character_coverage=0.98, max_sentence_length=1 << 20, user_defined_symbols=["<think>", ",中"], **settings,
    )  # fmt: skip
    return read_model(folder / "m.model")


def _nfc() -> Any:
    from tokenizers import normalizers

    return normalizers.NFC()


def _nfkc() -> Any:
    from tokenizers import normalizers

    return normalizers.Sequence([normalizers.NFKC()])


def _added() -> list[Any]:
    from tokenizers import AddedToken

    return [
        AddedToken("<think>", rstrip=True),
        AddedToken("z,", lstrip=True),
        AddedToken("  ", normalized=False),
        AddedToken("e."),
    ]


MADE: dict[str, Callable[[Path], Tokenizer]] = {
    "gpt2": lambda _: byte_bpe(byte_level(None)),
    "headway": lambda _: byte_bpe(byte_level(WORDS)),
    "qwen with NFC": lambda _: byte_bpe(byte_level(QWEN), _nfc()),
    "cl100k with added tokens": lambda _: byte_bpe(byte_level(CL100K), None, _added()),
    "cl100k with NFKC": lambda _: byte_bpe(byte_level(CL100K), _nfkc(), _added()),
    "cl100k as tiktoken converts it": lambda _: byte_bpe(sequence(split(CL100K, "removed", True))),
    "o200k": lambda _: byte_bpe(sequence(split(CASED))),
    "deepseek": lambda _: byte_bpe(
        sequence(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK))
    ),
    "llama as a tokenizer.json": lambda _: llama_like(),
    "sentencepiece by headway": lambda folder: train_sentencepiece(
        CORPUS, vocab_size=600, out=folder / "t", character_coverage=0.98
    ),
    "sentencepiece with prefix": lambda folder: sentencepiece(
        folder,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
    ),
    "sentencepiece as it comes": lambda folder: sentencepiece(folder),
}
