"""A family whose model ranks may split, with names that say nothing to headway: `wte`, `ln_1`, `ln_f`, a scale without a module."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.data.batch import Batch
from headway.kernels.vocab_loss import VocabShard
from headway.model.base import LayerSplit, LMHead, Model, ModelOut
from headway.model.config import ModelConfig
from headway.model.families.llama import *  # noqa: F403
from headway.model.layout import ParamSpec, Split


def identity(x: Tensor) -> Tensor:
    """x."""
    return x


class Layer(nn.Module):
    """One residual layer: `up` is split by outputs, `down` by inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gather_input: Callable[[Tensor], Tensor] = identity
        self.reduce_output: Callable[[Tensor], Tensor] = identity

    def forward(self, x: Tensor) -> Tensor:
        return x + self.reduce_output(self.down(F.gelu(self.up(self.gather_input(self.ln_1(x))))))


class SplitModel(Model):
    """Every token is predicted from itself alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.wte = nn.Embedding(
            config.vocab, config.hidden_size, _weight=torch.empty(config.vocab, config.hidden_size)
        )
        self.h = nn.ModuleList(Layer(config.hidden_size) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.vocab, bias=False)
        self.vocab: VocabShard | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) * (1 + self.scale)
        for layer in self.h:
            x = layer(x)
        return self.ln_f(x)

    def forward_batch(self, batch: Batch, seed: int | None = None) -> ModelOut:
        hidden = self(batch.tokens)
        return ModelOut(
            LMHead(hidden, self.out.weight, self.chunk_tokens, self.head_grad_buffer, self.vocab)
        )

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"h.{index}": layer for index, layer in enumerate(self.h)}

    def param_specs(self) -> list[ParamSpec]:
        splits: dict[str, Split] = {"wte.weight": "vocab", "out.weight": "vocab"}
        for index in range(self.config.num_layers):
            splits |= {
                f"h.{index}.up.weight": "column",
                f"h.{index}.up.bias": "column",
                f"h.{index}.down.weight": "row",
            }
        return [
            replace(spec, split=splits.get(spec.name, "replicated"))
            for spec in super().param_specs()
        ]

    def split_layers(self, split: LayerSplit) -> None:
        self.vocab = split.vocab
        for layer in self.h:
            assert isinstance(layer, Layer)
            layer.gather_input = split.gather_input
            layer.reduce_output = split.reduce_output

    @property
    def head_weight(self) -> Tensor:
        return self.out.weight

    @property
    def head_parameter(self) -> str:
        return "out.weight"


def build(config: ModelConfig) -> Model:
    """The model of a config."""
    return SplitModel(config)
