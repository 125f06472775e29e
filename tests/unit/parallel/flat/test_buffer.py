"""How flat buffers are cut, as arithmetic: buckets, shards and boxes of tensors."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.optim.groups import ParamGroup
from headway.parallel.flat.buffer import (
    ALIGN,
    BufferSharding,
    BufferSpec,
    TrainBuffer,
    boxes_of,
    lay_out,
)

SHAPES = {"a": (10, 7), "b": (5,), "c": (64, 3, 2), "d": (1,), "e": (33, 9)}


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_boxes_are_exactly_the_elements_of_a_range(shape: list[int], data: st.DataObject) -> None:
    size = prod(shape)
    first = data.draw(st.integers(0, size))
    length = data.draw(st.integers(0, size - first))
    whole = torch.arange(size).view(shape)
    covered = []
    for box, start in boxes_of(tuple(shape), first, length):
        elements = box.of(whole).flatten().tolist()
        assert elements == list(range(first + start, first + start + prod(box.shape)))
        covered += elements
    assert covered == list(range(first, first + length))


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("bucket_elements", [1, 100, 10_000])
def test_starts_are_aligned_and_every_shard_is_equal(shards: int, bucket_elements: int) -> None:
    spans, length = lay_out(list(SHAPES), SHAPES, BufferSharding(bucket_elements, shards))
    assert [slot.name for span in spans for slot in span.slots] == list(SHAPES)
    assert all(slot.start % ALIGN == 0 for span in spans for slot in span.slots)
    assert [span.start for span in spans] + [length] == [0] + [span.stop for span in spans], (
        "buckets lie side by side"
    )
    assert all((span.stop - span.start) % (shards * ALIGN) == 0 for span in spans)
    assert all(
        len(span.slots) == 1 or sum(slot.size for slot in span.slots) <= bucket_elements
        for span in spans
    )


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_every_element_has_one_owner(shards: int) -> None:
    owned = {name: torch.zeros(prod(shape)) for name, shape in SHAPES.items()}
    group = ParamGroup("g", tuple(SHAPES))
    for shard in range(shards):
        cut = BufferSharding(500, shards, shard)
        buffer = TrainBuffer.allocate(
            group, SHAPES, torch.bfloat16, torch.device("cpu"), cut, BufferSpec(("exp_avg",))
        )
        assert buffer.master.numel() * shards == buffer.param.numel()
        for span in buffer.spans:
            for slot in span.slots:
                held = buffer.local_slice(span, slot)
                if held is not None:
                    owned[slot.name][held.first : held.first + held.size] += 1
    assert all(bool((count == 1).all()) for count in owned.values())
