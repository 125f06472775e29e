"""The `adapter` section of a recipe: low-rank updates of frozen linears, and which linears get one. Imports without torch."""

from __future__ import annotations

import difflib
import math
from fnmatch import fnmatchcase
from typing import Literal

from headway.config.section import Section, setting
from headway.errors import ConfigError
from headway.kernels.packed_layout import PackedForm, PackedLayout, packed_name
from headway.model.config import ModelConfig
from headway.model.layout import HEAD, STACKED, ParamSpec, param_specs

EVERY = "all"
HEAD_MODULE = HEAD.removesuffix(".weight")
PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
"""Names of an adapter's tensors after the path of its linear, as in PEFT."""


class AdapterConfig(Section):
    """A low-rank update of chosen linears: W x becomes W x + alpha / rank * B A x, and only A and B train."""

    kind: Literal["lora", "dora"] = setting("lora", "lora: W + s B A. dora: also rescales its rows to trained magnitudes.")
    rank: int = setting(16, "Rows of A and columns of B.", gt=0, le=65_536)
    alpha: float = setting(32.0, "The update is multiplied by alpha / rank.", gt=0)
    rslora: bool = setting(False, "Multiply by alpha / sqrt(rank) instead.")
    dropout: float = setting(0.0, "Dropout on the input of A.", ge=0, lt=1)
    targets: tuple[str, ...] = setting(
        (EVERY,),
        "Linears to adapt: all (those of the layers), names such as q_proj or lm_head, or shell patterns over paths.",
        min_length=1,
    )
    base: PackedForm | None = setting(
        None, "How the frozen linears of the layers are stored: nf4 (4 bits, as QLoRA) or int8; null = in the compute precision."
    )

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that each adapted linear gains."""
        return PARTS if self.kind == "dora" else PARTS[:2]

    def modules(self, model: ModelConfig) -> list[str]:
        """The paths of the adapted linears, in the order of the model; a target that matches none is an error."""
        paths = linears(model)
        wanted: set[str] = set()
        for target in self.targets:
            found = {path for path in paths if _matches(target, path)}
            if not found:
                raise ConfigError(f"adapter.targets holds {target!r}, which matches no linear{_why(target, model, paths)}")
            wanted |= found
        if self.dropout and HEAD_MODULE in wanted:
            raise ConfigError(
                f"adapter.dropout is {self.dropout} and adapter.targets holds {HEAD_MODULE}, which supports no dropout. "
                f"Set dropout to 0, or remove {HEAD_MODULE}."
            )
        return [path for path in paths if path in wanted]

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the adapter."""
        sizes = linears(model)
        found: dict[str, tuple[int, ...]] = {}
        for path in self.modules(model):
            outputs, inputs = sizes[path]
            of: dict[str, tuple[int, ...]] = dict(zip(PARTS, ((self.rank, inputs), (outputs, self.rank), (outputs,)), strict=True))
            found |= {f"{path}.{part}": of[part] for part in self.parts}
        return found

    def layouts(self, model: ModelConfig) -> dict[str, PackedLayout]:
        """The weights that are stored quantised, by their plain names: those of all linears of the layers, adapted or not."""
        if self.base is None:
            return {}
        return {f"{path}.weight": PackedLayout(self.base, *shape) for path, shape in linears(model).items() if path != HEAD_MODULE}

    def all_shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter as it is stored: the model's, quantised ones as bytes, and the adapter's."""
        layouts = self.layouts(model)
        found: dict[str, tuple[int, ...]] = {}
        for spec in param_specs(model):
            layout = layouts.get(spec.name)
            found |= {spec.name: spec.shape} if layout is None else {packed_name(spec.name, layout.form): (layout.nbytes,)}
        return found | self.shapes(model)

    def same_form(self, other: AdapterConfig, model: ModelConfig) -> bool:
        """Whether tensors of one may be used with the other; dropout may differ."""
        is_same = (self.kind, self.rank, self.scale) == (other.kind, other.rank, other.scale)
        return is_same and self.modules(model) == other.modules(model)


def linears(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Path -> (outputs, inputs) of every linear, in the order of the model; a tied head is not a linear."""
    if model.hf_config is not None:
        from headway.model.stock.facts import facts_of  # a class of transformers names its own

        return facts_of(model).linears
    matrices = [spec for spec in param_specs(model) if len(spec.shape) == 2 and spec.name.endswith(".weight")]
    found = {
        spec.name: spec.shape for spec in matrices if spec.split in ("column", "row") or ".self_attn." in spec.name or spec.name == HEAD
    }
    return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in found.items()}


def stacked(model: ModelConfig) -> list[ParamSpec]:
    """The matrices of experts."""
    return [spec for spec in param_specs(model) if len(spec.shape) == STACKED]


def _matches(target: str, path: str) -> bool:
    if target == EVERY:
        return path != HEAD_MODULE
    return target in (path, path.rsplit(".", 1)[-1]) or fnmatchcase(path, target)


def _why(target: str, model: ModelConfig, paths: dict[str, tuple[int, int]]) -> str:
    if target == HEAD_MODULE and model.tie_embeddings:
        return ": the head is the embedding (model.tie_embeddings). Remove it."
    if any(fnmatchcase(spec.name.removesuffix(".weight"), target) or spec.name.endswith(f".{target}.weight") for spec in stacked(model)):
        return ": experts have no adapters. Remove it; attention and shared experts can have them."
    leaves = list(dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths))
    near = difflib.get_close_matches(target, [*leaves, *paths], n=2)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"; there are {', '.join(leaves)}, and paths such as {next(iter(paths))}.{hint}"
