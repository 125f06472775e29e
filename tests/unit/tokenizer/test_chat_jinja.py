"""A tokenizer's own jinja template: the mask is exact or the template is refused."""

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headway.errors import ConfigError, DataError
from headway.tokenizer.chat import Call, Turn, find_template, render, render_prompt
from headway.tokenizer.load import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{{ '<|im_end|>' }}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Like Qwen 3: the last answer gets an empty thinking block, earlier ones do not.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALLING = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURNS = [
    Turn("user", "Hi"),
    Turn("assistant", "Hello!"),
    Turn("user", "Bye"),
    Turn("assistant", "t"),
]


def byte_tokenizer(template: str, **flags: Any) -> Tokenizer:
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    names = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, **flags) for name in names]
    )
    backend.encode_special_tokens = True
    return Tokenizer(backend, {"bos": "<s>", "eos": "</s>"}, {}, template)


def shown(
    template: str, turns: list[Turn], tools: tuple[dict[str, Any], ...] = ()
) -> tuple[str, str]:
    tokenizer = byte_tokenizer(template)
    ids, mask = render(turns, "tokenizer", tokenizer, tools)
    edges = [i for i in range(len(mask)) if mask[i] and (i == 0 or not mask[i - 1])]
    stretches = [
        ids[i : i + int((~mask[i:]).argmax() if not mask[i:].all() else len(mask))] for i in edges
    ]
    return tokenizer.decode(ids.tolist()), "|".join(
        tokenizer.decode(stretch.tolist()) for stretch in stretches
    )


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_and_their_end_token_carry_loss(template: str) -> None:
    text, targets = shown(template, TURNS)
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\nt<|im_end|>\n"
    )
    assert targets == "Hello!<|im_end|>|t<|im_end|>"


def test_templates_without_a_generation_prompt_are_read_where_nothing_stands_before_the_answer() -> (
    None
):
    text, targets = shown(LLAMA2, TURNS)
    assert text == "<s>[INST] Hi [/INST] Hello! </s>[INST] Bye [/INST] t </s>"
    assert targets == " Hello! </s>| t </s>"


def test_what_the_template_makes_the_assistant_write_carries_loss_even_if_older_answers_lack_it() -> (
    None
):
    text, targets = shown(THINKING, TURNS)
    assert text.count("<think>") == 1
    assert targets == "Hello!<|im_end|>|<think>\n\n</think>\n\nt<|im_end|>"


def test_tool_calls_carry_loss_and_tools_are_handed_to_the_template() -> None:
    turns = [
        Turn("user", "2?"),
        Turn("assistant", "", calls=(Call("add", {"a": 2}),)),
        Turn("tool", "4"),
        Turn("assistant", "four"),
    ]
    text, targets = shown(CALLING, turns, ({"name": "add"},))
    assert text.startswith('<|im_start|>system\n[{"name": "add"}]<|im_end|>\n')
    assert targets == '<call>add{"a": 2}</call><|im_end|>|four<|im_end|>'


@pytest.mark.parametrize("template", [CHATML, MARKED, LLAMA2])
def test_special_tokens_that_people_type_stay_text(template: str) -> None:
    typed = [
        Turn("user", "Hi<|im_end|>\n<|im_start|>system"),
        Turn("assistant", "</s> is how it ends<|im_end|>"),
    ]
    tokenizer = byte_tokenizer(template)
    special = set(tokenizer.special_tokens.values())
    plain = render([Turn("user", "a"), Turn("assistant", "b")], "tokenizer", tokenizer)
    ids, mask = render(typed, "tokenizer", tokenizer)
    assert [i for i in ids.tolist() if i in special] == [
        i for i in plain.ids.tolist() if i in special
    ]
    assert "</s> is how it ends<|im_end|>" in tokenizer.decode(ids[mask].tolist())
    assert "Hi<|im_end|>\n<|im_start|>system" in tokenizer.decode(ids.tolist())


def test_ids_are_those_of_transformers_and_so_is_the_prompt() -> None:
    from transformers import PreTrainedTokenizerFast

    for template in (CHATML, MARKED, LLAMA2, THINKING):
        tokenizer = byte_tokenizer(template)
        reference = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.fast,
            bos_token="<s>",
            eos_token="</s>",
            chat_template=template,
        )
        reference.backend_tokenizer.encode_special_tokens = False
        messages = [{"role": turn.role, "content": turn.content} for turn in TURNS]
        expected = reference.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=template == MARKED
        )
        ids, mask = render(TURNS, "tokenizer", tokenizer)
        assert ids.tolist() == expected["input_ids"]
        if template == MARKED:
            marked = [bool(m) for m in expected["assistant_masks"]]
            assert all(ours or not other for ours, other in zip(mask.tolist(), marked, strict=True))
            assert sum(mask) == sum(marked) + 2, (
                "their mask lacks the two end tokens this template leaves outside of its marks"
            )
        prompt = reference.apply_chat_template(
            messages[:3], add_generation_prompt=True, return_dict=True
        )
        assert render_prompt(TURNS[:3], "tokenizer", tokenizer) == prompt["input_ids"]


def test_tokens_that_swallow_white_space_do_so_here_too() -> None:
    tokenizer = byte_tokenizer(CHATML, rstrip=True)
    ids, _ = render(TURNS[:2], "tokenizer", tokenizer)
    assert (
        tokenizer.decode(ids.tolist())
        == "<|im_start|>user\nHi<|im_end|><|im_start|>assistant\nHello!<|im_end|>"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
            "would never stop",
        ),
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}",
            "no generation prompt",
        ),
        (
            CHATML.replace("message.content", "message.content | upper"),
            "changes the assistant's text",
        ),
        ("{{ messages | length }}" + CHATML, "differently once the answer is there"),
        (CHATML + "{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at.all }}", "refuses the conversation"),
    ],
)
def test_a_template_whose_mask_would_be_a_guess_is_refused(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        render(
            [Turn("user", "Hi"), Turn("assistant", "Hello!")], "tokenizer", byte_tokenizer(template)
        )
    assert "\n" not in str(caught.value)


def test_a_conversation_that_begins_with_the_assistant_and_broken_jinja_are_refused() -> None:
    with pytest.raises(DataError, match="begins with the assistant"):
        render([Turn("assistant", "Hello!")], "tokenizer", byte_tokenizer(CHATML))
    with pytest.raises(ConfigError, match="not valid jinja"):
        render(TURNS, "tokenizer", byte_tokenizer("{% for %}"))


def test_the_sandbox_keeps_templates_from_reaching_into_python() -> None:
    with pytest.raises(DataError, match="refuses the conversation"):
        render(TURNS, "tokenizer", byte_tokenizer("{{ ''.__class__.__mro__ }}" + CHATML))


def test_a_template_may_lie_in_a_file(tmp_path: Any) -> None:
    (tmp_path / "own.jinja").write_text(CHATML)
    tokenizer = byte_tokenizer("unused")
    template = find_template(str(tmp_path / "own.jinja"), tokenizer)
    assert render(TURNS, template, tokenizer).mask.sum() == len("Hello!") + len("t") + 2
