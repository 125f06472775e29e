"""Which layouts are refused, with which rule and which remedy; and which are not."""

import pytest

from headway.errors import ParallelError
from headway.model.config import ModelConfig
from headway.parallel.layouts import (
    Layout,
    LayoutShape,
    broken_sizes,
    check_sizes,
    nearest_layouts,
    ring_size,
    ulysses_size,
)

LLAMA = ModelConfig(preset="llama-8b")
CASE = LayoutShape(LLAMA, 8192)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(16, tensor=2, pipeline=2),
        Layout(64, tensor=8, pipeline=4, shard=2),
        Layout(32, tensor=16),  # KV heads are on two ranks each
        Layout(8, strategy="fsdp", tensor=2, context=2),
        Layout(16, context=16),  # Ulysses over 8, ring over 2
        Layout(4, pipeline=4, schedule="interleaved", virtual_stages=2),
        Layout(4, pipeline=2, schedule="zero_bubble"),
    ],
)
def test_layouts_that_fit_the_model_are_accepted(layout: Layout) -> None:
    check_sizes(layout, CASE)


@pytest.mark.parametrize(
    ("layout", "rule", "remedy"),
    [
        (
            Layout(8, tensor=3),
            "x tensor 3 = 3 ranks; this must divide the number of ranks, 8",
            "parallel.tensor=4",
        ),
        (
            Layout(48, tensor=3),
            "parallel.tensor is 3; it must divide model.num_heads=32",
            "parallel.tensor=",
        ),
        (Layout(64, tensor=64), "must divide model.num_heads=32", "parallel.tensor=32"),
        (
            Layout(8, strategy="fsdp", pipeline=2),
            "fsdp, which has no pipeline",
            "strategy=fsdp.*|strategy=zero1 parallel.pipeline=2",
        ),
        (
            Layout(64, pipeline=64),
            "every stage needs a layer, and the model has 32",
            "parallel.pipeline=32",
        ),
        (
            Layout(8, shard=3),
            "parallel.zero1.size is 3; it must divide the 8 ranks",
            "parallel.strategy=zero1",
        ),
        (
            Layout(3, context=3),
            "parallel.context is 3; it must divide data.seq_len=8192",
            "parallel.strategy=zero1",
        ),
        (
            Layout(4, pipeline=4, virtual_stages=2),
            "1f1b, which has one stage per rank",
            "parallel.pipeline=4",
        ),
        (
            Layout(4, virtual_stages=2),
            "virtual_stages is 2 and parallel.pipeline is 1",
            "parallel.strategy=zero1",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_rule_and_the_nearest_that_works(
    layout: Layout, rule: str, remedy: str
) -> None:
    with pytest.raises(ParallelError) as refused:
        check_sizes(layout, CASE)
    text = str(refused.value)
    assert rule in text
    assert "\n" not in text
    near = nearest_layouts(layout, CASE)[0]
    assert near.settings() in text
    assert near.world == layout.world
    assert any(part in near.settings() for part in remedy.replace(".*", "").split("|"))
    assert not list(broken_sizes(near, CASE))


def test_a_ring_begins_where_the_kv_heads_of_a_rank_end() -> None:
    sizes = [
        (ulysses_size(layout, LLAMA), ring_size(layout, LLAMA))
        for layout in (Layout(8, context=8), Layout(64, tensor=4, context=8))
    ]
    assert sizes == [(8, 1), (2, 4)]
