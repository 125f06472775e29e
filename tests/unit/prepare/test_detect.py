"""The kind of raw data is read from its keys where they say it, and asked for where they do not."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.config.load import load
from headway.data.config import DataConfig, SourceConfig
from headway.errors import ConfigError, DataError
from headway.prepare.detect import SAMPLE_RECORDS, detect, with_kinds
from headway.tokenizer.train import train_bpe
from headway.train.config import Recipe
from headway.train.resolve import resolve
from headway.train.stages import changes_of_finished

MESSAGES = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def write(path: Path, records: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "a", "id": 3}, "text (text), 2 records"),
        (MESSAGES, "chat (messages), 2 records"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "chat (conversations), 2 records"),
        ({"instruction": "a", "input": "", "output": "b"}, "chat (instruction, output), 2 records"),
        ({"question": "a", "answer": "b", "source": "c"}, "chat (question, answer), 2 records"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "preference (prompt, chosen, rejected), 2 records",
        ),
        ({**MESSAGES, "chosen": "b", "rejected": "c"}, "preference (chosen, rejected), 2 records"),
    ],
)
def test_keys_that_are_known_decide(record: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [record, record])
    assert detect(path, SourceConfig(path=path)).describe() == said


def test_text_files_are_text_and_long_files_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    assert detect(str(tmp_path / "x.txt"), SourceConfig(path="x")).describe() == "text, 1 file"
    path = write(tmp_path / "x.jsonl", [{"text": "a"}] * (SAMPLE_RECORDS + 1))
    assert (
        detect(path, SourceConfig(path=path)).describe() == "text (text), more than 2,000 records"
    )


@pytest.mark.parametrize(
    ("records", "asked"),
    [
        (
            [{**MESSAGES, "text": "a"}],
            r"could be chat or text: its records have the keys messages, text\. Say which, e\.g\. \{path: .*kind: chat\}",
        ),
        (
            [{"text": "a"}, MESSAGES],
            r"holds records of different kinds: .*x\.jsonl:1 is text; .*x\.jsonl:2 is chat\.",
        ),
        (
            [{"id": "1", "content": "a text"}],
            r"the keys id, content do not say what the records are\. Text: name its key, e\.g\. .*text_key: content",
        ),
        ([{"prompt": "a"}], r"the keys prompt do not say"),
    ],
)
def test_what_is_not_clear_is_asked_for_in_one_line(
    records: list[dict[str, Any]], asked: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.jsonl", records)
    with pytest.raises(ConfigError, match=asked) as said:
        detect(path, SourceConfig(path=path))
    assert "\n" not in str(said.value)


def test_given_settings_leave_fewer_kinds(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [{**MESSAGES, "text": "a"}])
    assert detect(path, SourceConfig(path=path, split="line")).kind == "text"
    assert detect(path, SourceConfig(path=path, drop_bad=True)).kind == "chat"
    named = write(tmp_path / "named.jsonl", [{"content": "a"}])
    assert (
        detect(named, SourceConfig(path=named, text_key="content")).describe()
        == "text (content), 1 record"
    )
    odd = write(tmp_path / "odd.jsonl", [{"q": "a", "a": "b"}])
    assert detect(odd, SourceConfig(path=odd, keys={"prompt": "q", "response": "a"})).kind == "chat"
    with pytest.raises(ConfigError, match="text_key, which is for text, and drop_bad"):
        load(DataConfig, None, ["train={path: x, text_key: a, drop_bad: true}"])


def test_a_damaged_file_is_explained_by_its_reader(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{not json\n")
    with pytest.raises(DataError, match=r"x\.jsonl:1"):
        detect(str(tmp_path / "x.jsonl"), SourceConfig(path="x"))


def test_an_empty_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(DataError, match=r"data: .*x\.jsonl is empty"):
        detect(str(tmp_path / "x.jsonl"), SourceConfig(path="x"))


def test_a_resolved_recipe_states_what_was_detected(tmp_path: Path) -> None:
    """So that a resumed run is compared with what it trained on, also where an older version wrote `text` for every store."""
    train_bpe(["some text of some text"], vocab_size=262, out=tmp_path / "tokenizer")
    chat = write(tmp_path / "chat.jsonl", [MESSAGES])
    text = write(tmp_path / "text.jsonl", [{"text": "a"}])
    recipe = load(
        Recipe,
        None,
        [f"tokenizer={tmp_path}/tokenizer", f"data.train=[{chat}, {text}, {tmp_path}/missing]"],
    )
    sources = resolve(recipe).recipe.data.train
    assert sources is not None
    assert [source.kind for source in sources] == ["chat", "text", "text"]
    assert [source.chat_template for source in sources] == ["chatml", "chatml", "chatml"]


def test_the_tokenizers_own_template_is_used_where_it_has_one(tmp_path: Path) -> None:
    chat = write(tmp_path / "chat.jsonl", [MESSAGES])
    template = train_bpe(["some text of some text"], vocab_size=262, out=tmp_path / "tokenizer")
    with_template = type(template)(
        template.backend,
        template.roles,
        template.config,
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )

    def chosen(settings: str) -> str:
        sources = with_kinds(
            load(DataConfig, None, [f"train={{path: {chat}{settings}}}"]), with_template
        ).train
        assert sources is not None
        return sources[0].chat_template

    assert chosen("") == "tokenizer"
    assert chosen(", chat_template: alpaca") == "alpaca"
    assert chosen(", kind: chat") == "tokenizer", "a given kind chooses no other template"
    assert chosen(", chat_template: chatml") == "chatml"


def test_a_finished_stage_may_state_the_kind_or_leave_it_open(tmp_path: Path) -> None:
    text = write(tmp_path / "text.jsonl", [{"text": "a"}])
    stages = "stages=[{name: one}]"
    old = load(Recipe, None, [f"data.train=[{{path: {text}, kind: text}}]", stages])
    new = load(Recipe, None, [f"data.train=[{text}]", stages])
    assert changes_of_finished(old, new, 1) == []
    other = load(Recipe, None, [f"data.train=[{{path: {text}, limit: 3}}]", stages])
    assert len(changes_of_finished(old, other, 1)) == 1
