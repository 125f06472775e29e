"""The loader: every token once per epoch, the same batches whoever reads them, resumed exactly, closed cleanly."""

import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.batch import TENSOR_FIELDS, Batch
from headway.data.config import DataConfig
from headway.data.loader import Loader, LoaderState
from headway.data.mixture import MixtureSource
from headway.data.rampup import Rampup
from headway.data.selection import Selection
from headway.errors import CheckpointError, ConfigError, DataError
from headway.runtime.storage import read_sealed
from headway.store.reader import Store, open_store
from headway.store.writer import StoreWriter


def make_store(
    folder: Path, lengths: list[int], *, first_id: int = 1, masked: bool = False, seed: int = 0
) -> Store:
    """Documents whose ids are all different, so that a token tells where it came from."""
    rng = np.random.default_rng(seed)
    with StoreWriter(
        folder, dtype="uint32", tokenizer_fingerprint="f", masked=masked, shard_tokens=700
    ) as writer:
        for length in lengths:
            writer.add(
                np.arange(first_id, first_id + length), rng.random(length) < 0.6 if masked else None
            )
            first_id += length
        writer.finish()
    return open_store(folder)


def config_of(**changes: Any) -> DataConfig:
    return DataConfig.model_validate(
        {"seq_len": 16, "window_tokens": 128, "workers": 0, "cache_dir": None, **changes}
    )


def loader_of(
    config: DataConfig,
    *sources: MixtureSource | Store,
    rows: int = 8,
    micro_rows: int = 1,
    seed: int = 1,
    **more: Any,
) -> Loader:
    mixed = [
        MixtureSource(Selection(source)) if isinstance(source, Store) else source
        for source in sources
    ]
    return Loader(
        config, sources=mixed, rows_per_step=rows, micro_rows=micro_rows, seed=seed, **more
    )


def equal(batch: Batch, other: Batch) -> bool:
    return (
        all(torch.equal(getattr(batch, name), getattr(other, name)) for name in TENSOR_FIELDS)
        and batch.single_document == other.single_document
    )


def documents_of(store: Store) -> list[list[int]]:
    return [store.document(i).tolist() for i in range(store.num_documents)]


def check_rows(batch: Batch, stores: list[Store], one_document: bool = False) -> list[int]:
    """Compare a batch with the documents themselves; returns its tokens."""
    next_of: dict[int, tuple[int, bool]] = {}
    for store in stores:
        for i, ids in enumerate(documents_of(store)):
            mask = store.document_mask(i)
            for index, (token, after) in enumerate(pairwise(ids)):
                next_of[token] = (after, True if mask is None else bool(mask[index + 1]))
    seen: list[int] = []
    seq_len = batch.tokens.shape[1]
    for row in range(len(batch.tokens)):
        tokens = batch.tokens[row].tolist()
        targets = batch.targets[row].tolist()
        weight = batch.loss_weight[row].tolist()
        bounds = batch.bounds[row].tolist()
        assert bounds[0] == 0
        assert bounds == sorted(bounds)
        assert bounds[-1] == seq_len
        starts = sorted(set(bounds[:-1]) - {seq_len})
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], seq_len], strict=True)):
            assert batch.document[row, start:stop].tolist() == [number] * (stop - start)
            assert batch.position[row, start:stop].tolist() == list(range(stop - start))
            segment = tokens[start:stop]
            if one_document and 0 in segment:
                segment = segment[: segment.index(0)]
            elif segment[0] == 0:
                assert not any(segment)
                assert not any(weight[start:stop])
                continue
            assert one_document or segment == list(range(segment[0], segment[0] + len(segment)))
            seen += segment
            for index, token in enumerate(segment, start):
                after, is_target = next_of.get(token, (0, False))
                assert weight[index] == float(is_target)
                assert not is_target or targets[index] == after
    return seen


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    packing=st.sampled_from(["best_fit", "concat", "pad", "one_document"]),
    masked=st.booleans(),
    max_documents=st.integers(2, 9),
    seed=st.integers(0, 5),
)
def test_an_epoch_holds_every_token_once_with_its_true_next(
    tmp_path_factory, lengths, packing, masked, max_documents, seed
) -> None:
    store = make_store(tmp_path_factory.mktemp("s") / "s", lengths, masked=masked)
    seen: list[int] = []
    targets = 0.0
    for step, _ in loader_of(
        config_of(packing=packing, max_documents=max_documents), store, rows=3, seed=seed, epochs=1
    ):
        assert len(step.microbatches) == 3
        for batch in step.microbatches:
            seen += check_rows(batch, [store], packing == "one_document")
        local = sum(float(batch.loss_weight.sum()) for batch in step.microbatches)
        assert step.totals["targets"] == local
        assert step.stats.tokens == sum(
            int((batch.tokens > 0).sum()) for batch in step.microbatches
        )
        targets += local
    assert sorted(seen) == list(range(1, store.num_tokens + 1))


def steps_of(loader: Loader, count: int) -> list[Batch]:
    with loader:
        return [
            batch
            for _, (step, _) in zip(range(count), loader, strict=False)
            for batch in step.microbatches
        ]


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_the_global_batches_are_the_same_for_any_ranks_and_workers(
    tmp_path: Path, packing: str
) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 300).tolist()
    stores = [
        make_store(tmp_path / "a", lengths),
        make_store(tmp_path / "b", lengths[:100], first_id=10**5, masked=True),
    ]
    sources = [
        MixtureSource(Selection(store, side="train", fraction=0.1), weight)
        for store, weight in zip(stores, (0.7, 0.3), strict=True)
    ]
    alone = steps_of(loader_of(config_of(packing=packing), *sources), 20)
    for ranks, workers in ((1, 3), (2, 0), (2, 1), (4, 2), (8, 0)):
        shards = []
        for rank in range(ranks):
            config = config_of(packing=packing, workers=workers, prefetch=1 + workers)
            with loader_of(config, *sources, rank=rank, world=ranks) as loader:
                steps = [step for _, (step, _) in zip(range(20), loader, strict=False)]
            assert [step.first_microbatch for step in steps] == [rank * 8 // ranks] * 20
            shards.append([step.microbatches for step in steps])
        together = [batch for step in range(20) for shard in shards for batch in shard[step]]
        assert len(together) == len(alone) and all(map(equal, together, alone)), (ranks, workers)


def test_totals_and_stats_speak_of_all_ranks(tmp_path: Path) -> None:
    store = make_store(
        tmp_path / "a", np.random.default_rng(0).integers(1, 50, 100).tolist(), masked=True
    )
    (alone, _) = next(loader_of(config_of(), store))
    asked: list[list[float]] = []

    def sum_over_ranks(numbers: list[float]) -> list[float]:
        asked.append(numbers)
        return [100.0]

    (step, _) = next(loader_of(config_of(), store, rank=1, world=4, sum_over_ranks=sum_over_ranks))
    local = sum(float(batch.loss_weight.sum()) for batch in step.microbatches)
    assert asked == [[local]]
    assert step.totals == {"targets": 100.0, "rows": 8.0}
    assert step.stats == alone.stats
    assert step.source_rows == alone.source_rows == (8,)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=25), min_size=1, max_size=3),
    weights=st.none() | st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    repeats=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    packing=st.sampled_from(["best_fit", "concat", "pad"]),
    min_length=st.sampled_from([1, 20]),
    rampup=st.none()
    | st.builds(Rampup, start=st.just(1), add=st.integers(1, 2), every=st.integers(1, 3)),
)
def test_a_resumed_loader_continues_where_the_first_stopped(
    tmp_path_factory, sizes, weights, repeats, packing, min_length, rampup
) -> None:
    folder = tmp_path_factory.mktemp("s")
    sizes = [[*lengths, 30] for lengths in sizes]
    stores = [
        make_store(folder / str(i), lengths, first_id=1 + 10**5 * i)
        for i, lengths in enumerate(sizes)
    ]
    sources = [
        MixtureSource(
            Selection(store, min_length=min_length),
            None if weights is None else weights[i],
            1 if weights else repeats[i],
        )
        for i, store in enumerate(stores)
    ]
    config = config_of(packing=packing, max_documents=4, window_tokens=64)
    with loader_of(config, *sources, rows=5, rampup=rampup) as loader:
        states = [loader.state, *(state for _, (_, state) in zip(range(24), loader, strict=False))]
        for before, after in pairwise(states):
            with loader_of(config, *sources, rows=5, rampup=rampup, state=before) as resumed:
                assert next(resumed)[1] == after
        if weights is None:
            total = sum(
                s.num_rows * repeat for s, repeat in zip(loader._streams, repeats, strict=False)
            )
            assert loader.rows_per_epoch() == total


@pytest.mark.parametrize("weights", [(None, None), (0.7, 0.3)])
def test_a_run_continues_exactly_on_another_number_of_ranks(tmp_path: Path, weights) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 120).tolist()
    stores = [
        make_store(tmp_path / "a", lengths),
        make_store(tmp_path / "b", lengths[:50], first_id=10**5),
    ]
    sources = [
        MixtureSource(Selection(store), weight)
        for store, weight in zip(stores, weights, strict=True)
    ]
    whole = steps_of(loader_of(config_of(), *sources), 60)
    with loader_of(config_of(workers=2), *sources, rank=1, world=2) as loader:
        for _ in range(23):
            _, state = next(loader)
    assert loader.state == state
    again = LoaderState.from_json(json.loads(json.dumps(state.to_json())))
    assert again == state
    assert state.batch == 23
    ranks = [loader_of(config_of(), *sources, rank=rank, world=4, state=again) for rank in range(4)]
    steps = [[next(loader)[0].microbatches for loader in ranks] for _ in range(37)]
    assert all(
        map(equal, [batch for step in steps for shard in step for batch in shard], whole[23 * 8 :])
    )


def test_epochs_are_reshuffled_and_counted(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", np.random.default_rng(0).integers(1, 16, 200).tolist())
    with loader_of(config_of(), store, rows=1) as loader:
        rows = loader.rows_per_epoch()
        epochs = [[next(loader) for _ in range(rows)] for _ in range(2)]
    assert [step.stats.epoch for step, _ in epochs[0]] == [0] * (rows - 1) + [1]
    tokens = [[step.microbatches[0].tokens for step, _ in epoch] for epoch in epochs]
    assert [sorted(t for row in epoch for t in row[row > 0].tolist()) for epoch in tokens] == [
        list(range(1, store.num_tokens + 1))
    ] * 2
    assert not all(torch.equal(a, b) for a, b in zip(*tokens, strict=True))


@pytest.mark.parametrize("weights", [(None, None), (0.5, 0.5)])
def test_the_last_step_is_filled_with_rows_without_weight(tmp_path: Path, weights) -> None:
    stores = [
        make_store(tmp_path / "a", [5] * 31),
        make_store(tmp_path / "b", [16] * 12, first_id=10**5),
    ]
    sources = [
        MixtureSource(Selection(store), weight)
        for store, weight in zip(stores, weights, strict=True)
    ]
    with loader_of(config_of(), *sources, micro_rows=2, epochs=1) as loader:
        rows = loader.rows_per_epoch()
        batches = loader.batches_in(1)
        steps = [step for step, _ in loader]
    assert len(steps) == batches == -(-rows // 8)
    assert rows % 8
    assert [step.totals["rows"] for step in steps] == [8.0] * (batches - 1) + [rows % 8]
    last = steps[-1].microbatches
    assert {tuple(batch.tokens.shape) for batch in last} == {(2, 16)}
    assert len(last) == 4
    assert float(last[-1].loss_weight[-1].sum()) == 0
    assert last[-1].bounds[-1].tolist() == [0] + [16] * 8
    assert steps[-1].stats.epoch == 1


def test_skipped_batches_are_read_but_not_handed_out(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", np.random.default_rng(0).integers(1, 50, 200).tolist())
    every = steps_of(loader_of(config_of(), store), 10)
    with loader_of(config_of(skip_batches="1,3-5"), store) as loader:
        steps = [next(loader) for _ in range(6)]
    assert [state.batch for _, state in steps] == [1, 3, 7, 8, 9, 10]
    kept = [
        batch for number in (0, 2, 6, 7, 8, 9) for batch in every[number * 8 : (number + 1) * 8]
    ]
    assert all(map(equal, [batch for step, _ in steps for batch in step.microbatches], kept))


def test_a_growing_batch_reads_the_same_rows(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", np.random.default_rng(0).integers(1, 50, 200).tolist())
    rows = [row for batch in steps_of(loader_of(config_of(), store), 4) for row in batch.tokens]
    with loader_of(config_of(), store, rampup=Rampup(start=2, add=2, every=2)) as loader:
        steps = [next(loader)[0] for _ in range(7)]
    assert [len(step.microbatches) for step in steps] == [2, 2, 4, 4, 6, 6, 8]
    assert all(
        map(
            torch.equal,
            [row for step in steps for batch in step.microbatches for row in batch.tokens],
            rows,
        )
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_token_budget_ends_a_step_early_and_loses_nothing(tmp_path: Path, ranks: int) -> None:
    store = make_store(tmp_path / "a", np.random.default_rng(0).integers(1, 17, 90).tolist())
    config = config_of(packing="pad", max_tokens=40)
    seen: list[int] = []
    loaders = [
        loader_of(config, store, rows=12, micro_rows=2, rank=rank, world=ranks, epochs=1)
        for rank in range(ranks)
    ]
    batches = loaders[0].batches_in(1)
    count = 0
    for steps in zip(*loaders, strict=True):
        count += 1
        step, _ = steps[0]
        assert 40 - 16 < step.stats.tokens <= 40 or count == batches
        assert len({batch.totals["targets"] for batch, _ in steps}) == 1
        seen += [
            t
            for step, _ in steps
            for batch in step.microbatches
            for t in check_rows(batch, [store])
        ]
    assert sorted(seen) == list(range(1, store.num_tokens + 1))
    assert count == batches
    with pytest.raises(ConfigError, match=r"data\.max_tokens is 15"):
        loader_of(config_of(max_tokens=15), store)


@pytest.mark.parametrize("micro_rows", [1, 4])
def test_balancing_gives_ranks_equal_work_whatever_their_number(
    tmp_path: Path, micro_rows: int
) -> None:
    lengths = np.random.default_rng(0).integers(1, 64, 600).tolist()
    store = make_store(tmp_path / "a", lengths)
    plain = config_of(seq_len=64, packing="pad", balance=False)
    even = config_of(seq_len=64, packing="pad", balance=True)

    def unevenness(config: DataConfig, ranks: int) -> float:
        """How much longer the slowest rank works than the mean one, over some steps."""
        work = []
        for rank in range(ranks):
            with loader_of(
                config, store, rows=64, micro_rows=micro_rows, rank=rank, world=ranks
            ) as loader:
                steps = [next(loader)[0] for _ in range(8)]
            work.append(
                [
                    sum(float(((b.tokens > 0).sum(1) ** 2).sum()) for b in step.microbatches)
                    for step in steps
                ]
            )
        return float((np.max(work, axis=0) / np.mean(work, axis=0)).mean()) - 1

    for ranks in (2, 4, 8):
        assert unevenness(even, ranks) < min(0.03, unevenness(plain, ranks) / 3)
    rows = [
        {
            tuple(row)
            for b in steps_of(loader_of(config, store, rows=64), 3)
            for row in b.tokens.tolist()
        }
        for config in (plain, even)
    ]
    assert rows[0] == rows[1]


def test_weights_are_shares_of_the_rows_and_sources_are_marked(tmp_path: Path) -> None:
    stores = [
        make_store(tmp_path / name, [16] * 200, first_id=10**5 * i + 1)
        for i, name in enumerate("abc")
    ]
    sources = [
        MixtureSource(Selection(store), weight)
        for store, weight in zip(stores, (6, 3, 1), strict=True)
    ]
    with loader_of(config_of(), *sources, rows=10, micro_rows=10) as loader:
        for _ in range(30):
            step, _ = next(loader)
            assert step.source_rows == (6, 3, 1)
            batch = step.microbatches[0]
            assert (batch.tokens[:, 0] // 10**5 == batch.source).all()


def test_without_weights_an_epoch_is_one_pass_and_repeats_count(tmp_path: Path) -> None:
    stores = [
        make_store(tmp_path / "a", [16] * 40),
        make_store(tmp_path / "b", [7] * 9, first_id=10**5),
    ]
    sources = [MixtureSource(Selection(stores[0])), MixtureSource(Selection(stores[1]), repeat=3)]
    seen: list[int] = []
    for step, _ in loader_of(config_of(), *sources, rows=4, epochs=2):
        seen += [t for batch in step.microbatches for t in check_rows(batch, stores)]
    times = np.bincount(seen)
    assert set(times[1 : 40 * 16 + 1]) == {2}
    assert set(times[10**5 :]) == {6}


def test_an_error_in_a_thread_comes_out_and_threads_end(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", [16] * 400)
    before = set(threading.enumerate())
    with loader_of(config_of(workers=2), store) as loader:
        next(loader)
    assert set(threading.enumerate()) == before
    ids = np.fromfile(tmp_path / "a" / "tokens-00003.bin", "<u4")
    ids[:] = 10**6
    ids.tofile(tmp_path / "a" / "tokens-00003.bin")
    with pytest.raises(DataError, match=r"tokens-00003\.bin: damaged: its checksum"):
        steps_of(loader_of(config_of(workers=2), open_store(tmp_path / "a")), 60)
    assert set(threading.enumerate()) == before


def test_a_damaged_cursor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="data cursor"):
        LoaderState.from_json({"batch": 3})


def test_a_cursor_of_another_number_of_sources_is_refused(tmp_path: Path) -> None:
    stores = [make_store(tmp_path / name, [5]) for name in ("x", "y")]
    state = loader_of(config_of(), stores[0]).state
    with pytest.raises(CheckpointError, match="for 1 sources, the recipe has 2"):
        loader_of(config_of(), *stores, state=state)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_pinned_memory_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pin_memory"):
        loader_of(config_of(pin_memory=True), make_store(tmp_path / "a", [5]))


@pytest.mark.parametrize("seed", range(25))
def test_a_flipped_bit_in_the_index_is_an_error_or_rows_of_real_tokens(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    make_store(tmp_path / "a", rng.integers(1, 50, 60).tolist(), masked=True)
    path = tmp_path / "a" / "docs-00001.idx"
    content = bytearray(path.read_bytes())
    content[rng.integers(0, len(content))] ^= 1 << int(rng.integers(0, 8))
    path.write_bytes(bytes(content))
    try:
        batches = steps_of(loader_of(config_of(), open_store(tmp_path / "a"), epochs=1), 10**6)
    except DataError:
        return
    seen = [token for batch in batches for token in batch.tokens.reshape(-1).tolist() if token]
    assert sorted(seen) == list(range(1, open_store(tmp_path / "a").num_tokens + 1))


def test_the_row_index_is_kept_by_content(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", [10] * 900)
    config = config_of(cache_dir=tmp_path / "cache")
    rows = loader_of(config, store).rows_per_epoch()
    kept = list((tmp_path / "cache" / "rows").iterdir())
    content = read_sealed(kept[0])
    assert len(kept) == 1
    assert content is not None
    assert int(np.frombuffer(content, "<i8").sum()) == rows
    kept[0].write_bytes(b"damaged")
    assert loader_of(config, store).rows_per_epoch() == rows
    loader_of(config_of(cache_dir=tmp_path / "cache", seq_len=20), store).rows_per_epoch()
    assert len(list((tmp_path / "cache" / "rows").iterdir())) == 2


def test_the_bound_on_document_lengths_covers_every_segment_and_is_tight(tmp_path: Path) -> None:
    from headway.data.config import DataConfig
    from headway.data.mixture import MixtureSource
    from headway.data.selection import Selection
    from headway.data.synthetic import SyntheticSource

    config = DataConfig(seq_len=2048, workers=0)
    with Loader(
        config,
        sources=[MixtureSource(Selection(SyntheticSource(512, 0)))],
        rows_per_step=2,
        micro_rows=2,
        seed=1,
    ) as loader:
        for _ in range(5):
            batch = next(loader)[0].microbatches[0]
            longest = int(batch.bounds.diff(dim=1).max())
            assert batch.max_length is not None
            assert longest <= batch.max_length < max(2 * longest, 129)


def test_the_numbers_of_a_step_are_those_of_its_rows(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [4, 4, 8, 3])
    # rows of 8: the longest document, two of 4, and one of 3; the fourth row is empty
    with loader_of(
        config_of(seq_len=8, packing="best_fit"), store, rows=4, micro_rows=2, epochs=1
    ) as loader:
        step, _ = next(loader)
    stats = step.stats
    assert (stats.tokens, stats.documents, stats.largest_length, stats.epoch) == (19, 4, 8, 1)
    assert stats.largest_batch + stats.smallest_batch == 4
    assert stats.smallest_batch in (1, 2)
    with loader_of(
        config_of(seq_len=8, packing="best_fit"), store, rows=3, micro_rows=1, epochs=1
    ) as loader:
        stats = next(loader)[0].stats
    assert (stats.documents, stats.largest_batch, stats.smallest_batch) == (4, 2, 1)


@pytest.mark.parametrize(
    ("packing", "selected"),
    [
        ("best_fit", {}),
        ("concat", {"min_length": 10}),
        ("pad", {"limit": 30}),
        ("best_fit", {"side": "train", "fraction": 0.3, "min_length": 5}),
    ],
)
def test_the_amount_that_is_announced_is_what_is_read(
    tmp_path: Path, packing: str, selected: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    store = make_store(tmp_path / "s", [int(length) for length in rng.integers(3, 30, 60)])
    source = MixtureSource(Selection(store, **selected), repeat=2)
    with loader_of(config_of(packing=packing), source, epochs=1) as loader:
        batches = loader.batches_in(1)
        amount = loader.amount(batches, 1)
        steps = [step for step, _ in loader]
    assert sum(step.stats.tokens for step in steps) == amount.tokens_read == 2 * amount.tokens
    assert amount.epochs == 1
    documents, lengths = source.selection.pick(0, store.num_documents)
    assert (amount.documents, amount.tokens) == (len(documents), int(lengths.sum()))
    # Steps instead of epochs: the share of the rows, not of the room in them.
    with loader_of(config_of(packing=packing), source) as loader:
        about = loader.amount(batches - 1)
        read = sum(next(loader)[0].stats.tokens for _ in range(batches - 1))
    assert about.tokens_read == pytest.approx(read, rel=0.1)
    assert about.epochs == pytest.approx(read / amount.tokens_read, rel=0.1)


def test_sources_with_weights_have_no_common_epochs(tmp_path: Path) -> None:
    first = make_store(tmp_path / "a", [16] * 20)
    other = make_store(tmp_path / "b", [8] * 20, first_id=10_000)
    sources = [
        MixtureSource(Selection(first), weight=0.75),
        MixtureSource(Selection(other), weight=0.25),
    ]
    with loader_of(config_of(packing="pad"), *sources) as loader:
        amount = loader.amount(4)
        read = sum(next(loader)[0].stats.tokens for _ in range(4))
    assert amount.epochs is None
    assert amount.tokens_read == pytest.approx(read, rel=0.1)


def test_long_selections_are_counted_by_their_first_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "s", [4, 20] * 50)
    selection = Selection(store, min_length=10)
    assert selection.counts() == (50, 1000)
    monkeypatch.setattr("headway.data.selection.COUNTED_DOCUMENTS", 10)
    assert selection.counts() == (50, 1000)
