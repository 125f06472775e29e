"""Tables agree on host and device; snapshots are copies, and the oldest gives way."""

import torch

from headway.model.cache_blocks import BlockTable, StateBlocks
from headway.model.paged_layer import PagePlaces, PrefillPiece


def table(slots: int = 3) -> BlockTable:
    return BlockTable(slots, 4, 8, torch.device("cpu"))


class Numbers:
    """One number for each block."""

    def __init__(self, blocks: int) -> None:
        self.values = list(range(blocks))

    def copy_state(self, source: int, target: int) -> None:
        self.values[target] = self.values[source]


def test_the_device_has_the_pages_after_a_flush() -> None:
    blocks = table()
    address = blocks.tensor.data_ptr()
    blocks.append(1, [7, 3])
    blocks.append(1, [5])
    blocks.append(0, [2])
    assert blocks.pages(1) == [7, 3, 5]
    assert not blocks.tensor.any()
    blocks.flush()
    assert blocks.tensor[:2].tolist() == [[2, 0, 0, 0], [7, 3, 5, 0]]
    assert not blocks.tensor[2:].any()
    assert blocks.tensor.data_ptr() == address


def test_a_slot_that_changes_hands_before_a_flush_has_its_last_pages() -> None:
    blocks = table()
    blocks.append(0, [1, 2, 3])
    assert blocks.clear(0) == [1, 2, 3]
    assert blocks.pages(0) == []
    blocks.append(0, [6, 5])
    blocks.flush()
    assert blocks.tensor[0, :2].tolist() == [6, 5]
    assert blocks.pages(0) == [6, 5]


def test_pages_of_tokens_are_whole_ones() -> None:
    assert [table().num_pages(tokens) for tokens in (0, 1, 8, 9)] == [0, 1, 1, 2]


def test_places_are_those_of_the_slots_pages() -> None:
    blocks = table()
    blocks.append(0, [4, 1])
    blocks.append(2, [0])
    pieces = [PrefillPiece(0, 6, 4), PrefillPiece(2, 0, 2)]
    places = PagePlaces.of(pieces, blocks, torch.device("cpu"))
    assert places.page.tolist() == [4, 4, 1, 1, 0, 0]
    assert places.offset.tolist() == [6, 7, 0, 1, 0, 1]
    assert places.seen is not None
    assert places.seen[0].tolist() == [4] * 8 + [1, 1] + [0, 0]
    assert places.seen[1].tolist() == [*range(8), 0, 1, 0, 1]
    fresh = PagePlaces.of([PrefillPiece(2, 0, 5)], blocks, torch.device("cpu"))
    assert fresh.seen is None
    assert fresh.offset.tolist() == [0, 1, 2, 3, 4]


def test_a_snapshot_is_a_copy_that_later_state_leaves_alone() -> None:
    part = Numbers(4)
    states = StateBlocks(2, 2, [part])
    states.snapshot(1, b"a")
    part.values[1] = 50
    states.restore(b"a", 0)
    assert part.values[:2] == [1, 50]
    assert states.num_snapshots == 1
    states.snapshot(1, b"a")
    states.restore(b"a", 0)
    assert part.values[0] == 1, "a name is kept once"


def test_the_least_recently_used_snapshot_gives_way() -> None:
    part = Numbers(4)
    states = StateBlocks(2, 2, [part])
    states.snapshot(0, b"a")
    states.snapshot(1, b"b")
    assert states.last_kept([b"a", b"x"]) == 1
    states.snapshot(1, b"c")
    assert states.num_snapshots == 2
    assert states.last_kept([b"a", b"b"]) == 1
    assert states.last_kept([b"b", b"c", b"x"]) == 2
    assert states.last_kept([b"b", b"x"]) == 0


def test_freed_snapshots_give_their_blocks_back() -> None:
    states = StateBlocks(1, 1, [Numbers(2)])
    states.snapshot(0, b"a")
    states.free()
    assert states.num_snapshots == 0
    assert states.last_kept([b"a"]) == 0
    states.snapshot(0, b"b")
    assert states.last_kept([b"b"]) == 1


def test_without_room_nothing_is_kept() -> None:
    states = StateBlocks(2, 0, [Numbers(2)])
    states.snapshot(0, b"a")
    assert states.num_snapshots == 0
