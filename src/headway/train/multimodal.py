"""Phase 2: a recipe with a `multimodal` section comes in; the media inputs of its model, its
features and its first values go out.

    resolve    plan_media: encoders or tables, the aligner's heads -> MediaShape, model.media
    build      media_features: tables of features, made once and cached -> columns of batches
    fill       first_media: the aligner's heads from their file; a new projector from the seed

What does not fit is refused in `plan_media`, before anything is computed: a missing head, another
width, a modality without encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headway.data.config import SourceConfig, default_cache_dir
from headway.data.media import MediaFeatures
from headway.data.pictures import MODALITY, PictureFeatures, picture_rows, row_bytes
from headway.errors import ConfigError
from headway.media.items import MediaRef
from headway.media.patches import PictureSpec
from headway.media.sources import read_sources, source_files
from headway.model.loading.aligner_file import is_purrsight_file, read_aligner
from headway.model.media_encoders import (
    aligned_encoder_text,
    aligner_folder,
    encoder_text,
    open_encoder,
)
from headway.model.media_shape import ALIGNER, MediaInput, MediaShape
from headway.model.vision_shape import VisionShape
from headway.prepare.detect import local_path
from headway.prepare.features import DividedMaker, EncoderRows, Sample, prepare_samples
from headway.prepare.media_inputs import Array, Item
from headway.records.base import record_kind
from headway.records.encode_media import MediaPositions, NativePositions
from headway.records.multimodal import refs_of
from headway.store.media_table import MediaTable, open_table
from headway.train.multimodal_config import (
    POOLED_HIDDEN,
    POOLED_TOKENS,
    MediaInputConfig,
    MultimodalConfig,
    NativeConfig,
)

if TYPE_CHECKING:
    import torch

    from headway.train.config import Recipe


class NoPhaseOne:
    """Features enter the projector as the encoders give them."""

    width: int | None = None
    """Of the vectors that enter the projector; None: of the features."""
    shares_projector = False
    """Whether modalities share one projector, where the recipe leaves it open."""
    is_purrsight = False
    """Whether PurrSight trained the heads."""

    def check(self, inputs: Sequence[MediaInput]) -> None:
        """Raise a ConfigError where the heads do not take the features of the inputs."""

    def encoder_text(self, modality: str) -> str:
        """The encoder that phase 1 brings along for a modality."""
        raise AssertionError("the section refuses an input without encoder, features and aligner")

    def values(self, modality: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The head of a modality under this model's names."""
        return iter(())


class PhaseOne(NoPhaseOne):
    """The heads of an aligner between encoders and projector."""

    shares_projector = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heads = read_aligner(path)
        self.width = self.heads.dim
        self.is_purrsight = is_purrsight_file(path)

    def check(self, inputs: Sequence[MediaInput]) -> None:
        widths = {media_input.modality: media_input.width for media_input in inputs}
        self.heads.require(widths, self.heads.dim, f"multimodal.aligner={self.path}")

    def encoder_text(self, modality: str) -> str:
        folder = aligner_folder(self.path)
        if folder is None:
            raise ConfigError(
                f"multimodal.aligner is {self.path}, which brings no encoders along. "
                f"Set multimodal.{modality}.encoder."
            )
        return aligned_encoder_text(folder, modality)

    def values(self, modality: str) -> Iterator[tuple[str, torch.Tensor]]:
        # Our names of a head's parameters in a language model, and in the file of an aligner.
        leaves = {
            "norm.weight": "norm.weight",
            "norm.bias": "norm.bias",
            "fc.weight": "proj.weight",
        }
        for ours, stored in leaves.items():
            name = f"{ALIGNER}{modality}.{ours}"
            yield name, self.heads.tensors[f"heads.{modality}.{stored}"]


def phase_one(config: MultimodalConfig) -> NoPhaseOne:
    """What phase 1 gives to the media inputs of a recipe."""
    if config.aligner is None:
        return NoPhaseOne()
    return PhaseOne(config.aligner)


@dataclass(frozen=True)
class MediaPlan:
    """What the media inputs of a run are made of."""

    shape: MediaShape
    tables: dict[str, MediaTable] = field(default_factory=dict)
    """Given tables, by modality; the others are made by the encoders."""
    phase_one: NoPhaseOne = field(default_factory=NoPhaseOne)

    @property
    def positions(self) -> MediaPositions:
        """How items stand in documents."""
        return MediaPositions(
            {media_input.modality: media_input.tokens for media_input in self.shape.inputs},
            self.shape.missing,
        )


def plan_media(config: MultimodalConfig, hidden_size: int) -> MediaPlan:
    """Open encoders and tables, and check that everything fits together."""
    phase = phase_one(config)
    tables: dict[str, MediaTable] = {}
    inputs: list[MediaInput] = []
    for name, settings in config.inputs.items():
        # An item becomes `vectors` vectors of `width` numbers: a row of a table, or what an
        # encoder gives.
        encoder_name = ""
        if settings.features is not None:
            table = open_table(settings.features)
            if len(table.shape) != 2:
                raise ConfigError(
                    f"multimodal.{name}.features: {settings.features} has rows of "
                    f"{list(table.shape)}; [vectors, width] is expected."
                )
            vectors, width = table.shape
            tables[name] = table
        else:
            encoder_name = _encoder_of(phase, name, settings)
            encoder = open_encoder(encoder_name, name)
            vectors = encoder.tokens
            width = encoder.width
        tokens = _num_tokens(name, settings, vectors)
        inputs.append(MediaInput(name, width, tokens, vectors, encoder_name))
    phase.check(inputs)

    hidden = config.hidden
    if not hidden:
        # A projector of patches is as wide as the model, as LLaVA's is.
        is_pooled = all(media_input.is_pooled for media_input in inputs)
        hidden = POOLED_HIDDEN if is_pooled else hidden_size
    shared = config.shared
    if shared == "auto":
        # Heads of an aligner bring all modalities into one space.
        shared = phase.shares_projector
    shape = MediaShape(
        tuple(inputs),
        hidden=hidden,
        shared=shared,
        aligned=phase.width,
        missing=config.missing,
    )
    if problem := shape.problem():
        raise ConfigError(f"multimodal: {problem}.")
    return MediaPlan(shape, tables, phase)


def _encoder_of(before: NoPhaseOne, name: str, settings: MediaInputConfig) -> str:
    if settings.encoder is None:
        return before.encoder_text(name)
    return encoder_text(
        settings.encoder, name, patches=settings.patches, is_purrsight=before.is_purrsight
    )


def _num_tokens(name: str, settings: MediaInputConfig, vectors: int) -> int:
    """Soft tokens of one item. A pooled vector becomes several; of more vectors, each is one."""
    if vectors == 1:
        return settings.tokens or POOLED_TOKENS
    if settings.tokens not in (None, vectors):
        raise ConfigError(
            f"multimodal.{name}.tokens is {settings.tokens}; its encoder gives {vectors} vectors, "
            "and each is a token. Remove it."
        )
    return vectors


@dataclass(frozen=True)
class VisionPlan:
    """The vision tower of a run that reads pictures as the published model does."""

    shape: VisionShape

    @property
    def positions(self) -> NativePositions:
        """How pictures stand in documents."""
        return self.shape.positions


def plan_vision(config: NativeConfig, shape: VisionShape, seq_len: int) -> VisionPlan:
    """The tower with the recipe's sizes of pictures."""
    sizes = {
        key: value
        for key, value in config.model_dump().items()
        if key in ("min_pixels", "max_pixels") and value is not None
    }
    picture = replace(shape.spec, **sizes)
    problem = picture.problem()
    if problem is not None:
        raise ConfigError(f"multimodal.native: {problem}.")
    # A picture and its two tokens must fit, with one token to learn.
    most_cells = picture.max_pixels // picture.side**2
    if most_cells + 3 > seq_len:
        raise ConfigError(
            f"multimodal.native: a picture has up to {most_cells} positions "
            f"({picture.max_pixels} pixels), and data.seq_len is {seq_len}. Set "
            f"multimodal.native.max_pixels to {max(1, seq_len // 2) * picture.side**2} or less, "
            "or raise data.seq_len."
        )
    return VisionPlan(shape.with_spec(picture))


def picture_features(
    recipe: Recipe, plan: VisionPlan, check_media: bool = False
) -> PictureFeatures:
    """The cells of all pictures of a recipe's sources, from the cache or made now."""
    spec = plan.shape.spec
    maker = DividedMaker(
        modality=MODALITY,
        identity=f"cells of pictures: {spec!r}",
        row_shape=(row_bytes(spec),),
        row_dtype="uint8",
        divided=partial(_rows_of, spec=spec),
    )
    sources = multimodal_sources(recipe)
    paths = [local_path(source.path, recipe.data.cache_dir) for source in sources]
    samples = prepare_samples(
        "pictures",
        (
            sample
            for sample in _media_samples(paths)
            if all(name == MODALITY for name in sample.items)
        ),
        [maker],
        recipe.data.cache_dir or default_cache_dir(),
        skip_bad=any(source.drop_bad for source in sources),
        files=source_files(paths),
        check_media=check_media,
    )
    table = samples.tables[0]
    return PictureFeatures(table, spec, table.content_key)


def _rows_of(item: Item, spec: PictureSpec) -> Array:
    assert isinstance(item, MediaRef), "pictures are files or bytes"
    return picture_rows(item, spec)


def media_features(
    recipe: Recipe,
    plan: MediaPlan,
    device: torch.device | None = None,
    check_media: bool = False,
) -> MediaFeatures:
    """The features of all media of a recipe's sources: of given tables, or made by encoders.

    `check_media`: look at every media file even if the features are known.
    """
    inputs = plan.shape.inputs
    makers: list[EncoderRows] = []
    for media_input in inputs:
        if media_input.modality not in plan.tables:
            encoder = open_encoder(media_input.encoder, media_input.modality)
            if device is not None:
                encoder = encoder.to(device)
            makers.append(EncoderRows(encoder))

    tables: dict[str, MediaTable] = dict(plan.tables)
    if makers:
        sources = multimodal_sources(recipe)
        paths = [local_path(source.path, recipe.data.cache_dir) for source in sources]
        samples = prepare_samples(
            "media",
            _media_samples(paths),
            makers,
            recipe.data.cache_dir or default_cache_dir(),
            # One table serves all sources, so one that drops bad items decides for all.
            skip_bad=any(source.drop_bad for source in sources),
            files=source_files(paths),
            check_media=check_media,
        )
        tables |= dict(zip(samples.modalities, samples.tables, strict=True))

    # In the order of the inputs, so that the key does not depend on which tables were given.
    ordered = {media_input.modality: tables[media_input.modality] for media_input in inputs}
    key = "|".join(f"{name}={table.content_key}" for name, table in ordered.items())
    tokens = {media_input.modality: media_input.tokens for media_input in inputs}
    return MediaFeatures(ordered, tokens, key)


def multimodal_sources(recipe: Recipe) -> list[SourceConfig]:
    """The sources of a recipe with media."""
    from headway.data.open import sets_of

    config = recipe.data
    sources = list(config.train or ())
    if config.valid is not None and config.valid.sets:
        for of_set in sets_of(config.valid.sets).values():
            sources += of_set
    return [
        source
        for source in sources
        if source.kind != "auto" and record_kind(source.kind).holds_media
    ]


def _media_samples(paths: Sequence[str]) -> Iterator[Sample]:
    """One sample for every picture and sound.

    Bad records were reported when their store was built.
    """
    for record in read_sources(paths):
        for ref in refs_of(record):
            yield Sample({ref.modality: ref}, record.place)


def first_media(
    plan: MediaPlan, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The heads of phase 1 under this model's names."""
    for media_input in plan.shape.inputs:
        for name, value in plan.phase_one.values(media_input.modality):
            assert tuple(value.shape) == shapes[name], (
                f"{name} has shape {tuple(value.shape)}; the model has {shapes[name]}"
            )
            yield name, value
