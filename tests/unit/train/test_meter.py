"""Formulas against published numbers, and names of sources."""

import pytest

from headway.model.config import ModelConfig
from headway.train.meter import internlm_flops_per_token, short_names


def test_internlm_7b_has_its_published_flops_per_token() -> None:
    shape = ModelConfig(
        hidden_size=4096, num_layers=32, num_heads=32, ffn_size=int(4096 * 8 / 3), vocab_size=103168, max_seq_len=2048, tie_embeddings=False
    )
    exact = shape.with_(ffn_size=10923)
    assert internlm_flops_per_token(exact, 2048) == pytest.approx(44_411_387_904, rel=1e-4)


def test_sources_are_called_by_their_last_name_unless_two_share_it() -> None:
    assert short_names(("a/code", "b/web/")) == ("code", "web")
    assert short_names(("a/x", "b/x", "c")) == ("a/x", "b/x", "c")
