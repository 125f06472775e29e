"""Streaming attention: every backend equals the dense-mask reference, forward and backward, inside documents."""

from __future__ import annotations

import pytest
import torch
from support.batches import make_batch

from headway.errors import ConfigError
from headway.kernels.attention import AttentionMask, attend, mask_of
from headway.kernels.streaming import StreamingWindow, stream, visible_streaming
from headway.kernels.streaming_pieces import SEGMENT, plan_pieces

T = 96
ROWS = [[96], [40, 30, 20], [5, 11, 3, 70], [1, 2, 93]]
REACHES = [(8, 4), (16, 0), (1, 1), (5, 30), (200, 3), (3, 12)]


def mask(rows: list[list[int]] = ROWS) -> AttentionMask:
    return mask_of(make_batch(rows, seq_len=T, vocab=9))


def inputs(
    heads: int = 6, kv_heads: int = 2, rows: int = len(ROWS), dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(rows, T, h, 8, generator=generator).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def run(
    backend: str,
    reach: StreamingWindow,
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    kv_heads: int = 2,
) -> list[torch.Tensor]:
    """Output and gradients."""
    operands = inputs(heads, kv_heads, dtype=dtype)
    o = stream(operands[0], operands[1], operands[2], mask(), reach, backend=backend)
    (o.float() * torch.randn(o.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return [o.detach(), *(x.grad for x in operands if x.grad is not None)]


def test_the_reference_sees_exactly_sinks_and_window_of_its_document() -> None:
    seen = visible_streaming(mask([[4, 9, 83]]), StreamingWindow(3, 2))[0]
    starts = [0] * 4 + [4] * 9 + [13] * 83
    for i in range(T):
        for j in range(T):
            inside = starts[i] == starts[j] and j <= i
            assert seen[i, j].item() == (inside and (i - j < 3 or j - starts[j] < 2)), (i, j)


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("backend", ["blocks", "pieces"])
def test_every_backend_gives_output_and_gradients_of_the_reference(
    backend: str, reach: tuple[int, int]
) -> None:
    for got, right in zip(
        run(backend, StreamingWindow(*reach)),
        run("reference", StreamingWindow(*reach)),
        strict=True,
    ):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=2e-5)


def test_pieces_equal_the_reference_in_16_bits_and_without_groups() -> None:
    for got, right in zip(
        run("pieces", StreamingWindow(5, 3), torch.bfloat16),
        run("reference", StreamingWindow(5, 3), torch.bfloat16),
        strict=True,
    ):
        torch.testing.assert_close(got.float(), right.float(), rtol=3e-2, atol=3e-2)
    for got, right in zip(
        run("pieces", StreamingWindow(5, 3), heads=2),
        run("reference", StreamingWindow(5, 3), heads=2),
        strict=True,
    ):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", "blocks", "pieces"])
def test_up_to_window_plus_sinks_streaming_is_full_attention(backend: str) -> None:
    q, k, v = inputs()
    full = attend(q, k, v, mask())
    streamed = stream(q, k, v, mask(), StreamingWindow(10, 7), backend=backend)
    position = make_batch(ROWS, seq_len=T, vocab=9).position
    early = position < 17
    torch.testing.assert_close(streamed[early], full[early], rtol=1e-4, atol=1e-5)
    assert (streamed[~early] - full[~early]).abs().max() > 1e-3


def test_a_document_sees_nothing_of_its_neighbours() -> None:
    for backend in ("blocks", "pieces"):
        q, k, v = (x.detach() for x in inputs())
        before = stream(q, k, v, mask(), StreamingWindow(4, 2), backend=backend)
        v[1, 40:70] += 1
        after = stream(q, k, v, mask(), StreamingWindow(4, 2), backend=backend)
        changed = (before != after).flatten(2).any(-1)
        assert changed[1, 40:70].all()
        changed[1, 40:70] = False
        assert not changed.any()


def test_long_ranges_bring_their_own_sinks_and_work_grows_with_length_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.kernels.streaming_pieces.SEGMENT", 10)
    for got, right in zip(
        run("pieces", StreamingWindow(4, 3)), run("reference", StreamingWindow(4, 3)), strict=True
    ):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=2e-5)
    plan = plan_pieces(mask([[96]]), 4, 3)
    assert [piece.right for piece in plan.pieces] == [0, -1]
    assert plan.pieces[1].queries == slice(7, 96)
    assert plan.pieces[1].keys.tolist() == [0, 1, 2] * 9
    assert SEGMENT == 4096


def test_backends_share_their_plan_over_layers_and_refuse_unknown_names() -> None:
    reach = StreamingWindow(4, 2)
    shared = mask()
    other = mask()
    assert reach.plan(shared) is reach.plan(shared)
    assert reach.plan(other) is not reach.plan(shared)
    with pytest.raises(ConfigError, match="reference, blocks, pieces"):
        stream(*inputs(), mask=shared, reach=reach, backend="dense")
