"""Data verbs on a full disk, in an unwritable cache, from a pipe: one line each, nothing half-written, nothing old lost."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.chat_tokenizer import byte_tokenizer
from support.runs import headway
from support.small_disk import on_small_disk

from headway.errors import TrainingError
from headway.store.foreign.internlm import InternlmWriter
from headway.store.reader import open_store
from headway.store.writer import StoreWriter


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    byte_tokenizer().save(folder / "t")
    rng = np.random.default_rng(0)
    lines = [{"text": "".join(rng.choice(list("abc ,"), 2000)), "messages": []} for _ in range(100)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    turns = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": line["text"]}]
        for line in lines
    ]
    (folder / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": turn}) + "\n" for turn in turns)
    )
    for name, masked in (("plain", False), ("masked", True)):
        with StoreWriter(
            folder / name, dtype="uint16", tokenizer_fingerprint=None, masked=masked
        ) as writer:
            for _ in range(100):
                writer.add(
                    np.concatenate([[1], rng.integers(2, 250, 2000)]),
                    np.arange(2001) > 9 if masked else None,
                )
            writer.finish()
    return folder


def test_a_full_disk_is_one_line_and_leaves_nothing(inputs: Path) -> None:
    small = inputs / "small"
    tokenize = ["data", "tokenize", "--tokenizer", str(inputs / "t")]
    text = [*tokenize, "--input", str(inputs / "in.jsonl"), "--out", str(small / "new" / "out")]
    chat = [
        *tokenize,
        "--kind",
        "chat",
        "--input",
        str(inputs / "chat.jsonl"),
        "--out",
        str(small / "out"),
    ]
    commands = [[*text, "--to", to] for to in ("headway", "mds", "internlm")]
    commands += [[*chat, "--to", to] for to in ("headway", "mds", "internlm")]
    for name, targets in (
        ("plain", ("headway", "mds", "internlm", "zero2all")),
        ("masked", ("headway", "mds", "internlm", "zero2all")),
    ):
        commands += [
            ["data", "convert", str(inputs / name), str(small / "out"), "--to", to]
            for to in targets
        ]
    commands += [
        [
            "data",
            "pack",
            str(inputs / "plain"),
            str(small / "out"),
            "--pack-length",
            "64",
            "--to",
            to,
        ]
        for to in ("headway", "mds")
    ]
    commands += [
        ["data", "merge", str(inputs / "plain"), str(inputs / "plain"), "--out", str(small / "out")]
    ]
    for command, ended in zip(commands, on_small_disk(small, 120, commands), strict=True):
        assert ended.code == 1, (command, ended)
        assert (
            ended.stderr.startswith("error: ")
            and "the disk is full" in ended.stderr
            and ended.stderr.count("\n") == 1
        ), (command, ended)
        assert ended.left == [], (command, ended)


def test_a_full_disk_while_the_cache_is_built_is_one_line(inputs: Path) -> None:
    small = inputs / "small"
    recipe = [
        "model.num_layers=1",
        "model.hidden_size=16",
        "model.num_heads=2",
        "model.max_seq_len=32",
        "data.seq_len=16",
        "steps=1",
    ]
    recipe += [
        "device=cpu",
        f"tokenizer={inputs / 't'}",
        f"data.train={inputs / 'in.jsonl'}",
        f"run.dir={inputs / 'runs'}",
    ]
    recipe += ["model.vocab_size=null"]
    (inputs / "r.yaml").write_text("{}\n")
    command = ["train", str(inputs / "r.yaml"), *recipe, f"data.cache_dir={small / 'cache'}"]
    (ended,) = on_small_disk(small, 120, [command])
    assert ended.code == 1, ended
    assert [
        line for line in ended.stderr.splitlines() if "error" in line and "the disk is full" in line
    ], ended
    assert "Traceback" not in ended.stderr
    assert not [path for path in ended.left if path.startswith("cache/stores/")], ended
    file = inputs / "file"
    file.touch()
    refused = headway(*command[:-1], f"data.cache_dir={file / 'cache'}")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        f"error: data.cache_dir: {file / 'cache'}: {file} is a file, so no folder can be made there. Choose another folder."
    )


def test_an_older_internlm_file_survives_a_failed_rewrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write() -> None:
        with InternlmWriter(tmp_path / "cn" / "a.bin") as writer:
            writer.add([1, 2, 3])
            writer.finish()

    write()
    before = {path.name: path.read_bytes() for path in (tmp_path / "cn").iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.store.foreign.base.fsync_file", full)
    with pytest.raises(TrainingError, match="the disk is full"):
        write()
    assert {path.name: path.read_bytes() for path in (tmp_path / "cn").iterdir()} == before


def test_a_committed_build_stays_to_be_continued_and_another_goes(tmp_path: Path) -> None:
    for committed in (True, False):
        folder = tmp_path / "deep" / str(committed)
        with StoreWriter(folder, dtype="uint16", tokenizer_fingerprint=None, resume=True) as writer:
            writer.add([1, 2, 3])
            if committed:
                writer.commit()
        assert folder.exists() == committed
    with StoreWriter(
        tmp_path / "deep" / "True", dtype="uint16", tokenizer_fingerprint=None, resume=True
    ) as writer:
        writer.finish()
    assert open_store(tmp_path / "deep" / "True").num_tokens == 3


def test_a_pipe_is_refused_by_name(inputs: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        for command in (
            [
                "data",
                "tokenize",
                "--input",
                str(path),
                "--tokenizer",
                str(inputs / "t"),
                "--out",
                str(tmp_path / "out"),
            ],
            ["data", "convert", str(path), str(tmp_path / "out")],
            ["data", "inspect", str(path)],
            ["data", "clean", str(path), str(tmp_path / "out.jsonl")],
        ):
            ended = headway(*command)
            assert ended.returncode == 2
            assert ended.stderr == (
                f"error: {path}: is a pipe or device, which can be read only once. Write its content to a file and give that.\n"
            )
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_times_in_nanoseconds_are_read_from_parquet_and_arrow(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from headway.text.read import read_records

    when = pa.array([1, 1_700_000_000_123_456_789], pa.int64())
    columns = {
        "text": ["a", "b"],
        "at": when.cast(pa.timestamp("ns")),
        "zone": when.cast(pa.timestamp("ns", "UTC")),
    }
    columns |= {
        "took": when.cast(pa.duration("ns")),
        "hour": pa.array([5, 7], pa.int64()).cast(pa.time64("ns")),
    }
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        _, last = (record.data for record in read_records(tmp_path / name))
        assert (last["text"], last["at"], last["took"]) == (
            "b",
            "2023-11-14 22:13:20.123456789",
            1_700_000_000_123_456_789,
        )
    pq.write_table(
        pa.table({"text": ["a"], "in": pa.array([[1]], pa.list_(pa.timestamp("ns")))}),
        tmp_path / "b.parquet",
    )
    ended = headway("data", "clean", str(tmp_path / "b.parquet"), str(tmp_path / "out.jsonl"))
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "times in nanoseconds inside in" in ended.stderr
