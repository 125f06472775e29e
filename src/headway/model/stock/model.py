"""A class of transformers behind headway's `Model`: its trunk makes hidden states of tokens;
attention, head, loss and cache are ours.

    tokens [B,T] -> the class's embedding, layers and final norm -> hidden [B,T,D]
                          |                                             |
      attention: headway's, inside documents or            LM head (fused loss), as for
      over a KV cache (attention.py)                       any other model

Parameters have the class's own names. Its modules are children of this one; a tied head is no
module here, so that a matrix exists once. What the class computes from its config (rotary
frequencies) are plain attributes: in fp32, whatever the weights are, on the device of the tokens.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.kernels.attention import ScoreRule, causal_mask, mask_of
from headway.model.adapter.lora import AdaptedLinear
from headway.model.base import (
    AttentionCache,
    CachedForward,
    Compiler,
    LMHead,
    Model,
    ModelOut,
)
from headway.model.layout import ParamSpec
from headway.model.router import Routing, counted_tokens, stack_routings, summarize
from headway.model.stock.attention import LayerPass, passing
from headway.model.stock.classes import empty_model
from headway.model.stock.facts import HEAD_MODULE, StockFacts, facts_of
from headway.model.stock.values import computed_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headway.data.batch import Batch
    from headway.model.config import ModelConfig
    from headway.model.projector import MediaTensors

BIAS_COLUMNS = 8
"""A head with a bias is one matrix: its bias and zeros are columns of it, so that rows keep an
aligned length."""


class StockModel(Model):
    """A decoder of transformers."""

    COMPILES = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.hf_config is not None
        self.config = config
        self.facts = facts_of(config)
        wrapped = empty_model(config.hf_config, trust_remote_code=config.trust_remote_code)
        self._computed = computed_values(wrapped)
        self._device = torch.device("cpu")
        """Where the computed values are."""
        self._inner: tuple[nn.Module, _HeadReader] | None = None
        has_tied_bias = self.facts.tied is not None and self.facts.head_bias is not None
        if self.facts.head != HEAD_MODULE or has_tied_bias:
            # Its head lies between other modules, or is a bias alone: the class itself is called
            # up to the head.
            head = wrapped.get_submodule(self.facts.head)
            reader = _HeadReader(head, self.facts)
            wrapped.set_submodule(self.facts.head, reader)
            # No child: its modules are children of this one.
            object.__setattr__(self, "_inner", (wrapped, reader))
        for name, child in wrapped.named_children():
            if name != HEAD_MODULE or self.facts.tied is None or self._inner is not None:
                self.add_module(name, child)
        # FSDP needs outputs that are no views.
        for layer in self.blocks().values():
            layer.register_forward_hook(_own_memory)
        self.is_random = self.facts.is_random
        if self.facts.balance is not None:
            collect = partial(_collect, self.facts.balance.index)
            for path in self.facts.balance.routers:
                self.get_submodule(path).register_forward_hook(collect)
        self.use_attention("auto")

    def param_specs(self) -> list[ParamSpec]:
        """As one forward through the class has shown them."""
        return list(self.facts.specs)

    def forward_batch(self, batch: Batch, seed: int | None = None) -> ModelOut:
        """Nothing is sampled besides dropout."""
        logits: list[Tensor] = []
        hidden = self(batch.tokens, batch.position, self._pass(mask_of(batch)), logits)
        head = LMHead(
            hidden,
            self.head_weight,
            self.chunk_tokens,
            self.head_grad_buffer,
            softcap=self.facts.logit_softcap,
        )
        return ModelOut(head, routing=self._routing(logits, batch))

    def _routing(self, logits: list[Tensor], batch: Batch) -> Routing | None:
        """What routers did, for the balance loss that the class asks for."""
        balance = self.facts.balance
        if balance is None:
            return None
        counted = counted_tokens(batch)
        routings: list[Routing] = []
        for layer_logits in logits:
            scores_in = layer_logits.float().view(*batch.tokens.shape, -1)
            scores = torch.softmax(scores_in, dim=-1)
            # As the class counts: the best of these, whatever its experts were chosen by.
            chosen = scores.detach().topk(balance.experts.per_token, dim=-1).indices
            taken = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
            routings.append(summarize(scores_in, scores, taken, counted))
        return stack_routings(routings)

    def forward(
        self,
        tokens: Tensor,
        position: Tensor,
        layer_pass: LayerPass,
        router_logits: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden [B,T,D] as the head reads them: scaled, and with a column of ones for its bias.

        `router_logits` receives those of every layer, where the class has a balance loss."""
        self._move_computed(tokens.device)
        # There is no padding; what a token sees, our mask function decides.
        all_visible = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.device)
        # A row of a decoding batch that takes no part stands at -1.
        position_ids = position.clamp(min=0).long() + self.facts.position_start
        arguments = {
            "input_ids": tokens,
            "position_ids": position_ids,
            "attention_mask": all_visible,
            "use_cache": False,
        }
        with passing(layer_pass), _collecting(router_logits):
            if self._inner is None:
                hidden = self.get_submodule(self.facts.trunk)(**arguments)[0]
            else:
                wrapped, reader = self._inner
                wrapped(**arguments)
                hidden = reader.take()

        if self.facts.logit_scale != 1.0:
            hidden = hidden * self.facts.logit_scale
        if self._head_bias is None:
            return hidden
        # [h, 1, 0 ...] times [W, b, 0 ...] is W h + b: the fused loss knows products alone.
        columns = F.pad(hidden.new_ones(*hidden.shape[:-1], 1), (0, BIAS_COLUMNS - 1))
        return torch.cat([hidden, columns], dim=-1)

    def blocks(self) -> Mapping[str, nn.Module]:
        """The layers of the class."""
        layers = self.get_submodule(self.facts.layers.rstrip("."))
        return {f"{self.facts.layers}{index}": layer for index, layer in layers.named_children()}

    @property
    def head_parameter(self) -> str | None:
        """None with an adapter on the head, and with a bias."""
        if self._head_bias is not None:
            return None
        if self.facts.tied is not None:
            return self.facts.tied
        if isinstance(self._head, AdaptedLinear):
            return None
        return f"{self.facts.head}.weight"

    @property
    def head_weight(self) -> Tensor:
        """[V,D]; the embedding's matrix where the two are tied."""
        bias = self._head_bias
        if self.facts.tied is not None:
            weight = self.get_parameter(self.facts.tied)
        else:
            head = self._head
            weight = head.effective if isinstance(head, AdaptedLinear) else head.weight
        if bias is None:
            return weight
        return torch.cat([weight, F.pad(bias[:, None], (0, BIAS_COLUMNS - 1))], dim=1)

    @property
    def _head(self) -> nn.Linear | _HeadReader:
        head = self.get_submodule(self.facts.head)
        assert isinstance(head, (nn.Linear, _HeadReader))
        return head

    @property
    def _head_bias(self) -> Tensor | None:
        name = self.facts.head_bias
        return None if name is None else self.get_parameter(name)

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped where the class does so."""
        logits = super().logits(hidden)
        cap = self.facts.logit_softcap
        if cap is None:
            return logits
        return torch.tanh(logits / cap) * cap

    def use_attention(self, backend: str) -> None:
        """Compute attention with one backend in every layer."""
        facts = self.facts
        rule = ScoreRule(facts.softcap)
        self._pass = partial(
            LayerPass, facts.layer_windows, rule, facts.kv_heads, facts.head_size, backend
        )

    def hidden_states(
        self, tokens: Tensor, position: Tensor, media: MediaTensors | None = None
    ) -> Tensor:
        """Under a causal mask."""
        if media is not None:
            raise ConfigError("media are given; a model of family transformers reads text alone.")
        mask = causal_mask(tokens.shape[0], tokens.shape[1], tokens.device)
        return self(tokens, position, self._pass(mask))

    def cached_forward(
        self, compiler: Compiler | None = None, *, keeps_routes: bool = False
    ) -> CachedForward:
        """Nothing is compiled."""
        # Routers of a class have no place in headway's config, so nobody asks for their choices.
        assert not keeps_routes

        def forward(
            tokens: Tensor,
            position: Tensor,
            cache: AttentionCache,
            media: MediaTensors | None = None,
        ) -> Tensor:
            return self(tokens, position, self._pass(None, cache, position))

        return forward

    def _move_computed(self, device: torch.device) -> None:
        """Move what the class computed from its config to where the tokens are."""
        if device != self._device:
            for module, name in self._computed:
                object.__setattr__(module, name, getattr(module, name).to(device))
            self._device = device


class _HeadReader(nn.Module):
    """Stands where a head was inside of other modules: keeps what the head would read, and makes
    no logits."""

    def __init__(self, head: nn.Module, facts: StockFacts) -> None:
        super().__init__()
        assert isinstance(head, nn.Linear)
        # The same names as those of the head; what is shared stays where it is shared with.
        if facts.tied is None:
            self.weight = head.weight
        if facts.head_bias == f"{facts.head}.bias":
            self.bias = head.bias
        self._hidden: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Anything: nobody reads these logits."""
        self._hidden = hidden
        return hidden.detach()

    def take(self) -> Tensor:
        """What the head would have read."""
        hidden = self._hidden
        assert hidden is not None, "the class calls its head"
        self._hidden = None
        return hidden


_LOGITS: ContextVar[list[Tensor] | None] = ContextVar("router_logits", default=None)


@contextmanager
def _collecting(logits: list[Tensor] | None) -> Iterator[None]:
    """Routers that are called inside of this context add their logits to a list."""
    # Outside of it, when a layer is recomputed in backward, nothing is collected twice.
    token = _LOGITS.set(logits)
    try:
        yield
    finally:
        _LOGITS.reset(token)


def _collect(index: int, _router: nn.Module, _inputs: Any, output: Any) -> None:
    """The hook of a router."""
    logits = _LOGITS.get()
    if logits is not None:
        logits.append(output[index] if isinstance(output, tuple) else output)


def _own_memory(_layer: nn.Module, _inputs: Any, output: Any) -> Any:
    """What a layer returns, copied if it is a view: FSDP attaches its backward hook to the
    tensor, and a change in place would lose it."""
    if isinstance(output, Tensor) and output._is_view():
        return output.clone()
    return output
