"""On a CUDA device: grouped products of experts against a loop over experts, alone and in mixtures that never wait for the host."""

import pytest
import torch

from headway.kernels.grouped import _linear, _weights, grouped_inputs, grouped_linear, grouped_weights, has_kernel
from headway.model.base import compile_method
from headway.model.config import ModelConfig
from headway.model.moe import MixtureOfExperts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("sizes", [[300, 212, 0, 512], [0, 0, 1024, 0], [1, 7, 1013, 3]])
def test_grouped_products_agree_with_a_loop_over_experts(sizes: list[int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    total = sum(sizes)
    x, dy = (torch.randn(total, width, device="cuda", generator=generator).bfloat16() for width in (256, 384))
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
    config = ModelConfig(hidden_size=256, num_heads=4, vocab_size=64, experts={"num": 16, "per_token": 4, "ffn_size": 128})
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
    torch.testing.assert_close(got.float(), right.detach(), rtol=5e-2, atol=5e-2 * float(right.detach().abs().max()))
    assert torch.equal(routing.load, exact_routing.load)  # the router is fp32 in both
    upstream = torch.randn_like(right)
    ours = torch.autograd.grad(got, [a, *low.parameters()], upstream.bfloat16())
    theirs = torch.autograd.grad(right, [b, *exact.parameters()], upstream)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=5e-2, atol=5e-2 * float(other.abs().max()))


def test_a_compiled_mixture_neither_waits_for_the_host_nor_compiles_again() -> None:
    low = mixture(torch.bfloat16)
    counted, route = torch.ones(2, 512, device="cuda"), compile_method(low.route)
    for seed in range(3):
        x = torch.randn(2, 512, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if seed else "default")
        try:
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                out, _ = route(x, counted)
                out.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
