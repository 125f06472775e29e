"""Whatever a model or tokenizer folder holds, it is read or refused in one line: never a traceback, never weights that are not finite."""

import json
import shutil
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hostile_folders import healthy_folders, hostile_folders, random_folders

from headway.checkpoint.stored_model import find_model
from headway.errors import CheckpointError, ConfigError, HeadwayError
from headway.infer.load import load_model
from headway.tokenizer.load import load_tokenizer

LONGEST_LINE = 1500
SLOW = (
    "tokenizer.json: missing",
    "tokenizer.json: a folder",
    "tokenizer.json: a loop",
    "tokenizer.json: dangling",
)
"""transformers is asked here, and importing it takes seconds."""


def read_all(name: str, folder: Path) -> None:
    for read in (load_model, load_tokenizer):
        try:
            read(folder)
        except HeadwayError as problem:
            said = str(problem)
        except BaseException as problem:
            raise AssertionError(
                f"{name}: {read.__name__} ends in {type(problem).__name__}: {problem}"
            ) from problem
        else:
            continue
        assert "\n" not in said, f"{name}: {said[:300]}"
        assert len(said) < LONGEST_LINE, f"{name}: {said[:300]}"


def test_a_sample_of_hostile_folders_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    begin = time.monotonic()
    count = 0
    chosen = islice(hostile_folders(tmp_path, every=101), 400)
    for name, folder in chosen:
        if not name.endswith(SLOW):
            read_all(name, folder)
            count += 1
        if time.monotonic() - begin > 8:
            break  # a slow machine sees fewer of them
    assert count > 20


@pytest.mark.drill
def test_every_hostile_folder_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    for name, folder in hostile_folders(tmp_path):
        read_all(name, folder)
    for name, folder in islice(random_folders(tmp_path / "random", seed=0), 3000):
        read_all(name, folder)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return healthy_folders(tmp_path_factory.mktemp("folders") / "healthy")


def test_healthy_folders_are_read(healthy: dict[str, Path]) -> None:
    for folder in healthy.values():
        load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["llama", "bin", "z2all", "adapter"])
def test_weights_that_are_not_finite_are_refused(
    healthy: dict[str, Path], tmp_path: Path, kind: str, value: float
) -> None:
    folder = Path(shutil.copytree(healthy[kind], tmp_path / kind))
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("ckpt/*.pt")]
    path = files[0]
    is_safetensors = path.suffix == ".safetensors"
    if is_safetensors:
        tensors = load_file(path)
    else:
        tensors = torch.load(path, weights_only=True)
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name].to(torch.bfloat16)
    tensors[name].view(-1)[-1] = value
    if is_safetensors:
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    shown_name = name.removeprefix("base_model.model.")
    with pytest.raises(CheckpointError, match=f"{shown_name} holds a value that is not finite"):
        load_model(folder)


@pytest.mark.parametrize(
    "outside", ["../outside.safetensors", "/outside.safetensors", 3, None, "a\0b"]
)
def test_an_index_never_leads_out_of_the_folder(
    healthy: dict[str, Path], tmp_path: Path, outside: Any
) -> None:
    folder = Path(shutil.copytree(healthy["sharded"], tmp_path / "model"))
    moved = "model-00001-of-00002.safetensors"
    (folder / moved).rename(tmp_path / "outside.safetensors")
    if outside == "/outside.safetensors":
        outside = str(tmp_path / "outside.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, file in index["weight_map"].items():
        if file == moved:
            index["weight_map"][name] = outside
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="it must be a file of the folder"):
        find_model(folder)


def test_an_adapter_of_itself_is_refused(healthy: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(healthy["adapter"], tmp_path / "adapter"))
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": str(folder)})
    )
    with pytest.raises(ConfigError, match=r"adapter of itself|base cannot be opened"):
        find_model(folder)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tiny.gguf", b"GGUF\x03\0\0\0", "is no whole GGUF file"),
        ("weights.bin", b"GGUF\x03\0\0\0", "is no whole GGUF file"),
        ("ggml-model-q4_0.bin", b"tjgg\x03\0\0\0", "a GGML file of early llama.cpp"),
        ("model.onnx", b"\x08\x07", "an ONNX graph"),
        ("tf_model.h5", b"\x89HDF\r\n", "TensorFlow"),
        ("flax_model.msgpack", b"\x81", "Flax weights"),
        ("consolidated.00.pth", b"PK\x03\x04", "Meta's original format"),
        (
            "model.safetensors",
            b"\x02\0\0\0\0\0\0\0{}",
            "a single safetensors file.*together with config.json",
        ),
        ("model.tar.gz", b"\x1f\x8b\x08\0", "a gzip archive. Unpack it"),
    ],
)
def test_files_that_cannot_be_read_yet_are_named_for_what_they_are(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ConfigError, CheckpointError), match=said):
        find_model(tmp_path / name)
    if name not in ("weights.bin", "model.tar.gz"):
        with pytest.raises((ConfigError, CheckpointError), match=said):
            find_model(tmp_path)


@pytest.fixture
def folder_without_weights(healthy: dict[str, Path], tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(healthy["llama"], tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    return folder


def test_a_cut_gguf_file_is_refused_by_name(folder_without_weights: Path) -> None:
    (folder_without_weights / "model-q4_k_m.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(CheckpointError, match=r"model-q4_k_m\.gguf: is no whole GGUF file"):
        load_model(folder_without_weights)


def test_an_onnx_graph_is_refused_for_what_it_is(folder_without_weights: Path) -> None:
    (folder_without_weights / "model.onnx").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(
        ConfigError, match=r"has neither model\.safetensors.*model\.onnx is an ONNX graph"
    ):
        load_model(folder_without_weights)


def test_a_git_lfs_pointer_is_refused_with_the_command_that_fetches_it(
    folder_without_weights: Path,
) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (folder_without_weights / "model.safetensors").write_bytes(pointer)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: is a Git LFS pointer.*git lfs pull"
    ):
        load_model(folder_without_weights)


@pytest.mark.parametrize(
    ("method", "name"), [("aqlm", "aqlm"), ("fp8", "FP8"), ("bitsandbytes", "bitsandbytes")]
)
def test_quantised_weights_are_refused_by_their_method(
    folder_without_weights: Path, method: str, name: str
) -> None:
    path = folder_without_weights / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    path.write_text(json.dumps(config))
    with pytest.raises(
        ConfigError,
        match=rf"the weights are quantised \({name}\).*Give the model they were made from",
    ):
        find_model(folder_without_weights)
