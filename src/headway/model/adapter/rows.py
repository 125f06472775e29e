"""Several adapters over one model, a different one for each row of a batch: base weights stay, each row adds its own low-rank product.

    y[row] = W x[row] + bias + B[a] A[a] x[row],    a = the adapter of the row; 0 = none, whose A and B are zero

Shapes: O outputs, I inputs, R the largest rank: A [adapters + 1, R, I], B [adapters + 1, O, R], with the scale inside B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.model.adapter.config import HEAD_MODULE
from headway.model.adapter.lora import A, B
from headway.model.adapter.peft import PeftAdapter, is_adapter, read_adapter
from headway.model.config import ModelConfig


class AdapterRows:
    """Which adapter each row of the next forward uses."""

    def __init__(self, names: Sequence[str]) -> None:
        self.number = {name: index + 1 for index, name in enumerate(names)}
        """Of an adapter; 0 is none."""
        self.index: Tensor | None = None
        """int64 [B]: of rows with one token each."""
        self.spans: Sequence[tuple[slice, int]] = ()
        """Of stretches of one packed row, where `index` is None."""


class RowAdaptedLinear(nn.Linear):
    """A linear and the updates of several adapters; it takes over weight and bias."""

    def __init__(
        self, linear: nn.Linear, rows: AdapterRows, updates: Mapping[int, tuple[Tensor, Tensor]]
    ) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.weight, self.bias = linear.weight, linear.bias
        self.rows = rows
        rank, count = max(a.shape[0] for a, _ in updates.values()), len(rows.number) + 1
        like = linear.weight
        self.down = torch.zeros(
            count, rank, linear.in_features, dtype=like.dtype, device=like.device
        )
        self.up = torch.zeros(
            count, linear.out_features, rank, dtype=like.dtype, device=like.device
        )
        for number, (down, up) in updates.items():
            self.down[number, : len(down)] = down
            self.up[number, :, : up.shape[1]] = up

    def forward(self, input: Tensor) -> Tensor:
        """[B,T,O] of [B,T,I]."""
        y = F.linear(input, self.weight, self.bias)
        index = self.rows.index
        if index is not None:
            return y + (input @ self.down[index].mT) @ self.up[index].mT
        for span, number in self.rows.spans:
            y[:, span] += F.linear(F.linear(input[:, span], self.down[number]), self.up[number])
        return y


def load_adapters(
    model: nn.Module, config: ModelConfig, folders: Mapping[str, Path]
) -> AdapterRows:
    """Put the adapters of some PEFT folders over a model. Its other users see the base."""
    rows = AdapterRows(list(folders))
    updates: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for name, folder in folders.items():
        found = _readable(name, folder, config)
        for path in found.config.modules(config):
            pair = (
                found.updates[f"{path}.{A}"],
                found.config.scale * found.updates[f"{path}.{B}"].float(),
            )
            updates.setdefault(path, {})[rows.number[name]] = pair
    for path, of in updates.items():
        above, _, leaf = path.rpartition(".")
        owner = model.get_submodule(above)
        old = owner.get_submodule(leaf)
        if type(old) is not nn.Linear:
            raise ConfigError(
                f"adapters change {path}, which is a {type(old).__name__}; only plain linears take an adapter per request."
            )
        setattr(owner, leaf, RowAdaptedLinear(old, rows, of))
        if "joined" in vars(owner):
            vars(owner)["joined"] = (
                None  # a product of several linears at once would pass the updates by
            )
    return rows


def _readable(name: str, folder: Path, config: ModelConfig) -> PeftAdapter:
    final = folder / "final"
    folder = final if not is_adapter(folder) and is_adapter(final) else folder
    if not is_adapter(folder):
        raise ConfigError(
            f"adapter {name!r} is {str(folder)!r}, which has no adapter_config.json. Give a PEFT folder."
        )
    found = read_adapter(folder, config)
    reason = ""
    if found.config.kind == "dora":
        reason = "is a DoRA adapter"
    elif found.whole:
        reason = f"has fully trained parameters such as {next(iter(found.whole))}"
    elif HEAD_MODULE in found.config.modules(config):
        reason = f"changes {HEAD_MODULE}"
    elif any(path.endswith(".kv_b_proj") for path in found.config.modules(config)):
        reason = "changes kv_b_proj, which makes keys and values from the shared cache of latents"
    if reason:
        raise ConfigError(
            f"adapter {name!r} ({folder}) {reason}, which cannot be chosen per request. Give this folder as the model."
        )
    return found
