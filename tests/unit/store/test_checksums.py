"""Data is hashed whatever the cache remembers: small stores at once, the others in a thread that yields, ends at once and finds damage."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rot import rot

from headway.errors import DataError
from headway.prepare.pack import PackOptions, pack
from headway.runtime.storage import sha256_file
from headway.store import checksums
from headway.store.checksums import Checksums
from headway.store.convert import convert
from headway.store.merge import merge
from headway.store.reader import Store, StoreWriter, is_store


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "SETTLED_SECONDS", -1.0)


def make_store(folder: Path, sizes: list[int]) -> dict[Path, str]:
    folder.mkdir(parents=True)
    found = {}
    for number, size in enumerate(sizes):
        path = folder / f"tokens-{number:05}.bin"
        path.write_bytes(os.urandom(size))
        found[path] = sha256_file(path)
    return found


def wait_until_done(found: Checksums) -> None:
    while found.waiting and found.damage is None:
        time.sleep(0.001)


def test_small_stores_are_hashed_and_large_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (
        make_store(tmp_path / "small", [100, 200]),
        make_store(tmp_path / "large", [900, 900]),
    )
    cache = tmp_path / "cache"
    for path, expected in {**small, **large}.items():
        Checksums(cache).require(path, expected)
    monkeypatch.setattr(checksums, "AT_START_BYTES", 1000)
    assert Checksums(cache).verify_now([large, small]) == large
    rot(list(large)[1], 5, cache)
    assert Checksums(cache).verify_now([large, small]) == large
    rot(list(small)[1], 5, cache)
    Checksums(cache).require(
        list(small)[1], small[list(small)[1]]
    )  # the cache still says that it is good
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
    found = Checksums(tmp_path / "cache")
    (path,) = store
    found.require(path, store[path])
    monkeypatch.setattr(checksums, "_compute", lambda *_: pytest.fail("hashed again"))
    assert found.verify_now([store]) == {}


def test_the_thread_finds_what_the_cache_does_not_know(tmp_path: Path) -> None:
    store, cache = make_store(tmp_path / "store", [5000] * 4), tmp_path / "cache"
    for path, expected in store.items():
        Checksums(cache).require(path, expected)
    bad = list(store)[2]
    rot(bad, 11, cache)
    found = Checksums(cache)
    found.verify_in_background(store)
    wait_until_done(found)
    assert (
        found.damage is not None
        and found.damage.path == bad
        and f"{bad}: damaged" in found.damage.problem
    )
    assert isinstance(found.failed, DataError)
    found.is_watched = True
    assert found.failed is None


def test_files_that_were_not_hashed_for_the_longest_time_come_first_and_those_in_use_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cache = make_store(tmp_path / "store", [100] * 5), tmp_path / "cache"
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
    found = Checksums(cache)
    found.require(paths[2], store[paths[2]])
    found.verify_in_background(store, share=1.0)
    wait_until_done(found)
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

    found = Checksums(tmp_path / "cache")
    monkeypatch.setattr(found._background, "_is_over", Over())  # pyright: ignore[reportPrivateUsage]
    found.verify_in_background(store)
    assert begun.wait(30)
    (worker,) = [
        one
        for one in threading.enumerate()
        if one.name == "headway-checksums" and one is found._background._worker
    ]  # pyright: ignore[reportPrivateUsage]
    found.end()
    worker.join(10)
    assert not worker.is_alive() and found.waiting == list(store) and slept[0] > 0


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [10])
    (path,) = store
    path.unlink()
    found = Checksums(tmp_path / "cache")
    found.verify_in_background(store)
    wait_until_done(found)
    assert found.damage is not None and "cannot be read: No such file" in found.damage.problem


def test_a_checksum_that_was_misread_once_is_no_damage_for_ever(tmp_path: Path) -> None:
    store, cache = make_store(tmp_path / "store", [100]), tmp_path / "cache"
    (path,) = store
    rot(path, 3, cache)
    Checksums(cache).of(path)
    rot(path, 3, cache)  # the file is well again, and the cache remembers what was read
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
    rot(tmp_path / "store" / "tokens-00000.bin", 33)
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
