"""The oracle of the engine's sampler: one rule, the whole vocabulary sorted, each cut applied by itself."""

from collections.abc import Sequence

import torch

from headway.infer.sampling import Sampling
from headway.runtime.device import to_float64


def choose_alone(logits: torch.Tensor, sampling: Sampling, draws: Sequence[float]) -> torch.Tensor:
    """The next token of each row, int64 [B], of logits [B,V]: one rule for all rows, one step after the other."""
    if sampling.temperature == 0:
        return logits.argmax(-1)

    # Double, so that the running sum over a large vocabulary gives the same choice on every device.
    # The greatest is subtracted first: a tiny temperature would make it infinite.
    scores = to_float64(logits)
    if sampling.by_id:
        reached = ((scores - scores.amax(-1, keepdim=True)) / sampling.temperature).exp().cumsum(-1)
        draw = torch.tensor(draws, dtype=torch.float64, device=scores.device)[:, None]
        total = reached[:, -1:].contiguous()
        choice = torch.searchsorted(reached, draw * total, right=True)
        # Rounding may carry a draw to the whole sum, which the last token with a probability
        # reaches.
        return (
            torch.minimum(choice, torch.searchsorted(reached, total)).squeeze(-1).to(logits.device)
        )
    probability = ((scores - scores.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    # Stable: of equal scores the lowest id comes first, as in the engine's sampler.
    likely, token = probability.sort(dim=-1, descending=True, stable=True)
    reached = likely.cumsum(-1)
    # The token that reaches top_p is kept: what counts is the sum before it.
    if sampling.top_p is not None:
        likely = likely.masked_fill(reached - likely >= sampling.top_p, 0.0)
    if sampling.top_k is not None and sampling.top_k < likely.shape[-1]:
        likely[:, sampling.top_k :] = 0.0
    if sampling.min_p is not None:
        likely = likely.masked_fill(likely < sampling.min_p * likely[:, :1], 0.0)

    # The draw falls into one of the kept tokens, in proportion to their probabilities; rounding may
    # carry it behind the last one, which is then taken.
    reached = likely.cumsum(-1)
    draw = torch.tensor(draws, dtype=torch.float64, device=scores.device)[:, None]
    choice = torch.searchsorted(reached, draw * reached[:, -1:], right=True)
    last = (likely > 0).sum(-1, keepdim=True) - 1
    return token.gather(-1, torch.minimum(choice, last)).squeeze(-1).to(logits.device)
