"""A Mac, simulated: the calls macOS lacks are taken away, and torch's mps device is replaced by one that refuses what Apple GPUs lack."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.apple_gpu import OnMps, apple_gpu
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.cli import main
from headway.errors import ConfigError, LaunchError
from headway.kernels.adamw import AdamWHyper, AdamWTensors, adamw_step_plain, adamw_step_reference
from headway.launch.launcher import LaunchOptions, plan_launch
from headway.runtime.device import choose_compute, to_float64

LACKS = {
    "os": (
        "sched_getaffinity",
        "posix_fadvise",
        "POSIX_FADV_DONTNEED",
        "memfd_create",
        "pidfd_open",
        "sched_setaffinity",
        "eventfd",
    )
}


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """No /proc, no /sys, no calls of Linux; the platform is called darwin."""
    for name in LACKS["os"]:
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    read = Path.read_text
    link = os.readlink

    def read_text(self: Path, *args: Any, **kwargs: Any) -> str:
        if str(self).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return read(self, *args, **kwargs)

    def readlink(path: Any, **kwargs: Any) -> Any:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return link(path, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "readlink", readlink)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a fork, which may abort on macOS"))


def prepare(folder: Path) -> list[str]:
    write_model(
        folder / "base", CONFIG.with_(max_seq_len=64), byte_tokenizer("<|im_start|>", "<|im_end|>")
    )
    (folder / "chat.jsonl").write_text(
        "".join(
            json.dumps({"instruction": f"Add {n}.", "output": f"{n} + 1"}) + "\n" for n in range(30)
        )
    )
    small = [
        "data.seq_len=64",
        "batch={rows: 4, micro_rows: 2}",
        "epochs=null",
        "steps=4",
        "eval.rows=2",
        "eval.every=2",
        "log.every=1",
    ]
    return [f"init.from={folder}/base/out", f"data.train.0.path={folder}/chat.jsonl", *small]


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"]
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]


@pytest.mark.parametrize(
    "recipe", [pytest.param("laptop/sft", marks=pytest.mark.slow), "laptop/lora"]
)
def test_a_laptop_recipe_trains_on_an_apple_gpu_as_on_the_cpu(
    recipe: str,
    macos: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [*prepare(tmp_path), "track=[]", "precision=auto"]
    if recipe == "laptop/sft":
        assert (
            main(
                [
                    "train",
                    recipe,
                    *settings,
                    "device=cpu",
                    "precision=bf16",
                    "run.name=bf16",
                    "steps=1",
                ]
            )
            == 0
        ), "no fork for bf16"
    assert main(["train", recipe, *settings, "device=cpu", "run.name=cpu"]) == 0
    with apple_gpu(monkeypatch) as seeds:
        assert main(["train", recipe, *settings, "device=mps", "run.name=mps"]) == 0
        assert main(["train", recipe, *settings, "device=mps", "run.name=mps", "steps=6"]) == 0, (
            "it resumes"
        )
        if recipe == "laptop/sft":
            say = [
                "generate",
                "--model",
                "runs/mps",
                "--prompt",
                "Add 3.",
                "--max-new-tokens",
                "4",
                "--device",
                "mps",
            ]
            assert main([*say, "--temperature", "1"]) == 0
            options = [
                "--model",
                "runs/mps",
                "--data",
                "chat.jsonl",
                "--text-key",
                "output",
                "--device",
                "mps",
            ]
            assert main(["eval", "ppl", *options]) == 0
    assert "on mps" in capsys.readouterr().err
    assert len(seeds) >= 4, "dropout draws from the seeds of the run"
    # the generators of two devices draw different dropout
    tolerance = 1e-4 if recipe == "laptop/sft" else 0.2
    assert losses(tmp_path / "runs/mps")[:4] == pytest.approx(
        losses(tmp_path / "runs/cpu"), rel=tolerance
    )


def test_the_stand_in_refuses_what_an_apple_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with apple_gpu(monkeypatch):
        tensor = torch.ones(3).to("mps") * 2
        assert isinstance(tensor, OnMps)
        assert tensor.device.type == "mps"
        assert not isinstance(tensor.cpu(), OnMps)
        for wrong in (
            tensor.double,
            tensor.pin_memory,
            tensor.numpy,
            lambda: torch.zeros(2, dtype=torch.float64, device="mps"),
        ):
            with pytest.raises((TypeError, NotImplementedError)):
                wrong()
        assert to_float64(tensor).dtype == torch.float64
        assert to_float64(tensor).device.type == "cpu"


def test_choices_that_an_apple_gpu_cannot_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="torch sees no Apple GPU here"):
        choose_compute("mps", "auto")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_compute("mps", "auto").precision == "fp32"
    assert choose_compute("auto", "auto").device.type != "mps"
    with pytest.raises(ConfigError, match="on mps it must be auto or fp32"):
        choose_compute("mps", "bf16")
    with pytest.raises(LaunchError, match="an Apple GPU takes one rank"):
        plan_launch("mps", LaunchOptions(2, None), {}, list)
    with pytest.raises(LaunchError, match="an Apple GPU takes one rank"):
        choose_compute("mps", "auto", 1)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_adamw_in_plain_operations_is_the_fused_one(maximize: bool, found_inf: float) -> None:
    def tensors() -> AdamWTensors:
        torch.manual_seed(0)
        groups = [[torch.randn(50) for _ in range(2)] for _ in range(4)]
        return AdamWTensors(
            groups[0],
            groups[1],
            groups[2],
            [tensor.square() for tensor in groups[3]],
            [torch.tensor(6.0), torch.tensor(0.0)],
        )

    reference = tensors()
    other = tensors()
    hyper = AdamWHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, maximize)
    for step, state in ((adamw_step_reference, reference), (adamw_step_plain, other)):
        for _ in range(3):
            # the fused operator writes the divided gradients back, so each step gets its own
            step(
                state._replace(grads=[grad.clone() for grad in state.grads]),
                hyper,
                torch.tensor(2.0),
                torch.tensor(found_inf),
            )
    for name in ("params", "exp_avg", "exp_avg_sq", "steps"):
        for left, right in zip(getattr(reference, name), getattr(other, name), strict=True):
            assert torch.allclose(left, right, rtol=2e-6, atol=1e-7), name
