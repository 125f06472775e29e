"""On a CUDA device: the AdamW kernel, fp8 layers, the head's fp32 gradient, FlashAttention-4 and quantised matrices against plain forms."""

import pytest
import torch
import torch.nn.functional as F
from support.adamw_tensors import bf16_moments

from headway.kernels import flash4
from headway.kernels.adamw import AdamWHyper, AdamWTensors, adamw_step, adamw_step_reference
from headway.kernels.cross_entropy import linear_nll
from headway.kernels.fp8 import Scaling, fp8_linear
from headway.kernels.packed_layout import FORMS, PackedForm, PackedLayout
from headway.kernels.packed_weight import pack, packed_linear, unpack, unpack_reference
from headway.optim.base import Guard, Hyper
from headway.optim.low_precision_adamw import LowPrecisionAdamW
from headway.optim.state_storage import StateStorage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def flat_tensors(seed: int, size: int = 100_000) -> AdamWTensors:
    generator = torch.Generator("cuda").manual_seed(seed)
    flat = [torch.randn(size, device="cuda", generator=generator) for _ in range(3)]
    flat.append(torch.rand(size, device="cuda", generator=generator))
    counts = torch.full((2,), 4.0, device="cuda")
    return AdamWTensors(
        *([one[:65536], one[65536:]] for one in flat),
        [counts[0], counts[1]],
        list(flat[0].bfloat16().split(65536)),
    )


@pytest.mark.parametrize("bad", [0.0, 1.0])
@pytest.mark.parametrize("maximize", [False, True])
def test_the_adamw_kernel_agrees_with_torch(bad: float, maximize: bool) -> None:
    ours, theirs = flat_tensors(0), flat_tensors(0)
    numbers, scale = (
        AdamWHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, maximize),
        torch.tensor(2.5, device="cuda"),
    )
    found_inf = torch.tensor(bad, device="cuda")
    adamw_step(ours, numbers, scale, found_inf)
    adamw_step_reference(theirs, numbers, scale, found_inf)
    for name, one, other in zip(AdamWTensors._fields, ours, theirs, strict=True):
        for a, b in zip(one, other, strict=True):
            if name != "grads":
                torch.testing.assert_close(
                    a, b, rtol=2e-6 if a.dtype == torch.float32 else 8e-3, atol=1e-5
                )


@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_moments_in_bf16_are_those_of_the_host(bad: float) -> None:
    found = []
    for device in ("cuda", "cpu"):
        made = bf16_moments(flat_tensors(0))
        on = AdamWTensors(*([x.to(device) for x in side] for side in made))
        state = {"exp_avg": list(on.exp_avg), "exp_avg_sq": list(on.exp_avg_sq)}
        guard = Guard(torch.tensor(2.0, device=device), torch.tensor(bad, device=device))
        plain, hyper = (
            LowPrecisionAdamW(StateStorage(torch.bfloat16)),
            Hyper(1e-2, (0.5, 0.5), 1e-8, 0.1),
        )
        plain.update(
            list(on.params), list(on.grads), state, list(on.steps), hyper, guard, list(on.copies)
        )
        found.append(on)
    for name, ours, theirs in zip(AdamWTensors._fields, *found, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.cpu(), b) or (not bad and name in ("params", "copies")), name
            torch.testing.assert_close(
                a.cpu(), b, rtol=2e-6 if a.dtype == torch.float32 else 8e-3, atol=1e-5
            )


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", [False, True])
def test_fp8_products_agree_with_their_reference(scaling: Scaling, compiled: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 products here")
    generator = torch.Generator().manual_seed(0)
    x, w, g = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((2, 64, 256), (128, 256), (2, 64, 128))
    )
    call = torch.compile(fp8_linear, fullgraph=True) if compiled else fp8_linear
    results = []
    for device, function in (("cuda", call), ("cpu", fp8_linear)):
        leaves = [t.to(device).detach().requires_grad_() for t in (x, w)]
        y = function(leaves[0], leaves[1], None, scaling)
        y.backward(g.to(device))
        results.append(
            [t.detach().float().cpu() for t in (y, leaves[0].grad, leaves[1].grad) if t is not None]
        )
    plain = F.linear(x.float(), w.float())
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() / other.norm() < 0.02
    assert (results[0][0] - plain).norm() / plain.norm() < 0.06


def test_the_heads_gradient_is_added_up_in_fp32() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(512, 64, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(1000, 64, device="cuda", generator=generator).bfloat16()
    targets = torch.randint(0, 1000, (512,), device="cuda", generator=generator)
    gradients = []
    for value, chunk in ((weight, 64), (weight.float(), 512)):
        leaf = value.detach().requires_grad_()
        leaf.grad_dtype = None
        linear_nll(
            hidden.to(value.dtype),
            leaf,
            targets,
            torch.ones(512, device="cuda"),
            chunk_tokens=chunk,
        ).total.backward()
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32
        gradients.append(leaf.grad)
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 0.01


@pytest.mark.skipif(bool(flash4.why_not()), reason=f"FlashAttention-4: {flash4.why_not()}")
@pytest.mark.parametrize("rows", ["packed", "alone"])
@pytest.mark.parametrize("window", [None, 1, 64, 1000])
@pytest.mark.parametrize("shape", [(8, 8, 64), (8, 2, 64), (4, 1, 128)])
def test_flash_attention_4_agrees_with_the_reference(
    shape: tuple[int, int, int], window: int | None, rows: str
) -> None:
    from test_attention_gpu import ALONE, PACKED, compare  # pyright: ignore[reportMissingImports]

    compare(shape, PACKED if rows == "packed" else ALONE, window, "fa4", torch.bfloat16, 2e-2)


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_matrix_is_written_out_like_its_reference(form: PackedForm) -> None:
    for shape in ((512, 1024), (333, 101)):
        packed, layout = pack(torch.randn(shape, device="cuda"), form), PackedLayout(form, *shape)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(
                unpack(packed, layout, dtype), unpack_reference(packed, layout, dtype)
            )


@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_packed_product_keeps_no_matrix(form: PackedForm) -> None:
    layout = PackedLayout(form, 2048, 2048)
    packed = pack(torch.randn(2048, 2048, device="cuda"), form)
    half = torch.compile(lambda x: F.silu(packed_linear(x.sin(), packed, layout)))
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    half(x).sum().backward()  # compiles
    before = torch.cuda.memory_allocated()
    y = half(x)
    assert torch.cuda.memory_allocated() - before < 4 * x.nbytes
    y.sum().backward()
    plain = x.detach().clone().requires_grad_()
    F.silu(plain.sin() @ unpack(packed, layout, torch.bfloat16).t()).sum().backward()
    assert x.grad is not None and plain.grad is not None
    torch.testing.assert_close(
        x.grad / 2, plain.grad, rtol=3e-2, atol=3e-2 * float(plain.grad.abs().max())
    )
