"""RequestText: the pieces joined are the text that generation returns, whatever the tokens, and stop texts never come out."""

import random

import pytest
from support.byte_model import byte_tokenizer

from headway.infer.engine.text import RequestText


def joined(text: RequestText, groups: list[list[int]]) -> str:
    return "".join([*(text.add(group) for group in groups), text.finish()])


@pytest.mark.parametrize("seed", range(10))
def test_any_bytes_in_any_groups_give_the_text_decoded_at_once(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = byte_tokenizer()
    content = bytes(
        rng.choice([*b"ab ", 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0xFF, 0xC3]) for _ in range(40)
    )
    table = {tokenizer.decode_bytes([i]): i for i in range(256)}
    ids = [table[bytes([byte])] for byte in content]
    cuts = sorted(rng.sample(range(1, 40), 8))
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, 40], strict=True)]
    assert joined(RequestText(tokenizer, ids[:3]), groups) == content.decode("utf-8", "replace")


def test_a_stop_text_ends_the_text_and_its_beginning_waits() -> None:
    tokenizer = byte_tokenizer()
    text = RequestText(tokenizer, [], ("<stop>",))
    assert text.add(tokenizer.encode("one <st")) == "one "
    assert text.add(tokenizer.encode("ar> <sto")) == "<star> "
    assert text.add(tokenizer.encode("p> more")) == ""
    assert text.stopped
    assert text.num_tokens == len("one <star> <stop>")
    assert text.finish() == ""


def test_a_tokenizer_without_bytes_waits_for_whole_characters() -> None:
    class NoBytes:
        def decode_bytes(self, ids: list[int], skip_special: bool = False) -> bytes:
            return bytes(ids).decode("utf-8", "replace").encode()

    ids = list("naïve 你好".encode())
    pieces = RequestText(NoBytes(), [65])  # pyright: ignore[reportArgumentType]
    said = [pieces.add([token]) for token in ids]
    assert "".join(said) == "naïve 你好"
    assert "\ufffd" not in "".join(said)
