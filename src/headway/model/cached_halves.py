"""The halves of a block as caches use them: a block comes in; what computes q, k, v and what follows attention go out, for many tokens at
once and for one token. They differ with latent attention alone (latent_attention.py).

A cache's attention stands between the two, outside any graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from headway.model.latent_attention import LatentAttention

if TYPE_CHECKING:
    from headway.model.base import Compiler, Expander
    from headway.model.transformer import Block


class Halves(NamedTuple):
    """One form of a block's two halves."""

    before: Callable[..., Any]
    after: Callable[..., Any]
    expand: Expander | None = None
    """Makes heads of what the cache stores."""


class LatentForms(nn.Module):
    """Halves of a block with latent attention, of which a cache stores latents."""

    def __init__(self, block: Block, attention: LatentAttention) -> None:
        super().__init__()
        self.block, self.attention = block, attention

    def before_many(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,T,H,hd] and, twice, what the cache stores."""
        return self.attention.project_stored(self.block.entered(x), cos, sin)

    def before_one(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q' [B,1,H,W] and, twice, what the cache stores."""
        return self.attention.project_absorbed(self.block.entered(x), cos, sin)

    def after_one(self, x: Tensor, o: Tensor) -> Any:
        """What `Block.after` gives for the values of o [B,1,H,W]."""
        return self.block.after(x, self.attention.values(o))


class CachedHalves:
    """Both forms of a block's halves."""

    def __init__(self, block: Block, compiler: Compiler | None = None) -> None:
        attention = block.self_attn
        made = (lambda method: method) if compiler is None else compiler
        self._attention = attention
        if isinstance(attention, LatentAttention):
            forms = LatentForms(block, attention)
            self.many = Halves(made(forms.before_many), made(block.after), attention.expand)
            self.one = Halves(made(forms.before_one), made(forms.after_one))
        else:
            self.many = self.one = Halves(made(block.before), made(block.after))

    @property
    def sinks(self) -> Tensor | None:
        """The layer's trained sinks."""
        return self._attention.sinks

    def of(self, tokens: Tensor) -> Halves:
        """The form for tokens [B,T]."""
        return self.one if tokens.shape[1] == 1 else self.many
