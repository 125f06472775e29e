"""The loss where every rank has some rows of the output head: logits of this rank's rows come in,
per-token scores of all rows go out.

    rank r:   x_r [n, V_r]  ->  highest, sum of exp(x - highest), logit of the target, sum of logits     [4, n]
    all ranks exchange these four numbers per token; each then knows lse and the target's logit of
    the whole vocabulary
    rank r:   x_r           ->  its part of the gradient

Logits are never gathered. A token's target is a row of one rank; the others contribute -inf for its
logit. Shapes: n tokens of a chunk, P ranks, V vocabulary, V_r this rank's rows. Arithmetic is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from headway.kernels.cross_entropy import Shaping

HIGHEST, EXPONENTIALS, TARGET, TOTAL = range(4)
"""The order of the four numbers; the kernel `scores` stores them in it."""


@dataclass(frozen=True)
class VocabShard:
    """Which rows of the head this rank has, and how it reaches the other ranks."""

    first: int
    """The id of its first row."""
    vocab: int
    """Rows of the whole head."""
    collect: Callable[[Tensor], Tensor]
    """The tensors of all ranks, stacked along a new dim 0."""
    gather_input: Callable[[Tensor], Tensor]
    """Hidden states of all tokens from those of this rank; its backward adds up the ranks'
    gradients."""

    sizes: tuple[int, ...] = ()
    """Rows of every rank."""

    def whole(self, logits: Tensor) -> Tensor:
        """[n,V] of all ranks' [n,v], without gradients. Some ranks may have one row more than
        others."""
        parts = self.collect(F.pad(logits, (0, max(self.sizes) - logits.shape[-1])))
        return torch.cat(
            [part[..., :size] for part, size in zip(parts, self.sizes, strict=True)], dim=-1
        )


@dataclass(frozen=True)
class VocabScores:
    """What is known of each token once all ranks have exchanged; every field is [n]."""

    lse: Tensor
    """Log-sum-exp of all logits."""
    at_target: Tensor
    """The target's logit."""
    highest: Tensor
    total: Tensor
    """Sum of all logits."""


def combine(parts: Tensor) -> VocabScores:
    """The scores of the whole vocabulary from the ranks' parts [P, 4, n]."""
    highest = parts[:, HIGHEST].amax(0)
    exponentials = (parts[:, EXPONENTIALS] * (parts[:, HIGHEST] - highest).exp()).sum(0)
    return VocabScores(
        highest + exponentials.log(), parts[:, TARGET].amax(0), highest, parts[:, TOTAL].sum(0)
    )


def token_scores(logits: Tensor, targets: Tensor, shard: VocabShard) -> VocabScores:
    """Scores of targets [n] from this rank's logits [n, V_r], in one exchange."""
    return combine(shard.collect(partial_scores(logits, targets - shard.first)))


def cap_in_place(x: Tensor, softcap: float | None) -> Tensor | None:
    """Replace fp32 logits x by softcap * tanh(x / softcap); the slope of that at each of them comes
    back, None without a cap."""
    if softcap is None:
        return None
    x.div_(softcap).tanh_()
    slope = 1 - x.square()
    x.mul_(softcap)
    return slope


def sharded_softmax_gradient(
    logits: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    shaping: Shaping,
    shard: VocabShard,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overwrite this rank's logits with their gradient; per-token (loss, nll, lse, correct) of the
    whole vocabulary.

    `coefficients` [n]: the weight of each token's loss in the gradient. `correct` is 1 where no
    logit is above the target's."""
    smoothing, z = shaping
    local = targets - shard.first
    scores = combine(shard.collect(partial_scores(logits, local, softcap)))
    nll = scores.lse - scores.at_target
    loss = nll
    if smoothing:
        loss = (
            scores.lse - (1 - smoothing) * scores.at_target - smoothing * scores.total / shard.vocab
        )
    if z:
        loss = loss + z * scores.lse.square()
    write_gradient(logits, local, coefficients, scores.lse, shaping, shard.vocab, softcap)
    return loss, nll, scores.lse, (scores.at_target >= scores.highest).float()


def partial_scores(logits: Tensor, local: Tensor, softcap: float | None = None) -> Tensor:
    """[4, n] of this rank's logits; `local` are the targets counted from its first row, and may lie
    outside."""
    return (partial_scores_cuda if logits.is_cuda else partial_scores_reference)(
        logits, local, softcap
    )


def partial_scores_reference(logits: Tensor, local: Tensor, softcap: float | None = None) -> Tensor:
    """Plain torch; what the kernel is compared to, and what runs on CPU."""
    if softcap is None:
        x = logits.float()
    else:
        x = softcap * torch.tanh(logits.float() / softcap)
    inside = (local >= 0) & (local < x.shape[1])
    highest = x.amax(-1)
    exponentials = (x - highest[:, None]).exp().sum(-1)
    at_target = x.gather(1, local.clamp(0, x.shape[1] - 1)[:, None]).squeeze(1)
    return torch.stack([highest, exponentials, at_target.where(inside, -torch.inf), x.sum(-1)])


def write_gradient(
    logits: Tensor,
    local: Tensor,
    coefficients: Tensor,
    lse: Tensor,
    shaping: Shaping,
    vocab: int,
    softcap: float | None = None,
) -> None:
    """Overwrite this rank's logits with the gradient of sum c_i (smooth_i + z lse_i^2): c are the
    coefficients, smooth_i the cross-entropy of token i with label smoothing."""
    (write_gradient_cuda if logits.is_cuda else write_gradient_reference)(
        logits, local, coefficients, lse, shaping, vocab, softcap
    )


def write_gradient_reference(
    logits: Tensor,
    local: Tensor,
    coefficients: Tensor,
    lse: Tensor,
    shaping: Shaping,
    vocab: int,
    softcap: float | None = None,
) -> None:
    """Plain torch; what the kernel is compared to, and what runs on CPU."""
    smoothing, z = shaping
    gradient = logits.float()  # fp32 logits are overwritten in place
    slope = cap_in_place(gradient, softcap)
    gradient.sub_(lse[:, None]).exp_()
    if z:
        gradient.mul_((1 + 2 * z * lse)[:, None])
    if smoothing:
        gradient.sub_(smoothing / vocab)
    add_at_target(gradient, local, torch.full_like(lse, smoothing - 1))
    gradient.mul_(coefficients[:, None])
    if slope is not None:
        gradient.mul_(slope)
    if gradient is not logits:
        logits.copy_(gradient)


def add_at_target(x: Tensor, local: Tensor, values: Tensor) -> None:
    """Add a value to each token's target, in place; nothing where the target is another rank's."""
    inside = (local >= 0) & (local < x.shape[1])
    x.scatter_add_(
        1, local.clamp(0, x.shape[1] - 1)[:, None], torch.where(inside, values, 0.0)[:, None]
    )


@cache
def _kernels() -> tuple[Any, Any]:
    """The two kernels, made at their first use: Triton is imported only where they run. In them V
    is this rank's rows of the head, `vocab` those of all ranks."""
    import triton
    import triton.language as tl

    @triton.jit
    def scores(
        logits, stride, targets, out, rows, cap, V, CAPPED: tl.constexpr, BLOCK: tl.constexpr
    ):  # pyright: ignore
        row = tl.program_id(0).to(tl.int64)
        base = logits + row * stride
        target = tl.load(targets + row)
        lane = tl.arange(0, BLOCK)
        # Each lane has its own maximum and sum over the columns it sees; they are joined at the
        # end.
        running_max = tl.full([BLOCK], -float("inf"), tl.float32)
        running_sum = tl.zeros([BLOCK], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for offset in range(0, V, BLOCK):
            column = offset + lane
            inside = column < V
            x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
            if CAPPED:
                x = tl.where(inside, cap * (2 * tl.sigmoid(2 * x / cap) - 1), -float("inf"))
            new_max = tl.maximum(running_max, x)
            # A lane that has seen nothing yet has -inf twice here, and exp(-inf - -inf) would be
            # NaN.
            rescale = tl.where(new_max == running_max, 1.0, tl.exp(running_max - new_max))
            running_sum = running_sum * rescale + tl.where(inside, tl.exp(x - new_max), 0.0)
            running_max = new_max
            total += tl.where(inside, x, 0.0)
        highest = tl.max(running_max, 0)
        here = (target >= 0) & (target < V)
        at_target = tl.load(base + target, mask=here, other=-float("inf")).to(tl.float32)
        if CAPPED:
            at_target = tl.where(
                here, cap * (2 * tl.sigmoid(2 * at_target / cap) - 1), -float("inf")
            )
        tl.store(out + row, highest)
        tl.store(out + rows + row, tl.sum(running_sum * tl.exp(running_max - highest), 0))
        tl.store(out + 2 * rows + row, at_target)
        tl.store(out + 3 * rows + row, tl.sum(total, 0))

    @triton.jit
    def gradient(
        logits, stride, targets, coefficients, lses, smoothing, z, cap, V, vocab, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip # pyright: ignore
        row = tl.program_id(0).to(tl.int64)
        base = logits + row * stride
        target = tl.load(targets + row)
        coefficient = tl.load(coefficients + row)
        lse = tl.load(lses + row)
        lane = tl.arange(0, BLOCK)
        for offset in range(0, V, BLOCK):
            column = offset + lane
            inside = column < V
            x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
            slope = 1.0  # of the softcap
            if CAPPED:
                x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)
                slope = 1.0 - (x / cap) * (x / cap)
            grad = tl.exp(x - lse) * (1.0 + 2.0 * z * lse)
            if SMOOTH:
                grad -= smoothing / vocab
            grad = tl.where(column == target, grad - (1.0 - smoothing), grad) * coefficient * slope
            tl.store(base + column, grad.to(logits.dtype.element_ty), mask=inside)

    return scores, gradient


def _block(vocab: int) -> tuple[int, int]:
    """Columns that one program reads at a time, and its warps."""
    block = min(8192, 1 << (vocab - 1).bit_length())
    return block, 16 if block >= 4096 else 4


def partial_scores_cuda(logits: Tensor, local: Tensor, softcap: float | None = None) -> Tensor:
    """As the reference, in one kernel."""
    rows, local_vocab = logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    block, warps = _block(local_vocab)
    scores, _ = _kernels()
    scores[(rows,)](
        logits,
        logits.stride(0),
        local,
        out,
        rows,
        softcap or 0.0,
        local_vocab,
        CAPPED=softcap is not None,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def write_gradient_cuda(
    logits: Tensor,
    local: Tensor,
    coefficients: Tensor,
    lse: Tensor,
    shaping: Shaping,
    vocab: int,
    softcap: float | None = None,
) -> None:
    """As the reference, in one kernel."""
    rows, local_vocab = logits.shape
    block, warps = _block(local_vocab)
    _, gradient = _kernels()
    gradient[(rows,)](
        logits, logits.stride(0), local, coefficients, lse, shaping.label_smoothing, shaping.z_loss, softcap or 0.0, local_vocab, vocab,
        SMOOTH=shaping.label_smoothing != 0, CAPPED=softcap is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
