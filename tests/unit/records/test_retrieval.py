"""Generated documents: of a wanted length, always the same, and with answers that stand far back."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tokenizers
from support.byte_model import CONFIG, write_model
from support.chat_tokenizer import byte_tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from headway.data.config import DataConfig
from headway.errors import DataError
from headway.prepare.sources import prepare_sources
from headway.records.base import (
    DocumentSettings,
    EncodeContext,
    EncodedDocument,
    RecordFields,
    record_kind,
)
from headway.records.retrieval import WRITERS
from headway.store.reader import open_store
from headway.text.document import Record
from headway.tokenizer.chat import find_template
from headway.tokenizer.load import Tokenizer

TOKENIZER = byte_tokenizer()
KIND = record_kind("retrieval")


@functools.cache
def merging_tokenizer() -> Tokenizer:
    """Byte-level BPE whose tokens are words and parts of numbers, as published models have them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = [passage.text for task in WRITERS for passage in WRITERS[task](Random(5), 300)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(text, trainer)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"bos": "<s>", "eos": "</s>"})


TOKENIZERS = {"bytes": lambda: TOKENIZER, "merges": merging_tokenizer}


def documents_of(
    max_length: int | None = None, tokenizer: Tokenizer = TOKENIZER, **spec: Any
) -> list[EncodedDocument]:
    record = Record({"documents": 3, "tokens": 800, **spec}, "spec.jsonl", 1)
    context = EncodeContext(tokenizer, find_template("chatml", TOKENIZER), Counter())
    encoder = KIND.encoder(DocumentSettings(max_length))
    return encoder.documents(KIND.parse(record, RecordFields()), [], context)


@pytest.mark.parametrize("task", ["key_value", "needle"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_documents_fill_their_length_and_answers_alone_are_targets(kind: str, task: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    for document in documents_of(tokenizer=tokenizer, task=task, tokens=2400):
        assert 2100 <= len(document.ids) <= 2400
        text = tokenizer.decode(document.ids.tolist())
        characters = len(text) / len(document.ids)
        assert characters > 1.5 if kind == "merges" else characters < 1.01
        edges = np.flatnonzero(
            np.diff(np.concatenate([[False], document.mask, [False]]).astype(int))
        )
        answers = [
            tokenizer.decode(document.ids[begin:end].tolist()).strip(" .\n")
            for begin, end in edges.reshape(-1, 2)
        ]
        assert len(answers) >= 1
        for answer, begin in zip(answers, edges[::2], strict=True):
            told = tokenizer.decode(document.ids[:begin].tolist())
            assert answer in told, "what is asked for was told before"
        assert all(answer.isdigit() for answer in answers)
        assert text.endswith("</s>")


def test_the_same_record_gives_the_same_documents_and_another_seed_others() -> None:
    first, again, other = (documents_of(seed=seed) for seed in (1, 1, 2))
    assert all(
        np.array_equal(a.ids, b.ids) and np.array_equal(a.mask, b.mask)
        for a, b in zip(first, again, strict=True)
    )
    texts = {a.ids.tobytes() for a in [*first, *other]}
    assert len(texts) == 6


def test_a_document_is_never_longer_than_a_row() -> None:
    assert all(300 < len(document.ids) <= 400 for document in documents_of(max_length=400))
    with pytest.raises(DataError, match="the shortest document of task needle has more than 79"):
        documents_of(max_length=80, task="needle")


def test_everything_may_carry_loss() -> None:
    assert all(document.mask.all() for document in documents_of(targets="all"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tokens": 100}, "spec.jsonl:4: documents"),
        ({"documents": 2, "tokens": 100, "task": "poem"}, 'task is "poem"'),
        ({"documents": 2, "tokens": 100, "words": 3}, "words"),
        ({"documents": 1 << 20, "tokens": 4096}, "Divide them into several records"),
    ],
)
def test_a_wrong_record_is_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        KIND.parse(Record(data, "spec.jsonl", 4), RecordFields())
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("spec.jsonl:4: ")


def test_a_recipe_mixes_generated_documents_with_others(tmp_path: Path) -> None:
    write_model(tmp_path / "model", CONFIG.with_(max_seq_len=512))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "a plain text " * 40}) + "\n")
    (tmp_path / "far.jsonl").write_text(
        json.dumps({"documents": 5, "tokens": 400})
        + "\n"
        + json.dumps({"documents": 4, "tokens": 400, "task": "needle", "seed": 3})
        + "\n"
    )
    config = DataConfig.model_validate(
        {
            "train": (
                {"path": str(tmp_path / "texts.jsonl"), "weight": 0.5},
                {"path": str(tmp_path / "far.jsonl"), "kind": "retrieval", "weight": 0.5},
            ),
            "seq_len": 512,
            "cache_dir": tmp_path / "cache",
        }
    )
    stores = prepare_sources(
        config, tmp_path / "model" / "tokenizer", reads=("text", "chat"), workers=1
    )
    generated = open_store(stores.train[1].path)
    assert generated.num_documents == 9
    # found again by its record and its tokenizer
    again = prepare_sources(
        config, tmp_path / "model" / "tokenizer", reads=("text", "chat"), workers=1
    )
    assert again.train[1].path == stores.train[1].path


def test_a_run_trains_on_them_with_a_tokenizer_that_has_a_chat_template(tmp_path: Path) -> None:
    from support.byte_model import byte_tokenizer as tokenizer_of_bytes

    from headway.config.load import load
    from headway.train import train
    from headway.train.config import Recipe

    tokenizer_of_bytes("<|im_start|>", "<|im_end|>").save(tmp_path / "tokenizer")
    (tmp_path / "far.jsonl").write_text(json.dumps({"documents": 20, "tokens": 200}))
    recipe = load(
        Recipe,
        None,
        [
            *(f"model.{name}=16" for name in ("hidden_size", "ffn_size")),
            *(f"model.{name}=1" for name in ("num_layers", "num_heads", "num_kv_heads")),
            f"tokenizer={tmp_path}/tokenizer",
            f"data.train=[{{path: {tmp_path}/far.jsonl, kind: retrieval}}]",
            f"data.cache_dir={tmp_path}/cache",
            "data.seq_len=200",
            "data.valid.fraction=0.1",
            "batch.rows=2",
            "steps=2",
            "device=cpu",
            f"run.dir={tmp_path}/runs",
        ],
    )
    assert train(recipe)["steps"] == 2
