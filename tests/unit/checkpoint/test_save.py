"""What is saved in any boxes is read back bit for bit in any others, and nothing that is missing is made up."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import locate, newest_good, open_checkpoint
from headway.checkpoint.retention import retain, set_aside_later
from headway.checkpoint.save import Writers, save_checkpoint
from headway.errors import CheckpointError, ConfigError
from headway.parallel.box import StateTensor

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    bits = torch.randint(
        0, 256, (*shape, torch.empty((), dtype=dtype).element_size()), dtype=torch.uint8
    )
    if dtype is torch.bool:
        return (bits[..., 0] % 2).bool()
    return bits.view(dtype)[..., 0].clone()  # any bit pattern, NaN and denormals too


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def whole(name: str, tensor: torch.Tensor, role: str = "master") -> StateTensor:
    return StateTensor(name, role, tuple(tensor.shape), [((0,) * tensor.dim(), tensor)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (5, 3), (2, 3, 4)], ids=str)
def test_every_type_and_shape_round_trips_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    tensor = random(shape, dtype)
    path = save_checkpoint(
        tmp_path, 1, [whole("a", tensor), whole("odd", torch.ones(3, dtype=torch.bool))], {}
    )
    reader = open_checkpoint(path)
    read = reader.read("a", "master")
    assert (read.dtype, read.shape) == (dtype, tensor.shape)
    assert raw(read) == raw(tensor)
    assert reader.shape("a") == shape
    assert reader.dtype("a", "master") == dtype


def test_views_that_are_not_contiguous_are_saved_as_they_look(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    reader = open_checkpoint(save_checkpoint(tmp_path, 1, [whole("a", tensor)], {}))
    assert torch.equal(reader.read("a", "master"), tensor)


def test_scalars_come_back(tmp_path: Path) -> None:
    scalars = {"data": {"epoch": 1, "window": 2, "row": [3, 0.1, None, True, "x"]}, "loss": 1e-300}
    reader = open_checkpoint(save_checkpoint(tmp_path, 500, [whole("w", torch.ones(2))], scalars))
    assert (reader.step, reader.world, reader.scalars) == (500, 1, scalars)


def test_names_and_roles_come_back(tmp_path: Path) -> None:
    records = [
        whole("w", torch.ones(2)),
        whole("w", torch.zeros(2), "exp_avg"),
        whole("b", torch.full((2,), 2.0), "param"),
    ]
    reader = open_checkpoint(save_checkpoint(tmp_path, 500, records, {}))
    assert reader.names() == ["w", "b"]
    assert reader.names("exp_avg") == ["w"]
    assert reader.roles("w") == ["master", "exp_avg"]
    assert torch.equal(reader.weight("w"), torch.ones(2))
    assert torch.equal(reader.weight("b"), torch.full((2,), 2.0))


def test_the_files_of_the_tokenizer_come_back_and_no_others(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "model.safetensors").write_bytes(b"weights that are not a tokenizer's")
    records = [whole("w", torch.ones(2))]
    reader = open_checkpoint(save_checkpoint(tmp_path / "c", 500, records, {}, tokenizer))
    assert reader.tokenizer_folder is not None
    assert [path.name for path in reader.tokenizer_folder.iterdir()] == ["tokenizer.json"]


def test_latest_is_a_relative_link_to_the_newest_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 500, [whole("w", torch.ones(2))], {})
    assert open_checkpoint(tmp_path / "latest").path == tmp_path / "step-00000500"
    assert (tmp_path / "latest").readlink() == Path("step-00000500")


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    a = torch.randn(2, 3)
    b = torch.tensor([True])
    path = save_checkpoint(tmp_path, 1, [whole("b", b), whole("a", a)], {})
    loaded = safetensors.torch.load_file(path / "rank-00000.safetensors")
    assert set(loaded) == {"master:a|0,0", "master:b|0"}
    assert torch.equal(loaded["master:a|0,0"], a)
    assert torch.equal(loaded["master:b|0"], b)


def test_scalars_that_json_would_change_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"scalars\.a has a key 1"):
        save_checkpoint(tmp_path, 1, [], {"a": {1: 2}})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"scalars\.a is a Tensor"):
        save_checkpoint(tmp_path, 1, [], {"a": torch.ones(1)})  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []


def cut(
    draw: st.DrawFn, offset: tuple[int, ...], shape: tuple[int, ...], depth: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A random partition of a box into boxes."""
    dims = [d for d, size in enumerate(shape) if size > 1]
    if depth == 0 or not dims or draw(st.booleans()):
        return [(offset, shape)]
    dim = draw(st.sampled_from(dims))
    cut_index = draw(st.integers(1, shape[dim] - 1))
    rest = (*offset[:dim], offset[dim] + cut_index, *offset[dim + 1 :])
    low = cut(draw, offset, (*shape[:dim], cut_index, *shape[dim + 1 :]), depth - 1)
    return low + cut(
        draw, rest, (*shape[:dim], shape[dim] - cut_index, *shape[dim + 1 :]), depth - 1
    )


@st.composite
def layouts(
    draw: st.DrawFn,
) -> tuple[
    list[tuple[tuple[int, ...], tuple[int, ...]]],
    tuple[int, ...],
    tuple[tuple[int, ...], tuple[int, ...]],
]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    boxes = cut(draw, (0,) * len(shape), shape, 4)
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    region = tuple(draw(st.integers(0, size - s)) for size, s in zip(shape, start, strict=True))
    return boxes, shape, (start, region)


@settings(max_examples=80, deadline=None)
@given(layout=layouts(), extra=st.integers(0, 1000), drop=st.integers(0, 1000))
def test_any_cut_is_read_in_any_other_and_a_missing_box_is_refused(
    tmp_path_factory: pytest.TempPathFactory, layout, extra, drop
) -> None:
    boxes, shape, (start, region) = layout
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape)
    slices = lambda start, size: tuple(slice(a, a + s) for a, s in zip(start, size, strict=True))  # noqa: E731
    held = [(start, tensor[slices(start, size)]) for start, size in boxes]
    folder = tmp_path_factory.mktemp("c")
    overlap = whole("t", tensor, "overlap")
    overlap.boxes.extend((start, piece) for start, piece in [held[extra % len(held)]] if any(start))
    reader = open_checkpoint(
        save_checkpoint(folder, 1, [StateTensor("t", "cut", shape, held), overlap], {})
    )
    for role in ("cut", "overlap"):
        assert torch.equal(reader.read("t", role), tensor)
        assert torch.equal(reader.read("t", role, start, region), tensor[slices(start, region)])
    reader.verify()
    gone = held.pop(drop % len(held))
    lacking = open_checkpoint(
        save_checkpoint(
            folder, 2, [StateTensor("t", "cut", shape, [*held, (gone[0], gone[1][:0])])], {}
        )
    )
    for refuse in (lambda: lacking.read("t", "cut"), lacking.verify):
        with pytest.raises(CheckpointError, match=r"cut:t lacks elements|have the dtypes none"):
            refuse()


def test_boxes_of_different_types_are_refused(tmp_path: Path) -> None:
    boxes = [((0,), torch.ones(2)), ((2,), torch.ones(2, dtype=torch.bfloat16))]
    reader = open_checkpoint(
        save_checkpoint(tmp_path, 1, [StateTensor("t", "master", (4,), boxes)], {})
    )
    with pytest.raises(CheckpointError, match="dtypes bfloat16, float32; they must share one"):
        reader.read("t", "master")


def test_a_state_that_a_checkpoint_lacks_is_named_with_those_it_holds(tmp_path: Path) -> None:
    reader = open_checkpoint(save_checkpoint(tmp_path, 1, [whole("w", torch.ones(1))], {}))
    with pytest.raises(CheckpointError, match=r"no exp_avg of w \(it holds master\)"):
        reader.read("w", "exp_avg")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        locate(tmp_path / "nowhere")


def test_boxes_of_many_ranks_make_one_checkpoint(tmp_path: Path) -> None:
    """Rank 1's part is written first, by hand of a gather that already knows it: the format of one rank is that of many."""
    tensor = torch.arange(10.0)
    answers: dict[int, list[object]] = {0: [], 1: []}
    turn = {"call": 0}

    def gather_on_0(value: object) -> list[object]:
        call = turn["call"]
        turn["call"] = turn["call"] + 1
        if call == 1:  # both ranks write between the first and the second meeting
            save_checkpoint(
                tmp_path,
                3,
                [StateTensor("t", "master", (10,), [((4,), tensor[4:])])],
                {},
                writers=Writers(1, 2, gather_on_1),
            )
        return [value, answers[1][call]] if call == 1 else [value, {"result": None, "error": None}]

    def gather_on_1(value: object) -> list[object]:
        answers[1].append(value)
        return [{"result": None, "error": None}, value]

    state = StateTensor("t", "master", (10,), [((0,), tensor[:4])])
    path = save_checkpoint(tmp_path, 3, [state], {"a": 1}, writers=Writers(0, 2, gather_on_0))
    reader = open_checkpoint(path)
    assert reader.world == 2
    assert reader.scalars == {"a": 1}
    assert torch.equal(reader.read("t", "master"), tensor)
    assert torch.equal(reader.read("t", "master", (3,), (3,)), tensor[3:6])


def test_a_failure_on_another_rank_fails_the_save_here(tmp_path: Path) -> None:
    gather = lambda value: [value, {"result": None, "error": "the disk is full"}]  # noqa: E731
    with pytest.raises(CheckpointError, match="rank 1: the disk is full"):
        save_checkpoint(tmp_path, 1, [whole("w", torch.ones(1))], {}, writers=Writers(0, 2, gather))
    assert list(tmp_path.iterdir()) == []


def test_retention_keeps_the_newest_and_what_links_point_at(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_checkpoint(tmp_path, step, [whole("w", torch.ones(1))], {})
    (tmp_path / "mine").symlink_to("step-00000002")
    deleted = retain(tmp_path, CheckpointConfig(keep_last=2))
    assert [p.name for p in deleted] == ["step-00000001", "step-00000003"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "mine",
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]
    assert retain(tmp_path, CheckpointConfig(keep_last=4)) == []


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, [whole("w", torch.ones(1))], {})
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    (tmp_path / "step-00000004" / "rank-00000.safetensors").write_bytes(b"")
    assert retain(tmp_path, CheckpointConfig(keep_last=2)) == []
    assert [path.name for path in retain(tmp_path, CheckpointConfig(keep_last=1))] == [
        "step-00000001"
    ]
    assert newest_good(tmp_path).path == tmp_path / "step-00000002"


def test_going_on_from_an_older_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    for _ in range(2):
        for step in (1, 2, 3):
            save_checkpoint(tmp_path, step, [whole("w", torch.ones(1))], {})
        set_aside_later(tmp_path, 1)
    assert set_aside_later(tmp_path, 1) == []
    assert (
        newest_good(tmp_path).path == tmp_path / "step-00000001" == (tmp_path / "latest").resolve()
    )
    aside = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("set-aside"))
    assert aside == [
        "set-aside-step-00000002",
        "set-aside-step-00000002-2",
        "set-aside-step-00000003",
        "set-aside-step-00000003-2",
    ]
    assert set_aside_later(tmp_path, 0) == [tmp_path / "set-aside-step-00000001"]
    assert not (tmp_path / "latest").is_symlink()
    assert newest_good(tmp_path).path is None


def test_a_rank_whose_file_is_not_on_the_shared_disk_fails_the_save(tmp_path: Path) -> None:
    elsewhere = {"file": {"path": "rank-00001.safetensors", "size": 8}, "shapes": {}, "boxes": []}
    gather = lambda value: [value, {"result": elsewhere, "error": None}]  # noqa: E731
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors was written elsewhere"):
        save_checkpoint(tmp_path, 1, [whole("w", torch.ones(1))], {}, writers=Writers(0, 2, gather))


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_saved_bit_for_bit(tmp_path: Path) -> None:
    tensor = torch.randn(64, 3, device="cuda", dtype=torch.bfloat16)
    reader = open_checkpoint(save_checkpoint(tmp_path, 1, [whole("w", tensor.t())], {}))
    assert raw(reader.weight("w")) == raw(tensor.t().cpu())


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 7, [whole("w", torch.ones(1))], {"try": 1})
    save_checkpoint(tmp_path, 7, [whole("w", torch.zeros(1))], {"try": 2})
    newest = newest_good(tmp_path)
    assert newest.reader is not None
    assert newest.reader.scalars == {"try": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000007"]
    assert locate(tmp_path) == tmp_path / "step-00000007"
    assert json.loads((tmp_path / "latest" / "manifest.json").read_text())["step"] == 7


def test_a_rank_with_a_disk_of_its_own_keeps_its_newest_part_alone_and_may_write_it_again(
    tmp_path: Path,
) -> None:
    """Rank 1 of 2 on another machine: rank 0 renames and cleans on its own disk, not here."""
    writers = Writers(1, 2, lambda value: [{"result": None, "error": None}, value])
    for step in (5, 10, 10):
        save_checkpoint(
            tmp_path, step, [whole("w", torch.full((3,), float(step)))], {}, writers=writers
        )
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors")] == [
        ".tmp-step-00000010/rank-00001.safetensors"
    ]
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-step-00000010"]
