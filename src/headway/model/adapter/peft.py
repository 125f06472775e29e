"""PEFT folders: adapter_config.json and adapter_model.safetensors on one side, our names and an
AdapterConfig on the other.

PEFT names a tensor `base_model.model.` + the path of the linear in transformers' class +
`.lora_A.weight`; a parameter that was fully trained (PEFT's modules_to_save) keeps its name. What
headway does not support is an error that names it, never ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, ConfigError
from headway.model.adapter.config import PARTS, AdapterConfig, expert_linears, linears, split_name
from headway.model.adapter.peft_joined import (
    held_by,
    joined_updates,
    note_of,
    patterns,
    read_note,
    split_update,
    stock_modules,
)
from headway.model.families.base import family_of, hf_name_of, name_from_hf, pieces_of, to_hf_config
from headway.model.layout import param_specs
from headway.model.loading.huggingface import read_json
from headway.model.loading.untrusted import check_finite
from headway.model.vision_shape import TOWER
from headway.runtime.digests import check_digests

if TYPE_CHECKING:
    from torch import Tensor

    from headway.model.config import ModelConfig

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
IN_WHOLE = {TOWER: "model.visual.", "model.": "model.language_model."}
"""Where the class of a model with a vision tower has what stands at these names of a text model."""
HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size",
    "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""Keys of adapter_config.json that are read, or that do not change what the adapter computes."""

PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?")
"""A key of rank_pattern or alpha_pattern: a name or path. Any other regular expression could run
forever."""


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
    """Linears had different ranks or alphas; `updates` then have one rank and alpha, and compute
    the same."""


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
            f"{folder}: has no {ADAPTER_WEIGHTS}. Save the adapter as safetensors; a pickle can "
            "run code."
        )
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            joined = read_note(file.metadata(), model)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}. Fetch it again.") from None
    # Bytes would need scales, which nothing here applies.
    for name, value in tensors.items():
        if not value.is_floating_point() or value.element_size() < 2:
            raise CheckpointError(
                f"{path}: {name} is of type {value.dtype}; headway reads adapters of 16 or 32 bits."
            )
    tensors = dict(check_finite(tensors.items(), path))

    updates, whole = _sort(tensors, model, path, joined)
    modules = sorted({split_name(name)[0] for name in updates})
    config = _config(settings, modules, folder)

    # Linears that a stock module holds have the rank and alpha of that module.
    stock_paths: dict[str, str] = {}
    for stock_path, stock_module in stock_modules(model).items():
        if f"{PREFIX}{stock_path}.{PARTS[0]}" in tensors:
            stock_paths |= dict.fromkeys(stock_module.rows, stock_path)
    # Updates that headway joined were split again: they have the adapter's own rank and alpha.
    split = {our_path for ours in joined.values() for our_path in ours}
    ranks: dict[str, tuple[int, float]] = {}
    for module in modules:
        if module in split:
            ranks[module] = (config.rank, config.alpha)
        else:
            linear = stock_paths.get(module) or _hf_path(module, model)
            ranks[module] = _rank_and_alpha(settings, linear, folder)
    patterned = any(numbers != (config.rank, config.alpha) for numbers in ranks.values())
    if patterned:
        config, updates = _padded(config, ranks, updates)

    for name, shape in config.shapes(model).items():
        if name not in updates:
            raise CheckpointError(f"{path}: {name} is missing. Fetch the whole adapter again.")
        if tuple(updates[name].shape) != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(updates[name].shape)}; rank and model make it "
                f"{list(shape)}."
            )
    return PeftAdapter(config, settings.get("base_model_name_or_path"), updates, whole, patterned)


def _settings(folder: Path) -> dict[str, Any]:
    """The adapter_config.json of a folder; a setting that headway does not support is refused."""
    path = folder / ADAPTER_CONFIG
    check_digests(folder, (ADAPTER_CONFIG,))
    settings = read_json(path, "a PEFT adapter")
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{path}: peft_type is {str(kind)[:80]!r}; headway reads LORA.")

    # A key that is null, false or empty changes nothing, whatever PEFT's version means by it.
    unsupported = [key for key, value in settings.items() if value and key not in HARMLESS]
    if settings.get("bias", "none") != "none":
        unsupported.append("bias")
    if unsupported:
        named = ", ".join(f"{key} is {str(settings[key])[:80]!r}" for key in unsupported)
        raise ConfigError(
            f"{path}: {named}, which headway does not support. Merge the adapter with PEFT first."
        )

    base = settings.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ConfigError(
            f"{path}: base_model_name_or_path is {str(base)[:80]}; a name or path is expected."
        )
    return settings


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
            f"{folder / ADAPTER_CONFIG}: rank, alpha or targets cannot be read: "
            f"{str(error)[:200].splitlines()[0]}"
        ) from None


def _rank_and_alpha(settings: dict[str, Any], linear: str, folder: Path) -> tuple[int, float]:
    """Rank and alpha of one linear: the first pattern that ends its path, as PEFT reads them,
    else the adapter's."""
    numbers: dict[str, Any] = {
        "rank_pattern": settings["r"],
        "alpha_pattern": settings["lora_alpha"],
    }
    for key in numbers:
        patterns = settings.get(key) or {}
        if not isinstance(patterns, dict):
            raise ConfigError(
                f"{folder / ADAPTER_CONFIG}: {key} is {str(patterns)[:80]}; a mapping from linears "
                "to numbers is expected."
            )
        for pattern, value in patterns.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise ConfigError(
                    f"{folder / ADAPTER_CONFIG}: {key} has {pattern[:80]!r} {str(value)[:80]!r}; a "
                    "number above 0 is expected."
                )
            if not PATTERN.fullmatch(pattern):
                raise ConfigError(
                    f"{folder / ADAPTER_CONFIG}: {key} holds the expression {pattern[:80]!r}; "
                    "headway reads names and paths there. "
                    "Merge the adapter with PEFT first."
                )
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", linear):
                numbers[key] = value
                break
    return int(numbers["rank_pattern"]), float(numbers["alpha_pattern"])


def _padded(
    config: AdapterConfig, ranks: dict[str, tuple[int, float]], updates: Mapping[str, Tensor]
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """The same updates at one rank and alpha: smaller ones are padded with zeros, and B absorbs
    the difference of scales."""
    from torch.nn.functional import pad

    common = config.model_copy(update={"rank": max(rank for rank, _ in ranks.values())})
    padded = dict(updates)
    for module, (rank, alpha) in ranks.items():
        a, b = (f"{module}.{part}" for part in PARTS[:2])
        # The caller reports tensors that are missing or have other shapes.
        if a not in updates or b not in updates or updates[a].dim() != 2 or updates[b].dim() != 2:
            continue
        if updates[a].shape[0] != rank or updates[b].shape[1] != rank:
            continue
        scale = config.model_copy(update={"rank": rank, "alpha": alpha}).scale
        padded[a] = pad(updates[a], (0, 0, 0, common.rank - rank))
        padded[b] = pad(updates[b].float() * (scale / common.scale), (0, common.rank - rank))
    return common, padded


def _hf_path(path: str, model: ModelConfig) -> str:
    """The path that a linear of ours has in transformers' class."""
    return their_name(f"{path}.weight", model).removesuffix(".weight")


def _sort(
    tensors: Mapping[str, Tensor], model: ModelConfig, path: Path, joined: Mapping[str, list[str]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(updates, fully trained parameters) under our names; a tensor that is neither is an error."""
    family = family_of(model.family)
    shapes = {spec.name: spec.shape for spec in param_specs(model)}
    adaptable = linears(model)
    stock = stock_modules(model)
    updates: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, value in tensors.items():
        hf_name = _name_in_text(name.removeprefix(PREFIX))
        hf_path, part = split_name(hf_name)
        if part not in PARTS:
            # A fully trained parameter; PEFT keeps the original of a wrapped module in base_layer.
            our_name = name_from_hf(family, hf_name.replace(".base_layer.", "."))
            if our_name in shapes and tuple(value.shape) == shapes[our_name]:
                whole[our_name] = value
                continue
        else:
            module = stock.get(hf_path)
            if module is not None and (part == PARTS[0] or value.shape[0] == module.outputs):
                updates |= split_update(module, part, value, joined.get(module.path))
                continue
            our_name = name_from_hf(family, f"{hf_path}.weight")
            if our_name is not None and our_name.removesuffix(".weight") in adaptable:
                updates[f"{our_name.removesuffix('.weight')}.{part}"] = value
                continue
        raise CheckpointError(
            f"{path}: {name} of shape {list(value.shape)} matches no parameter of the model. Is it "
            "an adapter of another model?"
        )
    return updates, whole


def adapter_settings(
    config: AdapterConfig, model: ModelConfig, whole: list[str], base: str | None
) -> dict[str, Any]:
    """The adapter_config.json of an adapter; `whole` are the parameters that were fully trained."""
    check_exportable(config, model)
    # PEFT loads the adapter over the exported model: names are those of the family it becomes.
    target, _ = to_hf_config(model)
    held = held_by(config, target)
    stock = stock_modules(target)

    # Our path -> the path of the stock module that holds it. dora's updates are not joined.
    stock_paths: dict[str, str] = {}
    if config.kind == "lora":
        for stock_path, module in stock.items():
            stock_paths |= dict.fromkeys(module.rows, stock_path)

    def hf_paths(paths: Iterable[str]) -> list[str]:
        return list(
            dict.fromkeys(stock_paths.get(path) or _hf_path(path, target) for path in paths)
        )

    def hf_owners(names: Iterable[str]) -> list[str]:
        return [their_name(name, target).rpartition(".")[0] for name in names]

    ranks, alphas = patterns(config, held)
    optional: dict[str, Any] = {}
    if ranks:
        optional = {"rank_pattern": ranks, "alpha_pattern": alphas}
    every_name = [spec.name for spec in param_specs(model)]
    # PEFT would adapt a convolution of the tower whose name ends as that of a linear.
    in_tower = [split_name(name)[0] for name in every_name if name.startswith(TOWER)]
    every_path = hf_paths([*linears(model), *in_tower])
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.score_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        # PEFT writes whole numbers as such.
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.kind == "dora",
        "target_modules": _short(hf_paths(config.modules(model)), every_path),
        "modules_to_save": _short(hf_owners(whole), hf_owners(every_name)) or None,
        "bias": "none",
        "fan_in_fan_out": any(stock[path].is_transposed for path in held),
        **optional,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def check_exportable(config: AdapterConfig, model: ModelConfig) -> None:
    """Refuse an adapter that has no form in PEFT: there, experts share the rank of one matrix,
    or gate and up are one parameter."""
    experts = expert_linears(model)
    if any(path in experts for path in config.modules(model)):
        raise ConfigError(
            "adapter.targets holds experts, whose updates have no form in PEFT. Export the merged "
            "model: leave --adapter out."
        )


def notes_of(config: AdapterConfig, model: ModelConfig) -> dict[str, str]:
    """The metadata of adapter_model.safetensors: which of our linears each stock module holds."""
    return note_of(held_by(config, to_hf_config(model)[0]))


def their_name(name: str, target: ModelConfig) -> str:
    """The name that a parameter has in the family it is published under.

    Ours, if it is a part of a tensor or transposed there: an update of that has no form in PEFT.
    """
    family = family_of(target.family)
    if "pieces" in vars(family):
        for spec in param_specs(target):
            if spec.name != name:
                continue
            for piece in pieces_of(family, spec, target):
                if piece.dim is not None or piece.transposed:
                    return name
            break
    their = hf_name_of(family, name)
    if target.vision is None:
        return their
    # The class of a model that sees has its decoder and its tower side by side.
    for ours, whole in IN_WHOLE.items():
        if their.startswith(ours):
            return whole + their.removeprefix(ours)
    return their


def _name_in_text(hf_name: str) -> str:
    """The name in the class of the text part of a tensor in that of the whole model."""
    for ours, whole in IN_WHOLE.items():
        if hf_name.startswith(whole):
            return ours + hf_name.removeprefix(whole)
    return hf_name


def their_tensors(
    values: Mapping[str, Tensor], config: AdapterConfig, model: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Updates and fully trained parameters under PEFT's names."""
    target, _ = to_hf_config(model)
    held = held_by(config, target)
    joined = {our_path for ours in held.values() for our_path in ours}
    for name, value in joined_updates(values, held, target):
        yield PREFIX + name, value
    for name, value in values.items():
        path, part = split_name(name)
        if part not in PARTS:
            yield PREFIX + their_name(name, target), value
        elif path not in joined:
            yield f"{PREFIX}{_hf_path(path, target)}.{part}", value


def _short(chosen: list[str], every: list[str]) -> list[str]:
    """Last components if they match the chosen paths and no others, else whole paths."""
    # PEFT matches a name against the end of a path, so q_proj means every q_proj of the model.
    leaves = list(dict.fromkeys(path.rsplit(".", 1)[-1] for path in chosen))
    # Linears of a sequence have numbers for names, and so have whole layers.
    has_numbers = any(leaf.isdigit() for leaf in leaves)
    matched = {path for path in every if path.rsplit(".", 1)[-1] in leaves}
    if matched == set(chosen) and not has_numbers:
        return leaves
    return list(dict.fromkeys(chosen))
