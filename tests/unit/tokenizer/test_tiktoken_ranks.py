"""Halves of tiktoken's tokens, by hand."""

from headway.tokenizer.tiktoken_ranks import _halves


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
