"""On a CUDA device: grouped products of experts against a loop over experts, alone and in mixtures that never wait for the host."""

import pytest
import torch

from headway.kernels.grouped import (
    _linear,
    _weights,
    grouped_inputs,
    grouped_linear,
    grouped_weights,
    has_kernel,
)
from headway.kernels.packed_layout import PackedLayout
from headway.kernels.packed_weight import pack, unpack
from headway.model.adapter.config import AdapterConfig
from headway.model.adapter.experts import AdaptedExpertLinear
from headway.model.base import compile_method
from headway.model.config import ModelConfig
from headway.model.moe import MixtureOfExperts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("sizes", [[300, 212, 0, 512], [0, 0, 1024, 0], [1, 7, 1013, 3]])
def test_grouped_products_agree_with_a_loop_over_experts(sizes: list[int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    total = sum(sizes)
    x, dy = (
        torch.randn(total, width, device="cuda", generator=generator).bfloat16()
        for width in (256, 384)
    )
    weight = torch.randn(4, 384, 256, device="cuda", generator=generator).bfloat16() / 16
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    assert has_kernel(weight)
    for got, right in (
        (grouped_linear(x, weight, ends), _linear(x, weight, ends, False)),
        (grouped_inputs(dy, weight, ends), _linear(dy, weight, ends, True)),
        (grouped_weights(dy, x, ends, weight), _weights(dy, x, ends)),
    ):
        torch.testing.assert_close(got, right, rtol=2e-2, atol=2e-2 * float(right.abs().max()))


def mixture(dtype: torch.dtype) -> MixtureOfExperts:
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=256,
        num_heads=4,
        vocab_size=64,
        experts={"num": 16, "per_token": 4, "ffn_size": 128},
    )
    made = MixtureOfExperts(config).cuda()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return made.to(dtype)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mixture_in_bf16_is_near_the_one_in_fp32(compiled: bool) -> None:
    exact, low = mixture(torch.float32), mixture(torch.bfloat16)
    exact.load_state_dict({name: value.float() for name, value in low.state_dict().items()})
    counted = torch.ones(2, 512, device="cuda")
    x = torch.randn(2, 512, 256, device="cuda").bfloat16()
    route = compile_method(low.route) if compiled else low.route
    a, b = x.detach().requires_grad_(), x.float().requires_grad_()
    got, routing = route(a, counted)
    right, exact_routing = exact.route(b, counted)
    torch.testing.assert_close(
        got.float(), right.detach(), rtol=5e-2, atol=5e-2 * float(right.detach().abs().max())
    )
    assert torch.equal(routing.load, exact_routing.load)  # the router is fp32 in both
    upstream = torch.randn_like(right)
    ours = torch.autograd.grad(got, [a, *low.parameters()], upstream.bfloat16())
    theirs = torch.autograd.grad(right, [b, *exact.parameters()], upstream)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            one.float(), other, rtol=5e-2, atol=5e-2 * float(other.abs().max())
        )


def test_a_compiled_mixture_neither_waits_for_the_host_nor_compiles_again() -> None:
    low = mixture(torch.bfloat16)
    counted, route = torch.ones(2, 512, device="cuda"), compile_method(low.route)
    for seed in range(3):
        x = (
            torch.randn(
                2, 512, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)
            )
            .bfloat16()
            .requires_grad_()
        )
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if seed else "default")
        try:
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                out, _ = route(x, counted)
                out.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True])
def test_updates_of_quantised_experts_in_bf16_are_near_the_effective_matrices_in_fp32(
    compiled: bool,
) -> None:
    """Every matrix in nf4 with an update of rank 8, against plain experts that hold W + s B A."""
    low, exact = mixture(torch.bfloat16), mixture(torch.float32)
    updates: dict[str, tuple[torch.Tensor, torch.Tensor, torch.nn.Parameter]] = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        old = getattr(low.experts, name)
        experts, outputs, inputs = old.weight.shape
        layout = PackedLayout("nf4", experts * outputs, inputs, experts)
        packed = pack(old.weight.detach().flatten(0, 1), "nf4")
        made = (
            AdaptedExpertLinear(old, AdapterConfig(rank=8, targets=("experts",))).cuda().bfloat16()
        )
        for factor in (made.lora_A, made.lora_B):
            assert factor is not None
            torch.nn.init.normal_(factor.weight, std=0.05)
        made.store_packed(layout)
        getattr(made, "weight_nf4").data.copy_(packed)  # noqa: B009 - a parameter that the checker does not know
        setattr(low.experts, name, made)
        assert made.lora_A is not None and made.lora_B is not None
        whole = unpack(packed, layout, torch.float32).view(layout.shape)
        whole = (
            whole
            + made.scale * made.lora_B.weight.detach().float() @ made.lora_A.weight.detach().float()
        )
        getattr(exact.experts, name).weight.data.copy_(whole)
        updates[name] = (
            made.lora_A.weight,
            made.lora_B.weight,
            getattr(exact.experts, name).weight,
        )
    exact.gate.load_state_dict(
        {name: value.float() for name, value in low.gate.state_dict().items()}
    )
    x = torch.randn(2, 512, 256, device="cuda").bfloat16()
    route = compile_method(low.route) if compiled else low.route
    a, b = x.detach().requires_grad_(), x.float().requires_grad_()
    counted = torch.ones(2, 512, device="cuda")
    got, right = route(a, counted)[0], exact.route(b, counted)[0]
    torch.testing.assert_close(
        got.float(), right.detach(), rtol=5e-2, atol=5e-2 * float(right.detach().abs().max())
    )
    upstream = torch.randn_like(right)
    got.backward(upstream.bfloat16())
    right.backward(upstream)
    assert a.grad is not None and b.grad is not None
    torch.testing.assert_close(
        a.grad.float(), b.grad, rtol=5e-2, atol=5e-2 * float(b.grad.abs().max())
    )
    scale = 32 / 8
    for first, second, whole in updates.values():
        assert first.grad is not None and second.grad is not None and whole.grad is not None
        for ours, theirs in (
            (first.grad.float(), scale * second.detach().float().mT @ whole.grad),
            (second.grad.float(), scale * whole.grad @ first.detach().float().mT),
        ):
            torch.testing.assert_close(
                ours, theirs, rtol=5e-2, atol=5e-2 * float(theirs.abs().max())
            )
