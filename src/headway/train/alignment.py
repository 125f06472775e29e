"""Runs that align modalities: a recipe with `model.aligner` comes in; its checked form, its open samples and its first values go out.

Rows are samples (data/samples.py), so the loader, the engines, checkpoints and the loop are those of language models. What does not apply
to an aligner is refused here by its key, before anything is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.data.config import DataConfig, SourceConfig, default_cache_dir
from headway.data.open import OpenData, sets_of, with_valid
from headway.data.samples import SEQ_LEN, SampleSource
from headway.errors import ConfigError
from headway.media.sources import source_files
from headway.model.aligner_config import AlignerConfig
from headway.model.config import ModelConfig
from headway.model.encoders.rows import frozen_encoder, row_makers
from headway.model.flops import TokenFlops
from headway.model.loading.aligner_file import read_aligner
from headway.optim.groups import OBJECTIVE
from headway.prepare.detect import local_path
from headway.prepare.features import SampleSet, prepare_samples, read_samples
from headway.runtime.process import from_environment
from headway.store.checksums import Checksums
from headway.tasks.contrastive import LOG_SCALE, recall_ceiling
from headway.tasks.contrastive import Config as ContrastiveConfig
from headway.tokenizer.chat_template import FALLBACK_TEMPLATE

if TYPE_CHECKING:
    import torch

    from headway.model.encoders.base import FrozenMediaEncoder
    from headway.store.source import TokenSource
    from headway.tasks.base import TaskConfig
    from headway.train.config import Recipe

log = logging.getLogger("headway")

READS = "captions"
"""The kind of records that an aligner reads."""
VOCAB = 1
"""Every sample is the same token."""


def resolve_aligner(recipe: Recipe) -> Recipe:
    """The recipe with the widths of frozen encoders and the form of its rows; what cannot work is a ConfigError."""
    aligner, objective = recipe.model.aligner, recipe.objective
    if aligner is None:
        raise ConfigError(
            "objective.kind is contrastive, but the recipe has no model.aligner. Give its encoders (recipe multimodal/align)."
        )
    if not isinstance(objective, ContrastiveConfig):
        raise ConfigError(
            f"model.aligner is given with objective.kind {objective.kind}; an aligner is trained by contrastive. Set it."
        )
    objective, left_out = objective.without_absent(aligner.modalities)
    if left_out:
        say = log.info if from_environment().is_first else log.debug
        say(
            "objective.pairs: %s left out, because model.aligner.encoders has %s",
            ", ".join(left_out),
            ", ".join(aligner.modalities),
        )
    objective.check(aligner.modalities)
    _refuse(recipe)
    frozen = {name: one for name, one in aligner.encoders.items() if not one.TRAINS}
    widths = {name: _flat_width(frozen_encoder(one, name)) for name, one in frozen.items()}
    for name, width in aligner.widths.items():
        if widths.get(name) != width:
            found = (
                f"gives {widths[name]}"
                if name in widths
                else "is not frozen"
                if name in aligner.encoders
                else "does not exist"
            )
            raise ConfigError(
                f"model.aligner.widths says {width} for {name}; the {name} encoder {found}. Leave widths out."
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
        "data": _data(recipe.data),
        "objective": objective,
    }
    if recipe.steps is None and recipe.epochs is None:
        changes["epochs"] = 1.0
    return recipe.model_copy(update=changes)


def _refuse(recipe: Recipe) -> None:
    """Refuse settings that have no meaning for an aligner."""
    parallel, remedy = recipe.parallel, "Remove it"
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
    for key, (given, what) in refused.items():
        if given:
            raise ConfigError(
                f"{key} is given; it does not apply to an aligner (model.aligner). {what}."
            )
    if recipe.data.train is None:
        raise ConfigError(
            "data.train is null; an aligner needs captions with pictures or sounds. Give data.train: [captions.jsonl]."
        )


def _data(config: DataConfig) -> DataConfig:
    """Rows of one sample each, from sources of captions."""
    if config.seq_len not in (SEQ_LEN, DataConfig().seq_len) or config.packing not in (
        "pad",
        DataConfig().packing,
    ):
        raise ConfigError(
            "data.seq_len and data.packing are for tokens; a row of an aligner is one sample. Leave them out."
        )

    def captions(one: SourceConfig) -> SourceConfig:
        if one.kind not in ("auto", READS):
            raise ConfigError(
                f"data: {one.path} has kind {one.kind}; an aligner reads captions. Set kind: captions, or leave it out."
            )
        # Captions have no turns. The template is stated as in the run folders of earlier releases.
        changes = {"kind": READS, "chat_template": FALLBACK_TEMPLATE}
        return SourceConfig.model_validate({**one.model_dump(exclude_unset=True), **changes})

    changes: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "packing": "pad",
        "train": tuple(captions(one) for one in config.train or ()),
    }
    if config.valid is not None and config.valid.sets is not None:
        sets = {
            name: tuple(captions(one) for one in many)
            for name, many in sets_of(config.valid.sets).items()
        }
        changes["valid"] = config.valid.model_copy(update={"sets": sets})
    return config.model_copy(update=changes)


def _flat_width(encoder: FrozenMediaEncoder) -> int:
    if encoder.tokens != 1:
        raise ConfigError(
            f"model.aligner.encoders.{encoder.modality} gives {encoder.tokens} vectors; alignment needs one. Set pool."
        )
    return encoder.width


def open_samples(
    recipe: Recipe,
    aligner: AlignerConfig,
    device: torch.device | None = None,
    check_media: bool = False,
) -> OpenData:
    """The samples of a recipe, their tables made where the cache lacks them. `check_media`: look at every media file even if they are
    known."""
    config = recipe.data
    objective = recipe.objective
    assert isinstance(objective, ContrastiveConfig), "checked by resolve_aligner"
    cache_dir = config.cache_dir or default_cache_dir()
    makers = row_makers(aligner, device)

    def opened(one: SourceConfig) -> tuple[SourceConfig, TokenSource]:
        path = local_path(one.path, config.cache_dir)
        found = prepare_samples(
            one.path,
            read_samples(path, aligner.modalities),
            makers,
            cache_dir,
            skip_bad=one.drop_bad,
            files=source_files(path),
            check_media=check_media,
        )
        _check_pairs(found)
        source = source_of(found)
        _say_ceiling(source, objective)
        return one, source

    sets = sets_of(config.valid.sets) if config.valid is not None and config.valid.sets else {}
    valid = {name: [opened(one) for one in many] for name, many in sets.items()}
    return with_valid(
        config, [opened(one) for one in config.train or ()], valid, Checksums(cache_dir)
    )


def source_of(samples: SampleSet) -> SampleSource:
    """Samples as the loader reads them."""
    return SampleSource(
        samples.name, samples.modalities, samples.rows, samples.tables, samples.content_key
    )


def _say_ceiling(source: SampleSource, objective: ContrastiveConfig) -> None:
    """Say what equal captions, pictures or sounds mean for recall, and for the loss, before training begins."""
    contents = source.contents(np.arange(source.num_documents))
    for first, second in permutations(range(len(source.modalities)), 2):
        both = (contents[:, first] >= 0) & (contents[:, second] >= 0)
        if both.sum() < 2:
            continue
        ceiling = recall_ceiling(contents[both, first].tolist(), contents[both, second].tolist())
        if ceiling < 1 and from_environment().is_first:
            names = f"{source.modalities[first]}_to_{source.modalities[second]}"
            treated = (
                "not compared with each other"
                if objective.equal_items == "ignore"
                else "wrong answers for each other"
            )
            log.info(
                "%s: some samples have equal items, so recall at 1 of %s over all %d cannot exceed %.1f %%; in the loss they are %s "
                "(objective.equal_items)",
                source.name, names, int(both.sum()), 100 * ceiling, treated,
            )  # fmt: skip


def _check_pairs(samples: SampleSet) -> None:
    if not len(samples) or int(((samples.rows >= 0).sum(1) >= 2).sum()) < 2:
        wanted = ", ".join(samples.modalities)
        raise ConfigError(
            f"data: {samples.name} has fewer than two samples with two modalities or more of {wanted}; nothing can be aligned."
        )


def first_heads(
    aligner: AlignerConfig, objective: TaskConfig, shapes: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The heads and the trained scale of `model.aligner.weights`, if it is given."""
    import torch

    if aligner.weights is None:
        return
    heads = read_aligner(aligner.weights)
    yield from ((name, value) for name, value in heads.tensors.items() if name in shapes)
    name = f"{OBJECTIVE}{LOG_SCALE}"
    if name in shapes and isinstance(objective, ContrastiveConfig):
        order = list(objective.log_scale) if isinstance(objective.log_scale, dict) else None
        scales = [heads.log_scales[one] for one in (order or aligner.modalities)]
        yield name, torch.tensor(scales if order else sum(scales) / len(scales), device="cpu")


def sample_flops(model: ModelConfig) -> TokenFlops:
    """FLOPs of one sample, forward and backward: three times those of a forward pass, counted on a model without memory."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from headway.model.aligner import Aligner

    aligner = model.aligner
    assert aligner is not None
    with torch.device("meta"):
        module = Aligner(model)
        media = {}
        for name, one in aligner.encoders.items():
            shape, dtype = (
                (one.input_of(name).shape, one.input_of(name).dtype)
                if one.TRAINS
                else ((1, aligner.widths[name]), "float32")
            )
            media[name] = torch.zeros(1, *shape, dtype=getattr(torch, dtype))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(media, torch.ones(1, len(aligner.encoders), dtype=torch.bool))
    return TokenFlops(3.0 * counter.get_total_flops(), 0.0, 0.0)
