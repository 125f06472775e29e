"""Kinds of records: what stores, reports and recipes of earlier versions rely on, and what every kind answers."""

import json
from collections import Counter
from pathlib import Path

import pytest
from support.chat_tokenizer import byte_tokenizer

from headway.errors import ConfigError
from headway.records import KINDS
from headway.records.base import (
    DocumentSettings,
    EncodeContext,
    RecordFields,
    check_tokenized,
    record_kind,
    tokenized_kinds,
    validated_kinds,
)
from headway.text.document import Record
from headway.tokenizer.chat import Rendered, encode_segments, find_template

RECORDS = {
    "chat": {"instruction": "say one", "output": "one"},
    "preference": {"prompt": "say one", "chosen": "one", "rejected": "two, and more"},
    "unpaired": {"prompt": "say one", "completion": "two", "label": False},
}
NEXT_TOKEN = ("text", "chat")
PAIRS = ("preference",)
LABELS = ("unpaired", "preference")


def test_marks_and_names_in_reports_never_change() -> None:
    facts = {
        name: (kind.mark, kind.unit, kind.counted, kind.documents, kind.least_length)
        for name in KINDS
        if (kind := record_kind(name)).has_tokens
    }
    assert facts == {
        "text": (None, "documents", "documents", 1, 2),
        "chat": ("kind=chat", "conversations", "documents", 1, 2),
        "preference": ("kind=preference", "pairs", "pairs", 2, 4),
        "unpaired": ("kind=unpaired", "labelled answers", "answers", 1, 4),
        "multimodal": ("kind=chat", "conversations", "documents", 1, 2),
        "retrieval": (None, "generated documents", "documents", 1, 2),
    }
    texts = ["text", "chat", "preference", "unpaired"]
    assert tokenized_kinds() == [*texts, "retrieval"]
    assert validated_kinds() == [*texts, "multimodal", "prompt", "retrieval"]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_becomes_an_example_parts_and_documents(name: str) -> None:
    kind = record_kind(name)
    example = kind.parse(Record(RECORDS[name], "file", 1), RecordFields())
    shown = kind.show(example)
    assert len(shown) == kind.documents
    assert example.unread == ()
    for document in shown:
        assert [(part.speaker, part.is_learned) for part in document] == [
            ("user", False),
            ("assistant", True),
        ]
    tokenizer = byte_tokenizer()
    template = find_template("chatml", tokenizer)
    rendered = encode_segments(kind.segments(example, template), template.name, tokenizer)
    context = EncodeContext(tokenizer, template, Counter())
    documents = kind.encoder(DocumentSettings()).documents(
        example, [part for part in rendered if isinstance(part, Rendered)], context
    )
    learned = [tokenizer.decode(document.ids[document.mask].tolist()) for document in documents]
    assert learned == [f"{document[-1].text}<|im_end|>" for document in shown]
    assert [document.type for document in documents] == (
        ["undesirable"] if kind.is_typed else [""] * kind.documents
    )


@pytest.mark.parametrize(
    ("name", "packing", "reads", "longest"),
    [
        ("text", "best_fit", NEXT_TOKEN, None),
        ("chat", "best_fit", NEXT_TOKEN, 64),
        ("chat", "concat", NEXT_TOKEN, None),
        ("preference", "best_fit", PAIRS, 32),
        ("preference", "best_fit", LABELS, 64),
        ("preference", "best_fit", (), 32),
        ("unpaired", "best_fit", LABELS, 64),
        ("unpaired", "pad", PAIRS, 64),
        ("multimodal", "pad", NEXT_TOKEN, 64),
    ],
)
def test_the_share_of_a_row_depends_on_what_the_task_reads(
    name: str, packing: str, reads: tuple[str, ...], longest: int | None
) -> None:
    assert record_kind(name).max_length(64, packing, reads) == longest


@pytest.mark.parametrize("name", ["chatt", "multimodal"])
def test_unknown_kinds_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="must be one of text, chat, preference, unpaired"):
        check_tokenized(name)


def test_a_kind_in_a_module_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no module of that name"):
        record_kind("no_lab.kind")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("Kind = 3\n", "has no class Kind derived from"),
        ("from headway.records.text import Kind\n", "derives from a kind of text or media"),
    ],
)
def test_a_file_without_a_kind_of_its_own_is_refused(
    tmp_path: Path, source: str, message: str
) -> None:
    file = tmp_path / "kind.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=message):
        record_kind(str(file))


def test_a_kind_without_an_encoder_is_refused_when_it_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "kind.py"
    file.write_text("from headway.records.base import RecordKind\nclass Kind(RecordKind): pass\n")
    kind = record_kind(str(file))
    with pytest.raises(ConfigError, match="its class Kind has no method encoder"):
        kind.encoder(DocumentSettings())


def test_every_kind_can_be_sent_to_other_processes() -> None:
    import pickle

    for name in KINDS:
        kind = pickle.loads(pickle.dumps(record_kind(name)))
        assert kind.name == name
        assert json.dumps(kind.settings)
