"""Every raw format gives the same documents, whatever it is wrapped in."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headway.errors import ConfigError, DataError
from headway.text.expand import expand
from headway.text.read import read_documents, read_records

ROWS: list[dict[str, Any]] = [
    {"title": "一", "text": "第一篇：你好，world\n第二行"},
    {"title": "two", "text": 'quotes " and , commas'},
    {"title": "three", "text": "emoji 😀 and tab\t end "},
]
TEXTS = [row["text"] for row in ROWS]


def jsonl(rows: list[dict[str, Any]] = ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(separator: str) -> bytes:
    import csv

    out = io.StringIO()
    writer = csv.writer(out, delimiter=separator)
    writer.writerow(["title", "text"])
    writer.writerows([row["title"], row["text"]] for row in ROWS)
    return out.getvalue().encode()


def parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), out, row_group_size=2)
    return out.getvalue()


def arrow(stream: bool) -> bytes:
    out = io.BytesIO()
    rows = pa.Table.from_pylist(ROWS)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)
    return out.getvalue()


CONTENT: dict[str, Callable[[], bytes]] = {
    "a.jsonl": jsonl,
    "lines.json": jsonl,
    "list.json": lambda: json.dumps(ROWS).encode(),
    "pretty.json": lambda: json.dumps(ROWS, indent=1, ensure_ascii=False).encode(),
    "bom.jsonl": lambda: b"\xef\xbb\xbf" + jsonl(),
    "a.csv": lambda: table(","),
    "a.tsv": lambda: table("\t"),
    "a.parquet": parquet,
    "stream.arrow": lambda: arrow(True),
    "file.arrow": lambda: arrow(False),
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.compress(data[:40]) + zstandard.compress(data[40:]),
}


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("name", CONTENT)
def test_every_format_and_compression_gives_the_same_texts(
    tmp_path: Path, name: str, compression: str
) -> None:
    path = tmp_path / (name + compression)
    path.write_bytes(COMPRESS[compression](CONTENT[name]()))
    assert [document.text for document in read_documents(path)] == TEXTS
    assert [record.data for record in read_records([path])] == ROWS


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"])
def test_archives_give_their_members_in_order(tmp_path: Path, name: str) -> None:
    inner = [
        ("b/2.jsonl", jsonl(ROWS[:1])),
        ("a/1.parquet", parquet()),
        ("a/.hidden.jsonl", b"{"),
        ("x.png", b"\x00"),
        ("n.txt", b"note"),
    ]
    out = io.BytesIO()
    if name.endswith(".zip"):
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, data in inner:
                archive.writestr(member, data)
    else:
        with tarfile.open(fileobj=out, mode="w") as archive:
            for member, data in inner:
                entry = tarfile.TarInfo(member)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    data = out.getvalue()
    if name.endswith("gz"):
        data = COMPRESS[".gz"](data)
    elif "zst" in name:
        data = COMPRESS[".zst"](data)
    (tmp_path / name).write_bytes(data)
    documents = list(read_documents(tmp_path / name))
    assert [d.text for d in documents] == [TEXTS[0], *TEXTS, "note"]
    assert documents[0].place == f"{tmp_path / name}:b/2.jsonl:1"


def test_a_large_json_list_is_read_piece_by_piece(tmp_path: Path) -> None:
    rows = [{"text": "字" * (i % 70_000), "n": i} for i in range(0, 300_000, 7_001)]
    (tmp_path / "a.json").write_text(
        json.dumps(rows, ensure_ascii=False, indent=0), encoding="utf-8"
    )
    records = list(read_records(tmp_path / "a.json"))
    assert [r.data for r in records] == rows
    assert [r.line for r in records] == [2 + 4 * i for i in range(len(rows))]


def test_files_of_one_pretty_object_are_a_document_each(tmp_path: Path) -> None:
    for index, row in enumerate(ROWS):
        (tmp_path / f"{index}.json").write_text(json.dumps(row, indent=2), encoding="utf-8")
    assert [document.text for document in read_documents(tmp_path)] == TEXTS


def test_pretty_objects_in_a_row_are_a_record_each(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_text("\n".join(json.dumps(row, indent=2) for row in ROWS), encoding="utf-8")
    assert [record.line for record in read_records(path)] == [1, 5, 9]


def test_a_text_file_is_one_document_or_one_per_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("第一\r\n\n  \nsecond\n".encode())
    assert [d.text for d in read_documents(tmp_path / "a.txt")] == ["第一\r\n\n  \nsecond\n"]
    assert [(d.text, d.line) for d in read_documents(tmp_path / "a.txt", split="line")] == [
        ("第一", 1),
        ("second", 4),
    ]


def test_folders_and_globs_are_sorted_and_leave_other_files_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.jsonl", "README.md", "picture.png", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jsonl() if name.endswith("jsonl") else name.encode())
    assert [p.name for p in expand(tmp_path)] == ["a.txt", "b.txt", "c.jsonl"]
    assert [p.name for p in expand(str(tmp_path / "*.txt"))] == ["a.txt", "b.txt"]
    assert [p.name for p in expand([str(tmp_path / "**/*.jsonl"), tmp_path / "b.txt"])] == [
        "c.jsonl",
        "b.txt",
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{title}\\n{text}", f"一\n{TEXTS[0]}"),
        ("{{{title}}}: {meta.n}", "{一}: 3"),
        ("{title}{none}", "一"),
    ],
)
def test_templates_join_keys(tmp_path: Path, template: str, expected: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([{**ROWS[0], "meta": {"n": 3}, "none": None}]))
    assert [d.text for d in read_documents(tmp_path / "a.jsonl", template=template)] == [expected]


@pytest.mark.parametrize("template", ["no key", "{}", "{title", "{a!r}", "{a:>3}"])
def test_a_template_that_is_none_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="template is"):
        list(read_documents("x.jsonl", template=template))


def test_only_needed_columns_are_read_unless_the_record_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet())
    assert [d.record for d in read_documents(tmp_path / "a.parquet")] == [
        {"text": text} for text in TEXTS
    ]
    assert [d.record for d in read_documents(tmp_path / "a.parquet", keep_record=True)] == ROWS


def test_files_without_a_known_suffix_are_told_by_content(tmp_path: Path) -> None:
    for name, data in (
        ("a", jsonl()),
        ("b.data", parquet()),
        ("c.gz", gzip.compress(jsonl())),
        ("d.bin", arrow(False)),
    ):
        (tmp_path / name).write_bytes(data)
        assert [d.text for d in read_documents(tmp_path / name)] == TEXTS
    (tmp_path / "e.py").write_text("print('你好')\n", encoding="utf-8")
    assert [d.text for d in read_documents(tmp_path / "e.py")] == ["print('你好')\n"]
    (tmp_path / "f.bin").write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match=r"f.bin: unknown format. Supported: txt, md, json"):
        list(read_documents(tmp_path / "f.bin"))


def wiki(texts: list[str]) -> bytes:
    pages = (
        f"<page><title>t</title><ns>0</ns><id>1</id><revision><text>{text}</text></revision></page>"
        for text in texts
    )
    return f"<mediawiki>{''.join(pages)}</mediawiki>".encode()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl.gz", lambda texts: gzip.compress(jsonl([{"text": text} for text in texts]), 1)),
        ("a.json", lambda texts: json.dumps([{"text": text} for text in texts]).encode()),
        ("a.csv", lambda texts: ("text\n" + "".join(f"{text}\n" for text in texts)).encode()),
        ("a.xml", wiki),
    ],
)
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, name: str, write: Callable[[list[str]], bytes]
) -> None:
    import tracemalloc

    (tmp_path / name).write_bytes(write(["文本内容" * 200] * 2_500))
    documents = read_documents(tmp_path / name)
    next(documents)
    tracemalloc.start()
    try:
        assert sum(1 for _ in documents) == 2_499
        assert tracemalloc.get_traced_memory()[1] < 2_500_000
    finally:
        tracemalloc.stop()
