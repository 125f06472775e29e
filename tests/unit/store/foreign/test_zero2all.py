"""zero2all files: raw uint16 bins with an index map, SFT pairs with wrapped -100, and maps that no longer fit."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DataError
from headway.store.foreign.zero2all import (
    BEGIN_ID,
    IGNORED,
    SftPairWriter,
    Zero2allWriter,
    index_map,
    open_zero2all,
    open_zero2all_sft,
)

plain_documents = st.lists(
    st.lists(st.integers(0, BEGIN_ID - 1), max_size=20), min_size=1, max_size=15
)
masked_samples = st.lists(
    st.lists(st.tuples(st.integers(0, IGNORED - 1), st.booleans()), min_size=1, max_size=20),
    min_size=1,
    max_size=12,
)


def write(
    folder: Path, documents: list[list[int]], seq_len: int = 4, file_tokens: int = 10
) -> Path:
    with Zero2allWriter(folder, seq_len=seq_len, file_tokens=file_tokens) as writer:
        for ids in documents:
            writer.add(np.array(ids, dtype=np.int64))
        writer.finish()
    return folder


@settings(deadline=None, max_examples=40)
@given(documents=plain_documents)
def test_round_trip_keeps_documents_each_with_one_begin_token(
    documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write(tmp_path_factory.mktemp("z2"), documents)
    store = open_zero2all(folder)
    assert [d.ids.tolist() for d in store.documents()] == [[BEGIN_ID, *ids] for ids in documents]
    assert store.num_tokens == sum(map(len, documents)) + len(documents)
    again = write(tmp_path_factory.mktemp("z2"), [d.ids.tolist() for d in store.documents()])
    assert {f.name: f.read_bytes() for f in folder.rglob("*.*bin")} == {
        f.name: f.read_bytes() for f in again.rglob("*.*bin")
    }


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6), seq_len=st.integers(1, 6))
def test_the_index_map_covers_the_joined_files_sample_by_sample(
    sizes: list[int], seq_len: int
) -> None:
    pairs = index_map(sizes, seq_len).tolist()
    joined = [(file, offset) for file, size in enumerate(sizes) for offset in range(size)]
    expected = [
        list(joined[k]) for k in range(0, len(joined), seq_len) if k + seq_len < len(joined)
    ]
    assert pairs == expected


def test_bins_added_after_the_map_was_built_are_found_out(tmp_path: Path) -> None:
    folder = write(tmp_path, [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10], [11]])
    (folder / "01_bin_for_train" / "file_000_00000a.bin").write_bytes(
        np.array([BEGIN_ID, 3, 3], dtype="<u2").tobytes()
    )
    with pytest.raises(DataError, match="added, removed or changed after it was built") as caught:
        open_zero2all(folder)
    assert "\n" not in str(caught.value)
    assert open_zero2all(folder, rebuild_index=True).num_documents == 4


def test_the_builders_exact_multiple_fault_is_named(tmp_path: Path) -> None:
    for name, tokens in (
        ("a.bin", [BEGIN_ID, 1, 2, 3, BEGIN_ID, 1, 2, 3]),
        ("b.bin", [BEGIN_ID] + [7] * 20),
    ):
        (tmp_path / name).write_bytes(np.array(tokens, dtype="<u2").tobytes())
    faulty = np.array([[0, 0], [0, 4], [1, 8], [1, 12], [1, 16]], dtype="<u4")
    (tmp_path / "all_sample_index_map_4.ibin").write_bytes(faulty.tobytes())
    with pytest.raises(
        DataError, match="did not reset the offset after a file of an exact multiple of 4 tokens"
    ):
        open_zero2all(tmp_path)


@pytest.fixture
def two_documents(tmp_path: Path) -> Path:
    return write(tmp_path / "a", [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]])


def test_a_cut_index_is_refused(two_documents: Path) -> None:
    (index_file,) = two_documents.glob("*.ibin")
    index_file.write_bytes(index_file.read_bytes()[:-3])
    with pytest.raises(DataError, match="truncated"):
        open_zero2all(two_documents)


def test_half_a_token_at_the_end_of_a_file_is_refused(two_documents: Path) -> None:
    (index_file,) = two_documents.glob("*.ibin")
    index_file.unlink()
    first, *_ = sorted(two_documents.rglob("*.bin"))
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(DataError, match="not a whole number of uint16"):
        open_zero2all(two_documents)


def test_a_file_that_does_not_begin_with_the_begin_id_is_refused(two_documents: Path) -> None:
    (index_file,) = two_documents.glob("*.ibin")
    index_file.unlink()
    first, *_ = sorted(two_documents.rglob("*.bin"))
    first.write_bytes(np.array([5, 5], dtype="<u2").tobytes())
    with pytest.raises(DataError, match="starts with id 5"):
        open_zero2all(two_documents, begin_id=BEGIN_ID)


def test_empty_bins_among_others_are_legal_and_alone_are_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]])
    (folder / "01_bin_for_train" / "zz_empty.bin").write_bytes(b"")
    assert open_zero2all(folder).num_documents == 2
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.bin").write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        open_zero2all(tmp_path / "b")


def test_the_writer_refuses_what_the_format_cannot_hold(tmp_path: Path) -> None:
    writer = Zero2allWriter(tmp_path)
    with pytest.raises(DataError, match="does not fit zero2all's uint16"):
        writer.add(np.array([70000]))
    with pytest.raises(DataError, match="would split there"):
        writer.add(np.array([1, BEGIN_ID, 2]))
    with pytest.raises(DataError, match="no loss mask"):
        writer.add(np.array([1, 2, 3]), np.array([True, False, True]))


@settings(deadline=None, max_examples=40)
@given(samples=masked_samples)
def test_sft_pairs_keep_ids_and_masks(
    samples: list[list[tuple[int, bool]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sft")
    writer = SftPairWriter(folder, "chat")
    for sample in samples:
        writer.add(np.array([t for t, _ in sample]), np.array([m for _, m in sample]))
    writer.finish()
    labels = np.fromfile(folder / "chat_labels.bin", dtype="<u2").astype(np.int64)
    assert all(
        (label == IGNORED) != kept
        for label, kept in zip(labels, [m for s in samples for _, m in s], strict=True)
    )
    store = open_zero2all_sft(folder)
    assert [d.ids.tolist() for d in store.documents()] == [[t for t, _ in s] for s in samples]
    assert [store.mask(i).tolist() for i in range(len(samples))] == [
        [m for _, m in s] for s in samples
    ]  # pyright: ignore[reportOptionalMemberAccess]


def two_pairs(folder: Path) -> Path:
    for base in ("a", "b"):
        (folder / f"{base}_input_ids.bin").write_bytes(
            np.array([1, 2, 3, 4], dtype="<u2").tobytes()
        )
        (folder / f"{base}_labels.bin").write_bytes(
            np.array([-100 % 65536, 2, -100 % 65536, 4], dtype="<u2").tobytes()
        )
        (folder / f"{base}_sample_index_map.ijson").write_text("[[0, 3], [3, 1]]")
    return folder


def test_wrapped_minus_100_is_read_as_no_target(tmp_path: Path) -> None:
    store = open_zero2all_sft(two_pairs(tmp_path))
    assert IGNORED == -100 % 65536
    assert [
        (d.ids.tolist(), None if d.mask is None else d.mask.tolist()) for d in store.documents()
    ] == [
        ([1, 2, 3], [False, True, False]),
        ([4], None),
    ] * 2


def test_running_sample_counts_as_file_numbers_are_known_and_other_joint_maps_are_stale(
    tmp_path: Path,
) -> None:
    folder = two_pairs(tmp_path)
    joint = folder / "all_sample_index_map.ijson"
    for numbers in ([0, 0, 1, 1], [0, 0, 2, 2]):
        joint.write_text(
            json.dumps([[n, *s] for n, s in zip(numbers, [[0, 3], [3, 1]] * 2, strict=True)])
        )
        assert open_zero2all_sft(folder).num_documents == 4
    joint.write_text("[[0, 0, 3], [0, 3, 1]]")
    with pytest.raises(DataError, match="belongs to other files"):
        open_zero2all_sft(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a_sample_index_map.ijson", b"[[0, 3]]", "stale or damaged"),
        ("a_sample_index_map.ijson", b"[[0, 3], [2, 2]]", "stale or damaged"),
        ("a_sample_index_map.ijson", b"", "not a JSON list"),
        ("a_sample_index_map.ijson", b'{"a": 1}', "not a JSON list|must be a JSON list"),
        ("a_labels.bin", b"\0\0", "1 labels for 4 ids"),
        ("a_labels.bin", np.array([9, 2, 3, 4], dtype="<u2").tobytes(), "the label is 9"),
    ],
)
def test_pairs_that_do_not_belong_together_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = two_pairs(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(open_zero2all_sft(folder).documents())
