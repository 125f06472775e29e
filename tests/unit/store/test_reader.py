"""The native store: what goes in comes out, a damaged or half-written folder never opens as something else."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.mixture import MixtureSource
from headway.data.selection import Selection
from headway.errors import DataError
from headway.runtime.storage import sha256_file
from headway.store.manifest import ShardFile, StoreManifest, StoreShard, read_manifest
from headway.store.merge import merge
from headway.store.reader import Store, open_store
from headway.store.writer import StoreWriter

documents = st.lists(st.lists(st.integers(0, 65535), max_size=30), max_size=20)


def write(
    folder: Path,
    docs: list[list[int]],
    *,
    masks: list[np.ndarray] | None = None,
    shard_tokens: int = 40,
) -> Store:
    writer = StoreWriter(
        folder,
        dtype="uint16",
        tokenizer_fingerprint="f",
        masked=masks is not None,
        shard_tokens=shard_tokens,
    )
    for number, doc in enumerate(docs):
        writer.add(doc, None if masks is None else masks[number])
    writer.finish()
    return open_store(folder)


@settings(max_examples=40, deadline=None)
@given(
    docs=documents, shard_tokens=st.integers(1, 100), masked=st.booleans(), seed=st.integers(0, 99)
)
def test_documents_and_masks_round_trip(
    tmp_path_factory: pytest.TempPathFactory, docs, shard_tokens, masked, seed
) -> None:
    rng = np.random.default_rng(seed)
    masks = [rng.random(len(doc)) < 0.5 for doc in docs] if masked else None
    store = write(
        tmp_path_factory.mktemp("s") / "store", docs, masks=masks, shard_tokens=shard_tokens
    )
    assert (store.num_documents, store.num_tokens) == (len(docs), sum(map(len, docs)))
    assert [store.document(i).tolist() for i in range(len(docs))] == docs
    assert store.max_id == max((i for doc in docs for i in doc), default=-1)
    assert store.lengths(0, len(docs)).tolist() == [len(doc) for doc in docs]
    for i in range(len(docs)):
        mask = store.document_mask(i)
        assert (
            (mask is None)
            if masks is None
            else (mask is not None and mask.tolist() == masks[i].tolist())
        )
    starts = np.cumsum([0, *map(len, docs)])
    cuts = [store.first_at(token) for token in range(0, store.num_tokens + 9, 7)]
    assert cuts == sorted(cuts)
    assert cuts[-1] == len(docs)
    for token, document in zip(range(0, store.num_tokens + 9, 7), cuts, strict=True):
        assert document == len(docs) or starts[document] >= token
        assert document == 0 or starts[document - 1] < token or len(docs[document - 1]) == 0
    store.verify()


@settings(max_examples=25, deadline=None)
@given(
    docs=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=30), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_gather_equals_reading_piece_by_piece(
    tmp_path_factory: pytest.TempPathFactory, docs, seed
) -> None:
    rng = np.random.default_rng(seed)
    store = write(
        tmp_path_factory.mktemp("s") / "store",
        docs,
        masks=[rng.random(len(d)) < 0.5 for d in docs],
        shard_tokens=50,
    )
    pick = rng.integers(0, len(docs), 9)
    starts = np.array([rng.integers(0, len(docs[i])) for i in pick])
    lengths = np.array(
        [rng.integers(0, len(docs[i]) - s + 1) for i, s in zip(pick, starts, strict=True)]
    )
    ids, mask = store.gather(pick, starts, lengths)
    pieces = [(int(i), int(s), int(s + n)) for i, s, n in zip(pick, starts, lengths, strict=True)]
    assert ids.tolist() == [t for piece in pieces for t in store.tokens(*piece).tolist()]
    assert mask is not None
    assert mask.tolist() == [t for piece in pieces for t in store.mask(*piece)]


def test_spans_keep_the_documents_inside_a_pack(tmp_path: Path) -> None:
    writer = StoreWriter(
        tmp_path, dtype="uint16", tokenizer_fingerprint=None, spans=True, shard_tokens=10
    )
    writer.add(np.arange(8), spans=np.array([0, 3, 5]))
    writer.add(np.arange(4))
    writer.add(np.arange(8), spans=np.array([0, 7]))
    writer.finish()
    store = open_store(tmp_path)
    assert [store.span_starts(i).tolist() for i in range(3)] == [[0, 3, 5], [0], [0, 7]]  # pyright: ignore[reportOptionalMemberAccess]


def test_many_at_once_writes_the_same_bytes_as_one_by_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 30, 50)
    ids = rng.integers(0, 1000, lengths.sum())
    mask = rng.random(len(ids)) < 0.5
    ends = np.cumsum(lengths)
    for name, step in (("one", 1), ("many", 50), ("seven", 7)):
        writer = StoreWriter(
            tmp_path / name,
            dtype="uint16",
            tokenizer_fingerprint="f",
            masked=True,
            shard_tokens=100,
        )
        for first in range(0, 50, step):
            last = min(first + step, 50)
            cut = slice(ends[first] - lengths[first], ends[last - 1])
            if step == 1:
                writer.add(ids[cut], mask[cut])
            else:
                writer.add_many(ids[cut], lengths[first:last], mask[cut])
        writer.finish()
    one_by_one = {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()}
    assert one_by_one == {p.name: p.read_bytes() for p in (tmp_path / "many").iterdir()}
    assert one_by_one == {p.name: p.read_bytes() for p in (tmp_path / "seven").iterdir()}


@pytest.mark.parametrize("killed_at", [0, 7, 23])
def test_a_resumed_writer_ends_with_the_same_bytes(tmp_path: Path, killed_at: int) -> None:
    rng = np.random.default_rng(1)
    docs = [rng.integers(0, 1000, rng.integers(1, 30)) for _ in range(40)]
    masks = [rng.random(len(d)) < 0.5 for d in docs]

    def build(folder: Path, stop: int | None) -> None:
        with StoreWriter(
            folder,
            dtype="uint32",
            tokenizer_fingerprint="f",
            masked=True,
            shard_tokens=90,
            resume=True,
        ) as writer:
            for i in range(writer.note.get("done", 0), len(docs)):
                writer.add(docs[i], masks[i])
                if i % 5 == 0:
                    writer.commit({"done": i + 1})
                if i == stop:
                    writer._flush()  # bytes after the last commit are on the disk when the process dies
                    return
            writer.finish()

    build(tmp_path / "whole", None)
    build(tmp_path / "killed", killed_at)
    with pytest.raises(DataError, match="unfinished"):
        open_store(tmp_path / "killed")
    build(tmp_path / "killed", None)
    assert {p.name: p.read_bytes() for p in (tmp_path / "killed").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()
    }


def test_damage_is_a_clear_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    write(
        tmp_path / "good",
        [rng.integers(0, 999, 20).tolist() for _ in range(30)],
        masks=[np.ones(20, bool)] * 30,
        shard_tokens=200,
    )
    content = {p.name: p.read_bytes() for p in (tmp_path / "good").iterdir()}
    tried = 0
    for name, whole in content.items():
        bent = bytearray(whole)
        bent[rng.integers(0, len(whole))] ^= 1 << int(rng.integers(0, 8))
        for number, changed in enumerate(
            (whole[:-3], whole[: len(whole) // 2], b"", whole + b"x", bytes(bent))
        ):
            folder = tmp_path / f"{name}-{number}"
            folder.mkdir()
            for other, kept in content.items():
                (folder / other).write_bytes(changed if other == name else kept)
            if name == "store.json" and number in (3, 4):
                continue
            with pytest.raises(DataError) as caught:
                open_store(folder).verify()
            assert "\n" not in str(caught.value)
            tried += 1
    assert tried > 20


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_bit_in_store_json_never_gives_other_documents(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    docs = [list(range(i + 1)) for i in range(9)]
    write(tmp_path / "good", docs)
    path = tmp_path / "good" / "store.json"
    content = bytearray(path.read_bytes())
    content[rng.integers(0, len(content))] ^= 1 << int(rng.integers(0, 8))
    path.write_bytes(bytes(content))
    try:
        store = open_store(tmp_path / "good")
        store.verify()
    except DataError:
        return
    assert [store.document(i).tolist() for i in range(store.num_documents)] == docs


def test_damaged_offsets_are_refused_when_read(tmp_path: Path) -> None:
    write(tmp_path / "s", [[1, 2, 3], [4, 5], [6]], shard_tokens=100)
    offsets = np.fromfile(tmp_path / "s" / "docs-00000.idx", "<i8")
    offsets[1] = 1 << 40
    offsets.tofile(tmp_path / "s" / "docs-00000.idx")
    with pytest.raises(DataError, match=r"docs-00000\.idx: damaged: its checksum"):
        open_store(tmp_path / "s").lengths(0, 3)
    seal(tmp_path / "s")
    with pytest.raises(DataError, match="offsets out of order"):
        open_store(tmp_path / "s").lengths(0, 3)


def seal(folder: Path) -> None:
    """Give a store's description the checksums of what lies there now."""
    manifest = read_manifest(folder)
    shards = [
        replace(
            shard,
            files={n: replace(f, sha256=sha256_file(folder / n)) for n, f in shard.files.items()},
        )
        for shard in manifest.shards
    ]
    (folder / "store.json").write_text(replace(manifest, shards=tuple(shards)).dump())


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "not a token store"),
        (
            lambda folder: StoreWriter(folder, dtype="uint16", tokenizer_fingerprint=None).commit(),
            "unfinished",
        ),
    ],
)
def test_what_is_no_store_is_refused(tmp_path: Path, prepare, said: str) -> None:
    prepare(tmp_path / "s")
    with pytest.raises(DataError, match=said):
        open_store(tmp_path / "s")


def test_a_finished_store_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "s", [[1]])
    with pytest.raises(DataError, match="already holds a finished token store"):
        StoreWriter(tmp_path / "s", dtype="uint16", tokenizer_fingerprint=None)


def test_a_new_store_touches_no_file_of_others(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model-00001.bin").write_bytes(b"weights")
    (tmp_path / "tokens-00007.bin").write_bytes(b"left by a killed build")
    write(tmp_path, [[1, 2]])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "docs-00000.idx",
        "pytorch_model-00001.bin",
        "store.json",
        "tokens-00000.bin",
    ]


@pytest.mark.parametrize("ids", [[-1], [65536]])
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, ids: list[int]) -> None:
    writer = StoreWriter(tmp_path / "s", dtype="uint16", tokenizer_fingerprint=None)
    writer.add(ids)
    with pytest.raises(DataError, match="does not fit uint16"):
        writer.finish()


def sparse_store(folder: Path, num_shards: int, shard_tokens: int, document_tokens: int) -> None:
    """A store of any size that takes no disk: its token files are holes."""
    folder.mkdir()
    shards = []
    for number in range(num_shards):
        tokens = folder / f"tokens-{number:05}.bin"
        docs = folder / f"docs-{number:05}.idx"
        with open(tokens, "wb") as file:
            file.truncate(shard_tokens * 4)
        np.arange(0, shard_tokens + 1, document_tokens, dtype="<i8").tofile(docs)
        files = {
            tokens.name: ShardFile(shard_tokens * 4, "0" * 64),
            docs.name: ShardFile(docs.stat().st_size, sha256_file(docs)),
        }
        shards.append(StoreShard(shard_tokens // document_tokens, shard_tokens, 0, files))
    manifest = StoreManifest("uint32", 99, False, False, "f", (), tuple(shards))
    (folder / "store.json").write_text(manifest.dump())


def test_a_terabyte_opens_in_under_a_second(tmp_path: Path) -> None:
    sparse_store(tmp_path / "s", 64, 1 << 32, 1 << 20)
    began = time.perf_counter()
    store = open_store(tmp_path / "s")
    last = store.document(store.num_documents - 1)
    assert store.first_at(store.num_tokens - 5) == store.num_documents
    seconds = time.perf_counter() - began
    assert store.num_tokens * 4 >= 1 << 40
    assert len(last) == 1 << 20
    assert last[-1] == 0
    assert seconds < 1, f"{seconds:.2f} s"
    assert json.loads((tmp_path / "s" / "store.json").read_text())["tokens"] == store.num_tokens


def test_a_loader_on_a_terabyte_opens_one_block(tmp_path: Path) -> None:
    sparse_store(tmp_path / "s", 64, 1 << 32, 1 << 16)
    began = time.perf_counter()
    sources = [MixtureSource(Selection(open_store(tmp_path / "s"), side="train", fraction=0.01))]
    with Loader(
        DataConfig(seq_len=8192, workers=0), sources=sources, rows_per_step=2, micro_rows=1, seed=1
    ) as loader:
        step, state = next(loader)
    assert time.perf_counter() - began < 2
    assert step.stats.tokens == 2 * 8192
    assert state.mixture.cursors[0].row == 2


def test_merged_packs_keep_where_their_documents_start(tmp_path: Path) -> None:
    packs = {"a": [[0, 3, 5], [0, 1]], "b": [[0, 2, 4], [0], [0, 6]]}
    for name, starts in packs.items():
        with StoreWriter(
            tmp_path / name, dtype="uint16", tokenizer_fingerprint="f", spans=True
        ) as writer:
            for start in starts:
                writer.add(np.arange(8), None, np.array(start))
            writer.finish()
    merged = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    every = [merged.span_starts(document) for document in range(merged.num_documents)]
    assert [starts.tolist() for starts in every if starts is not None] == [*packs["a"], *packs["b"]]


def test_merged_stores_keep_large_ids_and_the_types_of_documents(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "small", dtype="uint16", tokenizer_fingerprint="f") as writer:
        writer.add(np.array([1, 2]))
        writer.finish()
    with StoreWriter(
        tmp_path / "large", dtype="uint32", tokenizer_fingerprint="f", typed=True
    ) as writer:
        writer.add(np.array([70_000]), None, None, "en")
        writer.add(np.array([3]), None, None, "code")
        writer.finish()
    merged = merge([tmp_path / "small", tmp_path / "large"], tmp_path / "both")
    assert [merged.document(number).tolist() for number in range(3)] == [[1, 2], [70_000], [3]]
    assert [merged.type_of(number) for number in (1, 2)] == ["en", "code"]
