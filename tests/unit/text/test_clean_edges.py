"""The rules of cleaning at their edges, in texts counted by hand."""

import pytest

from headway.text.clean import CleanRules, broken_rule


@pytest.mark.parametrize(
    ("text", "rules", "broken"),
    [
        ("ten letter", {"max_characters": 10}, None),
        ("ten letters", {"max_characters": 10}, "too long"),
        ("ten letter", {"min_characters": 10}, None),
        ("ten lette", {"min_characters": 10}, "too short"),
        ("1 2 3 4 5 6 abcd", {}, "many digits"),  # 6 of the 10 characters that are no spaces
        ("1 2 3 4 5 abcde f", {}, None),  # 5 of 11
        ("!  !  !  !  !  !  abcd", {}, "many signs"),
        (
            "one line here\ntwo\none line here\n",
            {},
            None,
        ),  # 13 of 29 characters stand in a line that was there before
        ("one line here\none line here\none line here", {}, "repeated lines"),
        ("abc de\nfgh ij\n", {"min_line_length": 6.0}, None),
        ("abc de\nfgh i\n", {"min_line_length": 6.0}, "short lines"),
    ],
)
def test_a_rule_breaks_just_past_its_limit(
    text: str, rules: dict[str, float], broken: str | None
) -> None:
    assert broken_rule(text, CleanRules(**rules)) == broken  # pyright: ignore[reportArgumentType]
