"""Long texts are encoded in pieces, and the ids are those of the whole text, for every tokenizer that has cuts."""

from pathlib import Path

import pytest
from support.tokenizers_of_all_kinds import MADE, byte_bpe, llama_like, random_text, sequence, split

from headway.tokenizer import load
from headway.tokenizer.byte_level import CL100K, byte_level
from headway.tokenizer.folder import finish
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.split_points import BLOCK_CHARACTERS, SplitPoints, TextPiece, blocks_of


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
