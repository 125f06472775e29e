"""Updates of linears that a family's files join or transpose: ours come in, those of the modules of
transformers (stock modules) go out, and back.

    ours     q: B_q A_q      k: B_k A_k      v: none           rank r each
    stock    qkv_proj:  A = [A_q]    B = [B_q  0 ]             rank 2 r, alpha times 2: the same scale
                            [A_k]        [ 0  B_k]
                                         [ 0   0 ]

The notes of the file say which of ours a module holds, so that reading gives ours back as they
were. An adapter that PEFT wrote has no notes: there each of ours gets the whole A and its rows of
B, which is the same update.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.model.adapter.config import PARTS, AdapterConfig, linears
from headway.model.families.base import family_of, pieces_of
from headway.model.layout import param_specs

if TYPE_CHECKING:
    from torch import Tensor

    from headway.model.config import ModelConfig

A, B = PARTS[:2]
NOTE = "joined"
"""The note of adapter_model.safetensors: their module -> names of ours, as JSON."""


@dataclass(frozen=True)
class StockModule:
    """A linear of transformers' class that holds some of our linears."""

    path: str
    outputs: int
    rows: dict[str, list[int]]
    """Our path -> its rows of their matrix, in our order; the path with the first row is first."""
    is_transposed: bool


def stock_modules(model: ModelConfig) -> dict[str, StockModule]:
    """Their modules by their paths: those that join or transpose ours."""
    family = family_of(model.family)
    if "pieces" not in vars(family) or model.hf_config is not None:
        return {}

    # Only linears that one tensor of theirs holds: stacked experts have no form in PEFT.
    adaptable = {f"{path}.weight" for path in linears(model)}
    modules: dict[str, StockModule] = {}
    for spec in param_specs(model):
        if spec.name not in adaptable:
            continue
        pieces = pieces_of(family, spec, model)
        if len(pieces) != 1 or (pieces[0].dim is None and not pieces[0].transposed):
            continue
        piece = pieces[0]
        path = piece.name.removesuffix(".weight")
        whole = spec.shape[0]
        if piece.dim is not None:
            whole = piece.stop
        if piece.period:
            whole = spec.shape[0] // (piece.stop - piece.start) * piece.period

        rows = {spec.name.removesuffix(".weight"): piece.rows(whole)}
        if path in modules:
            rows |= modules[path].rows
        rows = dict(sorted(rows.items(), key=lambda entry: entry[1]))
        outputs = max(max(ours) for ours in rows.values()) + 1
        modules[path] = StockModule(path, outputs, rows, piece.transposed)
    return modules


def patterns(
    config: AdapterConfig, joined: Mapping[str, list[str]]
) -> tuple[dict[str, int], dict[str, float]]:
    """rank_pattern and alpha_pattern of modules that hold several updates each, so that the
    scale stays."""
    ranks = {path: config.rank * len(ours) for path, ours in joined.items() if len(ours) > 1}
    # The scale is alpha / rank, or alpha / sqrt(rank) with rslora.
    exponent = 0.5 if config.rslora else 1
    alphas = {path: config.alpha * (rank / config.rank) ** exponent for path, rank in ranks.items()}
    return ranks, alphas


def held_by(config: AdapterConfig, model: ModelConfig) -> dict[str, list[str]]:
    """Stock modules -> the paths of ours with an update that they hold, in the order of rows.

    None for dora, whose magnitudes are of whole rows of every part.
    """
    if config.kind != "lora":
        return {}
    adapted = set(config.modules(model))
    held: dict[str, list[str]] = {}
    for path, module in stock_modules(model).items():
        ours = [our_path for our_path in module.rows if our_path in adapted]
        if ours:
            held[path] = ours
    return held


def joined_updates(
    values: Mapping[str, Tensor], held: Mapping[str, list[str]], model: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """A and B of stock modules, by the path of the module and the name of the tensor (see
    above)."""
    import torch

    modules = stock_modules(model)
    for path, ours in held.items():
        downs = [values[f"{our_path}.{A}"] for our_path in ours]
        ups = [values[f"{our_path}.{B}"] for our_path in ours]
        joined_up = ups[0].new_zeros(modules[path].outputs, sum(up.shape[1] for up in ups))
        column = 0
        for our_path, up in zip(ours, ups, strict=True):
            rows = modules[path].rows[our_path]
            joined_up[rows, column : column + up.shape[1]] = up
            column += up.shape[1]
        yield f"{path}.{A}", torch.cat(downs)
        yield f"{path}.{B}", joined_up


def note_of(held: Mapping[str, list[str]]) -> dict[str, str]:
    """The note of a file with joined updates; nothing where there are none."""
    if held:
        return {NOTE: json.dumps(held, separators=(",", ":"))}
    return {}


def read_note(notes: Mapping[str, str] | None, model: ModelConfig) -> dict[str, list[str]]:
    """Which of our linears each of their modules holds; nothing where the file does not say it
    of this model."""
    # A note of another model, or one that was edited, counts as none.
    try:
        joined = json.loads((notes or {}).get(NOTE, "{}"))
        modules = stock_modules(model)
        return {
            path: list(ours)
            for path, ours in joined.items()
            if ours and set(ours) <= set(modules[path].rows)
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def split_update(
    module: StockModule, part: str, value: Tensor, ours: list[str] | None
) -> Iterator[tuple[str, Tensor]]:
    """Our updates of one tensor of a stock module.

    `ours`: the linears whose updates it joins, one beside the other; None: an update that PEFT
    wrote.
    """
    rank_dim = 0 if part == A else 1
    if ours is not None and part in (A, B) and value.shape[rank_dim] % len(ours):
        ours = None  # not what was written; the caller refuses the shapes
    for path, rows in module.rows.items():
        if ours is not None and path not in ours:
            continue
        share = value if part == A else value[rows]
        if ours is not None and part in (A, B):
            share = share.chunk(len(ours), rank_dim)[ours.index(path)]
        yield f"{path}.{part}", share
