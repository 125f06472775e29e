"""A recipe comes in; the recipe with tokenizer, model shape and vocabulary read from the files it
names goes out.

recipe.yaml in a run folder is the resolved recipe, so that two starts of a run can be compared.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.stored_model import StoredModel, find_model
from headway.errors import CheckpointError, ConfigError, DataError, ObjectStoreUnavailable
from headway.model.config import HeadGatesConfig, ModelConfig
from headway.model.families.base import WRAPPED, classifier_of, family_of
from headway.model.layout import DECIDED
from headway.prepare.detect import with_kinds
from headway.records.base import record_kind
from headway.rollout.config import RolloutConfig
from headway.runtime.process import from_environment
from headway.text.hub import is_hub_id, local_or_hub
from headway.tokenizer.load import Tokenizer, load_tokenizer
from headway.train.config import Recipe
from headway.train.wrapped import check_wrapped, wrapped_shape, wrapping_of

if TYPE_CHECKING:
    from headway.model.adapter.stored import StoredAdapter
    from headway.model.head_masks.masks import HeadMasks
    from headway.train.multimodal import MediaPlan, VisionPlan

log = logging.getLogger("headway")

GENERATED_VOCAB = 512
"""Vocabulary of a model that trains on generated data, without a tokenizer."""
GENERATED_STEPS = 100
"""Length of a run over generated data, which has no epochs."""
COMPUTED_FIELDS = tuple(
    sorted(
        set(ModelConfig.model_fields)
        - {
            "preset",
            "max_seq_len",
            "dropout",
            "embed_grad_scale",
            "init_std",
            "media",
            "vision",
            "score_head",
        }
    )
)
"""Fields of a model's shape that decide what its layers compute of text."""
REPORTED_ELSEWHERE = (
    "head_gates",
    "experts",
    "vocab_size",
    "family",
    "hf_config",
    "trust_remote_code",
)
"""Those that a run reports in other lines, or that are no arithmetic."""
SIZES = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "kv_heads",
    "head_size",
    "ffn_size",
    "vocab_size",
    "latent_attention",
    "linear_attention",
    "short_convolution",
    "state_space",
    "attention_gate",
)
"""Fields that decide shapes of parameters: a recipe may not change them in given weights."""
EXPERT_SIZES = (
    "num",
    "ffn_size",
    "shared_ffn_size",
    "shared_gate",
    "first_dense",
    "every",
    "num_groups",
)
"""The same, of the section `experts`."""


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
    vision: VisionPlan | None = None
    """The vision tower of the model; None = text alone."""

    @property
    def continued(self) -> StoredAdapter | None:
        """The adapter of the given weights that is trained further.

        None if there is no adapter or it is merged.
        """
        wanted = self.recipe.adapter
        if self.weights is None or wanted is None or self.recipe.init.merge:
            return None
        carried = self.weights.adapter
        # With ranks or alphas that differ between layers it has a form that no recipe can state.
        if carried is None or carried.patterned:
            return None
        if not wanted.same_form(carried.config, self.model):
            return None
        return carried

    @property
    def base(self) -> str | None:
        """The folder or hub id of the base model of the recipe's adapter.

        None if it does not exist in this form.
        """
        if self.weights is None:
            return None
        # With other arithmetic than the stored model's, no model on disk is the adapter's base.
        for name in COMPUTED_FIELDS:
            if getattr(self.model, name) != getattr(self.weights.config, name):
                return None

        carried = self.continued
        if carried is not None:
            return carried.base

        # A hub id means the same on every machine, and PEFT resolves it. One with a revision, or
        # in a cache of its own, would resolve to something else there.
        source = self.recipe.init.source
        if (
            source is not None
            and self.recipe.data.cache_dir is None
            and "@" not in source
            and is_hub_id(source)
        ):
            return source

        location = self.weights.path
        if isinstance(location, Path):
            location = location.resolve()
        return str(location)


def resolve(recipe: Recipe, previous: StoredModel | None = None) -> Resolved:
    """Read what a recipe names; anything missing or contradictory is a ConfigError.

    `previous` is the model of the stage before this one; it overrides init.from.
    """
    for tracker in recipe.track:
        tracker.check()

    # Either of the two asks for an aligner; `resolve_aligner` refuses one without the other.
    if "vectors" in (recipe.objective.needs.head, recipe.model.head):
        from headway.train.alignment import resolve_aligner

        aligned = resolve_aligner(recipe)
        return Resolved(aligned, aligned.model, None, None, None)
    for key in ("media", "vision"):
        if getattr(recipe.model, key) is not None and recipe.multimodal is None:
            raise ConfigError(
                f"model.{key} is written by a run with media inputs; it is no setting. "
                "Remove it, or set multimodal."
            )

    if recipe.objective.needs.rollouts:
        from headway.train.rollout_check import check_rollouts

        check_rollouts(recipe)
    else:
        _refuse_rollout_settings(recipe)

    # Where the run starts from.
    weights = previous
    if weights is None:
        weights = _find_weights(recipe)
    if weights is not None:
        weights = weights.of_family(recipe.model.family)
    check_wrapped(recipe, None if weights is None else weights.config)
    weights = _upcycle(recipe, weights)
    weights = _with_tower(recipe, weights)

    tokenizer_path = _find_tokenizer(recipe)
    if tokenizer_path is None and weights is not None:
        tokenizer_path = weights.tokenizer_folder
    tokenizer = None
    if tokenizer_path is not None:
        tokenizer = load_tokenizer(tokenizer_path)

    # The shape comes first, because masks and media are checked against it.
    model = _with_head(recipe, _model_shape(recipe, weights, tokenizer))
    masks, log_alpha = _read_masks(recipe)
    media = _plan_media(recipe, model)
    vision = _plan_vision(recipe, model)
    model = _changed_model(
        model,
        head_gates=_merge_head_gates(recipe, weights, masks),
        media=None if media is None else media.shape,
        vision=None if vision is None else vision.shape,
    )

    # What can be refused without opening data is refused now.
    if masks is not None:
        masks.check(model, f"init.masks={recipe.init.masks}")
    family_of(model.family)
    if recipe.adapter is not None:
        recipe.adapter.modules(model)
    if recipe.init.merge and (weights is None or weights.adapter is None):
        raise ConfigError(
            f"init.merge is true, but init.from={recipe.init.source} carries no adapter. "
            "Leave it out."
        )
    if recipe.data.seq_len > model.max_seq_len:
        raise ConfigError(
            f"data.seq_len is {recipe.data.seq_len}; "
            f"it must not exceed model.max_seq_len={model.max_seq_len}. Lower it."
        )
    if recipe.objective.needs.rollouts:
        from headway.train.rollout_check import check_exact_model

        check_exact_model(recipe, model)
    recipe.parallel.check_rows(model, recipe.data.seq_len, recipe.objective, recipe.adapter)

    # Every rank resolves the recipe; one of them says what it found.
    say = log.info if from_environment().is_first else log.debug
    if weights is not None and (change := describe_change(weights.config, model)):
        say(f"the recipe changes the model of init.from={recipe.init.source}: {change}")

    changes: dict[str, object] = {
        "model": model,
        "data": with_kinds(recipe.data, tokenizer, say, recipe.objective.reads),
    }
    if recipe.steps is None and recipe.epochs is None:
        if recipe.data.train is None:
            changes["steps"] = GENERATED_STEPS
        else:
            changes["epochs"] = 1.0
    if recipe.objective.needs.rollouts and recipe.checkpoint.metric == CheckpointConfig().metric:
        # Held-out prompts are answered and judged: such a validation has no loss, and the default
        # would end the run at the first one.
        changes["checkpoint"] = recipe.checkpoint.model_copy(update={"metric": "reward"})
    return Resolved(
        recipe.model_copy(update=changes),
        model,
        tokenizer,
        tokenizer_path,
        weights,
        log_alpha,
        media,
        vision,
    )


def _refuse_rollout_settings(recipe: Recipe) -> None:
    """Refuse settings of rollouts in a run that samples no answers."""
    # By value: the recipe in a run folder states every section.
    is_set = {"reward": bool(recipe.reward), "rollout": recipe.rollout != RolloutConfig()}
    for name, states in is_set.items():
        if states:
            raise ConfigError(
                f"{name} is set, but objective {recipe.objective.kind} samples no answers. "
                "Use objective.kind=grpo, or remove it."
            )


def describe_change(stored: ModelConfig, model: ModelConfig) -> str:
    """What a recipe changes in the layers of given weights: `rope_theta 10000 -> 1000000`.

    Empty if nothing.
    """
    changes: list[str] = []
    for name in COMPUTED_FIELDS:
        before = getattr(stored, name)
        after = getattr(model, name)
        if name not in REPORTED_ELSEWHERE and before != after:
            changes.append(f"{name} {_as_text(before)} -> {_as_text(after)}")
    return ", ".join(changes)


def _as_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, tuple):
        return str(list(value))
    return str(value)


def _plan_media(recipe: Recipe, model: ModelConfig) -> MediaPlan | None:
    """The media inputs of a recipe's model."""
    if recipe.multimodal is None:
        return None

    _check_media_task(recipe)
    if recipe.multimodal.native is not None:
        return None
    if "." in model.family:
        raise ConfigError(
            f"multimodal is given with model.family {model.family}; "
            "media are inputs of headway's own families."
        )

    from headway.train.multimodal import plan_media

    return plan_media(recipe.multimodal, model.hidden_size)


def _plan_vision(recipe: Recipe, model: ModelConfig) -> VisionPlan | None:
    """The vision tower of a recipe's model."""
    if recipe.multimodal is None or recipe.multimodal.native is None:
        return None

    from headway.train.multimodal import plan_vision

    assert model.vision is not None, "_with_tower refuses weights without a tower"
    return plan_vision(recipe.multimodal.native, model.vision, recipe.data.seq_len)


def _with_tower(recipe: Recipe, weights: StoredModel | None) -> StoredModel | None:
    """The weights a run starts from, with their vision tower where the recipe reads pictures
    through it."""
    if recipe.multimodal is None or recipe.multimodal.native is None:
        return weights
    if weights is None:
        raise ConfigError(
            "multimodal.native is given without init.from, which names the model that sees. "
            "Give init.from."
        )
    try:
        return weights.with_vision()
    except (ConfigError, CheckpointError) as problem:
        raise ConfigError(f"multimodal.native: {problem}") from None


def _check_media_task(recipe: Recipe) -> None:
    """Refuse a task that reads no records with media."""
    kinds = [record_kind(name) for name in recipe.objective.reads]
    if not any(kind.holds_media and kind.has_tokens for kind in kinds):
        raise ConfigError(
            f"multimodal is given with objective.kind {recipe.objective.kind}; "
            "media are inputs of next_token. Remove one."
        )


def _find_weights(recipe: Recipe) -> StoredModel | None:
    """The model of init.from, with the adapter of init.adapter; None = random weights."""
    if recipe.init.source is None:
        return None

    try:
        model = find_model(recipe.init.source, recipe.data.cache_dir, wrapping_of(recipe))
    except ObjectStoreUnavailable:
        raise  # a later start may reach the store
    except (ConfigError, DataError, CheckpointError) as problem:
        raise ConfigError(f"init.from: {problem}") from None
    if recipe.init.adapter is None:
        return model
    try:
        return model.with_adapter(Path(recipe.init.adapter))
    except ConfigError as problem:
        raise ConfigError(f"init.adapter: {problem}") from None


def _find_tokenizer(recipe: Recipe) -> Path | None:
    """The folder or file of the recipe's tokenizer; a hub id is downloaded."""
    path = recipe.tokenizer
    if path is None or path.exists():
        return path
    if not is_hub_id(str(path)):
        raise ConfigError(
            f"tokenizer is {str(path)!r}; there is no such file or folder. "
            "`headway tokenizer train` makes one."
        )
    try:
        return local_or_hub(path, tokenizer=True, cache_dir=recipe.data.cache_dir)
    except (ConfigError, DataError) as problem:
        raise ConfigError(f"tokenizer: {problem}") from None


def _model_shape(
    recipe: Recipe, weights: StoredModel | None, tokenizer: Tokenizer | None
) -> ModelConfig:
    """The model shape: the recipe's settings over those of the weights, and the vocabulary."""
    model = recipe.model
    # Rounded up by the tokenizer: a model may have more embeddings than the tokenizer has ids.
    vocab_size = GENERATED_VOCAB
    if tokenizer is not None:
        vocab_size = tokenizer.model_vocab_size

    if recipe.model.family == WRAPPED:
        model = wrapped_shape(recipe, None if weights is None else weights.config, vocab_size)
    elif weights is not None:
        settings = {
            name: getattr(model, name)
            for name in model.model_fields_set
            if getattr(model, name) is not None
        }
        model = _changed_model(
            weights.config, **{**settings, "experts": _merge_experts(recipe, weights)}
        )
        problems: list[str] = []
        for name in SIZES:
            wanted = getattr(model, name)
            stored = getattr(weights.config, name)
            if wanted != stored:
                problems.append(f"{name} is {wanted} and the weights have {stored}")
        if problems:
            raise ConfigError(
                f"model does not fit init.from={recipe.init.source}: {', '.join(problems)}. "
                "Leave these settings out."
            )

    if model.vocab_size is not None:
        vocab_size = model.vocab_size
    model = _changed_model(model, vocab_size=vocab_size)
    if tokenizer is not None and model.vocab < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {model.vocab}; the tokenizer has {tokenizer.vocab_size} ids. "
            "Leave it out, or give at least that."
        )
    return model


def _with_head(recipe: Recipe, model: ModelConfig) -> ModelConfig:
    """The shape with the head that the objective trains.

    A reward model trains no other objective.
    """
    if recipe.objective.needs.head == "scores":
        model = _changed_model(model, score_head=True)
        classifier_of(model)
    elif model.score_head:
        source = recipe.init.source or "the stage before"
        origin = "model.score_head is true"
        if not recipe.model.score_head:
            origin = f"init.from: {source} is a reward model"
        raise ConfigError(
            f"{origin}, and objective {recipe.objective.kind} trains language models. "
            "Use objective reward, or another model."
        )
    return model


def _upcycle(recipe: Recipe, weights: StoredModel | None) -> StoredModel | None:
    """The weights a run starts from; with init.upcycle, a mixture of the dense model they are."""
    upcycle = recipe.init.upcycle
    if upcycle is None:
        return weights
    if weights is None:
        raise ConfigError(
            "init.upcycle is given without init.from, which names the dense model. "
            "Give init.from, or set model.experts."
        )
    if recipe.adapter is not None:
        raise ConfigError(
            "init.upcycle is given with adapter; an adapter would have no base on disk. "
            "Remove one of them."
        )
    if recipe.init.contents != ("model",):
        raise ConfigError(
            "init.upcycle is given with init.content; "
            "a dense model's optimizer state does not fit. Use content model."
        )

    from headway.model.upcycle import upcycled_config, upcycled_weights

    config = upcycled_config(weights.config, upcycle, recipe.model.experts)
    return replace(
        weights,
        config=config,
        weights=upcycled_weights(weights.weights, config, upcycle, recipe.seed),
        adapter=None,
    )


def _merge_experts(recipe: Recipe, weights: StoredModel) -> dict[str, Any] | None:
    """Settings of the experts: those of the weights, with what the recipe says of balance on top.

    Their shapes must fit.
    """
    wanted = recipe.model.experts
    stored = weights.config.experts
    if wanted is None:
        if stored is None:
            return None
        return stored.model_dump()
    if stored is None:
        raise ConfigError(
            f"model.experts is given, but the model in init.from={recipe.init.source} has none. "
            "Use init.upcycle to add them."
        )
    merged = stored.model_dump() | {key: getattr(wanted, key) for key in wanted.model_fields_set}
    for key in EXPERT_SIZES:
        if merged[key] == getattr(stored, key):
            continue
        # A stored config may leave ffn_size out; then it is the model's, and a recipe may say so.
        is_default_size = key == "ffn_size" and merged[key] == weights.config.expert_size
        if not is_default_size:
            raise ConfigError(
                f"model.experts.{key} is {merged[key]} and the weights have "
                f"{getattr(stored, key)}. Leave it out."
            )
    if stored.bias_rate is not None and merged["bias_rate"] is None:
        raise ConfigError(
            "model.experts.bias_rate is null, but the weights have a bias for it. "
            "Leave it out, or use 0 to keep it fixed."
        )
    return merged


def _read_masks(recipe: Recipe) -> tuple[HeadMasks | None, tuple[tuple[float, ...], ...] | None]:
    """The mask file of a recipe, and the log_alpha it gives.

    A value x of the file, 0 (streaming) to 1 (full), becomes DECIDED * (2 x - 1).
    """
    path = recipe.init.masks
    sparsity = recipe.init.masks_sparsity
    if path is None:
        return None, None

    from headway.model.head_masks.file import find_masks, read_masks, read_table

    masks = read_masks(path, sparsity)
    # Rounded to a sparsity, values are decisions. Otherwise soft values of the file stay soft.
    values = masks.full
    if sparsity is None:
        values = read_table(find_masks(path))
    log_alpha = tuple(tuple(DECIDED * (2 * float(x) - 1) for x in row) for row in values)
    return masks, log_alpha


def _merge_head_gates(
    recipe: Recipe, weights: StoredModel | None, masks: HeadMasks | None
) -> HeadGatesConfig | None:
    """Settings of the head gates, from four places; later ones override earlier ones.

    They are the weights, a mask file, the recipe's model and the objective.
    """
    of_recipe = recipe.model.head_gates
    of_objective = recipe.objective.needs.gates
    of_weights = None
    if weights is not None and not leaves_gates(recipe):
        of_weights = weights.config.head_gates
    if of_recipe is None and of_objective is None and masks is None and of_weights is None:
        return None

    fields: dict[str, Any] = {}
    if of_weights is not None:
        fields = of_weights.model_dump()
    if masks is not None:
        for key in ("window", "sinks"):
            # A mask file need not say either.
            if getattr(masks, key) is not None:
                fields[key] = getattr(masks, key)

    # Defaults of the section do not override what weights or masks say.
    explicit = set[str]()
    if of_recipe is not None:
        explicit = of_recipe.model_fields_set
        fields |= {key: getattr(of_recipe, key) for key in explicit}

    if of_objective is not None:
        for key in ("window", "sinks"):
            wanted = getattr(of_objective, key)
            if wanted is None:
                continue
            if key in explicit and wanted != fields[key]:
                raise ConfigError(
                    f"objective.{key} is {wanted} and model.head_gates.{key} is {fields[key]}; "
                    "set one of them only."
                )
            fields[key] = wanted
    return HeadGatesConfig(**fields)


def leaves_gates(recipe: Recipe) -> bool:
    """Whether a recipe says `head_gates: null`, which drops the gates of init.from."""
    return recipe.model.head_gates is None and "head_gates" in recipe.model.model_fields_set


def _changed_model(model: ModelConfig, **changes: Any) -> ModelConfig:
    """A shape with some fields changed; an invalid combination is a ConfigError."""
    try:
        return model.with_(**changes)
    except ValidationError as error:
        reasons = "; ".join(
            problem["msg"].removeprefix("Value error, ") for problem in error.errors()
        )
        raise ConfigError(f"model: {reasons}.") from None
