"""Every file that a run's data is read from is listed, and so are the documents that depend on a file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.disk_bit_flip import flip_bit_on_disk
from support.media_store import TOKENS, make_media_store
from support.preference_pairs import make_pair_store

from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.media import MediaFeatures
from headway.data.mixture import MixtureSource
from headway.data.open import OpenData
from headway.data.selection import Selection
from headway.data.stored_files import UnknownReaders, documents_read_from, stored_files
from headway.data.teacher import CachedTeacher
from headway.errors import DataError
from headway.runtime.storage import sha256_file
from headway.store import checksums
from headway.store.checksums import Checksums
from headway.store.media_table import MediaTable, MediaTableWriter, open_table
from headway.store.reader import Store, open_store
from headway.store.source import DocumentRange, TokenRange, TokenSource
from headway.store.teacher_logits import LogitsOrigin, TeacherLogitsWriter, open_logits
from headway.store.writer import StoreWriter
from headway.tasks.kto.source import UnpairedSource
from headway.tasks.preference.source import PairSource


def make_store(folder: Path, lengths: list[int], shard_tokens: int = 20) -> Store:
    with StoreWriter(
        folder, dtype="uint16", tokenizer_fingerprint="f", shard_tokens=shard_tokens
    ) as writer:
        for number, length in enumerate(lengths):
            writer.add(np.full(length, number % 60, np.uint16))
        writer.finish()
    return open_store(folder)


def data_of(*sources: TokenSource) -> OpenData:
    return OpenData(tuple(MixtureSource(Selection(source)) for source in sources), {})


def make_table(folder: Path, rows: int = 4) -> MediaTable:
    with MediaTableWriter(folder, (1, 2), "float32", "made by hand", shard_bytes=16) as writer:
        writer.add([f"{number:064x}" for number in range(rows)], np.zeros((rows, 1, 2), np.float32))
        writer.finish()
    return open_table(folder)


def files_below(*folders: Path) -> dict[Path, str]:
    return {
        path: sha256_file(path)
        for folder in folders
        for path in folder.iterdir()
        if path.suffix in (".bin", ".idx")
    }


def test_tokens_belong_to_the_documents_of_their_shard(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [7, 8, 9, 10, 11])
    data = data_of(store)
    shards = [
        tmp_path / "store" / f"tokens-{number:05}.bin"
        for number in range(len(store.manifest.shards))
    ]
    ranges = [documents_read_from(path, store, data) for path in shards]
    # By hand: a shard is closed when it holds 20 tokens or more.
    assert len(shards) > 1
    assert ranges == [range(first, first + len(part)) for first, part in _parts(store)]
    assert documents_read_from(tmp_path / "other" / "tokens-00000.bin", store, data) is None
    for name in ("docs-00000.idx",):
        with pytest.raises(UnknownReaders):
            documents_read_from(tmp_path / "store" / name, store, data)
    assert stored_files(data) == [files_below(tmp_path / "store")]


def _parts(store: Store) -> list[tuple[int, list[int]]]:
    """The first document of each shard, and its documents, seen in their content: document n holds the number n."""
    parts: list[tuple[int, list[int]]] = []
    for number in range(len(store.manifest.shards)):
        ids = np.fromfile(store.folder / f"tokens-{number:05}.bin", "<u2")
        documents = sorted(set(ids.tolist()))
        parts.append((documents[0], documents))
    return parts


def test_a_view_numbers_the_documents_of_a_shard_from_its_own_first(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [10] * 8)
    shard = tmp_path / "store" / "tokens-00001.bin"
    view = DocumentRange(store, 3, 8, "part")
    assert documents_read_from(shard, store, data_of(store)) == range(2, 4)
    assert documents_read_from(shard, view, data_of(view)) == range(1)
    assert documents_read_from(shard, DocumentRange(store, 4, 8, "part"), data_of(view)) is None
    assert documents_read_from(shard, TokenRange(store, 2, 1, 5), data_of(view)) == range(1)


@pytest.mark.parametrize("kind", ["tokens", "mask"])
def test_a_source_of_pairs_numbers_pairs(tmp_path: Path, kind: str) -> None:
    store = open_store(make_pair_store(tmp_path / "pairs", pairs=9))
    shard = tmp_path / "pairs" / f"{kind}-00000.bin"
    assert documents_read_from(shard, PairSource(store), data_of(store)) == range(9)


def test_documents_of_labelled_answers_are_not_known_by_shard(tmp_path: Path) -> None:
    make_store(tmp_path / "store", [10] * 8)
    labelled = UnpairedSource(open_store(make_pair_store(tmp_path / "pairs", pairs=9)), 64)
    with pytest.raises(UnknownReaders):
        documents_read_from(tmp_path / "pairs" / "tokens-00000.bin", labelled, data_of(labelled))
    other_shard = tmp_path / "store" / "tokens-00001.bin"
    assert documents_read_from(other_shard, labelled, data_of(labelled)) is None


def test_files_of_a_store_are_listed_once(tmp_path: Path) -> None:
    view = DocumentRange(make_store(tmp_path / "store", [10] * 8), 3, 8, "part")
    pairs = open_store(make_pair_store(tmp_path / "pairs", pairs=9))
    data = data_of(view, PairSource(pairs), UnpairedSource(pairs, 64))
    assert stored_files(data) == [files_below(tmp_path / "store"), files_below(tmp_path / "pairs")]


def test_tables_of_media_and_teachers_logits_are_listed(tmp_path: Path) -> None:
    media = make_media_store(tmp_path / "media")
    plain = make_store(tmp_path / "plain", [10] * 8)
    tables = {name: make_table(tmp_path / name) for name in TOKENS}
    origin = LogitsOrigin(
        store=plain.manifest.content, tokenizer="f", teacher="teacher", teacher_sha256="0" * 64, vocab=60, seq_len=16, top_k=2,
        temperature=1.0, dtype="float16", documents=(0, 8), tokens=(0, 80),
    )  # fmt: skip
    with TeacherLogitsWriter(tmp_path / "logits", origin) as writer:
        writer._rows._shard_rows = 25  # pyright: ignore[reportPrivateUsage] - shards of a test are small
        writer.add(np.zeros((80, 2), np.int32), np.zeros((80, 3), np.float16))
        writer.finish()
    logits = open_logits(tmp_path / "logits")
    data = replace(
        data_of(media, plain),
        media=MediaFeatures(tables, TOKENS),
        teacher=CachedTeacher({plain.manifest.content: (logits,)}, origin),
    )
    listed = {path: checksum for files in stored_files(data) for path, checksum in files.items()}
    assert listed == files_below(
        *(tmp_path / name for name in ("media", "plain", *TOKENS, "logits"))
    )
    row_file = tmp_path / "image" / "rows-00001.bin"
    assert documents_read_from(row_file, media, data) == range(media.num_documents)
    assert documents_read_from(row_file, plain, data) is None
    # Positions 25 to 49 are of documents 2 (20 to 29) to 4 (40 to 49).
    assert documents_read_from(tmp_path / "logits" / "ids-00001.bin", plain, data) == range(2, 5)
    assert documents_read_from(tmp_path / "logits" / "ids-00001.bin", media, data) is None


def test_stores_of_other_formats_are_compared_with_what_they_were_read_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.store.convert import ConvertOptions, convert
    from headway.store.open import open_source

    make_store(tmp_path / "store", [10] * 8)
    convert(tmp_path / "store", tmp_path / "theirs", "internlm", ConvertOptions())
    source = open_source(tmp_path / "theirs")
    data = replace(data_of(source), checksums=Checksums(tmp_path / "cache"))
    assert stored_files(data) == [{}]
    files = [file for part in source.parts for file in part.files]  # type: ignore[attr-defined]
    monkeypatch.setattr(checksums, "SETTLED_SECONDS", -1.0)
    data.checksums.of_all(files)
    assert stored_files(data) == [{path: sha256_file(path) for path in files}]
    flip_bit_on_disk(files[0], 9, tmp_path / "cache")
    with pytest.raises(DataError, match="damaged"):
        Checksums(tmp_path / "cache").verify_now(stored_files(data))
    with pytest.raises(UnknownReaders):
        documents_read_from(files[0], source, data)


def test_batches_are_found_again_and_steps_are_counted_without_the_skipped_ones(
    tmp_path: Path,
) -> None:
    store = make_store(tmp_path / "store", [30] * 40, shard_tokens=300)
    config = DataConfig.model_validate(
        {
            "seq_len": 30,
            "workers": 0,
            "packing": "pad",
            "cache_dir": tmp_path / "cache",
            "skip_batches": "2-3,6",
        }
    )
    wanted = {0: range(10, 20)}
    with Loader(
        config, sources=[MixtureSource(Selection(store))], rows_per_step=2, micro_rows=2, seed=3
    ) as loader:
        reading: list[int] = []
        for step in range(1, 9):
            batch, _ = next(loader)
            ids = batch.microbatches[0].tokens[:, 0].tolist()
            if any(number in wanted[0] for number in ids):
                reading.append(step)
        replayed = loader.batches_reading(wanted, lambda: False)
        assert replayed.is_exact
        assert replayed.num_batches == loader.state.batch == 11
        assert [8 - loader.steps_after(batch) for batch in replayed.batches] == reading
        assert 0 < len(reading) < 8
        cut = loader.batches_reading(wanted, lambda: True)
        assert not cut.is_exact
        assert cut.num_batches == 1
