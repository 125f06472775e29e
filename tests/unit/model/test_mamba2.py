"""State-space layers in a model: documents in a row share no bit, pieces and single tokens continue a state, settings that do not fit are refused."""

import pytest
import torch
from support.family_shapes import FAMILY_SHAPES
from support.state_layers import assert_documents_are_apart, assert_packed_is_alone, core_inputs

from headway.errors import ParallelError
from headway.kernels.segments import Segments
from headway.model.config import ModelConfig
from headway.model.flops import state_flops, token_flops
from headway.model.layout import param_specs
from headway.model.mamba2 import Mamba2
from headway.model.state_mixer import MixerState
from headway.parallel.layouts import Layout, LayoutShape, check_sizes

BASE = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=96, max_seq_len=512,
)  # fmt: skip
CONFIG = BASE.with_(**FAMILY_SHAPES["granitemoehybrid"])
SPACE = FAMILY_SHAPES["granitemoehybrid"]["state_space"]
WHOLE_VECTORS = CONFIG.with_(state_space={**SPACE, "head_dim": 16, "state_size": 8})
"""A token has a multiple of 16 numbers everywhere. Otherwise tensors begin at other addresses in a packed
row than alone, and libraries round the numbers at their ends in another way."""
LENGTHS = [1, 2, 3, 64, 31]
MIXED = 4 * 6 + 2 * 2 * 5
"""Channels of the convolution."""


def layer(config: ModelConfig = CONFIG) -> Mamba2:
    torch.manual_seed(3)
    mixer = Mamba2(config)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mixer


def test_a_packed_row_of_a_state_space_layer_has_the_bits_of_its_documents_alone() -> None:
    assert_packed_is_alone(layer(WHOLE_VECTORS), LENGTHS)


@torch.no_grad()
def test_tokens_one_by_one_and_in_pieces_continue_the_state_space() -> None:
    mixer = layer()
    mixed, controls, z = core_inputs(mixer, 9)
    whole, _ = mixer.mix_segments(mixed, controls, z, Segments.of_lengths([9], mixed.device), None)
    state = MixerState(torch.zeros(1, 2, MIXED), torch.zeros(1, 4, 5, 6))
    piece = slice(0, 4)
    o, after = mixer.mix_segments(
        mixed[piece], controls[piece], z[piece], Segments.of_lengths([4], mixed.device), state
    )
    assert after is not None
    outputs = [o]
    for token in range(4, 9):
        here = slice(token, token + 1)
        o, after = mixer.mix_step(mixed[here], controls[here], z[here], after)
        outputs.append(o)
    assert torch.allclose(torch.cat(outputs), whole, atol=1e-6)


def test_no_state_space_reaches_into_another_document() -> None:
    assert_documents_are_apart(CONFIG)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers": [2]}, r"state_space has layers \[2\]; it must name layers from 0 to 1"),
        ({"taps": 1}, "greater than or equal to 2"),
        ({"groups": 3}, "heads is 4; it must be a multiple of groups=3"),
    ],
)
def test_sizes_that_no_state_space_has_are_refused(
    changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        CONFIG.with_(state_space={**SPACE, **changes})


@pytest.mark.parametrize(
    "key", ["attention_sinks", "head_gates", "linear_attention", "short_convolution"]
)
def test_a_state_space_beside_other_special_layers_is_refused(key: str) -> None:
    value: object = True if key == "attention_sinks" else {}
    with pytest.raises(ValueError, match=r"is given with .*Remove one of them"):
        CONFIG.with_(**{key: value})


@pytest.mark.parametrize(
    ("layout", "changes", "problem"),
    [
        (Layout(2, context=2), {}, "parallel.context is 2 and model.state_space is given"),
        (
            Layout(4, tensor=4),
            {"heads": 6},
            "parallel.tensor is 4; it must divide model.state_space.heads=6",
        ),
        (
            Layout(4, tensor=4),
            {},
            "parallel.tensor is 4; it must divide model.state_space.groups=2, unless there is one",
        ),
    ],
)
def test_layouts_that_cut_a_head_or_a_group_are_refused(
    layout: Layout, changes: dict[str, object], problem: str
) -> None:
    config = CONFIG.with_(num_kv_heads=4, state_space={**SPACE, **changes})
    with pytest.raises(ParallelError, match=problem):
        check_sizes(layout, LayoutShape(config, 64))


def test_flops_of_a_state_space_do_not_depend_on_the_row() -> None:
    # The state is written and read once for each token; the taps touch every channel.
    assert state_flops(CONFIG) == 2 * 2 * (4 * 5 * 6) + 2 * 3 * MIXED
    everywhere = CONFIG.with_(state_space={**SPACE, "layers": (0, 1)})
    short = token_flops(everywhere, 64)
    assert short == token_flops(everywhere, 512)
    assert short.attention == 3 * 2 * state_flops(everywhere)
    matrices = sum(
        spec.size for spec in param_specs(everywhere) if spec.is_matrix and spec.stage != "first"
    )
    assert short.matrices == 6 * (matrices + 96 * 32)
