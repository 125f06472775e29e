"""A published vision model computes what its class of transformers computes: pixels, positions, and the loss and gradients of packed rows."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from support.small_vision import IDS, build_vision, processor_of, write_conversations, write_vision

from headway.checkpoint.stored_model import find_model
from headway.config.load import load
from headway.data.batch import Batch
from headway.media.items import MediaRef
from headway.media.patches import PictureSpec, grid_of, read_cells, rotary_positions, spec_of
from headway.model.adapter.config import AdapterConfig
from headway.model.adapter.peft import adapter_settings
from headway.model.base import Model, build_model
from headway.model.config import ModelConfig
from headway.model.families.base import family_of
from headway.model.flops import picture_flops
from headway.model.loading.native_vision import read_vision
from headway.model.loading.other_parts import OtherParts, text_config
from headway.model.vision import run_tower, to_patches
from headway.model.vision_shape import VisionShape
from headway.train.batches import open_run_data
from headway.train.config import Recipe
from headway.train.resolve import resolve

pytest.importorskip("transformers", minversion="5.0")
PAD = IDS["<|image_pad|>"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "windows of 24 pixels, one full layer": ({}, {}),
    "every layer in windows, one head": ({}, {"fullatt_block_indexes": [], "num_heads": 1, "window_size": 16}),
    "every layer in full, patches of 2, cells of 9": (
        {"tie_word_embeddings": True},
        {"fullatt_block_indexes": [0, 1, 2], "patch_size": 2, "spatial_merge_size": 3, "window_size": 30},
    ),
    "time alone, one frame": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 0, 0]}},
        {"temporal_patch_size": 1, "hidden_act": "gelu"},
    ),
    "columns alone": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [0, 1, 3]}}, {}),
    "qwen3_vl: two inner layers": ({}, {}),
    "qwen3_vl: every inner layer, in another order, patches of 2, cells of 9": (
        {"tie_word_embeddings": True, "num_hidden_layers": 3,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [0, 1, 5], "mrope_interleaved": True}},
        {"deepstack_visual_indexes": [2, 0, 1], "patch_size": 2, "spatial_merge_size": 3, "num_position_embeddings": 4,
         "num_heads": 1, "hidden_act": "gelu"},
    ),
    "qwen3_vl: no inner layer, one frame": (
        {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {"deepstack_visual_indexes": [], "temporal_patch_size": 1},
    ),
    "qwen3_vl_moe: two inner layers": ({}, {}),
    "qwen3_vl_moe: one inner layer, one dense layer": (
        {"mlp_only_layers": [0], "num_experts_per_tok": 1}, {"deepstack_visual_indexes": [1], "num_position_embeddings": 100},
    ),
}  # fmt: skip


def kind_of(name: str) -> str:
    """The model type of a case."""
    kind, colon, _ = name.partition(":")
    return kind if colon else "qwen2_5_vl"


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, dict[str, Any]]:
    """The class of transformers, its folder with conversations beside it, and settings of the tower."""
    text, tower = CASES[request.param]
    kind = kind_of(request.param)
    model = build_vision(text, tower, kind=kind)
    folder = tmp_path_factory.mktemp("vision")
    write_vision(folder / "model", model, tower, kind)
    write_conversations(folder)
    return model, folder, tower


def batches_of(folder: Path, rows: int = 2, packing: str = "best_fit") -> list[Batch]:
    """The microbatch that training reads, of all conversations in `rows` rows."""
    settings = [
        f"init.from={folder}/model", f"data.train=[{{path: {folder}/chat.jsonl, kind: multimodal}}]", f"data.cache_dir={folder}/cache",
        "data.seq_len=256", "multimodal.native={}", f"batch.rows={rows}", f"data.packing={packing}", "device=cpu",
    ]  # fmt: skip
    resolved = resolve(load(Recipe, None, settings))
    data = open_run_data(resolved)
    from headway.data.loader import Loader

    with Loader(
        resolved.recipe.data, sources=data.train, rows_per_step=rows, micro_rows=rows, rank=0, world=1, seed=1, media=data.media
    ) as loader:  # fmt: skip
        return list(next(loader)[0].microbatches)


def our_model(folder: Path) -> Model:
    stored = find_model(folder / "model").with_vision()
    model = build_model(stored.config)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in stored.weights():
            parameters[name].copy_(value)
    return model


def loss_of(model: Model, batch: Batch) -> torch.Tensor:
    """The sum over targets."""
    logits = model.logits(model.forward_batch(batch).hidden)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    return (losses * batch.loss_weight.flatten()).sum()


def documents_of(batch: Batch) -> list[tuple[int, int, int]]:
    """Row, begin and end of every document with a target."""
    documents: list[tuple[int, int, int]] = []
    for row, bounds in enumerate(batch.bounds.tolist()):
        for begin, end in itertools.pairwise(bounds):
            if begin < end and batch.loss_weight[row, begin:end].any():
                documents.append((row, begin, end))
    return documents


def theirs(model: Any, batch: Batch, folder: Path, tower: dict[str, Any]) -> torch.Tensor:
    """The same sum, each document alone in the class of transformers, with its own processor."""
    from transformers.image_utils import load_image

    records = [json.loads(line) for line in (folder / "chat.jsonl").read_text().splitlines()]
    processor = processor_of(tower, model.config.model_type)
    by_tokens: dict[int, dict[str, Any]] = {}
    for record in records:
        pictures = {}
        if record["images"]:
            images = [load_image(path) for path in record["images"]]
            pictures = dict(processor(images=images, return_tensors="pt"))
        cells = 0
        if pictures:
            merge = processor.merge_size**2
            cells = int(pictures["image_grid_thw"].prod(1).sum()) // merge
        assert cells not in by_tokens, "the number of cells tells records apart"
        by_tokens[cells] = pictures

    total = torch.zeros(())
    for row, begin, end in documents_of(batch):
        ids = batch.tokens[row, begin:end][None]
        is_picture = ids == PAD
        logits = model(
            input_ids=ids, mm_token_type_ids=is_picture.int(), **by_tokens[int(is_picture.sum())]
        ).logits[0]
        losses = F.cross_entropy(logits, batch.targets[row, begin:end], reduction="none")
        total = total + (losses * batch.loss_weight[row, begin:end]).sum()
    return total


def gradient_of(model: Any, name: str) -> torch.Tensor:
    """The gradient in the class of transformers of one of our parameters."""
    their_name = name
    if name.startswith("visual."):
        their_name = f"model.{name}"
    elif name.startswith("model."):
        their_name = "model.language_model." + name.removeprefix("model.")
    expected = dict(model.named_parameters())
    path, experts, leaf = their_name.partition(".experts.")
    if not experts:
        gradient = expected[their_name].grad
    elif leaf == "down_proj.weight":
        gradient = expected[f"{path}.experts.down_proj"].grad
    else:
        joined = expected[f"{path}.experts.gate_up_proj"].grad
        gradient = joined.chunk(2, dim=1)[leaf == "up_proj.weight"]
    assert gradient is not None, name
    return gradient


def test_loss_and_gradients_of_a_packed_step_are_those_of_transformers(
    case: tuple[Any, Path, dict[str, Any]],
) -> None:
    model, folder, tower = case
    (batch,) = batches_of(folder)
    assert len(documents_of(batch)) == 4
    assert len({row for row, _, _ in documents_of(batch)}) < 4, "documents share rows"
    model.zero_grad()
    wanted = theirs(model, batch, folder, tower)
    wanted.backward()
    ours = our_model(folder)
    loss = loss_of(ours, batch)
    loss.backward()
    assert abs(float(loss.detach() - wanted.detach())) < 1e-5 * max(1.0, float(wanted.detach()))

    compared = 0
    for name, parameter in ours.named_parameters():
        gradient = gradient_of(model, name)
        assert parameter.grad is not None, name
        scale = max(1.0, float(gradient.abs().max()))
        assert float((parameter.grad - gradient).abs().max()) < 1e-4 * scale, name
        compared += 1
    assert compared == len(list(ours.named_parameters())) > 40


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_row_alone_equals_the_same_row_beside_others(tmp_path: Path, kind: str) -> None:
    write_vision(tmp_path / "model", kind=kind)
    write_conversations(tmp_path)
    model = our_model(tmp_path)
    (packed,) = batches_of(tmp_path, rows=2)
    (spread,) = batches_of(tmp_path, rows=4, packing="pad")
    with torch.no_grad():
        sums = [loss_of(model, batch) for batch in (packed, spread)]
        alone = []
        for row in range(2):
            columns = {name: value[row : row + 1] for name, value in packed.extra.items()}
            one = Batch(
                packed.tokens[row : row + 1], packed.targets[row : row + 1], packed.loss_weight[row : row + 1],
                packed.position[row : row + 1], packed.document[row : row + 1], packed.source[row : row + 1],
                packed.bounds[row : row + 1], extra=columns,
            )  # fmt: skip
            alone.append(model.forward_batch(one).hidden)
        together = model.forward_batch(packed).hidden
    assert float((torch.cat(alone) - together).abs().max()) < 1e-5
    assert abs(float(sums[0] - sums[1])) < 1e-4


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_pixels_and_grids_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers.image_utils import load_image

    draw = np.random.default_rng(0)
    processor = processor_of({"patch_size": 6}, kind)
    spec = spec_of(processor.to_dict(), "test")
    assert spec.patch == 6
    shape: Any = type("Shape", (), {"spec": spec})()
    modes = {"RGB": 3, "RGBA": 4, "L": 1, "LA": 2}
    for number, (width, height) in enumerate(
        [(1, 1), (7, 900), (900, 8), (31, 33), (200, 77), (12, 12), (1000, 999)]
    ):
        mode = list(modes)[number % 4]
        colours = [
            Image.fromarray(draw.integers(0, 256, (height, width), dtype=np.uint8))
            for _ in range(modes[mode])
        ]
        image = Image.merge(mode, colours)
        path = tmp_path / f"{number}.png"
        exif = image.getexif()
        exif[274] = number % 8 + 1
        image.save(path, exif=exif)
        ref = MediaRef("image", path)
        wanted = processor(images=[load_image(str(path))], return_tensors="pt")
        (rows, columns), cells = read_cells(ref, spec)
        assert grid_of(ref, spec) == (rows, columns)
        assert wanted["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
        assert torch.equal(to_patches(torch.from_numpy(cells), shape), wanted["pixel_values"])


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("pictures", [[], [(0, (3, 5))], [(2, (1, 4)), (7, (4, 1)), (15, (2, 2))]])
def test_positions_are_those_of_transformers(
    pictures: list[tuple[int, tuple[int, int]]], kind: str
) -> None:
    ids = torch.full((1, 25), 7)
    for offset, (rows, columns) in pictures:
        ids[0, offset : offset + rows * columns] = PAD
    grids = None
    if pictures:
        grids = torch.tensor([[1, 2 * rows, 2 * columns] for _, (rows, columns) in pictures])
    model = build_vision(kind=kind).model
    position, _ = model.get_rope_index(ids, (ids == PAD).int(), image_grid_thw=grids)
    assert position[:, 0].T.tolist() == rotary_positions(25, pictures).tolist()


def test_a_cell_has_the_pixels_of_its_place() -> None:
    spec = PictureSpec(patch=2, merge=1, min_pixels=4, max_pixels=4096)
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    grid, cells = read_cells(MediaRef("image", data=stream.getvalue()), spec)
    assert grid == (2, 3)
    assert np.array_equal(cells[4, 0, 0], pixels[2:4, 2:4].transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("kind", "tower"),
    [
        ("qwen2_5_vl", {"window_size": 16, "fullatt_block_indexes": [1]}),
        ("qwen3_vl", {"deepstack_visual_indexes": [1, 2]}),
    ],
)
def test_flops_of_pictures_are_those_that_are_counted(
    tmp_path: Path, kind: str, tower: dict[str, Any]
) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    write_vision(tmp_path, build_vision({}, tower, kind=kind), tower, kind)
    config = find_model(tmp_path).with_vision().config
    assert config.vision is not None
    model: Any = build_model(config)
    # Whole windows, so that none is cut.
    grids = [(4, 6), (2, 2)]
    cells = torch.zeros(28, *config.vision.spec.cell_shape, dtype=torch.uint8)
    for training in (True, False):
        model.visual.requires_grad_(training)
        counter = FlopCounterMode(display=False)
        with counter, sdpa_kernel(SDPBackend.MATH):
            features = run_tower(model.visual, config.vision, cells, grids, torch.float32)
            if training:
                features.sum().backward()
        flops = picture_flops(config, training=None if training else ())
        assert flops is not None
        # Nothing needs the gradient of the pixels, which we do not count either.
        assert counter.get_total_flops() == pytest.approx(flops.of(28, 24**2 + 4**2), rel=1e-6)


@pytest.fixture(scope="module")
def deepstack(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A Qwen3-VL of three layers whose tower has three."""
    folder = write_vision(tmp_path_factory.mktemp("deepstack"), kind="qwen3_vl")
    return find_model(folder).with_vision().config


@pytest.mark.parametrize("inner", [[3], [-1], [0, 0], ["1"], None, [0, 1, 2]])
def test_inner_layers_that_tower_or_decoder_lack_are_refused(
    deepstack: ModelConfig, inner: Any
) -> None:
    assert deepstack.vision is not None
    tower = {**deepstack.vision.tower, "deepstack_visual_indexes": inner}
    vision = replace(deepstack.vision, tower=tower)
    num_layers = 2 if inner == [0, 1, 2] else 3
    with pytest.raises(ValueError, match="deepstack_visual_indexes"):
        deepstack.with_(vision=vision, num_layers=num_layers)


@pytest.mark.parametrize(
    ("kind", "sections", "axes"),
    [
        ("qwen2_5_vl", (1, 2, 1), [0, 1, 1, 2]),
        ("qwen3_vl", (3, 2, 1), [0, 1, 2, 0, 1, 0]),
        ("qwen3_vl", (0, 1, 5), [0, 1, 2, 0, 0, 2]),
        ("qwen3_vl_moe", (4, 0, 0), [0, 0, 0, 0]),
    ],
)
def test_planes_stand_one_kind_after_another_or_in_turn(
    kind: str, sections: tuple[int, ...], axes: list[int]
) -> None:
    shape = VisionShape(kind, {}, {}, 1, 2, 3, sections)
    assert shape.plane_axes() == axes


def test_an_adapter_of_the_tower_names_no_convolution(deepstack: ModelConfig) -> None:
    adapter = AdapterConfig(rank=2, targets=("all", "visual.*"))
    settings = adapter_settings(adapter, deepstack, [], None)
    # PEFT takes every module whose path ends with a name.
    convolution = "model.visual.patch_embed.proj"
    assert not any(f".{convolution}".endswith(f".{name}") for name in settings["target_modules"])
    assert any(name.endswith("attn.proj") for name in settings["target_modules"])


def test_settings_are_read_as_they_are_published(tmp_path: Path) -> None:
    """Older names of keys, and what the class fills in."""
    hf_config = {
        "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 58, "vision_end_token_id": 59,
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "rope_theta": 5000000,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "vision_config": {"model_type": "qwen3_vl", "depth": 3, "deepstack_visual_indexes": [0, 1, 2], "out_hidden_size": 32},
    }  # fmt: skip
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    shape = read_vision(OtherParts(tmp_path, hf_config, {}, {}), "a folder")
    assert shape.spec == PictureSpec(
        16, 2, 2, 65536, 16777216, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
    )
    assert shape.deepstack_layers == 3
    assert shape.sections == (24, 20, 20)
    config = family_of("qwen3").read(text_config(hf_config)).with_(vision=shape)
    assert config.rope_theta == 5000000
    assert config.tie_embeddings
    # What config.json leaves out is as in the class.
    assert shape.tower["num_position_embeddings"] == 2304
