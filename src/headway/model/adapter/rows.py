"""Several adapters over one model, a different one for each row of a batch: base weights stay, each
row adds its own low-rank product.

    y[row] = W x[row] + bias + B[a] A[a] x[row],    a = the adapter of the row; 0 = none, whose A and B are zero

Shapes: O outputs, I inputs, R the largest rank: A [adapters + 1, R, I], B [adapters + 1, O, R],
with the scale inside B.
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
        """Name -> number of an adapter; 0 is none."""
        self.index: Tensor | None = None
        """int64 [B]: the adapter of each row, in a decoding step."""
        self.spans: Sequence[tuple[slice, int]] = ()
        """The adapter of each stretch of one packed row, in a prefill; used if `index` is None."""


class RowAdaptedLinear(nn.Linear):
    """A linear and the updates of several adapters; it takes over weight and bias."""

    def __init__(
        self, linear: nn.Linear, rows: AdapterRows, updates: Mapping[int, tuple[Tensor, Tensor]]
    ) -> None:
        # On the meta device: the weights that this would allocate are replaced at once.
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.weight = linear.weight
        self.bias = linear.bias
        self.rows = rows

        # Adapters of smaller rank, and those that do not change this linear, have zeros.
        rank = max(down.shape[0] for down, _ in updates.values())
        count = len(rows.number) + 1
        self.down = linear.weight.new_zeros(count, rank, linear.in_features)
        self.up = linear.weight.new_zeros(count, linear.out_features, rank)
        for number, (down, up) in updates.items():
            self.down[number, : len(down)] = down
            self.up[number, :, : up.shape[1]] = up

    def forward(self, input: Tensor) -> Tensor:
        """[B,T,O] of [B,T,I]."""
        y = F.linear(input, self.weight, self.bias)
        index = self.rows.index
        # Decoding: each row has its adapter. Gathering A and B by row keeps one shape for any mix
        # of adapters, so that a recorded step serves all of them.
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
        adapter = _readable(name, folder, config)
        for path in adapter.config.modules(config):
            down = adapter.updates[f"{path}.{A}"]
            up = adapter.config.scale * adapter.updates[f"{path}.{B}"].float()
            updates.setdefault(path, {})[rows.number[name]] = (down, up)

    for path, linear_updates in updates.items():
        parent, _, leaf = path.rpartition(".")
        owner = model.get_submodule(parent)
        linear = owner.get_submodule(leaf)
        if type(linear) is not nn.Linear:
            raise ConfigError(
                f"adapters change {path}, which is a {type(linear).__name__}; only plain linears "
                "take an adapter per request."
            )
        setattr(owner, leaf, RowAdaptedLinear(linear, rows, linear_updates))
        # A fused product of several linears (`Attention.fuse`) would not apply the updates.
        if "joined" in vars(owner):
            vars(owner)["joined"] = None
    return rows


def _readable(name: str, folder: Path, config: ModelConfig) -> PeftAdapter:
    """The adapter in a folder, or in the final/ of a run; refused if it cannot be chosen per
    request."""
    final = folder / "final"
    if not is_adapter(folder) and is_adapter(final):
        folder = final
    if not is_adapter(folder):
        raise ConfigError(
            f"adapter {name!r} is {str(folder)!r}, which has no adapter_config.json. Give a PEFT "
            "folder."
        )
    adapter = read_adapter(folder, config)
    modules = adapter.config.modules(config)
    reason = ""
    if adapter.config.kind == "dora":
        reason = "is a DoRA adapter"
    elif adapter.whole:
        reason = f"has fully trained parameters such as {next(iter(adapter.whole))}"
    elif HEAD_MODULE in modules:
        reason = f"changes {HEAD_MODULE}"
    elif any(path.endswith(".kv_b_proj") for path in modules):
        reason = "changes kv_b_proj, which makes keys and values from the shared cache of latents"
    if reason:
        raise ConfigError(
            f"adapter {name!r} ({folder}) {reason}, which cannot be chosen per request. Give this "
            "folder as the model."
        )
    return adapter
