"""Media that depend on nothing but this file: sounds of several lengths, rates and channels, pictures of several shapes and modes."""

import wave
from pathlib import Path

import numpy as np


def tone(seconds: float, rate: int, seed: int) -> np.ndarray:
    """A gliding tone with harmonics and noise, with quiet ends."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(size=len(time))
    sound = (
        0.4 * np.sin(2 * np.pi * (220 + 90 * time) * time)
        + 0.2 * np.sin(2 * np.pi * 1500 * time)
        + 0.01 * noise
    )
    quiet = int(0.05 * rate)
    sound[:quiet] *= 0.001
    sound[-quiet:] *= 0.001
    return sound


def write_wav(path: Path, channels: list[np.ndarray], rate: int) -> None:
    """16 bits."""
    values = (np.clip(np.stack(channels, 1), -1, 1) * 32767).round().astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((len(channels), 2, rate, 0, "NONE", "not compressed"))
        file.writeframes(values.tobytes())


def write_media(folder: Path) -> None:
    """Three sounds and three pictures."""
    from PIL import Image

    write_wav(folder / "short.wav", [tone(0.65, 16_000, 1)], 16_000)
    write_wav(folder / "long.wav", [tone(3.1, 16_000, 2)], 16_000)
    write_wav(folder / "stereo.wav", [tone(1.5, 44_100, 3), tone(1.5, 44_100, 4)], 44_100)
    rows, columns = np.mgrid[0:301, 0:457]
    waves = [127 + 120 * np.sin(rows / 17 + columns / (9 + 3 * channel)) for channel in range(3)]
    picture = np.stack(waves, -1).astype(np.uint8)
    # PNG: a JPEG decoder may round differently from one version to the next.
    Image.fromarray(picture).save(folder / "wide.png")
    Image.fromarray(picture[:, :200].transpose(1, 0, 2).copy()).save(folder / "small.png")
    alpha = np.clip(columns / 2, 0, 255).astype(np.uint8)[..., None]
    Image.fromarray(np.concatenate([picture, alpha], -1)).save(folder / "clear.png")


def mel_filters_file(folder: Path) -> Path:
    """A weights file of PANNs as far as PurrSight's preprocessing reads it: the mel filters."""
    import torch

    from headway.media.sound import LogMel, mel_filters

    path = folder / "cnn14.pth"
    torch.save(
        {
            "model": {
                "logmel_extractor.melW": torch.from_numpy(mel_filters(LogMel()).astype(np.float32))
            }
        },
        path,
    )
    return path
