"""InternLM files: the published example, round trips, masks by sign, and indexes that do not fit."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DataError
from headway.store.foreign.internlm import InternlmWriter, open_internlm, scan_lines, type_of_bin

EXAMPLE = [
    [73075, 75302, 69522, 69022, 98899, 67713, 68015, 81269, 74637, 75445, 99157],
    [
        69469,
        60355,
        73026,
        68524,
        60846,
        61844,
        98899,
        67775,
        79241,
        98899,
        67713,
        67800,
        67453,
        67838,
        99157,
    ],
    [68057, 79017, 60378, 68014, 98899, 67713, 67990, 68015, 70381, 67428, 61003, 67622, 99157],
]
masked_documents = st.lists(
    st.lists(st.tuples(st.integers(1, 2**32 - 1), st.booleans()), max_size=30),
    min_size=1,
    max_size=12,
)


def write(file: Path, documents: list[list[int]], masks: list[list[bool]] | None = None) -> Path:
    with InternlmWriter(file) as writer:
        for i, ids in enumerate(documents):
            writer.add(
                np.array(ids, dtype=np.int64),
                None if masks is None else np.array(masks[i], dtype=bool),
            )
        writer.finish()
    return file


def test_the_published_example_has_meta_offsets_0_90_208(tmp_path: Path) -> None:
    file = write(tmp_path / "cn" / "output.bin", EXAMPLE)
    assert np.load(f"{file}.meta").tolist() == [[0, 11], [90, 15], [208, 13]]
    assert np.load(f"{file}.meta").dtype == np.int64
    assert file.read_text().splitlines() == [json.dumps({"tokens": ids}) for ids in EXAMPLE]
    store = open_internlm(tmp_path)
    assert [d.ids.tolist() for d in store.documents()] == EXAMPLE
    assert {d.type for d in store.documents()} == {"cn"}
    assert not store.masked
    assert (store.num_documents, store.num_tokens, store.max_id) == (3, 39, 99157)


@settings(deadline=None, max_examples=40)
@given(documents=masked_documents)
def test_round_trip_keeps_ids_and_masks(
    documents: list[list[tuple[int, bool]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("internlm") / "en" / "data.bin"
    ids = [[t for t, _ in d] for d in documents]
    masks = [[m for _, m in d] for d in documents]
    store = open_internlm(write(file, ids, masks))
    assert np.array_equal(scan_lines(file), np.load(f"{file}.meta"))
    for i, document in enumerate(store.documents()):
        assert document.ids.tolist() == ids[i]
        mask = [True] * len(ids[i]) if document.mask is None else document.mask.tolist()
        assert mask[1:] == masks[i][1:], "the first token's sign means nothing: nothing predicts it"
    assert store.lengths(0, len(ids)).tolist() == [len(document_ids) for document_ids in ids]
    assert store.first_at(0) == 0
    assert store.first_at(store.num_tokens + 1) == store.num_documents


def test_negative_ids_are_inputs_without_loss_and_the_first_stays_positive(tmp_path: Path) -> None:
    file = write(tmp_path / "d.bin", [[1, 7, 8, 9]], [[False, False, True, True]])
    assert json.loads(file.read_text()) == {"tokens": [1, -7, 8, 9]}
    store = open_internlm(file)
    assert store.masked
    assert store.document(0).ids.tolist() == [1, 7, 8, 9]
    assert store.mask(0, 1, 4).tolist() == [False, True, True]  # pyright: ignore[reportOptionalMemberAccess]
    assert store.tokens(0, 1, 3).tolist() == [7, 8]


def test_id_0_of_a_masked_document_is_an_input_and_never_a_target(tmp_path: Path) -> None:
    file = tmp_path / "cn" / "d.bin"
    file.parent.mkdir()
    # as InternLM itself would write them
    file.write_text('{"tokens": [5, -7, 0, 9]}\n{"tokens": [5, 7, 0, 9]}\n')
    store = open_internlm(file, rebuild_index=True)
    assert store.document(0).ids.tolist() == store.document(1).ids.tolist() == [5, 7, 0, 9]
    assert store.mask(0, 0, 4).tolist() == [True, False, False, True]  # pyright: ignore[reportOptionalMemberAccess]
    assert store.mask(1, 0, 4).tolist() == [True, True, True, True]  # pyright: ignore[reportOptionalMemberAccess]


def test_token_0_in_a_masked_document_is_refused_because_its_mask_cannot_be_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match="token 0"):
        write(tmp_path / "a.bin", [[1, 7, 0, 9]], [[False, False, True, True]])
    with pytest.raises(DataError, match="token 0"):
        write(tmp_path / "b.bin", [[1, 0, 9]], [[True, False, True]])
    assert list(tmp_path.iterdir()) == [], "what was not finished leaves nothing behind"
    write(tmp_path / "c.bin", [[1, 0, 9]])
    assert open_internlm(tmp_path / "c.bin").document(0).mask is None


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", ">i8", "int16"])
def test_any_integer_meta_is_read_and_extra_columns_are_passed_over(
    tmp_path: Path, dtype: str
) -> None:
    file = write(tmp_path / "d.bin", EXAMPLE)
    meta = np.load(f"{file}.meta")
    np.save(
        f"{file}.meta.npy", np.stack([meta[:, 0], meta[:, 0] * 0, meta[:, 1]], axis=1).astype(dtype)
    )
    (tmp_path / "d.bin.meta.npy").replace(tmp_path / "d.bin.meta")
    assert [d.ids.tolist() for d in open_internlm(file).documents()] == EXAMPLE


def replace_meta(file: Path, meta: np.ndarray) -> None:
    with open(f"{file}.meta", "wb") as out:
        np.save(out, meta)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (np.array([[0, 11], [-90, 15], [208, 13]], dtype=np.int32), "int32 and wrapped past 2 GiB"),
        (np.array([[0, 11], [208, 15], [90, 13]], dtype=np.int64), "byte offsets must rise"),
        (np.array([[0, 11], [90, 15], [5000, 13]], dtype=np.int64), "do not belong together"),
        (np.array([[90, 11], [208, 15]], dtype=np.int64), "do not belong together"),
        (np.array([[0, 11], [90, -1], [208, 13]], dtype=np.int64), "token counts"),
        (np.zeros((0, 2), dtype=np.int64), "lists no document"),
        (np.zeros(3, dtype=np.int64), "shape"),
        (np.zeros((3, 2), dtype=np.float32), "integer"),
    ],
)
def test_a_meta_that_cannot_describe_the_bin_is_refused_when_opened(
    tmp_path: Path, meta: np.ndarray, message: str
) -> None:
    file = write(tmp_path / "d.bin", EXAMPLE)
    replace_meta(file, meta)
    with pytest.raises(DataError, match=message) as caught:
        open_internlm(file)
    assert "\n" not in str(caught.value)
    assert "--rebuild-index" in str(caught.value)
    assert open_internlm(file, rebuild_index=True).num_documents == 3


@pytest.mark.parametrize(
    ("meta", "document", "message"),
    [
        ([[0, 11], [91, 15], [208, 13]], 1, "is not one line"),
        ([[0, 11], [208, 13]], 0, "is not one line"),
        ([[0, 11], [90, 14], [208, 13]], 1, r"has 15 tokens, its \.meta says 14"),
    ],
    ids=["offset inside a line", "two lines", "wrong count"],
)
def test_a_meta_file_that_contradicts_its_lines_is_refused_when_read(
    tmp_path: Path, meta: list[list[int]], document: int, message: str
) -> None:
    file = write(tmp_path / "d.bin", EXAMPLE)
    replace_meta(file, np.array(meta))
    with pytest.raises(DataError, match=message):
        open_internlm(file).document(document)


@pytest.mark.parametrize(
    "line",
    [
        '{"tokens": [1, 2.5]}',
        '{"tokens": [1, "a"]}',
        '{"ids": [1]}',
        "[1, 2]",
        '{"tokens": [[1], [2]]}',
        "{",
        "7",
    ],
)
def test_lines_of_another_shape_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "d.bin").write_text(line + "\n")
    replace_meta(tmp_path / "d.bin", np.array([[0, 2]]))
    with pytest.raises(DataError, match=r"d\.bin"):
        open_internlm(tmp_path / "d.bin").document(0)
    with pytest.raises(DataError, match=r"d\.bin:1"):
        open_internlm(tmp_path / "d.bin", rebuild_index=True)


def test_a_type_is_the_folder_and_late_z_folders_count_as_the_plain_one(tmp_path: Path) -> None:
    for name in ("cn/a.bin", "z_cn/b.bin", "en/deep/c.bin", "zoo/d.bin"):
        write(tmp_path / name, [[1]])
    store = open_internlm(tmp_path)
    assert [part.file.name for part in store.parts] == ["a.bin", "c.bin", "b.bin", "d.bin"]
    assert [store.type_of(i) for i in range(4)] == ["cn", "en", "cn", "zoo"]
    assert type_of_bin(tmp_path / "cn/a.bin", tmp_path / "cn/a.bin") == "cn"


def test_a_missing_meta_and_a_folder_without_bins_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.bin file"):
        open_internlm(tmp_path)
    (tmp_path / "d.bin").write_text('{"tokens": [1]}\n')
    with pytest.raises(DataError, match=r"d\.bin\.meta is missing"):
        open_internlm(tmp_path)


def test_a_store_travels_to_another_process_by_being_opened_again(tmp_path: Path) -> None:
    store = open_internlm(write(tmp_path / "d.bin", EXAMPLE))
    again = pickle.loads(pickle.dumps(store))
    assert [d.ids.tolist() for d in again.documents()] == EXAMPLE
    assert again.content_key == store.content_key
    write(tmp_path / "d.bin", [*EXAMPLE, [5]])
    assert open_internlm(tmp_path / "d.bin").content_key != store.content_key
