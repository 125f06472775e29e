"""Characters are counted by kind, in any script."""

from headway.text.characters import count_characters


def test_characters_are_counted_by_kind() -> None:
    counted = count_characters("Añ 中文 12, ①\n\x00é́")
    assert (
        counted.letters,
        counted.han,
        counted.digits,
        counted.signs,
        counted.controls,
    ) == (6, 2, 3, 1, 1)
