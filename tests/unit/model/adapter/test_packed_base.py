"""A quantised base under adapters: the same numbers as plain linears that hold the dequantised matrices, and the modes that save memory."""

from typing import Any

import pytest
import torch
from support.engines import CONFIG, Setup, make_engine, train_steps

from headway.errors import ConfigError, ParallelError
from headway.kernels import packed_weight
from headway.kernels.packed_layout import PackedForm, PackedLayout, form_of
from headway.model.adapter.config import AdapterConfig, all_specs
from headway.model.adapter.lora import (
    AdaptedLinear,
    PackedLinear,
    adapt,
    merged,
    pack_linears,
    with_updates,
)
from headway.model.adapter.packed_base import packed_values, plain_values
from headway.model.config import ModelConfig
from headway.model.flops import token_flops
from headway.model.layout import EMBEDDING, HEAD, param_specs
from headway.model.transformer import Transformer
from headway.optim.groups import trainable
from headway.parallel.collectives import RankGroup
from headway.parallel.config import ParallelConfig
from headway.parallel.recompute import recompute_whole
from headway.tasks.next_token import Config as NextToken

CPU = torch.device("cpu")
SMALL = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    ffn_size=80,
    vocab_size=32,
    max_seq_len=32,
    qkv_bias=True,
    tie_embeddings=False,
)


def config_of(form: PackedForm | None, kind: Any = "lora", **more: Any) -> AdapterConfig:
    return AdapterConfig(kind=kind, rank=3, alpha=5.0, base=form, **more)


def first_values(config: AdapterConfig) -> dict[str, torch.Tensor]:
    """Random weights and updates of SMALL, as an engine stores them."""
    base = (
        (spec.name, torch.randn(spec.shape, generator=torch.Generator().manual_seed(i)))
        for i, spec in enumerate(param_specs(SMALL))
    )
    layouts = config.layouts(SMALL)
    modules = config.modules(SMALL)
    values = dict(
        with_updates(packed_values(base, layouts, CPU), config, modules, 3, {}, layouts=layouts)
    )
    drawn = torch.Generator().manual_seed(9)
    return {
        name: value if "lora_B" not in name else torch.randn(value.shape, generator=drawn) * 0.1
        for name, value in values.items()
    }


def model_of(config: AdapterConfig, values: dict[str, torch.Tensor]) -> Transformer:
    model = Transformer(SMALL).eval()
    adapt(model, config, config.modules(SMALL))
    pack_linears(model, config.layouts(SMALL))
    model.load_state_dict(values)
    return model


def loss_of(model: Transformer) -> torch.Tensor:
    from headway.kernels.attention import causal_mask

    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))
    out = model.logits(model(tokens, torch.arange(9).expand(2, -1), causal_mask(2, 9)))
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).mean()


@pytest.mark.parametrize("form", ["nf4", "int8"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("targets", [("all",), ("q_proj", "down_proj")])
def test_outputs_and_gradients_are_those_over_the_dequantised_weights(
    form: PackedForm, kind: str, targets: tuple[str, ...]
) -> None:
    packed = config_of(form, kind, targets=targets)
    plain = config_of(None, kind, targets=targets)
    values = first_values(packed)
    ours = model_of(packed, values)
    dense = model_of(plain, dict(plain_values(values.items(), packed.layouts(SMALL))))
    assert sum(isinstance(module, PackedLinear) for module in ours.modules()) == (
        0 if targets == ("all",) else 10
    )
    losses = [loss_of(model) for model in (ours, dense)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)
    for loss in losses:
        loss.backward()
    expected = dict(dense.named_parameters())
    seen = 0
    for name, parameter in ours.named_parameters():
        if form_of(name) is None:
            assert (parameter.grad is None) == (expected[name].grad is None), name
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-6)
            seen += "lora_" in name
        else:
            assert parameter.grad is None
            assert parameter.dtype == torch.uint8
    assert seen == len(packed.shapes(SMALL))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_new_adapter_changes_nothing_and_merging_equals_not_merging(kind: str) -> None:
    config = config_of("nf4", kind)
    layouts = config.layouts(SMALL)
    modules = config.modules(SMALL)
    values = first_values(config)
    plain = dict(plain_values(values.items(), layouts))
    new = {
        name: torch.zeros_like(value) if "lora_B" in name else value
        for name, value in values.items()
    }
    bare = Transformer(SMALL).eval()
    bare.load_state_dict({name: value for name, value in plain.items() if "lora_" not in name})
    torch.testing.assert_close(loss_of(model_of(config, new)), loss_of(bare), rtol=1e-5, atol=1e-6)
    bare.load_state_dict(dict(merged(plain.items(), config, modules)))
    torch.testing.assert_close(
        loss_of(model_of(config, values)), loss_of(bare), rtol=1e-5, atol=1e-6
    )


def test_only_linears_of_layers_are_quantised_and_their_arithmetic_counts() -> None:
    config = config_of("nf4", targets=("q_proj", "lm_head"))
    specs = all_specs(SMALL, config)
    assert {
        EMBEDDING,
        HEAD,
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
    } <= specs.keys()
    assert sum(form_of(name) == "nf4" for name in specs) == 14
    plain = all_specs(SMALL, config_of(None, targets=("q_proj", "lm_head")))
    trains = [name for name in specs if "lora_" in name]
    assert token_flops(SMALL, 16, specs=specs, training=trains) == token_flops(
        SMALL, 16, specs=plain, training=trains
    )
    assert isinstance(model_of(config, first_values(config)).lm_head, AdaptedLinear)


@pytest.mark.parametrize("train", ["*.mlp.*", "*.up_proj.weight", "layers.1", "matrices"])
def test_quantised_weights_are_never_trained(train: str) -> None:
    specs = all_specs(SMALL, config_of("nf4", targets=("q_proj",)))
    with pytest.raises(
        ConfigError,
        match=r"which adapter\.base stores quantised, and quantised weights cannot train",
    ):
        trainable(specs, (), (train,))
    assert "model.norm.weight" in trainable(specs, (), ("norms",))


def test_a_tensor_axis_is_refused_by_name() -> None:
    with pytest.raises(
        ParallelError,
        match=r"parallel\.tensor is 2 and adapter\.base is nf4.*Use tensor 1 and strategy fsdp",
    ):
        ParallelConfig(tensor=2).check_rows(SMALL, 16, NextToken(), config_of("nf4"))


MODES: dict[str, dict[str, Any]] = {
    "recompute": {"memory": {"recompute": 1.0}},
    "selective": {"memory": {"recompute": "selective"}},
    "offload": {"memory": {"offload": ["activations", "optimizer"], "recompute": 0.5}},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_that_save_memory_change_no_number(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.parallel.offload_activations.MIN_BYTES", 1)
    adapter = AdapterConfig(kind="dora", rank=4, alpha=8.0, dropout=0.1, base="nf4")
    seen = []
    for more in ({}, MODES[mode]):
        engine = make_engine(
            RankGroup(),
            Setup(dtype=torch.bfloat16, freeze=(), adapter=adapter, config=CONFIG, **more),
        )
        seen.append(
            (train_steps(engine, RankGroup(), 4, 0, 2), {n: v.clone() for n, v in engine.weights()})
        )
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(seen[1][1][name], value) for name, value in seen[0][1].items())
    assert any(form_of(name) for name in seen[0][1])


def test_a_quantised_base_takes_its_bytes_and_no_more() -> None:
    adapter = AdapterConfig(rank=4, base="nf4")
    engine = make_engine(RankGroup(), Setup(dtype=torch.bfloat16, freeze=(), adapter=adapter))
    held = {name: value for name, value in engine.frozen.values.items() if form_of(name)}
    layouts = adapter.layouts(CONFIG)
    assert len(held) == len(layouts) == 14
    assert sum(value.nbytes for value in held.values()) == sum(
        layout.nbytes for layout in layouts.values()
    )
    assert {name for name, role, _, _ in engine.tensors() if role != "param"} == set(
        adapter.shapes(CONFIG)
    )
    assert not any(name.endswith("_proj.weight") for name in engine.shapes)


def test_a_recomputed_block_does_not_multiply_for_a_sum_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients are those of the stored forward, and down_proj multiplies once in forward and once for its input's gradient."""
    config = config_of("nf4")
    values = first_values(config)
    gradients = list[dict[str, torch.Tensor]]()
    counts = list[int]()
    for recomputes in (False, True):
        model = model_of(config, values)
        if recomputes:
            for block in model.blocks().values():
                recompute_whole(block, is_random=False)
        seen: list[Any] = []
        real = packed_weight.unpack
        monkeypatch.setattr(
            packed_weight, "unpack", lambda *a, real=real, seen=seen: seen.append(a) or real(*a)
        )
        loss_of(model).backward()
        monkeypatch.setattr(packed_weight, "unpack", real)
        counts.append(sum((layout.outputs, layout.inputs) == (32, 80) for _, layout, _ in seen))
        gradients.append(
            {
                name: parameter.grad
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        )
    assert counts == [4, 4], "two layers, forward and backward"
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(value, gradients[1][name]) for name, value in gradients[0].items())


def test_dora_multiplies_again_since_its_magnitude_needs_the_result() -> None:
    model = model_of(config_of("nf4", "dora"), first_values(config_of("nf4", "dora")))
    for block in model.blocks().values():
        recompute_whole(block, is_random=False)
    assert not any(module.once for module in model.modules() if isinstance(module, AdaptedLinear))


def test_a_part_of_a_stored_tensor_is_packed_as_the_same_numbers_alone() -> None:
    """Experts that a folder joins come as a part of a tensor, whose rows lie apart."""
    joined = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(0))
    part = joined[:, 24:]
    layout = PackedLayout("nf4", outputs=48, inputs=32, experts=2)
    packed = [
        dict(packed_values([("w", value)], {"w": layout}, CPU))
        for value in (part, part.contiguous())
    ]
    assert packed[0].keys() == packed[1].keys()
    assert all(torch.equal(packed[0][name], packed[1][name]) for name in packed[0])
