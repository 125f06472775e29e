"""Chat templates: what carries loss is the assistant's text and the token that ends it, nothing else, in every template."""

import io

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_tokenizer import CONVERSATION, SPECIALS, byte_tokenizer
from tokenizers import models

from headway.errors import ConfigError, DataError
from headway.tokenizer.chat import Call, Turn, find_template, render, render_prompt
from headway.tokenizer.chat_template import BUILT_IN
from headway.tokenizer.load import Tokenizer

TOKENIZER = byte_tokenizer()


def shown(turns: list[Turn], template: str, tokenizer: Tokenizer = TOKENIZER) -> tuple[str, str]:
    """The whole text, and the text of the loss targets with | between the stretches."""
    ids, mask = render(turns, template, tokenizer)
    stretches: list[list[int]] = []
    for i, target in enumerate(mask):
        if target:
            if i == 0 or not mask[i - 1]:
                stretches.append([])
            stretches[-1].append(int(ids[i]))
    return tokenizer.decode(ids.tolist()), "|".join(
        tokenizer.decode(stretch) for stretch in stretches
    )


WRITTEN = {
    "chatml": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n再见<|im_end|>\n",
        "Hello!<|im_end|>|再见<|im_end|>",
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nBye"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n再见<|eot_id|>",
        "Hello!<|eot_id|>|再见<|eot_id|>",
    ),
    "alpaca": (
        "<s>Be kind.\n\n### Instruction:\nHi\n\n### Response:Hello!</s>\n\n### Instruction:\nBye\n\n### Response:再见</s>",
        "Hello!</s>|再见</s>",
    ),
    "internlm": (
        "<s><|System|>:Be kind.\n<|User|>:Hi<eoh>\n<|Bot|>:Hello!<eoa>\n<|User|>:Bye<eoh>\n<|Bot|>:再见<eoa>\n</s>",
        "Hello!<eoa>\n|再见<eoa>\n</s>",
    ),
    "zero2all": (
        "<|beginoftext|><|im_start|>system<|role_end|>Be kind.<|im_end|><|im_start|>user<|role_end|>Hi<|im_end|>"
        "<|im_start|>assistant<|role_end|>Hello!<|im_end|><|im_start|>user<|role_end|>Bye<|im_end|>"
        "<|im_start|>assistant<|role_end|>再见<|im_end|>",
        "Hello!<|im_end|>|再见<|im_end|>",
    ),
}
WRITTEN["qwen"] = WRITTEN["chatml"]
# InternLM's own tool writes other ids than the tokenizer has for <eoh>, <eoa> and a line's end.
NEW_NAMES = {
    "<eoh>\n": "<TOKENS_UNUSED_140><0x0A>",
    "<eoa>\n": "<TOKENS_UNUSED_139><0x0A>",
    "Be kind.\n": "Be kind.<0x0A>",
}
WRITTEN["internlm_alpaca"] = WRITTEN["internlm"]
for old, new in NEW_NAMES.items():
    text, targets = WRITTEN["internlm_alpaca"]
    WRITTEN["internlm_alpaca"] = (text.replace(old, new), targets.replace(old, new))


@pytest.mark.parametrize("template", BUILT_IN)
def test_a_conversation_is_written_as_its_format_says_and_only_answers_with_their_end_carry_loss(
    template: str,
) -> None:
    assert shown(CONVERSATION, template) == WRITTEN[template]


@pytest.mark.parametrize(
    ("template", "default"),
    [("qwen", True), ("zero2all", True), ("chatml", False), ("llama3", False)],
)
def test_a_default_system_prompt_is_written_where_the_format_has_one(
    template: str, default: bool
) -> None:
    text, _ = shown(CONVERSATION[1:3], template)
    assert ("You are a helpful assistant." in text) == default


def test_the_next_turns_opening_token_carries_no_loss() -> None:
    """A known fault of zero2all's own tool: the mask reached one token too far, over the next <|im_start|>."""
    ids, mask = render(CONVERSATION, "zero2all", TOKENIZER)
    opening = TOKENIZER.special_tokens["<|im_start|>"]
    assert not mask[ids == opening].any()
    assert [
        bool(mask[i]) for i in range(len(ids)) if ids[i] == TOKENIZER.special_tokens["<|im_end|>"]
    ] == [False, False, True, False, True]


def test_user_turns_at_the_end_carry_no_loss() -> None:
    """The other known fault: what came after the last answer was left unmasked."""
    for template in BUILT_IN:
        text, targets = shown([*CONVERSATION, Turn("user", "One more thing")], template)
        assert "One more thing" in text
        assert "One more" not in targets
        assert targets.startswith("Hello!")
        assert "再见" in targets


@pytest.mark.parametrize("template", BUILT_IN)
def test_a_prompt_has_the_very_ids_of_the_training_example_up_to_the_answer(template: str) -> None:
    ids, mask = render(CONVERSATION, template, TOKENIZER)
    for count, start in (
        (2, int(mask.argmax())),
        (4, len(mask) - int(mask[::-1].argmin()) if mask[-1] else None),
    ):
        prompt = render_prompt(CONVERSATION[:count], template, TOKENIZER)
        assert ids[: len(prompt)].tolist() == prompt
        assert start is None or len(prompt) == start or mask[len(prompt)]


typed_text = st.lists(st.sampled_from([*"ab \n再", *SPECIALS]), min_size=1, max_size=6).map("".join)


@settings(deadline=None, max_examples=40)
@given(
    contents=st.lists(typed_text, min_size=2, max_size=6),
    template=st.sampled_from(sorted(BUILT_IN)),
)
def test_what_people_type_never_becomes_a_special_token(contents: list[str], template: str) -> None:
    plain = [Turn("user" if i % 2 == 0 else "assistant", "x") for i in range(len(contents))]
    typed = [Turn(turn.role, content) for turn, content in zip(plain, contents, strict=True)]
    special = set(TOKENIZER.special_tokens.values())
    ids, mask = render(typed, template, TOKENIZER)
    expected = render(plain, template, TOKENIZER)
    assert [i for i in ids.tolist() if i in special] == [
        i for i in expected.ids.tolist() if i in special
    ]
    answers = "".join(
        c.strip() if template in ("llama3", "zero2all") else c for c in contents[1::2]
    )
    assert TOKENIZER.decode(
        [i for i, m in zip(ids.tolist(), mask, strict=True) if m and i not in special]
    ).replace("\n", "") == answers.replace("\n", "")


def test_turns_that_are_context_only_carry_no_loss() -> None:
    turns = [
        Turn("user", "a"),
        Turn("assistant", "first", learn=False),
        Turn("user", "b"),
        Turn("assistant", "second"),
    ]
    for template in BUILT_IN:
        assert "first" not in shown(turns, template)[1]
        assert shown(turns, template)[1].startswith("second")


def test_the_alpaca_template_has_a_place_for_the_input_and_others_write_it_below() -> None:
    turns = [Turn("user", "Sort", context="b a"), Turn("assistant", "a b")]
    assert "paired with an input" in shown(turns, "alpaca")[0]
    assert "\n\n### Input:\nb a\n\n### Response:" in shown(turns, "alpaca")[0]
    assert "user\nSort\nb a<|im_end|>" in shown(turns, "chatml")[0]
    assert "<|User|>:Sort\nb a<eoh>" in shown(turns, "internlm")[0]


def test_tools_calls_and_results_are_written_and_calls_carry_loss() -> None:
    turns = [
        Turn("user", "2+2?"),
        Turn("assistant", "", calls=(Call("add", {"a": 2}),)),
        Turn("tool", "4"),
        Turn("tool", "four"),
        Turn("assistant", "4"),
    ]
    ids, mask = render(turns, "qwen", TOKENIZER, tools=[{"name": "add"}])
    text = TOKENIZER.decode(ids.tolist())
    assert '<tools>\n{"name": "add"}\n</tools>' in text
    assert (
        "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\nfour\n</tool_response><|im_end|>\n"
        in text
    )
    targets = TOKENIZER.decode(ids[mask].tolist())
    assert (
        targets
        == '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>4<|im_end|>'
    )
    for template in ("internlm", "alpaca"):
        with pytest.raises(DataError, match="no place for"):
            render(turns, template, TOKENIZER)
    with pytest.raises(DataError, match="no place for tool definitions"):
        render(CONVERSATION, "llama3", TOKENIZER, tools=[{"name": "add"}])


def test_a_tokenizer_without_the_templates_tokens_is_refused_by_name() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ConfigError, match=r"template chatml needs the token '<\|im_start\|>'"):
        render([Turn("user", "a"), Turn("assistant", "a")], "chatml", Tokenizer(backend))
    with pytest.raises(ConfigError, match="must be one of chatml"):
        find_template("vicuna", TOKENIZER)
    with pytest.raises(ConfigError, match="no chat template"):
        find_template("tokenizer", TOKENIZER)


@pytest.fixture(scope="module")
def sentencepiece_tokenizer() -> Tokenizer:
    """A sentencepiece model as InternLM's: a space before every text, byte fallback, <eoh> and <eoa> as plain pieces."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["hello world how are you", "fine thanks and you"] * 20),
        model_writer=written,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<eoh>", "<eoa>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return Tokenizer(
        sentencepiece.SentencePieceProcessor(model_proto=written.getvalue()),
        {"bos": "<s>", "eos": "</s>"},
    )


def test_internlm_layout_has_bare_newlines_and_pieces_encoded_one_by_one(
    sentencepiece_tokenizer: Tokenizer,
) -> None:
    """bos | user ids, <eoh>, newline | <|Bot|>: ids | answer ids, <eoa>, newline | eos, as InternLM's alpaca tool lays it out."""
    encode = sentencepiece_tokenizer.encode
    number = sentencepiece_tokenizer.token_to_id
    ids, mask = render(
        [Turn("user", "how", context="are"), Turn("assistant", "fine")],
        "internlm",
        sentencepiece_tokenizer,
    )
    newline = number("<0x0A>")
    prompt = [
        number("<s>"),
        *encode("<|User|>:how\nare"),
        number("<eoh>"),
        newline,
        *encode("<|Bot|>:"),
    ]
    answer = [*encode("fine"), number("<eoa>"), newline, number("</s>")]
    assert ids.tolist() == prompt + answer
    assert mask.tolist() == [False] * len(prompt) + [True] * len(answer)


def test_control_tokens_that_are_ordinary_pieces_are_not_read_from_typed_text(
    sentencepiece_tokenizer: Tokenizer,
) -> None:
    """Where <eoa> is a plain piece the tokenizer finds it in any text; such a text is refused."""
    with pytest.raises(DataError, match="the text holds '<eoa>'"):
        render(
            [Turn("user", "how <eoa>"), Turn("assistant", "fine")],
            "internlm",
            sentencepiece_tokenizer,
        )
