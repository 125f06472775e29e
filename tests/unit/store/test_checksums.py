"""Data is hashed whatever the cache remembers: small stores at once, the others in a thread that yields, ends at once and finds damage."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disk_bit_flip import flip_bit_on_disk

from headway.errors import DataError
from headway.prepare.pack import PackOptions, pack
from headway.runtime.storage import sha256_file
from headway.store import checksums
from headway.store.checksums import Checksums
from headway.store.convert import convert
from headway.store.merge import merge
from headway.store.reader import Store, is_store
from headway.store.writer import StoreWriter


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "SETTLED_SECONDS", -1.0)


def make_store(folder: Path, sizes: list[int]) -> dict[Path, str]:
    folder.mkdir(parents=True)
    files = {}
    for number, size in enumerate(sizes):
        path = folder / f"tokens-{number:05}.bin"
        path.write_bytes(os.urandom(size))
        files[path] = sha256_file(path)
    return files


def wait_until_done(checksums: Checksums) -> None:
    while checksums.waiting and checksums.damage is None:
        time.sleep(0.001)


def test_small_stores_are_hashed_and_large_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_store(tmp_path / "small", [100, 200])
    large = make_store(tmp_path / "large", [900, 900])
    cache = tmp_path / "cache"
    for path, expected in {**small, **large}.items():
        Checksums(cache).require(path, expected)
    monkeypatch.setattr(checksums, "AT_START_BYTES", 1000)
    assert Checksums(cache).verify_now([large, small]) == large
    flip_bit_on_disk(list(large)[1], 5, cache)
    assert Checksums(cache).verify_now([large, small]) == large
    flip_bit_on_disk(list(small)[1], 5, cache)
    # the cache still says that it is good
    Checksums(cache).require(list(small)[1], small[list(small)[1]])
    with pytest.raises(DataError, match=r"small/tokens-00001\.bin: damaged"):
        Checksums(cache).verify_now([large, small])
    with pytest.raises(DataError, match=r"large/tokens-00001\.bin: damaged"):
        Checksums(cache).verify_now([large], everything=True)


def test_a_start_takes_no_longer_than_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", [100, 100])
    monkeypatch.setattr(checksums, "AT_START_SECONDS", -1.0)
    assert Checksums(tmp_path / "cache").verify_now([store]) == store


def test_what_this_process_has_hashed_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", [100])
    hashing = Checksums(tmp_path / "cache")
    (path,) = store
    hashing.require(path, store[path])
    monkeypatch.setattr(checksums, "_compute", lambda *_: pytest.fail("hashed again"))
    assert hashing.verify_now([store]) == {}


def test_the_thread_finds_what_the_cache_does_not_know(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [5000] * 4)
    cache = tmp_path / "cache"
    for path, expected in store.items():
        Checksums(cache).require(path, expected)
    bad = list(store)[2]
    flip_bit_on_disk(bad, 11, cache)
    checksums = Checksums(cache)
    checksums.verify_in_background(store)
    wait_until_done(checksums)
    assert checksums.damage is not None
    assert checksums.damage.path == bad
    assert f"{bad}: damaged" in checksums.damage.problem
    assert isinstance(checksums.failed, DataError)
    checksums.is_watched = True
    assert checksums.failed is None


def test_files_that_were_not_hashed_for_the_longest_time_come_first_and_those_in_use_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", [100] * 5)
    cache = tmp_path / "cache"
    paths = list(store)
    for age, path in zip((50, 90, 10, 70, 30), paths, strict=True):
        Checksums(cache).require(path, store[path])
        entry = checksums._entry(cache, path)  # pyright: ignore[reportPrivateUsage]
        os.utime(entry, (time.time() - age, time.time() - age))
    order: list[Path] = []
    compute = checksums._compute  # pyright: ignore[reportPrivateUsage]

    def noted(cache_dir: Path | None, path: Path, stops: object) -> str | None:
        order.append(path)
        return compute(cache_dir, path, stops)  # type: ignore[arg-type]

    monkeypatch.setattr(checksums, "_compute", noted)
    hashing = Checksums(cache)
    hashing.require(paths[2], store[paths[2]])
    hashing.verify_in_background(store, share=1.0)
    wait_until_done(hashing)
    assert order == [paths[2], paths[1], paths[3], paths[0], paths[4]]


def test_the_thread_sleeps_most_of_the_time_and_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", [1000])
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 10)
    slept: list[float] = []
    begun = threading.Event()

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            slept.append(timeout or 0.0)
            begun.set()
            return super().wait(60.0)  # as if the disk were very slow

    hashing = Checksums(tmp_path / "cache")
    monkeypatch.setattr(hashing._background, "_is_over", Over())  # pyright: ignore[reportPrivateUsage]
    hashing.verify_in_background(store)
    assert begun.wait(30)
    (worker,) = [
        thread
        for thread in threading.enumerate()
        if thread.name == "headway-checksums" and thread is hashing._background._worker
    ]  # pyright: ignore[reportPrivateUsage]
    hashing.end()
    worker.join(10)
    assert not worker.is_alive()
    assert hashing.waiting == list(store)
    assert slept[0] > 0


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [10])
    (path,) = store
    path.unlink()
    checksums = Checksums(tmp_path / "cache")
    checksums.verify_in_background(store)
    wait_until_done(checksums)
    assert checksums.damage is not None
    assert "cannot be read: No such file" in checksums.damage.problem


@pytest.fixture
def large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as too large to be hashed at once."""
    monkeypatch.setattr(checksums, "AT_ONCE_BYTES", 10)
    path = tmp_path / "tokens-00000.bin"
    path.write_bytes(os.urandom(1000))
    return path


def wait_in_a_thread(checking: Checksums) -> list[str]:
    """What `wait` raises; fails if it does not return."""
    problems: list[str] = []

    def wait() -> None:
        try:
            checking.wait()
        except DataError as problem:
            problems.append(str(problem))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(10)
    assert not waiter.is_alive(), "nobody will ever check the file that it waits for"
    return problems


def test_a_check_that_breaks_ends_those_that_wait_for_it(
    tmp_path: Path, large_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise MemoryError("no room for a block")

    monkeypatch.setattr(checksums, "_compute", broken)
    checking = Checksums(tmp_path / "cache")
    checking.require(large_file, "0" * 64)
    (problem,) = wait_in_a_thread(checking)
    assert "cannot be checked" in problem and "no room for a block" in problem


def test_nobody_waits_for_a_check_that_was_ended(
    tmp_path: Path, large_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        return None

    monkeypatch.setattr(checksums, "_compute", interrupted)
    checking = Checksums(tmp_path / "cache")
    checking.end()
    checking.require(large_file, sha256_file(large_file))
    (problem,) = wait_in_a_thread(checking)
    assert str(large_file) in problem and "was not checked" in problem


def test_a_checksum_that_was_misread_once_is_no_damage_for_ever(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [100])
    cache = tmp_path / "cache"
    (path,) = store
    flip_bit_on_disk(path, 3, cache)
    Checksums(cache).of(path)
    # the file is well again, and the cache remembers what was read
    flip_bit_on_disk(path, 3, cache)
    assert Checksums(cache).of(path) != store[path]
    Checksums(cache).require(path, store[path])
    assert Checksums(cache).of(path) == store[path]


@pytest.mark.parametrize("verb", ["merge", "convert", "pack"])
def test_nothing_is_made_of_a_large_damaged_store(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a large file ends after the verb has read it: what was made would have good checksums of bad tokens."""
    monkeypatch.setattr(checksums, "AT_ONCE_BYTES", 0)
    with StoreWriter(tmp_path / "store", dtype="uint16", tokenizer_fingerprint="f") as writer:
        for number in range(20):
            writer.add(np.full(10, number, np.uint16))
        writer.finish()
    flip_bit_on_disk(tmp_path / "store" / "tokens-00000.bin", 33)
    compute = checksums._compute  # pyright: ignore[reportPrivateUsage]
    has_read = threading.Event()

    def late(*arguments: Any) -> str | None:
        assert has_read.wait(30)
        return compute(*arguments)

    monkeypatch.setattr(checksums, "_compute", late)
    require = Store.require_checked

    def read_all(self: Store) -> None:
        has_read.set()
        require(self)

    monkeypatch.setattr(Store, "require_checked", read_all)
    work = {
        "merge": lambda: merge([tmp_path / "store"], tmp_path / "out"),
        "convert": lambda: convert(tmp_path / "store", tmp_path / "out", "headway"),
        "pack": lambda: pack(tmp_path / "store", tmp_path / "out", PackOptions(16)),
    }[verb]
    with pytest.raises(DataError, match=r"tokens-00000\.bin: damaged"):
        work()
    assert not is_store(tmp_path / "out")
