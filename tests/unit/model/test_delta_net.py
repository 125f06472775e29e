"""Layers of linear attention in a model: documents in a row share no bit, settings that do not fit are refused."""

from dataclasses import replace

import pytest
import torch
from support.batches import make_batch
from support.family_shapes import FAMILY_SHAPES
from support.initial_weights import initialize
from support.state_layers import assert_packed_is_alone

from headway.errors import ParallelError
from headway.kernels.attention import causal_mask
from headway.kernels.delta_rule import CHUNK
from headway.kernels.segments import Segments
from headway.model.config import ModelConfig
from headway.model.delta_net import GatedDeltaNet
from headway.model.flops import state_flops, token_flops
from headway.model.layout import param_specs
from headway.model.transformer import Transformer
from headway.parallel.layouts import Layout, LayoutShape, check_sizes

BASE = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=96, max_seq_len=512,
)  # fmt: skip
CONFIG = BASE.with_(**FAMILY_SHAPES["qwen3_5"])
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1]


def mixer() -> GatedDeltaNet:
    """Its widths are multiples of 32, as in every real model: torch computes the last elements of other tensors by other instructions."""
    torch.manual_seed(3)
    wide = {"key_heads": 2, "value_heads": 4, "key_head_dim": 16, "value_head_dim": 8}
    layer = GatedDeltaNet(CONFIG.with_(linear_attention={**wide, "layers": (0,)}))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def test_a_packed_row_of_a_layer_has_the_bits_of_its_documents_alone() -> None:
    """Convolution, rule and norm: what a layer does across tokens. Matrix products before and after it may round by the number of rows."""
    assert_packed_is_alone(mixer(), LENGTHS)


def test_what_one_document_holds_changes_no_bit_of_the_others() -> None:
    model = Transformer(CONFIG)
    initialize(model, 5)
    lengths = [3, 1, CHUNK + 1, 2, 5]
    batch = make_batch([lengths], seq_len=sum(lengths) + 4, vocab=96)
    changed = batch.tokens.clone()
    changed[0, 4 : 4 + CHUNK + 1] = (changed[0, 4 : 4 + CHUNK + 1] + 1) % 96

    outputs: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for tokens in (batch.tokens, changed):
        embedded: list[torch.Tensor] = []

        def keep(
            module: object, inputs: object, x: torch.Tensor, kept: list[torch.Tensor] = embedded
        ) -> None:
            x.retain_grad()
            kept.append(x)

        hook = model.model.embed_tokens.register_forward_hook(keep)
        hidden = model.forward_batch(replace(batch, tokens=tokens)).hidden
        hook.remove()
        # The others alone have a loss.
        others = torch.cat((hidden[:, :4], hidden[:, 5 + CHUNK : 12 + CHUNK]), 1)
        others.square().sum().backward()
        outputs.append(others.detach())
        gradient = embedded[0].grad
        assert gradient is not None
        gradients.append(gradient)

    assert torch.equal(*outputs)
    assert torch.equal(*gradients)
    assert (gradients[0][:, 4 : 5 + CHUNK] == 0).all(), "no gradient crosses a bound"


def test_a_masks_documents_are_cut_once_for_all_layers() -> None:
    mask = causal_mask(2, 9)
    assert Segments.of_mask(mask) is Segments.of_mask(mask)
    assert Segments.of_mask(mask).lengths == (9, 9)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"value_heads": 3}, "value_heads is 3; it must be a multiple of key_heads=2"),
        ({"layers": [0, 0]}, r"layers is \[0, 0\]; it must list different layers"),
        ({"layers": [2]}, r"linear_attention has layers \[2\]; it must name layers from 0 to 1"),
        ({"layers": []}, r"linear_attention has layers \[\]; it must name layers from 0 to 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, object], problem: str) -> None:
    linear = {**FAMILY_SHAPES["qwen3_5"]["linear_attention"], **changes}
    with pytest.raises(ValueError, match=problem):
        CONFIG.with_(linear_attention=linear)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_sinks": True}, "linear_attention is given with attention_sinks"),
        ({"parallel_block": True}, "attention_gate is given with parallel_block"),
        ({"head_gates": {}}, "linear_attention is given with head_gates"),
    ],
)
def test_settings_of_other_attention_are_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        CONFIG.with_(**changes)


def test_every_fourth_layer_has_softmax_attention_where_no_list_says_it() -> None:
    config = BASE.with_(num_layers=9, linear_attention={"key_heads": 2, "value_heads": 2})
    linear = [config.has_state(layer) for layer in range(9)]
    assert linear == [True, True, True, False, True, True, True, False, True]


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (Layout(2, context=2), "parallel.context is 2 and model.linear_attention is given"),
        (
            Layout(4, tensor=4),
            "parallel.tensor is 4; it must divide model.linear_attention.key_heads=2",
        ),
    ],
)
def test_layouts_that_cut_a_state_are_refused(layout: Layout, problem: str) -> None:
    with pytest.raises(ParallelError, match=problem):
        check_sizes(layout, LayoutShape(CONFIG, 64))


def test_flops_of_a_layer_do_not_grow_with_the_row() -> None:
    linear = CONFIG.linear_attention
    assert linear is not None
    # The state of 4 heads of 5 x 6 is read twice and changed once; 3 taps over 2 * 10 + 24 channels.
    assert state_flops(CONFIG) == 6 * 4 * 5 * 6 + 2 * 3 * 44
    all_linear = CONFIG.with_(linear_attention={**linear.model_dump(), "layers": (0, 1)})
    short = token_flops(all_linear, 64)
    long = token_flops(all_linear, 512)
    assert short == long
    assert short.attention == 3 * 2 * state_flops(CONFIG)
    matrices = sum(
        spec.size for spec in param_specs(all_linear) if spec.is_matrix and spec.stage != "first"
    )
    assert short.matrices == 6 * (matrices + 96 * 32)
