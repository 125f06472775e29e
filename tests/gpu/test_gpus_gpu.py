"""The choice of GPUs on a machine that has some: torch in a new process sees exactly the chosen ones."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headway.errors import LaunchError
from headway.launch.gpus import choose_gpus, read_gpus

pytestmark = pytest.mark.gpu

LOOK = "import json, torch; print(json.dumps([str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]))"


def seen(settings: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return [f"GPU-{uuid}" for uuid in json.loads(done.stdout)]


def test_chosen_gpus_are_what_torch_sees() -> None:
    last = read_gpus()[-1]
    word = max(re.findall(r"[A-Za-z]+\d+", last.name), key=len)
    wishes = {
        last.uuid: [last.uuid],
        word: [gpu.uuid for gpu in read_gpus() if word in gpu.name],
        "none": [],
    }
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        wishes[str(last.index)] = [last.uuid]
    for wish, uuids in wishes.items():
        assert seen(dict(choose_gpus(wish, os.environ).environment)) == uuids, wish
    with pytest.raises(
        LaunchError, match=f"there is no such GPU. Visible GPUs: 0 {re.escape(read_gpus()[0].name)}"
    ):
        choose_gpus("99", os.environ)


def test_auto_takes_a_free_gpu_and_training_uses_it(tmp_path: Path) -> None:
    # Tests beside this one use the same GPU; `auto` sees it as it is when nothing runs.
    idle = [replace(gpu, used_bytes=0, utilisation=0.0) for gpu in read_gpus()]
    choice = choose_gpus("auto", os.environ, lambda: idle)
    assert choice.gpus == tuple(idle)
    command = [
        sys.executable,
        "-m",
        "headway",
        "train",
        "steps=3",
        f"run.dir={tmp_path}",
        "device=cuda",
        "kernels.compile=false",
    ]
    done = subprocess.run(
        [*command, "--gpus", "0", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"GPUs of this run: {choice.gpus[0].index} ({choice.gpus[0].name})" in done.stderr
    assert json.loads(done.stdout)["steps"] == 3


def test_a_profile_on_the_gpu_counts_kernels(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headway",
        "train",
        "steps=8",
        f"run.dir={tmp_path}",
        "device=cuda",
        "kernels.compile=false",
    ]
    done = subprocess.run(
        [*command, "--profile"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "logs" / "profile-rank-00000.json").read_text())
    parts = ("compute", "optimizer", "exposed_communication", "data_wait", "rest")
    assert sum(summary[part] for part in parts) == pytest.approx(summary["step"], rel=1e-3)
    assert summary["compute"] > 0 and summary["optimizer"] > 0
    assert not any(name.startswith("aten::") for name, _, _ in summary["operations"])
