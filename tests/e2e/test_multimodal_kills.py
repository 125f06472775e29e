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
from support.killed_runs import finish, kill_somewhere
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
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def settings(workspace: Path, phase: str, name: str) -> list[str]:
    """The shipped recipe of a phase, made small. Each run encodes its media itself, so that kills hit that, too."""
    common = [
        f"run={{dir: {workspace}/{phase}, name: {name}}}", f"data.cache_dir={workspace}/cache-{phase}-{name}", f"steps={STEPS}", "device=cpu",
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
            *common, f"data.train=[{workspace}/media/captions.jsonl]", "data.valid={fraction: 0.2}", "batch={rows: 8, micro_rows: 4}",
            *(f"model.aligner.encoders.{size}" for size in sizes),
        ]  # fmt: skip
    return [
        *common, f"init.from={workspace}/model", f"multimodal.aligner={workspace}/align/whole", "data.seq_len=96", "data.valid={fraction: 0.2}",
        f"data.train=[{{path: {workspace}/media/chat.jsonl, kind: multimodal, chat_template: chatml}}]", "batch.rows=2", "epochs=null",
    ]  # fmt: skip


def recipe_of(workspace: Path, phase: str, name: str) -> Recipe:
    return load(Recipe, find_recipe(f"multimodal/{phase}"), settings(workspace, phase, name))


def assert_same_end(workspace: Path, phase: str, name: str) -> None:
    """Checkpoint, metrics and every file of final/."""
    whole = workspace / phase / "whole"
    killed = workspace / phase / name
    assert_same_run(whole, killed, STEPS)
    files = sorted(
        path.relative_to(whole / "final") for path in (whole / "final").rglob("*") if path.is_file()
    )
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert weights
    assert files == sorted(
        path.relative_to(killed / "final")
        for path in (killed / "final").rglob("*")
        if path.is_file()
    )
    for (
        path
    ) in weights:  # tensors, not bytes: safetensors writes the two notes of a header in any order
        left = load_file(whole / "final" / path)
        right = load_file(killed / "final" / path)
        assert left.keys() == right.keys() and all(
            torch.equal(left[key], right[key]) for key in left
        ), path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_phase_ends_as_the_undisturbed_one(workspace: Path, phase: str) -> None:
    draw = random.Random(f"{SEED} {phase}")
    recipe = recipe_of(workspace, phase, "killed")
    hit = kill_somewhere(recipe, 1, draw)
    told = f"HEADWAY_DRILL_SEED={SEED}, {phase}, killed in {hit}"
    assert finish(recipe, 1) == [0], told
    assert_same_end(workspace, phase, "killed")


def start(workspace: Path, phase: str, name: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "headway",
        "train",
        f"multimodal/{phase}",
        *settings(workspace, phase, name),
    ]
    with (workspace / f"{phase}-{name}.log").open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=workspace)


@pytest.mark.drill
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("phase", PHASES)
def test_a_real_command_killed_at_a_random_step_ends_as_the_undisturbed_one(
    workspace: Path, phase: str, number: int
) -> None:
    draw = random.Random(f"{SEED} {phase} {number}")
    name = f"process{number}"
    step = draw.randrange(STEPS)
    metrics = workspace / phase / name / "metrics.jsonl"
    told = f"HEADWAY_DRILL_SEED={SEED}, {phase}, killed after step {step}"
    process = start(workspace, phase, name)
    while (
        process.poll() is None
        and (metrics.read_bytes().count(b"\n") if metrics.exists() else -1) < step
    ):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, f"{told}: it was done first"
    assert not (workspace / phase / name / "final").exists()
    assert start(workspace, phase, name).wait() == 0, (
        workspace / f"{phase}-{name}.log"
    ).read_text()
    assert_same_end(workspace, phase, name)
    print(told)  # noqa: T201
