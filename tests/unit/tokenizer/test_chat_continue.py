"""A prompt that ends with the assistant's words: the ids are those of training up to the end of the words."""

import pytest
from support.chat_tokenizer import byte_tokenizer

from headway.errors import DataError
from headway.tokenizer.chat import Call, Turn, render, render_prompt
from headway.tokenizer.chat_template import BUILT_IN

TURNS = [
    Turn("user", "Hi"),
    Turn("assistant", "Yes?"),
    Turn("user", "Go on"),
    Turn("assistant", "Well, 再"),
]
THINKS = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{ m.content }}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.mark.parametrize("name", [*BUILT_IN, "tokenizer"])
def test_the_ids_are_the_beginning_of_the_training_example(name: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer = tokenizer.with_chat_template(BUILT_IN["chatml"].export(tokenizer))
    turns = TURNS[2:] if name == "alpaca" else TURNS
    ids = render_prompt(turns, name, tokenizer, continues=True)
    whole = render(turns, name, tokenizer).ids.tolist()
    words = tokenizer.encode(turns[-1].content)
    assert ids == whole[: len(ids)]
    assert ids[-len(words) :] == words
    assert len(whole) > len(ids)
    # what follows ends the answer
    assert tokenizer.decode(whole[len(ids) :]).strip().startswith("<")


def test_what_a_template_writes_before_an_answer_stands_before_its_beginning() -> None:
    tokenizer = byte_tokenizer(THINKS)
    text = tokenizer.decode(render_prompt(TURNS, "tokenizer", tokenizer, continues=True))
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nWell, 再")


def test_a_template_whose_loss_mask_is_unclear_continues_after_its_generation_prompt() -> None:
    tokenizer = byte_tokenizer(
        "{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{%- endfor %}{%- if add_generation_prompt %}A> {%- endif %}"
    )
    text = tokenizer.decode(render_prompt(TURNS[2:], "tokenizer", tokenizer, continues=True))
    assert text.endswith("A>Well, 再")
    assert text.count("Well") == 1


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_spaces_at_the_end_of_the_words_stay(name: str) -> None:
    tokenizer = byte_tokenizer()
    ids = render_prompt([*TURNS[:3], Turn("assistant", "Well, ")], name, tokenizer, continues=True)
    assert tokenizer.decode(ids).endswith("\nWell, ")


def test_nothing_is_continued_that_is_no_text_of_the_assistant() -> None:
    tokenizer = byte_tokenizer()
    for last in (Turn("user", "x"), Turn("assistant", "x", calls=(Call("f", {}),))):
        with pytest.raises(DataError, match="nothing to continue"):
            render_prompt([*TURNS, last], "chatml", tokenizer, continues=True)
    assert render_prompt(
        [*TURNS[:3], Turn("assistant", "")], "chatml", tokenizer, continues=True
    ) == render_prompt(TURNS[:3], "chatml", tokenizer)
