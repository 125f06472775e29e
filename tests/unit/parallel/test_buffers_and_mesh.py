"""How buffers are cut, as arithmetic: buckets, shards, boxes, layouts, and what is refused."""

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.config.load import load
from headway.errors import ConfigError, ParallelError
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.model.experts_config import ExpertsConfig
from headway.optim.groups import ParamGroup
from headway.parallel.config import ParallelConfig
from headway.parallel.flat.buffer import (
    ALIGN,
    BufferSharding,
    BufferSpec,
    TrainBuffer,
    boxes_of,
    lay_out,
)
from headway.parallel.mesh import Mesh, plan_mesh
from headway.tasks.base import TaskConfig
from headway.tasks.dpo import Config as DPO
from headway.tasks.next_token import Config as NextToken
from headway.train.config import Recipe

SHAPES = {"a": (10, 7), "b": (5,), "c": (64, 3, 2), "d": (1,), "e": (33, 9)}


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_boxes_are_exactly_the_elements_of_a_range(shape: list[int], data: st.DataObject) -> None:
    size = prod(shape)
    first = data.draw(st.integers(0, size))
    length = data.draw(st.integers(0, size - first))
    whole = torch.arange(size).view(shape)
    found = []
    for box, start in boxes_of(tuple(shape), first, length):
        elements = box.of(whole).flatten().tolist()
        assert elements == list(range(first + start, first + start + prod(box.shape)))
        found += elements
    assert found == list(range(first, first + length))


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


@pytest.mark.parametrize(
    ("world", "size", "shard", "replicate"),
    [(1, "auto", 1, 1), (4, "auto", 4, 1), (4, 1, 1, 4), (4, 2, 2, 2), (8, 4, 4, 2)],
)
def test_shard_groups_are_neighbours(
    world: int, size: int | str, shard: int, replicate: int
) -> None:
    meshes = [plan_mesh(rank, world, size, "key") for rank in range(world)]
    assert all(
        (mesh.shard, mesh.replicate, mesh.data) == (shard, replicate, world) for mesh in meshes
    )
    assert meshes[0].groups("shard") == [
        list(range(first, first + shard)) for first in range(0, world, shard)
    ]
    assert meshes[0].groups("replicate") == [
        list(range(first, world, shard)) for first in range(shard)
    ]
    assert meshes[0].groups("data") == [list(range(world))]


def test_neighbours_share_rows_inside_any_shard_group() -> None:
    meshes = [plan_mesh(rank, 8, 4, "key", context=2) for rank in range(8)]
    assert {(mesh.shard, mesh.replicate, mesh.reduce, mesh.data) for mesh in meshes} == {
        (4, 2, 8, 4)
    }
    assert meshes[0].groups("data") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert meshes[0].groups("context") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert meshes[0].describe("zero1") == [
        "8 ranks: zero1 over 4, 2 times; each row's tokens over 2 (context)"
    ]


def test_tensor_is_the_innermost_axis_and_pipeline_the_outermost() -> None:
    mesh = Mesh(pipeline=2, replicate=2, shard=2, context=2, tensor=2)
    assert mesh.groups("tensor")[:3] == [[0, 1], [2, 3], [4, 5]]
    assert mesh.groups("context")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert mesh.groups("data")[:2] == [[0, 4], [1, 5]]
    assert mesh.groups("shard")[:2] == [[0, 2], [1, 3]]
    assert mesh.groups("replicate")[:2] == [[0, 4], [1, 5]]
    assert mesh.groups("reduce") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert mesh.groups("pipeline")[0] == [0, 8]
    for axis in ("tensor", "context", "data", "shard", "replicate", "reduce", "pipeline"):
        assert sorted(rank for group in mesh.groups(axis) for rank in group) == list(range(16))


@pytest.mark.parametrize("world", [1, 2, 6])
def test_axes_without_parallelism_have_groups_of_one(world: int) -> None:
    mesh = plan_mesh(0, world, "auto", "key")
    assert (
        mesh.groups("tensor")
        == mesh.groups("pipeline")
        == mesh.groups("context")
        == [[rank] for rank in range(world)]
    )


def rows_refusal(
    seq_len: int = 64,
    objective: TaskConfig = NextToken(),
    adapter: AdapterConfig | None = None,
    **model: Any,
) -> str:
    shape = ModelConfig.model_validate({"num_heads": 8, "num_kv_heads": 4, **model})
    config = ParallelConfig(context=4)
    with pytest.raises(ParallelError) as caught:
        config.check_rows(shape, seq_len, objective, adapter)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_that_cannot_be_shared_exactly_are_refused_in_one_line() -> None:
    ParallelConfig(context=4).check_rows(
        ModelConfig(num_heads=8, num_kv_heads=4), 64, NextToken(), None
    )
    ParallelConfig().check_rows(
        ModelConfig(num_heads=8, num_kv_heads=2, dropout=0.1), 63, DPO(), None
    )
    ParallelConfig(context=4).check_rows(
        ModelConfig(num_heads=8, num_kv_heads=2), 64, NextToken(), None
    )
    beyond = "parallel.context is 4, which is beyond the 2 KV heads of a rank and needs a ring"
    assert f"{beyond}; head gates have none. Use 2." in rows_refusal(
        num_kv_heads=2, head_gates={"window": 4}
    )
    assert f"{beyond}; sliding windows have none. Use 2." in rows_refusal(
        num_kv_heads=2, sliding_window=8
    )
    assert "data.seq_len=60 must be a multiple of 8. Use 56" in rows_refusal(
        seq_len=60, num_kv_heads=2
    )
    assert "must divide data.seq_len=62. Use seq_len 60" in rows_refusal(seq_len=62)
    assert (
        rows_refusal(objective=DPO())
        == "objective dpo needs whole rows: parallel.context is 4 and must be 1."
    )
    assert "model.dropout is 0.1" in rows_refusal(dropout=0.1)
    assert "adapter.dropout is 0.2" in rows_refusal(adapter=AdapterConfig(dropout=0.2))
    for context, told in ((3, "start 3 ranks"), (8, "start 8 or a multiple of it")):
        with pytest.raises(
            ParallelError,
            match=f"parallel.context is {context}; it must divide the number of ranks, 4. .*{told}",
        ):
            ParallelConfig(context=context).mesh(0, 4)


def refusal(**parallel: object) -> str:
    config = ParallelConfig.model_validate(parallel)
    with pytest.raises(ParallelError) as caught:
        config.check(config.mesh(0, 4), "float16")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_right_is_refused_in_one_line() -> None:
    assert (
        refusal(zero1={"size": 3})
        == "parallel.zero1.size is 3; it must divide the 4 ranks. Use auto or 1 or 2 or 4."
    )
    assert "parallel.fsdp.size is 8" in refusal(strategy="fsdp", fsdp={"size": 8})
    assert "exchanges gradients itself" in refusal(strategy="fsdp", hook={"kind": "powersgd"})
    assert "always overlaps" in refusal(strategy="fsdp", overlap={"reduce": False})
    assert "needs parallel.zero1.size above 1" in refusal(
        zero1={"size": 1}, hook={"kind": "reduce_scatter"}
    )
    assert "needs fp32" in refusal(
        hook={"kind": "powersgd", "error_feedback": False}, accumulate_dtype="compute"
    )
    assert "adds up in fp32" in refusal(strategy="fsdp", accumulate_dtype="compute")
    assert "loss scale" in refusal(hook={"kind": "powersgd"})
    assert "decides the precision itself" in refusal(
        hook={"kind": "all_reduce"}, reduce_dtype="bf16"
    )


def test_a_rank_outside_its_layout_is_refused() -> None:
    with pytest.raises(ParallelError, match="has ranks 0 to 3"):
        Mesh(rank=4, shard=4)


def test_experts_divide_the_data_ranks_once_more() -> None:
    mesh = plan_mesh(0, 8, 4, "key", expert=2)
    assert mesh.groups("expert") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("expert_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("expert_replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups("expert_reduce") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert mesh.data == 8 and mesh.describe("zero1") == [
        "8 ranks: zero1 over 4, 2 times; the experts over 2 (expert)"
    ]
    wide = plan_mesh(0, 16, 2, "key", tensor=2, expert=4)
    assert (wide.expert_shard, wide.expert_replicate, wide.groups("expert")[0]) == (
        1,
        2,
        [0, 2, 4, 6],
    )
    assert wide.groups("expert_replicate")[0] == [0, 8]


def test_ranks_that_cannot_share_experts_are_refused_in_one_line() -> None:
    assert (
        refusal(expert=3)
        == "parallel.expert is 3; it must divide the 4 data-parallel ranks. Use 1 or 2 or 4."
    )
    assert "parallel.expert is 4; it must divide the 2 data-parallel ranks. Use 1 or 2." in refusal(
        expert=4, tensor=2
    )
    with pytest.raises(
        ParallelError,
        match=r"parallel.expert is 2; it must divide key=3, or be a multiple of it. Use 1 or 3 or 6.",
    ):
        plan_mesh(0, 6, 3, "key", expert=2)
    shape = ModelConfig(experts=ExpertsConfig(num=6))
    for model, expert, told in (
        (shape, 4, "model.experts.num=6. Use 3."),
        (ModelConfig(), 2, "has no experts .* Use expert 1."),
    ):
        with pytest.raises(ParallelError, match=f"parallel.expert is {expert}.*{told}"):
            ParallelConfig(expert=expert).check_rows(model, 64, NextToken(), None)
    for axis in ("pipeline", "context"):
        with pytest.raises(ParallelError, match=f"parallel.{axis} is 2 and model.experts is given"):
            ParallelConfig.model_validate({axis: 2, "expert": 2}).check_rows(
                shape, 64, NextToken(), None
            )
    with pytest.raises(
        ConfigError, match=r"memory.recompute is selective and parallel.expert is 2.* such as 1"
    ):
        load(
            Recipe,
            None,
            [
                "run.name=x",
                "model.experts.num=4",
                "parallel.expert=2",
                "memory.recompute=selective",
            ],
        )
    with pytest.raises(
        ConfigError,
        match=r"parallel.expert is 2, but optim.kind adafactor .* Use adamw, or expert 1",
    ):
        load(
            Recipe,
            None,
            ["run.name=x", "model.experts.num=4", "parallel.expert=2", "optim.kind=adafactor"],
        )


def test_rows_are_counted_by_the_data_axis_alone() -> None:
    meshes = [
        plan_mesh(rank, 16, "auto", "key", context=2, tensor=2, pipeline=2) for rank in range(16)
    ]
    assert {
        (mesh.data, mesh.reduce, mesh.shard, mesh.world, mesh.ranks_per_row) for mesh in meshes
    } == {(2, 4, 4, 16, 8)}
    assert meshes[0].describe("zero1") == [
        "16 ranks: zero1 over 4; each row's tokens over 2 (context); each layer over 2 (tensor); the layers over 2 (pipeline)"
    ]
    assert ParallelConfig(tensor=2, pipeline=2).mesh(0, 4).data == 1


def test_axes_whose_product_does_not_divide_the_ranks_are_refused_by_name() -> None:
    with pytest.raises(
        ParallelError,
        match=r"parallel.context is 2 and parallel.tensor is 3; their product, 6, must divide .*, 8.*start 6",
    ):
        ParallelConfig(tensor=3, context=2).mesh(0, 8)
    with pytest.raises(
        ParallelError,
        match=r"parallel.zero1.size is 4; it must divide the 2 ranks that share gradients",
    ):
        ParallelConfig.model_validate({"tensor": 4, "zero1": {"size": 4}}).mesh(0, 8)


@pytest.mark.parametrize(
    ("parallel", "model", "refused"),
    [
        ({"tensor": 3}, {}, r"parallel.tensor is 3; it must divide model.num_heads=8. Use 2."),
        (
            {"tensor": 8},
            {"ffn_size": 100},
            r"parallel.tensor is 8; it must divide model.ffn_size=100. Use 4.",
        ),
        (
            {"tensor": 4},
            {"num_heads": 12, "num_kv_heads": 3, "head_dim": 4, "seq_len": 60},
            r"num_kv_heads=3, or be a multiple of it. Use 3.",
        ),
        (
            {"tensor": 4},
            {"seq_len": 30},
            r"must divide data.seq_len=30, since parallel.sequence .*Use 2.",
        ),
        ({"tensor": 4, "context": 4}, {"seq_len": 24}, r"data.seq_len=24 / context 4.* Use 2."),
        ({"tensor": 4, "sequence": False}, {"seq_len": 30}, None),
        ({"tensor": 8}, {"vocab_size": 61}, None),
        ({"tensor": 8}, {"num_kv_heads": 2}, None),
        (
            {"tensor": 8},
            {"vocab_size": 5},
            r"parallel.tensor is 8; every rank needs a row of model.vocab_size=5. Use 4.",
        ),
    ],
)
def test_a_layout_that_a_model_does_not_fit_is_refused_with_the_nearest_that_works(
    parallel: dict[str, Any], model: dict[str, Any], refused: str | None
) -> None:
    seq_len = model.pop("seq_len", 64)
    shape = ModelConfig(
        **{
            "hidden_size": 32,
            "num_heads": 8,
            "num_kv_heads": 4,
            "ffn_size": 48,
            "vocab_size": 64,
            **model,
        }
    )
    config = ParallelConfig.model_validate(parallel)
    if refused is None:
        config.check_rows(shape, seq_len, NextToken(), None)
    else:
        with pytest.raises(ParallelError, match=refused):
            config.check_rows(shape, seq_len, NextToken(), None)


@pytest.mark.parametrize("kind", ["powersgd", "torch_style"])
def test_hooks_that_cannot_serve_parts_of_matrices_are_refused(kind: str) -> None:
    for axis in ("tensor", "expert"):
        config = ParallelConfig.model_validate({axis: 2, "hook": {"kind": kind}})
        with pytest.raises(ParallelError, match=f"parallel.hook.kind is {kind}.*parallel.{axis}"):
            config.check(config.mesh(0, 4), "float32")
