"""Ids by the table of words are the tokenizer's own, and what the table is not sure of it leaves to the tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from support.tokenizers_of_all_kinds import MADE, byte_bpe, random_text, sequence, split

from headway.errors import DataError
from headway.tokenizer import word_ids as module
from headway.tokenizer.byte_level import CL100K, GPT2, QWEN, WORDS, byte_level
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.split_points import CLITIC, TextPiece
from headway.tokenizer.word_ids import WordIds, word_ids

WITH_TABLE = {
    "gpt2",
    "headway",
    "qwen with NFC",
    "cl100k with added tokens",
    "cl100k as tiktoken converts it",
    "o200k",
}


def table_of(tokenizer: Tokenizer) -> WordIds:
    table = word_ids(tokenizer.fast)
    assert table is not None
    return table


@pytest.mark.parametrize("name", MADE)
def test_ids_are_those_of_the_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer = MADE[name](tmp_path)
    texts = ["", *(random_text(seed) for seed in range(300))]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.encode_on_one_core(TextPiece(text)).tolist() == ids


@pytest.mark.parametrize("name", MADE)
def test_the_usual_patterns_have_a_table(name: str, tmp_path: Path) -> None:
    tokenizer = MADE[name](tmp_path)
    has_table = not tokenizer.is_sentencepiece and word_ids(tokenizer.fast) is not None
    assert has_table == (name in WITH_TABLE)


@pytest.mark.parametrize(
    "pattern", [GPT2, WORDS, QWEN, CL100K], ids=["gpt2", "own", "qwen", "cl100k"]
)
def test_every_character_is_split_as_the_tokenizer_splits_it(pattern: str) -> None:
    """Each character of the table alone, after a letter, before one, and beside a digit, a sign, a space and itself."""
    backend = byte_bpe(byte_level(None if pattern is GPT2 else pattern)).fast
    words_of = module._translated(pattern)
    assert words_of is not None
    characters = sorted(module._categories())
    assert len(characters) > 45_000
    texts = [
        "".join(f"{c}a{c}{c}1{c}. {c} {c}'s\n{c}" for c in characters[start : start + 500])
        for start in range(0, len(characters), 500)
    ]
    for text in texts:
        splits = backend.pre_tokenizer.pre_tokenize_str(text)
        assert words_of.findall(text) == [text[begin:end] for _, (begin, end) in splits]


def test_the_second_time_no_word_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(byte_bpe(byte_level(QWEN)))
    text = random_text(3)
    first = table.encode(text)
    monkeypatch.setattr(WordIds, "_learned", lambda *_: pytest.fail("encoded again"))
    second = table.encode(text)
    assert first is not None
    assert second is not None
    assert first.tolist() == second.tolist()


def test_a_full_table_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_bpe(byte_level(QWEN))
    monkeypatch.setattr(module, "MAX_WORDS", 5)
    monkeypatch.setattr(module, "MAX_WORD_CHARACTERS", 3)
    table = table_of(tokenizer)
    for seed in range(20):
        text = random_text(seed)
        ids = table.encode(text)
        assert ids is not None
        assert ids.tolist() == tokenizer.encode(text)
    assert len(table._known) == 5
    assert max(map(len, table._known)) <= 3


@pytest.mark.parametrize(
    "text",
    ["a\U00010330", "a\u2f00b", "ba\u017f", "\u0378", "a<think>b"],
    ids=["gothic", "radical", "long s", "unassigned", "added token"],
)
def test_what_is_not_certain_is_left_to_the_tokenizer(text: str) -> None:
    from tokenizers import AddedToken

    tokenizer = byte_bpe(byte_level(CL100K), None, [AddedToken("<think>", rstrip=True)])
    table = table_of(tokenizer)
    assert table.encode(text) is None
    assert table.encode("plain <think text") is not None
    assert tokenizer.encode_on_one_core(TextPiece(text)).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("way", [("isolated", False), ("removed", True)], ids=["kept", "left out"])
def test_a_pattern_that_does_not_match_everything(way: tuple[str, bool]) -> None:
    tokenizer = byte_bpe(sequence(split(r"\p{N}| ?\p{L}+", *way)))
    table = table_of(tokenizer)
    for text, is_certain in (("ab1 c", True), ("ab1, c", False)):
        assert (table.encode(text) is not None) == is_certain
        assert tokenizer.encode_on_one_core(TextPiece(text)).tolist() == tokenizer.encode(text)


def test_text_that_normalisation_changes_is_left_to_the_tokenizer(tmp_path: Path) -> None:
    table = table_of(MADE["qwen with NFC"](tmp_path))
    assert table.encode("cafe\u0301") is None
    assert table.encode("caf\u00e9") is not None


def test_a_lone_surrogate_is_an_error_in_one_line() -> None:
    tokenizer = byte_bpe(byte_level(QWEN))
    with pytest.raises(DataError, match="lone surrogates"):
        tokenizer.encode_on_one_core(TextPiece("a\ud800"))


def _with(name: str, value: Any) -> Any:
    """A backend with one thing set that changes ids."""
    backend = byte_bpe(byte_level(QWEN)).fast
    if name == "truncation":
        backend.enable_truncation(4)
    elif name == "padding":
        backend.enable_padding()
    else:
        setattr(backend.model, name, value)
    return backend


@pytest.mark.parametrize(
    ("name", "value"), [("truncation", None), ("padding", None), ("dropout", 0.1)]
)
def test_settings_that_change_ids_have_no_table(name: str, value: Any) -> None:
    assert word_ids(_with(name, value)) is None


@pytest.mark.parametrize(
    "steps",
    [
        (split(QWEN, "removed"),),
        (split(QWEN, "isolated", True),),
        (split(QWEN), split(r"\p{N}")),
        (split(CLITIC + r"|\p{Greek}+"),),
    ],
    ids=["matches removed", "inverted", "two splits", "unknown branch"],
)
def test_other_splits_have_no_table(steps: tuple[Any, ...]) -> None:
    assert word_ids(byte_bpe(sequence(*steps)).fast) is None


def test_many_added_tokens_have_no_table(tmp_path: Path) -> None:
    from tokenizers import AddedToken

    added = [AddedToken(f"<tool{number}>") for number in range(module.MAX_ADDED_TOKENS + 1)]
    assert word_ids(byte_bpe(byte_level(QWEN), None, added).fast) is None
