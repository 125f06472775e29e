"""Formulas against published numbers, and names of sources."""

from headway.model.config import ModelConfig
from headway.model.flops import internlm_flops, token_flops
from headway.train.meter import short_names

INTERNLM_7B = ModelConfig(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    ffn_size=11008,
    vocab_size=103168,
    max_seq_len=2048,
    tie_embeddings=False,
)
"""The shape of the published weights: 8/3 of 4096, rounded up to a multiple of 256."""


def test_the_real_internlm_7b_has_the_flops_per_token_of_internlms_own_log() -> None:
    # 4274.45 tokens a second are 189.834 TFLOPS
    assert internlm_flops(INTERNLM_7B, 2048) == 44_411_387_904


def test_the_real_internlm_7b_by_hand_count_needs_half_a_percent_more() -> None:
    block = 4 * 4096 * 4096 + 3 * 4096 * 11008
    matrices = 6 * (32 * block + 4096 * 103168)
    attention = 12 * 32 * 4096 * 2048
    flops = token_flops(INTERNLM_7B, 2048)
    assert (
        (flops.full, flops.causal)
        == (matrices + attention, matrices + attention // 2)
        == (44_612_714_496, 43_002_101_760)
    )


def test_another_width_counts_as_it_is() -> None:
    wide = INTERNLM_7B.with_(ffn_size=14336)  # InternLM2-7B: mlp_ratio 3.5
    assert (
        internlm_flops(wide, 2048)
        == 3 * ((8 + 4 * 1.5 * 3.5) * 4096**2 + 4 * 2048 * 4096) * 32 + 6 * 4096 * 103168
    )


def test_sources_are_called_by_their_last_name_unless_two_share_it() -> None:
    assert short_names(("a/code", "b/web/")) == ("code", "web")
    assert short_names(("a/x", "b/x", "c")) == ("a/x", "b/x", "c")
