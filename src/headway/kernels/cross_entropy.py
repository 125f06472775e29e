"""Loss on the output head without the logits of a whole row: hidden [N, D] and weight [V, D] come
in, per-token scores go out.

`linear_nll` is for losses linear in per-token log-probabilities: loss and the gradients of hidden
and weight in one pass over chunks. `linear_scores` is for any other loss: log-probabilities go out,
the logits are computed again in the backward pass. With a `VocabShard`, weight holds this rank's
rows of the head and targets count all of them (see vocab_loss.py).

With `softcap` a logit x is softcap * tanh(x / softcap); the kernels cap what they read, so nothing
of the size of logits is added.

    nll_i    = lse_i - x_it                                   of token i with target t
    smooth_i = lse_i - (1-e) x_it - e mean_j(x_ij)            e: label smoothing
    total    = sum_i c_i (smooth_i + z lse_i^2)               z: weight of the z-loss (PaLM,
                                                              arXiv:2204.02311)

Shapes: N tokens, D hidden, V vocabulary. Logits live as [chunk, V] in the compute dtype; softmax
arithmetic is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headway.kernels.vocab_loss import (
    VocabShard,
    add_at_target,
    cap_in_place,
    sharded_softmax_gradient,
    token_scores,
)


class NLL(NamedTuple):
    """What one pass over the head gives; only `total` carries gradients."""

    total: Tensor
    """0-dim: sum of coefficient * (smoothed nll + z * lse^2)."""
    nll: Tensor
    """[N] plain negative log-likelihood."""
    lse: Tensor
    """[N] log of the sum of exponentials."""
    correct: Tensor
    """[N] 1 where the target has the highest logit, else 0."""


class WeightGradBuffer(Protocol):
    """Where the gradient of the weight is written directly, instead of passing a separate tensor
    through autograd."""

    def take(self) -> Tensor | None:
        """fp32 [V, D], to be overwritten; None if the gradient must go through autograd."""
        ...

    def done(self) -> None:
        """The tensor that was taken now holds the gradient."""
        ...


class Shaping(NamedTuple):
    """How a token's loss differs from its plain negative log-likelihood."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0


def softmax_gradient(
    logits: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    shaping: Shaping,
    shard: VocabShard | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overwrite logits [n, V] with the gradient of sum c_i (smooth_i + z lse_i^2); return per-token
    (loss, nll, lse, correct)."""
    if shard is not None:
        return sharded_softmax_gradient(logits, targets, coefficients, shaping, shard, softcap)
    if logits.is_cuda:
        return softmax_gradient_cuda(
            logits, targets, coefficients, shaping.label_smoothing, shaping.z_loss, softcap
        )
    return softmax_gradient_reference(logits, targets, coefficients, shaping, softcap)


def softmax_gradient_reference(
    logits: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    shaping: Shaping,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plain torch; what the fused kernel is compared to, and what runs on CPU."""
    smoothing, z = shaping
    x = logits.float()
    slope = cap_in_place(x, softcap)
    lse = torch.logsumexp(x, -1)
    at_target = x.gather(1, targets[:, None]).squeeze(1)
    correct = (at_target >= x.amax(-1)).float()
    nll = lse - at_target
    if smoothing == 0:
        loss = nll
    else:
        loss = lse - (1 - smoothing) * at_target - smoothing * x.mean(-1)
    if z:
        loss = loss + z * lse.square()

    # d loss / d x_j = softmax_j (1 + 2 z lse) - e / V - (1 - e) [j = target], times c.
    gradient = x  # fp32 logits are overwritten in place, lower precisions through their fp32 copy
    gradient.sub_(lse[:, None]).exp_()
    if z:
        gradient.mul_((1 + 2 * z * lse)[:, None])
    if smoothing:
        gradient.sub_(smoothing / x.shape[1])
    gradient.scatter_add_(1, targets[:, None], torch.full_like(at_target, smoothing - 1)[:, None])
    gradient.mul_(coefficients[:, None])
    if slope is not None:
        gradient.mul_(slope)
    if gradient is not logits:
        logits.copy_(gradient)
    return loss, nll, lse, correct


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def softmax_gradient(
        logits, stride, targets, coefficients, loss, nll, lse_out, correct, smoothing, z, cap, V,
        SMOOTH: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip  # pyright: ignore
        row = tl.program_id(0).to(tl.int64)
        base = logits + row * stride
        target = tl.load(targets + row)
        coefficient = tl.load(coefficients + row)
        lane = tl.arange(0, BLOCK)
        # One pass for max and sum: every lane keeps its own, and they are joined at the end.
        running_max = tl.full([BLOCK], -float("inf"), tl.float32)
        running_sum = tl.zeros([BLOCK], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for offset in range(0, V, BLOCK):
            column = offset + lane
            inside = column < V
            x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
            if CAPPED:
                # tanh(y) = 2 sigmoid(2 y) - 1; `tl` has no tanh
                x = tl.where(inside, cap * (2 * tl.sigmoid(2 * x / cap) - 1), -float("inf"))
            new_max = tl.maximum(running_max, x)
            # lanes that have seen nothing yet keep exp(-inf - -inf) out of the sum
            rescale = tl.where(new_max == running_max, 1.0, tl.exp(running_max - new_max))
            running_sum = running_sum * rescale + tl.where(inside, tl.exp(x - new_max), 0.0)
            running_max = new_max
            if SMOOTH:
                total += tl.where(inside, x, 0.0)

        highest = tl.max(running_max, 0)
        lse = highest + tl.log(tl.sum(running_sum * tl.exp(running_max - highest), 0))
        at_target = tl.load(base + target).to(tl.float32)
        if CAPPED:
            at_target = cap * (2 * tl.sigmoid(2 * at_target / cap) - 1)
        plain = lse - at_target
        value = plain
        if SMOOTH:
            value = lse - (1.0 - smoothing) * at_target - smoothing * tl.sum(total, 0) / V
        tl.store(loss + row, value + z * lse * lse)
        tl.store(nll + row, plain)
        tl.store(lse_out + row, lse)
        tl.store(correct + row, tl.where(at_target >= highest, 1.0, 0.0))
        # The second pass overwrites the logits: every thread must have read the target's before.
        tl.debug_barrier()
        for offset in range(0, V, BLOCK):
            column = offset + lane
            inside = column < V
            x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
            slope = 1.0
            if CAPPED:
                x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)
                slope = 1.0 - (x / cap) * (x / cap)
            gradient = tl.exp(x - lse) * (1.0 + 2.0 * z * lse)
            if SMOOTH:
                gradient -= smoothing / V
            gradient = (
                tl.where(column == target, gradient - (1.0 - smoothing), gradient)
                * coefficient
                * slope
            )
            tl.store(base + column, gradient.to(logits.dtype.element_ty), mask=inside)

    return softmax_gradient


def softmax_gradient_cuda(
    logits: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    smoothing: float,
    z: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`softmax_gradient_reference` in one kernel, one program per token: two passes over its
    logits."""
    rows, vocab = logits.shape
    loss, nll, lse, correct = (
        torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4)
    )
    # Triton's blocks are powers of two; a small vocabulary needs no wide one.
    block = min(8192, 1 << (vocab - 1).bit_length())
    _kernel()[(rows,)](
        logits,
        logits.stride(0),
        targets,
        coefficients,
        loss,
        nll,
        lse,
        correct,
        smoothing,
        z,
        softcap or 0.0,
        vocab,
        SMOOTH=smoothing != 0,
        CAPPED=softcap is not None,
        BLOCK=block,
        num_warps=16 if block >= 4096 else 4,
    )
    return loss, nll, lse, correct


TokenGradient = Callable[[Tensor, slice], "tuple[Tensor, Tensor, Tensor, Tensor]"]
"""Overwrites the logits [n, V] of some tokens with the gradient of their losses, which come back
with three more numbers of each token."""


class _LinearLoss(torch.autograd.Function):
    """Loss and gradients in forward; backward only multiplies them by the gradient of the total."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        coefficients: Tensor,
        gradient: TokenGradient,
        chunk: int,
        grad_buffer: WeightGradBuffer | None,
        taken: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        ctx.grad_buffer = grad_buffer
        size = hidden.shape[0]
        per_token = [torch.empty(size, dtype=torch.float32, device=hidden.device) for _ in range(4)]
        d_hidden = None
        if needs_hidden:
            d_hidden = torch.empty_like(hidden)
        # Into the engine's own buffer where there is one: the largest gradient of a step exists
        # once.
        d_weight = None
        if taken is not None:
            d_weight = taken.zero_()
        elif needs_weight:
            d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

        for start in range(0, size, chunk):
            part = slice(start, min(start + chunk, size))
            logits = hidden[part] @ weight.t()
            # From here on `logits` is the gradient by the logits.
            token_values = gradient(logits, part)
            for whole, piece in zip(per_token, token_values, strict=True):
                whole[part] = piece
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[part])
            if d_weight is not None:
                accumulate_outer(d_weight, logits, hidden[part])
            del logits  # or two chunks would exist at the same time
        ctx.gradients = d_hidden, d_weight  # not inputs or outputs, and changed in place below
        total = torch.dot(per_token[0], coefficients)
        ctx.mark_non_differentiable(*per_token[1:])
        return total, per_token[1], per_token[2], per_token[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (d_hidden, d_weight), ctx.gradients = ctx.gradients, None
        scale = grads[0]
        # In place: a loss is back-propagated once, and the weight's gradient is among the largest
        # tensors of a step.
        if d_hidden is not None:
            d_hidden.mul_(scale.to(d_hidden.dtype))
        if d_weight is not None:
            d_weight.mul_(scale)
        # The engine finds the gradient in its buffer; autograd gets none for the weight.
        if ctx.grad_buffer is not None:
            ctx.grad_buffer.done()
            d_weight = None
        return d_hidden, d_weight, *(None,) * 5


def accumulate_outer(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right with fp32 accumulation between chunks."""
    if left.dtype == torch.float32:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        # the product adds to fp32 itself
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        total.add_(left.t() @ right)


class _LinearScores(torch.autograd.Function):
    """Log-probabilities whose gradient is not known in forward: backward makes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        shard: VocabShard | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        size = hidden.shape[0]
        log_prob = torch.empty(size, dtype=torch.float32, device=hidden.device)
        lse = torch.empty_like(log_prob)
        for start in range(0, size, chunk):
            part = slice(start, min(start + chunk, size))
            x = (hidden[part] @ weight.t()).float()
            cap_in_place(x, softcap)
            if shard is not None:
                scores = token_scores(x, targets[part], shard)
                lse[part] = scores.lse
                log_prob[part] = scores.at_target - scores.lse
                continue
            lse[part] = torch.logsumexp(x, -1)
            log_prob[part] = x.gather(1, targets[part, None]).squeeze(1) - lse[part]
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.chunk = chunk
        ctx.softcap = softcap
        ctx.first = None if shard is None else shard.first
        return log_prob, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, targets, lse = ctx.saved_tensors
        d_log_prob, d_lse = grads
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden = None
        if needs_hidden:
            d_hidden = torch.empty_like(hidden)
        d_weight = None
        if needs_weight:
            d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, min(start + ctx.chunk, hidden.shape[0]))
            # d log p_t / d x_j = [j = t] - softmax_j and d lse / d x_j = softmax_j.
            gradient = (hidden[part] @ weight.t()).float()
            slope = cap_in_place(gradient, ctx.softcap)
            gradient.sub_(lse[part, None]).exp_()
            gradient.mul_((d_lse[part] - d_log_prob[part])[:, None])
            if ctx.first is None:
                gradient.scatter_add_(1, targets[part, None], d_log_prob[part, None])
            else:
                # On a shard of the vocabulary the target may be another rank's.
                add_at_target(gradient, targets[part] - ctx.first, d_log_prob[part])
            if slope is not None:
                gradient.mul_(slope)
            gradient = gradient.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(gradient, weight, out=d_hidden[part])
            if d_weight is not None:
                accumulate_outer(d_weight, gradient, hidden[part])
        return d_hidden, d_weight, None, None, None, None


def linear_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    shaping: Shaping = Shaping(),
    chunk_tokens: int = 2048,
    grad_buffer: WeightGradBuffer | None = None,
    shard: VocabShard | None = None,
    softcap: float | None = None,
) -> NLL:
    """Weighted negative log-likelihood of targets [N]; gradients of hidden and weight are taken in
    the same pass."""

    def gradient(logits: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return softmax_gradient(logits, targets[part], coefficients[part], shaping, shard, softcap)

    return NLL(*linear_loss(hidden, weight, coefficients, gradient, chunk_tokens, grad_buffer))


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    coefficients: Tensor,
    gradient: TokenGradient,
    chunk_tokens: int,
    grad_buffer: WeightGradBuffer | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of coefficient * loss over tokens, and three more numbers of each; gradients are
    taken in the same pass."""
    # A buffer is taken only where a backward will follow, which gives it back (`done`).
    taken = None
    if (
        grad_buffer is not None
        and torch.is_grad_enabled()
        and hidden.requires_grad
        and weight.requires_grad
    ):
        taken = grad_buffer.take()
    if taken is None:
        token_values = _LinearLoss.apply(
            hidden, weight, coefficients, gradient, chunk_tokens, None, None
        )
    else:
        token_values = _LinearLoss.apply(
            hidden, weight.detach(), coefficients, gradient, chunk_tokens, grad_buffer, taken
        )
    return token_values  # pyright: ignore[reportReturnType]


def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int = 2048,
    shard: VocabShard | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probability, lse) of targets [N], differentiable in any way; the backward pass computes
    the logits again."""
    scores = _LinearScores.apply(hidden, weight, targets, chunk_tokens, shard, softcap)
    return scores  # pyright: ignore[reportReturnType]
