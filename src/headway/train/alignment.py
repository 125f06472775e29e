"""Runs that align modalities: a recipe with `model.aligner` comes in; its checked form, its open
samples and its first values go out.

Rows are samples (data/samples.py), so the loader, the engines, checkpoints and the loop are those
of language models. What does not apply to an aligner is refused here by its key, before anything is
read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headway.data.config import DataConfig, SourceConfig, default_cache_dir
from headway.data.open import OpenData, sets_of, with_valid
from headway.data.samples import SEQ_LEN, SampleSource
from headway.errors import ConfigError
from headway.media.sources import source_files
from headway.model.aligner_config import AlignerConfig
from headway.model.config import ModelConfig
from headway.model.flops import TokenFlops
from headway.model.loading.aligner_file import read_aligner
from headway.optim.groups import OBJECTIVE
from headway.prepare.detect import local_path
from headway.prepare.features import (
    EncoderRows,
    InputRows,
    RowMaker,
    SampleSet,
    prepare_samples,
    read_samples,
)
from headway.runtime.process import from_environment
from headway.store.checksums import Checksums
from headway.tokenizer.chat_template import FALLBACK_TEMPLATE

if TYPE_CHECKING:
    import torch

    from headway.model.encoders.base import EncoderConfig, FrozenMediaEncoder
    from headway.store.source import TokenSource
    from headway.tasks.base import TaskConfig
    from headway.train.config import Recipe

log = logging.getLogger("headway")

VOCAB = 1
"""Every sample is the same token."""


def resolve_aligner(recipe: Recipe) -> Recipe:
    """The recipe with the widths of frozen encoders and the form of its rows.

    What cannot work is a ConfigError.
    """
    objective = recipe.objective
    if recipe.model.head != "vectors":
        raise ConfigError(
            f"objective.kind is {objective.kind}, but the recipe has no model.aligner. "
            "Give its encoders (recipe multimodal/align)."
        )
    if objective.needs.head != "vectors":
        raise ConfigError(
            f"model.aligner is given with objective.kind {objective.kind}; "
            "an aligner is trained by contrastive. Set it."
        )

    aligner = recipe.model.aligner_settings
    objective, left_out = objective.without_absent(aligner.modalities)
    if left_out:
        say = log.info if from_environment().is_first else log.debug
        say(
            "objective.pairs: %s left out, because model.aligner.encoders has %s",
            ", ".join(left_out),
            ", ".join(aligner.modalities),
        )
    objective.check_modalities(aligner.modalities)
    _refuse_settings(recipe)

    # Encoders say how wide their features are. A recipe.yaml of a run states it, too, and must
    # agree: weights of the heads depend on it.
    widths: dict[str, int] = {}
    for name, encoder in aligner.encoders.items():
        if not encoder.TRAINS:
            widths[name] = _flat_width(frozen_encoder(encoder, name))
    for name, width in aligner.widths.items():
        if widths.get(name) != width:
            if name in widths:
                actual = f"gives {widths[name]}"
            elif name in aligner.encoders:
                actual = "is not frozen"
            else:
                actual = "does not exist"
            raise ConfigError(
                f"model.aligner.widths says {width} for {name}; the {name} encoder {actual}. "
                "Leave widths out."
            )
    aligner = aligner.model_copy(update={"widths": widths})

    if aligner.weights is not None:
        heads = read_aligner(aligner.weights)
        heads.require(
            {name: aligner.width_of(name) for name in aligner.modalities},
            aligner.dim,
            f"model.aligner.weights={aligner.weights}",
        )

    changes: dict[str, Any] = {
        "model": recipe.model.with_(vocab_size=VOCAB, aligner=aligner.model_dump()),
        "data": _sample_data(recipe.data, objective.reads[0]),
        "objective": objective,
    }
    if recipe.steps is None and recipe.epochs is None:
        changes["epochs"] = 1.0
    return recipe.model_copy(update=changes)


def _refuse_settings(recipe: Recipe) -> None:
    """Refuse settings that have no meaning for an aligner."""
    parallel = recipe.parallel
    remedy = "Remove it"
    # By setting: whether it is given, and what to do instead.
    refused = {
        "init.from": (
            recipe.init.source is not None,
            "Start from a file of heads with model.aligner.weights, or resume the run",
        ),
        "init.masks": (recipe.init.masks is not None, remedy),
        "tokenizer": (recipe.tokenizer is not None, "Text encoders bring their own"),
        "adapter": (recipe.adapter is not None, remedy),
        "stages": (bool(recipe.stages), "Align in a run of its own"),
        "parallel.tensor": (parallel.tensor > 1, "Use ddp, zero1 or fsdp"),
        "parallel.pipeline": (parallel.pipeline > 1, "Use ddp, zero1 or fsdp"),
        "parallel.context": (parallel.context > 1, "Use ddp, zero1 or fsdp"),
        "precision fp8": (recipe.precision == "fp8", "Use bf16"),
        "kernels.attention": (recipe.kernels.attention != "auto", "Use auto"),
        "batch.micro_rows auto": (recipe.batch.micro_rows == "auto", "Give a number"),
        "batch.tokens": (recipe.batch.tokens is not None, "Rows are samples: give batch.rows"),
        "memory.limit_gib": (recipe.memory.limit_gib is not None, remedy),
        "data.max_tokens": (recipe.data.max_tokens is not None, remedy),
        "data.stage_to": (recipe.data.stage_to is not None, "Set data.cache_dir to a local disk"),
    }
    for key, (is_given, advice) in refused.items():
        if is_given:
            raise ConfigError(
                f"{key} is given; it does not apply to an aligner (model.aligner). {advice}."
            )
    if recipe.data.train is None:
        raise ConfigError(
            "data.train is null; an aligner needs captions with pictures or sounds. "
            "Give data.train: [captions.jsonl]."
        )


def _sample_data(config: DataConfig, kind: str) -> DataConfig:
    """Rows of one sample each, from sources of one kind of records."""
    # Values of a run's recipe.yaml, and defaults, which nobody has written, are no mistakes.
    if config.seq_len not in (SEQ_LEN, DataConfig().seq_len) or config.packing not in (
        "pad",
        DataConfig().packing,
    ):
        raise ConfigError(
            "data.seq_len and data.packing are for tokens; a row of an aligner is one sample. "
            "Leave them out."
        )

    def of_samples(source: SourceConfig) -> SourceConfig:
        if source.kind not in ("auto", kind):
            raise ConfigError(
                f"data: {source.path} has kind {source.kind}; an aligner reads {kind}. Set kind: "
                f"{kind}, or leave it out."
            )
        # Samples have no turns. The template is stated as in the run folders of earlier releases.
        changes = {"kind": kind, "chat_template": FALLBACK_TEMPLATE}
        return SourceConfig.model_validate({**source.model_dump(exclude_unset=True), **changes})

    changes: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "packing": "pad",
        "train": tuple(of_samples(source) for source in config.train or ()),
    }
    if config.valid is not None and config.valid.sets is not None:
        sets = {
            name: tuple(of_samples(source) for source in sources)
            for name, sources in sets_of(config.valid.sets).items()
        }
        changes["valid"] = config.valid.model_copy(update={"sets": sets})
    return config.model_copy(update=changes)


def _flat_width(encoder: FrozenMediaEncoder) -> int:
    if encoder.tokens != 1:
        raise ConfigError(
            f"model.aligner.encoders.{encoder.modality} gives {encoder.tokens} vectors; "
            "alignment needs one. Set pool."
        )
    return encoder.width


def open_samples(
    recipe: Recipe,
    aligner: AlignerConfig,
    device: torch.device | None = None,
    check_media: bool = False,
) -> OpenData:
    """The samples of a recipe, their tables made where the cache lacks them.

    `check_media`: look at every media file even if they are known.
    """
    config = recipe.data
    cache_dir = config.cache_dir or default_cache_dir()
    makers = row_makers(aligner, device)

    def open_source(settings: SourceConfig) -> tuple[SourceConfig, TokenSource]:
        path = local_path(settings.path, config.cache_dir)
        samples = prepare_samples(
            settings.path,
            read_samples(path, aligner.modalities),
            makers,
            cache_dir,
            skip_bad=settings.drop_bad,
            files=source_files(path),
            check_media=check_media,
        )
        _check_pairs(samples)
        source = source_of(samples)
        if from_environment().is_first:
            for remark in recipe.objective.remarks(source):
                log.info("%s", remark)
        return settings, source

    sets = {}
    if config.valid is not None and config.valid.sets:
        sets = sets_of(config.valid.sets)
    valid = {
        name: [open_source(settings) for settings in sources] for name, sources in sets.items()
    }
    train = [open_source(settings) for settings in config.train or ()]
    return with_valid(config, train, valid, Checksums(cache_dir))


def source_of(samples: SampleSet) -> SampleSource:
    """Samples as the loader reads them."""
    return SampleSource(
        samples.name, samples.modalities, samples.rows, samples.tables, samples.content_key
    )


def _check_pairs(samples: SampleSet) -> None:
    """A contrastive loss needs a sample with two modalities, and another one to tell it from."""
    # rows: [samples, modalities], -1 where a sample lacks the modality.
    if not len(samples) or int(((samples.rows >= 0).sum(1) >= 2).sum()) < 2:
        wanted = ", ".join(samples.modalities)
        raise ConfigError(
            f"data: {samples.name} has fewer than two samples with two modalities or more of "
            f"{wanted}; nothing can be aligned."
        )


def first_heads(
    aligner: AlignerConfig, objective: TaskConfig, shapes: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The heads and the trained scale of `model.aligner.weights`, if it is given."""
    if aligner.weights is None:
        return
    heads = read_aligner(aligner.weights)
    # A file may have heads of modalities that this run does not align.
    yield from ((name, value) for name, value in heads.tensors.items() if name in shapes)
    for name, value in objective.values_from_scales(aligner.modalities, heads.log_scales).items():
        yield f"{OBJECTIVE}{name}", value


def sample_flops(model: ModelConfig) -> TokenFlops:
    """FLOPs of one sample, forward and backward: three times those of a forward pass.

    A backward pass has two products for each of the forward pass: of inputs and of weights. The
    forward pass is counted on a model without memory.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from headway.model.aligner import Aligner

    aligner = model.aligner_settings
    with torch.device("meta"):
        module = Aligner(model)
        media = {}
        for name, encoder in aligner.encoders.items():
            if encoder.TRAINS:
                tower_input = encoder.input_of(name)
                shape = tower_input.shape
                dtype = tower_input.dtype
            else:
                shape = (1, aligner.widths[name])
                dtype = "float32"
            media[name] = torch.zeros(1, *shape, dtype=getattr(torch, dtype))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(media, torch.ones(1, len(aligner.encoders), dtype=torch.bool))
    return TokenFlops(3.0 * counter.get_total_flops(), 0.0, 0.0)


# By its settings as text: two configs with the same settings share one loaded encoder.
@lru_cache(maxsize=8)
def _built(kind: type[EncoderConfig], settings: str, modality: str) -> FrozenMediaEncoder:
    return kind.model_validate_json(settings).build(modality)


def frozen_encoder(config: EncoderConfig, modality: str) -> FrozenMediaEncoder:
    """The frozen encoder of a config, loaded once."""
    return _built(type(config), config.model_dump_json(), modality)


def row_makers(aligner: AlignerConfig, device: torch.device | None = None) -> list[RowMaker]:
    """What makes the rows of each modality's table."""
    makers: list[RowMaker] = []
    for modality, config in aligner.encoders.items():
        if config.TRAINS:
            makers.append(InputRows(modality, config.input_of(modality)))
            continue
        encoder = frozen_encoder(config, modality)
        if device is not None:
            encoder.to(device)
        makers.append(EncoderRows(encoder))
    return makers
