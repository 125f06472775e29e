"""Many shards and many sources train under a small limit of open files."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from support.runs import headway, tiny_settings

from headway.errors import DataError
from headway.store.memory_map import MappedFiles, map_file
from headway.store.reader import open_store
from headway.store.writer import StoreWriter


def write_store(path: Path, documents: int, shard_tokens: int) -> None:
    rng = np.random.default_rng(len(str(path)))
    with StoreWriter(
        path, dtype="uint16", tokenizer_fingerprint=None, shard_tokens=shard_tokens
    ) as writer:
        for _ in range(documents):
            writer.add(rng.integers(0, 64, 12).astype(np.uint16))
        writer.finish()


@pytest.fixture
def few_files(request: pytest.FixtureRequest) -> None:
    """Children start with this hard limit; the tests themselves keep theirs."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    fork = os.fork
    limit = request.param

    def limited() -> int:
        pid = fork()
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        return pid

    os.fork = limited
    yield
    os.fork = fork
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize("few_files", [200], indirect=True)
def test_hundreds_of_shards_and_sources_train_with_few_open_files(
    tmp_path: Path, few_files: None
) -> None:
    write_store(tmp_path / "shards", 320, 12)
    for number in range(120):
        write_store(tmp_path / f"s{number}", 2, 1000)
    assert len(list((tmp_path / "shards").glob("tokens-*.bin"))) == 320
    sources = ",".join(str(tmp_path / name) for name in ("shards", *(f"s{n}" for n in range(120))))
    settings = [
        *tiny_settings(tmp_path, "run"),
        f"data.train=[{sources}]",
        "data.valid=null",
        "eval.every=null",
        "steps=null",
        "epochs=1",
    ]
    done = headway("train", *settings, "checkpoint.at_end=false")
    assert done.returncode == 0, done.stderr[-2000:]


def test_maps_are_bounded_and_hold_no_open_file(tmp_path: Path) -> None:
    write_store(tmp_path / "s", 40, 12)
    maps = MappedFiles(max_maps=5)
    before = len(os.listdir("/proc/self/fd"))
    paths = sorted((tmp_path / "s").glob("tokens-*.bin"))
    contents = [maps.get(str(path), "<u2", path.stat().st_size) for path in paths]
    assert len(maps) == 5
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(
        np.array_equal(content, np.fromfile(path, "<u2"))
        for content, path in zip(contents, paths, strict=True)
    )
    with pytest.raises(ValueError, match="read-only"):
        contents[0][0] = 1


def test_a_store_cut_under_a_reader_is_an_error_with_its_name(tmp_path: Path) -> None:
    write_store(tmp_path / "s", 40, 10_000)
    store = open_store(tmp_path / "s")
    assert len(store.document(39)) == 12
    os.truncate(tmp_path / "s" / "tokens-00000.bin", 4)
    with pytest.raises(DataError, match=r"tokens-00000\.bin: has 4 bytes; store\.json says 960"):
        store.document(39)


def test_too_many_open_files_are_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(DataError, match=r"too many files are open.*ulimit -n"):
            map_file(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
