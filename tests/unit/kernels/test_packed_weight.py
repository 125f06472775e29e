"""Quantised matrices have the values of bitsandbytes, and products with them are products with the dequantised matrix."""

from typing import Any

import pytest
import torch

from headway.kernels.packed_layout import (
    FORMS,
    PackedForm,
    PackedLayout,
    form_of,
    packed_name,
    plain_name,
)
from headway.kernels.packed_weight import dynamic, levels, pack, packed_linear, sections, unpack

CPU = torch.device("cpu")
SHAPES = ((128, 192), (257, 100), (3, 50), (7, 9), (300, 1024))


def matrices() -> list[torch.Tensor]:
    """Sizes that are and are not multiples of blocks and groups, rows of zeros, outliers, both dtypes."""
    weights = []
    for index, shape in enumerate(SHAPES):
        plain = torch.randn(shape, generator=torch.Generator().manual_seed(index)) * 0.02
        odd = plain.clone()
        odd[0] = 0.0
        odd[1, :9] = 5.0
        weights += [plain, odd, plain.bfloat16(), odd.bfloat16()]
    return weights


@pytest.fixture(scope="module")
def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


@pytest.mark.slow
def test_nf4_has_the_bits_of_bitsandbytes(bitsandbytes: Any) -> None:
    table = bitsandbytes.functional.create_dynamic_map()
    ops = torch.ops.bitsandbytes
    assert torch.equal(dynamic(CPU), table)

    def portable(operation: Any, *inputs: Any) -> Any:
        """Its kernel for any device. The one for the CPU alone takes the second nearest 8-bit code where two are about equally near."""
        return operation._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *inputs)

    for weight in matrices():
        layout = PackedLayout("nf4", *weight.shape)
        packed = pack(weight, "nf4")
        codes, highest = portable(ops.quantize_4bit.default, weight, 64, "nf4", torch.uint8)
        offset = highest.mean()
        scale_codes, groups = portable(ops.quantize_blockwise.default, highest - offset, table, 256)
        ours = sections(packed, layout)
        for mine, reference in zip(
            ours[1:], (offset.view(1), scale_codes, codes.view(-1)), strict=True
        ):
            assert torch.equal(mine, reference), weight.shape
        torch.testing.assert_close(ours[0], groups, rtol=0, atol=1e-37)
        scales = (
            ops.dequantize_blockwise.default(scale_codes, groups, table, 256, torch.float32)
            + offset
        )
        if weight.shape[1] % 2:
            continue  # for odd sizes bitsandbytes would compile
        for dtype in (torch.float32, torch.bfloat16):
            reference = ops.dequantize_4bit.default(
                codes, scales, 64, "nf4", list(weight.shape), dtype
            )
            assert torch.equal(unpack(packed, layout, dtype), reference.view(weight.shape)), (
                weight.shape
            )


@pytest.mark.slow
def test_what_bitsandbytes_itself_returns_differs_in_few_scales_by_one_code(
    bitsandbytes: Any,
) -> None:
    weight = matrices()[-4]
    codes, state = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    layout = PackedLayout("nf4", *weight.shape)
    ours = sections(pack(weight, "nf4"), layout)
    assert torch.equal(ours[3], codes.view(-1))
    assert torch.equal(ours[1], state.offset.view(1))
    gap = (ours[2].int() - state.absmax.int()).abs()
    assert gap.max() <= 1
    assert (gap > 0).float().mean() < 0.01
    reference = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for part, value in zip(
        sections(reference, layout),
        (state.state2.absmax, state.offset, state.absmax, codes.view(-1)),
        strict=True,
    ):
        part.copy_(value)
    assert torch.equal(
        unpack(reference, layout, torch.float32),
        bitsandbytes.functional.dequantize_4bit(codes, state),
    )


@pytest.mark.slow
def test_nf4_has_the_levels_and_codes_of_torchao() -> None:
    nf4 = pytest.importorskip(
        "torchao.quantization.quantize_.workflows.nf4.nf4_tensor",
        reason="this torchao has no nf4 here",
    )
    # it needs 64 * 256 elements, and rounds scales differently
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    reference = nf4.to_nf4(weight, 64, 256)
    ours = sections(pack(weight, "nf4"), PackedLayout("nf4", 256, 256))
    # its levels have four digits
    torch.testing.assert_close(reference.nf4, levels(CPU), rtol=0, atol=1e-4)
    assert (reference.quantized_data.view(-1) == ours[3]).float().mean() > 0.99


@pytest.mark.slow
def test_int8_has_the_bits_of_bitsandbytes(bitsandbytes: Any) -> None:
    for weight in matrices():
        if weight.dtype != torch.bfloat16:
            continue  # bitsandbytes has it for 16 bits alone
        layout = PackedLayout("int8", *weight.shape)
        packed = pack(weight, "int8")
        scales, codes = sections(packed, layout)
        reference, highest, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
        assert torch.equal(scales, weight.float().abs().amax(1))
        exact = weight.half().float() == weight.float()
        same = codes.view(weight.shape) == reference
        assert (
            same[exact].float().mean() > 0.999
            and (codes.view(weight.shape).int() - reference.int()).abs().max() <= 1
        ), highest.shape


@pytest.mark.parametrize("form", FORMS)
def test_rounding_is_to_the_nearest_of_the_levels(form: PackedForm) -> None:
    for weight in matrices()[:-2]:
        whole = unpack(pack(weight, form), PackedLayout(form, *weight.shape), torch.float32)
        gap = (whole - weight.float()).abs()
        if form == "int8":
            assert (gap <= 0.5001 / 127 * weight.float().abs().amax(1, keepdim=True)).all()
        else:
            blocks = (
                torch.nn.functional.pad(weight.float().view(-1), (0, -weight.numel() % 64))
                .view(-1, 64)
                .abs()
                .amax(1)
            )
            limit = blocks.repeat_interleave(64)[: weight.numel()].view(weight.shape)
            widest = float(levels(CPU).diff().max()) / 2
            # what the second quantisation may be off by, at most a step of 0.0141
            spread = float((blocks - blocks.mean()).abs().max())
            assert (gap <= widest * limit + 0.0142 / 2 * spread + 1e-6).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float32, 1e-6, 1e-6), (torch.bfloat16, 1e-2, 6e-2)]
)
def test_product_and_gradient_are_those_of_the_dequantised_matrix(
    form: PackedForm, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    layout = PackedLayout(form, 40, 100)
    packed = pack(torch.randn(40, 100, generator=torch.Generator().manual_seed(2)), form)
    bias = torch.randn(40).to(dtype)
    values = torch.randn(2, 5, 100, generator=torch.Generator().manual_seed(3)).to(dtype)
    ours = values.clone().requires_grad_()
    dense = values.clone().requires_grad_()
    y = packed_linear(ours, packed, layout, bias)
    expected = torch.nn.functional.linear(dense, unpack(packed, layout, dtype), bias)
    direction = torch.randn(2, 5, 40).to(dtype)
    (y * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(y, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(ours.grad, dense.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_backward_keeps_bytes_and_never_the_matrix(compiled: bool) -> None:
    """Also where a compiler that may keep anything decides what is kept."""
    layout = PackedLayout("nf4", 96, 128)
    packed = pack(torch.randn(96, 128), "nf4")

    def half(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(packed_linear(x.sin(), packed, layout))

    run = torch.compile(half, backend="aot_eager_decomp_partition") if compiled else half
    sizes: list[int] = []

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    x = torch.randn(4, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        y = run(x)
    assert sizes
    assert max(sizes) <= layout.nbytes < 96 * 128
    y.sum().backward()
    assert x.grad is not None


def test_sizes_are_what_the_forms_promise() -> None:
    elements = 4096 * 14336
    assert 8 * PackedLayout("nf4", 14336, 4096).nbytes / elements == pytest.approx(4.127, abs=1e-3)
    assert 8 * PackedLayout("int8", 14336, 4096).nbytes / elements == pytest.approx(8.008, abs=1e-3)
    assert packed_name("a.q_proj.weight", "nf4") == "a.q_proj.weight_nf4"
    assert (
        plain_name("a.q_proj.weight_int8"),
        form_of("a.q_proj.weight_int8"),
        form_of("a.weight"),
    ) == ("a.q_proj.weight", "int8", None)
