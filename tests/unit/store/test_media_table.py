"""Tables of media and features: rows come back as written, a killed build continues, damage is noticed, one process builds at a time."""

import hashlib
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from support.media_store import make_media_store

from headway.errors import DataError
from headway.prepare.pack import PackOptions, pack
from headway.store.convert import convert
from headway.store.media_table import MediaTableWriter, build_table, is_table, open_table
from headway.store.merge import merge


def keys(first: int, last: int) -> list[str]:
    return [hashlib.sha256(b"%d" % n).hexdigest() for n in range(first, last)]


def some_rows(first: int, last: int) -> np.ndarray:
    return (np.arange(first, last)[:, None] * 10 + np.arange(6)).reshape(-1, 2, 3).astype("float32")


def write(folder: Path, first: int = 0, last: int = 20, finish: bool = True) -> None:
    with MediaTableWriter(folder, (2, 3), "float32", "test", shard_bytes=7 * 24) as writer:
        for start in range(first, last, 4):
            writer.add(keys(start, min(last, start + 4)), some_rows(start, min(last, start + 4)))
        writer.commit({"seen": last}) if not finish else writer.finish()


def test_rows_and_keys_come_back_in_any_order_across_shards(tmp_path: Path) -> None:
    write(tmp_path / "t")
    table = open_table(tmp_path / "t")
    assert (len(table), table.shape, table.dtype.name, table.identity) == (
        20,
        (2, 3),
        "float32",
        "test",
    )
    assert len(table.manifest.shards) == 3
    wanted = [19, 0, 7, 7, 6, 13]
    np.testing.assert_array_equal(table.rows(wanted), some_rows(0, 20)[wanted])
    assert table.rows([]).shape == (0, 2, 3)
    assert table.indices_of(keys(0, 21)).tolist() == [*range(20), -1]
    assert table.key(13) == keys(13, 14)[0]
    with pytest.raises(IndexError):
        table.rows([20])


def test_an_empty_table_opens(tmp_path: Path) -> None:
    write(tmp_path / "t", last=0)
    table = open_table(tmp_path / "t")
    assert len(table) == 0
    assert table.indices_of(keys(0, 1)).tolist() == [-1]


def test_a_killed_build_continues_and_the_bytes_are_the_same(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    write(tmp_path / "killed", last=9, finish=False)
    growing = next(path for path in sorted((tmp_path / "killed").glob("rows-*.bin"), reverse=True))
    with open(growing, "ab") as file:
        file.write(b"written after the last commit")
    with pytest.raises(DataError, match="unfinished table"):
        open_table(tmp_path / "killed")
    with MediaTableWriter(
        tmp_path / "killed", (2, 3), "float32", "test", shard_bytes=7 * 24
    ) as writer:
        assert writer.known == set(keys(0, 9))
        assert writer.note == {"seen": 9}
        assert len(writer) == 9
        writer.add(keys(9, 20), some_rows(9, 20))
        writer.finish()
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "killed" / path.name).read_bytes(), path.name


def test_an_unfinished_table_of_other_settings_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", last=9, finish=False)
    with pytest.raises(DataError, match="other settings \\(dtype, identity, shard_bytes\\)"):
        MediaTableWriter(tmp_path / "t", (2, 3), "float16", "other")


def test_a_row_of_another_shape_or_a_repeated_one_is_refused(tmp_path: Path) -> None:
    with MediaTableWriter(tmp_path / "t", (2, 3), "float32", "test") as writer:
        with pytest.raises(ValueError, match="rows are"):
            writer.add(keys(0, 1), np.zeros((1, 3, 2), "float32"))
        writer.add(keys(0, 2), some_rows(0, 2))
        with pytest.raises(ValueError, match="already"):
            writer.add(keys(1, 3), some_rows(1, 3))


@pytest.mark.parametrize("name", ["rows-00001.bin", "keys-00000.bin", "table.json"])
def test_a_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    write(tmp_path / "t")
    path = tmp_path / "t" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)

    def read() -> None:
        table = open_table(tmp_path / "t")
        table.rows(range(20))
        table.indices_of(keys(0, 1))

    with pytest.raises(DataError, match="damaged"):
        read()


def test_a_flipped_bit_in_an_unfinished_shard_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "t", last=9, finish=False)
    path = tmp_path / "t" / "rows-00001.bin"
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"damaged: its checksum differs from progress\.json"):
        MediaTableWriter(tmp_path / "t", (2, 3), "float32", "test", shard_bytes=7 * 24)


def test_a_truncated_file_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "t")
    path = tmp_path / "t" / "rows-00000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="missing or not of"):
        open_table(tmp_path / "t")


def _build(folder: Path) -> None:
    def fill(writer: MediaTableWriter) -> None:
        with open(folder.parent / "builds", "a") as file:
            file.write("x")
        for n in range(20):
            writer.add(keys(n, n + 1), some_rows(n, n + 1))

    table = build_table(folder, (2, 3), "float32", "test", fill)
    np.testing.assert_array_equal(table.rows(range(20)), some_rows(0, 20))


def test_two_builders_are_kept_apart_and_damage_is_built_again(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=_build, args=(tmp_path / "t",)) for _ in range(2)]
    for builder in both:
        builder.start()
    for builder in both:
        builder.join()
        assert builder.exitcode == 0
    assert (tmp_path / "builds").read_text() == "x"
    assert is_table(tmp_path / "t")
    path = tmp_path / "t" / "rows-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    _build(tmp_path / "t")
    assert (tmp_path / "builds").read_text() == "xx"
    with pytest.raises(DataError, match="holds a table of"):
        build_table(tmp_path / "t", (2, 3), "float32", "other", lambda _: None)


def test_verbs_that_copy_tokens_alone_refuse_a_store_with_media(tmp_path: Path) -> None:
    store = tmp_path / "store"
    make_media_store(store, 4)
    for verb, call in (
        ("data merge", lambda: merge([store], tmp_path / "out")),
        ("data convert", lambda: convert(store, tmp_path / "out", "mds")),
        ("data pack", lambda: pack(store, tmp_path / "out", PackOptions(32))),
    ):
        with pytest.raises(DataError, match=rf"holds pictures or sounds, which {verb} would lose"):
            call()
    assert not (tmp_path / "out").exists()
