"""A Hugging Face folder as a frozen encoder. In: the settings of `huggingface.py`; out: a frozen
encoder. Mistakes are one line each.

image   pixels, normalized as preprocessor_config.json says      -> the vision part
audio   samples -> the folder's feature extractor, one by one    -> the audio part
text    ids and their mask                                       -> the text part

The result of every part: vectors [n, tokens, width], pooled or not (`pooled`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from headway.errors import ConfigError, first_line
from headway.media.items import ImageSpec
from headway.model.encoders.frozen import FrozenModule, Pixels, files_identity
from headway.prepare.media_inputs import ImageInput, MediaInputSpec, TokenInput, WaveInput
from headway.runtime.json_file import read_object
from headway.text.hub import is_hub_id, local_or_hub

if TYPE_CHECKING:
    from headway.model.encoders.base import FrozenMediaEncoder
    from headway.model.encoders.huggingface import Config

PARTS: dict[str, dict[str, str]] = {
    "clip": {"image": "vision_model", "text": "text_model"},
    "siglip": {"image": "vision_model", "text": "text_model"},
    "siglip2": {"image": "vision_model", "text": "text_model"},
    "clap": {"audio": "audio_model", "text": "text_model"},
    "whisper": {"audio": "encoder"},
}
"""The part of a model of several modalities; other models are taken whole."""
TAKES = {
    "pixel_values": "image",
    "input_features": "audio",
    "input_values": "audio",
    "input_ids": "text",
}
"""The main input of a module -> the modality that it encodes."""
PREPROCESSOR = "preprocessor_config.json"
FULL_TEXT = ("siglip", "siglip_text_model", "siglip2", "siglip2_text_model")
"""Trained on texts padded to the full length, without a mask."""
WHISPER_SAMPLES_PER_STATE = 320
"""10 ms of 16 kHz for a frame, two frames for a vector."""
BILINEAR = 2
BICUBIC = 3
"""PIL's numbers, which preprocessor_config.json uses."""


def open_encoder(config: Config, modality: str) -> FrozenMediaEncoder:
    """The encoder of a folder for one modality."""
    from transformers import AutoConfig

    key = f"model.aligner.encoders.{modality}.path"
    folder = Path(config.path)
    if not folder.is_dir():
        if not is_hub_id(config.path):
            raise ConfigError(
                f"{key} is {config.path!r}, which is not a folder. Give a Hugging Face folder or a "
                "hub id."
            )
        folder = local_or_hub(config.path)

    try:
        described = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        model = _model(folder, described)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as problem:
        raise ConfigError(
            f"{key} is {config.path!r}; transformers cannot load it: {first_line(problem)}"
        ) from None

    # Models of several modalities are cut down to the part of this one.
    kind = str(described.model_type)
    part = PARTS.get(kind, {}).get(modality)
    if kind in PARTS and part is None:
        raise ConfigError(
            f"{key} is {config.path!r}, a {kind} model, which encodes {' and '.join(PARTS[kind])}, "
            f"not {modality}."
        )
    module: Any = model if part is None else getattr(model, part)
    takes = "input_features"
    if kind != "whisper":
        takes = str(getattr(module, "main_input_name", ""))
    if TAKES.get(takes) != modality:
        raise ConfigError(
            f"{key} is {config.path!r}, a {kind} model, which takes {takes or 'something else'}, "
            f"not {modality}."
        )

    source, forward = _prepared(config, modality, folder, module, kind, key)
    # The identity covers weights, settings and vocabulary: features of other files are not reused.
    files = sorted(
        path
        for path in folder.iterdir()
        if path.suffix in (".safetensors", ".json", ".bin", ".txt", ".model")
    )
    identity = f"huggingface {kind} {files_identity(files)} pool={config.pool} layer={config.layer}"
    return FrozenModule(modality, forward, source, identity)


def _model(folder: Path, described: Any) -> Any:
    from transformers import AutoModel
    from transformers.utils import logging as their_logging

    # Its bars would break the lines of the console.
    their_logging.disable_progress_bar()
    return AutoModel.from_pretrained(
        folder,
        config=described,
        local_files_only=True,
        trust_remote_code=False,
        dtype=torch.float32,
    )


def _prepared(
    config: Config, modality: str, folder: Path, module: Any, kind: str, key: str
) -> tuple[MediaInputSpec, nn.Module]:
    """What the encoder reads, and the module from that to vectors."""
    if modality == "image":
        spec, pixels = read_image_settings(folder)
        return ImageInput(spec), ImagePart(module, pixels, config)
    if modality == "text":
        return _text(config, folder, module, kind, key)
    from transformers import AutoFeatureExtractor

    try:
        extractor: Any = AutoFeatureExtractor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as problem:
        raise ConfigError(
            f"{key} is {config.path!r}; its feature extractor cannot be loaded: "
            f"{first_line(problem)}"
        ) from None
    rate = int(extractor.sampling_rate)
    samples = int(config.seconds * rate)
    most = getattr(extractor, "n_samples", None) or getattr(extractor, "nb_max_samples", None)
    if most is not None:
        samples = min(samples, int(most))
    return WaveInput(rate, samples), AudioPart(module, extractor, rate, config, kind)


def read_image_settings(folder: Path) -> tuple[ImageSpec, Pixels]:
    """Resizing, cropping and normalisation of preprocessor_config.json."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        raise ConfigError(
            f"{folder}: has no {PREPROCESSOR}, which says how pixels are prepared. Download it too."
        )
    settings = read_object(path, ConfigError)
    try:
        resize = None
        if settings.get("do_resize", True):
            resize = _side(settings["size"])
        crop = None
        if settings.get("do_center_crop", "crop_size" in settings):
            crop = _side(settings["crop_size"])
        size = crop or resize
        if size is None:
            raise ValueError("it gives no size")
        resample = int(settings.get("resample", BICUBIC))
        if resample not in (BILINEAR, BICUBIC):
            raise ValueError(f"resample is {resample}; 2 (bilinear) and 3 (bicubic) are known")
        interpolation: Any = "bicubic" if resample == BICUBIC else "bilinear"

        # A size with height and width means both sides, whatever the proportions of the picture.
        has_both_sides = isinstance(settings.get("size"), Mapping) and "height" in settings["size"]
        if crop is not None and not has_both_sides:
            spec = ImageSpec(
                size=size, resize=resize or size, fit="crop", interpolation=interpolation
            )
        else:
            spec = ImageSpec(size=size, resize=None, fit="stretch", interpolation=interpolation)

        factor = 1.0
        if settings.get("do_rescale", True):
            factor = float(settings.get("rescale_factor", 1 / 255))
        mean = [0.0] * 3
        std = [1.0] * 3
        if settings.get("do_normalize", True):
            mean = [float(value) for value in settings["image_mean"]]
            std = [float(value) for value in settings["image_std"]]
        return spec, Pixels(mean, std, factor)
    except (KeyError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"{path}: cannot be used: {type(problem).__name__}: {first_line(problem)}."
        ) from None


def _side(size: Any) -> int:
    """The side of a size in any of its forms: 224, {shortest_edge: 224}, {height: 224, width:
    224}."""
    if not isinstance(size, Mapping):
        return int(size)
    if "shortest_edge" in size:
        return int(size["shortest_edge"])
    if size["height"] != size["width"]:
        raise ValueError(f"{size['height']} x {size['width']} pixels are not square")
    return int(size["height"])


def _text(
    config: Config, folder: Path, module: Any, kind: str, key: str
) -> tuple[MediaInputSpec, nn.Module]:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as problem:
        raise ConfigError(
            f"{key} is {config.path!r}; its tokenizer cannot be loaded: {first_line(problem)}"
        ) from None
    is_full_length = kind in FULL_TEXT
    length = config.max_tokens
    most = getattr(module.config, "max_position_embeddings", None)
    if most is not None and is_full_length:
        length = int(most)
    elif most is not None:
        length = min(length, int(most))

    def encode(text: str) -> list[int]:
        padding = "max_length" if is_full_length else False
        encoded = tokenizer(text, truncation=True, max_length=length, padding=padding)
        return list(encoded["input_ids"])

    files = sorted(
        path
        for path in folder.iterdir()
        if path.name.startswith(("tokenizer", "vocab", "merges", "spiece", "special"))
    )
    pad = 0
    if tokenizer.pad_token_id is not None:
        pad = int(tokenizer.pad_token_id)
    source = TokenInput(length, files_identity(files), encode)
    return source, TextPart(module, pad, not is_full_length, config)


class ImagePart(nn.Module):
    """Pixels to vectors."""

    def __init__(self, module: nn.Module, pixels: Pixels, config: Config) -> None:
        super().__init__()
        self.part = module
        self.pixels = pixels
        self.config = config

    def forward(self, inputs: Tensor) -> Tensor:
        out = self.part(
            pixel_values=self.pixels(inputs), output_hidden_states=self.config.layer != -1
        )
        return pooled(out, self.config, None)


class TextPart(nn.Module):
    """Ids to vectors; -1 is padding."""

    def __init__(self, module: nn.Module, pad: int, masked: bool, config: Config) -> None:
        super().__init__()
        self.part = module
        self.pad = pad
        self.masked = masked
        self.config = config

    def forward(self, inputs: Tensor) -> Tensor:
        ids = torch.where(inputs >= 0, inputs, self.pad).long()
        needs_layers = self.config.layer != -1
        if not self.masked:
            out = self.part(input_ids=ids, output_hidden_states=needs_layers)
            return pooled(out, self.config, None)
        mask = inputs >= 0
        mask[:, 0] = True  # an empty row has one token, so that attention has something to see
        out = self.part(
            input_ids=ids, output_hidden_states=needs_layers, attention_mask=mask.long()
        )
        return pooled(out, self.config, mask)


class AudioPart(nn.Module):
    """Samples to vectors.

    Features are extracted one sound at a time, so that no sound depends on another.
    """

    def __init__(
        self, module: nn.Module, extractor: Any, rate: int, config: Config, kind: str
    ) -> None:
        super().__init__()
        self.part = module
        self.extractor = extractor
        self.rate = rate
        self.config = config
        self.kind = kind

    def forward(self, inputs: Tensor) -> Tensor:
        waves = inputs.cpu().numpy()
        features = [self._features(np.asarray(wave)) for wave in waves]
        arguments = {
            name: torch.cat([item[name] for item in features]).to(inputs.device)
            for name in features[0]
        }
        out = self.part(**arguments, output_hidden_states=self.config.layer != -1)
        if self.kind != "whisper":
            return pooled(out, self.config, None)

        # Whisper pads every sound to 30 s: most vectors may be of silence behind its end.
        positions = out.last_hidden_state.shape[1]
        device = out.last_hidden_state.device
        counts: list[int] = []
        for wave in waves:
            end = int(np.flatnonzero(wave)[-1]) + 1 if wave.any() else 1
            counts.append(min(-(-end // WHISPER_SAMPLES_PER_STATE), positions))
        last = torch.tensor(counts, device=device)
        mask = torch.arange(positions, device=device)[None] < last[:, None]
        return pooled(out, self.config, mask)

    def _features(self, wave: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """What the folder's feature extractor makes of one sound."""
        settings = {}
        if self.kind == "clap":
            settings = {"truncation": "rand_trunc", "padding": "pad"}
        features = self.extractor(wave, sampling_rate=self.rate, return_tensors="pt", **settings)
        names = ("input_features", "input_values", "is_longer")
        return {name: features[name] for name in names if name in features}


def pooled(out: Any, config: Config, mask: Tensor | None) -> Tensor:
    """[n, tokens, width] of a model's output; `mask` [n, tokens] says which vectors are of the
    item, not padding."""
    pooler_output = getattr(out, "pooler_output", None)
    if config.pool == "auto" and pooler_output is not None and config.layer == -1:
        return pooler_output.flatten(1)[:, None]

    if config.layer == -1:
        states = out.last_hidden_state
    else:
        states = out.hidden_states[config.layer]
    if states.ndim == 4:  # [n, channels, height, width]
        states = states.flatten(2).transpose(1, 2)

    if config.pool == "none":
        if mask is None:
            return states
        return torch.where(mask[..., None], states, 0.0)
    if config.pool == "cls":
        return states[:, :1]
    if mask is None:
        return states.mean(1, keepdim=True)
    weight = mask.to(states.dtype)[..., None]
    return (states * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
