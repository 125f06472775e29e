"""Speeds of reports are those of warm runs over the cache that generation uses."""

import pytest
import torch
from support.byte_model import CONFIG, write_model

from headway.infer import speed
from headway.infer.engine.device import EngineDevice
from headway.infer.load import LoadedModel, load_model
from headway.infer.speed import TIMED_RUNS, measure_speed


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_model(tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=160)))


def test_medians_of_warm_runs_count(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """(read, written) of a first run that waits for the compiler, and of three; one is disturbed."""
    times = [(100.0, 100.0), (2.0, 4.0), (50.0, 60.0), (2.5, 5.0)]
    assert len(times) == 1 + TIMED_RUNS
    clock = [0.0]
    for read, written in times:
        clock += [clock[-1] + read, clock[-1] + read + written, clock[-1] + read + written]
    monkeypatch.setattr(speed, "_now", lambda device: clock.pop(0))
    measured = measure_speed(loaded, 80, rows=3, steps=8, chunk_tokens=16)
    assert measured.prefill_tokens_per_second == 3 * 72 / 2.5
    assert measured.decode_tokens_per_second == 3 * 8 / 5.0


def test_every_run_reads_all_prompts_and_decodes_all_rows(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    decoded: list[tuple[list[int], int]] = []
    prefill = EngineDevice.prefill
    decode = EngineDevice.decode

    def seen_prefill(device, pieces, tokens, *more) -> torch.Tensor:
        read.append(sum(map(len, tokens)))
        return prefill(device, pieces, tokens, *more)

    def seen_decode(device, slots, most) -> torch.Tensor:
        assert int(device.cache.lengths[list(slots)].max()) + 1 == most
        decoded.append((sorted(slots), most))
        return decode(device, slots, most)

    monkeypatch.setattr(EngineDevice, "prefill", seen_prefill)
    monkeypatch.setattr(EngineDevice, "decode", seen_decode)
    measure_speed(loaded, 160, rows=2, steps=4, chunk_tokens=50)
    assert max(read) == 50
    assert sum(read) == (1 + TIMED_RUNS) * 2 * 156
    assert decoded == (1 + TIMED_RUNS) * [([0, 1], most) for most in range(157, 161)]
