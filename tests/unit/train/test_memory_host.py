"""An offload that the machine's memory cannot take is refused before anything is allocated."""

import pytest

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.parallel.config import MemoryConfig
from headway.plan.memory import GIB, MemoryJob, estimate
from headway.train.memory import check_host_memory

MODEL = ModelConfig(
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    ffn_size=2048,
    vocab_size=8192,
    max_seq_len=2048,
)


def job(*offload: str) -> MemoryJob:
    memory = MemoryConfig.model_validate({"offload": offload})
    return MemoryJob(MODEL, 10**9, 0, 1, 2048, 1, 2, memory=memory, compiled=True, on_cuda=True)


def test_optimizer_state_that_does_not_fit_the_host_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.train.memory.ram_bytes", lambda: (64 * GIB, 16 * GIB))
    needed = estimate(job("optimizer")).host
    assert needed == 3 * 2**32, (
        "masters and two moments of 4 * 10**9 bytes each, page-locked in powers of two"
    )
    check_host_memory(job("optimizer"), 1)
    with pytest.raises(
        ConfigError,
        match=r"memory.offload is \[optimizer\]; the 2 ranks on this machine need 24.0 GiB .* 16.0 GiB is free",
    ):
        check_host_memory(job("optimizer"), 2)
    check_host_memory(job(), 64)


def test_a_machine_that_does_not_say_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.train.memory.ram_bytes", lambda: (None, None))
    check_host_memory(job("optimizer"), 8)
