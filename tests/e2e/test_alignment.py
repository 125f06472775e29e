"""Aligning runs: a killed one ends bit for bit like one that was not, mistakes are one line, and held-out samples find each other."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.media_reads import count_media_reads
from support.runs import deterministic
from support.small_aligner import ENCODERS

from headway.checkpoint.stored_model import find_model
from headway.errors import ConfigError
from headway.infer.aligner import find_aligner
from headway.infer.check_checkpoint import check_checkpoint
from headway.media.items import MediaRef
from headway.media.synthetic import SyntheticMedia, write_media
from headway.plan.hardware import GPUS
from headway.train import train
from headway.train.config import Recipe
from headway.train.next_steps import next_steps
from headway.train.planning import PlanTarget, plan_job
from headway.train.resolve import resolve


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("align")
    write_media(folder / "set", SyntheticMedia(samples=24, heldout=8, image_size=16, seconds=0.2))
    return folder


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    plain = {
        "run": {"name": "a", "dir": str(folder / "runs")},
        "model": {"aligner": {"encoders": ENCODERS, "dim": 8}},
        "objective": {"kind": "contrastive"},
        "data": {
            "train": [str(folder / "set" / "captions.jsonl")],
            "valid": {"fraction": 0.2},
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"rows": 8, "micro_rows": 4},
        "steps": 7,
        "eval": {"every": 3, "rows": 64},
        "checkpoint": {"every": 2},
        "device": "cpu",
    }
    return Recipe.load(plain).with_(changes)


class Killed(BaseException):
    """Stands for SIGKILL."""


@contextmanager
def dying(run: Any) -> Iterator[None]:
    def at(step: int) -> None:
        if step == 5:
            raise Killed

    run.on_step(at)
    yield


def test_a_killed_run_ends_bit_for_bit_like_an_undisturbed_one(folder: Path) -> None:
    train(recipe_of(folder))
    second = {"run.name": "b"}
    with pytest.raises(Killed):
        train(recipe_of(folder, **second), hook=dying)
    assert not (folder / "runs" / "b" / "final").exists()
    train(recipe_of(folder, **second))
    whole, killed = (folder / "runs" / name for name in "ab")
    assert deterministic(whole / "metrics.jsonl") == deterministic(killed / "metrics.jsonl")
    for name in ("aligner.safetensors", "towers.safetensors"):
        assert (whole / "final" / name).read_bytes() == (killed / "final" / name).read_bytes()
    report = check_checkpoint(killed)
    assert report.problems == []
    assert report.step == 7
    assert report.embeds == ["text", "image", "audio"]
    last = deterministic(whole / "metrics.jsonl")[-1]["valid"]["valid"]
    assert {"loss", "text_to_image/recall_at_1", "image-audio/modality_gap"} <= set(last)


def test_a_second_alignment_parses_no_record_and_opens_no_media_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe_of(folder, steps=1, run={"name": "first", "dir": str(folder / "runs")}))
    looked = count_media_reads(monkeypatch)
    train(recipe_of(folder, steps=1, run={"name": "second", "dir": str(folder / "runs")}))
    assert (looked["parsed"], looked["looked at"]) == (0, 0)


def test_its_model_is_found_and_is_no_language_model(folder: Path) -> None:
    run = folder / "runs" / "a"
    if not run.exists():
        train(recipe_of(folder))
    commands = [
        command for command, _ in next_steps({"run": str(run), "final": str(run / "final")})
    ]
    assert [command.split()[1:3] for command in commands] == [
        ["eval", "retrieval"],
        ["export", "aligner"],
    ]
    with pytest.raises(ConfigError, match="plan knows language models only"):
        plan_job(recipe_of(folder), PlanTarget(GPUS["h100"], 1))
    final = find_aligner(run)
    checkpoint = find_aligner(run / "checkpoints")
    assert final.weights.keys() == checkpoint.weights.keys()
    assert all(
        bool((final.weights[name] == checkpoint.weights[name]).all()) for name in final.weights
    )
    assert final.log_scales == pytest.approx(checkpoint.log_scales)
    picture = next((folder / "set" / "images").glob("*.png"))
    pixels = final.config.encoders["image"].input_of("image").read(MediaRef("image", picture))
    vector = final.load().embed("image", torch.from_numpy(pixels[None]))
    assert vector.shape == (1, 8)
    assert float((vector**2).sum()) == pytest.approx(1, abs=1e-5)
    shutil.copytree(run / "checkpoints", folder / "alone", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="is an aligner, not a language model"):
        find_model(folder / "alone")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {"kind": "next_token"}}, "an aligner is trained by contrastive"),
        ({"parallel.tensor": 2}, r"parallel\.tensor is given; it does not apply to an aligner"),
        ({"batch": {"tokens": 16}}, r"batch\.tokens is given"),
        ({"data.seq_len": 64}, "a row of an aligner is one sample"),
        (
            {"data.train": [{"path": "x.jsonl", "kind": "chat"}]},
            "has kind chat; an aligner reads captions",
        ),
        ({"objective": {"kind": "contrastive", "pairs": ["text-video"]}}, "has 'text-video'"),
        ({"model.aligner.weights": "nowhere.pt"}, "no such file"),
        (
            {"model.aligner.encoders.image": {"kind": "huggingface", "path": "/nowhere"}},
            "is not a folder",
        ),
    ],
)
def test_a_wrong_setting_of_an_aligner_is_one_line(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(recipe_of(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_held_out_samples_find_each_other(tmp_path: Path) -> None:
    write_media(tmp_path / "set", SyntheticMedia(samples=1500))
    here = {
        "data.train": [str(tmp_path / "set" / "captions.jsonl")],
        "data.cache_dir": str(tmp_path / "cache"),
    }
    train(Recipe.load("multimodal/align").with_({"run.dir": str(tmp_path / "runs"), **here}))
    scores = deterministic(tmp_path / "runs" / "align" / "metrics.jsonl")[-1]["valid"]["valid"]
    count = scores["text-image/samples"]
    assert count > 100
    # chance is 1 / count
    assert (
        min(scores["text_to_image/recall_at_1"], scores["image_to_text/recall_at_1"]) > 20 / count
    )
    assert (
        min(scores["text_to_audio/recall_at_10"], scores["audio_to_text/recall_at_10"])
        > 3 * 10 / scores["text-audio/samples"]
    )
