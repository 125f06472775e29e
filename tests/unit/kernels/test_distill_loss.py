"""The chunked distillation loss against the plain formula and autograd in float64, and against TRL's function where it is installed."""

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.distill_loss import DistillShaping, TeacherHead, linear_distill

SHAPINGS = [
    DistillShaping(2.0, reverse, alpha) for reverse in (False, True) for alpha in (1.0, 0.3)
] + [DistillShaping()]
TOKENS = 37
VOCAB = 50


def problem() -> tuple[torch.Tensor, ...]:
    """Hidden states and head of a student and of a wider teacher, targets, coefficients."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((TOKENS, 16), (VOCAB, 16), (TOKENS, 24), (VOCAB, 24))
    hidden, weight, taught, teacher = (
        torch.randn(*shape, generator=generator, requires_grad=n < 2)
        for n, shape in enumerate(shapes)
    )
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return (
        hidden,
        weight,
        taught,
        teacher,
        targets,
        torch.rand(TOKENS, generator=generator) * (torch.arange(TOKENS) % 3 != 0),
    )


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    if cap is None:
        return logits
    return cap * torch.tanh(logits / cap)


def plain(
    operands: tuple[torch.Tensor, ...],
    shaping: DistillShaping,
    caps: tuple[float | None, float | None],
) -> tuple[torch.Tensor, ...]:
    """(sum of the loss, nll, kl) of whole logits."""
    hidden, weight, taught, teacher, targets, c = operands
    student_cap, teacher_cap = caps
    student = capped(hidden @ weight.t(), student_cap)
    expected = capped(taught @ teacher.t(), teacher_cap)
    log_student = student.div(shaping.temperature).log_softmax(-1)
    log_teacher = expected.div(shaping.temperature).log_softmax(-1)
    if shaping.reverse:
        kl = F.kl_div(log_teacher, log_student, reduction="none", log_target=True)
    else:
        kl = F.kl_div(log_student, log_teacher, reduction="none", log_target=True)
    nll = F.cross_entropy(student, targets, reduction="none")
    loss = shaping.alpha * shaping.temperature**2 * kl.sum(-1) + (1 - shaping.alpha) * nll
    return (loss * c).sum(), nll, kl.sum(-1)


@pytest.mark.parametrize("caps", [(None, None), (3.0, 5.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_the_loss_over_all_logits_and_its_gradients_are_those_of_the_formula_in_fp64(
    shaping: DistillShaping, caps: tuple[float | None, float | None]
) -> None:
    operands = problem()
    wide = tuple(
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in operands
    )
    right, nll, kl = plain(wide, shaping, caps)
    right.backward()
    hidden, weight, taught, teacher, targets, c = operands
    for chunk in (20, 1000):  # of five tokens, and all at once
        hidden.grad = weight.grad = None
        out = linear_distill(
            hidden,
            weight,
            taught,
            TeacherHead(teacher, caps[1]),
            targets,
            c,
            shaping,
            chunk,
            softcap=caps[0],
        )
        (out.total * 0.5).backward()
        torch.testing.assert_close(out.total.double(), right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.nll.double(), nll, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.kl.double(), kl, rtol=1e-5, atol=1e-5)
        for small, exact in ((hidden, wide[0]), (weight, wide[1])):
            assert small.grad is not None
            assert exact.grad is not None
            torch.testing.assert_close(small.grad.double(), 0.5 * exact.grad, rtol=1e-4, atol=1e-5)
        assert torch.equal(out.correct.bool(), (hidden @ weight.t()).argmax(-1) == targets)


def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient() -> None:
    hidden, weight, _, _, targets, c = problem()
    for reverse in (False, True):
        hidden.grad = None
        out = linear_distill(
            hidden,
            weight,
            hidden.detach(),
            TeacherHead(weight.detach()),
            targets,
            c,
            DistillShaping(1.5, reverse, 1.0),
        )
        out.total.backward()
        assert float(out.kl.abs().max()) < 1e-6
        assert hidden.grad is not None
        assert float(hidden.grad.abs().max()) < 1e-5


@pytest.mark.parametrize("reverse", [False, True])
def test_the_divergence_over_all_logits_equals_trls(reverse: bool) -> None:
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    hidden, weight, taught, teacher, targets, _ = problem()
    labels = torch.where(torch.arange(TOKENS) % 4 == 0, -100, targets)
    logits = (hidden @ weight.t())[None]
    other = (taught @ teacher.t())[None]
    right = trainer.generalized_jsd_loss(
        logits, other, labels[None], beta=float(reverse), temperature=1.7
    )
    counted = (labels != -100).float()
    out = linear_distill(
        hidden,
        weight,
        taught,
        TeacherHead(teacher),
        targets,
        counted,
        DistillShaping(1.7, reverse, 1.0),
        20,
    )
    torch.testing.assert_close(out.total / counted.sum(), 1.7**2 * right, rtol=1e-5, atol=1e-6)
