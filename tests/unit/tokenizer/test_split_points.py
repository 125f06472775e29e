"""Long texts are encoded in pieces, and the ids are those of the whole text, for every tokenizer that has cuts."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.tokenizer import load
from headway.tokenizer.byte_level import CL100K, QWEN, WORDS, byte_level
from headway.tokenizer.folder import finish
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.split_points import BLOCK_CHARACTERS, SplitPoints, TextPiece, blocks_of
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


def encoded(tokenizer: Tokenizer, pieces: list[TextPiece]) -> list[int]:
    return [number for ids in tokenizer.encode_pieces(pieces) for number in ids]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.drill] if kind == "sentencepiece with prefix" else [])
        for kind in MADE
    ],
)
def test_the_ids_of_pieces_are_those_of_the_whole_at_every_cut(kind: str, tmp_path: Path) -> None:
    tokenizer = MADE[kind](tmp_path)
    cuts = tokenizer.split_points
    places = 0
    texts = [random_text(seed) for seed in range(250)]
    for seed, text in enumerate(texts):
        whole = tokenizer.encode_batch([text])[0]
        for cut in [
            index for index in range(1, len(text)) if cuts.between(text[index - 1], text[index])
        ]:
            places += 1
            pieces = [TextPiece(text[:cut], True, False), TextPiece(text[cut:], False, True)]
            assert encoded(tokenizer, pieces) == whole, (
                f"seed {seed}: {text[:cut]!r} | {text[cut:]!r}"
            )
        pieces = list(cuts.pieces(blocks_of(text), 12))
        assert "".join(piece.text for piece in pieces) == text
        assert encoded(tokenizer, pieces) == whole, f"seed {seed}"
    assert places > 250, "cuts must be frequent enough to be of use"


def test_ordinary_text_has_a_cut_in_every_line_or_sentence(tmp_path: Path) -> None:
    text = (
        "The quick brown fox jumps over it, and so on.\n" * 3
        + "中文的数学，文字的中文。\n数学是文，中国。" * 3
    )
    for kind in (
        "gpt2",
        "headway",
        "qwen with NFC",
        "o200k",
        "deepseek",
        "sentencepiece with prefix",
        "llama as a tokenizer.json",
    ):
        (tmp_path / kind).mkdir()
        pieces = list(MADE[kind](tmp_path / kind).split_points.pieces([text], 24))
        assert max(len(piece.text) for piece in pieces) <= 48, kind


def test_tokenizers_without_a_proof_have_no_cuts_and_encode_whole() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    unigram = finish(Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0), (" ", -1.0)], 0)), {})
    unknown = byte_bpe(sequence(split(r"\w+\s\w+|.")))
    behind = byte_bpe(sequence(split(r"(?<=a) |" + CL100K)))
    for tokenizer in (unigram, unknown, behind):
        assert not any(tokenizer.split_points.between(a, b) for a in "ab中。" for b in " ,\n。")
        assert list(tokenizer.split_points.pieces(["a b, ", "a c\n" * 9], 4)) == [
            TextPiece("a b, " + "a c\n" * 9)
        ]
    assert pre_tokenizers


def test_a_prefix_that_added_tokens_repeat_allows_no_cut() -> None:
    from tokenizers import AddedToken

    tokenizer = llama_like()
    tokenizer.fast.add_tokens([AddedToken("<think>")])
    points = Tokenizer(tokenizer.backend, {}).split_points
    assert list(points.pieces(["a b. c\n" * 9], 4)) == [TextPiece("a b. c\n" * 9)]


def test_pieces_follow_the_blocks_and_keep_to_their_size() -> None:
    cuts = SplitPoints(lambda before, after: after == " ", None)
    text = "".join(f" w{i}" for i in range(5000))
    for step in (1, 7, 1000, BLOCK_CHARACTERS):
        blocks = [text[i : i + step] for i in range(0, len(text), step)]
        pieces = list(cuts.pieces(blocks, 50))
        assert "".join(piece.text for piece in pieces) == text
        assert max(len(piece.text) for piece in pieces) <= 50
        assert [(piece.first, piece.last) for piece in pieces] == [
            (True, False),
            *[(False, False)] * (len(pieces) - 2),
            (False, True),
        ]
    assert list(cuts.pieces(["ab" * 100, " c"], 50)) == [
        TextPiece("ab" * 100, True, False),
        TextPiece(" c", False, True),
    ]
    assert list(cuts.pieces([])) == []


def test_a_long_text_is_encoded_in_pieces_without_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_bpe(byte_level(CL100K))
    text = random_text(7, 3000)
    whole = tokenizer.encode_batch([text, "the", text])
    monkeypatch.setattr(load, "WHOLE_CHARACTERS", 100)
    monkeypatch.setattr("headway.tokenizer.split_points.PIECE_CHARACTERS", 64)
    sizes: list[int] = []
    inner = Tokenizer._encode
    monkeypatch.setattr(
        Tokenizer,
        "_encode",
        lambda self, backend, texts: (sizes.extend(map(len, texts)), inner(self, backend, texts))[
            1
        ],
    )
    assert tokenizer.encode_batch([text, "the", text]) == whole
    assert max(sizes) < 400
