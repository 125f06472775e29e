"""A family whose model is no Transformer: every token is predicted from itself alone, by an MLP. A user's module may bring such a model."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.data.batch import Batch
from headway.model.base import LMHead, Model, ModelOut
from headway.model.config import ModelConfig
from headway.model.families.llama import *  # noqa: F403


class Layer(nn.Module):
    """One residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) * scale


class MLPModel(Model):
    """Implements the contract with nothing but what it must have."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(
            config.vocab, config.hidden_size, _weight=torch.empty(config.vocab, config.hidden_size)
        )
        self.stack = nn.ModuleList(Layer(config.hidden_size) for _ in range(config.num_layers))
        self.out = nn.Linear(config.hidden_size, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        scale = torch.full((), 0.5, device=x.device)
        for layer in self.stack:
            x = layer(x, scale)
        return x

    def forward_batch(self, batch: Batch, seed: int | None = None) -> ModelOut:
        return ModelOut(
            LMHead(self(batch.tokens), self.head_weight, self.chunk_tokens, self.head_grad_buffer)
        )

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"stack.{index}": layer for index, layer in enumerate(self.stack)}

    @property
    def head_weight(self) -> Tensor:
        return self.out.weight

    @property
    def head_parameter(self) -> str:
        return "out.weight"


def build(config: ModelConfig) -> Model:
    """The model of a config."""
    return MLPModel(config)
