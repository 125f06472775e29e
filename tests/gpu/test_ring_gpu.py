"""Ring attention on CUDA, its ranks one after another on one GPU: FlashAttention's partial results equal the fp32 reference."""

import pytest
import torch
from support.batches import make_batch
from support.one_process_ring import run_ring

from headway.kernels.attention import attend, mask_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROWS = [[512], [100, 412], [7, 250, 255], [256, 256]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (4, 1)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_equals_whole_rows(ranks: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(ROWS), 512, number, 64) for number in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, d_o = (torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes)
    mask = mask_of(make_batch(ROWS, seq_len=512, vocab=9, seed=0).to("cuda"))
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    right = attend(*exact, mask, backend="reference")
    right.backward(d_o.float())
    o, gradients = run_ring(q, k, v, d_o, mask, ranks)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 6e-3
    assert (o.float() - right).abs().max() < tolerance
    for got, leaf in zip(gradients, exact, strict=True):
        assert leaf.grad is not None
        assert (got.float() - leaf.grad).abs().max() < tolerance * max(
            1.0, leaf.grad.abs().max().item()
        )
