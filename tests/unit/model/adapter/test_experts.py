"""Low-rank updates of experts and quantised experts: equal to plain experts that hold the effective matrices, merged and compiled too."""

from typing import Any

import pytest
import torch
from support.engines import CONFIG

from headway.errors import ConfigError
from headway.kernels.packed_layout import form_of
from headway.model.adapter.config import AdapterConfig, all_specs
from headway.model.adapter.lora import adapt, merged, pack_linears, with_updates
from headway.model.adapter.packed_base import packed_values, plain_values
from headway.model.adapter.peft import adapter_settings
from headway.model.config import ModelConfig
from headway.model.flops import token_flops
from headway.model.layout import EXPERTS, param_specs
from headway.model.transformer import Transformer
from headway.plan.job import PlanJob
from headway.plan.memory import estimate

CPU = torch.device("cpu")
SHAPE = {"num": 5, "per_token": 2, "ffn_size": 24}
MIXTURE = CONFIG.with_(dropout=0.0, init_std=0.3, experts=SHAPE)
BIASED = CONFIG.with_(
    dropout=0.0,
    experts={**SHAPE, "bias": True, "swiglu_limit": 1.0, "swiglu_alpha": 1.5, "shared_ffn_size": 8},
)
BOTH = ("all", "experts")


def config_of(**more: Any) -> AdapterConfig:
    return AdapterConfig(rank=3, alpha=5.0, **{"targets": BOTH, **more})


def first_values(config: AdapterConfig, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights and updates, as an engine stores them."""
    base = (
        (spec.name, torch.randn(spec.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
        for i, spec in enumerate(param_specs(model))
    )
    layouts = config.layouts(model)
    modules = config.modules(model)
    values = dict(
        with_updates(packed_values(base, layouts, CPU), config, modules, 3, {}, layouts=layouts)
    )
    drawn = torch.Generator().manual_seed(9)
    return {
        name: value if "lora_B" not in name else torch.randn(value.shape, generator=drawn) * 0.1
        for name, value in values.items()
    }


def model_of(
    config: AdapterConfig | None, values: dict[str, torch.Tensor], shape: ModelConfig
) -> Transformer:
    model = Transformer(shape).eval()
    if config is not None:
        adapt(model, config, config.modules(shape))
        pack_linears(model, config.layouts(shape))
    model.load_state_dict(values)
    return model


def loss_of(model: Transformer) -> torch.Tensor:
    from headway.kernels.attention import causal_mask

    tokens = torch.randint(0, CONFIG.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    out = model.logits(model(tokens, torch.arange(9).expand(2, -1), causal_mask(2, 9)))
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).mean()


def gradients(model: Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("shape", [MIXTURE, BIASED], ids=["plain", "biased"])
@pytest.mark.parametrize(
    "targets",
    [("experts",), ("experts.down_proj",), ("*.0.mlp.experts.gate_proj", "q_proj")],
    ids=str,
)
def test_updates_of_experts_are_those_of_their_effective_matrices(
    shape: ModelConfig, targets: tuple[str, ...]
) -> None:
    """Gradients of A and B follow from the gradient of the whole matrix, W + s B A, by the chain rule."""
    config = config_of(targets=targets)
    values = first_values(config, shape)
    loss, ours = gradients(model_of(config, values, shape))
    whole = dict(merged(values.items(), config, config.modules(shape)))
    right, exact = gradients(model_of(None, whole, shape))
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-6)
    seen = 0
    for path in config.modules(shape):
        a = values[f"{path}.lora_A.weight"]
        b = values[f"{path}.lora_B.weight"]
        by_whole = exact[f"{path}.weight"]
        torch.testing.assert_close(
            ours[f"{path}.lora_A.weight"], config.scale * b.mT @ by_whole, rtol=1e-4, atol=1e-6
        )
        torch.testing.assert_close(
            ours[f"{path}.lora_B.weight"], config.scale * by_whole @ a.mT, rtol=1e-4, atol=1e-6
        )
        seen += EXPERTS in path
    assert seen == {"experts": 3 * shape.num_layers, "experts.down_proj": shape.num_layers}.get(
        targets[0], 1
    )
    for name, gradient in ours.items():
        if "lora_" not in name:
            torch.testing.assert_close(gradient, exact[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["nf4", "int8"])
@pytest.mark.parametrize("targets", [BOTH, ("q_proj",)], ids=str)
def test_quantised_experts_compute_as_the_dequantised_ones(
    form: Any, targets: tuple[str, ...]
) -> None:
    packed = config_of(base=form, targets=targets)
    plain = config_of(targets=targets)
    values = first_values(packed, MIXTURE)
    stored = [name for name in values if EXPERTS in name and form_of(name) == form]
    assert len(stored) == 3 * MIXTURE.num_layers
    floats = dict(plain_values(values.items(), packed.layouts(MIXTURE)))
    shapes = {spec.name: spec.shape for spec in param_specs(MIXTURE)}
    assert all(tuple(floats[name].shape) == shape for name, shape in shapes.items())
    loss, ours = gradients(model_of(packed, values, MIXTURE))
    right, exact = gradients(model_of(plain, floats, MIXTURE))
    torch.testing.assert_close(loss, right, rtol=1e-6, atol=1e-6)
    assert not [name for name in ours if form_of(name) is not None]
    updates = [name for name in ours if "lora_" in name]
    assert sorted(updates) == sorted(packed.shapes(MIXTURE))
    for name in updates:
        torch.testing.assert_close(ours[name], exact[name], rtol=1e-5, atol=1e-6)


@pytest.mark.drill
def test_a_compiled_block_gives_the_same_numbers() -> None:
    config = config_of(base="int8")
    values = first_values(config, MIXTURE)
    loss, ours = gradients(model_of(config, values, MIXTURE))
    model = model_of(config, values, MIXTURE)
    for block in model.blocks().values():
        for method in model.BLOCK_METHODS:
            setattr(
                block,
                method,
                torch.compile(getattr(block, method), backend="aot_eager", fullgraph=True),
            )
    right, exact = gradients(model)
    torch.testing.assert_close(loss, right, rtol=1e-6, atol=1e-6)
    assert ours.keys() == exact.keys()
    for name, gradient in exact.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)


def test_plans_count_bytes_of_quantised_experts_and_active_updates() -> None:
    plain = config_of()
    packed = config_of(base="nf4")
    jobs = [
        PlanJob(
            MIXTURE,
            32,
            2,
            1,
            specs=all_specs(MIXTURE, adapter),
            training=set(adapter.shapes(MIXTURE)),
        )
        for adapter in (plain, packed)
    ]
    count = jobs[1].memory_job()
    assert count.packed == sum(
        spec.size for spec in param_specs(MIXTURE) if spec.name in packed.layouts(MIXTURE)
    )
    assert count.packed_bytes == sum(layout.nbytes for layout in packed.layouts(MIXTURE).values())
    saved = 2 * count.packed - count.packed_bytes
    weights = [estimate(job.memory_job()).kinds["weights"] for job in jobs]
    assert weights[0] - weights[1] == pytest.approx(1.01 * saved, abs=4)
    largest = SHAPE["num"] * SHAPE["ffn_size"] * MIXTURE.hidden_size
    assert estimate(jobs[1].memory_job()).kinds["buffers"] - estimate(jobs[0].memory_job()).kinds[
        "buffers"
    ] == pytest.approx(2.02 * largest, abs=4)
    flops = [
        token_flops(
            MIXTURE, 32, specs=all_specs(MIXTURE, adapter), training=set(adapter.shapes(MIXTURE))
        )
        for adapter in (plain, packed)
    ]
    without = token_flops(
        MIXTURE,
        32,
        specs=all_specs(MIXTURE, config_of(targets=("all",))),
        training=set(config_of(targets=("all",)).shapes(MIXTURE)),
    )
    assert flops[0] == flops[1]
    assert flops[0].matrices > without.matrices


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"targets": ("gate_proj",)},
            "only experts. Use experts .all three matrices. or experts.gate_proj",
        ),
        ({"targets": ("experts.q_proj",)}, "matches no linear"),
        ({"kind": "dora"}, "adapter.kind is dora and adapter.targets holds experts"),
        ({"dropout": 0.1}, "adapter.dropout is 0.1 and adapter.targets holds experts"),
    ],
)
def test_what_experts_cannot_have_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(**change).modules(MIXTURE)


def test_names_of_linears_mean_those_that_every_token_passes_and_peft_has_no_form_of_the_others() -> (
    None
):
    assert not [path for path in AdapterConfig().modules(BIASED) if EXPERTS in path]
    assert not [
        path for path in AdapterConfig(targets=("gate_proj",)).modules(BIASED) if EXPERTS in path
    ]
    with pytest.raises(ConfigError, match="no form in PEFT"):
        adapter_settings(config_of(), MIXTURE, [], None)
