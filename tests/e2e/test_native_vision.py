"""Runs of a model with its own vision tower: what trains, resuming bit for bit, the published folder written back, and what is refused."""

from __future__ import annotations

import builtins
import io
import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.fuzzing import run_verb
from support.killed_runs import finish, kill_somewhere
from support.runs import assert_same_run
from support.small_vision import (
    IDS,
    build_vision,
    processor_of,
    write_conversations,
    write_vision,
)

from headway.checkpoint.stored_model import find_model
from headway.config.load import load
from headway.records.multimodal import Kind as MultimodalKind
from headway.train import train
from headway.train.config import Recipe
from headway.train.next_steps import next_steps

pytest.importorskip("transformers", minversion="5.0")
SEED = int(os.environ.get("HEADWAY_DRILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)


ADAPTED = {"qwen2_5_vl": (17, 14), "qwen3_vl": (18, 21), "qwen3_vl_moe": (18, 12)}
"""Matrices of tower and decoder that adapters of all linears change, in the folder."""
QUANTISED_EXPERTS = {"qwen3_vl_moe": 6}
"""Matrices of a decoder that no adapter changes, and a quantised base rounds."""


@pytest.fixture(
    scope="module",
    params=[
        "qwen2_5_vl",
        pytest.param("qwen3_vl", marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", marks=pytest.mark.slow),
    ],
)
def workspace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    write_vision(folder / "model", kind=request.param)
    write_conversations(folder)
    return folder


def kind_of(workspace: Path) -> str:
    """The model type of the folder."""
    return json.loads((workspace / "model/config.json").read_text())["model_type"]


def settings(workspace: Path, name: str, *more: str) -> list[str]:
    return [
        f"run.dir={workspace}/runs", f"run.name={name}", f"init.from={workspace}/model", f"data.cache_dir={workspace}/cache",
        f"data.train=[{{path: {workspace}/chat.jsonl, kind: multimodal}}]", "data.seq_len=256", "multimodal.native={}", "batch.rows=2",
        "batch.micro_rows=1", "steps=4", "device=cpu", "checkpoint.every=2", "optim.lr=1e-2", "optim.schedule.kind=constant", *more,
    ]  # fmt: skip


def go(workspace: Path, name: str, *more: str) -> Path:
    recipe = load(Recipe, None, settings(workspace, name, *more))
    train(recipe)
    return recipe.run.folder


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in path.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def changed(workspace: Path, run: Path) -> tuple[set[str], set[str]]:
    """Tensors of the tower and of the rest that are not what the run began with."""
    before = tensors(workspace / "model")
    after = tensors(run / "final")
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype for name in before)
    names = {name for name in before if not torch.equal(before[name], after[name])}
    tower = {name for name in names if "visual" in name}
    return tower, names - tower


def towers(workspace: Path) -> set[str]:
    return {name for name in tensors(workspace / "model") if "visual" in name}


@pytest.fixture(scope="module")
def run(workspace: Path) -> Path:
    return go(workspace, "whole")


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_tower_stays_byte_for_byte_and_the_decoder_trains(workspace: Path, run: Path) -> None:
    tower, decoder = changed(workspace, run)
    assert not tower
    assert len(decoder) > 20
    assert losses(run)[-1] < losses(run)[0]
    # What describes pictures is there as it was, and the class of transformers opens the folder.
    name = "preprocessor_config.json"
    assert (run / "final" / name).read_bytes() == (workspace / "model" / name).read_bytes()
    import transformers

    model = transformers.AutoModelForMultimodalLM.from_pretrained(run / "final").eval()
    with Image.open(workspace / "pictures/1.png") as image:
        pixels = processor_of(kind=kind_of(workspace))(images=[image], return_tensors="pt")
    with torch.no_grad():
        features = model.model.visual(pixels["pixel_values"], pixels["image_grid_thw"])
        wanted = build_vision(kind=kind_of(workspace)).model.visual(
            pixels["pixel_values"], pixels["image_grid_thw"]
        )
    assert torch.equal(features.pooler_output, wanted.pooler_output)


def test_a_second_start_parses_no_record_and_touches_no_picture(
    workspace: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[object] = []
    touched: list[str] = []
    plain_parse = MultimodalKind.parse
    plain_stat = os.stat
    plain_open = builtins.open

    def parse(self: Any, record: Any, *more: Any) -> Any:
        parsed.append(record)
        return plain_parse(self, record, *more)

    def stat(path: Any, *more: Any, **named: Any) -> Any:
        note(path)
        return plain_stat(path, *more, **named)

    def open_(path: Any, *more: Any, **named: Any) -> Any:
        note(path)
        return plain_open(path, *more, **named)

    def note(path: Any) -> None:
        if not isinstance(path, int) and f"{workspace}/pictures/" in os.fsdecode(path):
            touched.append(os.fsdecode(path))

    with monkeypatch.context() as patched:
        patched.setattr(MultimodalKind, "parse", parse)
        patched.setattr(os, "stat", stat)
        patched.setattr(builtins, "open", open_)
        patched.setattr(io, "open", open_)
        second = go(workspace, "second", "steps=2")
        assert (len(parsed), touched) == (0, [])
        # The counters count: without a cache every record is parsed and every picture read.
        go(workspace, "uncached", "steps=1", f"data.cache_dir={workspace}/other-cache")
    assert len(parsed) >= 4
    assert len(set(touched)) >= 4
    assert losses(second) == losses(run)[:2]


def test_pictures_are_seen(workspace: Path, run: Path) -> None:
    """Other pixels at the same places give another loss."""
    shutil.copytree(workspace / "pictures", workspace / "grey/pictures")
    text = (workspace / "chat.jsonl").read_text().replace(str(workspace), f"{workspace}/grey")
    (workspace / "grey/chat.jsonl").write_text(text)
    for path in (workspace / "grey/pictures").iterdir():
        with Image.open(path) as image:
            size = image.size
        Image.new("RGB", size, (99, 99, 99)).save(path)
    other = go(workspace, "grey", f"data.train.0.path={workspace}/grey/chat.jsonl", "steps=1")
    assert abs(losses(other)[0] - losses(run)[0]) > 1e-3


@pytest.mark.slow
def test_the_tower_trains_where_a_recipe_names_it_with_its_own_rate(
    workspace: Path, run: Path
) -> None:
    all_of_it = go(workspace, "all", "train=[weights]")
    tower, decoder = changed(workspace, all_of_it)
    assert tower == towers(workspace)
    assert decoder == changed(workspace, run)[1]
    # A rate of zero keeps the tower where it was, so that the rest trains as with a frozen one.
    still = go(
        workspace, "still", "train=[weights]", "optim.groups=[{match: [tower], lr_factor: 0}]",
        "optim.clip=null",
    )  # fmt: skip
    assert not changed(workspace, still)[0]
    merger = go(workspace, "merger", "train=[visual.merger.*]")
    tower, decoder = changed(workspace, merger)
    assert tower and all("merger" in name for name in tower)
    assert not decoder


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "nf4"])
def test_adapters_of_decoder_and_tower_are_merged_into_the_folder(
    workspace: Path, base: str | None
) -> None:
    form = [] if base is None else [f"adapter.base={base}"]
    decoder_alone = go(workspace, f"lora-{base}", "adapter.rank=2", *form)
    tower, decoder = changed(workspace, decoder_alone)
    assert not tower
    wanted_tower, wanted_decoder = ADAPTED[kind_of(workspace)]
    if base is not None:
        wanted_decoder += QUANTISED_EXPERTS.get(kind_of(workspace), 0)
    assert len(decoder) == wanted_decoder
    both = go(workspace, f"both-{base}", "adapter.rank=2", "adapter.targets=[all, visual.*]", *form)
    tower, decoder = changed(workspace, both)
    assert (len(tower), len(decoder)) == (wanted_tower, wanted_decoder)
    beside = go(workspace, f"beside-{base}", "adapter.rank=2", "train=[tower]", *form)
    assert changed(workspace, beside)[0] == towers(workspace)


def test_a_stopped_run_resumes_bit_for_bit(workspace: Path) -> None:
    more = ("train=[weights]", "memory.recompute=1")
    whole = go(workspace, "unstopped", *more)
    go(workspace, "stopped", "steps=2", *more)
    stopped = go(workspace, "stopped", *more)
    assert_same_run(whole, stopped, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [(), ("train=[weights]",), ("adapter.rank=2",)])
def test_a_killed_run_ends_as_the_undisturbed_one(workspace: Path, more: tuple[str, ...]) -> None:
    name = f"kill-{'-'.join(more)}"
    longer = ("steps=10", *more)
    whole = go(workspace, f"{name}-whole", *longer)
    recipe = load(Recipe, None, settings(workspace, name, *longer))
    hit = kill_somewhere(recipe, 1, random.Random(f"{SEED} {name}"))
    assert finish(recipe, 1) == [0], f"HEADWAY_DRILL_SEED={SEED}, killed in {hit}"
    assert_same_run(whole, recipe.run.folder, 10)
    left = tensors(whole / "final")
    right = tensors(recipe.run.folder / "final")
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_second_run_begins_with_a_checkpoint_or_a_final_folder(
    workspace: Path, run: Path
) -> None:
    seen = [
        losses(go(workspace, f"second-{number}", f"init.from={path}", "steps=1"))[0]
        for number, path in enumerate((run / "final", run / "checkpoints/latest"))
    ]
    assert seen[0] == seen[1] < losses(run)[0]
    assert find_model(run / "checkpoints/latest").config.vision is not None
    # Text alone: the tower of the checkpoint is left aside, and written back.
    (workspace / "text.jsonl").write_text('{"text": "The cat sat on the mat again and again."}\n')
    text = go(
        workspace, "text", f"init.from={run}/checkpoints/latest", "multimodal=null", "steps=1",
        f"data.train=[{workspace}/text.jsonl]",
    )  # fmt: skip
    assert not changed(workspace, text)[0]


@pytest.fixture
def refusal(workspace: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line of a run that ends with exit code 2."""

    def refused(*more: str) -> str:
        code = run_verb(["train", *settings(workspace, "refused", *more)])
        out = capsys.readouterr()
        text = out.out + out.err
        assert code == 2, text
        assert "Traceback" not in text
        assert not (workspace / "runs/refused/checkpoints").exists()
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        assert text.endswith(f"{line}\n"), "nothing follows it"
        return line

    return refused


def copied(workspace: Path, name: str) -> Path:
    folder = workspace / name
    shutil.copytree(workspace / "model", folder)
    return folder


def test_folders_that_do_not_fit_are_refused_in_one_line(
    workspace: Path, refusal: Callable[..., str]
) -> None:
    half = copied(workspace, "half")
    values = load_file(half / "model.safetensors")
    gone = next(name for name in values if "visual.merger" in name)
    save_file(
        {name: value for name, value in values.items() if name != gone},
        half / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert "not among the weights" in refusal(f"init.from={half}")

    wrong = copied(workspace, "wrong")
    values = load_file(wrong / "model.safetensors")
    name = next(name for name in values if name.endswith("blocks.0.attn.proj.weight"))
    values[name] = values[name][:7].clone()
    save_file(values, wrong / "model.safetensors", metadata={"format": "pt"})
    assert "from another model" in refusal(f"init.from={wrong}")

    for key, value, expected in (
        ("patch_size", 14, "must be of one model"),
        ("do_rescale", False, "always does it"),
        ("image_processor_type", "SiglipImageProcessor", "Take the file of the model"),
        ("image_std", [0, 1, 1], "std above 0"),
    ):
        folder = copied(workspace, f"other-{key}")
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        assert expected in refusal(f"init.from={folder}")
    bare = copied(workspace, "bare")
    (bare / "preprocessor_config.json").unlink()
    assert "no such file" in refusal(f"init.from={bare}")


def test_settings_that_do_not_fit_are_refused_in_one_line(
    workspace: Path, refusal: Callable[..., str]
) -> None:
    for more, expected in (
        (("multimodal.image={encoder: vit}",), "has native and image"),
        (("data.seq_len=40",), "Set multimodal.native.max_pixels"),
        (("multimodal.native={max_pixels: 3}",), "nor below one cell"),
        (("init.from=null", f"tokenizer={workspace}/model"), "without init.from"),
        (("data.packing=one_document",), "Use best_fit"),
        (("data.packing=concat",), "Use best_fit"),
        (("parallel.tensor=2",), "tensor axis"),
        (("objective.kind=dpo",), "media are inputs"),
    ):
        assert expected in refusal(*more), more


def record_of(workspace: Path, path: Path) -> str:
    record = {
        "messages": [
            {"role": "user", "content": "<image>?"},
            {"role": "assistant", "content": "Yes."},
        ],
        "images": [str(path)],
    }
    file = workspace / f"{path.stem}.jsonl"
    file.write_text(json.dumps(record))
    return f"data.train=[{{path: {file}, kind: multimodal}}]"


def test_pictures_of_impossible_sizes_are_refused_in_one_line(
    workspace: Path, refusal: Callable[..., str]
) -> None:
    def png_header(width: int, height: int) -> bytes:
        body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return (
            b"\x89PNG\r\n\x1a\n"
            + struct.pack(">I", 13)
            + body
            + struct.pack(">I", zlib.crc32(body))
        )

    for name, width, height, expected in (
        ("none", 0, 5, "the picture is empty"),
        ("huge", 30_000, 30_000, "at most"),
        ("long", 30_000, 20, "more than 200 times"),
    ):
        path = workspace / f"{name}.png"
        path.write_bytes(png_header(width, height))
        if name == "long":
            Image.new("RGB", (width, height)).save(path)
        assert expected in refusal(record_of(workspace, path))
    sound = workspace / "video.mp4"
    sound.write_bytes(b"\0\0\0\x18ftypmp42")
    path = workspace / "video.jsonl"
    path.write_text(json.dumps({"text": "A cat.", "audio": "video.mp4"}))
    line = refusal(f"data.train=[{{path: {path}, kind: multimodal}}]")
    assert "holds audio, and the model takes image only" in line


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_odd_settings_of_published_folders_are_kept(tmp_path: Path, kind: str) -> None:
    model: Any = build_vision({"tie_word_embeddings": True}, kind=kind).to(torch.bfloat16)
    write_vision(tmp_path / "model", model, kind=kind)
    write_conversations(tmp_path)
    run = go(tmp_path, "bf16", "steps=1", "train=[visual.blocks.1.*]")
    before = tensors(tmp_path / "model")
    after = tensors(run / "final")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    # In a precision that holds all of the folder's, only what trained is other than before.
    assert {name for name in before if "visual.blocks.1." in name} == before.keys() - same


def test_a_finished_run_says_how_to_ask_it(run: Path) -> None:
    commands = [command for command, _ in next_steps({"run": run, "final": run / "final"})]
    assert any("generate" in command and "--image" in command for command in commands)


@pytest.mark.slow
def test_peft_loads_the_adapter_over_the_class_of_transformers(workspace: Path) -> None:
    peft = pytest.importorskip("peft")
    run = go(workspace, "peft", "adapter.rank=2", "adapter.targets=[all, visual.*]", "steps=2")
    adapter = run / "final/adapter"
    with Image.open(workspace / "pictures/1.png") as image:
        pixels = processor_of(kind=kind_of(workspace))(images=[image], return_tensors="pt")
    count = int(pixels["image_grid_thw"].prod()) // 4
    ids = torch.tensor([[5, *[IDS["<|image_pad|>"]] * count, 6, 7]])
    inputs = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IDS["<|image_pad|>"]).int(),
        **pixels,
    }
    transformers = pytest.importorskip("transformers")
    merged = transformers.AutoModelForMultimodalLM.from_pretrained(run / "final").eval()
    base = transformers.AutoModelForMultimodalLM.from_pretrained(workspace / "model").eval()
    with torch.no_grad():
        plain = base(**inputs).logits
        adapted = peft.PeftModel.from_pretrained(base, adapter)(**inputs).logits
        wanted = merged(**inputs).logits
    assert float((adapted - wanted).abs().max()) < 1e-4
    assert float((plain - wanted).abs().max()) > 1e-2

    # headway opens it over its base too, tower included, and trains it further.
    ours = dict(find_model(adapter).weights())
    final = dict(find_model(run / "final").with_vision().weights())
    assert ours.keys() == final.keys()
    assert all(torch.allclose(ours[name], final[name], atol=1e-5) for name in ours)
    more = ("adapter.rank=2", "adapter.targets=[all, visual.*]", "steps=1")
    further = losses(go(workspace, "further", f"init.from={adapter}", *more))[0]
    assert further == pytest.approx(
        losses(go(workspace, "merged", f"init.from={run}/final", "steps=1"))[0], abs=1e-4
    )


def test_held_out_pictures_are_validated_with_workers(workspace: Path) -> None:
    held_out = ("data.valid.fraction=0.5", "eval.every=2", "eval.rows=2", "data.workers=1")
    run = go(workspace, "valid", *held_out)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("valid" in key for line in lines for key in line)
    alone = go(workspace, "valid-alone", *held_out[:-1])
    assert losses(alone) == losses(run)
