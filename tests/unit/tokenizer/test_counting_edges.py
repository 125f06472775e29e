"""Counts that reach the disk in several portions, and halves of tiktoken's tokens, by hand."""

from collections import Counter

from headway.tokenizer.tiktoken_ranks import _halves
from headway.tokenizer.word_counts import WordTable


def test_portions_of_a_word_that_went_to_the_disk_are_added_up() -> None:
    with WordTable(max_bytes=1) as table:  # every portion goes to the disk
        for portion in ({"the": 5, "a\nb": 2}, {"the": 7, "河水": 1}, {"the": 1, "a\nb": 40}):
            table.add_counts(Counter(portion))
            assert table.spilled and not table.counts
        assert sum(table.parts(), Counter()) == {"the": 13, "a\nb": 42, "河水": 1}


def test_the_halves_of_a_token_are_made_by_the_lowest_ranks_first() -> None:
    learned = ["bc", "ab", "abc", "cd", "abcd", "bcd"]
    ranks = {bytes([byte]): byte for byte in range(256)} | {
        token.encode(): 256 + n for n, token in enumerate(learned)
    }
    halves = {
        token: tuple(
            half.decode() for half in _halves(token.encode(), ranks[token.encode()], ranks)
        )
        for token in learned
    }
    assert halves == {
        "bc": ("b", "c"),
        "ab": ("a", "b"),
        "abc": ("a", "bc"),  # bc was learned before ab
        "cd": ("c", "d"),
        "abcd": ("abc", "d"),  # a bc d, then abc
        "bcd": ("bc", "d"),
    }
