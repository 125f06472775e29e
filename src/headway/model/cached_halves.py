"""The halves of a block for inference over a cache: a block comes in; what computes q, k, v and
what follows attention go out, in a form for many tokens at once and a form for one token.

    x -> pre_attention -> q, k, v -> AttentionCache.attend -> o -> post_attention(x, o) -> x

The forms differ with latent attention alone (latent_attention.py). The cache's attention stands
between the halves, outside any compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from headway.model.latent_attention import LatentAttention
from headway.model.layers import FeedForward

if TYPE_CHECKING:
    from headway.model.base import Compiler, Expander
    from headway.model.transformer import Block


class Halves(NamedTuple):
    """One form of a block's two halves."""

    pre_attention: Callable[..., Any]
    post_attention: Callable[..., Any]
    expand: Expander | None = None
    """Makes keys and values of all heads of what the cache stores; None: q attends to what is
    stored."""


class LatentForms(nn.Module):
    """Halves of a block with latent attention, of which a cache stores latents."""

    def __init__(self, block: Block, attention: LatentAttention) -> None:
        super().__init__()
        self.block = block
        self.attention = attention

    def pre_attention_many(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,T,H,hd] and, twice, what the cache stores."""
        return self.attention.project_stored(self.block.attention_input(x), cos, sin)

    def pre_attention_one(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q' [B,1,H,W] and, twice, what the cache stores."""
        return self.attention.project_absorbed(self.block.attention_input(x), cos, sin)

    def post_attention_one(self, x: Tensor, o: Tensor) -> Any:
        """What `Block.post_attention` gives for the values of o [B,1,H,W]."""
        return self.block.post_attention(x, self.attention.values(o))

    def post_attention_one_chosen(self, x: Tensor, o: Tensor) -> Any:
        """The same with the experts of every token."""
        return self.block.post_attention_chosen(x, self.attention.values(o))


def _uncompiled(method: Any) -> Any:
    """The compiler of a model that runs eagerly."""
    return method


class CachedHalves:
    """Both forms of a block's halves."""

    def __init__(
        self, block: Block, compiler: Compiler | None = None, *, keeps_routes: bool = False
    ) -> None:
        """`keeps_routes`: `post_attention` of a layer with a mixture of experts also returns the
        experts of every token."""
        attention = block.mixer
        self.stateful = block.stateful
        """A mixer with a state, whose core the cache runs; None: the layer has keys and values."""
        keeps_routes = keeps_routes and not isinstance(block.mlp, FeedForward)
        post_attention = block.post_attention_chosen if keeps_routes else block.post_attention
        compiled = compiler or _uncompiled
        self._attention = attention
        # Each form is compiled once per block; eager models pass the methods through.
        if isinstance(attention, LatentAttention):
            # Many tokens: heads are expanded once for all queries. One token: to expand the whole
            # past for a single query would cost more than attention itself.
            forms = LatentForms(block, attention)
            one = forms.post_attention_one_chosen if keeps_routes else forms.post_attention_one
            self.many = Halves(
                compiled(forms.pre_attention_many), compiled(post_attention), attention.expand
            )
            self.one = Halves(compiled(forms.pre_attention_one), compiled(one))
        else:
            self.many = Halves(compiled(block.pre_attention), compiled(post_attention))
            self.one = self.many

    @property
    def sinks(self) -> Tensor | None:
        """The layer's trained sinks, [H]."""

        return self._attention.sinks

    def of(self, tokens: Tensor) -> Halves:
        """The form for tokens [B,T]."""
        if tokens.shape[1] == 1:
            return self.one
        return self.many
