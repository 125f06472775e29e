"""Stores of conversations with media: one process and several write the same bytes and errors; `data prepare` makes them ahead."""

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.fuzzing import run_verb
from support.media_reads import count_media_reads

from headway.errors import DataError
from headway.media.items import ImageSpec
from headway.media.synthetic import SyntheticMedia, write_media
from headway.prepare.build import BuildOptions, cached_store
from headway.prepare.features import InputRows, prepare_samples, read_samples
from headway.prepare.media_inputs import ImageInput
from headway.records.encode_media import MediaPositions
from headway.records.multimodal import RECORD_BYTES
from headway.tokenizer.train import train_bpe

OPTIONS = BuildOptions(
    "multimodal",
    max_length=40,
    positions=MediaPositions({"image": 2, "audio": 3}, missing=True),
)


def media_store(source: Path, tokenizer: Path, cache: Path, workers: int | None = None) -> Path:
    return cached_store([str(source)], tokenizer, cache, replace(OPTIONS, workers=workers))


@pytest.fixture(scope="module")
def media_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_media(
        folder, SyntheticMedia(samples=10, heldout=0, image_size=16, seconds=0.1, missing=0.2)
    )
    train_bpe(
        ["What colour is the shape? red green low tone"] * 9, vocab_size=285, out=folder / "tok"
    )
    return folder


def bytes_of(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir()}


def test_several_processes_write_the_bytes_of_one(
    media_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.prepare.workers.CHUNK_BYTES", 5 * RECORD_BYTES)
    source = shutil.copytree(media_set, tmp_path / "set") / "chat.jsonl"
    alone = media_store(source, media_set / "tok", tmp_path / "cache1", 1)
    by_two = media_store(source, media_set / "tok", tmp_path / "cache2", 2)
    assert alone.name == by_two.name
    assert bytes_of(alone) == bytes_of(by_two)
    assert len(bytes_of(alone)) >= 3


@pytest.mark.drill
def test_several_processes_report_the_bad_record_that_one_reports(
    media_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.prepare.workers.CHUNK_BYTES", 5 * RECORD_BYTES)
    source = shutil.copytree(media_set, tmp_path / "set") / "chat.jsonl"
    lines = source.read_text().splitlines()
    for number in (7, 12):
        lines[number] = json.dumps({**json.loads(lines[number]), "images": ["gone.png"]})
    source.write_text("\n".join(lines) + "\n")
    said: list[str] = []
    for count in (1, 2):
        with pytest.raises(DataError) as problem:
            media_store(source, media_set / "tok", tmp_path / f"bad{count}", count)
        said.append(str(problem.value))
    assert said[0] == said[1]
    assert f"{source}:8" in said[0]


def test_data_prepare_makes_what_training_then_finds(
    media_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = {
        "messages": [
            {"role": "user", "content": "What colour?"},
            {"role": "assistant", "content": "red"},
        ]
    }
    (tmp_path / "chat.jsonl").write_text((json.dumps(conversation) + "\n") * 8)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"tokenizer: {media_set}/tok\ndata: {{train: [{{path: {tmp_path}/chat.jsonl, kind: chat}}], seq_len: 32, cache_dir: {tmp_path}/cache}}\n"
        "model: {hidden_size: 16, num_layers: 1, num_heads: 2, ffn_size: 16}\ndevice: cpu\n"
    )
    assert run_verb(["data", "prepare", str(recipe), "--workers", "1", "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert [(source_report["set"], source_report["documents"]) for source_report in sources] == [
        ("train", 8)
    ]
    assert sources[0]["tokens"] > 16
    assert (tmp_path / "cache/stores").is_dir()
    assert run_verb(["data", "prepare", str(recipe), "data.train=null"]) == 2
    arguments = [
        "--input",
        str(tmp_path / "chat.jsonl"),
        "--tokenizer",
        "t",
        "--out",
        str(tmp_path / "o"),
    ]
    assert run_verb(["data", "tokenize", "--kind", "multimodal", *arguments]) == 2
    assert "headway data prepare RECIPE --workers N" in capsys.readouterr().err


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_media_reads(monkeypatch)


def test_a_known_store_is_found_without_a_look_at_records_or_media(
    media_set: Path, tmp_path: Path, looked: Counter[str]
) -> None:
    source = shutil.copytree(media_set, tmp_path / "set") / "chat.jsonl"
    store = media_store(source, media_set / "tok", tmp_path / "cache")
    assert looked["parsed"] > 0
    assert looked["looked at"] > 0
    looked.clear()
    assert media_store(source, media_set / "tok", tmp_path / "cache") == store
    assert looked["parsed"] == 0
    assert looked["looked at"] == 0
    # Other settings are other stores, and `data prepare` looks at every file.
    other = replace(OPTIONS, max_length=41)
    assert cached_store([str(source)], media_set / "tok", tmp_path / "cache", other) != store
    looked.clear()
    assert cached_store([source], media_set / "tok", tmp_path / "cache", OPTIONS, True) == store
    assert looked["parsed"] > 0
    assert looked["looked at"] > 0


def test_replaced_pictures_and_changed_records_are_noticed(media_set: Path, tmp_path: Path) -> None:
    source = shutil.copytree(media_set, tmp_path / "set") / "chat.jsonl"
    cache = tmp_path / "cache"
    store = media_store(source, media_set / "tok", cache)
    first, second, *_ = sorted((tmp_path / "set").rglob("*.png"))
    shutil.copy(second, tmp_path / "new.png")
    os.replace(tmp_path / "new.png", first)
    replaced = media_store(source, media_set / "tok", cache)
    assert replaced != store
    assert bytes_of(replaced)["media.sealed"] != bytes_of(store)["media.sealed"]
    source.write_text("".join(source.read_text().splitlines(keepends=True)[1:]))
    assert media_store(source, media_set / "tok", cache) not in (store, replaced)


def test_a_note_that_cannot_be_written_is_left_out(
    media_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(media_set, tmp_path / "set") / "chat.jsonl"
    store = media_store(source, media_set / "tok", tmp_path / "cache")
    (note,) = (tmp_path / "cache/stores").glob("known-*")
    note.write_bytes(b"damaged")

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError("a read-only disk")

    monkeypatch.setattr("headway.prepare.media_notes.write_sealed", refuse)
    assert media_store(source, media_set / "tok", tmp_path / "cache") == store
    assert note.read_bytes() == b"damaged"


def test_known_samples_are_found_without_a_look_at_records_or_media(
    media_set: Path, tmp_path: Path, looked: Counter[str]
) -> None:
    source = shutil.copytree(media_set, tmp_path / "set") / "captions.jsonl"
    makers = [InputRows("image", ImageInput(ImageSpec(8, 8)))]

    def prepared() -> tuple[list[list[int]], str, tuple[str, ...]]:
        samples = read_samples(str(source), ("image",))
        prepared_samples = prepare_samples(
            "set", samples, makers, tmp_path / "cache", files=[source]
        )
        return prepared_samples.rows.tolist(), prepared_samples.content_key, prepared_samples.places

    first = prepared()
    assert looked["parsed"] > 0
    assert looked["looked at"] > 0
    looked.clear()
    assert prepared() == first
    assert looked["parsed"] == 0
    assert looked["looked at"] == 0
    for table in (tmp_path / "cache/media").glob("*/*/"):
        shutil.rmtree(table)
    assert prepared() == first and looked["parsed"] > 0, "a table that is gone is made again"
