"""Recipes with `model.family: transformers`: the shape of their model, and what such a model cannot
do, refused by name before work.
"""

from __future__ import annotations

from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families.base import WRAPPED
from headway.model.families.transformers import Wrapping, read
from headway.train.config import Recipe

READ_SETTINGS = {"family", "hf_config", "trust_remote_code", "preset"}
"""Settings of `model` that this family reads. Its shape comes from a config.json."""


def wrapping_of(recipe: Recipe) -> Wrapping | None:
    """How a recipe asks to wrap the class of transformers; None: it does not."""
    model = recipe.model
    if model.family == WRAPPED:
        return Wrapping(model.hf_config or {}, model.trust_remote_code)
    return None


def check_wrapped(recipe: Recipe, weights: ModelConfig | None) -> None:
    """Refuse weights and settings that do not go with a wrapped class.

    Also refuse weights of a wrapped class if the recipe does not ask for one.
    """
    wrapped_config = None
    if weights is not None:
        wrapped_config = weights.hf_config

    if recipe.model.family != WRAPPED:
        if wrapped_config is not None:
            # From a file of others, so of any length.
            model_type = str(wrapped_config.get("model_type"))[:80]
            raise ConfigError(
                f"init.from={recipe.init.source} has model_type {model_type!r}, "
                "which headway has no family for. "
                "Set model.family=transformers to train the class of transformers."
            )
        return

    if weights is not None and wrapped_config is None:
        raise ConfigError(
            f"model.family is transformers and init.from={recipe.init.source} is a checkpoint of "
            f"family {weights.family}. Give its final/ "
            "folder, or what `headway export hf` wrote."
        )
    for key, is_given, why in _refused(recipe):
        if is_given:
            raise ConfigError(f"{key} is given with model.family transformers; {why}")


def _refused(recipe: Recipe) -> list[tuple[str, Any, str]]:
    """Setting, whether it is given, and why a wrapped class cannot have it."""
    gates = "a class of transformers has no head gates or head masks. Remove it."
    return [
        (f"objective.kind={recipe.objective.kind}", recipe.objective.needs.gates, gates),
        (
            f"objective.kind={recipe.objective.kind}",
            recipe.objective.needs.head == "scores",
            "reward models are of headway's own families.",
        ),
        ("init.masks", recipe.init.masks, gates),
        ("multimodal", recipe.multimodal, "media are inputs of headway's own families. Remove it."),
        (
            "init.upcycle",
            recipe.init.upcycle,
            "headway cannot add experts to a class of transformers. Remove it.",
        ),
        (
            "kernels.compile=true",
            recipe.kernels.compile is True,
            "a class of transformers runs uncompiled. Use auto.",
        ),
        (
            "precision=fp8",
            recipe.precision == "fp8",
            "its matrix products run in bf16. Use precision bf16.",
        ),
    ]


def wrapped_shape(recipe: Recipe, weights: ModelConfig | None, unknown_vocab: int) -> ModelConfig:
    """The shape of the class: of the weights, or of model.hf_config.

    Where model.hf_config names no vocabulary, it is `unknown_vocab`, the tokenizer's.
    """
    from headway.model.stock.facts import check_trainable

    settings = recipe.model
    if weights is not None:
        model = weights
    elif settings.hf_config is not None:
        hf_config = {"vocab_size": unknown_vocab, **settings.hf_config}
        model = read(hf_config, settings.trust_remote_code)
    else:
        raise ConfigError(
            "model.family is transformers, which takes its shape from a config.json. "
            "Give init.from, or model.hf_config."
        )

    check_trainable(model)

    # A setting that says what the class has anyway, as recipe.yaml of a run does, is no mistake.
    for name in sorted(settings.model_fields_set - READ_SETTINGS):
        wanted = getattr(settings, name)
        actual = getattr(model, name)
        if wanted is not None and wanted != actual:
            raise ConfigError(
                f"model.{name} is {wanted} with model.family transformers, "
                f"whose class has {actual}. "
                "Leave it out; model.hf_config changes config.json."
            )
    return model
