"""On a CUDA device: each memory setting gives the gradients of the plain path and less memory, measured by the allocator."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import make_batch, make_step

from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.optim.adamw import Config as AdamW
from headway.optim.groups import hypers
from headway.parallel.assemble import assemble
from headway.parallel.config import MemoryConfig
from headway.parallel.engine import EngineSpec
from headway.parallel.flat.engine import FlatEngine
from headway.plan.memory import MemoryJob, estimate
from headway.tasks.base import StepInfo
from headway.tasks.next_token import Config as NextToken

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = ModelConfig(
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    ffn_size=2048,
    vocab_size=8192,
    max_seq_len=2048,
)
LR = 1e-4
"""Small: with large steps two runs that differ in the last bit of a gradient are soon far apart."""
ROWS = [[2048], [2048], [2048], [2048]]
MODES: dict[str, dict[str, Any]] = {
    "half": {"recompute": 0.5},
    "all": {"recompute": 1.0},
    "selective": {"recompute": "selective"},
    "activations": {"offload": ("activations",)},
    "all and activations": {"recompute": 1.0, "offload": ("activations",)},
    "optimizer": {"offload": ("optimizer",)},
}


def engine_with(
    memory: dict[str, Any], *, compiled: bool = False, dropout: float = 0.0, state: str = "fp32"
) -> FlatEngine:
    config = CONFIG.with_(dropout=dropout)
    optim = AdamW(lr=LR, state_dtype=state)  # pyright: ignore[reportArgumentType]
    spec = EngineSpec(
        config,
        NextToken(),
        optim,
        torch.device("cuda"),
        torch.bfloat16,
        seed=3,
        compile_blocks=compiled,
    )
    engine = assemble(replace(spec, memory=MemoryConfig(**memory)))
    assert isinstance(engine, FlatEngine)
    engine.fill((name, initial_value(spec, config, 1)) for name, spec in engine.specs.items())
    return engine


def steps(engine: FlatEngine, count: int = 3) -> tuple[list[tuple[float, float]], int]:
    """(loss, norm) of each step, and the peak of the allocator over the later ones above what was there at the start."""
    optim, seen = AdamW(lr=LR), []
    before = 0
    for index in range(count):
        if index == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        result = engine.forward_backward(
            make_step(make_batch(ROWS, seq_len=2048, vocab=8192, seed=index), 1),
            StepInfo(index, 10),
        )
        update = engine.update(hypers(optim, engine.groups, index, 10))
        seen.append((result.loss.item(), update.norm.item()))
    torch.cuda.synchronize()
    return seen, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "optimizer"])
def test_a_mode_trains_as_the_plain_path_with_a_lower_peak(mode: str, compiled: bool) -> None:
    plain, high = steps(engine_with({}, compiled=compiled))
    mine, low = steps(engine_with(MODES[mode], compiled=compiled))
    for one, other in zip(plain, mine, strict=True):
        assert other == pytest.approx(one, rel=1e-2)
    assert low < 0.93 * high, f"{low / 2**20:.0f} MiB against {high / 2**20:.0f} MiB"


def test_dropout_is_drawn_again_alike_when_blocks_are_recomputed() -> None:
    plain, _ = steps(engine_with({}, dropout=0.2))
    for mode in ("all", "selective", "all and activations"):
        mine, _ = steps(engine_with(MODES[mode], dropout=0.2))
        for one, other in zip(plain, mine, strict=True):
            assert other == pytest.approx(one, rel=1e-2), mode


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_state_in_host_memory_trains_to_the_same_bits(state: str) -> None:
    here, there = engine_with({}, state=state), engine_with(MODES["optimizer"], state=state)
    assert there.host_state is not None
    next(iter(there.host_state.values())).chunk = 1 << 16
    assert all(not buffer.master.is_cuda and buffer.master.is_pinned() for buffer in there.buffers)
    torch.use_deterministic_algorithms(True)
    try:
        assert steps(here)[0] == steps(there)[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(here.masters[name], value) for name, value in there.masters.items())


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_narrow_state_follows_fp32_state_and_is_one_compiled_kernel_without_a_wait(
    state: str,
) -> None:
    wide, _ = steps(engine_with({}), 6)
    engine = engine_with({}, state=state)
    narrow, _ = steps(engine, 6)
    for one, other in zip(wide, narrow, strict=True):
        assert other[0] == pytest.approx(one[0], rel=1e-2)
    step = make_step(make_batch(ROWS, seq_len=2048, vocab=8192), 1)
    engine.forward_backward(step, StepInfo(0, 10))
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.update(hypers(AdamW(lr=LR), engine.groups, 0, 10))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients_have_no_memory_between_steps() -> None:
    engine = engine_with({})
    for count in (0, 1):
        steps(engine, count)
        assert all(
            bucket.flat.untyped_storage().nbytes() == 0 for bucket in engine.reducer.buckets
        ), count


@pytest.mark.parametrize("mode", ["none", "selective", "all"])
def test_the_estimate_is_near_the_measured_peak(mode: str) -> None:
    memory = MODES.get(mode, {})
    base = torch.cuda.memory_allocated()
    engine = engine_with(memory, compiled=True)
    steps(engine, 2)
    torch.cuda.reset_peak_memory_stats()
    steps(engine, 2)
    measured = torch.cuda.max_memory_allocated() - base
    trained = sum(slot.size for buffer in engine.buffers for slot in buffer.slots)
    job = MemoryJob(
        CONFIG,
        trained,
        0,
        4,
        2048,
        1,
        2,
        memory=MemoryConfig(**memory),
        compiled=True,
        on_cuda=True,
        chunk_tokens=2048,
    )
    assert estimate(job).total == pytest.approx(measured, rel=0.15)


SMALL = [
    "model.hidden_size=256",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.ffn_size=1024",
    "model.vocab_size=1024",
    "steps=2",
]


def train(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "headway",
        "train",
        *SMALL,
        f"run.dir={folder}",
        "device=cuda",
        "checkpoint.at_end=false",
        *settings,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_running_out_of_memory_on_the_gpu_ends_in_one_message(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        "model.max_seq_len=8192",
        "data.seq_len=8192",
        "batch.rows=64",
        "batch.micro_rows=64",
        "memory.limit_gib=2",
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 1 and len(errors) == 1, done.stderr
    assert (
        "out of memory on cuda" in errors[0]
        and "activations" in errors[0]
        and "would free" in errors[0]
    )
    assert "Traceback" not in done.stderr


def test_auto_finds_a_microbatch_that_fits_the_limit_where_the_whole_batch_does_not(
    tmp_path: Path,
) -> None:
    shape = ["model.max_seq_len=8192", "data.seq_len=8192", "batch.rows=64", "memory.limit_gib=4"]
    done = train(tmp_path, *shape, "batch.micro_rows=auto")
    assert done.returncode == 0, done.stderr
    said = next(line for line in done.stderr.splitlines() if "batch.micro_rows=auto" in line)
    chosen = int(said.split("auto: ")[1].split()[0])
    assert 1 <= chosen < 64
    assert train(tmp_path, *shape, "run.name=whole", "batch.micro_rows=64").returncode == 1
