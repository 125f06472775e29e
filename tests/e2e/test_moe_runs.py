"""Runs with mixtures of experts: upcycled from a dense model, resumed bit for bit after a kill, exported and read."""

import signal
from pathlib import Path

import pytest
import torch
from support.runs import (
    assert_same_run,
    deterministic,
    headway,
    make_stores,
    start_headway,
    wait_for_step,
    write_recipe,
)

from headway.checkpoint.stored_model import find_model
from headway.config.load import load
from headway.errors import ConfigError
from headway.infer.load import load_model
from headway.model.base import build_frozen_model
from headway.train import train
from headway.train.config import Recipe
from headway.train.resolve import resolve

BIASED = [
    "model.experts.num=4",
    "model.experts.bias_rate=0.01",
    "model.experts.shared_ffn_size=8",
    "model.experts.aux_scope=step",
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe, and the folder of a dense model trained with it."""
    folder = tmp_path_factory.mktemp("moe")
    recipe = write_recipe(folder, make_stores(folder), steps=3)
    train(load(Recipe, recipe, ["run.name=dense", "model.dropout=0"]))
    return recipe, _run(recipe, "dense")


def _run(recipe: Path, name: str) -> Path:
    return load(Recipe, recipe).run.dir / name


def test_an_upcycled_model_starts_with_the_logits_of_the_dense_one(
    dense: tuple[Path, Path],
) -> None:
    recipe, folder = dense
    upcycled = load(
        Recipe, recipe, [f"init.from={folder}", "init.upcycle.experts=4", "run.name=up"]
    )
    weights = resolve(upcycled).weights
    assert weights is not None
    assert weights.config.experts is not None
    assert weights.config.experts.num == 4
    mixture = build_frozen_model(
        weights.config, weights.weights(), torch.device("cpu"), torch.float32
    )
    plain = load_model(folder).model
    tokens = torch.arange(1, 25).view(2, 12)
    position = torch.arange(12).expand(2, 12)
    right = plain.logits(plain.hidden_states(tokens, position))
    torch.testing.assert_close(
        mixture.logits(mixture.hidden_states(tokens, position)), right, atol=1e-5, rtol=1e-5
    )
    train(upcycled)
    final = find_model(_run(recipe, "up") / "final")
    assert final.config.family == "mixtral"
    assert final.config.experts is not None
    assert final.config.experts.per_token == 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["init.upcycle.experts=4"], "without init.from"),
        (
            ["init.from=$", "init.upcycle.experts=4", "model.experts.num=6"],
            "init.upcycle makes it 4",
        ),
        (
            ["init.from=$", "init.upcycle.experts=4", "adapter.rank=2"],
            "init.upcycle is given with adapter",
        ),
        (["init.from=$", "model.experts.num=4"], "Use init.upcycle"),
    ],
)
def test_contradictory_settings_of_upcycling_are_refused(
    dense: tuple[Path, Path], settings: list[str], named: str
) -> None:
    recipe, folder = dense
    with pytest.raises(ConfigError, match=named):
        resolve(
            load(
                Recipe,
                recipe,
                ["run.name=bad", *(text.replace("$", str(folder)) for text in settings)],
            )
        )


@pytest.mark.slow
def test_a_killed_mixture_ends_bit_for_bit_like_the_undisturbed_one_with_its_bias(
    dense: tuple[Path, Path],
) -> None:
    recipe, _ = dense
    settings = [*BIASED, "steps=12", "checkpoint.every=3"]
    train(load(Recipe, recipe, [*settings, "run.name=undisturbed"]))
    whole = _run(recipe, "undisturbed")
    killed = _run(recipe, "killed")
    process = start_headway("train", str(recipe), *settings, "run.name=killed")
    wait_for_step(killed / "metrics.jsonl", 4, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert headway("train", str(recipe), *settings, "run.name=killed").returncode == 0
    assert_same_run(whole, killed, 12)
    bias = dict(find_model(killed).weights())["model.layers.0.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert bias.any()
    record = deterministic(killed / "metrics.jsonl")[-1]
    assert record["dropped_tokens"] == 0
    assert record["expert_load_max"] >= 1
    assert record["router_entropy"] > 0
    assert record["aux_loss"] > 0
    shares = [value for name, value in record.items() if name.startswith("expert_share/1.")]
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(1.0)


@pytest.mark.slow
def test_the_bias_of_balance_travels_through_published_folders(dense: tuple[Path, Path]) -> None:
    """Latent attention and grouped experts: trained, exported, read again; the bias stays unless a rate is given."""
    recipe, _ = dense
    shape = [
        "model={family: deepseek_v3, hidden_size: 32, num_layers: 2, num_heads: 2, ffn_size: 48, vocab_size: 64, max_seq_len: 128, "
        "latent_attention: {kv_rank: 8, nope_head_dim: 8, rope_head_dim: 4, value_head_dim: 8}, experts: {num: 4, ffn_size: 16, "
        "shared_ffn_size: 16, router: sigmoid, first_dense: 1, num_groups: 2, groups_per_token: 2, aux_loss: 0.0, bias_rate: 0.05}}",
    ]
    train(load(Recipe, recipe, ["run.name=mla", *shape]))
    final = _run(recipe, "mla") / "final"
    first = bias_of(final)
    assert first.abs().max() > 0
    again = ["steps=1", f"init.from={final}", "model={max_seq_len: 128}"]
    train(load(Recipe, recipe, ["run.name=fixed", *again]))
    assert torch.equal(bias_of(_run(recipe, "fixed") / "final"), first)
    train(load(Recipe, recipe, ["run.name=moved", *again, "model.experts.bias_rate=0.05"]))
    assert not torch.equal(bias_of(_run(recipe, "moved") / "final"), first)


def bias_of(folder: Path) -> torch.Tensor:
    """The bias as their file has it."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")[
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ]
