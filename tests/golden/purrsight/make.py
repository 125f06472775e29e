"""Writes expected.json with PurrSight's own preprocessing: python make.py, with a checkout of PurrSight on the Python path.

The media come from `media.py`, which the test uses too. Of every array the shape, the mean and some numbers are kept.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile
import torch
import torchaudio

sys.path.insert(0, str(Path(__file__).parent))
from media import mel_filters_file, write_media
from PIL import Image
from purrsight.preprocess.audio import _AudioProcessor
from purrsight.preprocess.image import _ImageProcessor

MEAN = np.array([0.485, 0.456, 0.406])[:, None, None]
STD = np.array([0.229, 0.224, 0.225])[:, None, None]


def samples_of(array: np.ndarray) -> dict[str, object]:
    flat = array.astype(np.float64).reshape(-1)
    places = np.random.default_rng(0).choice(len(flat), 200, replace=False)
    return {
        "shape": list(array.shape),
        "mean": float(flat.mean()),
        "places": places.tolist(),
        "values": flat[places].tolist(),
    }


def load_wav(path: str) -> tuple[torch.Tensor, int]:
    """What torchaudio.load returns; newer ones need a decoder package for it."""
    values, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(values.T.copy()), rate


def main() -> None:
    torchaudio.load = load_wav
    folder = Path(tempfile.mkdtemp())
    write_media(folder)
    weights = mel_filters_file(folder)
    expected: dict[str, object] = {"torch": torch.__version__}
    audio = _AudioProcessor(weight_path=weights)
    assert audio.use_official_mel
    for path in sorted(folder.glob("*.wav")):
        expected[path.name] = samples_of(audio.process_audio(str(path)))
    for path in sorted([*folder.glob("*.jpg"), *folder.glob("*.png")]):
        normalized = _ImageProcessor().process_image(Image.open(path))
        # Back to bytes: what PurrSight normalizes are the bytes of the resized picture over 255.
        expected[path.name] = samples_of(np.rint((normalized * STD + MEAN) * 255))
    Path(__file__).with_name("expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
