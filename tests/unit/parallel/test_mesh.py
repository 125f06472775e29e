"""Which ranks are neighbours on each axis of the mesh."""

import pytest

from headway.errors import ParallelError
from headway.parallel.config import ParallelConfig
from headway.parallel.mesh import Mesh, plan_mesh


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


def test_a_rank_outside_its_layout_is_refused() -> None:
    with pytest.raises(ParallelError, match="has ranks 0 to 3"):
        Mesh(rank=4, shard=4)


def test_experts_divide_the_data_ranks_once_more() -> None:
    mesh = plan_mesh(0, 8, 4, "key", expert=2)
    assert mesh.groups("expert") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("expert_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("expert_replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups("expert_reduce") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert mesh.data == 8
    assert mesh.describe("zero1") == ["8 ranks: zero1 over 4, 2 times; the experts over 2 (expert)"]
    wide = plan_mesh(0, 16, 2, "key", tensor=2, expert=4)
    assert (wide.expert_shard, wide.expert_replicate, wide.groups("expert")[0]) == (
        1,
        2,
        [0, 2, 4, 6],
    )
    assert wide.groups("expert_replicate")[0] == [0, 8]


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
