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

TOKENS, VOCAB, KEPT = 29, 50, 7
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
    given = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    given["targets"] = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    given["c"] = torch.rand(TOKENS, generator=generator) * (torch.arange(TOKENS) % 3 != 0)
    return given


def buckets(log_probs: torch.Tensor, ids: torch.Tensor, drop: bool) -> torch.Tensor:
    """Log-probabilities of the classes: the kept tokens and, unless dropped, all others together."""
    kept = log_probs.gather(1, ids)
    if drop:
        return kept.log_softmax(-1)
    return torch.cat([kept, (1 - kept.exp().sum(-1, keepdim=True)).log()], -1)


def plain(
    given: dict[str, torch.Tensor], shaping: DistillShaping, drop: bool, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the loss, divergence of each token) of whole logits."""
    x, y = given["hidden"] @ given["weight"].t(), given["taught"] @ given["teacher"].t()
    x = x if cap is None else cap * torch.tanh(x / cap)
    ids = y.topk(KEPT, -1).indices
    p, q = (
        buckets(logits.div(shaping.temperature).log_softmax(-1), ids, drop) for logits in (x, y)
    )
    kl = (
        F.kl_div(q, p, reduction="none", log_target=True)
        if shaping.reverse
        else F.kl_div(p, q, reduction="none", log_target=True)
    ).sum(-1)
    nll = F.cross_entropy(x, given["targets"], reduction="none")
    return (
        (shaping.alpha * shaping.temperature**2 * kl + (1 - shaping.alpha) * nll) * given["c"]
    ).sum(), kl


def stored(
    given: dict[str, torch.Tensor], temperature: float = 1.0, kept: int = KEPT
) -> TopLogProbs:
    return linear_top_k(given["taught"], given["teacher"], kept, temperature, chunk_tokens=10)


def grads(given: dict[str, torch.Tensor], run: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    hidden, weight = (given[name].clone().requires_grad_() for name in ("hidden", "weight"))
    out = run(hidden, weight)
    total = out[0]
    (total * 0.5).backward()
    assert hidden.grad is not None and weight.grad is not None
    return out, hidden.grad, weight.grad


@pytest.mark.parametrize("drop", [False, True], ids=["bucket", "drop"])
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_loss_and_gradients_are_those_of_the_formula_in_fp64(
    shaping: DistillShaping, drop: bool
) -> None:
    given = problem()
    wide = {
        name: value.double() if value.is_floating_point() else value
        for name, value in given.items()
    }
    taught = stored(given, shaping.temperature)
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
                    given["targets"],
                    given["c"],
                    shaping,
                    drop,
                    chunk,
                    softcap=cap,
                )

            out, *found = grads(given, run)
            torch.testing.assert_close(out.total.double(), right[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out.kl.double(), right[1], rtol=1e-4, atol=1e-5)
            for one, other in zip(found, exact, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("drop", [False, True], ids=["bucket", "drop"])
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_with_the_whole_vocabulary_it_is_the_live_teachers_loss(
    shaping: DistillShaping, drop: bool
) -> None:
    given = problem()
    taught = stored(given, shaping.temperature, VOCAB)
    assert torch.isinf(taught.log_probs[:, -1]).all()
    live = grads(
        given,
        lambda h, w: linear_distill(
            h,
            w,
            given["taught"],
            TeacherHead(given["teacher"]),
            given["targets"],
            given["c"],
            shaping,
        ),
    )
    from_store = grads(
        given,
        lambda h, w: linear_topk_distill(h, w, taught, given["targets"], given["c"], shaping, drop),
    )
    for one, other in zip((*from_store[0], *from_store[1:]), (*live[0], *live[1:]), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def test_kept_tokens_are_the_likeliest_and_the_rest_is_the_others_mass() -> None:
    given = problem()
    found = stored(given)
    log_p = (given["taught"] @ given["teacher"].t()).log_softmax(-1)
    assert torch.equal(found.ids, log_p.topk(KEPT, -1).indices)
    torch.testing.assert_close(found.log_probs.exp().sum(-1), torch.ones(TOKENS))
    torch.testing.assert_close(found.log_probs[:, :-1], log_p.gather(1, found.ids))


def test_padding_and_a_certain_student_give_finite_numbers() -> None:
    given = problem()
    zeros = TopLogProbs(
        torch.zeros(TOKENS, KEPT, dtype=torch.int32),
        torch.zeros(TOKENS, KEPT + 1, dtype=torch.float16),
    )
    for shaping in SHAPINGS:
        for drop in (False, True):
            for taught in (zeros, stored(given, shaping.temperature)):
                out, hidden, weight = grads(
                    {**given, "weight": given["weight"] * 200},
                    lambda h, w, s=shaping, t=taught, d=drop: linear_topk_distill(
                        h, w, t, given["targets"], given["c"], s, d
                    ),
                )
                assert all(torch.isfinite(one).all() for one in (*out, hidden, weight))


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
    found: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(tree, str(path), "exec"), found)
    return found


@pytest.mark.parametrize("drop", [False, True], ids=["bucket", "drop"])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_divergence_is_trls(reverse: bool, drop: bool) -> None:
    trl = trls_functions("_add_tail_bucket", "_jsd_divergence")
    given = problem()
    taught = stored(given)
    student = (given["hidden"] @ given["weight"].t()).log_softmax(-1).gather(1, taught.ids)
    teacher, every = taught.log_probs[:, :-1], torch.ones(TOKENS, KEPT, dtype=torch.bool)
    if drop:
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    else:
        (student, _), (teacher, every) = (
            trl["_add_tail_bucket"](student, every),
            trl["_add_tail_bucket"](teacher, every),
        )
    right = trl["_jsd_divergence"](student, teacher, beta=float(reverse), support_mask=every).sum(
        -1
    )
    out = linear_topk_distill(
        given["hidden"],
        given["weight"],
        taught,
        given["targets"],
        given["c"],
        DistillShaping(1.0, reverse, 1.0),
        drop,
    )
    torch.testing.assert_close(out.kl, right, rtol=1e-4, atol=1e-5)
