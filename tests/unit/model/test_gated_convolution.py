"""Layers of short convolutions in a model: documents in a row share no bit, settings that do not fit are refused."""

import pytest
import torch
from support.family_shapes import FAMILY_SHAPES
from support.state_layers import assert_documents_are_apart, assert_packed_is_alone, core_inputs

from headway.errors import ParallelError
from headway.kernels.segments import Segments
from headway.model.config import ModelConfig
from headway.model.flops import state_flops, token_flops
from headway.model.gated_convolution import GatedConvolution
from headway.model.layout import param_specs
from headway.model.state_mixer import MixerState
from headway.parallel.layouts import Layout, LayoutShape, check_sizes

BASE = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=96, max_seq_len=512,
)  # fmt: skip
CONFIG = BASE.with_(**FAMILY_SHAPES["lfm2"])
LENGTHS = [1, 2, 3, 4, 5, 31]


def layer() -> GatedConvolution:
    torch.manual_seed(3)
    made = GatedConvolution(CONFIG)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def test_the_core_is_the_equation_of_its_head() -> None:
    made = layer()
    b, c, x = core_inputs(made, 7)
    segments = Segments.of_lengths([7], b.device)
    result, _ = made.mix_segments(b, c, x, segments, None)
    taps = made.conv.weight[:, 0]
    assert made.conv.bias is not None
    for token in range(7):
        y = made.conv.bias.clone()
        for back in range(min(4, token + 1)):
            y = y + taps[:, 3 - back] * (b * x)[token - back]
        assert torch.allclose(result[token], c[token] * y, atol=1e-6)


def test_a_packed_row_of_a_convolution_has_the_bits_of_its_documents_alone() -> None:
    """Gates and convolution: what a layer does across tokens. Matrix products before and after it may round by the number of rows."""
    assert_packed_is_alone(layer(), LENGTHS)


@torch.no_grad()
def test_tokens_one_by_one_and_in_pieces_have_the_bits_of_the_whole() -> None:
    made = layer()
    b, c, x = core_inputs(made, 9)
    whole, _ = made.mix_segments(b, c, x, Segments.of_lengths([9], b.device), None)
    state = MixerState(torch.zeros(1, 3, 32), torch.zeros(1, 0, 0, 0))
    piece = slice(0, 2)
    some, after = made.mix_segments(
        b[piece], c[piece], x[piece], Segments.of_lengths([2], b.device), state
    )
    assert after is not None
    outputs = [some]
    for token in range(2, 9):
        here = slice(token, token + 1)
        one, after = made.mix_step(b[here], c[here], x[here], after)
        outputs.append(one)
    assert torch.equal(torch.cat(outputs), whole)


def test_no_convolution_reaches_into_another_document() -> None:
    assert_documents_are_apart(CONFIG)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers": [0, 0]}, r"layers is \[0, 0\]; it must list different layers"),
        ({"layers": [2]}, r"short_convolution has layers \[2\]; it must name layers from 0 to 1"),
        ({"taps": 1}, "greater than or equal to 2"),
    ],
)
def test_sizes_that_no_convolution_has_are_refused(
    changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        CONFIG.with_(short_convolution={**FAMILY_SHAPES["lfm2"]["short_convolution"], **changes})


@pytest.mark.parametrize("key", ["attention_sinks", "head_gates", "linear_attention"])
def test_settings_of_other_layers_are_refused(key: str) -> None:
    value: object = True if key == "attention_sinks" else {}
    with pytest.raises(ValueError, match=r"is given with .*Remove one of them"):
        CONFIG.with_(**{key: value})


@pytest.mark.parametrize(
    ("layout", "channels", "problem"),
    [
        (
            Layout(2, context=2),
            None,
            "parallel.context is 2 and model.short_convolution is given",
        ),
        (
            Layout(4, tensor=4),
            30,
            "parallel.tensor is 4; it must divide model.short_convolution.channels=30",
        ),
    ],
)
def test_layouts_that_cut_a_convolution_are_refused(
    layout: Layout, channels: int | None, problem: str
) -> None:
    config = CONFIG.with_(short_convolution={"layers": (0,), "channels": channels})
    with pytest.raises(ParallelError, match=problem):
        check_sizes(layout, LayoutShape(config, 64))


def test_flops_of_a_layer_are_those_of_its_taps_whatever_the_row() -> None:
    assert state_flops(CONFIG) == 2 * 4 * 32
    all_short = CONFIG.with_(short_convolution={"taps": 4, "layers": (0, 1)})
    short = token_flops(all_short, 64)
    assert short == token_flops(all_short, 512)
    assert short.attention == 3 * 2 * state_flops(all_short)
    matrices = sum(
        spec.size for spec in param_specs(all_short) if spec.is_matrix and spec.stage != "first"
    )
    assert short.matrices == 6 * (matrices + 96 * 32)
