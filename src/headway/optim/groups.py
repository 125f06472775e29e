"""Which parameters train, with which hyperparameters.

Names and shapes come in, named groups go out.

Patterns, in `freeze`, `train`, `optim.decay` and `optim.groups.match`:

    weights        all but objective and gates
    objective      every parameter of the objective itself
    gates          the head gates of the model
    embeddings     input embedding and output head
    matrices       parameters of two or more dimensions but biases
    norms          normalisation weights and biases
    biases         biases
    adapter        every parameter of the adapters
    score          the head of a reward model
    layers.3       one block
    layers.0-19    blocks 0 to 19
    *.mlp.*        anything else is a shell pattern over full parameter names
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.kernels.packed_layout import form_of, plain_name
from headway.model.adapter.config import split_name
from headway.model.layout import GATES, Group, ParamSpec, Specs, in_groups
from headway.optim.base import GroupRule, Hyper, OptimConfig
from headway.tasks.base import ParameterRule

if TYPE_CHECKING:
    from torch import nn

OBJECTIVE = "objective."
"""Prefix of the names of the objective's parameters, in checkpoints too."""
ADAPTER = ".lora_"
"""Part of the name of every adapter parameter, after the path of its linear."""
# A pattern of layers in a recipe, and the layer in a parameter's name.
_LAYERS = re.compile(r"layers\.(\d+)(?:-(\d+))?")
_LAYER_OF = re.compile(r"(?:^|\.)layers\.(\d+)\.")
GROUPS: dict[str, Group] = {
    "gates": "gates",
    "objective": "objective",
    "adapter": "adapter",
    "projector": "projector",
    "tower": "tower",
    "score": "score",
    "embeddings": "embedding",
    "norms": "norm",
    "biases": "bias",
}
"""The group that a pattern means."""
NAMED = ("weights", "matrices", *GROUPS)
"""All patterns with a name of their own."""


def objective_specs(module: nn.Module | None) -> dict[str, ParamSpec]:
    """The parameters of an objective: whole on every rank, each with their full gradient."""
    if module is None:
        return {}
    specs: dict[str, ParamSpec] = {}
    for name, parameter in module.named_parameters():
        specs[OBJECTIVE + name] = ParamSpec(
            OBJECTIVE + name,
            tuple(parameter.shape),
            stage="last",  # where the loss is computed
            covers="all",
            start="given",  # the objective sets its values itself
            groups=in_groups("objective"),
        )
    return specs


def matching(pattern: str, specs: Specs) -> set[str]:
    """The parameter names a pattern means."""
    # Head gates and the objective's parameters are no weights of the model: only their own patterns
    # and shell patterns mean them.
    weights = {
        name: spec for name, spec in specs.items() if spec.groups.isdisjoint({"objective", "gates"})
    }
    layers = _LAYERS.fullmatch(pattern)
    if layers:
        first = int(layers[1])
        last = int(layers[2] or layers[1])
        chosen: set[str] = set()
        for name in weights:
            layer = _LAYER_OF.search(name)
            if layer is not None and first <= int(layer[1]) <= last:
                chosen.add(name)
        return chosen
    if pattern == "weights":
        return set(weights)
    if pattern == "matrices":
        return {name for name, spec in weights.items() if spec.is_matrix}
    if pattern in GROUPS:
        return {name for name, spec in specs.items() if GROUPS[pattern] in spec.groups}
    # With case, on every system: names are not files.
    return {name for name in specs if fnmatchcase(name, pattern)}


def select(
    patterns: Iterable[str], specs: Specs, key: str, *, may_be_empty: tuple[str, ...] = ()
) -> set[str]:
    """The union of patterns; one that matches nothing is a mistake."""
    chosen: set[str] = set()
    for pattern in patterns:
        names = matching(pattern, specs)
        if not names and pattern not in may_be_empty:
            raise ConfigError(
                f"{key} contains {pattern!r}, which matches no parameter{_suggest(pattern, specs)}"
            )
        chosen |= names
    return chosen


def _suggest(pattern: str, specs: Specs) -> str:
    """The end of an error message: what a pattern that matches nothing may have meant."""
    blocks = sorted({int(layer[1]) for name in specs if (layer := _LAYER_OF.search(name))})
    if _LAYERS.fullmatch(pattern) and blocks:
        return f"; blocks are numbered {blocks[0]} to {blocks[-1]}."

    # Candidates: named patterns, `*.q_proj.*` for every kind of module, and full names. A bare
    # `q_prj` is compared with the bare names of modules, since the stars hide how close it is.
    modules = dict.fromkeys(name.rsplit(".", 1)[0] for name in specs)
    leaves = dict.fromkeys(f"*.{path.rsplit('.', 1)[-1]}.*" for path in modules)
    patterns = difflib.get_close_matches(pattern, [*NAMED, *leaves, *specs], n=3, cutoff=0.5)
    bare_leaves = difflib.get_close_matches(
        pattern.strip("*."), [leaf.strip("*.") for leaf in leaves], n=2
    )
    close = list(dict.fromkeys([*(f"*.{leaf}.*" for leaf in bare_leaves), *patterns]))
    hint = ""
    if close:
        hint = f"; close to it are {', '.join(map(repr, close[:3]))}"
    return f"{hint}; names look like {next(iter(specs), 'none')!r}, blocks like layers.0-3."


@dataclass(frozen=True)
class Count:
    """What one pattern matches."""

    pattern: str
    tensors: int
    parameters: int


def count(patterns: Sequence[str], specs: Specs) -> list[Count]:
    """How much every pattern matches by itself."""
    counts: list[Count] = []
    for pattern in patterns:
        names = matching(pattern, specs)
        counts.append(Count(pattern, len(names), sum(specs[name].size for name in names)))
    return counts


def trainable(specs: Specs, freeze: Sequence[str], train: Sequence[str]) -> set[str]:
    """The names that train: all but the frozen ones, or only those of `train`. A vision tower
    trains where `train` names it.

    With adapters: adapters, gates, the objective, the projector of media, the head of a reward
    model, `train`. What comes from phase 1 (aligner.*) never trains, nor does a router's balancing
    bias.
    """
    if freeze and train:
        raise ConfigError("freeze and train are both set; they are opposites. Keep one of them.")

    # A quantised matrix is stored as bytes under other names; patterns choose it as the matrix it
    # is, whatever `adapter.base` makes of it.
    packed = {plain_name(name) for name in specs if form_of(name) is not None}
    plain: dict[str, ParamSpec] = {}
    for name, spec in specs.items():
        if form_of(name) is not None:
            # Bytes have one dim; `matrices` means parameters of two.
            spec = replace(spec, name=plain_name(name), shape=(1, *spec.shape))
        plain[spec.name] = spec

    adapter_names = matching("adapter", plain)
    if adapter_names:
        extra = select(train, plain, "train")
        quantised = sorted(extra & packed)
        if quantised:
            raise ConfigError(
                f"train is {list(train)}; it matches {quantised[0]}, which adapter.base stores "
                "quantised, and quantised weights cannot train. Remove it from train, or set "
                "adapter.base to null."
            )
        adapted = {split_name(name)[0] for name in adapter_names}
        conflicts = sorted(
            name for name in extra - adapter_names if name.rpartition(".")[0] in adapted
        )
        if conflicts:
            raise ConfigError(
                f"train is {list(train)}; it matches {conflicts[0]}, whose layer has an adapter. "
                "Train one of the two."
            )
        # What is new in this run has no pretrained values to keep, so it trains too.
        new = (matching(name, plain) for name in ("objective", "gates", "projector", "score"))
        names = adapter_names.union(extra, *new) - select(freeze, plain, "freeze")
    elif train:
        names = select(train, plain, "train")
    else:
        names = set(plain) - select(freeze, plain, "freeze") - matching("tower", plain)
    # The bias of a router is moved by `Model.balance` after an update, not by a gradient.
    untrained = {"aligner", "router_bias", "fixed"}
    names = {name for name in names if plain[name].groups.isdisjoint(untrained)}
    if not names:
        raise ConfigError(f"freeze is {list(freeze)}; no parameter is left to train. Freeze less.")
    return names


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with the same hyperparameters."""

    name: str
    names: tuple[str, ...]
    """In the order of the model."""
    rule: GroupRule | None = None
    decays: bool = True
    part: str = ""
    """Which rule of the optimizer updates it (OptimConfig.parts)."""
    lr_steps: int | None = None
    """Steps of the longest run that takes the rule's whole rate (`ParameterRule.lr_steps`)."""


def make_groups(
    config: OptimConfig, specs: Specs, training: set[str], rules: Sequence[ParameterRule] = ()
) -> list[ParamGroup]:
    """Divide the trainable parameters into groups.

    Every rule has a group, split by whether its parameters decay; then come decay and no_decay.

    `rules` are the objective's. The recipe's rules are applied first.
    """
    decaying = select(
        config.decay, specs, "optim.decay", may_be_empty=("biases", "norms", "objective")
    )
    split = partial(_split, specs=specs, parts=config.parts(specs))
    remaining = [name for name in specs if name in training]

    groups: list[ParamGroup] = []
    for index, rule in enumerate(config.groups):
        matched = select(rule.match, specs, f"optim.groups.{index}.match")
        taken = tuple(name for name in remaining if name in matched)
        remaining = [name for name in remaining if name not in matched]
        # A rule with a weight decay means it for all that it matches, norms and biases included.
        rule_decaying = decaying
        if rule.weight_decay is not None:
            rule_decaying = set(taken)
        groups += split(f"rule{index}", taken, rule_decaying, rule)

    objective_groups: list[ParamGroup] = []
    for index, parameter_rule in enumerate(rules):
        matched = select(parameter_rule.match, specs, "objective")
        taken = tuple(name for name in remaining if name in matched)
        remaining = [name for name in remaining if name not in matched]
        rule = GroupRule(
            match=parameter_rule.match,
            lr=parameter_rule.lr,
            betas=parameter_rule.betas,
            weight_decay=parameter_rule.weight_decay,
            maximize=parameter_rule.maximize,
        )
        objective_groups += [
            replace(group, lr_steps=parameter_rule.lr_steps)
            for group in split(f"own{index}", taken, set(taken), rule)
        ]

    # Gates need the objective's rule: without a target sparsity nothing would close them.
    if GATES in remaining:
        raise ConfigError(
            "the model has head gates, but the objective has no target sparsity for them. Freeze "
            "them (freeze: [gates]), remove them (model.head_gates=null), or use objective "
            "head_sparsity."
        )
    of_objective = tuple(name for name in remaining if "objective" in specs[name].groups)
    of_model = tuple(name for name in remaining if "objective" not in specs[name].groups)
    groups += split("model", of_model, decaying, None)
    groups += split("objective", of_objective, decaying, None)
    return groups + objective_groups


def _split(
    name: str,
    names: tuple[str, ...],
    decaying: set[str],
    rule: GroupRule | None,
    specs: Specs,
    parts: Mapping[str, str],
) -> list[ParamGroup]:
    """Divide parameters by precision, decay, and the rule that updates them.

    A group's parameters share one buffer and one call of the rule. Names of groups are
    `name.decay`, `name.no_decay.wide`, `name.decay.adamw` and so on.
    """
    groups: list[ParamGroup] = []
    part_names = ("", *sorted({*parts.values()} - {""}))
    for wide, decays, part in product((False, True), (True, False), part_names):
        members = tuple(
            member
            for member in names
            if (member in decaying) == decays
            and specs[member].keeps_float32 == wide
            and parts.get(member, "") == part
        )
        if not members:
            continue
        group_name = f"{name}.decay" if decays else f"{name}.no_decay"
        if wide:
            group_name += ".wide"
        if part:
            group_name += f".{part}"
        groups.append(ParamGroup(group_name, members, rule, decays, part))
    return groups


def hypers(
    config: OptimConfig,
    groups: Sequence[ParamGroup],
    step: int,
    total_steps: int,
    lr_factor: float = 1.0,
) -> dict[str, Hyper]:
    """The hyperparameters of every group at one step.

    All learning rates are multiplied by `lr_factor` (batch.lr_scaling).
    """
    # Once per part, not per group: `part` validates settings, and this runs in every step.
    parts = {part: config.part(part) for part in dict.fromkeys(group.part for group in groups)}
    by_group = {
        group.name: _group_hyper(group, parts[group.part], step, total_steps) for group in groups
    }
    if lr_factor == 1.0:
        return by_group
    return {name: replace(hyper, lr=hyper.lr * lr_factor) for name, hyper in by_group.items()}


def _group_hyper(group: ParamGroup, config: OptimConfig, step: int, total_steps: int) -> Hyper:
    """The optimizer's numbers at one step, with the changes of the group's rule."""
    hyper = config.hyper(step, total_steps)
    # A rule's own weight decay below replaces this zero.
    if not group.decays:
        hyper = replace(hyper, weight_decay=0.0)
    rule = group.rule
    if rule is None:
        return hyper

    changes = {
        key: getattr(rule, key)
        for key in ("betas", "eps", "maximize", "weight_decay")
        if getattr(rule, key) is not None
    }
    peak = rule.lr
    if rule.lr_factor is not None:
        peak = config.lr * rule.lr_factor
    if peak is not None and group.lr_steps is not None:
        # The distance that a parameter can move is the same in a run of any length.
        peak *= min(1.0, group.lr_steps / total_steps)
    if peak is not None:
        # The group's peak follows the same schedule.
        changes["lr"] = config.model_copy(update={"lr": peak}).hyper(step, total_steps).lr
    return replace(hyper, **changes)  # pyright: ignore[reportArgumentType]
