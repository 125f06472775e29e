"""Recipes with `model.family: transformers`: the shape of their model, and what such a model cannot do, refused by name before work."""

from __future__ import annotations

from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families.base import WRAPPED
from headway.model.families.transformers import Wrapping, read
from headway.train.config import Recipe

OWN = {"family", "hf_config", "trust_remote_code", "preset"}
"""Settings of `model` that this family reads."""


def wrapping_of(recipe: Recipe) -> Wrapping | None:
    """How a recipe asks to wrap the class of transformers; None: it does not."""
    model = recipe.model
    return (
        Wrapping(model.hf_config or {}, model.trust_remote_code)
        if model.family == WRAPPED
        else None
    )


def check_wrapped(recipe: Recipe, weights: ModelConfig | None) -> None:
    """Refuse weights and settings that do not go with a wrapped class, and a wrapped class that the recipe does not name."""
    is_wrapped = weights is not None and weights.hf_config is not None
    if recipe.model.family != WRAPPED:
        if is_wrapped:
            kind = (
                str((weights.hf_config or {}).get("model_type"))[:80] if weights is not None else ""
            )
            raise ConfigError(
                f"init.from={recipe.init.source} has model_type {kind!r}, which headway has no family for. Set model.family=transformers "
                "to train the class of transformers."
            )
        return
    if weights is not None and not is_wrapped:
        raise ConfigError(
            f"model.family is transformers and init.from={recipe.init.source} is a checkpoint of family {weights.family}. Give its final/ "
            "folder, or what `headway export hf` wrote."
        )
    for key, given, why in _refused(recipe):
        if given:
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
    """The shape of the class: of the weights, or of model.hf_config, whose vocabulary is the tokenizer's where it names none."""
    given = recipe.model
    if weights is None and given.hf_config is None:
        raise ConfigError(
            "model.family is transformers, which takes its shape from a config.json. Give init.from, or model.hf_config."
        )
    model = (
        weights
        if weights is not None
        else read({"vocab_size": unknown_vocab, **(given.hf_config or {})}, given.trust_remote_code)
    )
    for name in sorted(given.model_fields_set - OWN):
        if getattr(given, name) is not None and getattr(given, name) != getattr(model, name):
            raise ConfigError(
                f"model.{name} is {getattr(given, name)} with model.family transformers, whose class has {getattr(model, name)}. Leave it "
                "out; model.hf_config changes config.json."
            )
    return model
