"""On a CUDA device: the distillation loss in bf16 against fp32 on the host, and its memory against that of whole logits."""

import pytest
import torch

from headway.kernels.distill_loss import DistillShaping, TeacherHead, linear_distill
from headway.kernels.topk_distill_loss import linear_top_k, linear_topk_distill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("reverse", [False, True])
def test_bf16_on_the_device_agrees_with_fp32_on_the_host(reverse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, taught, teacher = (
        torch.randn(*shape, generator=generator) / 4
        for shape in ((512, 64), (1000, 64), (512, 96), (1000, 96))
    )
    targets, counted = torch.randint(0, 1000, (512,), generator=generator), torch.ones(512)
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        # both start from the same rounded numbers
        given = [x.bfloat16().to(device, dtype) for x in (hidden, weight, taught, teacher)]
        leaf = given[0].requires_grad_()
        head, shaping = TeacherHead(given[3]), DistillShaping(2.0, reverse, 0.5)
        out = linear_distill(
            leaf, given[1], given[2], head, targets.to(device), counted.to(device), shaping, 256
        )
        out.total.backward()
        assert leaf.grad is not None
        found.append((float(out.total.detach()), leaf.grad.float().cpu()))
    assert found[0][0] == pytest.approx(found[1][0], rel=5e-3)
    assert (found[0][1] - found[1][1]).norm() / found[1][1].norm() < 0.02


def test_memory_is_that_of_a_chunk_whatever_the_length_of_a_row() -> None:
    vocab, peaks = 32_000, []
    weight = torch.randn(vocab, 128, device="cuda").bfloat16().requires_grad_()
    teacher = TeacherHead(torch.randn(vocab, 256, device="cuda").bfloat16())
    for tokens in (4096, 16384):
        hidden = torch.randn(tokens, 128, device="cuda").bfloat16().requires_grad_()
        taught = torch.randn(tokens, 256, device="cuda").bfloat16()
        targets = torch.randint(0, vocab, (tokens,), device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        linear_distill(
            hidden,
            weight,
            taught,
            teacher,
            targets,
            torch.ones(tokens, device="cuda"),
            DistillShaping(),
            4096,
        ).total.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        weight.grad = None
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 16384 * vocab * 4  # one tensor of the whole logits in fp32


@pytest.mark.parametrize("drop", [False, True])
def test_stored_logits_in_bf16_on_the_device_agree_with_fp32_on_the_host(drop: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((512, 64), (1000, 64), (512, 96), (1000, 96))
    hidden, weight, taught, teacher = (
        torch.randn(*shape, generator=generator) / 4 for shape in shapes
    )
    targets, counted = torch.randint(0, 1000, (512,), generator=generator), torch.ones(512)
    stored = linear_top_k(taught, teacher, 16, 2.0)
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        leaf, head = (x.bfloat16().to(device, dtype) for x in (hidden, weight))
        leaf.requires_grad_()
        given = type(stored)(stored.ids.int().to(device), stored.log_probs.half().to(device))
        out = linear_topk_distill(
            leaf,
            head,
            given,
            targets.to(device),
            counted.to(device),
            DistillShaping(2.0, False, 0.5),
            drop,
            256,
        )
        out.total.backward()
        assert leaf.grad is not None
        found.append((float(out.total.detach()), leaf.grad.float().cpu()))
    assert found[0][0] == pytest.approx(found[1][0], rel=5e-3)
    assert (found[0][1] - found[1][1]).norm() / found[1][1].norm() < 0.02
