"""Both phases killed with SIGKILL at random moments, also while media are encoded, and resumed: they end as undisturbed runs, bit for bit.

The first test forks runs of the shipped recipes. The drill kills real `headway train` processes; HEADWAY_DRILL_SEED repeats it.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.drill import finish, kill_somewhere
from support.runs import assert_same_run

from headway.config.load import load
from headway.config.shipped import find_recipe
from headway.export.huggingface import export_huggingface
from headway.media.synthetic import SyntheticMedia, write_media
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.tokenizer.train import train_bpe
from headway.train import train
from headway.train.config import Recipe

SEED = int(os.environ.get("HEADWAY_DRILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
KILLS = int(os.environ.get("HEADWAY_KILLS", "3"))
STEPS = 10
PHASES = ("align", "tune")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated set, a tokenizer, a small language model, and undisturbed runs of both phases."""
    folder = tmp_path_factory.mktemp("kills")
    files = write_media(
        folder / "media",
        SyntheticMedia(samples=24, heldout=0, image_size=16, seconds=0.1, missing=0.2),
    )
    texts = [
        turn["content"]
        for line in files["chat"].read_text().splitlines()
        for turn in json.loads(line)["messages"]
    ]
    train_bpe(texts * 9, vocab_size=300, out=folder / "tok")
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 48,
        "vocab_size": 384,
    }
    config = ModelConfig(family="qwen2", qkv_bias=True, **sizes)
    weights = ((spec.name, initial_value(spec, config, 3)) for spec in param_specs(config))
    export_huggingface(config, weights, folder / "model", tokenizer=folder / "tok")
    for phase in PHASES:
        train(recipe_of(folder, phase, "whole"))
    return folder


def settings(made: Path, phase: str, name: str) -> list[str]:
    """The shipped recipe of a phase, made small. Each run encodes its media itself, so that kills hit that, too."""
    common = [
        f"run={{dir: {made}/{phase}, name: {name}}}", f"data.cache_dir={made}/cache-{phase}-{name}", f"steps={STEPS}", "device=cpu",
        "checkpoint.every=2", "eval.every=3", "eval.rows=4", "log.every=100",
    ]  # fmt: skip
    if phase == "align":
        sizes = [
            "text.max_bytes=48",
            "image.image_size=16",
            "audio.frames=16",
            "audio.width=32",
            "audio.stages=2",
        ]
        return [
            *common, f"data.train=[{made}/media/captions.jsonl]", "data.valid={fraction: 0.2}", "batch={rows: 8, micro_rows: 4}",
            *(f"model.aligner.encoders.{one}" for one in sizes),
        ]  # fmt: skip
    return [
        *common, f"init.from={made}/model", f"multimodal.aligner={made}/align/whole", "data.seq_len=96", "data.valid={fraction: 0.2}",
        f"data.train=[{{path: {made}/media/chat.jsonl, kind: multimodal, chat_template: chatml}}]", "batch.rows=2", "epochs=null",
    ]  # fmt: skip


def recipe_of(made: Path, phase: str, name: str) -> Recipe:
    return load(Recipe, find_recipe(f"multimodal/{phase}"), settings(made, phase, name))


def assert_same_end(made: Path, phase: str, name: str) -> None:
    """Checkpoint, metrics and every file of final/."""
    one, two = (made / phase / run for run in ("whole", name))
    assert_same_run(one, two, STEPS)
    files = sorted(
        path.relative_to(one / "final") for path in (one / "final").rglob("*") if path.is_file()
    )
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert weights and files == sorted(
        path.relative_to(two / "final") for path in (two / "final").rglob("*") if path.is_file()
    )
    for (
        path
    ) in weights:  # tensors, not bytes: safetensors writes the two notes of a header in any order
        left, right = load_file(one / "final" / path), load_file(two / "final" / path)
        assert left.keys() == right.keys() and all(
            torch.equal(left[key], right[key]) for key in left
        ), path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_phase_ends_as_the_undisturbed_one(made: Path, phase: str) -> None:
    draw, recipe = random.Random(f"{SEED} {phase}"), recipe_of(made, phase, "killed")
    hit = kill_somewhere(recipe, 1, draw)
    told = f"HEADWAY_DRILL_SEED={SEED}, {phase}, killed in {hit}"
    assert finish(recipe, 1) == [0], told
    assert_same_end(made, phase, "killed")


def start(made: Path, phase: str, name: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "headway",
        "train",
        f"multimodal/{phase}",
        *settings(made, phase, name),
    ]
    with (made / f"{phase}-{name}.log").open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=made)


@pytest.mark.drill
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("phase", PHASES)
def test_a_real_command_killed_at_a_random_step_ends_as_the_undisturbed_one(
    made: Path, phase: str, number: int
) -> None:
    draw, name = random.Random(f"{SEED} {phase} {number}"), f"process{number}"
    step, metrics = draw.randrange(STEPS), made / phase / name / "metrics.jsonl"
    told = f"HEADWAY_DRILL_SEED={SEED}, {phase}, killed after step {step}"
    process = start(made, phase, name)
    while (
        process.poll() is None
        and (metrics.read_bytes().count(b"\n") if metrics.exists() else -1) < step
    ):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, f"{told}: it was done first"
    assert not (made / phase / name / "final").exists()
    assert start(made, phase, name).wait() == 0, (made / f"{phase}-{name}.log").read_text()
    assert_same_end(made, phase, name)
    print(told)  # noqa: T201
