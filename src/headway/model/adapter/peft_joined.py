"""Updates of linears that a family's files join or transpose: ours come in, those of its stock modules go out, and back.

    ours     q: B_q A_q      k: B_k A_k      v: none                  rank r each
    theirs   qkv_proj:  A = [A_q]    B = [B_q  0 ]                    rank 2 r, alpha times 2: the same scale
                            [A_k]        [ 0  B_k]
                                         [ 0   0 ]

The notes of the file say which of ours a module holds, so that reading gives ours back as they were. A stock adapter has no notes: there
each of ours gets the whole A and its rows of B, which is the same update.
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
    """A module of theirs that holds some of our linears."""

    path: str
    outputs: int
    rows: dict[str, tuple[int, int]]
    """Our path -> where its rows start and stop, in their order."""
    is_transposed: bool

    @property
    def is_joined(self) -> bool:
        """It holds several of ours."""
        return len(self.rows) > 1


def stock_modules(model: ModelConfig) -> dict[str, StockModule]:
    """Their modules by their paths: those that join or transpose ours."""
    family, wanted = family_of(model.family), {f"{path}.weight" for path in linears(model)}
    if "pieces" not in vars(family) or model.hf_config is not None:
        return {}
    found: dict[str, StockModule] = {}
    for spec in param_specs(model):
        pieces = pieces_of(family, spec, model) if spec.name in wanted else ()
        if len(pieces) != 1 or (pieces[0].dim is None and not pieces[0].transposed):
            continue
        piece, path = pieces[0], pieces[0].name.removesuffix(".weight")
        start, stop = (0, spec.shape[0]) if piece.dim is None else (piece.start, piece.stop)
        known = found[path].rows if path in found else {}
        rows = dict(
            sorted(
                {**known, spec.name.removesuffix(".weight"): (start, stop)}.items(),
                key=lambda one: one[1],
            )
        )
        found[path] = StockModule(
            path, max(end for _, end in rows.values()), rows, piece.transposed
        )
    return found


def patterns(
    config: AdapterConfig, joined: Mapping[str, list[str]]
) -> tuple[dict[str, int], dict[str, float]]:
    """rank_pattern and alpha_pattern of modules that hold several updates each: the scale stays."""
    ranks = {path: config.rank * len(ours) for path, ours in joined.items() if len(ours) > 1}
    alphas = {
        path: config.alpha * (rank / config.rank) ** (0.5 if config.rslora else 1)
        for path, rank in ranks.items()
    }
    return ranks, alphas


def held_by(config: AdapterConfig, model: ModelConfig) -> dict[str, list[str]]:
    """Their joined modules -> the paths of ours with an update, in the order of rows; nothing for dora, whose magnitudes are of whole rows
    of every part."""
    if config.kind != "lora":
        return {}
    adapted = set(config.modules(model))
    found = {
        path: [ours for ours in one.rows if ours in adapted]
        for path, one in stock_modules(model).items()
    }
    return {path: ours for path, ours in found.items() if ours}


def joined_updates(
    values: Mapping[str, Tensor], held: Mapping[str, list[str]], model: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Their updates, by the path of the module and the name of the tensor."""
    import torch

    modules = stock_modules(model)
    for path, ours in held.items():
        downs, ups = ([values[f"{one}.{part}"] for one in ours] for part in (A, B))
        whole = ups[0].new_zeros(modules[path].outputs, sum(up.shape[1] for up in ups))
        column = 0
        for one, up in zip(ours, ups, strict=True):
            start, stop = modules[path].rows[one]
            whole[start:stop, column : column + up.shape[1]] = up
            column += up.shape[1]
        yield f"{path}.{A}", torch.cat(downs)
        yield f"{path}.{B}", whole


def note_of(held: Mapping[str, list[str]]) -> dict[str, str]:
    """The note of a file with joined updates; nothing where there are none."""
    return {NOTE: json.dumps(held, separators=(",", ":"))} if held else {}


def read_note(notes: Mapping[str, str] | None, model: ModelConfig) -> dict[str, list[str]]:
    """Which of our linears each of their modules holds; nothing where the file does not say it of this model."""
    try:
        given = json.loads((notes or {}).get(NOTE, "{}"))
        modules = stock_modules(model)
        return {
            path: list(ours)
            for path, ours in given.items()
            if ours and set(ours) <= set(modules[path].rows)
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def split_update(
    module: StockModule, part: str, value: Tensor, ours: list[str] | None
) -> Iterator[tuple[str, Tensor]]:
    """Our updates of one of their tensors. `ours`: the linears whose updates it joins, one beside the other; None: a stock update."""
    if ours is not None and part in (A, B) and value.shape[0 if part == A else 1] % len(ours):
        ours = None  # not what was written; the caller refuses the shapes
    for path, (start, stop) in module.rows.items():
        if ours is not None and path not in ours:
            continue
        if part == A:
            yield (
                f"{path}.{part}",
                value if ours is None else value.chunk(len(ours), 0)[ours.index(path)],
            )
        else:
            rows = value[start:stop]
            yield (
                f"{path}.{part}",
                rows if ours is None or part != B else rows.chunk(len(ours), 1)[ours.index(path)],
            )
