"""The fused head and distillation loss: hidden states and the output matrices of a student and of a
teacher come in, per-token losses and the gradients of the student's go out in one pass over chunks
of tokens. Logits of either exist for one chunk at a time.

With p and q the student's and the teacher's probabilities, both of logits divided by the
temperature t, and nll the plain one:

    loss_i = a t^2 KL_i + (1 - a) nll_i      of token i
    forward: KL(q || p)                      reverse: KL(p || q)

t^2 keeps the gradient's size when t changes (Hinton et al. 2015, arXiv:1503.02531). Arithmetic is fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels.cross_entropy import WeightGradBuffer, linear_loss
from headway.kernels.vocab_loss import cap_in_place

LOGITS_AT_ONCE = 4
"""Tensors of the size of a chunk's logits beyond those of the plain loss: chunks are smaller by
this."""


class DistillShaping(NamedTuple):
    """What of the teacher a token's loss asks for."""

    temperature: float = 1.0
    reverse: bool = False
    alpha: float = 1.0
    """Share of the divergence; the rest is next-token prediction."""


class TeacherHead(NamedTuple):
    """How a teacher's hidden states become logits."""

    weight: Tensor
    """[V, D of the teacher]"""
    softcap: float | None = None


class Distilled(NamedTuple):
    """What one pass gives; only `total` carries gradients, to the student."""

    total: Tensor
    """0-dim: sum of coefficient * loss."""
    nll: Tensor
    """[N] plain negative log-likelihood of the student."""
    kl: Tensor
    """[N] divergence at the temperature, without the factor t^2."""
    correct: Tensor
    """[N] 1 where the target has the student's highest logit, else 0."""


def linear_distill(
    hidden: Tensor,
    weight: Tensor,
    taught: Tensor,
    teacher: TeacherHead,
    targets: Tensor,
    coefficients: Tensor,
    shaping: DistillShaping,
    chunk_tokens: int = 2048,
    grad_buffer: WeightGradBuffer | None = None,
    softcap: float | None = None,
) -> Distilled:
    """The loss of targets [N] from the student's hidden [N, D] and the teacher's, `taught` [N, D of
    the teacher]."""

    def gradient(logits: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # The teacher's logits of this chunk alone; it has no gradient.
        teacher_logits = (taught[part] @ teacher.weight.t()).float()
        cap_in_place(teacher_logits, teacher.softcap)
        return distill_gradient(
            logits, teacher_logits, targets[part], coefficients[part], shaping, softcap
        )

    chunk = max(1, chunk_tokens // LOGITS_AT_ONCE)
    return Distilled(*linear_loss(hidden, weight, coefficients, gradient, chunk, grad_buffer))


def distill_gradient(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    shaping: DistillShaping,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overwrite the student's logits [n, V] with their gradient; per-token (loss, nll, kl,
    correct). `teacher_logits`: fp32 [n, V]."""
    temperature, reverse, _ = shaping
    student = student_scores(logits, targets, softcap)
    log_p = torch.log_softmax(student.x / temperature, -1)
    log_q = torch.log_softmax(teacher_logits / temperature, -1)
    # Gradients by the scaled logits: p (log p - log q - KL) in reverse, p - q forward. In place
    # where possible: every tensor here has the size of the chunk's logits.
    if reverse:
        apart = log_p - log_q
        p = log_p.exp_()
        kl = (p * apart).sum(-1)
        gradient = apart.sub_(kl[:, None]).mul_(p)
    else:
        q = log_q.exp()
        kl = (q * log_q.sub_(log_p)).sum(-1)
        gradient = log_p.exp_().sub_(q)
    return (
        blended(kl, gradient, student, logits, coefficients, shaping),
        student.nll,
        kl,
        student.correct,
    )


class StudentScores(NamedTuple):
    """What a chunk of logits says of its targets."""

    x: Tensor
    """fp32 [n, V], soft-capped; overwritten by `blended`"""
    lse: Tensor
    targets: Tensor
    nll: Tensor
    correct: Tensor
    slope: Tensor | None
    """[n, V]: the derivative of soft-capping; None without a cap"""


def student_scores(logits: Tensor, targets: Tensor, softcap: float | None) -> StudentScores:
    """What both distillation losses need of the student's logits [n, V] and targets [n]."""
    x = logits.float()
    slope = cap_in_place(x, softcap)
    lse = torch.logsumexp(x, -1)
    at_target = x.gather(1, targets[:, None]).squeeze(1)
    return StudentScores(x, lse, targets, lse - at_target, (at_target >= x.amax(-1)).float(), slope)


def blended(
    kl: Tensor,
    gradient: Tensor,
    student: StudentScores,
    logits: Tensor,
    coefficients: Tensor,
    shaping: DistillShaping,
) -> Tensor:
    """Per-token loss of a divergence and the plain nll. `gradient`, by scaled logits, becomes that
    of the loss and goes into `logits`."""
    temperature, _, alpha = shaping
    gradient.mul_(alpha * temperature)  # t^2 of the loss, 1 / t of the logits
    if alpha < 1:
        # (1 - a) (softmax - [j = target]), at temperature 1
        gradient.add_(student.x.sub_(student.lse[:, None]).exp_(), alpha=1 - alpha)
        gradient.scatter_add_(
            1, student.targets[:, None], torch.full_like(student.nll, alpha - 1)[:, None]
        )
    gradient.mul_(coefficients[:, None])
    if student.slope is not None:
        gradient.mul_(student.slope)
    logits.copy_(gradient)
    return alpha * temperature**2 * kl + (1 - alpha) * student.nll
