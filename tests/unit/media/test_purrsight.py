"""Pictures and sounds become what PurrSight's own code made of them (tests/golden/purrsight/make.py), and its aligners get that."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headway.media.items import MediaRef
from headway.media.purrsight import hann_resample, purrsight_mel, purrsight_pixels
from headway.media.sound import LogMel, mel_filters

GOLDEN = Path(__file__).parents[2] / "golden" / "purrsight"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())


def media_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("purrsight_golden_media", GOLDEN / "media.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    media_module().write_media(folder)
    return folder


@pytest.mark.parametrize("name", ["short.wav", "long.wav", "stereo.wav"])
def test_a_sound_is_the_log_mel_of_purrsight(media: Path, name: str) -> None:
    filters = mel_filters(LogMel()).astype(np.float32)
    mel = purrsight_mel(MediaRef("audio", media / name), filters)
    expected = EXPECTED[name]
    assert list(mel.shape) == expected["shape"]
    assert float(mel.mean()) == pytest.approx(expected["mean"], abs=1e-3)
    assert (
        np.abs(mel.reshape(-1)[expected["places"]] - np.array(expected["values"])).max() < 0.02
    ), "dB"


@pytest.mark.parametrize("name", ["wide.png", "small.png", "clear.png"])
def test_a_picture_has_the_pixels_of_purrsight(media: Path, name: str) -> None:
    pixels = purrsight_pixels(MediaRef("image", media / name))
    expected = EXPECTED[name]
    assert list(pixels.shape) == expected["shape"]
    assert pixels.reshape(-1)[expected["places"]].tolist() == expected["values"]


def test_a_short_sound_ends_with_zeros(media: Path) -> None:
    mel = purrsight_mel(
        MediaRef("audio", media / "short.wav"), mel_filters(LogMel()).astype(np.float32)
    )
    assert (mel[:, -100:] == 0).all()
    assert (mel[:, :50] != 0).all()


def test_another_rate_keeps_a_slow_tone() -> None:
    time = np.arange(22_050) / 22_050
    resampled = hann_resample(
        np.sin(2 * np.pi * 300 * time)[None].astype(np.float32), 22_050, 16_000
    )
    wanted = np.sin(2 * np.pi * 300 * np.arange(resampled.shape[1]) / 16_000)
    assert resampled.shape == (1, 16_000)
    assert np.abs(resampled[0, 100:-100] - wanted[100:-100]).max() < 1e-3


def test_a_very_long_picture_is_cut_before_it_is_resized(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (3, 60_000), (10, 200, 30)).save(tmp_path / "thin.png")
    pixels = purrsight_pixels(MediaRef("image", tmp_path / "thin.png"))
    assert (pixels == np.array([10, 200, 30], np.uint8)[:, None, None]).all()
