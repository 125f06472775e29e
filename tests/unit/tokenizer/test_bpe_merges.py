"""The merge learner against `tokenizers` and against counting by hand, and word counting within little memory."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError, DataError
from headway.tokenizer.bpe_merges import learn_merges
from headway.tokenizer.byte_level import (
    BYTE_TO_CHAR,
    CHAR_TO_BYTE,
    WORDS,
    byte_level,
    spell,
    unspell,
)
from headway.tokenizer.train import train_bpe
from headway.tokenizer.word_counts import WordCounts, WordTable, count_words, select_words

TEXTS = [
    "the cat sat on the mat, and the hat that the cat had sat on the mat too.\n" * 3,
    "那年河水结冰很早，孩子们踩着冰面过河上学。河水河水结冰结冰，孩子们孩子们。" * 4,
    "def f(x):\n    return x + 1\n\n\n    return x + 12345\n" * 3,
    "aaaa aaa aa a aaaaaaaa banana bananas ananas " * 5,
]


def plain_merges(words: dict[bytes, int], num_tokens: int) -> list[tuple[bytes, bytes]]:
    """BPE by counting everything again after each merge; ties go to the pair with the lowest ids."""
    tokens = [bytes([b]) for b in range(256)]
    split = {word: [bytes([b]) for b in word] for word in words}
    merges: list[tuple[bytes, bytes]] = []
    while len(tokens) < num_tokens:
        counts: Counter[tuple[bytes, bytes]] = Counter()
        for word, number in words.items():
            for pair in zip(split[word], split[word][1:], strict=False):
                counts[pair] += number
        ranked = sorted(
            counts.items(),
            key=lambda item: (-item[1], tokens.index(item[0][0]), tokens.index(item[0][1])),
        )
        if not ranked or ranked[0][1] < 2:
            break
        left, right = ranked[0][0]
        merges.append((left, right))
        if left + right not in tokens:
            tokens.append(left + right)
        for word, parts in split.items():
            joined: list[bytes] = []
            for part in parts:
                if joined and joined[-1] == left and part == right:
                    joined[-1] = left + right + b"\x00merged"
                else:
                    joined.append(part)
            split[word] = [part.removesuffix(b"\x00merged") for part in joined]
    return merges


@given(
    st.dictionaries(
        st.text("ab好", min_size=1, max_size=12).map(str.encode),
        st.integers(1, 5),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=150, deadline=None)
def test_merges_equal_those_of_counting_everything_again(words: dict[bytes, int]) -> None:
    merges, tokens = learn_merges(list(words), list(words.values()), range(256), 270)
    assert [(tokens[m.left], tokens[m.right]) for m in merges] == plain_merges(words, 270)
    assert [tokens[m.result] for m in merges] == [tokens[m.left] + tokens[m.right] for m in merges]


def test_merges_equal_those_of_the_tokenizers_library(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, trainers

    tokenizer = train_bpe(TEXTS, vocab_size=360, out=tmp_path, special_tokens=["<end>"])
    reference = Tokenizer(models.BPE())
    reference.pre_tokenizer = byte_level(WORDS)
    trainer = trainers.BpeTrainer(
        vocab_size=359, min_frequency=2, initial_alphabet=list(BYTE_TO_CHAR), show_progress=False
    )
    reference.train_from_iterator(TEXTS, trainer)
    ours = json.loads(tokenizer.fast.to_str())["model"]
    expected = json.loads(reference.to_str())["model"]
    assert ours["merges"] == expected["merges"]
    assert len(ours["merges"]) == 359 - 256
    assert ours["vocab"] == expected["vocab"]


@given(st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=60))
@settings(max_examples=300, deadline=None)
def test_words_counted_in_training_are_those_cut_in_use(text: str) -> None:
    import regex

    cuts = [word for word, _ in byte_level(WORDS).pre_tokenize_str(text)]
    assert [spell(word.encode()) for word in regex.findall(WORDS, text, flags=regex.V1)] == cuts


def test_han_latin_and_digits_are_cut_apart() -> None:
    import regex

    cut = regex.compile(WORDS, regex.V1)
    assert cut.findall("用Python3.12写代码 don't  stop") == [
        "用",
        "Python",
        "3",
        ".",
        "12",
        "写代码",
        " don",
        "'t",
        " ",
        " stop",
    ]
    assert cut.findall("1234567，中文\n\nx") == ["123", "456", "7", "，", "中文", "\n\n", "x"]


def test_the_byte_alphabet_is_that_of_the_library() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(CHAR_TO_BYTE) == sorted(pre_tokenizers.ByteLevel.alphabet())
    data = bytes(range(256))
    assert unspell(spell(data)) == data
    assert unspell("中") is None


def corpus(seed: int) -> list[str]:
    chance = random.Random(seed)
    return [
        " ".join(f"w{int(chance.paretovariate(0.6)) % 5000}\n" for _ in range(2000))
        + "河水结冰很早" * 3
        for _ in range(20)
    ]


def counts_of(table: WordTable) -> Counter[str]:
    return sum(table.parts(), Counter())


def test_counts_are_exact_when_the_table_goes_through_the_disk() -> None:
    with WordTable() as whole, WordTable(50_000) as small:
        assert count_words(corpus(1), WORDS, whole) == count_words(corpus(1), WORDS, small)
        assert small.spilled
        assert not whole.spilled
        assert counts_of(small) == counts_of(whole)
        assert select_words(small, None) == select_words(whole, None)


def test_counting_in_processes_changes_nothing() -> None:
    with WordTable() as first, WordTable() as two:
        count_words(corpus(2), WORDS, first)
        count_words(corpus(2), WORDS, two, workers=2)
        assert counts_of(first) == counts_of(two)


def test_long_texts_are_counted_as_if_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i} of 中文\n\n  indented\n" for i in range(300))
    with WordTable() as whole, WordTable() as pieces:
        count_words([text], WORDS, whole)
        monkeypatch.setattr("headway.tokenizer.word_counts.BATCH_CHARACTERS", 100)
        count_words([text], WORDS, pieces)
        assert counts_of(whole) == counts_of(pieces)


def test_rare_words_give_way_and_chinese_runs_are_cut_not_lost() -> None:
    with WordTable() as table:
        table.add_counts(Counter({"the": 100, "河水结冰很早孩子": 1, "孩子河水": 1, "rareword": 1}))
        assert select_words(table, None) == WordCounts(
            ["the", "rareword", "孩子河水", "河水结冰很早孩子"], [100, 1, 1, 1], 1.0
        )
        words = select_words(table, 24)
    assert sum(len(word.encode()) for word in words.words) <= 24
    counts = dict(zip(words.words, words.counts, strict=True))
    assert counts["the"] == 100
    assert "rareword" not in counts
    assert counts["孩子"] == 2
    assert counts["河水"] == 2
    assert 0.8 < words.covered < 1


def test_little_memory_still_trains_a_tokenizer_that_round_trips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.tokenizer.train.BASE_MEMORY_BYTES", (256 << 20) - 400_000)
    tokenizer = train_bpe(corpus(3), vocab_size=600, out=tmp_path, max_memory_bytes=256 << 20)
    text = corpus(3)[0] + "anything else 别的"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 600


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"vocab_size": 260}, "vocab_size is 260; it must be at least 261"),
        ({"vocab_size": 1 << 21}, "under 1048576"),
        ({"vocab_size": 300, "special_tokens": ["a", "a"]}, "each must be given once"),
        ({"vocab_size": 300, "max_memory_bytes": 1000}, "max_memory is 1000 bytes"),
    ],
)
def test_requests_that_cannot_be_are_refused_before_reading(
    tmp_path: Path, request_: dict[str, int], message: str
) -> None:
    def unread() -> None:
        raise AssertionError("nothing may be read")

    with pytest.raises(ConfigError, match=message):
        train_bpe((unread() or "" for _ in range(1)), out=tmp_path, **request_)  # type: ignore[arg-type]


def test_a_corpus_too_small_for_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"vocab_size is 5000, but this corpus has pairs that repeat for only \d+ tokens",
    ):
        train_bpe(["a short text, a short text"], vocab_size=5000, out=tmp_path)
    with pytest.raises(DataError, match="the inputs hold no text to train on"):
        train_bpe([], vocab_size=300, out=tmp_path)
