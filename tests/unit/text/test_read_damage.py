"""Damaged, cut, empty and foreign raw files end in one clear error, never in a traceback and never in silence."""

import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headway.errors import DataError
from headway.store.foreign.mds import has_tokens
from headway.text.formats.mds import check_shard, mds_shards
from headway.text.read import read_documents

ROWS = [{"text": f"document {i}: 你好世界 " + "abc def " * (i % 7), "n": i} for i in range(40)]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
WIKI = (
    "<mediawiki xmlns='x'>"
    + "".join(
        f"<page><title>t{i}</title><ns>0</ns><id>{i}</id><revision><text>text 你好 {i}</text></revision></page>"
        for i in range(20)
    )
    + "</mediawiki>"
).encode()


def packed(write: Callable[[io.BytesIO], None]) -> bytes:
    out = io.BytesIO()
    write(out)
    return out.getvalue()


def write_arrow(out: io.BytesIO) -> None:
    rows = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=9)


def write_tar(out: io.BytesIO) -> None:
    with tarfile.open(fileobj=out, mode="w") as archive:
        for i in range(3):
            entry = tarfile.TarInfo(f"{i}.jsonl")
            entry.size = len(JSONL)
            archive.addfile(entry, io.BytesIO(JSONL))


def write_zip(out: io.BytesIO) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", JSONL)


def mds_shard() -> bytes:
    config = json.dumps(
        {
            "column_encodings": ["int", "str"],
            "column_names": ["n", "text"],
            "column_sizes": [8, None],
            "format": "mds",
        }
    ).encode()
    samples = [
        len(t).to_bytes(4, "little") + i.to_bytes(8, "little") + t
        for i, t in enumerate(row["text"].encode() for row in ROWS)
    ]  # type: ignore[union-attr]
    offset = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = [offset]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    return b"".join(
        [
            len(samples).to_bytes(4, "little"),
            *(o.to_bytes(4, "little") for o in offsets),
            config,
            *samples,
        ]
    )


FILES: dict[str, bytes] = {
    "a.txt": "\n".join(str(row["text"]) for row in ROWS).encode(),
    "a.jsonl": JSONL,
    "a.json": json.dumps(ROWS, ensure_ascii=False).encode(),
    "a.csv": b"n,text\n" + b"".join(f'{r["n"]},"{r["text"]}"\n'.encode() for r in ROWS),
    "a.parquet": packed(
        lambda out: pq.write_table(
            pa.Table.from_pylist(ROWS), out, row_group_size=10, write_page_checksum=True
        )
    ),
    "a.arrow": packed(write_arrow),
    "a.xml": WIKI,
    "a.mds": mds_shard(),
    "a.zip": packed(write_zip),
    "a.tar": packed(write_tar),
    "a.jsonl.zst": zstandard.compress(JSONL),
}
CHECKED = ("a.parquet", "a.zip")  # their own checksums cover the data


def texts(path: Path) -> list[str]:
    return [document.text for document in read_documents(path)]


def texts_if_readable(path: Path) -> list[str] | None:
    """The texts, or None where reading ends in one line that names the file; anything else is a failure."""
    try:
        return texts(path)
    except DataError as error:
        complaint = str(error)
    assert path.name in complaint
    assert "\n" not in complaint
    return None


@pytest.mark.parametrize("name", FILES)
def test_the_whole_file_is_readable(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert texts(tmp_path / name)


@pytest.mark.parametrize("name", FILES)
def test_an_empty_file_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=name):
        texts(tmp_path / name)


@pytest.mark.parametrize("name", [name for name in FILES if name != "a.txt"])
def test_a_file_cut_short_is_an_error_or_gives_its_whole_first_records(
    tmp_path: Path, name: str
) -> None:
    """Lines and rows carry no total, so a cut between two of them cannot be seen; any other cut must be."""
    data = FILES[name]
    (tmp_path / name).write_bytes(data)
    whole = texts(tmp_path / name)
    unseen = 0
    cuts = random.Random(7).sample(range(1, len(data) - 1), 40)
    for cut in cuts:
        (tmp_path / name).write_bytes(data[:cut])
        readable = texts_if_readable(tmp_path / name)
        if readable is not None:
            unseen += readable != whole
            assert readable == whole[: len(readable)]
    line_based = name in ("a.jsonl", "a.csv", "a.arrow")
    assert unseen <= (4 if line_based else 0), f"{unseen} cuts of {name} went unseen"


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_never_end_in_a_traceback(tmp_path: Path, name: str) -> None:
    data = FILES[name]
    (tmp_path / name).write_bytes(data)
    whole = texts(tmp_path / name)
    chance = random.Random(11)
    for _ in range(60):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (tmp_path / name).write_bytes(damaged)
        readable = texts_if_readable(tmp_path / name)
        assert readable is None or name not in CHECKED or readable == whole


def expect(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(DataError, match=message):
        list(read_documents(path, **options))


def test_bytes_that_are_no_utf8_are_reported_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("好\nab".encode() + b"\xff rest\n")
    expect(path, r"a.txt:2: not UTF-8 at byte 3 of the line \(0xff")
    expect(path, r"a.txt:2: not UTF-8 at byte 3", split="line")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe4\xbd"}\n')
    expect(tmp_path / "a.jsonl", r"a.jsonl:2: not UTF-8")
    (tmp_path / "a.json").write_bytes(b'[{"text": "a"},\n{"text": "\xe4\xbd"}]\n')
    expect(tmp_path / "a.json", r"a.json:2: not UTF-8")
    path.write_bytes("text".encode("utf-16"))
    expect(path, "UTF-16; convert it")


def test_a_record_without_the_key_is_reported_with_the_keys_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "x"}\n{"content": "y", "id": 3}\n', encoding="utf-8"
    )
    expect(
        tmp_path / "a.jsonl",
        r"a.jsonl:2: the record has no key 'text' \(text_key\); its keys are content, id\.",
    )
    expect(
        tmp_path / "a.jsonl",
        r"a.jsonl:1: the record has no key 'title' \(template\)",
        template="{title}",
    )
    (tmp_path / "chat.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    expect(tmp_path / "chat.jsonl", r"no key 'text'.*look like conversations: set kind: chat")
    # Verbs such as `eval ppl` have no --kind.
    expect(tmp_path / "chat.jsonl", r"a token store .*`headway data tokenize --kind chat`")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    expect(
        tmp_path / "pairs.jsonl", r"no key 'text'.*look like preference pairs: set kind: preference"
    )
    pq.write_table(pa.Table.from_pylist([{"content": "y"}]), tmp_path / "a.parquet")
    expect(tmp_path / "a.parquet", r"a.parquet:1: the record has no key 'text' .*keys are content")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": null}', "'text' is null"),
        ('{"text": 3}', "'text' is of type int"),
        ('{"text": "\\ud800"}', "lone surrogate"),
        ('["a"]', "a.jsonl:1: a JSON list; each line must be one JSON object"),
        ('{"text": "a"', "a.jsonl:1: not valid JSON"),
        ("[" * 100_000, "a.jsonl:1: not readable JSON"),
        ("\n\n", "a.jsonl: no documents"),
    ],
)
def test_lines_that_are_no_records_are_reported(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content + "\n", encoding="utf-8")
    expect(tmp_path / "a.jsonl", message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b"}', r"a.json:1 \(record 2\): the list is cut short"),
        ('[{"text": "a"}\n {"text": "b"}]', r"a.json:2 \(record 1\): ',' or ']' expected"),
        ('[{"text": "a"},]', r"a.json:1 \(record 2\): not valid JSON"),
        ('[{"text": "a"}] x', "a.json:1: something follows the list"),
        ('[\n"a"]', r"a.json:2 \(record 1\): a JSON str where an object is expected"),
        ("[]", "a.json: no documents"),
        ('{"text": "a"} 3', "a JSON int where"),
    ],
)
def test_json_that_is_no_list_of_objects_is_reported(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    expect(tmp_path / "a.json", message)


def test_damage_in_a_large_json_file_is_found_where_it_is(tmp_path: Path) -> None:
    """The rest of the file is not read into memory to find out that the first object is wrong."""
    (tmp_path / "a.json").write_text(
        '[{"text" "a"},' + '{"text": "b"},' * 200_000, encoding="utf-8"
    )
    expect(tmp_path / "a.json", r"a.json:1 \(record 1\): not valid JSON: Expecting ':'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,n\na,1,2\n", "a.csv:2: 3 values, but the first row names 2 columns"),
        ('text,n\n"a,1\n', "a.csv:2: not a valid table"),
        ("text,text\na,b\n", "a column name occurs twice"),
        ("text,n\n", "no documents"),
    ],
)
def test_tables_that_are_none_are_reported(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    expect(tmp_path / "a.csv", message)


def test_a_name_that_promises_another_compression_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(JSONL)
    expect(tmp_path / "a.jsonl.gz", "promises gzip data, but the content is not compressed")


def test_missing_inputs_are_named(tmp_path: Path) -> None:
    expect(tmp_path / "none.txt", "none.txt: no such file or folder")
    expect(tmp_path / "*.txt", "nothing matches")
    expect(tmp_path, "holds no data. Supported")
    (tmp_path / "a.xml").write_text("<html></html>", encoding="utf-8")
    expect(tmp_path / "a.xml", "begins with <html>; only MediaWiki")


def test_an_mds_folder_is_checked_against_its_index(tmp_path: Path) -> None:
    data = mds_shard()
    (tmp_path / "shard.00000.mds").write_bytes(data)
    entry: dict[str, Any] = {
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}},
        "zip_data": None,
    }
    entry |= {"samples": len(ROWS), "format": "mds"}
    index = {"version": 2, "shards": [entry]}

    def check(message: str, read: Callable[[], object]) -> None:
        (tmp_path / "index.json").write_text(json.dumps(index), encoding="utf-8")
        with pytest.raises(DataError, match=message):
            read()

    def check_shards() -> None:
        for shard in mds_shards(tmp_path):
            check_shard(shard)

    entry["samples"] += 1
    check("has 40 samples, but index.json lists 41", lambda: has_tokens(tmp_path))
    entry["raw_data"]["hashes"] = {"sha1": "0" * 40}
    check("its sha1 is not the one in index.json", check_shards)
    entry["raw_data"]["bytes"] -= 1
    check("bytes, but index.json promises", check_shards)
    entry["raw_data"]["basename"] = "other.mds"
    check("listed in index.json, but missing", check_shards)
    index["version"] = 1
    check("missing|version", check_shards)
