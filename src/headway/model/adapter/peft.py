"""PEFT folders: adapter_config.json and adapter_model.safetensors on one side, our names and an AdapterConfig on the other.

PEFT names a tensor `base_model.model.` + their path of the linear + `.lora_A.weight`; a parameter that was fully trained (PEFT's
modules_to_save) keeps its name. What headway does not support is an error that names it, never ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, ConfigError
from headway.model.adapter.config import PARTS, AdapterConfig, expert_linears, linears
from headway.model.adapter.peft_joined import (
    held_by,
    joined_updates,
    note_of,
    patterns,
    read_note,
    split_update,
    stock_modules,
)
from headway.model.families.base import family_of, our_whole, pieces_of, published, their_whole
from headway.model.layout import param_specs
from headway.model.loading.huggingface import read_json
from headway.model.loading.untrusted import check_finite
from headway.runtime.digests import check_digests

if TYPE_CHECKING:
    from torch import Tensor

    from headway.model.config import ModelConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size",
    "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""Keys of adapter_config.json that are read, or that do not change what the adapter computes."""

PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?")
"""A key of rank_pattern or alpha_pattern: a name or path. Any other regular expression could run forever."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter on disk."""

    config: AdapterConfig
    base: str | None
    """The base model that the folder names."""
    updates: dict[str, Tensor]
    """The tensors of the updates, by our names."""
    whole: dict[str, Tensor]
    """Parameters of the model that were fully trained."""
    patterned: bool = False
    """Linears had different ranks or alphas; `updates` then have one rank and alpha, and compute the same."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder claims to hold a PEFT adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def is_scoring(folder: Path) -> bool:
    """Whether a folder holds the adapter of a reward model."""
    return _settings(folder).get("task_type") == "SEQ_CLS"


def base_of(folder: Path) -> str | None:
    """The base model that a folder names."""
    return _settings(folder).get("base_model_name_or_path")


def read_adapter(folder: Path, model: ModelConfig) -> PeftAdapter:
    """Read an adapter of a model; an unknown or missing tensor is an error."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    settings = _settings(folder)
    check_digests(folder, (ADAPTER_WEIGHTS,))
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: has no {ADAPTER_WEIGHTS}. Save the adapter as safetensors; a pickle can run code."
        )
    try:
        found = load_file(path)
        with safe_open(path, "pt") as file:
            joined = read_note(file.metadata(), model)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}. Fetch it again.") from None
    for name, value in found.items():
        if not value.is_floating_point() or value.element_size() < 2:
            raise CheckpointError(
                f"{path}: {name} is of type {value.dtype}; headway reads adapters of 16 or 32 bits."
            )
    found = dict(check_finite(found.items(), path))
    updates, whole = _sort(found, model, path, joined)
    modules = sorted(
        {name.removesuffix("." + part) for name in updates for part in PARTS if name.endswith(part)}
    )
    config = _config(settings, modules, folder)
    stock = {
        ours: path
        for path, one in stock_modules(model).items()
        if f"{PREFIX}{path}.{PARTS[0]}" in found
        for ours in one.rows
    }
    split = {
        ours for several in joined.values() for ours in several
    }  # these are as they were before they were joined
    own = {
        module: (config.rank, config.alpha)
        if module in split
        else _rank_and_alpha(settings, stock.get(module) or _bare(module, model), folder)
        for module in modules
    }
    patterned = any(numbers != (config.rank, config.alpha) for numbers in own.values())
    if patterned:
        config, updates = _padded(config, own, updates)
    for name, shape in config.shapes(model).items():
        if name not in updates:
            raise CheckpointError(f"{path}: {name} is missing. Fetch the whole adapter again.")
        if tuple(updates[name].shape) != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(updates[name].shape)}; rank and model make it {list(shape)}."
            )
    return PeftAdapter(config, settings.get("base_model_name_or_path"), updates, whole, patterned)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    check_digests(folder, (ADAPTER_CONFIG,))
    found = read_json(path, "a PEFT adapter")
    kind = found.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{path}: peft_type is {str(kind)[:80]!r}; headway reads LORA.")
    strange = [key for key, value in found.items() if value and key not in HARMLESS]
    if found.get("bias", "none") != "none":
        strange.append("bias")
    if strange:
        named = ", ".join(f"{key} is {str(found[key])[:80]!r}" for key in strange)
        raise ConfigError(
            f"{path}: {named}, which headway does not support. Merge the adapter with PEFT first."
        )
    base = found.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ConfigError(
            f"{path}: base_model_name_or_path is {str(base)[:80]}; a name or path is expected."
        )
    return found


def _config(settings: dict[str, Any], modules: list[str], folder: Path) -> AdapterConfig:
    try:
        return AdapterConfig(
            kind="dora" if settings.get("use_dora") else "lora",
            rank=int(settings["r"]),
            alpha=float(settings["lora_alpha"]),
            rslora=bool(settings.get("use_rslora")),
            dropout=float(settings.get("lora_dropout") or 0.0),
            targets=tuple(modules),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG}: rank, alpha or targets cannot be read: {str(error)[:200].splitlines()[0]}"
        ) from None


def _rank_and_alpha(settings: dict[str, Any], linear: str, folder: Path) -> tuple[int, float]:
    """Rank and alpha of one linear: the first pattern that ends its path, as PEFT reads them, else the adapter's."""
    found: dict[str, Any] = {"rank_pattern": settings["r"], "alpha_pattern": settings["lora_alpha"]}
    for key in found:
        patterns = settings.get(key) or {}
        if not isinstance(patterns, dict):
            raise ConfigError(
                f"{folder / ADAPTER_CONFIG}: {key} is {str(patterns)[:80]}; a mapping from linears to numbers is expected."
            )
        for pattern, value in patterns.items():
            if (
                not isinstance(value, (int, float))
                or isinstance(value, bool)
                or not 0 < value < math.inf
            ):
                raise ConfigError(
                    f"{folder / ADAPTER_CONFIG}: {key} has {pattern[:80]!r} {str(value)[:80]!r}; a number above 0 is expected."
                )
            if not PATTERN.fullmatch(pattern):
                raise ConfigError(
                    f"{folder / ADAPTER_CONFIG}: {key} holds the expression {pattern[:80]!r}; headway reads names and paths there. "
                    "Merge the adapter with PEFT first."
                )
        found[key] = next(
            (
                value
                for pattern, value in patterns.items()
                if re.match(rf"(.*\.)?({pattern})$", linear)
            ),
            found[key],
        )
    return int(found["rank_pattern"]), float(found["alpha_pattern"])


def _padded(
    config: AdapterConfig, own: dict[str, tuple[int, float]], updates: Mapping[str, Tensor]
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """The same updates at one rank and alpha: smaller ones are padded with zeros, and B absorbs the difference of scales."""
    from torch.nn.functional import pad

    whole = config.model_copy(update={"rank": max(rank for rank, _ in own.values())})
    found = dict(updates)
    for module, (rank, alpha) in own.items():
        a, b = (f"{module}.{part}" for part in PARTS[:2])
        if a not in updates or b not in updates or updates[a].dim() != 2 or updates[b].dim() != 2:
            continue  # the caller reports it as missing or misshapen
        if updates[a].shape[0] != rank or updates[b].shape[1] != rank:
            continue
        scale = config.model_copy(update={"rank": rank, "alpha": alpha}).scale
        found[a] = pad(updates[a], (0, 0, 0, whole.rank - rank))
        found[b] = pad(updates[b].float() * (scale / whole.scale), (0, whole.rank - rank))
    return whole, found


def _bare(path: str, model: ModelConfig) -> str:
    return their_name(f"{path}.weight", model).removesuffix(".weight")


def _sort(
    found: Mapping[str, Tensor], model: ModelConfig, path: Path, joined: Mapping[str, list[str]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    family = family_of(model.family)
    shapes = {spec.name: spec.shape for spec in param_specs(model)}
    adaptable, stock = linears(model), stock_modules(model)
    updates: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, value in found.items():
        bare = name.removeprefix(PREFIX)
        part = next((one for one in PARTS if bare.endswith("." + one)), None)
        theirs = (
            bare.removesuffix("." + part) + ".weight" if part else bare.replace(".base_layer.", ".")
        )
        module = stock.get(theirs.removesuffix(".weight")) if part else None
        if part and module is not None and (part == PARTS[0] or value.shape[0] == module.outputs):
            updates |= split_update(module, part, value, joined.get(module.path))
            continue
        ours = our_whole(family, theirs)
        if part and ours is not None and ours.removesuffix(".weight") in adaptable:
            updates[f"{ours.removesuffix('.weight')}.{part}"] = value
        elif part is None and ours in shapes and tuple(value.shape) == shapes[ours]:
            whole[ours] = value
        else:
            raise CheckpointError(
                f"{path}: {name} of shape {list(value.shape)} matches no parameter of the model. Is it an adapter of another model?"
            )
    return updates, whole


def adapter_settings(
    config: AdapterConfig, model: ModelConfig, whole: list[str], base: str | None
) -> dict[str, Any]:
    """The adapter_config.json of an adapter; `whole` are the parameters that were fully trained."""
    check_exportable(config, model)
    target, _ = published(model)
    held, stock = held_by(config, target), stock_modules(target)
    renamed = {
        ours: path for path in (stock if config.kind == "lora" else ()) for ours in stock[path].rows
    }
    modules = list(
        dict.fromkeys(renamed.get(path) or _bare(path, target) for path in config.modules(model))
    )
    every = list(dict.fromkeys(renamed.get(path) or _bare(path, target) for path in linears(model)))
    ranks, alphas = patterns(config, held)
    owners = [their_name(name, target).rpartition(".")[0] for name in whole]
    owned = [their_name(spec.name, target).rpartition(".")[0] for spec in param_specs(model)]
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.score_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.kind == "dora",
        "target_modules": _short(modules, every),
        "modules_to_save": _short(owners, owned) or None,
        "bias": "none",
        "fan_in_fan_out": any(stock[path].is_transposed for path in held),
        **({"rank_pattern": ranks, "alpha_pattern": alphas} if ranks else {}),
        "init_lora_weights": True,
        "inference_mode": True,
    }


def check_exportable(config: AdapterConfig, model: ModelConfig) -> None:
    """Refuse an adapter that has no form in PEFT: there, experts share the rank of one matrix, or gate and up are one parameter."""
    experts = expert_linears(model)
    if any(path in experts for path in config.modules(model)):
        raise ConfigError(
            "adapter.targets holds experts, whose updates have no form in PEFT. Export the merged model: leave --adapter out."
        )


def notes_of(config: AdapterConfig, model: ModelConfig) -> dict[str, str]:
    """What the file of the tensors says besides them."""
    return note_of(held_by(config, published(model)[0]))


def their_name(name: str, target: ModelConfig) -> str:
    """The name a parameter has in the family it is published under; ours where its tensors are not ours one by one, since an update of a
    part of a tensor, or of a transposed one, has no form in PEFT."""
    family = family_of(target.family)
    if "pieces" in vars(family):
        pieces = next(
            (pieces_of(family, spec, target) for spec in param_specs(target) if spec.name == name),
            (),
        )
        if any(piece.dim is not None or piece.transposed for piece in pieces):
            return name
    return their_whole(family, name)


def their_tensors(
    values: Mapping[str, Tensor], config: AdapterConfig, model: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Updates and fully trained parameters under PEFT's names."""
    target, _ = published(model)
    held = held_by(config, target)
    renamed = {ours for several in held.values() for ours in several}
    for name, value in joined_updates(values, held, target):
        yield PREFIX + name, value
    for name, value in values.items():
        if name.rpartition(".lora_")[0] in renamed:
            continue
        part = next((one for one in PARTS if name.endswith("." + one)), None)
        theirs = their_name(f"{name.removesuffix('.' + part)}.weight" if part else name, target)
        yield PREFIX + (f"{theirs.removesuffix('.weight')}.{part}" if part else theirs), value


def _short(chosen: list[str], every: list[str]) -> list[str]:
    """Last components where they match the chosen paths and no others, else whole paths."""
    wanted = set(chosen)
    leaves = list(dict.fromkeys(path.rsplit(".", 1)[-1] for path in chosen))
    return (
        leaves
        if {path for path in every if path.rsplit(".", 1)[-1] in leaves} == wanted
        else list(dict.fromkeys(chosen))
    )
