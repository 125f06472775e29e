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
from math import prod

from headway.errors import ConfigError
from headway.kernels.packed_layout import form_of, plain_name
from headway.model.layout import GATES, ROUTER_BIAS, SCORE
from headway.model.media_shape import ALIGNER, PROJECTOR
from headway.optim.base import GroupRule, Hyper, OptimConfig
from headway.tasks.base import ParameterRule

Shapes = Mapping[str, tuple[int, ...]]
OBJECTIVE = "objective."
ADAPTER = ".lora_"
"""Part of the name of every adapter parameter, after the path of its linear."""
_LAYERS = re.compile(r"layers\.(\d+)(?:-(\d+))?")
NAMED = (
    "weights",
    "gates",
    "objective",
    "adapter",
    "projector",
    "score",
    "embeddings",
    "matrices",
    "norms",
    "biases",
)
_LAYER_OF = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def matching(pattern: str, shapes: Shapes) -> set[str]:
    """The parameter names a pattern means."""
    own = {name for name in shapes if name.startswith(OBJECTIVE)}
    gates = {name for name in shapes if name == GATES}
    weights = set(shapes) - own - gates
    layers = _LAYERS.fullmatch(pattern)
    if layers:
        first, last = int(layers[1]), int(layers[2] or layers[1])
        return {
            n for n in weights if (found := _LAYER_OF.search(n)) and first <= int(found[1]) <= last
        }
    named = {
        "weights": weights,
        "objective": own,
        "adapter": {n for n in weights if ADAPTER in n},
        "projector": {n for n in weights if n.startswith(PROJECTOR)},
        "score": {n for n in weights if n == SCORE},
        "gates": gates,
        "matrices": {n for n in weights if is_matrix(n, shapes[n])},
        "embeddings": {n for n in weights if "embed_tokens" in n or n.startswith("lm_head")},
        "norms": {n for n in weights if "norm" in n.rsplit(".", 2)[-2]},
        "biases": {n for n in weights if n.endswith(".bias")},
    }
    return named[pattern] if pattern in named else {n for n in shapes if fnmatchcase(n, pattern)}


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix or a stack of them; the biases of stacked experts have two dimensions and are none."""
    return len(shape) >= 2 and not name.endswith(".bias")


def select(
    patterns: Iterable[str], shapes: Shapes, key: str, *, may_be_empty: tuple[str, ...] = ()
) -> set[str]:
    """The union of patterns; one that matches nothing is a mistake."""
    chosen: set[str] = set()
    for pattern in patterns:
        found = matching(pattern, shapes)
        if not found and pattern not in may_be_empty:
            raise ConfigError(
                f"{key} contains {pattern!r}, which matches no parameter{_near(pattern, shapes)}"
            )
        chosen |= found
    return chosen


def _near(pattern: str, shapes: Shapes) -> str:
    """What a pattern that matches nothing may have meant."""
    blocks = sorted({int(found[1]) for name in shapes if (found := _LAYER_OF.search(name))})
    if _LAYERS.fullmatch(pattern) and blocks:
        return f"; blocks are numbered {blocks[0]} to {blocks[-1]}."
    modules = dict.fromkeys(name.rsplit(".", 1)[0] for name in shapes)
    leaves = dict.fromkeys(f"*.{path.rsplit('.', 1)[-1]}.*" for path in modules)
    near = difflib.get_close_matches(pattern, [*NAMED, *leaves, *shapes], n=3, cutoff=0.5)
    bare = difflib.get_close_matches(
        pattern.strip("*."), [leaf.strip("*.") for leaf in leaves], n=2
    )
    close = list(dict.fromkeys([*(f"*.{leaf}.*" for leaf in bare), *near]))
    hint = f"; close to it are {', '.join(map(repr, close[:3]))}" if close else ""
    return f"{hint}; names look like {next(iter(shapes), 'none')!r}, blocks like layers.0-3."


@dataclass(frozen=True)
class Count:
    """What one pattern matches."""

    pattern: str
    tensors: int
    parameters: int


def count(patterns: Sequence[str], shapes: Shapes) -> list[Count]:
    """How much every pattern matches, each on its own."""
    found = [(pattern, matching(pattern, shapes)) for pattern in patterns]
    return [
        Count(pattern, len(names), sum(prod(shapes[name]) for name in names))
        for pattern, names in found
    ]


def trainable(shapes: Shapes, freeze: Sequence[str], train: Sequence[str]) -> set[str]:
    """The names that train: all but the frozen ones, or only those of `train`. With adapters: adapters, gates, the objective, the projector
    of media, the head of a reward model, `train`. What comes from phase 1 (aligner.*) never trains, nor does a router's balancing bias."""
    if freeze and train:
        raise ConfigError("freeze and train are both set; they are opposites. Keep one of them.")
    packed = {plain_name(name) for name in shapes if form_of(name) is not None}
    shapes = {
        plain_name(name): (1, *shape) if form_of(name) is not None else shape
        for name, shape in shapes.items()
    }
    updates = matching("adapter", shapes)
    if updates:
        extra = select(train, shapes, "train")
        quantised = sorted(extra & packed)
        if quantised:
            raise ConfigError(
                f"train is {list(train)}; it matches {quantised[0]}, which adapter.base stores quantised, and quantised weights cannot "
                "train. Remove it from train, or set adapter.base to null."
            )
        adapted = {name.partition(ADAPTER)[0] for name in updates}
        both = sorted(name for name in extra - updates if name.rpartition(".")[0] in adapted)
        if both:
            raise ConfigError(
                f"train is {list(train)}; it matches {both[0]}, whose layer has an adapter. Train one of the two."
            )
        beside = (matching(name, shapes) for name in ("objective", "gates", "projector", "score"))
        names = updates.union(extra, *beside) - select(freeze, shapes, "freeze")
    else:
        names = (
            select(train, shapes, "train")
            if train
            else set(shapes) - select(freeze, shapes, "freeze")
        )
    names = {
        name for name in names if not name.startswith(ALIGNER) and not name.endswith(ROUTER_BIAS)
    }
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


def is_wide(name: str) -> bool:
    """Whether a parameter is always fp32 and, with fsdp, whole on every rank."""
    return name.startswith(OBJECTIVE) or name == GATES or name.endswith(ROUTER_BIAS)


def make_groups(
    config: OptimConfig, shapes: Shapes, training: set[str], rules: Sequence[ParameterRule] = ()
) -> list[ParamGroup]:
    """Divide the trainable parameters into groups: one per rule (split by whether they decay), then decay and no_decay.

    `rules` are the objective's. The recipe's rules are applied first.
    """
    decaying = select(
        config.decay, shapes, "optim.decay", may_be_empty=("biases", "norms", "objective")
    )
    split = partial(_split, parts=config.parts(shapes))
    left = [name for name in shapes if name in training]
    groups: list[ParamGroup] = []
    for index, rule in enumerate(config.groups):
        found = select(rule.match, shapes, f"optim.groups.{index}.match")
        taken = tuple(name for name in left if name in found)
        left = [name for name in left if name not in found]
        groups += split(
            f"rule{index}", taken, decaying if rule.weight_decay is None else set(taken), rule
        )
    last: list[ParamGroup] = []
    for index, own in enumerate(rules):
        found = select(own.match, shapes, "objective")
        taken = tuple(name for name in left if name in found)
        left = [name for name in left if name not in found]
        rule = GroupRule(
            match=own.match,
            lr=own.lr,
            betas=own.betas,
            weight_decay=own.weight_decay,
            maximize=own.maximize,
        )
        last += split(f"own{index}", taken, set(taken), rule)
    if GATES in left:
        raise ConfigError(
            "the model has head gates, but the objective has no target sparsity for them. Freeze them (freeze: [gates]), remove them "
            "(model.head_gates=null), or use objective head_sparsity."
        )
    groups += split("model", tuple(n for n in left if not n.startswith(OBJECTIVE)), decaying, None)
    groups += split("objective", tuple(n for n in left if n.startswith(OBJECTIVE)), decaying, None)
    return groups + last


def _split(
    name: str,
    names: tuple[str, ...],
    decaying: set[str],
    rule: GroupRule | None,
    parts: Mapping[str, str],
) -> list[ParamGroup]:
    """By what updates them, by decay, and by precision: a group's parameters share one buffer."""
    made = [
        ParamGroup(
            f"{name}.{'decay' if decays else 'no_decay'}{'.wide' if wide else ''}{'.' if part else ''}{part}",
            tuple(n for n in names if (n in decaying) == decays and is_wide(n) == wide and parts.get(n, "") == part), rule, decays, part,
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
