"""Files of an aligner: PurrSight's 12 tensors are read and written exactly; a file that does not fit is refused, never read in part."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.errors import HeadwayError
from headway.model.loading.aligner_file import (
    AlignerHeads,
    purrsight_tensors,
    read_aligner,
    write_aligner,
)

WIDTHS = {"text": 384, "image": 960, "audio": 2048}


def purrsight() -> dict[str, torch.Tensor]:
    """The state_dict of PurrSight's aligner, random."""
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, width in WIDTHS.items():
        head = f"projection_heads.{name}_head"
        tensors |= {
            f"{head}.ln.weight": torch.rand(width, generator=draw),
            f"{head}.ln.bias": torch.rand(width, generator=draw),
        }
        tensors[f"{head}.fc.weight"] = torch.rand(512, width, generator=draw)
        tensors[f"postprocessors.{name}_scaling.logit_scale"] = torch.tensor(
            {"text": 1.0}.get(name, 2.66)
        )
    return tensors


@pytest.mark.parametrize("form", ["bare", "state_dict"])
def test_an_aligner_of_purrsight_is_read_and_written_exactly(tmp_path: Path, form: str) -> None:
    tensors = purrsight()
    torch.save(
        tensors if form == "bare" else {"state_dict": tensors, "epoch": 3, "global_step": 7},
        tmp_path / "aligner.pt",
    )
    heads = read_aligner(tmp_path / "aligner.pt")
    assert (
        heads.modalities,
        heads.dim,
        sum(value.numel() for value in heads.tensors.values()),
    ) == (
        ("text", "image", "audio"),
        512,
        1_743_488,
    )
    assert heads.log_scales == pytest.approx({"text": 1.0, "image": 2.66, "audio": 2.66})
    heads.require(WIDTHS, 512, "here")
    for name in ("out.pt", "out.safetensors"):
        write_aligner(heads, tmp_path / name)
        again = read_aligner(tmp_path / name)
        assert all(torch.equal(again.tensors[key], value) for key, value in heads.tensors.items())
    stored = torch.load(tmp_path / "out.pt", weights_only=True)
    assert len(stored) == 12
    assert all(torch.equal(stored[name], value) for name, value in tensors.items())


def spoil(how: str) -> dict[str, Any]:
    tensors: dict[str, Any] = purrsight()
    if how == "lacks":
        del tensors["projection_heads.audio_head.ln.bias"]
    elif how == "logit_scale of image":
        tensors["postprocessors.image_scaling.logit_scale"] = torch.ones(2)
    elif how == "holds 'encoder.weight'":
        tensors["encoder.weight"] = torch.ones(2)
    elif how == "a projection of shape":
        tensors["projection_heads.image_head.fc.weight"] = torch.ones(512, 961)
    elif how == "different widths":
        tensors["projection_heads.image_head.fc.weight"] = torch.ones(256, 960)
    elif how == "not finite":
        tensors["projection_heads.text_head.fc.weight"][3, 3] = float("nan")
    elif how == "no modality":
        tensors = {}
    return tensors


@pytest.mark.parametrize(
    "how",
    [
        "lacks",
        "logit_scale of image",
        "holds 'encoder.weight'",
        "a projection of shape",
        "different widths",
        "not finite",
        "no modality",
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, how: str) -> None:
    torch.save(spoil(how), tmp_path / "aligner.pt")
    with pytest.raises(HeadwayError, match=how):
        read_aligner(tmp_path / "aligner.pt")


class Runs:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("code was run",)


def test_a_file_with_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({**purrsight(), "more": Runs()}, tmp_path / "aligner.pt")
    with pytest.raises(HeadwayError, match="can run code"):
        read_aligner(tmp_path / "aligner.pt")
    assert capsys.readouterr().out == ""


@pytest.fixture
def heads(tmp_path: Path) -> AlignerHeads:
    torch.save(purrsight(), tmp_path / "aligner.pt")
    return read_aligner(tmp_path)


def test_heads_of_another_width_are_refused(heads: AlignerHeads) -> None:
    with pytest.raises(
        HeadwayError, match="takes features of width 960; the image encoder gives 1280"
    ):
        heads.require({"image": 1280}, 512, "aligner.pt")
    with pytest.raises(HeadwayError, match="projects to 512 dimensions; 256 are expected"):
        heads.require({"image": 960}, 256, "aligner.pt")


def test_an_aligner_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no such file"):
        read_aligner(tmp_path / "nothing.pt")


def test_heads_of_two_modalities_are_written_and_a_third_is_refused(
    heads: AlignerHeads, tmp_path: Path
) -> None:
    tensors = {name: value for name, value in heads.tensors.items() if ".audio." not in name}
    two = AlignerHeads(tensors, {"text": 1.0, "image": 2.0})
    path = tmp_path / "two.safetensors"
    write_aligner(two, path)
    assert read_aligner(path).modalities == ("text", "image")
    assert len(purrsight_tensors(two)) == 8
    with pytest.raises(HeadwayError, match="has no head for audio"):
        read_aligner(path).require({"audio": 2048}, 512, "two")
