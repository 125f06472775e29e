"""Attention in bits that depend on a token and those before it alone: the reference's numbers, and one result for every way to compute."""

import pytest
import torch

from headway.kernels.attention import AttentionMask, _mask, reference, visible
from headway.kernels.exact_attention import KEYS, attend_documents, attend_one, attend_piece

SHAPES = [(4, 2, 8), (9, 3, 16), (20, 1, 8), (3, 3, 5)]
"""Query heads, KV heads, width."""
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(rows: int, length: int, shape: tuple[int, int, int]) -> Case:
    heads, kv_heads, width = shape
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(rows, length, n, width, generator=generator) for n in (heads, kv_heads, kv_heads)
    )  # fmt: skip
    return q, k, v


def packed(bounds: list[list[int]], length: int) -> AttentionMask:
    starts = torch.tensor(bounds, dtype=torch.int32)
    place = torch.arange(length)
    document = (place[None, :, None] >= starts[:, None, 1:]).sum(-1).int()
    return _mask(document, starts, single_document=False, max_length=length, rows=len(bounds))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_reference(shape: tuple[int, int, int]) -> None:
    length = KEYS * 2 + 9
    mask = packed([[0, 5, 70, length], [0, length, length, length]], length)
    q, k, v = given = [x.requires_grad_() for x in drawn(2, length, shape)]
    got = attend_documents(q, k, v, mask)
    expected = reference(q, k, v, visible(mask, None))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
    toward = torch.cos(torch.arange(got.numel())).view(got.shape)
    found = torch.autograd.grad((got * toward).sum(), given)
    right = torch.autograd.grad((expected * toward).sum(), given)
    for gradient, plain in zip(found, right, strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_pieces_and_single_steps_give_the_same_bits(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    length = KEYS + 21
    q, k, v = (x[0].to(dtype) for x in drawn(1, length, shape))
    alone = packed([[0, length]], length)
    expected = attend_documents(q[None], k[None], v[None], alone)[0]

    # Behind another document, and followed by padding.
    before = 13
    row_q, row_k, row_v = (torch.cat([x[:before], x, x[:7]])[None] for x in (q, k, v))
    whole = before + length + 7
    mask = packed([[0, before, before + length, whole]], whole)
    got = attend_documents(row_q, row_k, row_v, mask)[0]
    assert torch.equal(got[before : before + length], expected)

    for cut in (1, 30, KEYS, length - 1):
        first = attend_piece(q[:cut], k[:cut], v[:cut], 0)
        second = attend_piece(q[cut:], k, v, cut)
        assert torch.equal(torch.cat([first, second]), expected)

    # A step of several sequences, whose pages hold more than they have written.
    positions = torch.tensor([0, 5, KEYS - 1, KEYS, length - 1])
    pages = [torch.zeros(len(positions), 2 * KEYS, *x.shape[1:], dtype=dtype) for x in (k, v)]
    for page, x in zip(pages, (k, v), strict=True):
        page[:, :length] = x
    for some in (positions, positions[2:], positions[-1:]):
        places = slice(len(positions) - len(some), None)
        stepped = attend_one(q[some], pages[0][places], pages[1][places], some)
        assert torch.equal(stepped, expected[some])
