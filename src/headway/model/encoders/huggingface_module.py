"""A Hugging Face folder as a frozen encoder. In: the settings of `huggingface.py`; out: a frozen encoder; mistakes are one line each.

image   pixels, normalized as preprocessor_config.json says      -> the vision part
audio   samples -> the folder's feature extractor, one by one    -> the audio part
text    ids and their mask                                       -> the text part
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
PREPROCESSOR = "preprocessor_config.json"
FULL_TEXT = ("siglip", "siglip_text_model", "siglip2", "siglip2_text_model")
"""Trained on texts padded to the full length, without a mask."""
WHISPER_SAMPLES_PER_STATE = 320
BILINEAR, BICUBIC = 2, 3


def open_encoder(config: Config, modality: str) -> FrozenMediaEncoder:
    """The encoder of a folder for one modality."""
    from transformers import AutoConfig

    key = f"model.aligner.encoders.{modality}.path"
    folder = Path(config.path)
    if not folder.is_dir():
        if not is_hub_id(config.path):
            raise ConfigError(
                f"{key} is {config.path!r}, which is not a folder. Give a Hugging Face folder or a hub id."
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
    kind = str(described.model_type)
    part = PARTS.get(kind, {}).get(modality)
    if kind in PARTS and part is None:
        raise ConfigError(
            f"{key} is {config.path!r}, a {kind} model, which encodes {' and '.join(PARTS[kind])}, not {modality}."
        )
    module: Any = model if part is None else getattr(model, part)
    takes = "input_features" if kind == "whisper" else str(getattr(module, "main_input_name", ""))
    if TAKES.get(takes) != modality:
        raise ConfigError(
            f"{key} is {config.path!r}, a {kind} model, which takes {takes or 'something else'}, not {modality}."
        )
    source, forward = _prepared(config, modality, folder, module, kind, key)
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
            f"{key} is {config.path!r}; its feature extractor cannot be loaded: {first_line(problem)}"
        ) from None
    rate, most = (
        int(extractor.sampling_rate),
        getattr(extractor, "n_samples", None) or getattr(extractor, "nb_max_samples", None),
    )
    samples = (
        int(config.seconds * rate) if most is None else min(int(config.seconds * rate), int(most))
    )
    return WaveInput(rate, samples), AudioPart(module, extractor, rate, config, kind)


def read_image_settings(folder: Path) -> tuple[ImageSpec, Pixels]:
    """Resizing, cropping and normalisation of preprocessor_config.json."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        raise ConfigError(
            f"{folder}: has no {PREPROCESSOR}, which says how pixels are prepared. Download it too."
        )
    given = read_object(path, ConfigError)
    try:
        resize = _side(given["size"]) if given.get("do_resize", True) else None
        crop = (
            _side(given["crop_size"]) if given.get("do_center_crop", "crop_size" in given) else None
        )
        square = isinstance(given.get("size"), Mapping) and "height" in given["size"]
        size = crop or resize
        if size is None:
            raise ValueError("it gives no size")
        resample = int(given.get("resample", BICUBIC))
        if resample not in (BILINEAR, BICUBIC):
            raise ValueError(f"resample is {resample}; 2 (bilinear) and 3 (bicubic) are known")
        fit: Any = "crop" if crop is not None and not square else "stretch"
        spec = ImageSpec(
            size=size,
            resize=(resize or size) if fit == "crop" else None,
            fit=fit,
            interpolation="bicubic" if resample == BICUBIC else "bilinear",
        )
        factor = (
            float(given.get("rescale_factor", 1 / 255)) if given.get("do_rescale", True) else 1.0
        )
        normal = given.get("do_normalize", True)
        mean, std = (
            (given["image_mean"], given["image_std"]) if normal else ((0.0,) * 3, (1.0,) * 3)
        )
        return spec, Pixels([float(one) for one in mean], [float(one) for one in std], factor)
    except (KeyError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"{path}: cannot be used: {type(problem).__name__}: {first_line(problem)}."
        ) from None


def _side(given: Any) -> int:
    """The side of a size in any of its forms: 224, {shortest_edge: 224}, {height: 224, width: 224}."""
    if isinstance(given, Mapping):
        if "shortest_edge" in given:
            return int(given["shortest_edge"])
        if given["height"] != given["width"]:
            raise ValueError(f"{given['height']} x {given['width']} pixels are not square")
        return int(given["height"])
    return int(given)


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
    most = getattr(module.config, "max_position_embeddings", None)
    length = config.max_tokens if most is None else min(config.max_tokens, int(most))
    full = kind in FULL_TEXT
    length = int(most) if full and most is not None else length

    def encode(text: str) -> list[int]:
        padding = "max_length" if full else False
        return list(
            tokenizer(text, truncation=True, max_length=length, padding=padding)["input_ids"]
        )

    names = sorted(
        path
        for path in folder.iterdir()
        if path.name.startswith(("tokenizer", "vocab", "merges", "spiece", "special"))
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return TokenInput(length, files_identity(names), encode), TextPart(
        module, int(pad), not full, config
    )


class ImagePart(nn.Module):
    """Pixels to vectors."""

    def __init__(self, module: nn.Module, pixels: Pixels, config: Config) -> None:
        super().__init__()
        self.part, self.pixels, self.config = module, pixels, config

    def forward(self, inputs: Tensor) -> Tensor:
        out = self.part(
            pixel_values=self.pixels(inputs), output_hidden_states=self.config.layer != -1
        )
        return pooled(out, self.config, None)


class TextPart(nn.Module):
    """Ids to vectors; -1 is padding."""

    def __init__(self, module: nn.Module, pad: int, masked: bool, config: Config) -> None:
        super().__init__()
        self.part, self.pad, self.masked, self.config = module, pad, masked, config

    def forward(self, inputs: Tensor) -> Tensor:
        mask = inputs >= 0
        mask[:, 0] = True  # an empty row has one token, so that attention has something to see
        ids = torch.where(mask & (inputs >= 0), inputs, self.pad).long()
        given = {"attention_mask": mask.long()} if self.masked else {}
        out = self.part(input_ids=ids, output_hidden_states=self.config.layer != -1, **given)
        return pooled(out, self.config, mask if self.masked else None)


class AudioPart(nn.Module):
    """Samples to vectors. Features are extracted one sound at a time, so that no sound depends on another."""

    def __init__(
        self, module: nn.Module, extractor: Any, rate: int, config: Config, kind: str
    ) -> None:
        super().__init__()
        self.part, self.extractor, self.rate, self.config, self.kind = (
            module,
            extractor,
            rate,
            config,
            kind,
        )

    def forward(self, inputs: Tensor) -> Tensor:
        waves = inputs.cpu().numpy()
        found = [self._features(np.asarray(wave)) for wave in waves]
        given = {
            name: torch.cat([one[name] for one in found]).to(inputs.device) for name in found[0]
        }
        out = self.part(**given, output_hidden_states=self.config.layer != -1)
        states = out.last_hidden_state
        mask = None
        if (
            self.kind == "whisper"
        ):  # what follows the end of a sound is padding, of which there is much
            ends = [int(np.flatnonzero(wave)[-1]) + 1 if wave.any() else 1 for wave in waves]
            last = torch.tensor(
                [min(-(-end // WHISPER_SAMPLES_PER_STATE), states.shape[1]) for end in ends],
                device=states.device,
            )
            mask = torch.arange(states.shape[1], device=states.device)[None] < last[:, None]
        return pooled(out, self.config, mask)

    def _features(self, wave: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        given = {"truncation": "rand_trunc", "padding": "pad"} if self.kind == "clap" else {}
        found = self.extractor(wave, sampling_rate=self.rate, return_tensors="pt", **given)
        return {
            name: found[name]
            for name in ("input_features", "input_values", "is_longer")
            if name in found
        }


def pooled(out: Any, config: Config, mask: Tensor | None) -> Tensor:
    """[n, tokens, width] of a model's output; `mask` [n, tokens] says which vectors are of the item, not padding."""
    own = getattr(out, "pooler_output", None)
    if config.pool == "auto" and own is not None and config.layer == -1:
        return own.flatten(1)[:, None]
    states = out.last_hidden_state if config.layer == -1 else out.hidden_states[config.layer]
    if states.ndim == 4:  # [n, channels, height, width]
        states = states.flatten(2).transpose(1, 2)
    if config.pool == "none":
        return states if mask is None else torch.where(mask[..., None], states, 0.0)
    if config.pool == "cls":
        return states[:, :1]
    if mask is None:
        return states.mean(1, keepdim=True)
    weight = mask.to(states.dtype)[..., None]
    return (states * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
