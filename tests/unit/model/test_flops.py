"""The arithmetic a token needs: by hand, by published numbers, and by counting what the engine really multiplies."""

from dataclasses import replace
from typing import Any

import pytest
from support.batches import make_batch, make_step
from torch.utils.flop_counter import FlopCounterMode

from headway.model.adapter.config import AdapterConfig, all_specs
from headway.model.config import ModelConfig
from headway.model.flops import token_flops, visible_tokens
from headway.model.layout import ParamSpec, num_parameters, param_specs
from headway.optim.adamw import Config as AdamW
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.tasks.base import StepInfo
from headway.tasks.next_token import Config as NextToken

ROWS = 2
SEQ = 32
SMALL = ModelConfig(
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=96,
    max_seq_len=SEQ,
    tie_embeddings=False,
)
QUERIES = 32 * 32
KEYS = 16 * 32
FFN = 48 * 32
VOCAB = 96 * 32
BLOCK = 2 * QUERIES + 2 * KEYS + 3 * FFN
CORE = 4 * 32 * SEQ
"""Scores and their mix of values, forward, of one layer."""


def test_the_1b_shape_has_the_flops_both_ways_of_counting_give() -> None:
    flops = token_flops(ModelConfig(preset="llama-1b"), 8192)
    assert flops.full == pytest.approx(10.64e9, rel=1e-3)
    assert flops.causal == pytest.approx(9.03e9, rel=1e-3)


def test_where_everything_trains_every_weight_counts_six_and_the_head_once_whether_tied_or_not() -> (
    None
):
    norms = sum(spec.size for spec in param_specs(SMALL) if len(spec.shape) == 1)
    flops = token_flops(SMALL, SEQ)
    assert flops.matrices == 6 * (num_parameters(SMALL) - norms - VOCAB)
    assert flops.attention == 3 * 3 * CORE
    tied = token_flops(SMALL.with_(tie_embeddings=True), SEQ)
    assert tied == flops
    frozen = [spec.name for spec in param_specs(SMALL) if "embed" not in spec.name]
    # q, k and v of the first block are fed by the norm before them, which trains.
    assert token_flops(SMALL, SEQ, training=frozen) == flops


def test_layers_below_the_first_trained_one_count_their_forward_alone() -> None:
    last_layer = [spec.name for spec in param_specs(SMALL) if ".layers.2." in spec.name]
    flops = token_flops(SMALL, SEQ, training=last_layer)
    assert flops.matrices == 2 * 2 * BLOCK + 6 * BLOCK + 4 * VOCAB
    assert flops.attention == (1 + 1 + 3) * CORE


def test_a_trained_head_alone_counts_every_layer_forward() -> None:
    flops = token_flops(SMALL, SEQ, training=["lm_head.weight"])
    assert flops.matrices == 2 * 3 * BLOCK + 4 * VOCAB
    assert flops.attention == 3 * CORE


def test_one_trained_matrix_adds_its_own_gradient_and_those_of_the_layers_above() -> None:
    flops = token_flops(SMALL, SEQ, training=["model.layers.1.mlp.down_proj.weight"])
    assert flops.matrices == 2 * BLOCK + (2 * BLOCK + 2 * FFN) + 4 * BLOCK + 4 * VOCAB
    assert flops.attention == (1 + 1 + 3) * CORE


def test_a_loras_base_counts_four_and_its_own_matrices_six() -> None:
    rank = 4
    adapter = AdapterConfig(rank=rank, targets=("q_proj",))
    flops = token_flops(
        SMALL, SEQ, specs=all_specs(SMALL, adapter), training=list(adapter.shapes(SMALL))
    )
    # q, k, v and A of the first block: nothing before them trains
    unreached = QUERIES + 2 * KEYS + rank * 32
    assert (
        flops.matrices == 4 * (3 * BLOCK + VOCAB) + 6 * 3 * (rank * 32 + 32 * rank) - 2 * unreached
    )
    assert flops.attention == 3 * 3 * CORE


@pytest.mark.parametrize(
    "part", ["q_proj", "o_proj", "post_attention_layernorm", "gate_proj", "down_proj"]
)
def test_where_backward_ends_is_said_by_specs_not_by_names(part: str) -> None:
    trained = [
        spec.name for spec in param_specs(SMALL) if spec.stage == 1 and part in spec.name.split(".")
    ]
    assert len(trained) == 1
    renamed: dict[str, ParamSpec] = {}
    other_name: dict[str, str] = {}
    for number, spec in enumerate(param_specs(SMALL)):
        other_name[spec.name] = spec.name
        if isinstance(spec.stage, int):
            other_name[spec.name] = f"weights.{number}"
        renamed[other_name[spec.name]] = replace(spec, name=other_name[spec.name])
    flops = token_flops(SMALL, SEQ, specs=renamed, training=[other_name[trained[0]]])
    assert flops == token_flops(SMALL, SEQ, training=trained)
    assert flops != token_flops(SMALL, SEQ, training=["model.layers.1.input_layernorm.weight"])


def test_gates_over_frozen_weights_train_none_of_them() -> None:
    gated = SMALL.with_(head_gates={})
    flops = token_flops(gated, SEQ, training=["head_gates.log_alpha"])
    assert flops.matrices == 4 * (3 * BLOCK + VOCAB) - 2 * (QUERIES + 2 * KEYS)


ONE_KEY = 4 * 32
"""One key of one token in one layer, forward: 2 FLOPs for each of 32 channels of a query, and as many of a value."""


def test_windowed_layers_count_the_keys_in_their_window() -> None:
    flops = token_flops(SMALL.with_(sliding_window=8), SEQ)
    assert flops.attention == 3 * 3 * ONE_KEY * 8
    # the first 8 of 32 tokens see 4 keys on the average, the other 24 see 8: 7 in all
    assert flops.causal_attention == 3 * 3 * ONE_KEY * 7
    assert flops.matrices == token_flops(SMALL, SEQ).matrices


def test_layers_without_a_window_count_all_keys_beside_windowed_ones() -> None:
    flops = token_flops(SMALL.with_(sliding_window=8, window_layers=(0, 2)), SEQ)
    assert flops.attention == 3 * ONE_KEY * (8 + 32 + 8)
    assert flops.causal_attention == 3 * ONE_KEY * (7 + 16 + 7)
    assert flops.full == flops.matrices + flops.attention
    assert flops.causal == flops.matrices + flops.causal_attention


def test_a_window_as_long_as_the_row_changes_nothing() -> None:
    windowed = SMALL.with_(sliding_window=SEQ)
    assert token_flops(windowed, SEQ) == token_flops(SMALL, SEQ)
    assert token_flops(windowed, 2 * SEQ).causal_attention == 3 * 3 * ONE_KEY * 24


def test_frozen_layers_with_windows_pass_forward_alone() -> None:
    mixed = SMALL.with_(sliding_window=8, window_layers=(0, 2))
    last = [spec.name for spec in param_specs(SMALL) if ".layers.2." in spec.name]
    flops = token_flops(mixed, SEQ, training=last)
    assert flops.causal_attention == ONE_KEY * (7 + 16 + 3 * 7)
    assert flops.attention == ONE_KEY * (8 + 32 + 3 * 8)


@pytest.mark.parametrize(
    ("length", "window"), [(32, 8), (32, 31), (32, 1), (7, 3), (5, 9), (6, None)]
)
def test_visible_tokens_are_those_a_loop_counts(length: int, window: int | None) -> None:
    width = length if window is None else window
    # a token's own key counts at half, as the half of a square does
    seen = sum(min(position, width) + min(position + 1, width) for position in range(length)) / 2
    assert visible_tokens(length, window) == (
        min(width, length),
        pytest.approx(seen / length, rel=1e-12),
    )


def test_streaming_heads_count_their_window_and_sinks() -> None:
    flops = token_flops(SMALL.with_(head_gates={"window": 6, "sinks": 2}), SEQ)
    assert (flops.attention, flops.causal_attention) == (9 * ONE_KEY * 32, 9 * ONE_KEY * 16)
    assert flops.with_heads(1.0, 0.0) == token_flops(SMALL, SEQ)
    streamed = flops.with_heads(0.0, 1.0)
    assert (streamed.attention, streamed.causal_attention) == (9 * ONE_KEY * 8, 9 * ONE_KEY * 7)
    # a quarter of the heads is undecided and does both
    both = flops.with_heads(0.75, 0.5)
    assert both.attention == 9 * ONE_KEY * (0.75 * 32 + 0.5 * 8)
    assert both.causal_attention == 9 * ONE_KEY * (0.75 * 16 + 0.5 * 7)
    assert both.causal == both.matrices + both.causal_attention


def test_gemma3_at_32k_counts_four_full_layers_and_22_windows() -> None:
    flops = token_flops(ModelConfig(preset="gemma3-1b"), 32768)
    each = 12 * 4 * 256  # forward and backward, heads, head width
    assert flops.attention == each * (4 * 32768 + 22 * 512)
    assert flops.causal_attention == each * (4 * 16384 + 22 * (512 - 512 * 512 / 65536))
    # 11.2e9 if every layer saw its whole row
    assert flops.causal == pytest.approx(6.94e9, rel=0.01)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"train": ("layers.1",)},
        {"train": ("layers.2", "model.norm.weight")},
        {"freeze": ("embeddings",)},
        {"train": ("*.mlp.down_proj.weight",)},
        {"adapter": AdapterConfig(rank=4)},
        {"adapter": AdapterConfig(rank=4, targets=("o_proj",)), "train": ("norms",)},
    ],
    ids=lambda how: " ".join(how) or "all",
)
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_what_the_engine_multiplies(how: dict[str, Any], tied: bool) -> None:
    config = SMALL.with_(tie_embeddings=tied)
    engine = assemble(
        EngineSpec(config, NextToken(), AdamW(), chunk_tokens=1 << 16, attention="reference", **how)
    )
    step = make_step(make_batch([[SEQ]] * ROWS, seq_len=SEQ, vocab=96), 1)
    with FlopCounterMode(display=False) as counter:
        engine.forward_backward(step, StepInfo(0, 1))
    training = [name for group in engine.groups for name in group.names]
    flops = token_flops(config, SEQ, specs=engine.specs, training=training)
    # The gradient of the head's weight is added to its place, which torch does not count.
    unseen = 2 * VOCAB * (("model.embed_tokens.weight" if tied else "lm_head.weight") in training)
    assert counter.get_total_flops() == (flops.full - unseen) * ROWS * SEQ
