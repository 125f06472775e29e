"""Phase 2: a recipe with a `multimodal` section comes in; the media inputs of its model, its features and its first values go out.

    resolve    plan_media: encoders or tables, the aligner's heads -> MediaShape, which becomes model.media
    build      open_media: tables of features (made once, cached), stores with positions for media -> open data
    fill       first_media: the aligner's heads from their file, the projector from the seed

What does not fit is refused in `plan_media`, before anything is computed: a missing head, another width, a modality without encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headway.data.config import SourceConfig, default_cache_dir
from headway.data.media import MediaFeatures
from headway.errors import ConfigError
from headway.media.sources import read_sources, source_files
from headway.model.loading.aligner_file import AlignerHeads, is_purrsight_file, read_aligner
from headway.model.media_encoders import (
    aligned_encoder_text,
    aligner_folder,
    encoder_text,
    open_encoder,
)
from headway.model.media_shape import ALIGNER, MediaInput, MediaShape
from headway.prepare.detect import local_path
from headway.prepare.features import EncoderRows, Sample, prepare_samples
from headway.records.base import record_kind
from headway.records.encode_media import MediaPositions
from headway.records.multimodal import refs_of
from headway.store.media_table import MediaTable, open_table
from headway.train.multimodal_config import (
    POOLED_HIDDEN,
    POOLED_TOKENS,
    MediaInputConfig,
    MultimodalConfig,
)

if TYPE_CHECKING:
    import torch

    from headway.train.config import Recipe


@dataclass(frozen=True)
class MediaPlan:
    """What the media inputs of a run are made of."""

    shape: MediaShape
    tables: dict[str, MediaTable] = field(default_factory=dict)
    """Given tables, by modality; the others are made by the encoders."""
    heads: AlignerHeads | None = None

    @property
    def positions(self) -> MediaPositions:
        """How items stand in documents."""
        return MediaPositions(
            {one.modality: one.tokens for one in self.shape.inputs}, self.shape.missing
        )


def plan_media(config: MultimodalConfig, hidden_size: int) -> MediaPlan:
    """Open encoders and tables, and check that everything fits together."""
    heads = None if config.aligner is None else read_aligner(config.aligner)
    tables: dict[str, MediaTable] = {}
    inputs: list[MediaInput] = []
    for name, one in config.inputs.items():
        text = "" if one.features is not None else _encoder_of(config, name, one)
        if one.features is not None:
            tables[name] = open_table(one.features)
            if len(tables[name].shape) != 2:
                shape = list(tables[name].shape)
                raise ConfigError(
                    f"multimodal.{name}.features: {one.features} has rows of {shape}; [vectors, width] is expected."
                )
            vectors, width = tables[name].shape
        else:
            encoder = open_encoder(text, name)
            vectors, width = encoder.tokens, encoder.width
        inputs.append(MediaInput(name, width, _tokens(name, one, vectors), vectors, text))
    if heads is not None:
        heads.require(
            {one.modality: one.width for one in inputs},
            heads.dim,
            f"multimodal.aligner={config.aligner}",
        )
    pooled = all(one.is_pooled for one in inputs)
    shape = MediaShape(
        tuple(inputs),
        hidden=config.hidden or (POOLED_HIDDEN if pooled else hidden_size),
        shared=config.aligner is not None if config.shared == "auto" else config.shared,
        aligned=None if heads is None else heads.dim,
        missing=config.missing,
    )
    if problem := shape.problem():
        raise ConfigError(f"multimodal: {problem}.")
    return MediaPlan(shape, tables, heads)


def _encoder_of(config: MultimodalConfig, name: str, one: MediaInputConfig) -> str:
    if one.encoder is not None:
        is_purrsight = config.aligner is not None and is_purrsight_file(config.aligner)
        return encoder_text(one.encoder, name, patches=one.patches, is_purrsight=is_purrsight)
    assert config.aligner is not None, "checked by the section"
    folder = aligner_folder(config.aligner)
    if folder is None:
        raise ConfigError(
            f"multimodal.aligner is {config.aligner}, which brings no encoders along. Set multimodal.{name}.encoder."
        )
    return aligned_encoder_text(folder, name)


def _tokens(name: str, one: MediaInputConfig, vectors: int) -> int:
    if vectors == 1:
        return one.tokens or POOLED_TOKENS
    if one.tokens not in (None, vectors):
        raise ConfigError(
            f"multimodal.{name}.tokens is {one.tokens}; its encoder gives {vectors} vectors, and each is a token. Remove it."
        )
    return vectors


def media_features(
    recipe: Recipe,
    plan: MediaPlan,
    device: torch.device | None = None,
    check_media: bool = False,
) -> MediaFeatures:
    """The features of all media of a recipe's sources: given tables, or made by the encoders and cached. `check_media`: look at every media
    file even if the features are known."""
    makers = []
    for one in plan.shape.inputs:
        if one.modality not in plan.tables:
            encoder = open_encoder(one.encoder, one.modality)
            makers.append(EncoderRows(encoder if device is None else encoder.to(device)))
    tables: dict[str, MediaTable] = dict(plan.tables)
    if makers:
        sources = multimodal_sources(recipe)
        skips = any(one.drop_bad for one in sources)
        cache_dir = recipe.data.cache_dir or default_cache_dir()
        paths = [local_path(one.path, recipe.data.cache_dir) for one in sources]
        made = prepare_samples(
            "media",
            _samples(paths),
            makers,
            cache_dir,
            skip_bad=skips,
            files=source_files(paths),
            check_media=check_media,
        )
        tables |= dict(zip(made.modalities, made.tables, strict=True))
    ordered = {one.modality: tables[one.modality] for one in plan.shape.inputs}
    key = "|".join(f"{name}={table.content_key}" for name, table in ordered.items())
    return MediaFeatures(ordered, {one.modality: one.tokens for one in plan.shape.inputs}, key)


def multimodal_sources(recipe: Recipe) -> list[SourceConfig]:
    """The sources of a recipe with media."""
    from headway.data.open import sets_of

    config = recipe.data
    sets = sets_of(config.valid.sets) if config.valid is not None and config.valid.sets else {}
    return [
        one
        for one in (*(config.train or ()), *(one for many in sets.values() for one in many))
        if one.kind != "auto" and record_kind(one.kind).holds_media
    ]


def _samples(paths: Sequence[str]) -> Iterator[Sample]:
    """One sample for every picture and sound; bad records were reported when their store was built."""
    for record in read_sources(paths):
        for ref in refs_of(record):
            yield Sample({ref.modality: ref}, record.place)


def first_media(
    plan: MediaPlan, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The heads of phase 1 under this model's names."""
    if plan.heads is None:
        return
    leaves = {"norm.weight": "norm.weight", "norm.bias": "norm.bias", "fc.weight": "proj.weight"}
    for one in plan.shape.inputs:
        for ours, theirs in leaves.items():
            name = f"{ALIGNER}{one.modality}.{ours}"
            value = plan.heads.tensors[f"heads.{one.modality}.{theirs}"]
            assert tuple(value.shape) == shapes[name], (
                f"{name} has shape {tuple(value.shape)}; the model has {shapes[name]}"
            )
            yield name, value
