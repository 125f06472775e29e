"""Conversations with media as tokens: items stand at their marks, carry no loss, and the prompt is never cut away."""

from typing import Any

import numpy as np
import pytest
from support.chat_tokenizer import byte_tokenizer

from headway.errors import DataError
from headway.records.encode_media import (
    MediaDocument,
    MediaEncoder,
    MediaPositions,
    media_pieces,
    place_media,
)
from headway.tokenizer.chat import Rendered, Turn, encode_segments, find_template, render

POSITIONS = MediaPositions({"image": 3, "audio": 2}, missing=False)
ALWAYS = MediaPositions({"image": 3, "audio": 2}, missing=True)
HASH = {name: f"{number:064x}" for number, name in enumerate(("a", "b", "c"), 1)}


def encoder_of(
    positions: MediaPositions = POSITIONS, max_length: int | None = None, template: str = "chatml"
) -> MediaEncoder:
    tokenizer = byte_tokenizer()
    return MediaEncoder(tokenizer, find_template(template, tokenizer), positions, max_length)


def asked(question: str, answer: str = "yes") -> list[Turn]:
    return [Turn("user", question), Turn("assistant", answer)]


def document(turns: list[Turn], media: list[tuple[str, str]], **options: Any) -> MediaDocument:
    encoded_document = encoded(encoder_of(**options), turns, media)
    assert encoded_document is not None
    return encoded_document


def encoded(
    encoder: MediaEncoder, turns: list[Turn], media: list[tuple[str, str]]
) -> MediaDocument | None:
    placed = place_media(turns, media, encoder.positions)
    template = encoder.template
    pieces = media_pieces(template.segments(placed.turns), len(placed.items), template.name)
    rendered = encode_segments(pieces, template.name, encoder.tokenizer)
    return encoder.document(
        [piece for piece in rendered if isinstance(piece, Rendered)], placed.items
    )


def text_of(document: MediaDocument) -> str:
    """The text without the items, each of which becomes its name in brackets."""
    tokenizer = byte_tokenizer()
    parts = list[str]()
    position = 0
    for item in document.items:
        parts += [
            tokenizer.decode(document.ids[position : item.offset].tolist()),
            f"[{item.modality}]",
        ]
        position = item.offset + POSITIONS.tokens[item.modality]
    return "".join([*parts, tokenizer.decode(document.ids[position:].tolist())])


def test_items_stand_at_their_marks_and_carry_no_loss() -> None:
    encoded_document = document(
        asked("Is <image> like <audio>?"), [("image", HASH["a"]), ("audio", HASH["b"])]
    )
    assert (
        text_of(encoded_document)
        == "<|im_start|>user\nIs [image] like [audio]?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    assert [(item.modality, item.content_hash) for item in encoded_document.items] == [
        ("image", HASH["a"]),
        ("audio", HASH["b"]),
    ]
    for item in encoded_document.items:
        assert not encoded_document.mask[item.offset : item.offset + 3].any()
    assert (
        byte_tokenizer().decode(encoded_document.ids[encoded_document.mask].tolist())
        == "yes<|im_end|>"
    )


def test_items_without_a_mark_stand_before_the_question_images_first() -> None:
    turns = [Turn("system", "Be brief."), *asked("What is it?")]
    encoded_document = document(turns, [("audio", HASH["b"]), ("image", HASH["a"])])
    assert "<|im_start|>user\n[image][audio]\nWhat is it?" in text_of(encoded_document)
    mixed = document(asked("And <image>?"), [("image", HASH["a"]), ("image", HASH["c"])])
    assert [item.content_hash for item in mixed.items] == [
        HASH["c"],
        HASH["a"],
    ]
    assert "[image]\nAnd [image]?" in text_of(mixed)


def test_absent_items_have_positions_only_where_asked_for() -> None:
    assert not document(asked("Hi"), []).items
    encoded_document = document(asked("Hi <audio>"), [("audio", HASH["b"])], positions=ALWAYS)
    assert [(item.modality, item.content_hash) for item in encoded_document.items] == [
        ("image", None),
        ("audio", HASH["b"]),
    ]
    assert "user\n[image]\nHi [audio]<" in text_of(encoded_document)


def test_a_conversation_without_media_is_what_the_chat_path_makes() -> None:
    turns = asked("Hi")
    tokenizer = byte_tokenizer()
    plain = render(turns, "chatml", tokenizer)
    encoded_document = document(turns, [])
    np.testing.assert_array_equal(encoded_document.ids, plain.ids)
    np.testing.assert_array_equal(encoded_document.mask, plain.mask)


def test_the_prompt_of_generation_is_the_prompt_of_training() -> None:
    encoder = encoder_of()
    turns = [Turn("user", "See <image>."), Turn("assistant", "I do."), Turn("user", "Sure?")]
    prompt = encoder.prompt(place_media(turns, [("image", HASH["a"])], POSITIONS))
    trained = document([*turns, Turn("assistant", "Yes")], [("image", HASH["a"])])
    np.testing.assert_array_equal(prompt.ids, trained.ids[: len(prompt.ids)])
    assert prompt.items == trained.items


@pytest.mark.parametrize("limit", [80, 100, 160])
def test_the_answer_is_budgeted_before_the_prompt(limit: int) -> None:
    question = "<image>" + "long words here " * 40 + "what is it?"
    encoded_document = document(
        asked(question, "a red circle"), [("image", HASH["a"])], max_length=limit
    )
    assert len(encoded_document.ids) == limit
    text = text_of(encoded_document)
    assert text.startswith("<|im_start|>user\n[image]long wor")
    assert "what is it?<|im_end|>\n<|im_start|>assistant\na red circle<|im_end|>" in text
    assert (
        byte_tokenizer().decode(encoded_document.ids[encoded_document.mask].tolist())
        == "a red circle<|im_end|>"
    )


def test_an_answer_is_cut_only_when_the_prompt_has_no_more_to_give() -> None:
    encoder = encoder_of(max_length=70)
    encoded_document = encoded(
        encoder, asked("<image>" + "x" * 300, "y" * 300), [("image", HASH["a"])]
    )
    assert encoded_document is not None
    assert len(encoded_document.ids) == 70
    assert encoder.counts["answers_truncated"] == 1
    kept = byte_tokenizer().decode(encoded_document.ids.tolist())
    assert kept.count("x") == 16
    assert kept.count("y") > 10
    assert encoded_document.items
    short = encoder_of(max_length=20)
    assert encoded(short, asked("<image>" + "x" * 99), [("image", HASH["a"])]) is None


@pytest.mark.parametrize(
    ("turns", "media", "message"),
    [
        (asked("<image> <image>"), [("image", "a")], "2 marks <image> and 1 files"),
        (asked("hi", "<image>"), [("image", "a")], "in a turn of the assistant"),
        (asked("hi"), [("video", "a")], "takes image, audio only"),
        ([Turn("system", "hi"), Turn("assistant", "a")], [("image", "a")], "no question"),
    ],
)
def test_media_that_do_not_fit_their_marks_are_refused(
    turns: list[Turn], media: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        place_media(turns, media, POSITIONS)
