"""Opening what a recipe names: stores, generated data, raw files built once; what cannot work is one line before any work."""

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config.load import validate
from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.open import OpenData
from headway.data.open import open_data as open_stores
from headway.errors import ConfigError, DataError
from headway.prepare.build import cached_store
from headway.prepare.cache import find_or_build
from headway.prepare.sources import prepare_sources
from headway.store.file_lock import file_lock
from headway.store.local_copy import copy_to_local
from headway.store.reader import is_store, open_store
from headway.store.writer import StoreWriter
from headway.tokenizer.load import Tokenizer, load_tokenizer


def make_tokenizer(folder: Path, words: int = 90) -> Path:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {"<|end|>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(words)}}, "<unk>"
        )
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    Tokenizer(tokenizer, {"eos": "<|end|>"}).save(folder)
    return folder


def make_store(folder: Path, fingerprint: str | None, documents: int = 40) -> Path:
    with StoreWriter(folder, dtype="uint16", tokenizer_fingerprint=fingerprint) as writer:
        for i in range(documents):
            writer.add(np.arange(i % 30 + 1) + 2)
        writer.finish()
    return folder


def data(**settings: Any) -> DataConfig:
    return validate(DataConfig, {"seq_len": 16, "workers": 0, **settings})


def open_data(
    config: DataConfig, *, tokenizer: Path | None, vocab_size: int, seed: int
) -> OpenData:
    return open_stores(
        config,
        prepare_sources(config, tokenizer),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        seed=seed,
    )


def test_generated_data_needs_nothing() -> None:
    opened = open_data(data(valid={"fraction": 0.01}), tokenizer=None, vocab_size=64, seed=1)
    assert opened.names == ["generated data"]
    assert list(opened.valid) == ["valid"]
    step, _ = next(Loader(data(), sources=opened.train, rows_per_step=4, micro_rows=2, seed=1))
    assert step.microbatches[0].tokens.max() < 64
    valid = Loader(
        data(),
        sources=opened.valid["valid"],
        rows_per_step=4,
        micro_rows=2,
        seed=1,
        shuffle=False,
        epochs=1,
    )
    assert next(valid)[0].totals["rows"] == 4


def test_a_fraction_splits_and_sets_stand_alone(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "t")
    store = str(make_store(tmp_path / "s", load_tokenizer(tokenizer).fingerprint))
    opened = open_data(
        data(train=[store], valid={"fraction": 0.2}), tokenizer=tokenizer, vocab_size=128, seed=1
    )
    documents = [
        mixed[0].selection.pick(0, 40)[0].tolist()
        for mixed in (opened.train, opened.valid["valid"])
    ]
    assert sorted(documents[0] + documents[1]) == list(range(40))
    assert all(documents)
    sets = {"wiki": store, "code": [{"path": store, "limit": 3}]}
    opened = open_data(
        data(train=f"{store}#2", valid={"sets": sets}), tokenizer=tokenizer, vocab_size=128, seed=1
    )
    assert opened.train[0].repeat == 2
    assert opened.train[0].selection.side is None
    assert {name: mixed[0].selection.num_documents for name, mixed in opened.valid.items()} == {
        "wiki": 40,
        "code": 3,
    }


@pytest.mark.parametrize(
    ("fingerprint", "vocab_size", "unchecked", "said"),
    [
        ("other", 128, False, "made by another tokenizer"),
        ("other", 128, True, "made by another tokenizer"),
        (None, 128, False, "tokenizer_unchecked: true"),
        (None, 31, True, r"holds id 31; the model's vocabulary has 31 ids"),
        ("mine", 31, False, r"holds id 31; the model's vocabulary has 31 ids"),
    ],
)
def test_ids_the_model_cannot_know_are_refused(
    tmp_path: Path, fingerprint, vocab_size: int, unchecked: bool, said: str
) -> None:
    tokenizer = make_tokenizer(tmp_path / "t")
    store_fingerprint = (
        load_tokenizer(tokenizer).fingerprint if fingerprint == "mine" else fingerprint
    )
    store = make_store(tmp_path / "s", store_fingerprint)
    with pytest.raises(DataError, match=said) as caught:
        open_data(
            data(train=[str(store)], tokenizer_unchecked=unchecked),
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            seed=1,
        )
    assert "\n" not in str(caught.value)


def test_a_store_without_a_fingerprint_is_read_when_the_recipe_says_so(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", None)
    opened = open_data(
        data(train=[str(store)], tokenizer_unchecked=True), tokenizer=None, vocab_size=32, seed=1
    )
    assert opened.train[0].selection.num_documents == 40


def test_what_is_not_there_or_half_written_is_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "half", dtype="uint16", tokenizer_fingerprint=None) as writer:
        writer.add_many(np.arange(9), np.array([4, 5]))
        writer.commit()
    for path, said in (
        ("half", "unfinished"),
        ("absent", "no such file"),
        ("text.txt", "needs a tokenizer"),
    ):
        (tmp_path / "text.txt").write_text("w1 w2")
        with pytest.raises((DataError, ConfigError), match=said):
            open_data(data(train=[str(tmp_path / path)]), tokenizer=None, vocab_size=100, seed=1)


def test_raw_files_are_built_once_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(tmp_path / "t")
    cache_dir = tmp_path / "cache"
    text = tmp_path / "text.txt"
    text.write_text("w1 w2\nw3\n")
    settings = data(train=[{"path": str(text), "split": "line"}], cache_dir=str(cache_dir))
    opened = open_data(settings, tokenizer=tokenizer, vocab_size=128, seed=1)
    assert [opened.train[0].selection.source.lengths(0, 2).tolist()] == [[3, 2]]
    first = cached_store([text], tokenizer, cache_dir)
    monkeypatch.setattr("headway.prepare.build.run_job", None)
    assert cached_store([text], tokenizer, cache_dir) == first
    monkeypatch.undo()
    text.write_text("w1 w2\nw4\n")
    assert cached_store([text], tokenizer, cache_dir) != first
    assert cached_store([text], make_tokenizer(tmp_path / "t2", 80), cache_dir) not in (
        first,
        cached_store([text], tokenizer, cache_dir),
    )
    os.utime(text, ns=(5, 5))
    shutil.copy(text, tmp_path / "copy")
    assert len(list((cache_dir / "stores").iterdir())) == 4


def test_raw_conversations_learn_the_answers_alone(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "t")
    talk = tmp_path / "talk.jsonl"
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    talk.write_text(json.dumps({"messages": turns}) + "\n")
    source_settings = {"path": str(talk), "kind": "chat", "chat_template": "alpaca"}
    settings = data(train=[source_settings], cache_dir=str(tmp_path / "cache"), seq_len=256)
    opened = open_data(settings, tokenizer=tokenizer, vocab_size=128, seed=1)
    source = opened.train[0].selection.source
    mask = source.mask(0, 0, int(source.lengths(0, 1)[0]))
    assert source.masked
    assert mask is not None
    assert 0 < mask.sum() < len(mask)
    assert source.name == str(talk), (
        "people know it by the file they gave, not by its place in the cache"
    )


def test_a_kind_is_refused_for_data_that_is_tokenized(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "t")
    store = str(make_store(tmp_path / "s", None))
    settings = data(train=[{"path": store, "kind": "chat"}])
    with pytest.raises(ConfigError, match="kind is for raw files"):
        open_data(settings, tokenizer=tokenizer, vocab_size=128, seed=1)


def test_a_kind_of_records_and_a_key_of_text_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="kind=chat and text_key=body"):
        data(train=[{"path": "s", "kind": "chat", "text_key": "body"}])


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "w1"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=":2"):
        cached_store([text], make_tokenizer(tmp_path / "t"), tmp_path / "cache")
    assert not any((tmp_path / "cache" / "stores").iterdir())


def build_slowly(cache_dir: Path, file: Path, log: Path) -> None:
    def build(out: Path) -> None:
        with open(log, "a") as lines:
            lines.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        make_store(out, None)

    assert is_store(find_or_build([file], "", build, cache_dir))


def test_one_process_builds_while_others_wait(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("x")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=build_slowly, args=(tmp_path / "cache", file, tmp_path / "log"))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len((tmp_path / "log").read_text().split()) == 1


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    lock.touch()
    with file_lock(lock, until=lambda: False, stale_seconds=0.3) as mine:
        assert mine
        assert lock.exists()
    assert not lock.exists()
    with file_lock(lock, until=lambda: True) as mine:
        assert not mine


def test_staging_copies_once_and_checks(tmp_path: Path) -> None:
    store = make_store(tmp_path / "slow" / "s", None)
    copy = copy_to_local(store, tmp_path / "fast")
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
        p.name: p.read_bytes() for p in store.iterdir()
    }
    before = (copy / "store.json").stat().st_mtime_ns
    settings = data(train=[str(store)], tokenizer_unchecked=True, stage_to=str(tmp_path / "fast"))
    opened = open_data(settings, tokenizer=None, vocab_size=100, seed=1)
    assert opened.names == [str(copy)]
    assert (copy / "store.json").stat().st_mtime_ns == before
    ids = bytearray((store / "tokens-00000.bin").read_bytes())
    ids[3] ^= 1
    (store / "tokens-00000.bin").write_bytes(bytes(ids))
    with pytest.raises(DataError, match="checksum"):
        copy_to_local(store, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_foreign_stores_are_read_in_place(tmp_path: Path) -> None:
    from headway.store.convert import convert

    convert(make_store(tmp_path / "s", None), tmp_path / "mds", "mds")
    opened = open_data(
        data(train=[str(tmp_path / "mds")], tokenizer_unchecked=True),
        tokenizer=None,
        vocab_size=100,
        seed=1,
    )
    seen: list[int] = []
    for step, _ in Loader(
        data(), sources=opened.train, rows_per_step=4, micro_rows=4, seed=1, epochs=1
    ):
        tokens = step.microbatches[0].tokens
        seen += tokens[tokens > 0].tolist()
    store = open_store(tmp_path / "s")
    assert sorted(seen) == sorted(t for i in range(40) for t in store.document(i).tolist())
    with pytest.raises(ConfigError, match="headway data convert"):
        open_data(
            data(train=[str(tmp_path / "mds")], stage_to=str(tmp_path / "f")),
            tokenizer=None,
            vocab_size=100,
            seed=1,
        )


def test_settings_with_mistakes_say_key_value_and_remedy() -> None:
    for settings, said in (
        ({"train": ["a@0.3", "b"]}, "train.1 has no weight"),
        ({"train": [{"path": "a#2", "weight": 1}]}, "weight=1 and repeat=2"),
        ({"skip_batches": "5-3"}, "ascending numbers and ranges"),
        ({"valid": {}}, "needs either fraction"),
        ({"valid": {"fraction": 1.0}}, "less than 1"),
        ({"max_documents": 1}, "at least 2"),
        ({"train": []}, "at least one source"),
        ({"window_tokens": 3}, "at least seq_len=16"),
    ):
        with pytest.raises(ConfigError) as caught:
            data(**settings)
        assert said in str(caught.value), json.dumps(settings)
