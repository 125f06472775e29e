"""Prompts of the shapes that reinforcement learning sets have: read as prompts, detected where the task answers prompts, with their right answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.data.config import SourceConfig
from headway.errors import ConfigError
from headway.prepare.detect import detect
from headway.records.prompt import parse_prompt
from headway.rewards.gold import COLUMNS, gold_text
from headway.text.document import Record

GSM8K = {"question": "Natalia sold 48 clips, then half of it. Total?", "answer": "48/2=24\n#### 72"}
MATH = {
    "problem": "What is $1+1$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "It is $\\boxed{2}$.",
}
TRL = {
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}],
    "solution": "5",
    "difficulty": 1,
}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+5?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 0, "split": "train"},
}
CHAT = {
    "messages": [
        {"role": "user", "content": "Say 4."},
        {"role": "assistant", "content": "4"},
    ],
    "answer": "4",
}


@pytest.mark.parametrize(
    ("record", "turns", "gold"),
    [
        (GSM8K, [("user", GSM8K["question"])], "72"),
        (MATH, [("user", MATH["problem"])], MATH["solution"]),
        (TRL, [("system", "Be brief."), ("user", "2+3?")], "5"),
        (VERL, [("user", "2+5?")], "7"),
        (CHAT, [("user", "Say 4.")], "4"),
    ],
    ids=["gsm8k", "math", "trl", "verl", "chat"],
)
def test_a_known_shape_is_a_prompt_with_its_right_answer(
    record: dict[str, Any], turns: list[tuple[str, str]], gold: str, tmp_path: Path
) -> None:
    prompt = parse_prompt(Record(record, "x.jsonl", 1))
    assert [(turn.role, turn.content) for turn in prompt.turns] == turns
    assert gold_text(record, COLUMNS) == gold

    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(record) + "\n")
    detected = detect(str(path), SourceConfig(path=str(path)), ("prompt",))
    assert detected.kind == "prompt"
    assert main(["data", "validate", str(path), "--kind", "prompt"]) == 0


def test_a_text_or_an_answer_beside_a_prompt_is_a_column(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    record = {"prompt": "a", "text": "b", "chosen": "c", "rejected": "d", "label": True}
    path.write_text(json.dumps(record) + "\n")
    detected = detect(str(path), SourceConfig(path=str(path)), ("prompt",))
    assert detected.describe() == "prompt (prompt), 1 record"
    # Other tasks read the same file as before.
    with pytest.raises(ConfigError, match="could be"):
        detect(str(path), SourceConfig(path=str(path)))


def test_records_without_a_prompt_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": 1, "body": "a"}\n')
    with pytest.raises(ConfigError, match=r"the keys id, body name no prompt\. .*keys: \{prompt"):
        detect(str(path), SourceConfig(path=str(path)), ("prompt",))
    text = tmp_path / "x.txt"
    text.write_text("hello")
    with pytest.raises(ConfigError, match="holds text, and the task answers prompts"):
        detect(str(text), SourceConfig(path=str(text)), ("prompt",))
