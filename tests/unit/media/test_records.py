"""Every shape of multimodal record gives the same media and texts; what does not agree is an error with file and line."""

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.errors import DataError
from headway.media.png import write_png
from headway.media.records import MediaOptions, MediaRecord, parse_media_record, read_records
from headway.media.sound import write_wave
from headway.records.multimodal import MediaConversation, parse_media
from headway.text.document import Record

PNG = write_png(np.zeros((4, 4, 3), np.uint8))
WAV = write_wave(np.zeros(800, np.float32), 8000)
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()


def parsed(data: dict[str, Any], folder: Path = Path("/data")) -> MediaRecord:
    return parse_media_record(
        Record(data, str(folder / "a.jsonl"), 3), MediaOptions(video_frames=0)
    )


def conversation(data: dict[str, Any]) -> MediaConversation:
    return parse_media(parsed(data))


def turns(user: Any, answer: Any = "A cat.") -> list[dict[str, Any]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]


SHAPES: dict[str, dict[str, Any]] = {
    "PurrSight": {"instruction": "What is it?", "response": "A cat.", "image": "a.png"},
    "LLaVA": {
        "image": "a.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": "A cat."},
        ],
    },
    "LLaVA without a mark": {
        "image": "a.png",
        "conversations": [
            {"from": "human", "value": "What is it?"},
            {"from": "gpt", "value": "A cat."},
        ],
    },
    "LLaMA-Factory": {"messages": turns("<image>\nWhat is it?"), "images": ["a.png"]},
    "OpenAI": {
        "messages": turns(
            [
                {"type": "image_url", "image_url": {"url": "a.png"}},
                {"type": "text", "text": "\nWhat is it?"},
            ]
        )
    },
    "OpenAI, the address alone": {
        "messages": turns(
            [{"type": "image_url", "image_url": "a.png"}, {"type": "text", "text": "\nWhat is it?"}]
        )
    },
    "LLaMA-Factory parts": {
        "messages": turns(
            [{"type": "image_url", "value": "a.png"}, {"type": "text", "value": "\nWhat is it?"}]
        )
    },
    "Qwen parts": {
        "messages": turns(
            [
                {"type": "image", "image": "file:///data/a.png"},
                {"type": "text", "text": "\nWhat is it?"},
            ]
        )
    },
    "parts that point to a list": {
        "messages": turns([{"type": "image"}, {"type": "text", "text": "\nWhat is it?"}]),
        "images": ["a.png"],
    },
    "an answer as parts": {
        "messages": turns("<image>\nWhat is it?", [{"type": "text", "text": "A cat."}]),
        "image": "a.png",
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_the_same_turns_and_media(name: str) -> None:
    record = conversation(SHAPES[name])
    assert [(turn.role, turn.content) for turn in record.turns] == [
        ("user", "<image>\nWhat is it?"),
        ("assistant", "A cat."),
    ]
    assert [(ref.modality, ref.path) for ref in record.media] == [("image", Path("/data/a.png"))]
    assert record.answer == "A cat."


def test_media_follow_the_order_of_the_marks() -> None:
    messages = [*turns("<audio> and <image>"), *turns("<image><video>")]
    record = conversation(
        {
            "messages": messages,
            "images": ["1.png", "2.png"],
            "audios": ["1.wav"],
            "videos": ["1.mp4"],
        }
    )
    assert [ref.path.name for ref in record.media if ref.path] == [
        "1.wav",
        "1.png",
        "2.png",
        "1.mp4",
    ]


def test_a_record_without_marks_has_them_before_the_first_question() -> None:
    system = {"role": "system", "content": "Be brief."}
    record = conversation(
        {"messages": [system, *turns("What?"), *turns("And?")], "image": "a.png", "audio": "a.wav"}
    )
    assert [turn.content for turn in record.turns][:2] == ["Be brief.", "<image>\n<audio>\nWhat?"]


def test_bytes_come_from_structs_data_uris_and_base64() -> None:
    messages = turns([{"type": "image_url", "image_url": {"url": URI}}, {"type": "input_audio", "input_audio": {
        "data": base64.b64encode(WAV).decode(), "format": "wav"}}, {"type": "text", "text": "What?"}])  # fmt: skip
    assert [ref.data for ref in conversation({"messages": messages}).media] == [PNG, WAV]
    record = parsed({"text": "a cat", "image": {"bytes": PNG, "path": "x/cat.png"}})
    assert (record.caption, record.media[0].data, record.media[0].name) == (
        "a cat",
        PNG,
        "/data/a.jsonl:3: x/cat.png",
    )
    assert parsed({"text": "a", "image": {"bytes": None, "path": "cat.png"}}).media[0].path == Path(
        "/data/cat.png"
    )


def test_a_caption_is_read_beside_its_picture() -> None:
    assert parsed({"caption": "a cat", "image": "a.png", "audio": None}).caption == "a cat"


def test_a_picture_and_a_sound_are_a_pair_without_text() -> None:
    pair = parsed({"image": "a.png", "audio": "a.wav"})
    assert pair.caption is None
    assert len(pair.media) == 2
    assert not pair.is_conversation


def test_a_conversation_may_have_no_media() -> None:
    assert conversation({"messages": turns("Hello")}).media == ()


BAD = {
    "2 <image> marks in the texts, but 1 image files": {
        "messages": turns("<image><image>"),
        "images": ["a.png"],
    },
    "0 <audio> marks in the texts, but 1 audio files": {
        "messages": turns("<image>x"),
        "image": "a.png",
        "audio": "a.wav",
    },
    "1 <image> marks in the texts, but 0 image files": {"messages": turns("<image>x")},
    "a mark <image> stands in a turn of the assistant": {
        "messages": turns("What?", "<image>"),
        "image": "a.png",
    },
    "nothing is fetched from the network": {"text": "x", "image": "https://example.com/a.png"},
    "is the address 's3://x/a.png'": {"text": "x", "image": "s3://x/a.png"},
    "not valid base64": {"text": "x", "image": "data:image/png;base64,@@@"},
    "both image and images": {"text": "x", "image": "a.png", "images": ["b.png"]},
    "is given in content parts and as images": {
        "messages": turns([{"type": "image", "image": "a.png"}]),
        "images": ["b.png"],
    },
    "a part of type 'tool_result'": {"messages": turns([{"type": "tool_result"}])},
    "image is of type int": {"text": "x", "image": 7},
    "images[1] is empty": {"text": "x", "images": ["a.png", None]},
    "neither a conversation nor a caption": {"image": "a.png", "id": 3},
    "text is empty": {"text": " ", "image": "a.png"},
    "its suffix is not that of a picture": {"text": "x", "file_name": "a.exe"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_records_are_errors_with_file_and_line(message: str) -> None:
    def read() -> None:
        if (record := parsed(BAD[message])).is_conversation:
            parse_media(record)

    with pytest.raises(DataError, match=r"^/data/a\.jsonl:3: ") as raised:
        read()
    assert message in str(raised.value)


def write_lines(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def test_paths_begin_at_the_file_or_at_the_given_folder(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "a.jsonl",
        [{"text": "x", "image": "i/a.png"}, {"text": "y", "image": "/abs/a.png"}],
    )
    assert [record.media[0].path for record in read_records(file)] == [
        tmp_path / "i/a.png",
        Path("/abs/a.png"),
    ]
    assert next(read_records(file, MediaOptions(Path("/other")))).media[0].path == Path(
        "/other/i/a.png"
    )


def test_captions_of_a_folder_come_from_metadata_captions_side_texts_or_class_names(
    tmp_path: Path,
) -> None:
    folders = {name: tmp_path / name for name in ("metadata", "captions", "beside", "classes")}
    for name, folder in folders.items():
        inner = folder / "tabby_cat" if name == "classes" else folder
        inner.mkdir(parents=True)
        (inner / "a.png").write_bytes(PNG)
        (inner / "b.wav").write_bytes(WAV)
    write_lines(
        folders["metadata"] / "metadata.jsonl",
        [{"file_name": "a.png", "text": "one"}, {"file_name": "b.wav", "text": "two"}],
    )
    (folders["captions"] / "captions.txt").write_text(
        "image,caption\na.png,one, or so\nb.wav\ttwo\n"
    )
    (folders["beside"] / "a.txt").write_text("one\n")
    (folders["beside"] / "b.txt").write_text("two\n")
    captions = {
        name: [(record.caption, record.media[0].modality) for record in read_records(folder)]
        for name, folder in folders.items()
    }
    assert captions["metadata"] == captions["beside"] == [("one", "image"), ("two", "audio")]
    assert captions["captions"] == [("one, or so", "image"), ("two", "audio")]
    assert captions["classes"] == [("tabby cat", "image"), ("tabby cat", "audio")]
    assert all(
        record.media[0].size() > 0 for folder in folders.values() for record in read_records(folder)
    )
    (folders["beside"] / "c.png").write_bytes(PNG)
    with pytest.raises(
        DataError,
        match=r"c\.png: neither a conversation nor a caption.* In a folder, a caption is in a \.txt file",
    ):
        list(read_records(folders["beside"]))


def tar(path: Path, members: list[tuple[str, bytes]], **changed: Any) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            for key, value in changed.items():
                setattr(entry, key, value)
            archive.addfile(entry, io.BytesIO(data))
    return path


def test_webdataset_tars_group_members_by_key(tmp_path: Path) -> None:
    chat = json.dumps({"messages": turns("<image>What?"), "image": "x.png"}).encode()
    members = [("d/000.png", PNG), ("d/000.txt", b"one\n"), ("d/001.wav", WAV), ("d/001.json", b'{"caption": "two"}'), ("d/002.png", PNG),
               ("d/002.json", chat)]  # fmt: skip
    for name in ("a.tar", "a.tar.gz"):
        records = list(read_records(tar(tmp_path / name, members)))
        assert [(record.caption, record.record.line, [ref.data for ref in record.media]) for record in records] == [
            ("one", 1, [PNG]), ("two", 2, [WAV]), (None, 3, [PNG])]  # fmt: skip
        assert parse_media(records[2]).media[0].data == PNG


@pytest.mark.parametrize(
    ("name", "changed", "why"),
    [
        ("/etc/x.png", {}, "leads outside the archive"),
        ("a/../../x.png", {}, "leads outside the archive"),
        ("x.png", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "is a link or device"),
        ("x.png", {"type": tarfile.LNKTYPE, "linkname": "y"}, "is a link or device"),
        ("x.png", {"type": tarfile.CHRTYPE}, "is a link or device"),
    ],
)
def test_hostile_members_of_a_tar_are_refused(
    tmp_path: Path, name: str, changed: dict[str, Any], why: str
) -> None:
    with pytest.raises(DataError, match=why):
        list(read_records(tar(tmp_path / "a.tar", [(name, b"" if changed else PNG)], **changed)))


def test_a_cut_tar_and_an_empty_one_are_errors(tmp_path: Path) -> None:
    whole = tar(tmp_path / "a.tar", [("a.png", PNG * 40), ("a.txt", b"x")]).read_bytes()
    for part in (700, 1200, 0):
        (tmp_path / "b.tar").write_bytes(whole[:part])
        with pytest.raises(DataError, match=r"b\.tar"):
            list(read_records(tmp_path / "b.tar"))


def test_parquet_rows_hold_bytes(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"image": {"bytes": PNG, "path": "a.png"}, "text": "one"},
        {"image": {"bytes": PNG + b"x", "path": None}, "text": "two"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    records = list(read_records(tmp_path / "a.parquet"))
    assert [(record.caption, record.media[0].data, record.record.line) for record in records] == [
        ("one", PNG, 1),
        ("two", PNG + b"x", 2),
    ]


def test_a_caption_file_that_is_too_long_is_refused_and_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.media.sources.TEXT_BYTES", 8)
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "a.txt").write_text("a cat on")
    assert [record.caption for record in read_records(tmp_path)] == ["a cat on"]
    (tmp_path / "a.txt").write_text("a cat on a mat")
    with pytest.raises(DataError, match=r"a\.txt: a caption has at most 8 bytes"):
        list(read_records(tmp_path))
