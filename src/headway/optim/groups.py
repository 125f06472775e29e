"""Which parameters train, with which hyperparameters: names and shapes come in, named groups go out.

Patterns, in `freeze`, `train`, `optim.decay` and `optim.groups.match`:

    weights            all but objective and gates           objective     every parameter of the objective itself
    gates              the head gates of the model
    embeddings         input embedding and output head       matrices      parameters of two or more dimensions but biases
    norms              normalisation weights and biases      biases        biases
    adapter            every parameter of the adapters       score         the head of a reward model
    layers.3           one block                             layers.0-19   blocks 0 to 19
    *.mlp.*            anything else is a shell pattern over full parameter names
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
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
ADAPTER = ".lora_"
"""Part of the name of every adapter parameter, after the path of its linear."""
_LAYERS = re.compile(r"layers\.(\d+)(?:-(\d+))?")
GROUPS: dict[str, Group] = {
    "gates": "gates",
    "objective": "objective",
    "adapter": "adapter",
    "projector": "projector",
    "score": "score",
    "embeddings": "embedding",
    "norms": "norm",
    "biases": "bias",
}
"""The group that a pattern means."""
NAMED = ("weights", "matrices", *GROUPS)
_LAYER_OF = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def objective_specs(module: nn.Module | None) -> dict[str, ParamSpec]:
    """The parameters of an objective: whole on every rank, and every rank computes all of their gradient."""
    if module is None:
        return {}
    specs: dict[str, ParamSpec] = {}
    for name, parameter in module.named_parameters():
        specs[OBJECTIVE + name] = ParamSpec(
            OBJECTIVE + name,
            tuple(parameter.shape),
            stage="last",
            covers="all",
            start="given",
            groups=in_groups("objective"),
        )
    return specs


def matching(pattern: str, specs: Specs) -> set[str]:
    """The parameter names a pattern means."""
    weights = {
        name: spec for name, spec in specs.items() if spec.groups.isdisjoint({"objective", "gates"})
    }
    layers = _LAYERS.fullmatch(pattern)
    if layers:
        first, last = int(layers[1]), int(layers[2] or layers[1])
        return {
            n for n in weights if (found := _LAYER_OF.search(n)) and first <= int(found[1]) <= last
        }
    if pattern == "weights":
        return set(weights)
    if pattern == "matrices":
        return {name for name, spec in weights.items() if spec.is_matrix}
    if pattern in GROUPS:
        return {name for name, spec in specs.items() if GROUPS[pattern] in spec.groups}
    return {name for name in specs if fnmatchcase(name, pattern)}


def select(
    patterns: Iterable[str], specs: Specs, key: str, *, may_be_empty: tuple[str, ...] = ()
) -> set[str]:
    """The union of patterns; one that matches nothing is a mistake."""
    chosen: set[str] = set()
    for pattern in patterns:
        found = matching(pattern, specs)
        if not found and pattern not in may_be_empty:
            raise ConfigError(
                f"{key} contains {pattern!r}, which matches no parameter{_near(pattern, specs)}"
            )
        chosen |= found
    return chosen


def _near(pattern: str, specs: Specs) -> str:
    """What a pattern that matches nothing may have meant."""
    blocks = sorted({int(found[1]) for name in specs if (found := _LAYER_OF.search(name))})
    if _LAYERS.fullmatch(pattern) and blocks:
        return f"; blocks are numbered {blocks[0]} to {blocks[-1]}."
    modules = dict.fromkeys(name.rsplit(".", 1)[0] for name in specs)
    leaves = dict.fromkeys(f"*.{path.rsplit('.', 1)[-1]}.*" for path in modules)
    near = difflib.get_close_matches(pattern, [*NAMED, *leaves, *specs], n=3, cutoff=0.5)
    bare = difflib.get_close_matches(
        pattern.strip("*."), [leaf.strip("*.") for leaf in leaves], n=2
    )
    close = list(dict.fromkeys([*(f"*.{leaf}.*" for leaf in bare), *near]))
    hint = f"; close to it are {', '.join(map(repr, close[:3]))}" if close else ""
    return f"{hint}; names look like {next(iter(specs), 'none')!r}, blocks like layers.0-3."


@dataclass(frozen=True)
class Count:
    """What one pattern matches."""

    pattern: str
    tensors: int
    parameters: int


def count(patterns: Sequence[str], specs: Specs) -> list[Count]:
    """How much every pattern matches, each on its own."""
    found = [(pattern, matching(pattern, specs)) for pattern in patterns]
    return [
        Count(pattern, len(names), sum(specs[name].size for name in names))
        for pattern, names in found
    ]


def trainable(specs: Specs, freeze: Sequence[str], train: Sequence[str]) -> set[str]:
    """The names that train: all but the frozen ones, or only those of `train`. With adapters: adapters, gates, the objective, the projector
    of media, the head of a reward model, `train`. What comes from phase 1 (aligner.*) never trains, nor does a router's balancing bias."""
    if freeze and train:
        raise ConfigError("freeze and train are both set; they are opposites. Keep one of them.")
    packed = {plain_name(name) for name in specs if form_of(name) is not None}
    plain: dict[str, ParamSpec] = {}
    for name, spec in specs.items():
        if form_of(name) is not None:
            # bytes of a matrix: patterns choose it as the matrix it is
            spec = replace(spec, name=plain_name(name), shape=(1, *spec.shape))
        plain[spec.name] = spec
    updates = matching("adapter", plain)
    if updates:
        extra = select(train, plain, "train")
        quantised = sorted(extra & packed)
        if quantised:
            raise ConfigError(
                f"train is {list(train)}; it matches {quantised[0]}, which adapter.base stores quantised, and quantised weights cannot "
                "train. Remove it from train, or set adapter.base to null."
            )
        adapted = {split_name(name)[0] for name in updates}
        both = sorted(name for name in extra - updates if name.rpartition(".")[0] in adapted)
        if both:
            raise ConfigError(
                f"train is {list(train)}; it matches {both[0]}, whose layer has an adapter. Train one of the two."
            )
        beside = (matching(name, plain) for name in ("objective", "gates", "projector", "score"))
        names = updates.union(extra, *beside) - select(freeze, plain, "freeze")
    elif train:
        names = select(train, plain, "train")
    else:
        names = set(plain) - select(freeze, plain, "freeze")
    names = {name for name in names if plain[name].groups.isdisjoint({"aligner", "router_bias"})}
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


def make_groups(
    config: OptimConfig, specs: Specs, training: set[str], rules: Sequence[ParameterRule] = ()
) -> list[ParamGroup]:
    """Divide the trainable parameters into groups: one per rule (split by whether they decay), then decay and no_decay.

    `rules` are the objective's. The recipe's rules are applied first.
    """
    decaying = select(
        config.decay, specs, "optim.decay", may_be_empty=("biases", "norms", "objective")
    )
    split = partial(_split, specs=specs, parts=config.parts(specs))
    left = [name for name in specs if name in training]
    groups: list[ParamGroup] = []
    for index, rule in enumerate(config.groups):
        found = select(rule.match, specs, f"optim.groups.{index}.match")
        taken = tuple(name for name in left if name in found)
        left = [name for name in left if name not in found]
        groups += split(
            f"rule{index}", taken, decaying if rule.weight_decay is None else set(taken), rule
        )
    last: list[ParamGroup] = []
    for index, wanted in enumerate(rules):
        found = select(wanted.match, specs, "objective")
        taken = tuple(name for name in left if name in found)
        left = [name for name in left if name not in found]
        rule = GroupRule(
            match=wanted.match,
            lr=wanted.lr,
            betas=wanted.betas,
            weight_decay=wanted.weight_decay,
            maximize=wanted.maximize,
        )
        last += split(f"own{index}", taken, set(taken), rule)
    if GATES in left:
        raise ConfigError(
            "the model has head gates, but the objective has no target sparsity for them. Freeze them (freeze: [gates]), remove them "
            "(model.head_gates=null), or use objective head_sparsity."
        )
    own = {name for name in left if "objective" in specs[name].groups}
    groups += split("model", tuple(name for name in left if name not in own), decaying, None)
    groups += split("objective", tuple(name for name in left if name in own), decaying, None)
    return groups + last


def _split(
    name: str,
    names: tuple[str, ...],
    decaying: set[str],
    rule: GroupRule | None,
    specs: Specs,
    parts: Mapping[str, str],
) -> list[ParamGroup]:
    """By what updates them, by decay, and by precision: a group's parameters share one buffer."""
    made = [
        ParamGroup(
            f"{name}.{'decay' if decays else 'no_decay'}{'.wide' if wide else ''}{'.' if part else ''}{part}",
            tuple(n for n in names if (n in decaying) == decays and specs[n].is_wide == wide and parts.get(n, "") == part), rule, decays, part,
        )
        for wide in (False, True)
        for decays in (True, False)
        for part in ("", *sorted({*parts.values()} - {""}))
    ]  # fmt: skip
    return [group for group in made if group.names]


def hypers(
    config: OptimConfig,
    groups: Sequence[ParamGroup],
    step: int,
    total_steps: int,
    lr_factor: float = 1.0,
) -> dict[str, Hyper]:
    """The hyperparameters of every group at one step; all learning rates are multiplied by `lr_factor` (batch.lr_scaling)."""
    parts = {part: config.part(part) for part in dict.fromkeys(group.part for group in groups)}
    found = {group.name: _apply(group, parts[group.part], step, total_steps) for group in groups}
    return (
        found
        if lr_factor == 1.0
        else {name: replace(one, lr=one.lr * lr_factor) for name, one in found.items()}
    )


def _apply(group: ParamGroup, config: OptimConfig, step: int, total_steps: int) -> Hyper:
    base = config.hyper(step, total_steps)
    hyper = base if group.decays else replace(base, weight_decay=0.0)
    rule = group.rule
    if rule is None:
        return hyper
    changes = {
        key: value
        for key, value in (
            ("betas", rule.betas),
            ("eps", rule.eps),
            ("maximize", rule.maximize),
            ("weight_decay", rule.weight_decay),
        )
        if value is not None
    }
    peak = rule.lr if rule.lr_factor is None else config.lr * rule.lr_factor
    if peak is not None:
        # the group's peak follows the same schedule
        changes["lr"] = config.model_copy(update={"lr": peak}).hyper(step, total_steps).lr
    return replace(hyper, **changes)  # pyright: ignore[reportArgumentType]
