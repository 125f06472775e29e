"""What a conversation holds is in the text a template writes, or the template is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.chat_tokenizer import byte_tokenizer
from support.runs import headway

from headway.errors import DataError
from headway.tokenizer.chat import Call, Turn, render, render_prompt

HEADER = "{{ '<|im_start|>' + m.role + '\\n' }}"
PLAIN = (
    "{% for m in messages %}" + HEADER + "{{ (m.content or '') + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALLS = PLAIN.replace(
    "'<|im_end|>\\n'", "(m.tool_calls | tojson if m.tool_calls else '') + '<|im_end|>\\n'"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
)
NO_TOOL_TURNS = CALLS.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
)
NO_SYSTEM = PLAIN.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
)
ONLY_NAMES = CALLS.replace("m.tool_calls | tojson", "m.tool_calls[0].function.name")
MARKED_WITHOUT_CALLS = (
    "{% for m in messages %}"
    + HEADER
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
TOOL: dict[str, Any] = {
    "name": "find",
    "description": 'Finds "it"',
    "parameters": {"type": "object", "properties": {"where": {"enum": ["here"]}}},
}
TURNS = [
    Turn("system", "Be kind."),
    Turn("user", "Where?"),
    Turn("assistant", "", calls=(Call("find", {"where": 'in "Paris"', "near": None, "most": 3}),)),
    Turn("tool", '{"found": true}'),
    Turn("assistant", "There."),
]


def test_a_template_with_a_place_for_everything_is_accepted() -> None:
    tokenizer = byte_tokenizer(TOOLS + CALLS)
    ids, mask = render(TURNS, "tokenizer", tokenizer, [TOOL])
    assert '"arguments": {"where": "in \\"Paris\\"", "near": null, "most": 3}' in tokenizer.decode(
        ids[mask].tolist()
    )


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        (TOOLS + PLAIN, r"the tool call in turn 2 \(find\)"),
        (TOOLS + ONLY_NAMES, r"the tool call in turn 2 \(find\)"),
        (TOOLS + MARKED_WITHOUT_CALLS, r"the tool call in turn 2 \(find\)"),
        (CALLS, r"the tool definitions \('find'\)"),
        (
            TOOLS.replace("tools | tojson", "tools[0].name") + CALLS,
            r"the tool definitions \('Finds \"it\"'\)",
        ),
        (TOOLS + NO_TOOL_TURNS, r"turn 3 \(tool\)"),
        (
            TOOLS + CALLS.replace("messages %}", "messages if m.role != 'system' %}"),
            r"turn 0 \(system\)",
        ),
    ],
)
def test_what_a_template_leaves_out_is_named(template: str, lost: str) -> None:
    with pytest.raises(
        DataError,
        match=f"chat template tokenizer does not write {lost}, so it would be lost. Choose a template",
    ):
        render(TURNS, "tokenizer", byte_tokenizer(template), [TOOL])


def test_a_turn_that_reads_like_another_is_missed_when_it_is_left_out() -> None:
    turns = [
        Turn("user", "go"),
        Turn("assistant", "one"),
        Turn("user", "go"),
        Turn("assistant", "two"),
    ]
    once = PLAIN.replace(
        "{{ (m.content", "{{ ('' if m.role == 'user' and not loop.first else m.content"
    )
    with pytest.raises(DataError, match=r"does not write turn 2 \(user\)"):
        render(turns, "tokenizer", byte_tokenizer(once))


def test_a_prompt_for_generation_loses_nothing_either() -> None:
    with pytest.raises(DataError, match=r"does not write turn 0 \(system\)"):
        render_prompt(TURNS[:2], "tokenizer", byte_tokenizer(NO_SYSTEM))


def test_special_tokens_typed_in_calls_and_tools_stay_text() -> None:
    tokenizer = byte_tokenizer(TOOLS + CALLS)
    turns = [Turn("user", "a"), Turn("assistant", "", calls=(Call("f", {"x": "<|im_end|>"}),))]
    ids, _ = render(turns, "tokenizer", tokenizer, [{"name": "f", "description": "<|im_end|>"}])
    assert ids.tolist().count(tokenizer.token_to_id("<|im_end|>")) == 3
    assert tokenizer.decode(ids.tolist()).count("<|im_end|>") == 5


def test_validate_counts_what_a_template_would_lose_as_bad(tmp_path: Path) -> None:
    record = {
        "conversations": [
            {"from": "human", "value": "Where?"},
            {"from": "function_call", "value": '{"name": "find", "arguments": {"where": "x"}}'},
            {"from": "observation", "value": "y"},
            {"from": "gpt", "value": "There."},
        ],
        "tools": json.dumps([TOOL]),
    }
    (tmp_path / "calls.json").write_text(json.dumps([record, {**record, "tools": ""}]))
    byte_tokenizer(PLAIN).save(tmp_path / "tokenizer")
    done = headway(
        "data",
        "validate",
        str(tmp_path / "calls.json"),
        "--kind",
        "chat",
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        "--template",
        "tokenizer",
    )
    assert done.returncode == 1
    assert "0 good, 2 bad" in done.stdout
    assert (
        "calls.json:1 (record 2): chat template tokenizer does not write the tool call in turn 1 (find)"
        in done.stdout
    )
