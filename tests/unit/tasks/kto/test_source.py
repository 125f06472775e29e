"""Labelled answers and their mismatches: which answer follows which prompt, what a row holds, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from support.preference_pairs import make_pair_store
from support.unpaired_records import documents_of, random_records, steps_of, write_unpaired_store

from headway.data.config import DataConfig
from headway.data.groups import SourceReader
from headway.data.loader import Loader
from headway.data.open import open_data
from headway.data.selection import Selection, split_side
from headway.diagnose.data_checks import length_check
from headway.errors import DataError, HeadwayError
from headway.store.reader import open_store
from headway.store.writer import StoreWriter
from headway.tasks.kto.source import LABEL, RECORD, UnpairedReader, UnpairedSource, kl_completions
from headway.tasks.preference.source import PairReader

RECORDS = [([1, 2], [3, 4, 5], True), ([6], [7], False), ([8, 9, 10], [11, 12], True)]


def padded(ids: list[int], length: int) -> list[int]:
    return [*ids, *[0] * (length - len(ids))]


def test_a_row_has_records_and_in_the_same_places_prompts_with_the_answers_before_them(
    tmp_path: Path,
) -> None:
    (step,) = steps_of(write_unpaired_store(tmp_path / "s", RECORDS), seq_len=32, rows=1)
    (batch,) = step.microbatches
    other = kl_completions(batch)
    assert step.totals["records"] == 3
    columns = {
        record: (
            documents_of(batch, 0)[slot],
            documents_of(other, 0)[slot],
            int(batch.extra[LABEL][0, slot]),
        )
        for slot, record in enumerate(batch.extra[RECORD][0].tolist())
        if record >= 0
    }
    lengths = {0: 5, 1: 4, 2: 5}  # the longer of own and mismatch: 5 and 4, 2 and 4, 5 and 4
    expected_records = {
        0: ([1, 2, 3, 4, 5], [3, 4, 5], 1),
        1: ([6, 7], [7], 0),
        2: ([8, 9, 10, 11, 12], [11, 12], 1),
    }
    rotated = {0: ([1, 2, 11, 12], [11, 12]), 1: ([6, 3, 4, 5], [3, 4, 5]), 2: ([8, 9, 10, 7], [7])}
    for record, (ids, targets, label) in expected_records.items():
        assert columns[record][0] == (padded(ids, lengths[record]), targets)
        assert columns[record][1] == (
            padded(rotated[record][0], lengths[record]),
            rotated[record][1],
        )
        assert columns[record][2] == label
    assert (batch.extra[LABEL][0, 3:] == -1).all()
    assert (batch.extra[RECORD][0, 3:] == -1).all()


def test_records_of_a_second_source_go_on_counting_and_have_their_own_columns(
    tmp_path: Path,
) -> None:
    stores = [random_records(5, seed=1), random_records(7, seed=2)]
    paths = [write_unpaired_store(tmp_path / str(n), records) for n, records in enumerate(stores)]
    config = DataConfig.model_validate(
        {"train": [str(path) for path in paths], "seq_len": 32, "tokenizer_unchecked": True}
    )
    data = open_data(config, tokenizer=None, vocab_size=64, seed=0, reader=UnpairedReader(32))
    with Loader(
        config, sources=list(data.train), rows_per_step=4, micro_rows=2, seed=3, epochs=1
    ) as loader:
        steps = [step for step, _ in loader]
    seen: list[int] = []
    for step in steps:
        before = len(seen)
        for batch in step.microbatches:
            for row, column in (batch.extra[RECORD] >= 0).nonzero().tolist():
                number = int(batch.extra[RECORD][row, column])
                seen.append(number)
                records = stores[0]
                if number >= 5:
                    records = stores[1]
                    number -= 5
                _, answer, is_good = records[number]
                assert documents_of(batch, row)[column][1] == answer
                assert batch.extra[LABEL][row, column] == is_good
                # prompts are random, so the answer of a mismatch is that of the record before
                assert documents_of(kl_completions(batch), row)[column][1] == records[number - 1][1]
        assert step.totals["records"] == len(seen) - before
    assert sorted(seen) == list(range(12))


def test_an_answer_to_the_same_prompt_is_no_mismatch(tmp_path: Path) -> None:
    same = [([1, 2], [3], True), ([1, 2], [4], False), ([1, 2], [5], True), ([6], [7], False)]
    source = UnpairedSource(open_store(write_unpaired_store(tmp_path / "s", same)), 16)
    assert [source.facts.partner(record) for record in range(4)] == [3, 3, 3, 2]
    alone = UnpairedSource(open_store(write_unpaired_store(tmp_path / "t", same[:3])), 16)
    # all passed over: nothing else is there
    assert [alone.facts.partner(record) for record in range(3)] == [
        0,
        1,
        2,
    ]


def test_pairs_are_a_good_and_a_bad_answer_and_sides_keep_to_themselves(tmp_path: Path) -> None:
    store = open_store(make_pair_store(tmp_path / "pairs", pairs=5))
    source = UnpairedSource(store, 64)
    assert source.num_documents == 10
    assert source.count_good() == 5
    assert source.is_good(range(4)) == [True, False, True, False]
    assert [source.facts.partner(record) for record in range(4)] == [8, 9, 0, 1]
    ids, mask = source.gather(np.array([3]), np.array([0]), source.lengths(3, 4))
    assert mask is not None
    assert ids[: len(store.document(3))].tolist() == store.document(3).tolist()
    assert not mask[len(store.document(3)) :].any()


def test_a_long_mismatch_loses_the_end_of_its_answer_and_a_long_record_is_left_out(
    tmp_path: Path,
) -> None:
    records = [([1] * 6, [2, 2], True), ([3], [4] * 9, False), ([5] * 8, [6] * 9, True)]
    steps = steps_of(
        write_unpaired_store(tmp_path / "s", records), seq_len=12, rows=1, packing="pad"
    )
    batches = {
        int(step.microbatches[0].extra[RECORD][0, 0]): step.microbatches[0] for step in steps
    }
    assert sorted(batches) == [0, 1]
    assert documents_of(kl_completions(batches[0]), 0)[0] == ([1] * 6 + [6] * 6, [6] * 6)


def test_partners_do_not_depend_on_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_unpaired_store(tmp_path / "s", random_records(40))
    whole = UnpairedSource(open_store(path), 32)
    monkeypatch.setattr("headway.tasks.kto.source.BLOCK_RECORDS", 3)
    monkeypatch.setattr("headway.tasks.kto.source.CACHED_BLOCKS", 2)
    parts = UnpairedSource(open_store(path), 32)
    assert parts.lengths(0, 40).tolist() == whole.lengths(0, 40).tolist()
    assert [parts.facts.partner(i) for i in range(40)] == [
        whole.facts.partner(i) for i in range(40)
    ]


def test_labels_are_part_of_what_a_store_holds(tmp_path: Path) -> None:
    # types are numbered as they come, so files of opposite labels may be the same
    unpaired_source = UnpairedSource(
        open_store(write_unpaired_store(tmp_path / "a", [([1], [2], True), ([3], [4], False)])), 8
    )
    other = UnpairedSource(
        open_store(write_unpaired_store(tmp_path / "b", [([1], [2], False), ([3], [4], True)])), 8
    )
    assert unpaired_source.content_key != other.content_key
    assert unpaired_source.is_good([0, 1]) != other.is_good([0, 1])


def test_a_store_of_one_record_is_refused(tmp_path: Path) -> None:
    store = open_store(write_unpaired_store(tmp_path / "one", RECORDS[:1]))
    with pytest.raises(DataError, match="holds one record"):
        UnpairedSource(store, 16)


def open_for_training(path: Path, reader: SourceReader | None = None) -> None:
    config = DataConfig(train=(str(path),), seq_len=32, tokenizer_unchecked=True)  # pyright: ignore[reportArgumentType]
    open_data(config, tokenizer=None, vocab_size=64, seed=0, reader=reader)


def test_a_store_without_labels_is_refused_by_kto(tmp_path: Path) -> None:
    writer = StoreWriter(
        tmp_path / "text",
        dtype="uint16",
        tokenizer_fingerprint=None,
        masked=True,
        sources=["kind=chat template=chatml"],
    )
    writer.add([1, 2, 3], np.array([False, True, True]))
    writer.finish()
    with pytest.raises(HeadwayError, match="holds no labelled answers, which objective kto needs"):
        open_for_training(tmp_path / "text", UnpairedReader(32))


def test_a_store_with_labels_is_refused_by_other_tasks(tmp_path: Path) -> None:
    path = write_unpaired_store(tmp_path / "good", RECORDS)
    with pytest.raises(
        HeadwayError, match="holds answers labelled good or bad, which objective kto reads"
    ):
        open_for_training(path)
    with pytest.raises(HeadwayError, match="holds answers labelled good or bad"):
        open_for_training(path, PairReader())


def test_a_checkup_counts_long_records_and_not_those_held_out(tmp_path: Path) -> None:
    records = [([1] * (12 if number == 3 else 2), [2] * 8, True) for number in range(20)]
    source = UnpairedSource(
        open_store(write_unpaired_store(tmp_path / "s", [*records, ([3], [4], False)])), 16
    )
    for held_out in (0.2, 0.5):
        selection = split_side(Selection(source, max_length=16), "train", held_out)
        (check,) = length_check("s", selection, DataConfig(seq_len=16))
        kept = len(split_side(Selection(source), "train", held_out).pick(0, 21)[0])
        assert check.detail.endswith(
            f"of {kept} records are longer than data.seq_len=16 and left out"
        ), check.detail
        assert check.detail[0] in "01"
