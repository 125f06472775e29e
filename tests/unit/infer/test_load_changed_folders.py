"""What headway exported and others changed is refused in one line with its remedy: models, adapters, masks, tokenizers, GGUF files."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.byte_model import CONFIG, write_model, write_small_adapter
from support.disk_bit_flip import flip_bit_on_disk

from headway.cli import main
from headway.errors import DataError
from headway.infer.load import load_model
from headway.model.head_masks.file import read_masks, write_masks
from headway.model.head_masks.masks import HeadMasks
from headway.runtime.digests import DIGESTS
from headway.tokenizer.load import load_tokenizer


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model"))


def test_every_file_of_an_export_is_listed(exported: Path) -> None:
    listed = json.loads((exported / DIGESTS).read_text())["files"]
    assert sorted(listed) == sorted(
        path.name for path in exported.iterdir() if path.name != DIGESTS
    )


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ],
)
def test_one_flipped_bit_of_any_file_is_refused(
    model: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # A bit that leaves a readable file: a letter becomes another one, a number another number.
    path = model / name
    flip_bit_on_disk(path, 8 * (path.stat().st_size * 3 // 4))
    assert main(["generate", "--model", str(model), "--prompt", "a", "--max-new-tokens", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: damaged, or changed since headway wrote it" in line
    assert f"headway verify folder {model} --update" in line


def test_a_change_on_purpose_is_accepted_by_one_command(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(model / "model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] * 2}, model / "model.safetensors")
    with pytest.raises(DataError, match="--update"):
        load_model(model)
    assert main(["verify", "folder", str(model)]) == 1
    assert f"{model / 'model.safetensors'}: damaged" in capsys.readouterr().out
    assert main(["verify", "folder", str(model), "--update"]) == 0
    assert f"{model / DIGESTS}: written" in capsys.readouterr().out
    assert main(["verify", "folder", str(model)]) == 0
    assert "good" in capsys.readouterr().out
    load_model(model)


def test_a_folder_of_others_is_read_as_it_is(model: Path) -> None:
    (model / DIGESTS).unlink()
    flip_bit_on_disk(
        model / "model.safetensors", 8 * ((model / "model.safetensors").stat().st_size - 2)
    )
    load_model(model)
    (model / "README.md").write_text("about")
    load_model(model)


def test_a_tokenizer_of_a_model_folder_is_checked_alone(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"not looked at")
    load_tokenizer(model)
    load_tokenizer(model / "tokenizer.json")
    config = model / "tokenizer_config.json"
    config.write_text(config.read_text().replace("false", "true "))
    for path in (model, model / "tokenizer.json"):
        with pytest.raises(DataError, match=r"tokenizer_config\.json: damaged, or changed"):
            load_tokenizer(path)


def test_masks_and_gguf_files_have_digests_beside_them(model: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks.tsv"
    write_masks(HeadMasks(((True, False),), 8, 0), masks)
    masks.write_text("0.0\t1.0\n")
    with pytest.raises(DataError, match=r"masks\.tsv: damaged, or changed"):
        read_masks(masks)
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    if main(["export", "gguf", "--model", str(model), "--out", str(file), "--type", "f32"]) != 0:
        pytest.skip("this family has no GGUF form")
    load_model(file)
    flip_bit_on_disk(file, 8 * (file.stat().st_size - 3))
    with pytest.raises(DataError, match=r"model\.gguf: damaged, or changed"):
        load_model(file)


def test_exports_that_read_a_changed_model_write_nothing(model: Path, tmp_path: Path) -> None:
    flip_bit_on_disk(
        model / "model.safetensors", 8 * ((model / "model.safetensors").stat().st_size - 2)
    )
    for verb in (["export", "hf"], ["export", "gguf"]):
        out = tmp_path / f"{verb[1]}.gguf"
        assert main([*verb, "--model", str(model), "--out", str(out)]) == 2
        assert not out.exists()


def test_what_cannot_be_checked_or_updated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text("{}")
    for arguments, said in (
        (["empty"], "holds nothing that headway can check"),
        (["nowhere"], "no such folder"),
        (["empty", "--update"], "holds no file of a model"),
        (["store", "--update"], "is a token store, which has its own checksums"),
    ):
        assert main(["verify", "folder", str(tmp_path / arguments[0]), *arguments[1:]]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_checked_on_its_own(model: Path, tmp_path: Path, name: str) -> None:
    adapter = write_small_adapter(model, tmp_path / "adapter")
    load_model(adapter)
    path = adapter / name
    content = path.read_bytes()
    offset = content.index(b'"lora_alpha": 4') + 14 if name.endswith(".json") else len(content) - 2
    flip_bit_on_disk(path, 8 * offset)
    with pytest.raises(DataError, match=f"{name}: damaged, or changed") as refused:
        load_model(adapter)
    assert f"headway verify folder {adapter} --update" in str(refused.value)
    assert main(["verify", "folder", str(adapter), "--update"]) == 0
    load_model(adapter)
