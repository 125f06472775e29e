"""Settings of an aligner, its encoders and its objective. They are looked at without whole runs: shapes, inputs, two steps of an engine."""

import functools
from pathlib import Path
from typing import Any

from support.setting_runs import Row, data_folder
from support.small_aligner import ENCODERS

FROZEN = {
    "efficientnet_lite0": "image",
    "huggingface": "text",
    "minilm": "text",
    "mobilenet_v4": "image",
    "cnn14": "audio",
}


def encoded_by(kind: str) -> str:
    """The modality that a kind of encoder is tried with."""
    return {"vit": "image", "audio_cnn": "audio", "text_bytes": "text"}.get(kind) or FROZEN[kind]


def _resolved(overrides: tuple[str, ...]) -> Any:
    from headway.config.load import load
    from headway.train.config import Recipe
    from headway.train.resolve import resolve

    settings = [
        f"model.aligner.encoders.{name}.{key}={value}"
        for name, encoder in ENCODERS.items()
        for key, value in encoder.items()
    ]
    base = ["model.aligner.dim=8", "objective.kind=contrastive", "data.train=[captions.jsonl]"]
    return resolve(
        load(
            Recipe,
            None,
            [*settings, *base, *(text.replace("$", str(data_folder())) for text in overrides)],
        )
    )


def refused_aligner(overrides: tuple[str, ...]) -> Any:
    """The error, or nothing."""
    from headway.errors import HeadwayError

    try:
        return _resolved(overrides).recipe.model.aligner is None
    except HeadwayError as error:
        return str(error)


def aligner_shapes(overrides: tuple[str, ...]) -> Any:
    """Shapes of all parameters, and of what towers read."""
    import torch

    from headway.model.base import build_model

    model = _resolved(overrides).model
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in build_model(model).named_parameters()}
    return shapes, [
        encoder.input_of(name).shape
        for name, encoder in model.aligner.encoders.items()
        if encoder.TRAINS
    ]


def aligner_numbers(overrides: tuple[str, ...]) -> Any:
    """Loss and gradient norm of three steps, and the log scale after them."""
    from headway.optim.groups import hypers
    from headway.parallel.collectives import RankGroup
    from headway.tasks.base import StepInfo
    from headway.train.alignment import first_heads
    from support.engines import OPTIM, Setup, make_engine
    from support.small_aligner import share_of_samples

    resolved = _resolved(overrides)
    engine = make_engine(
        RankGroup(),
        Setup(micro=1, config=resolved.model, freeze=(), objective=resolved.recipe.objective),
    )
    engine.fill(first_heads(resolved.model.aligner, resolved.recipe.objective, engine.shapes))
    seen: list[Any] = []
    for index in range(3):
        result = engine.forward_backward(share_of_samples(index, 1, 0, 1), StepInfo(index, 20))
        seen.append(
            (float(result.loss), float(engine.update(hypers(OPTIM, engine.groups, index, 20)).norm))
        )
    return seen, {name: value.tolist() for name, value in engine.objective_values().items()}


@functools.cache
def heads_file() -> Path:
    """An aligner.safetensors that fits the small aligner."""
    import torch

    from headway.model.loading.aligner_file import AlignerHeads, write_aligner

    tensors: dict[str, torch.Tensor] = {}
    for name, encoder in ENCODERS.items():
        width = int(encoder["width"])  # type: ignore[call-overload]
        tensors |= {
            f"heads.{name}.norm.weight": torch.ones(width),
            f"heads.{name}.norm.bias": torch.zeros(width),
        }
        tensors[f"heads.{name}.proj.weight"] = torch.randn(
            8, width, generator=torch.Generator().manual_seed(0)
        )
    write_aligner(
        AlignerHeads(tensors, dict.fromkeys(ENCODERS, 1.5)), data_folder() / "aligner.safetensors"
    )
    return data_folder() / "aligner.safetensors"


def from_weights(overrides: tuple[str, ...]) -> Any:
    heads_file()
    return aligner_numbers(overrides)


def frozen_shape(overrides: tuple[str, ...]) -> Any:
    """Identity, inputs and vectors of the one frozen encoder among the overrides, with weights of its shape instead of a package's."""
    from support.small_encoders import frozen_from

    return frozen_from(
        dict(
            text.replace("$", str(data_folder())).removeprefix("model.aligner.encoders.").split("=")
            for text in overrides
        ),
        data_folder(),
    )


TEXT_FOLDER = (
    "model.aligner.encoders.text.kind=huggingface",
    "model.aligner.encoders.text.path=$/bert",
)
SOUND_FOLDER = (
    "model.aligner.encoders.audio.kind=huggingface",
    "model.aligner.encoders.audio.path=$/whisper",
)
MINILM = ("model.aligner.encoders.text.kind=minilm",)
LITE0 = ("model.aligner.encoders.image.kind=efficientnet_lite0",)
MOBILENET = (
    "model.aligner.encoders.image.kind=mobilenet_v4",
    "model.aligner.encoders.image.path=$/mobilenet/mobilenetv4.pth",
)
CNN14 = (
    "model.aligner.encoders.audio.kind=cnn14",
    "model.aligner.encoders.audio.path=$/cnn14/cnn14.pth",
)
AT = "model.aligner.encoders"
ROWS: dict[str, Row] = {
    "model.aligner.dim": ((), 8, 12, aligner_shapes),
    "model.aligner.norm_eps": ((), 1e-6, 0.5, aligner_numbers),
    "model.aligner.weights": ((), None, "$/aligner.safetensors", from_weights),
    "model.aligner.widths": ((), "{}", "{image: 7}", refused_aligner),
    f"{AT}[vit].kind": ((), "vit", "nothing", refused_aligner),
    f"{AT}[vit].image_size": ((), 16, 24, aligner_shapes),
    f"{AT}[vit].patch": ((), 8, 4, aligner_shapes),
    f"{AT}[vit].width": ((), 16, 20, aligner_shapes),
    f"{AT}[vit].layers": ((), 2, 1, aligner_shapes),
    f"{AT}[vit].heads": ((), 2, 4, aligner_numbers),
    f"{AT}[vit].stem": ((), "patches", "convolutions", aligner_shapes),
    f"{AT}[audio_cnn].kind": ((), "audio_cnn", "nothing", refused_aligner),
    f"{AT}[audio_cnn].frames": ((), 16, 32, aligner_shapes),
    f"{AT}[audio_cnn].width": ((), 32, 64, aligner_shapes),
    f"{AT}[audio_cnn].stages": ((), 2, 1, aligner_shapes),
    f"{AT}[text_bytes].kind": ((), "text_bytes", "nothing", refused_aligner),
    f"{AT}[text_bytes].max_bytes": ((), 12, 16, aligner_shapes),
    f"{AT}[text_bytes].width": ((), 16, 20, aligner_shapes),
    f"{AT}[text_bytes].layers": ((), 1, 2, aligner_shapes),
    f"{AT}[text_bytes].heads": ((), 2, 4, aligner_numbers),
    f"{AT}[huggingface].kind": ((), "text_bytes", "nothing", refused_aligner),
    f"{AT}[huggingface].path": (TEXT_FOLDER[:1], "$/bert", "$/nowhere", frozen_shape),
    f"{AT}[huggingface].pool": (TEXT_FOLDER, "mean", "none", frozen_shape),
    f"{AT}[huggingface].layer": (TEXT_FOLDER, -1, -2, frozen_shape),
    f"{AT}[huggingface].max_tokens": (TEXT_FOLDER, 8, 12, frozen_shape),
    f"{AT}[huggingface].seconds": (SOUND_FOLDER, 0.5, 1.0, frozen_shape),
    f"{AT}[minilm].kind": ((), "text_bytes", "nothing", refused_aligner),
    f"{AT}[minilm].pool": (MINILM, "mean", "cls", frozen_shape),
    f"{AT}[minilm].max_tokens": (MINILM, 8, 12, frozen_shape),
    f"{AT}[efficientnet_lite0].kind": ((), "vit", "nothing", refused_aligner),
    f"{AT}[efficientnet_lite0].pool": (LITE0, "mean", "none", frozen_shape),
    f"{AT}[mobilenet_v4].kind": ((), "vit", "nothing", refused_aligner),
    f"{AT}[mobilenet_v4].path": (
        MOBILENET[:1],
        "$/mobilenet/mobilenetv4.pth",
        "$/nowhere",
        frozen_shape,
    ),
    f"{AT}[mobilenet_v4].pool": (MOBILENET, "mean", "none", frozen_shape),
    f"{AT}[mobilenet_v4].preprocessing": (MOBILENET, "standard", "purrsight", frozen_shape),
    f"{AT}[cnn14].kind": ((), "audio_cnn", "nothing", refused_aligner),
    f"{AT}[cnn14].path": (CNN14[:1], "$/cnn14/cnn14.pth", "$/nowhere", frozen_shape),
    f"{AT}[cnn14].frames": (CNN14, 32, 64, frozen_shape),
    f"{AT}[cnn14].preprocessing": (CNN14, "standard", "purrsight", frozen_shape),
    "objective[contrastive].kind": ((), "contrastive", "next_token", refused_aligner),
    "objective[contrastive].log_scale": ((), 2.0, 3.0, aligner_numbers),
    "objective[contrastive].learn_scale": ((), True, False, aligner_numbers),
    "objective[contrastive].max_scale": (
        ("objective.log_scale=1.0", "model.aligner.weights=$/aligner.safetensors"),
        9.0,
        3.0,
        from_weights,
    ),
    "objective[contrastive].scale_lr": ((), None, 0.5, aligner_numbers),
    "objective[contrastive].equal_items": ((), "negative", "ignore", aligner_numbers),
    "objective[contrastive].pairs": ((), None, "[text-image]", aligner_numbers),
}
