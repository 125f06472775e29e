"""Activations recomputed or moved to the host: the same gradients bit for bit, with less kept between forward and backward."""

from typing import Any

import pytest
import torch
from support.engines import CONFIG, Setup, make_engine, share_of_step, train_steps
from support.live_bytes import LiveBytes

from headway.kernels.attention import mask_of
from headway.model.config import ModelConfig
from headway.parallel import offload_activations as offload
from headway.parallel.collectives import RankGroup
from headway.parallel.config import MemoryConfig

FOUR = CONFIG.with_(num_layers=4)
MODES: dict[str, dict[str, Any]] = {
    "half": {"recompute": 0.5},
    "all": {"recompute": 1},
    "every-2": {"recompute": "every-2"},
    "selective": {"recompute": "selective"},
    "offload": {"offload": ["activations"]},
    "offload and recompute": {"offload": ["activations", "optimizer"], "recompute": 1.0},
    "offload and selective": {"offload": ["activations"], "recompute": "selective"},
}


@pytest.fixture(autouse=True)
def small_tensors_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 512)


def gradients(
    memory: dict[str, Any], dtype: torch.dtype, config: ModelConfig = FOUR
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses and norms of some steps, and the gradients of the last."""
    alone = RankGroup()
    engine = make_engine(alone, Setup(dtype=dtype, config=config, memory=memory))
    seen = train_steps(engine, alone, 2, 0, 3)
    return seen, {
        name: view.clone() for buffer in engine.buffers for name, view in buffer.gradients.items()
    }


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        *((mode, torch.float32) for mode in MODES),
        ("selective", torch.float16),
        ("offload and recompute", torch.bfloat16),
    ],
)
def test_gradients_are_the_same_bits_with_dropout(mode: str, dtype: torch.dtype) -> None:
    assert FOUR.dropout > 0
    plain = gradients({}, dtype)
    mine = gradients(MODES[mode], dtype)
    assert plain[0] == mine[0]
    assert all(torch.equal(plain[1][name], mine[1][name]) for name in plain[1])


def test_gradients_are_the_same_bits_with_norms_of_queries_biases_and_windows() -> None:
    config = FOUR.with_(
        family="qwen3",
        qk_norm=True,
        qkv_bias=True,
        ffn_bias=True,
        sliding_window=5,
        norm="layernorm",
    )
    plain = gradients({}, torch.float32, config)
    for mode in ("all", "selective", "offload"):
        mine = gradients(MODES[mode], torch.float32, config)
        assert plain[0] == mine[0], mode
        assert all(torch.equal(plain[1][name], mine[1][name]) for name in plain[1]), mode


def kept_bytes(memory: dict[str, Any]) -> tuple[int, Any]:
    """Bytes alive after forward that were made by it, less what waits in host memory; and the engine."""
    engine = make_engine(RankGroup(), Setup(config=FOUR, freeze=(), memory=memory))
    batch = share_of_step(0, 1, 0, 1).microbatches[0]
    mask = mask_of(batch)
    with LiveBytes() as live:
        hidden = engine.model(batch.tokens, batch.position, mask)
    assert hidden.requires_grad
    return live.now, engine


def test_less_is_kept_in_every_mode_and_least_with_all_blocks_recomputed() -> None:
    kept = {
        mode: kept_bytes(memory)[0]
        for mode, memory in {"none": {}, **MODES}.items()
        if "offload" not in mode
    }
    assert kept["all"] < kept["half"] == kept["every-2"] < kept["none"]
    assert kept["all"] < kept["selective"] < 0.8 * kept["none"]
    assert kept["all"] < 0.35 * kept["none"]


@pytest.mark.parametrize("mode", ["offload", "offload and recompute"])
def test_what_is_offloaded_is_not_kept_on_the_device(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloads: list[offload.ActivationOffload] = []
    make_offload = offload.ActivationOffload

    def noted_offload(device: torch.device) -> offload.ActivationOffload:
        offloads.append(make_offload(device, 512))
        return offloads[-1]

    monkeypatch.setattr(offload, "ActivationOffload", noted_offload)
    plain, _ = kept_bytes({**MODES[mode], "offload": []})
    with_host, _ = kept_bytes(MODES[mode])
    (away,) = offloads
    if mode == "offload":
        assert away.moved_bytes > 0.5 * plain
    else:
        # The inputs of four blocks: 16 rows of 16 tokens of width 32 in fp32.
        assert away.moved_bytes >= 4 * 16 * 16 * 32 * 4
    # On a CPU the host's copies count as alive too; two of the four blocks are still on their way out and hold both.
    assert plain - (with_host - away.moved_bytes) >= 0.4 * away.moved_bytes


def test_evaluation_recomputes_and_moves_nothing() -> None:
    plain = make_engine(RankGroup(), Setup(config=FOUR, memory={}))
    mine = make_engine(RankGroup(), Setup(config=FOUR, memory=MODES["offload and recompute"]))
    batch = share_of_step(0, 1, 0, 1).microbatches
    from headway.tasks.base import StepInfo

    step_info = StepInfo(0, 10, training=False)
    assert {k: float(v[0]) for k, v in plain.evaluate(batch, step_info).items()} == {
        k: float(v[0]) for k, v in mine.evaluate(batch, step_info).items()
    }


@pytest.mark.parametrize(
    ("recompute", "blocks"),
    [
        ("none", []),
        (0.0, []),
        (0.5, [0, 1]),
        (0.7, [0, 1]),
        (1, [0, 1, 2, 3]),
        ("every-2", [1, 3]),
        ("every-1", [0, 1, 2, 3]),
        ("every-9", []),
    ],
)
def test_a_share_or_a_period_decides_which_blocks_are_recomputed(
    recompute: float | str, blocks: list[int]
) -> None:
    assert MemoryConfig(recompute=recompute).recomputed_blocks(4) == blocks


@pytest.mark.parametrize("recompute", [-0.1, 1.5, "every-0", "every", "some"])
def test_what_cannot_be_recomputed_is_refused(recompute: float | str) -> None:
    with pytest.raises(ValueError, match="it must be none, selective, every-k"):
        MemoryConfig(recompute=recompute)


@pytest.mark.drill
@pytest.mark.parametrize("mode", ["all", "selective", "offload"])
def test_compiled_halves_give_the_gradients_of_plain_compiled_ones(mode: str) -> None:
    alone = RankGroup()
    config = CONFIG
    engines = []
    for memory in ({}, MODES[mode]):
        engine = make_engine(alone, Setup(config=config, memory=memory, compile_blocks=True))
        engines.append(train_steps(engine, alone, 2, 0, 2))
    for plain_engine, other in zip(*engines, strict=True):
        assert other == pytest.approx(plain_engine, rel=1e-5)
