"""Labelled answers in every shape that TRL, LLaMA-Factory and axolotl read; through detection, validation and a store, in one process and
by tasks; and one line for every wrong record."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import byte_tokenizer
from support.one_process_executor import run_inside

from headway.data.config import SourceConfig
from headway.errors import DataError
from headway.prepare.build import BuildOptions, build_store
from headway.prepare.detect import detect
from headway.prepare.validate import ValidateOptions, validate
from headway.records.unpaired import parse_unpaired
from headway.runtime.executor.work import Placement
from headway.store.reader import Store, open_store
from headway.tasks.kto.source import BAD, GOOD, UnpairedSource
from headway.text.document import Record
from headway.text.record_keys import KeyMap
from headway.tokenizer.load import load_tokenizer

USER = {"role": "user", "content": "Why?"}
GOOD_ANSWER = {"role": "assistant", "content": "Because."}
SHAPES: dict[str, dict[str, Any]] = {
    "trl text": {"prompt": "Why?", "completion": "Because.", "label": True},
    "trl messages": {"prompt": [USER], "completion": [GOOD_ANSWER], "label": True},
    "llamafactory": {"instruction": "Why?", "input": "", "output": "Because.", "kto_tag": True},
    "llamafactory messages": {"messages": [USER, GOOD_ANSWER], "label": True},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}],
        "kto_tag": True,
    },
    "axolotl argilla_chat": {"completion": [USER, GOOD_ANSWER], "label": True},
    "prompt messages, answer text": {"messages": [USER], "response": "Because.", "label": 1},
    "a word for the label": {"question": "Why?", "answer": "Because.", "label": "True"},
}


def record(data: dict[str, Any]) -> Record:
    return Record(data, "r.jsonl", 7)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_and_a_labelled_answer_are_found(shape: str) -> None:
    answer = parse_unpaired(record(SHAPES[shape]))
    assert [(turn.role, turn.content) for turn in answer.prompt] == [("user", "Why?")]
    assert [(turn.role, turn.content) for turn in answer.answer] == [("assistant", "Because.")]
    assert answer.is_good
    assert not answer.unread


def test_the_last_answer_of_a_dialogue_is_labelled_with_its_tools_and_system_prompt() -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    turns = [
        USER,
        GOOD_ANSWER,
        {"role": "user", "content": "How?"},
        call,
        {"role": "tool", "content": "4"},
        GOOD_ANSWER,
    ]
    answer = parse_unpaired(
        record({"messages": turns, "label": False, "system": "Be brief.", "id": 3})
    )
    assert [turn.role for turn in answer.prompt] == ["system", "user", "assistant", "user"]
    assert [turn.role for turn in answer.answer] == ["assistant", "tool", "assistant"]
    assert not answer.is_good
    assert answer.unread == ("id",)


def test_keys_that_the_user_names_are_read() -> None:
    keys = KeyMap.of({"prompt": "q", "response": "a", "label": "thumbs"})
    assert not parse_unpaired(record({"q": "Why?", "a": "No.", "thumbs": False}), keys).is_good


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"label": None},
            "r.jsonl:7: no label; its keys are prompt, completion, label. Expected prompt, completion and label",
        ),
        (
            {"label": "maybe"},
            "r.jsonl:7: label is 'maybe'; it must be true (a good answer) or false (a bad one).",
        ),
        ({"label": 0.5}, "label is '0.5'"),
        ({"completion": None}, "no answer; its keys are"),
        ({"completion": "  "}, "turn 1 (assistant) is empty"),
        ({"prompt": None}, "the answer has no prompt"),
        ({"prompt": [USER, GOOD_ANSWER]}, "the prompt ends with the assistant"),
        ({"completion": [USER]}, "must be an answer of the assistant"),
        ({"chosen": "x"}, "chosen"),
    ],
)
def test_a_wrong_record_is_one_line_with_its_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_unpaired(record(SHAPES["trl text"] | change))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("r.jsonl:7: ")


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_label_decides_the_kind_for_kto_alone(tmp_path: Path) -> None:
    path = str(write(tmp_path / "r.jsonl", [SHAPES["trl text"]]))
    assert (
        detect(path, SourceConfig(path=path), reads=("unpaired", "preference")).describe()
        == "unpaired (prompt, completion, label), 1 record"
    )
    assert detect(path, SourceConfig(path=path)).kind == "chat"
    pairs = str(
        write(
            tmp_path / "p.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c", "label": True}]
        )
    )
    assert (
        detect(pairs, SourceConfig(path=pairs), reads=("unpaired", "preference")).kind
        == "preference"
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(folder)
    return folder


def labels(store: Store) -> list[str]:
    return [store.type_of(document) for document in range(store.num_documents)]


RECORDS = [
    {"prompt": f"Question {n}?", "completion": "yes" * (n + 1), "label": n % 3 == 0}
    for n in range(7)
]


@pytest.fixture
def file_with_a_bad_label(tmp_path: Path) -> Path:
    """`RECORDS`, and one without a readable label on line 5."""
    bad = {"prompt": "?", "completion": "!", "label": "no idea"}
    return write(tmp_path / "r.jsonl", [*RECORDS[:4], bad, *RECORDS[4:]])


DROPPING = BuildOptions("unpaired", max_length=48, drop_bad=True)


def test_a_label_that_cannot_be_read_is_refused_with_its_line(
    tmp_path: Path, tokenizer: Path, file_with_a_bad_label: Path
) -> None:
    with pytest.raises(DataError, match=r"r.jsonl:5: label is 'no idea'"):
        build_store(
            [file_with_a_bad_label], tokenizer, tmp_path / "refused", BuildOptions("unpaired")
        )


def test_a_build_counts_labels_and_dropped_records(
    tmp_path: Path, tokenizer: Path, file_with_a_bad_label: Path
) -> None:
    report = build_store([file_with_a_bad_label], tokenizer, tmp_path / "store", DROPPING)
    assert report.fields()["train_answers"] == 7
    assert report.fields()[GOOD] == 3
    assert report.fields()["bad"] == 1
    assert "7 labelled answers of 8 records" in report.describe()
    assert "3 desirable, 4 undesirable" in report.describe()


def test_a_store_holds_documents_with_labels_and_the_answer_as_target(
    tmp_path: Path, tokenizer: Path, file_with_a_bad_label: Path
) -> None:
    build_store([file_with_a_bad_label], tokenizer, tmp_path / "store", DROPPING)
    store = open_store(tmp_path / "store")
    assert labels(store) == [GOOD, BAD, BAD, GOOD, BAD, BAD, GOOD]
    assert int(store.lengths(0, 7).max()) <= 48
    assert UnpairedSource(store, 48).count_good() == 3
    mask = store.document_mask(0)
    assert mask is not None
    targets = store.document(0)[mask].tolist()
    assert byte_tokenizer("<|im_start|>", "<|im_end|>").decode(targets) == "yes<|im_end|>"


def test_tasks_write_the_store_of_labelled_answers_that_one_process_writes(
    tmp_path: Path,
    tokenizer: Path,
    file_with_a_bad_label: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = run_inside(monkeypatch)
    build_store([file_with_a_bad_label], tokenizer, tmp_path / "store", DROPPING)
    by_tasks = replace(DROPPING, placement=Placement(task_bytes=100))
    build_store([file_with_a_bad_label], tokenizer, tmp_path / "tasks", by_tasks)
    assert len(executor.ran) > 2
    for file in sorted((tmp_path / "store").glob("*-*.bin")):
        assert (tmp_path / "tasks" / file.name).read_bytes() == file.read_bytes(), file.name


def test_validation_lists_every_wrong_record(tmp_path: Path, tokenizer: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        [
            SHAPES["trl text"],
            {"prompt": "a", "completion": "b"},
            SHAPES["llamafactory"] | {"kto_tag": 3},
        ],
    )
    for how in ((None, None), (load_tokenizer(tokenizer), None), (None, "chatml")):
        report = validate([path], ValidateOptions("unpaired", *how))
        assert report.good == 1
        assert [bad_record.place.rpartition(":")[2] for bad_record in report.bad] == ["2", "3"]
