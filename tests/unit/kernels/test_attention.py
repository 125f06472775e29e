"""Every kernel computes the same attention, and none lets one document see another."""

import pytest
import torch

from headway.data.batch import Batch
from headway.errors import ConfigError
from headway.kernels.attention import (
    PLAIN,
    AttentionMask,
    ScoreRule,
    attend,
    causal_mask,
    choose,
    mask_of,
    working_backends,
)
from headway.kernels.sinks import attend_with_sinks

T = 24
ROWS = [[5, 1, 12, 6], [24], [10, 14]]


def packed(rows: list[list[int]], length: int, *, single_document: bool = False) -> AttentionMask:
    """The mask of a microbatch whose rows hold documents of these lengths."""
    count = max(len(row) for row in rows) + 2
    document = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    ).int()
    starts = [torch.tensor([0, *row]).cumsum(0) for row in rows]
    bounds = torch.stack(
        [torch.cat((s, torch.full((count - len(s),), length))) for s in starts]
    ).int()
    shape = (len(rows), length)
    return mask_of(
        Batch(
            tokens=torch.zeros(shape, dtype=torch.int64),
            targets=torch.zeros(shape, dtype=torch.int64),
            loss_weight=torch.ones(shape),
            position=torch.zeros(shape, dtype=torch.int32),
            document=document,
            source=torch.zeros(len(rows), dtype=torch.int32),
            bounds=bounds,
            single_document=single_document,
        )
    )


def inputs(rows: int, heads: int, kv_heads: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, T, h, 16, generator=generator).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: list[list[int]],
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query token and head at a time, from the definition."""
    out = torch.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            for position in range(start, start + length):
                first = start
                if window is not None:
                    first = max(start, position - window + 1)
                seen = slice(first, position + 1)
                for head in range(q.shape[2]):
                    keys = k[row, seen, head // group]
                    scores = keys @ q[row, position, head] / q.shape[-1] ** 0.5
                    if softcap is not None:
                        scores = torch.tanh(scores / softcap) * softcap
                    total = scores.exp().sum()
                    if sinks is not None:
                        total = total + sinks[head].exp()
                    weights = scores.exp() / total
                    out[row, position, head] = weights @ v[row, seen, head // group]
            start += length
    return out


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_kernels_follow_the_definition(backend: str, window: int | None, kv_heads: int) -> None:
    q, k, v = inputs(3, 4, kv_heads)
    output = attend(q, k, v, packed(ROWS, T), window=window, backend=backend)
    with torch.no_grad():
        expected = by_hand(q, k, v, ROWS, window)
    assert output.shape == q.shape
    assert (output - expected).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("window", [None, 4])
def test_soft_capped_scores_follow_the_definition(backend: str, window: int | None) -> None:
    q, k, v = inputs(3, 4, 2)
    output = attend(
        q, k, v, packed(ROWS, T), window=window, backend=backend, rule=ScoreRule(softcap=0.7)
    )
    with torch.no_grad():
        assert (output - by_hand(q, k, v, ROWS, window, 0.7)).abs().max() < 1e-5
        assert (output - by_hand(q, k, v, ROWS, window)).abs().max() > 1e-2
        alone = attend(q, k, v, causal_mask(3, T), rule=ScoreRule(softcap=0.7))
        assert (alone - by_hand(q, k, v, [[T]] * 3, None, 0.7)).abs().max() < 1e-5


SINKS = [-1.0, 0.5, 3.0, 40.0]
"""One so high that its head attends to nothing."""


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_follow_the_definition_and_so_do_their_gradients(window: int | None) -> None:
    mask = packed(ROWS, T)
    weight = torch.randn(3, T, 4, 16, generator=torch.Generator().manual_seed(9))
    results: list[list[torch.Tensor]] = []
    for how in ("reference", "sdpa", "packed"):
        q, k, v = inputs(3, 4, 2)
        sinks = torch.tensor(SINKS, requires_grad=True)
        o = (
            attend_with_sinks(q, k, v, sinks, mask, window)
            if how == "packed"
            else attend(q, k, v, mask, window=window, backend=how, rule=ScoreRule(sinks=sinks))
        )
        (o * weight).sum().backward()
        results.append([o.detach(), *(x.grad for x in (q, k, v, sinks) if x.grad is not None)])
    with torch.no_grad():
        assert (results[0][0] - by_hand(q, k, v, ROWS, window, sinks=sinks)).abs().max() < 1e-5
        assert results[0][0][:, :, 3].abs().max() < 1e-12
        assert results[0][4][:3].abs().min() > 1e-3
    for result in results[1:]:
        assert len(result) == 5
        for a, b in zip(result, results[0], strict=True):
            assert (a - b).abs().max() < 1e-5
    with torch.no_grad():
        capped = attend(q, k, v, mask, window=window, rule=ScoreRule(0.7, sinks))
        assert (capped - by_hand(q, k, v, ROWS, window, 0.7, sinks)).abs().max() < 1e-5


def test_a_kernel_without_sinks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="flex has no trained sinks and the model's attention_sinks is true"
    ):
        attend(
            *inputs(3, 4, 2),
            packed(ROWS, T),
            backend="flex",
            rule=ScoreRule(sinks=torch.tensor(SINKS)),
        )


def test_a_kernel_that_cannot_cap_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"varlen cannot soft-cap scores and the model's attention_softcap is 50\.0",
    ):
        attend(*inputs(3, 4, 2), packed(ROWS, T), backend="varlen", rule=ScoreRule(softcap=50.0))


@pytest.mark.parametrize("rule", [PLAIN, ScoreRule(softcap=0.7)])
@pytest.mark.parametrize("window", [None, 4])
def test_gradients_agree_with_the_reference(window: int | None, rule: ScoreRule) -> None:
    mask = packed(ROWS, T)
    operands = inputs(3, 4, 2)
    expected = inputs(3, 4, 2)
    weight = torch.randn(3, T, 4, 16, generator=torch.Generator().manual_seed(9))
    (attend(*operands, mask, window=window, rule=rule) * weight).sum().backward()
    (
        attend(*expected, mask, window=window, backend="reference", rule=rule) * weight
    ).sum().backward()
    for a, b in zip(operands, expected, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("window", [None, 4])
def test_changing_one_document_leaves_the_others_bit_equal(
    backend: str, window: int | None
) -> None:
    mask = packed(ROWS, T)
    rows = []
    for change in (0.0, 3.0):
        q, k, v = inputs(3, 4, 2)
        with torch.no_grad():
            for x in (q, k, v):
                x[0, 6:18] += change
        o = attend(q, k, v, mask, window=window, backend=backend)
        o.square().sum().backward()
        rows.append([o, q.grad, k.grad, v.grad])
    for a, b in zip(*rows, strict=True):
        assert torch.equal(a[1:], b[1:])
        assert torch.equal(a[0, :6], b[0, :6])
        assert torch.equal(a[0, 18:], b[0, 18:])
        assert not torch.equal(a[0, 6:18], b[0, 6:18])


@pytest.mark.parametrize("window", [None, 4])
def test_one_document_before_padding_needs_no_document_mask(window: int | None) -> None:
    rows = [[15, 9], [24], [20, 4]]
    q, k, v = inputs(3, 4, 2)
    output = attend(q, k, v, packed(rows, T, single_document=True), window=window)
    expected = attend(q, k, v, packed(rows, T), window=window, backend="reference")
    for row, lengths in enumerate(rows):
        assert (output[row, : lengths[0]] - expected[row, : lengths[0]]).abs().max() < 1e-5


def test_the_flat_starts_of_documents_count_every_row_and_pad_with_empty_ones() -> None:
    mask = packed([[5, 19], [24]], T)
    assert mask.cu_seqlens.dtype == torch.int32
    assert mask.cu_seqlens.tolist() == [0, 5, 24, 24, 48, 48, 48]
    assert mask.host_bounds == ((0, 5, 24), (0, 24))
    assert mask.max_length == T
    assert causal_mask(2, T).cu_seqlens.tolist() == [0, 24, 48]


def test_bf16_on_the_cpu_stays_close_to_fp32() -> None:
    mask = packed(ROWS, T)
    q, k, v = (x.detach() for x in inputs(3, 4, 2))
    low = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask)
    assert low.dtype == torch.bfloat16
    assert (low.float() - attend(q, k, v, mask)).abs().max() < 2e-2


def test_a_backend_that_cannot_serve_says_why() -> None:
    q, k, v = inputs(3, 4, 2)
    with pytest.raises(ConfigError, match="varlen runs on CUDA and the tensors are on cpu"):
        attend(q, k, v, packed(ROWS, T), backend="varlen")
    with pytest.raises(ConfigError, match="there are only reference, sdpa, varlen"):
        attend(q, k, v, packed(ROWS, T), backend="flash")


def test_the_doctor_sees_which_backends_work_here() -> None:
    assert [(name, ok) for name, ok, _ in working_backends("cpu")] == [
        ("reference", True),
        ("sdpa", True),
        ("varlen", False),
        ("fa4", False),
        ("flex", False),
    ]
    assert choose(inputs(3, 4, 2)[0], packed(ROWS, T), 4) == "sdpa"
