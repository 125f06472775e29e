"""Stores of conversations with media: one process and several write the same bytes and errors; `data prepare` makes them ahead."""

import json
import shutil
from pathlib import Path

import pytest
from support.fuzzing import run_verb

from headway.errors import DataError
from headway.media.synthetic import SyntheticMedia, write_media
from headway.prepare import multimodal
from headway.prepare.multimodal import MediaBuild, media_store
from headway.records.encode_media import MediaPositions
from headway.tokenizer.train import train_bpe

BUILD = MediaBuild(MediaPositions({"image": 2, "audio": 3}, missing=True), max_length=40)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multimodal, "CHUNK_RECORDS", 5)
    source = shutil.copytree(made, tmp_path / "set") / "chat.jsonl"
    one, two = (
        media_store(str(source), made / "tok", BUILD, tmp_path / f"cache{count}", count)
        for count in (1, 2)
    )
    assert one.name == two.name and bytes_of(one) == bytes_of(two) and len(bytes_of(one)) >= 3


@pytest.mark.drill
def test_several_processes_report_the_bad_record_that_one_reports(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multimodal, "CHUNK_RECORDS", 5)
    source = shutil.copytree(made, tmp_path / "set") / "chat.jsonl"
    lines = source.read_text().splitlines()
    for number in (7, 12):
        lines[number] = json.dumps({**json.loads(lines[number]), "images": ["gone.png"]})
    source.write_text("\n".join(lines) + "\n")
    said: list[str] = []
    for count in (1, 2):
        with pytest.raises(DataError) as problem:
            media_store(str(source), made / "tok", BUILD, tmp_path / f"bad{count}", count)
        said.append(str(problem.value))
    assert said[0] == said[1] and f"{source}:8" in said[0]


def test_data_prepare_makes_what_training_then_finds(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        f"tokenizer: {made}/tok\ndata: {{train: [{{path: {tmp_path}/chat.jsonl, kind: chat}}], seq_len: 32, cache_dir: {tmp_path}/cache}}\n"
        "model: {hidden_size: 16, num_layers: 1, num_heads: 2, ffn_size: 16}\ndevice: cpu\n"
    )
    assert run_verb(["data", "prepare", str(recipe), "--workers", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sources"]
    assert [(one["set"], one["documents"]) for one in found] == [("train", 8)] and found[0][
        "tokens"
    ] > 16
    assert (tmp_path / "cache/stores").is_dir()
    assert run_verb(["data", "prepare", str(recipe), "data.train=null"]) == 2
    given = [
        "--input",
        str(tmp_path / "chat.jsonl"),
        "--tokenizer",
        "t",
        "--out",
        str(tmp_path / "o"),
    ]
    assert run_verb(["data", "tokenize", "--kind", "multimodal", *given]) == 2
    assert "headway data prepare RECIPE --workers N" in capsys.readouterr().err
