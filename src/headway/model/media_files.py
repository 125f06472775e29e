"""The media inputs of a model in its Hugging Face folder, in files next to the weights, which other
programs ignore.

    media.json                    the shape (model/media_shape.py), what encodes each modality, and
                                  the checksums of the files below
    projector.safetensors         projector.* of the model, fp32
    aligner.safetensors           aligner.* where the model has the heads of phase 1
    preprocessor_config.json      how pictures and sounds become the inputs of the encoders
    encoders/                     the phase-1 aligner whose towers encode, where they were trained by headway

Invariant: a folder whose media.json names a file that is missing, changed or of another shape does
not load.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, first_line
from headway.model.layout import media_specs
from headway.model.media_shape import ALIGNER, PROJECTOR, MediaShape
from headway.runtime.digests import DIGESTS, write_digests
from headway.runtime.json_file import read_bounded, read_object
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    import torch

MEDIA_FILE = "media.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
ENCODERS_FOLDER = "encoders"
FILES = {PROJECTOR: "projector.safetensors", ALIGNER: "aligner.safetensors"}
"""Prefix of parameters -> the file that has them."""
VERSION = 1
"""Of media.json; another one is refused."""


def is_media(name: str) -> bool:
    """Whether a parameter belongs to media inputs."""
    return name.startswith((PROJECTOR, ALIGNER))


def without_media(
    weights: Iterable[tuple[str, torch.Tensor]], found: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the language model; those of media inputs are put into `found`, in fp32 on
    the CPU."""
    for name, value in weights:
        if is_media(name):
            found[name] = value.detach().float().to("cpu", copy=True)
        else:
            yield name, value


def write_media_files(
    folder: Path,
    shape: MediaShape,
    tensors: Mapping[str, torch.Tensor],
    model_folder: Path | None = None,
) -> None:
    """Write the files of a model's media inputs.

    `model_folder`: where the model was, for encoders that lie below it.
    """
    from safetensors.torch import save

    described = _with_encoders(folder, shape, model_folder)
    checksums: dict[str, str] = {}
    for prefix, name in FILES.items():
        part = {key: value.contiguous() for key, value in tensors.items() if key.startswith(prefix)}
        if part:
            content = save(part, metadata={"format": "pt", "written_by": "headway"})
            write_atomic(folder / name, content)
            checksums[name] = hashlib.sha256(content).hexdigest()

    inputs = {
        media_input.modality: _input_of(media_input.encoder, media_input.modality, folder)
        for media_input in described.inputs
    }
    write_atomic(folder / PREPROCESSOR_FILE, json.dumps({"headway_media": inputs}, indent=1) + "\n")

    # Last: a folder without it has no media inputs, one with it has all files.
    description = {"version": VERSION, "shape": asdict(described), "files": checksums}
    write_atomic(folder / MEDIA_FILE, json.dumps(description, indent=1) + "\n")


def _with_encoders(folder: Path, shape: MediaShape, model_folder: Path | None) -> MediaShape:
    """The shape with phase-1 encoders copied into the folder, so that it works wherever it is
    put."""
    from headway.model.media_encoders import ALIGNER_KEY

    target = folder / ENCODERS_FOLDER
    inputs = []
    for media_input in shape.inputs:
        description = {}
        if media_input.encoder:
            description = json.loads(media_input.encoder)
        if ALIGNER_KEY not in description:
            inputs.append(media_input)
            continue

        source = Path(description[ALIGNER_KEY])
        if not source.is_absolute() and model_folder is not None:
            source = model_folder / source
        if not source.is_dir():
            raise CheckpointError(
                f"the {media_input.modality} encoder of phase 1 is not at {source} any more. Put "
                "it back, and export again."
            )
        # All modalities of a model come from one phase-1 run, so it is copied once.
        if not target.exists():
            shutil.copytree(source, target)
            if not (target / DIGESTS).exists():
                write_digests(target)
        inputs.append(replace(media_input, encoder=json.dumps({ALIGNER_KEY: ENCODERS_FOLDER})))
    return replace(shape, inputs=tuple(inputs))


def _input_of(encoder: str, modality: str, folder: Path) -> dict[str, Any]:
    """How an item becomes an array, in plain values."""
    if not encoder:
        return {"encoder": None}
    from headway.model.media_encoders import open_encoder

    opened = open_encoder(encoder, modality, folder)
    source: Any = opened.input
    spec = getattr(source, "spec", source)
    settings = {key: value for key, value in vars(spec).items() if not callable(value)}
    return {
        "encoder": json.loads(encoder),
        "shape": list(source.shape),
        "dtype": source.dtype,
        "vectors": opened.tokens,
        "width": opened.width,
        # There and back: nested settings become plain values.
        "settings": json.loads(json.dumps(settings, default=vars)),
    }


def read_media_files(
    folder: Path, hidden_size: int
) -> tuple[MediaShape, dict[str, torch.Tensor]] | None:
    """The media inputs of a folder; None where it has none."""
    if not (folder / MEDIA_FILE).is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load

    description = read_object(folder / MEDIA_FILE, CheckpointError)
    remedy = "Export the model again."
    try:
        shape = MediaShape.parse(description["shape"])
        checksums = dict(description["files"])
        expected = {spec.name: spec.shape for spec in media_specs(shape, hidden_size)}
        if description["version"] != VERSION:
            raise ValueError(f"version {description['version']!r}")
        if wrong := shape.problem():
            raise ValueError(wrong)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise CheckpointError(
            f"{folder / MEDIA_FILE}: does not describe media inputs ({first_line(problem)}). "
            f"{remedy}"
        ) from None

    # The whole file is read and hashed before a tensor of it is used.
    tensors: dict[str, torch.Tensor] = {}
    for name in FILES.values():
        if name not in checksums:
            continue
        try:
            content = read_bounded(folder / name)
            if hashlib.sha256(content).hexdigest() != checksums[name]:
                raise ValueError("its checksum differs")
            tensors |= load(content)
        except (OSError, ValueError, SafetensorError) as problem:
            raise CheckpointError(
                f"{folder / name}: damaged or missing ({first_line(problem)}). {remedy}"
            ) from None

    for key, expected_shape in expected.items():
        stored_shape = None
        if key in tensors:
            stored_shape = tuple(tensors[key].shape)
        if stored_shape != expected_shape:
            shown = "missing" if stored_shape is None else list(stored_shape)
            raise CheckpointError(
                f"{folder}: {key} is {shown}; {list(expected_shape)} is expected. {remedy}"
            )
    if extra := sorted(set(tensors) - set(expected)):
        raise CheckpointError(
            f"{folder}: holds {extra[0]}, which {MEDIA_FILE} does not describe. {remedy}"
        )
    return shape, {key: tensors[key] for key in expected}
