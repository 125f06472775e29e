"""What the first release wrote is read today, and its interrupted runs end as they would have ended with it.

Metrics, weights and generated ids are compared bit for bit on the kind of processor and the torch that made the archive;
elsewhere metrics are compared within rounding.
"""

import hashlib
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.runs import headway

ARCHIVE = Path(__file__).parents[1] / "golden" / "first_release" / "first_release.tar.xz"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first_release")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def expected(release: Path) -> dict[str, Any]:
    return json.loads((release / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def is_same_machine(expected: dict[str, Any]) -> bool:
    here = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}", torch.__version__
    return here == (expected["cpu"], expected["torch"])


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under slashed keys; a single validation set is `valid/...`, however deep it is nested."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if key != "time":
            found |= (
                flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}".replace("valid/valid/", "valid/"): value}
            )
    return found


def tensors(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                content = file.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()
                found[f"{path.relative_to(folder)}:{name}"] = hashlib.sha256(content).hexdigest()
    return found


@pytest.mark.parametrize("name", ["pretrain", "stages", "dpo", "lora", "gates"])
def test_an_interrupted_run_ends_as_it_would_have(
    release: Path, expected: dict[str, Any], is_same_machine: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(release)
    run = release / "runs" / name
    first_line = (run / "metrics.jsonl").read_text().splitlines()[0]
    caches = sorted(path.name for path in (release / "cache" / "stores").iterdir())
    resumed = headway("train", f"{name}.yaml")
    assert resumed.returncode == 0, resumed.stderr
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == first_line, "the run began again instead of resuming"
    records, wanted = ([flat(record) for record in found] for found in (map(json.loads, lines), expected[name]["metrics"]))
    if is_same_machine:
        assert records == wanted
        assert tensors(run / "final") == expected[name]["weights"]
    assert [list(record) for record in records] == [list(record) for record in wanted]
    for record, other in zip(records, wanted, strict=True):
        for key, value in record.items():
            assert value == (pytest.approx(other[key], rel=1e-4, abs=1e-5) if isinstance(value, float) else other[key]), key
    assert sorted(path.name for path in (release / "cache" / "stores").iterdir()) == caches, "a text cache was not found again"


@pytest.mark.parametrize("model", ["base", "base --masks masks.tsv", "adapter"])
def test_models_masks_and_adapters_generate_the_same(
    release: Path, expected: dict[str, Any], is_same_machine: bool, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(release)
    if model == "adapter":  # a folder names its base by the absolute path of the machine that wrote it
        config = release / "adapter" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(release / "base")}))
    prompts = [key for key in expected["generate"] if key.startswith(f"--model {model} --prompt")]
    assert len(prompts) == 2
    for key in prompts:
        prompt = key.partition("--prompt ")[2]
        sampling = ["--max-new-tokens", "40", "--temperature", "1", "--seed", "3"]
        done = headway("generate", "--model", *model.split(), *sampling, "--json", "--prompt", prompt)
        assert done.returncode == 0, done.stderr
        if is_same_machine:
            assert json.loads(done.stdout)["token_ids"] == expected["generate"][key]


def test_stores_are_built_the_same(release: Path, tmp_path: Path) -> None:
    text = ["--input", str(release / "text.jsonl")]
    chat = ["--kind", "chat", "--template", "chatml", "--input", str(release / "chat.jsonl")]
    for name, arguments in {"store": text, "chat-store": chat}.items():
        built = headway("data", "tokenize", *arguments, "--tokenizer", str(release / "tokenizer"), "--out", str(tmp_path / name))
        assert built.returncode == 0, built.stderr
        for path in (release / name).glob("*.*"):
            if path.suffix != ".json":
                assert np.array_equal(np.fromfile(path, np.uint8), np.fromfile(tmp_path / name / path.name, np.uint8)), path.name
