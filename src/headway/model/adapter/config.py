"""The `adapter` section of a recipe: low-rank updates of frozen linears, and which linears get
one. Imports without torch."""

from __future__ import annotations

import difflib
import math
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from headway.config.section import Section, setting
from headway.errors import ConfigError
from headway.kernels.packed_layout import PackedForm, PackedLayout, packed_name, plain_name
from headway.model.config import ModelConfig
from headway.model.layout import HEAD, ParamSpec, Specs, in_groups, param_specs
from headway.model.vision_shape import TOWER

EVERY = "all"
EXPERTS_TARGET = "experts"
HEAD_MODULE = HEAD.removesuffix(".weight")
PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
"""Names of an adapter's tensors after the path of its linear, as in PEFT. The third is DoRA's."""


class AdapterConfig(Section):
    """A low-rank update of chosen linears: W x becomes W x + alpha / rank * B A x, and only A
    and B train."""

    kind: Literal["lora", "dora"] = setting(
        "lora", "lora: W + s B A. dora: also rescales its rows to trained magnitudes."
    )
    rank: int = setting(16, "Rows of A and columns of B.", gt=0, le=65_536)
    alpha: float = setting(32.0, "The update is multiplied by alpha / rank.", gt=0)
    rslora: bool = setting(False, "Multiply by alpha / sqrt(rank) instead.")
    dropout: float = setting(0.0, "Dropout on the input of A.", ge=0, lt=1)
    targets: tuple[str, ...] = setting(
        (EVERY,),
        "Linears to adapt: all (those of the layers that every token passes), names such as q_proj "
        "or lm_head, shell patterns over paths such as visual.*; "
        "and experts, or one of their matrices such as experts.down_proj.",
        min_length=1,
    )
    base: PackedForm | None = setting(
        None,
        "How the frozen linears of the layers are stored: nf4 (4 bits, as QLoRA) or int8; null = "
        "in the compute precision.",
    )

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        if self.rslora:
            return self.alpha / math.sqrt(self.rank)
        return self.alpha / self.rank

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that each adapted linear gains."""
        if self.kind == "dora":
            return PARTS
        return PARTS[:2]

    def modules(self, model: ModelConfig) -> list[str]:
        """The paths of the adapted linears, in the order of the model; a target that matches
        none is an error."""
        paths = linears(model)
        experts = expert_linears(model)
        adapted: set[str] = set()
        for target in self.targets:
            matches = {path for path in paths if _matches(target, path)}
            matches |= {path for path in experts if _matches_experts(target, path)}
            if not matches:
                raise ConfigError(
                    f"adapter.targets holds {target!r}, which matches no "
                    f"linear{_why(target, model, paths)}"
                )
            adapted |= matches

        # The LM head is applied as one matrix (`AdaptedLinear.effective`), in chunks of tokens.
        if self.dropout and HEAD_MODULE in adapted:
            raise ConfigError(
                f"adapter.dropout is {self.dropout} and adapter.targets holds {HEAD_MODULE}, which "
                "supports no dropout. "
                f"Set dropout to 0, or remove {HEAD_MODULE}."
            )
        if not adapted.isdisjoint(experts) and (self.kind != "lora" or self.dropout):
            setting_given = f"adapter.kind is {self.kind}"
            if self.kind == "lora":
                setting_given = f"adapter.dropout is {self.dropout}"
            raise ConfigError(
                f"{setting_given} and adapter.targets holds experts, which take lora without "
                "dropout. Set kind lora and dropout 0."
            )
        return [path for path in [*paths, *experts] if path in adapted]

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the adapter."""
        sizes: dict[str, tuple[int, ...]] = {**linears(model), **expert_linears(model)}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.modules(model):
            *experts, outputs, inputs = sizes[path]
            part_shapes = (
                (*experts, self.rank, inputs),
                (*experts, outputs, self.rank),
                (outputs,),
            )
            # lora has the first two parts alone.
            for part, shape in zip(self.parts, part_shapes, strict=False):
                shapes[f"{path}.{part}"] = shape
        return shapes

    def layouts(self, model: ModelConfig) -> dict[str, PackedLayout]:
        """The weights that are stored quantised, by their plain names: those of all linears and
        experts of the layers, adapted or not."""
        if self.base is None:
            return {}
        layouts = {
            f"{path}.weight": PackedLayout(self.base, *shape)
            for path, shape in linears(model).items()
            if path != HEAD_MODULE and not path.startswith(TOWER)
        }
        # All experts of a layer are quantised as one tall matrix.
        for path, (experts, outputs, inputs) in expert_linears(model).items():
            layouts[f"{path}.weight"] = PackedLayout(self.base, experts * outputs, inputs, experts)
        return layouts

    def same_form(self, other: AdapterConfig, model: ModelConfig) -> bool:
        """Whether tensors of one may be used with the other; dropout may differ."""
        # The scale, not alpha: different pairs of alpha and rank scaling may mean the same.
        is_same = (self.kind, self.rank, self.scale) == (other.kind, other.rank, other.scale)
        return is_same and self.modules(model) == other.modules(model)


def split_name(name: str) -> tuple[str, str]:
    """(path of the linear, which of its tensors): `...q_proj`, `lora_A.weight`."""
    for part in PARTS:
        if name.endswith("." + part):
            return name[: -len(part) - 1], part
    path, _, leaf = name.rpartition(".")
    return path, leaf


def all_specs(model: ModelConfig, adapter: AdapterConfig | None) -> dict[str, ParamSpec]:
    """Every parameter as it is stored: the model's, quantised ones as bytes, and the adapter's."""
    known = {spec.name: spec for spec in param_specs(model)}
    if adapter is None:
        return known
    # Shapes as they are stored, in the order of the model, the adapter's last.
    layouts = adapter.layouts(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in known.values():
        layout = layouts.get(spec.name)
        if layout is None:
            shapes[spec.name] = spec.shape
        else:
            shapes[packed_name(spec.name, layout.form)] = (layout.nbytes,)
    shapes |= adapter.shapes(model)
    return {name: adapted_spec(name, shape, known) for name, shape in shapes.items()}


def adapted_spec(name: str, shape: tuple[int, ...], known: Specs) -> ParamSpec:
    """The spec of a parameter of a model with adapters, from those of the model without.

    An update and the bytes of a quantised matrix follow the matrix they belong to.
    """
    path, part = split_name(name)
    if part not in PARTS:
        if name in known:
            return known[name]
        # Bytes of a quantised matrix cannot be split by rows or columns.
        return replace(known[plain_name(name)], name=name, shape=shape, split="replicated")

    # `part`: a rank's gradient of A or B covers the outputs or inputs that it has of W.
    weight = known.get(f"{path}.weight", ParamSpec(name, shape))
    inherited = weight.groups & in_groups("expert", "embedding")
    spec = ParamSpec(
        name,
        shape,
        stage=weight.stage,
        covers="part",
        start="given",
        groups=inherited | in_groups("adapter"),
        depth=weight.depth,
    )
    # A of a row-split matrix is split by its inputs, B and the magnitude of another by their
    # outputs. The rest is whole on every rank.
    if weight.split == "row" and part == PARTS[0]:
        return replace(spec, split="row")
    if weight.split in ("column", "vocab") and part != PARTS[0]:
        return replace(spec, split="column", of_kv_heads=weight.of_kv_heads)
    return spec


def linears(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Path -> (outputs, inputs) of every linear, in the order of the model; a tied head is not a
    linear."""
    if model.hf_config is not None:
        from headway.model.stock.facts import facts_of  # needs torch

        return facts_of(model).linears
    return {
        split_name(spec.name)[0]: (spec.shape[0], spec.shape[1])
        for spec in param_specs(model)
        if "linear" in spec.groups and "expert" not in spec.groups
    }


def expert_linears(model: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Path -> (experts, outputs, inputs) of every matrix that is stacked over experts, in the
    order of the model."""
    return {
        split_name(spec.name)[0]: (spec.shape[0], spec.shape[1], spec.shape[2])
        for spec in param_specs(model)
        if spec.groups >= {"linear", "expert"}
    }


def _matches(target: str, path: str) -> bool:
    """Whether a target means a linear: by its path, its last component, or a shell pattern."""
    if target == EVERY:
        return path != HEAD_MODULE and not path.startswith(TOWER)
    leaf = path.rsplit(".", 1)[-1]
    return target in (path, leaf) or fnmatchcase(path, target)


def _matches_experts(target: str, path: str) -> bool:
    """Experts are adapted where a target says so: `all` and names of linears mean the linears
    that every token passes."""
    if target == EXPERTS_TARGET:
        return True
    if EXPERTS_TARGET not in target:
        return False
    return path.endswith(f".{target}") or target == path or fnmatchcase(path, target)


def _why(target: str, model: ModelConfig, paths: dict[str, tuple[int, int]]) -> str:
    """The end of the message about a target that matches nothing."""
    if target == HEAD_MODULE and model.tie_embeddings:
        return ": the head is the embedding (model.tie_embeddings). Remove it."
    for path in expert_linears(model):
        if fnmatchcase(path, target) or path.endswith(f".{target}"):
            leaf = target.rsplit(".", 1)[-1].strip("*")
            return f", only experts. Use {EXPERTS_TARGET} (all three matrices) or {EXPERTS_TARGET}.{leaf}."

    # Each name once, in the order of the model.
    leaves = list(dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths))
    close = difflib.get_close_matches(target, [*leaves, *paths], n=2)
    hint = ""
    if close:
        hint = f" Did you mean {' or '.join(map(repr, close))}?"
    return f"; there are {', '.join(leaves)}, and paths such as {next(iter(paths))}.{hint}"
