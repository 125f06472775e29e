"""Log-probabilities and entropies of sampled tokens: values and gradients are those of plain autograd over whole logits."""

from typing import NamedTuple

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor

from headway.kernels.policy_scores import DrawnFrom, linear_policy_scores
from headway.kernels.vocab_loss import VocabShard
from headway.parallel.collectives import RankGroup
from headway.parallel.tensor import even_parts

TOKENS = 23
WIDTH = 8
VOCAB = 37
CHUNKS = [1, 10, 64]
DISTRIBUTIONS = [
    DrawnFrom(),
    DrawnFrom(0.7),
    DrawnFrom(1.3, 30),
    DrawnFrom(1.0, 3),
    DrawnFrom(1.0, VOCAB),
]


class Head(NamedTuple):
    """Inputs of the head, and a weight of each of its outputs."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    of_log_prob: Tensor
    of_entropy: Tensor


def head(vocab: int) -> Head:
    draw = torch.Generator().manual_seed(vocab)
    targets = torch.randint(vocab, (TOKENS,), generator=draw)
    targets[:3] = torch.tensor([0, vocab - 1, vocab // 2])
    return Head(
        torch.randn(TOKENS, WIDTH, generator=draw),
        torch.randn(VOCAB, WIDTH, generator=draw),
        targets,
        torch.randn(TOKENS, generator=draw),
        torch.randn(TOKENS, generator=draw),
    )


class Numbers(NamedTuple):
    log_prob: Tensor
    entropy: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def by_autograd(
    given: Head, drawn: DrawnFrom, softcap: float | None = None, kept: Tensor | None = None
) -> Numbers:
    """In fp64, with logits; of those that are not kept with a logit of -inf."""
    hidden = given.hidden.double().requires_grad_()
    weight = given.weight.double().requires_grad_()
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits[:, : drawn.vocab] / drawn.temperature
    if kept is not None:
        for row, ids in enumerate(kept.tolist()):
            cut = sorted(set(range(logits.shape[1])) - set(ids))
            if ids[0] >= 0:
                logits[row, cut] = -torch.inf
    log_p = logits.log_softmax(-1)
    log_prob = log_p.gather(1, given.targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1)
    (log_prob * given.of_log_prob + entropy * given.of_entropy).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Numbers(log_prob, entropy, hidden.grad, weight.grad)


def assert_equal(got: Numbers, right: Numbers) -> None:
    for name, value, expected in zip(Numbers._fields, got, right, strict=True):
        torch.testing.assert_close(
            value.double(), expected, rtol=2e-5, atol=2e-5, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("drawn", DISTRIBUTIONS, ids=str)
def test_values_and_gradients_are_those_of_plain_autograd(
    drawn: DrawnFrom, chunk: int, softcap: float | None
) -> None:
    given = head(drawn.vocab or VOCAB)
    hidden = given.hidden.clone().requires_grad_()
    weight = given.weight.clone().requires_grad_()
    scores = linear_policy_scores(hidden, weight, given.targets, drawn, chunk, softcap=softcap)
    (scores.log_prob * given.of_log_prob + scores.entropy * given.of_entropy).sum().backward()
    got = Numbers(*scores, hidden.grad, weight.grad)  # pyright: ignore[reportArgumentType]
    assert_equal(got, by_autograd(given, drawn, softcap))


@pytest.mark.parametrize("used", ["log_prob", "entropy"])
def test_each_of_the_two_numbers_can_be_used_alone(used: str) -> None:
    given = head(30)
    nothing = torch.zeros(TOKENS)
    if used == "log_prob":
        given = given._replace(of_entropy=nothing)
    else:
        given = given._replace(of_log_prob=nothing)
    drawn = DrawnFrom(0.8, 30)
    hidden = given.hidden.clone().requires_grad_()
    weight = given.weight.clone().requires_grad_()
    scores = linear_policy_scores(hidden, weight, given.targets, drawn, 10)
    factor = getattr(given, f"of_{used}")
    (getattr(scores, used) * factor).sum().backward()
    got = Numbers(*scores, hidden.grad, weight.grad)  # pyright: ignore[reportArgumentType]
    assert_equal(got, by_autograd(given, drawn))


def test_frozen_weights_get_no_gradient_and_hidden_states_have_theirs() -> None:
    given = head(30)
    hidden = given.hidden.clone().requires_grad_()
    drawn = DrawnFrom(0.8, 30)
    scores = linear_policy_scores(hidden, given.weight, given.targets, drawn, 10)
    (scores.log_prob * given.of_log_prob + scores.entropy * given.of_entropy).sum().backward()
    torch.testing.assert_close(
        hidden.grad.double(), by_autograd(given, drawn).d_hidden, rtol=2e-5, atol=2e-5
    )


def test_the_formulas_agree_with_finite_differences() -> None:
    """The kernel computes in fp32, so that differences are taken of the formulas of its docstring."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(5, dtype=torch.float64, generator=draw).requires_grad_()
    temperature = 0.7

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x / temperature
        p = y.softmax(-1)
        return y[2] - y.logsumexp(-1), y.logsumexp(-1) - (p * y).sum()

    assert torch.autograd.gradcheck(both, x)
    p = (x / temperature).softmax(-1).detach()
    log_prob, entropy = both(x)
    (d_entropy,) = torch.autograd.grad(entropy, x, retain_graph=True)
    torch.testing.assert_close(d_entropy, -p * (p.log() + entropy.detach()) / temperature)
    (d_log_prob,) = torch.autograd.grad(log_prob, x)
    is_target = (torch.arange(5) == 2).double()
    torch.testing.assert_close(d_log_prob, (is_target - p) / temperature)


def kept_ids(given: Head, vocab: int) -> Tensor:
    """Some ids of every token, its target among them; of two tokens none, so all of them."""
    draw = torch.Generator().manual_seed(5)
    kept = torch.full((TOKENS, 6), -1, dtype=torch.int32)
    for row, target in enumerate(given.targets.tolist()):
        count = row % 6
        others = [
            token for token in torch.randperm(vocab, generator=draw).tolist() if token != target
        ]
        kept[row, : count + 1] = torch.tensor(sorted([target, *others[:count]]))
    kept[[4, 9]] = -1
    return kept


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("drawn", [DrawnFrom(), DrawnFrom(0.7, 30)], ids=str)
def test_of_kept_ids_alone_values_and_gradients_are_those_of_plain_autograd(
    drawn: DrawnFrom, chunk: int, softcap: float | None
) -> None:
    given = head(drawn.vocab or VOCAB)
    kept = kept_ids(given, drawn.vocab or VOCAB)
    hidden = given.hidden.clone().requires_grad_()
    weight = given.weight.clone().requires_grad_()
    scores = linear_policy_scores(
        hidden, weight, given.targets, drawn, chunk, softcap=softcap, kept=kept
    )
    (scores.log_prob * given.of_log_prob + scores.entropy * given.of_entropy).sum().backward()
    got = Numbers(*scores, hidden.grad, weight.grad)  # pyright: ignore[reportArgumentType]
    assert_equal(got, by_autograd(given, drawn, softcap, kept))
    # The first token is kept alone: it is certain.
    assert scores.log_prob[0] == 0


def on_a_rank(
    given: Head, drawn: DrawnFrom, softcap: float | None, kept: Tensor | None, group: RankGroup
) -> Numbers:
    """What one rank with some rows of the head computes; its gradient of hidden states is summed over ranks."""
    rows = even_parts(VOCAB, group.size)[group.rank]
    hidden = given.hidden.clone().requires_grad_()
    weight = given.weight[rows.start : rows.stop].clone().requires_grad_()

    def collect(part: Tensor) -> Tensor:
        return torch.stack([torch.from_numpy(each) for each in group.gather(part.numpy())])

    shard = VocabShard(rows.start, VOCAB, collect, lambda x: x)
    scores = linear_policy_scores(hidden, weight, given.targets, drawn, 10, shard, softcap, kept)
    (scores.log_prob * given.of_log_prob + scores.entropy * given.of_entropy).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    d_hidden = torch.stack([torch.from_numpy(x) for x in group.gather(hidden.grad.numpy())]).sum(0)
    d_weight = torch.cat([torch.from_numpy(x) for x in group.gather(weight.grad.numpy())])
    return Numbers(scores.log_prob.detach(), scores.entropy.detach(), d_hidden, d_weight)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "drawn",
    [DrawnFrom(), DrawnFrom(0.7, 30), DrawnFrom(1.0, 11)],
    ids=["whole", "padded", "a rank of padding alone"],
)
def test_two_ranks_with_half_of_the_head_each_have_the_numbers_of_the_whole_head(
    drawn: DrawnFrom, softcap: float | None, is_cut: bool
) -> None:
    given = head(drawn.vocab or VOCAB)
    kept = None
    if is_cut:
        kept = kept_ids(given, drawn.vocab or VOCAB)
    right = by_autograd(given, drawn, softcap, kept)
    for got in run_ranks(lambda group: on_a_rank(given, drawn, softcap, kept, group), 2):
        assert_equal(got, Numbers(*(each.detach() for each in right)))
