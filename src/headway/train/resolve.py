"""A recipe comes in; the recipe with tokenizer, model shape and vocabulary read from the files it names goes out.

recipe.yaml in a run folder is the resolved recipe, so that two starts of a run can be compared.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headway.checkpoint.stored_model import StoredModel, find_model
from headway.errors import CheckpointError, ConfigError, DataError
from headway.model.adapter.stored import StoredAdapter
from headway.model.config import HeadGatesConfig, ModelConfig
from headway.model.families.base import WRAPPED, classifier_of, family_of
from headway.model.head_masks.file import find_masks, read_masks, read_table
from headway.model.head_masks.masks import HeadMasks
from headway.model.layout import DECIDED
from headway.model.upcycle import upcycled_config, upcycled_weights
from headway.prepare.detect import with_kinds
from headway.runtime.process import from_environment
from headway.runtime.s3 import StoreDown
from headway.text.hub import is_hub_id, local_or_hub
from headway.tokenizer.load import Tokenizer, load_tokenizer
from headway.train.alignment import resolve_aligner
from headway.train.config import Recipe
from headway.train.run_form import run_form
from headway.train.wrapped import check_wrapped, wrapped_shape, wrapping_of

if TYPE_CHECKING:
    from headway.train.multimodal import MediaPlan

log = logging.getLogger("headway")

GENERATED_VOCAB = 512
GENERATED_STEPS = 100
COMPUTES = tuple(
    sorted(
        set(ModelConfig.model_fields)
        - {
            "preset",
            "max_seq_len",
            "dropout",
            "embed_grad_scale",
            "init_std",
            "media",
            "score_head",
        }
    )
)
"""Fields of a model's shape that decide what its layers compute of text."""
SAID_ELSEWHERE = ("head_gates", "experts", "vocab_size", "family", "hf_config", "trust_remote_code")
"""Those that a run reports in other lines, or that are no arithmetic."""


@dataclass(frozen=True)
class Resolved:
    """A recipe and what it names."""

    recipe: Recipe
    model: ModelConfig
    tokenizer: Tokenizer | None
    tokenizer_path: Path | None
    weights: StoredModel | None
    """Where the weights come from; None = random."""
    log_alpha: tuple[tuple[float, ...], ...] | None = None
    """Initial values of the head gates, from a mask file."""
    media: MediaPlan | None = None
    """The media inputs of the model; None = text alone."""

    @property
    def continued(self) -> StoredAdapter | None:
        """The adapter of the given weights that is trained further; None if there is no adapter or it is merged."""
        carried, wanted = (
            None if self.weights is None else self.weights.adapter,
            self.recipe.adapter,
        )
        if (
            carried is None
            or carried.patterned
            or wanted is None
            or self.recipe.init.merge
            or not wanted.same_form(carried.config, self.model)
        ):
            return None
        return carried

    @property
    def base(self) -> str | None:
        """The folder or hub id of the base model of the recipe's adapter; None if it does not exist in this form."""
        if self.weights is None or any(
            getattr(self.model, n) != getattr(self.weights.config, n) for n in COMPUTES
        ):
            return None
        carried, place = self.continued, self.weights.path
        if carried is not None:
            return carried.base
        source = self.recipe.init.source
        if (
            source is not None
            and self.recipe.data.cache_dir is None
            and "@" not in source
            and is_hub_id(source)
        ):
            return source  # others know the model by its name, and so does PEFT
        return str(place.resolve() if isinstance(place, Path) else place)


def resolve(recipe: Recipe, given: StoredModel | None = None) -> Resolved:
    """Read what a recipe names; anything missing or contradictory is a ConfigError. `given` weights override init.from."""
    for tracker in recipe.track:
        tracker.check()
    if recipe.objective.needs.head == "vectors" or not run_form(recipe.model).has_targets:
        aligned = resolve_aligner(recipe)
        return Resolved(aligned, aligned.model, None, None, None)
    if recipe.model.media is not None and recipe.multimodal is None:
        raise ConfigError(
            "model.media is written by a run with media inputs; it is no setting. Remove it, or set multimodal."
        )
    weights = _find_weights(recipe) if given is None else given
    weights = None if weights is None else weights.of_family(recipe.model.family)
    check_wrapped(recipe, None if weights is None else weights.config)
    weights = _upcycled(recipe, weights)
    path = _find_tokenizer(recipe) or (weights.tokenizer_folder if weights else None)
    tokenizer = load_tokenizer(path) if path is not None else None
    model = _with_head(recipe, _shape(recipe, weights, tokenizer))
    masks, log_alpha = _masks(recipe)
    media = _media(recipe, model)
    model = _with(
        model,
        head_gates=_head_gates(recipe, weights, masks),
        media=None if media is None else media.shape,
    )
    if masks is not None:
        masks.check(model, f"init.masks={recipe.init.masks}")
    family_of(model.family)
    if recipe.adapter is not None:
        recipe.adapter.modules(model)
    if recipe.init.merge and (weights is None or weights.adapter is None):
        raise ConfigError(
            f"init.merge is true, but init.from={recipe.init.source} carries no adapter. Leave it out."
        )
    if recipe.data.seq_len > model.max_seq_len:
        raise ConfigError(
            f"data.seq_len is {recipe.data.seq_len}; it must not exceed model.max_seq_len={model.max_seq_len}. Lower it."
        )
    recipe.parallel.check_rows(model, recipe.data.seq_len, recipe.objective, recipe.adapter)
    say = log.info if from_environment().is_first else log.debug
    if weights is not None and (change := describe_change(weights.config, model)):
        say(f"the recipe changes the model of init.from={recipe.init.source}: {change}")
    changes: dict[str, object] = {
        "model": model,
        "data": with_kinds(recipe.data, tokenizer, say, recipe.objective.reads),
    }
    if recipe.steps is None and recipe.epochs is None:
        changes |= {"steps": GENERATED_STEPS} if recipe.data.train is None else {"epochs": 1.0}
    return Resolved(
        recipe.model_copy(update=changes), model, tokenizer, path, weights, log_alpha, media
    )


def describe_change(stored: ModelConfig, model: ModelConfig) -> str:
    """What a recipe makes other in the layers of given weights: `rope_theta 10000 -> 1000000`; empty where nothing."""
    changed = [
        name
        for name in COMPUTES
        if name not in SAID_ELSEWHERE and getattr(model, name) != getattr(stored, name)
    ]
    return ", ".join(
        f"{name} {_written(getattr(stored, name))} -> {_written(getattr(model, name))}"
        for name in changed
    )


def _written(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _media(recipe: Recipe, model: ModelConfig) -> MediaPlan | None:
    """The media inputs of a recipe's model."""
    if recipe.multimodal is None:
        return None
    from headway.train.multimodal import plan_media

    if "multimodal" not in recipe.objective.reads:
        raise ConfigError(
            f"multimodal is given with objective.kind {recipe.objective.kind}; media are inputs of next_token. Remove one."
        )
    if "." in model.family:
        raise ConfigError(
            f"multimodal is given with model.family {model.family}; media are inputs of headway's own families."
        )
    return plan_media(recipe.multimodal, model.hidden_size)


def _find_weights(recipe: Recipe) -> StoredModel | None:
    if recipe.init.source is None:
        return None
    try:
        found = find_model(recipe.init.source, recipe.data.cache_dir, wrapping_of(recipe))
    except StoreDown:
        raise  # a later start may reach the store
    except (ConfigError, DataError, CheckpointError) as problem:
        raise ConfigError(f"init.from: {problem}") from None
    if recipe.init.adapter is None:
        return found
    try:
        return found.with_adapter(Path(recipe.init.adapter))
    except ConfigError as problem:
        raise ConfigError(f"init.adapter: {problem}") from None


def _find_tokenizer(recipe: Recipe) -> Path | None:
    """The folder or file of the recipe's tokenizer; a hub id is downloaded."""
    given = recipe.tokenizer
    if given is None or given.exists():
        return given
    if not is_hub_id(str(given)):
        raise ConfigError(
            f"tokenizer is {str(given)!r}; there is no such file or folder. `headway tokenizer train` makes one."
        )
    try:
        return local_or_hub(given, tokenizer=True, cache_dir=recipe.data.cache_dir)
    except (ConfigError, DataError) as problem:
        raise ConfigError(f"tokenizer: {problem}") from None


def _shape(recipe: Recipe, weights: StoredModel | None, tokenizer: Tokenizer | None) -> ModelConfig:
    """The model shape: the recipe's settings over those of the given weights, and the vocabulary."""
    model = recipe.model
    if recipe.model.family == WRAPPED:
        unknown = GENERATED_VOCAB if tokenizer is None else tokenizer.model_vocab_size
        model = wrapped_shape(recipe, None if weights is None else weights.config, unknown)
    elif weights is not None:
        given = {
            name: getattr(model, name)
            for name in model.model_fields_set
            if getattr(model, name) is not None
        }
        model = _with(weights.config, **{**given, "experts": _experts(recipe, weights)})
        changed = [
            n
            for n in (
                "hidden_size",
                "num_layers",
                "num_heads",
                "kv_heads",
                "head_size",
                "ffn_size",
                "vocab_size",
                "latent_attention",
            )
            if _differs(model, weights, n)
        ]
        if changed:
            pairs = ", ".join(
                f"{name} is {getattr(model, name)} and the weights have {getattr(weights.config, name)}"
                for name in changed
            )
            raise ConfigError(
                f"model does not fit init.from={recipe.init.source}: {pairs}. Leave these settings out."
            )
    vocab = tokenizer.model_vocab_size if tokenizer is not None else GENERATED_VOCAB
    model = _with(model, vocab_size=vocab if model.vocab_size is None else model.vocab_size)
    if tokenizer is not None and model.vocab < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {model.vocab}; the tokenizer has {tokenizer.vocab_size} ids. Leave it out, or give at least that."
        )
    return model


def _with_head(recipe: Recipe, model: ModelConfig) -> ModelConfig:
    """The shape with the head that the objective trains; a reward model trains no other objective."""
    if recipe.objective.needs.head == "scores":
        model = _with(model, score_head=True)
        classifier_of(model)
    elif model.score_head:
        source = recipe.init.source or "the stage before"
        what = (
            "model.score_head is true"
            if recipe.model.score_head
            else f"init.from: {source} is a reward model"
        )
        raise ConfigError(
            f"{what}, and objective {recipe.objective.kind} trains language models. Use objective reward, or another model."
        )
    return model


def _upcycled(recipe: Recipe, weights: StoredModel | None) -> StoredModel | None:
    """The weights a run starts from; with init.upcycle, a mixture of the dense model they are."""
    upcycle = recipe.init.upcycle
    if upcycle is None:
        return weights
    if weights is None:
        raise ConfigError(
            "init.upcycle is given without init.from, which names the dense model. Give init.from, or set model.experts."
        )
    if recipe.adapter is not None:
        raise ConfigError(
            "init.upcycle is given with adapter; an adapter would have no base on disk. Remove one of them."
        )
    if recipe.init.contents != ("model",):
        raise ConfigError(
            "init.upcycle is given with init.content; a dense model's optimizer state does not fit. Use content model."
        )
    config = upcycled_config(weights.config, upcycle, recipe.model.experts)
    return replace(
        weights,
        config=config,
        weights=upcycled_weights(weights.weights, config, upcycle, recipe.seed),
        adapter=None,
    )


def _experts(recipe: Recipe, weights: StoredModel) -> dict[str, Any] | None:
    """Settings of the experts: those of the weights, with what the recipe says of balance on top; their shapes must fit."""
    given, stored = recipe.model.experts, weights.config.experts
    if given is None:
        return None if stored is None else stored.model_dump()
    if stored is None:
        raise ConfigError(
            f"model.experts is given, but the model in init.from={recipe.init.source} has none. Use init.upcycle to add them."
        )
    merged = stored.model_dump() | {key: getattr(given, key) for key in given.model_fields_set}
    for key in ("num", "ffn_size", "shared_ffn_size", "first_dense", "every", "num_groups"):
        if merged[key] != getattr(stored, key) and not (
            key == "ffn_size" and merged[key] == weights.config.expert_size
        ):
            raise ConfigError(
                f"model.experts.{key} is {merged[key]} and the weights have {getattr(stored, key)}. Leave it out."
            )
    if stored.bias_rate is not None and merged["bias_rate"] is None:
        raise ConfigError(
            "model.experts.bias_rate is null, but the weights have a bias for it. Leave it out, or use 0 to keep it fixed."
        )
    return merged


def _masks(recipe: Recipe) -> tuple[HeadMasks | None, tuple[tuple[float, ...], ...] | None]:
    """The mask file of a recipe, and the log_alpha it gives."""
    path, sparsity = recipe.init.masks, recipe.init.masks_sparsity
    if path is None:
        return None, None
    masks = read_masks(path, sparsity)
    values = read_table(find_masks(path)) if sparsity is None else masks.full
    return masks, tuple(tuple(DECIDED * (2 * float(value) - 1) for value in row) for row in values)


def _head_gates(
    recipe: Recipe, weights: StoredModel | None, masks: HeadMasks | None
) -> HeadGatesConfig | None:
    """Settings of the head gates: of the weights, a mask file, the recipe's model and the objective; later ones override earlier ones."""
    given, trained = recipe.model.head_gates, recipe.objective.needs.gates
    explicit = given.model_fields_set if given is not None else set[str]()
    inherited = None if weights is None or leaves_gates(recipe) else weights.config.head_gates
    if given is None and trained is None and masks is None and inherited is None:
        return None
    fields = {} if inherited is None else inherited.model_dump()
    for key in ("window", "sinks"):
        from_masks = None if masks is None else getattr(masks, key)
        if from_masks is not None:
            fields[key] = from_masks
    fields |= {} if given is None else {key: getattr(given, key) for key in explicit}
    for key in ("window", "sinks"):
        wanted = None if trained is None else getattr(trained, key)
        if wanted is not None and key in explicit and wanted != fields[key]:
            raise ConfigError(
                f"objective.{key} is {wanted} and model.head_gates.{key} is {fields[key]}; set one of them only."
            )
        if wanted is not None:
            fields[key] = wanted
    return HeadGatesConfig(**fields)


def leaves_gates(recipe: Recipe) -> bool:
    """Whether a recipe says `head_gates: null`, which drops the gates of init.from."""
    return recipe.model.head_gates is None and "head_gates" in recipe.model.model_fields_set


def _with(model: ModelConfig, **changes: Any) -> ModelConfig:
    """A shape with some fields changed; an invalid combination is a ConfigError."""
    try:
        return model.with_(**changes)
    except ValidationError as error:
        reasons = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        raise ConfigError(f"model: {reasons}.") from None


def _differs(model: ModelConfig, weights: StoredModel, name: str) -> bool:
    return getattr(model, name) != getattr(weights.config, name)
