"""The loss against a teacher's stored likeliest tokens: against the formula in float64, the live teacher's loss, and TRL's functions."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.distill_loss import DistillShaping, TeacherHead, linear_distill
from headway.kernels.topk_distill_loss import TopLogProbs, linear_top_k, linear_topk_distill

TOKENS = 29
VOCAB = 50
KEPT = 7
SHAPINGS = [
    DistillShaping(t, reverse, alpha)
    for reverse in (False, True)
    for t, alpha in ((1.0, 1.0), (2.0, 0.3))
]


def problem() -> dict[str, torch.Tensor]:
    """Hidden states and heads of a student and of a teacher, targets, and coefficients some of which are 0."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "hidden": (TOKENS, 16),
        "weight": (VOCAB, 16),
        "taught": (TOKENS, 24),
        "teacher": (VOCAB, 24),
    }
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    tensors["targets"] = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    tensors["c"] = torch.rand(TOKENS, generator=generator) * (torch.arange(TOKENS) % 3 != 0)
    return tensors


def buckets(log_probs: torch.Tensor, ids: torch.Tensor, drop: bool) -> torch.Tensor:
    """Log-probabilities of the classes: the kept tokens and, unless dropped, all others together."""
    kept = log_probs.gather(1, ids)
    if drop:
        return kept.log_softmax(-1)
    return torch.cat([kept, (1 - kept.exp().sum(-1, keepdim=True)).log()], -1)


def plain(
    tensors: dict[str, torch.Tensor], shaping: DistillShaping, drop: bool, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the loss, divergence of each token) of whole logits."""
    student = tensors["hidden"] @ tensors["weight"].t()
    if cap is not None:
        student = cap * torch.tanh(student / cap)
    teacher = tensors["taught"] @ tensors["teacher"].t()
    ids = teacher.topk(KEPT, -1).indices
    log_student = buckets(student.div(shaping.temperature).log_softmax(-1), ids, drop)
    log_teacher = buckets(teacher.div(shaping.temperature).log_softmax(-1), ids, drop)
    if shaping.reverse:
        kl = F.kl_div(log_teacher, log_student, reduction="none", log_target=True).sum(-1)
    else:
        kl = F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)
    nll = F.cross_entropy(student, tensors["targets"], reduction="none")
    loss = shaping.alpha * shaping.temperature**2 * kl + (1 - shaping.alpha) * nll
    return (loss * tensors["c"]).sum(), kl


def stored(
    tensors: dict[str, torch.Tensor], temperature: float = 1.0, kept: int = KEPT
) -> TopLogProbs:
    return linear_top_k(tensors["taught"], tensors["teacher"], kept, temperature, chunk_tokens=10)


def grads(tensors: dict[str, torch.Tensor], run: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    hidden = tensors["hidden"].clone().requires_grad_()
    weight = tensors["weight"].clone().requires_grad_()
    out = run(hidden, weight)
    total = out[0]
    (total * 0.5).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return out, hidden.grad, weight.grad


@pytest.mark.parametrize("drop", [False, True], ids=["bucket", "drop"])
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_the_loss_over_stored_logits_and_its_gradients_are_those_of_the_formula_in_fp64(
    shaping: DistillShaping, drop: bool
) -> None:
    tensors = problem()
    wide = {
        name: value.double() if value.is_floating_point() else value
        for name, value in tensors.items()
    }
    taught = stored(tensors, shaping.temperature)
    for cap in (None, 3.0):
        right, *exact = grads(
            wide,
            lambda hidden, weight, cap=cap: plain(
                {**wide, "hidden": hidden, "weight": weight}, shaping, drop, cap
            ),
        )
        for chunk in (20, 1000):

            def run(
                hidden: torch.Tensor,
                weight: torch.Tensor,
                chunk: int = chunk,
                cap: float | None = cap,
            ) -> Any:
                return linear_topk_distill(
                    hidden,
                    weight,
                    taught,
                    tensors["targets"],
                    tensors["c"],
                    shaping,
                    drop,
                    chunk,
                    softcap=cap,
                )

            out, *gradients = grads(tensors, run)
            torch.testing.assert_close(out.total.double(), right[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out.kl.double(), right[1], rtol=1e-4, atol=1e-5)
            for gradient, other in zip(gradients, exact, strict=True):
                torch.testing.assert_close(gradient.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("drop", [False, True], ids=["bucket", "drop"])
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_with_the_whole_vocabulary_it_is_the_live_teachers_loss(
    shaping: DistillShaping, drop: bool
) -> None:
    tensors = problem()
    taught = stored(tensors, shaping.temperature, VOCAB)
    assert torch.isinf(taught.log_probs[:, -1]).all()
    live = grads(
        tensors,
        lambda h, w: linear_distill(
            h,
            w,
            tensors["taught"],
            TeacherHead(tensors["teacher"]),
            tensors["targets"],
            tensors["c"],
            shaping,
        ),
    )
    from_store = grads(
        tensors,
        lambda h, w: linear_topk_distill(
            h, w, taught, tensors["targets"], tensors["c"], shaping, drop
        ),
    )
    for stored_value, other in zip(
        (*from_store[0], *from_store[1:]), (*live[0], *live[1:]), strict=True
    ):
        torch.testing.assert_close(stored_value, other, rtol=2e-5, atol=2e-6)


def test_kept_tokens_are_the_likeliest_and_the_rest_is_the_others_mass() -> None:
    tensors = problem()
    logits = stored(tensors)
    log_p = (tensors["taught"] @ tensors["teacher"].t()).log_softmax(-1)
    assert torch.equal(logits.ids, log_p.topk(KEPT, -1).indices)
    torch.testing.assert_close(logits.log_probs.exp().sum(-1), torch.ones(TOKENS))
    torch.testing.assert_close(logits.log_probs[:, :-1], log_p.gather(1, logits.ids))


def test_padding_and_a_certain_student_give_finite_numbers() -> None:
    tensors = problem()
    zeros = TopLogProbs(
        torch.zeros(TOKENS, KEPT, dtype=torch.int32),
        torch.zeros(TOKENS, KEPT + 1, dtype=torch.float16),
    )
    for shaping in SHAPINGS:
        for drop in (False, True):
            for taught in (zeros, stored(tensors, shaping.temperature)):
                out, hidden, weight = grads(
                    {**tensors, "weight": tensors["weight"] * 200},
                    lambda h, w, s=shaping, t=taught, d=drop: linear_topk_distill(
                        h, w, t, tensors["targets"], tensors["c"], s, d
                    ),
                )
                assert all(torch.isfinite(tensor).all() for tensor in (*out, hidden, weight))


def trls_functions(*names: str) -> dict[str, Any]:
    """Functions of TRL's file alone: its package needs more than these do."""
    package = importlib.util.find_spec("trl")
    path = (
        Path(str(package and package.origin)).parent
        / "experimental/server_distillation/server_distillation_trainer.py"
    )
    if not path.is_file():
        pytest.skip("no TRL with stored log-probabilities")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    functions: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(tree, str(path), "exec"), functions)
    return functions


@pytest.mark.parametrize("drop", [False, True], ids=["bucket", "drop"])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_divergence_over_stored_logits_equals_trls(reverse: bool, drop: bool) -> None:
    trl = trls_functions("_add_tail_bucket", "_jsd_divergence")
    tensors = problem()
    taught = stored(tensors)
    student = (tensors["hidden"] @ tensors["weight"].t()).log_softmax(-1).gather(1, taught.ids)
    teacher = taught.log_probs[:, :-1]
    every = torch.ones(TOKENS, KEPT, dtype=torch.bool)
    if drop:
        student = student.log_softmax(-1)
        teacher = teacher.log_softmax(-1)
    else:
        (student, _) = trl["_add_tail_bucket"](student, every)
        (teacher, every) = trl["_add_tail_bucket"](teacher, every)
    right = trl["_jsd_divergence"](student, teacher, beta=float(reverse), support_mask=every).sum(
        -1
    )
    out = linear_topk_distill(
        tensors["hidden"],
        tensors["weight"],
        taught,
        tensors["targets"],
        tensors["c"],
        DistillShaping(1.0, reverse, 1.0),
        drop,
    )
    torch.testing.assert_close(out.kl, right, rtol=1e-4, atol=1e-5)
