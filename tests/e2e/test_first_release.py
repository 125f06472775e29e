"""What the first release wrote is read today, and its interrupted runs end as they would have ended with it.

Metrics, weights and generated ids are compared bit for bit on the kind of processor and the torch that made the archive;
elsewhere metrics are compared within rounding.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.old_releases import assert_resumes, unpack_release
from support.old_releases import is_same_machine as same_machine
from support.runs import headway


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first_release")


@pytest.fixture(scope="module", autouse=True)
def expected(release: Path) -> dict[str, Any]:
    return unpack_release("first_release", release)


@pytest.fixture(scope="module")
def is_same_machine(expected: dict[str, Any]) -> bool:
    return same_machine(expected)


@pytest.mark.parametrize("name", ["pretrain", "stages", "dpo", "lora", "gates"])
def test_a_run_that_the_first_release_left_unfinished_ends_as_it_would_have(
    release: Path,
    expected: dict[str, Any],
    is_same_machine: bool,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(release)
    assert_resumes(release, name, expected[name], bit_for_bit=is_same_machine)


@pytest.mark.parametrize("model", ["base", "base --masks masks.tsv", "adapter"])
def test_models_masks_and_adapters_generate_the_same(
    release: Path,
    expected: dict[str, Any],
    is_same_machine: bool,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(release)
    if (
        model == "adapter"
    ):  # a folder names its base by the absolute path of the machine that wrote it
        config = release / "adapter" / "adapter_config.json"
        config.write_text(
            json.dumps(
                json.loads(config.read_text()) | {"base_model_name_or_path": str(release / "base")}
            )
        )
    prompts = [key for key in expected["generate"] if key.startswith(f"--model {model} --prompt")]
    assert len(prompts) == 2
    for key in prompts:
        prompt = key.partition("--prompt ")[2]
        sampling = ["--max-new-tokens", "40", "--temperature", "1", "--seed", "3"]
        done = headway(
            "generate", "--model", *model.split(), *sampling, "--json", "--prompt", prompt
        )
        assert done.returncode == 0, done.stderr
        if is_same_machine:
            assert json.loads(done.stdout)["token_ids"] == expected["generate"][key]


def test_stores_are_built_the_same(release: Path, tmp_path: Path) -> None:
    text = ["--input", str(release / "text.jsonl")]
    chat = ["--kind", "chat", "--template", "chatml", "--input", str(release / "chat.jsonl")]
    for name, arguments in {"store": text, "chat-store": chat}.items():
        built = headway(
            "data",
            "tokenize",
            *arguments,
            "--tokenizer",
            str(release / "tokenizer"),
            "--out",
            str(tmp_path / name),
        )
        assert built.returncode == 0, built.stderr
        for path in (release / name).glob("*.*"):
            if path.suffix != ".json":
                assert np.array_equal(
                    np.fromfile(path, np.uint8), np.fromfile(tmp_path / name / path.name, np.uint8)
                ), path.name
