"""Counts of words that reach the disk in several portions."""

from collections import Counter

from headway.tokenizer.word_counts import WordTable


def test_portions_of_a_word_that_went_to_the_disk_are_added_up() -> None:
    with WordTable(max_bytes=1) as table:  # every portion goes to the disk
        for portion in ({"the": 5, "a\nb": 2}, {"the": 7, "河水": 1}, {"the": 1, "a\nb": 40}):
            table.add_counts(Counter(portion))
            assert table.spilled
            assert not table.counts
        assert sum(table.parts(), Counter()) == {"the": 13, "a\nb": 42, "河水": 1}
