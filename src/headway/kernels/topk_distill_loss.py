"""Distillation from a teacher's likeliest tokens: hidden states and a head come in, losses and
gradients go out, a chunk at a time.

A teacher's distribution at a position is stored as its k likeliest tokens S, their
log-probabilities, and the rest of its vocabulary as one number. With q the teacher and p the
student, both of logits divided by the temperature t, and nll the plain one:

    bucket    KL(q || p) = sum over i in S of q_i (log q_i - log p_i) + q_R (log q_R - log p_R)
              with q_R = 1 - sum q_i and p_R = 1 - sum p_i
    drop      the first sum alone, with q and p both divided by their sums over S
    reverse   KL(p || q): the same with p and q exchanged
    token     loss = a t^2 KL + (1 - a) nll

With k = the vocabulary R is empty, and both are the divergence of `distill_loss.py`. Of the rest
the log of sum over R of (the teacher's probability)^(1/t) is stored, for one t; at t = 1 that is
its mass. Arithmetic is fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels.cross_entropy import WeightGradBuffer, linear_loss
from headway.kernels.distill_loss import (
    LOGITS_AT_ONCE,
    Distilled,
    DistillShaping,
    blended,
    student_scores,
)
from headway.kernels.vocab_loss import cap_in_place


class TopLogProbs(NamedTuple):
    """What is kept of a teacher's distributions at N positions."""

    ids: Tensor
    """[N, k], any integer type."""
    log_probs: Tensor
    """[N, k + 1]: those of the ids at temperature 1, then the rest as one number; -inf where there
    is no rest."""


@torch.no_grad()
def linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    top_k: int,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
    softcap: float | None = None,
) -> TopLogProbs:
    """The `top_k` likeliest tokens of hidden states [N, D]; ids are int64, log-probabilities
    fp32."""
    ids: list[Tensor] = []
    log_probs: list[Tensor] = []
    for rows in hidden.split(chunk_tokens):
        x = (rows @ weight.t()).float()
        cap_in_place(x, softcap)
        log_p = torch.log_softmax(x, -1)
        best = log_p.topk(top_k, -1)
        # log of sum over the others of p^(1/t), without the ones that are kept.
        rest = (
            log_p.div_(temperature)
            .scatter_(1, best.indices, -torch.inf)
            .logsumexp(-1, keepdim=True)
        )
        ids.append(best.indices)
        log_probs.append(torch.cat([best.values, rest], -1))
    return TopLogProbs(torch.cat(ids), torch.cat(log_probs))


def linear_topk_distill(
    hidden: Tensor,
    weight: Tensor,
    taught: TopLogProbs,
    targets: Tensor,
    coefficients: Tensor,
    shaping: DistillShaping,
    drop_rest: bool = False,
    chunk_tokens: int = 2048,
    grad_buffer: WeightGradBuffer | None = None,
    softcap: float | None = None,
) -> Distilled:
    """The loss of targets [N] from the student's hidden [N, D] and what is kept of the teacher."""

    def gradient(logits: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        teacher = TopLogProbs(taught.ids[part], taught.log_probs[part])
        return topk_gradient(
            logits, teacher, targets[part], coefficients[part], shaping, drop_rest, softcap
        )

    chunk = max(1, chunk_tokens // LOGITS_AT_ONCE)
    return Distilled(*linear_loss(hidden, weight, coefficients, gradient, chunk, grad_buffer))


def topk_gradient(
    logits: Tensor,
    teacher: TopLogProbs,
    targets: Tensor,
    coefficients: Tensor,
    shaping: DistillShaping,
    drop_rest: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overwrite the student's logits [n, V] with their gradient; per-token (loss, nll, kl,
    correct)."""
    temperature, reverse, _ = shaping
    student = student_scores(logits, targets, softcap)
    compare = _compare_kept if drop_rest else _compare_buckets
    kl, gradient = compare(
        torch.log_softmax(student.x / temperature, -1), teacher, temperature, reverse
    )
    return (
        blended(kl, gradient, student, logits, coefficients, shaping),
        student.nll,
        kl,
        student.correct,
    )


def _compare_buckets(
    log_p: Tensor, teacher: TopLogProbs, temperature: float, reverse: bool
) -> tuple[Tensor, Tensor]:
    """(divergence [n], its gradient by the student's scaled logits [n, V]) with the rest as one
    class; `log_p` is overwritten."""
    ids = teacher.ids.long()
    stored = teacher.log_probs.float()
    # The student's classes: its kept tokens, and all others together.
    top_p = log_p.gather(1, ids)
    p = log_p.exp()
    outside = log_p.scatter_(1, ids, -torch.inf)
    rest_p = outside.logsumexp(-1, keepdim=True)
    # Rounded numbers do not add up to 1: they are normalised with the rest, which is stored at this
    # temperature already.
    log_q = torch.log_softmax(torch.cat([stored[:, :-1] / temperature, stored[:, -1:]], -1), -1)
    log_b = torch.cat([top_p, rest_p], -1)
    is_empty = torch.isinf(log_b) | torch.isinf(log_q)  # a class of no tokens adds nothing
    apart = (log_b - log_q).masked_fill_(is_empty, 0.0)
    if reverse:
        kl = (log_b.exp() * apart).sum(-1, keepdim=True)
        # p_j (log p_class - log q_class - KL): tokens outside share the class of the rest.
        gradient = p.mul_(apart[:, -1:] - kl)
        gradient.scatter_(1, ids, top_p.exp() * (apart[:, :-1] - kl))
        return kl.squeeze(1), gradient
    q = log_q.exp()
    kl = -(q * apart).sum(-1)
    # p_j minus the teacher's mass: of a kept token its own, of the others the rest's, divided among
    # them as the student does.
    share = outside.add_(log_q[:, -1:] - rest_p.masked_fill(torch.isinf(rest_p), 0.0)).exp_()
    return kl, p.sub_(share).scatter_add_(1, ids, -q[:, :-1])


def _compare_kept(
    log_p: Tensor, teacher: TopLogProbs, temperature: float, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The same among the kept tokens alone: no other logit has a gradient."""
    ids = teacher.ids.long()
    log_b = torch.log_softmax(log_p.gather(1, ids), -1)
    log_q = torch.log_softmax(teacher.log_probs[:, :-1].float() / temperature, -1)
    b = log_b.exp()
    q = log_q.exp()
    apart = log_b - log_q
    if reverse:
        kl = (b * apart).sum(-1, keepdim=True)
        gradient = b * (apart - kl)
    else:
        kl = (q * -apart).sum(-1, keepdim=True)
        gradient = b - q
    return kl.squeeze(1), log_p.zero_().scatter_add_(1, ids, gradient)
