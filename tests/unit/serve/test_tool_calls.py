"""Calls of tools in the text of an answer: found however the text arrives, in the format of the template."""

import random

import pytest
from support.chat_tokenizer import byte_tokenizer

from headway.serve.tool_calls import ToolCallReader, tool_format
from headway.tokenizer.chat_template import BUILT_IN

ANSWERS = {
    "a <b> c\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"<tool\"}}\n</tool_call>": ("a <b> c", ["f"]),
    "<tool_call>{\"name\": \"f\", \"parameters\": {}}</tool_call>\n<tool_call>{\"name\": \"g\", \"arguments\": \"{}\"}</tool_call>\n":
        ("", ["f", "g"]),
    "<tool_call>not json</tool_call> tail": ("<tool_call>not json</tool_call> tail", []),
    "<tool_call>{\"name\": \"f\", \"arguments\": {}}": ("", ["f"]),
    "<tool_call>{\"name\": \"f\", \"argum": ("<tool_call>{\"name\": \"f\", \"argum", []),
    "ends with <tool": ("ends with <tool", []),
    "lines\n\n": ("lines\n\n", []),
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
def test_calls_in_tags_are_found_however_the_text_is_cut(answer: str) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        reader = ToolCallReader("tags")
        offset = 0
        said = ""
        names = []
        while offset < len(answer):
            size = rng.randint(1, 9)
            text, calls = reader.add(answer[offset : offset + size])
            said = said + text
            names = names + [call.name for call in calls]
            offset = offset + size
        text, calls = reader.finish()
        assert (said + text, names + [call.name for call in calls]) == ANSWERS[answer], seed


@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', "", ["f"]),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", ["f", "g"]),
        ('{"name": 3}', '{"name": 3}', []),
        ("Hello {", "Hello {", []),
        ("", "", []),
    ],
)
def test_an_answer_that_is_json_as_a_whole_is_a_call(
    answer: str, text: str, calls: list[str]
) -> None:
    reader = ToolCallReader("whole")
    pieces = [reader.add(character) for character in answer]
    pieces.append(reader.finish())
    assert "".join(piece for piece, _ in pieces) == text
    assert [call.name for _, found_calls in pieces for call in found_calls] == calls


def test_the_format_of_calls_is_that_of_the_template() -> None:
    tokenizer = byte_tokenizer()
    formats = {
        name: tool_format(BUILT_IN[name].export(tokenizer) or "")
        for name in ("chatml", "qwen", "llama3", "alpaca")
    }
    assert formats == {"chatml": "tags", "qwen": "tags", "llama3": "whole", "alpaca": None}
