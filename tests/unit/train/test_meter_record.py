"""A record of three steps whose every number was counted by hand; the clock is the test's own."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.data.batch import StepBatch, StepStats
from headway.model.config import ModelConfig
from headway.model.flops import PictureFlops, TokenFlops
from headway.parallel.engine import DeviceTimestamp, StepResult, Update
from headway.train.meter import Meter, MeterSetup

SETUP = MeterSetup(
    model=ModelConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=160,
        vocab_size=1000,
        max_seq_len=100,
    ),
    flops=TokenFlops(
        matrices=6e9, attention=2e9, causal_attention=1e9, streaming=0.4e9, causal_streaming=0.3e9
    ),
    seq_len=100,
    micro_rows=2,
    device=torch.device("cpu"),
    device_name="NVIDIA A100-SXM4-80GB",  # 312e12 a second in bf16
    dtype="bf16",
    total_steps=10,
    source_names=("a/web", "b/code"),
    ranks_per_row=2,
)


def step_of(tokens: int, epoch: int = 0) -> StepBatch:
    """Three microbatches; only their number counts here."""
    stats = StepStats(
        tokens, documents=7, largest_length=90, largest_batch=4, smallest_batch=1, epoch=epoch
    )
    return StepBatch(tuple([None] * 3), {"targets": 1.0}, stats)  # pyright: ignore[reportArgumentType]


def result_of(loss: float, skipped: float = 0.0, verdict: int = 0) -> tuple[StepResult, Update]:
    metrics = {
        "nll": (torch.tensor(30.0), torch.tensor(12.0)),
        "nll/source": (torch.tensor([18.0, 12.0]), torch.tensor([9.0, 3.0])),
    }
    update = Update(torch.tensor(0.5), torch.tensor(skipped), torch.tensor(4.0))
    return StepResult(torch.tensor(loss), metrics, torch.tensor(verdict)), update


def add(
    meter: Meter,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    times: tuple[float, float, float],
    tokens: int,
    **more: Any,
) -> Any:
    begin, between, end = times
    monkeypatch.setattr(meter, "mark", lambda: DeviceTimestamp(None, end))
    result, update = result_of(2.5, **more)
    meter.add(
        step,
        step_of(tokens),
        {"lr": 0.1},
        result,
        update,
        (DeviceTimestamp(None, begin), DeviceTimestamp(None, between), 0.25),
    )
    (record,) = meter.collect()
    return record


def test_every_number_of_a_record_is_what_a_hand_count_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = Meter(SETUP, consumed_tokens=1000, skipped=2)
    first = add(meter, monkeypatch, 1, (100.0, 101.0, 102.0), 550)
    # 3 microbatches of 2 rows of 100 tokens, of which this rank has half, in 2 seconds: 150 tokens a second
    assert first["time"]["step_seconds"] == 2.0
    assert first["time"]["fwd_bwd_time"] == 1.0
    assert first["time"]["tgs"] == 150.0
    assert first["time"]["tokens_per_second"] == 275.0  # of all ranks, padding not counted
    assert first["time"]["mfu_full"] == pytest.approx(150 * 8e9 / 312e12)
    assert first["time"]["mfu_causal"] == pytest.approx(150 * 7e9 / 312e12)
    assert first["time"]["eta_seconds"] == 18.0  # nine more of 2 seconds
    assert (first["num_consumed_tokens"], first["tokens"], first["micro_num"]) == (1550, 550, 3)
    assert (first["loss"], first["grad_norm"], first["loss_scale"], first["lr"]) == (
        2.5,
        0.5,
        4.0,
        0.1,
    )
    assert (first["nll"], first["loss/web"], first["loss/code"]) == (2.5, 2.0, 4.0)
    assert (first["targets/web"], first["targets/code"], first["inf_nan_skip_batches"]) == (9, 3, 2)
    # the second step is timed from the end of the first, however long the data took
    second = add(meter, monkeypatch, 2, (104.5, 105.0, 106.0), 450, skipped=1.0, verdict=2)
    assert second["time"]["step_seconds"] == 4.0
    assert second["time"]["tgs"] == 75.0
    assert second["time"]["eta_seconds"] == pytest.approx(8 * 2.2)  # 0.9 * 2 + 0.1 * 4
    assert (second["num_consumed_tokens"], second["inf_nan_skip_batches"], second["anomaly"]) == (
        2000,
        3,
        "nan",
    )
    # after a validation or a save the next one is timed from its own beginning
    meter.interrupt()
    three = add(meter, monkeypatch, 3, (120.0, 120.5, 121.0), 600)
    assert three["time"]["step_seconds"] == 1.0
    assert three["time"]["tgs"] == 300.0
    assert three["time"]["eta_seconds"] == pytest.approx(7 * 2.08)  # 0.9 * 2.2 + 0.1 * 1
    assert three["num_consumed_tokens"] == 2600
    assert "anomaly" not in three
    last = add(meter, monkeypatch, 10, (121.0, 121.5, 122.0), 600)
    assert last["time"]["eta_seconds"] == 0.0


def test_a_rollout_belongs_to_the_time_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing before the step says when it began: shares are of the whole step."""
    meter = Meter(SETUP)
    monkeypatch.setattr(meter, "mark", lambda: DeviceTimestamp(None, 11.0))
    result, update = result_of(2.5)
    marks = (DeviceTimestamp(None, 10.0), DeviceTimestamp(None, 10.5), 0.0)
    pending = meter.add(1, step_of(300), {}, result, update, marks)
    pending.rollout_seconds = 3.0
    (record,) = meter.collect()
    times = record["time"]
    assert (times["step_seconds"], times["rollout_share"]) == (4.0, 0.75)
    assert (times["tokens_per_second"], times["update_tokens_per_second"]) == (75.0, 300.0)


def test_a_stall_is_in_the_record_of_the_next_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(SETUP)
    meter.stalled(1.5)
    meter.stalled(0.5)
    first = add(meter, monkeypatch, 1, (10.0, 10.5, 11.0), 100)
    second = add(meter, monkeypatch, 2, (11.0, 11.5, 12.0), 100)
    assert (first["time"]["save_stall_seconds"], second["time"]["save_stall_seconds"]) == (2.0, 0.0)
    assert (meter.saves, meter.stall_total) == (2, 2.0)


def test_the_share_of_waiting_for_data_leaves_out_the_first_five_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = Meter(SETUP)
    shares = [
        add(meter, monkeypatch, n, (n, n, n + 1.0), 100)["time"]["data_wait_share"]
        for n in range(1, 8)
    ]
    # each step takes 1 second and waits 0.25; the smoothed wait begins at 0 with the sixth
    assert shares == pytest.approx([0.0] * 5 + [0.025, 0.9 * 0.025 + 0.025])


def test_mfu_counts_what_the_heads_of_a_step_did(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(SETUP)
    monkeypatch.setattr(meter, "mark", lambda: DeviceTimestamp(None, 102.0))
    result, update = result_of(2.5)
    # sums over two microbatches: three quarters of the heads ran full attention, half of them streamed
    result.metrics["full_heads"] = (torch.tensor(1.5), torch.tensor(2.0))
    result.metrics["streaming_heads"] = (torch.tensor(1.0), torch.tensor(2.0))
    meter.add(
        1,
        step_of(550),
        {},
        result,
        update,
        (DeviceTimestamp(None, 100.0), DeviceTimestamp(None, 101.0), 0.0),
    )
    (record,) = meter.collect()
    assert record["time"]["mfu_full"] == pytest.approx(
        150 * (6e9 + 0.75 * 2e9 + 0.5 * 0.4e9) / 312e12
    )
    assert record["time"]["mfu_causal"] == pytest.approx(
        150 * (6e9 + 0.75 * 1e9 + 0.5 * 0.3e9) / 312e12
    )


def test_an_unknown_gpu_has_no_mfu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dataclasses import replace

    record = add(Meter(replace(SETUP, device_name="cpu")), monkeypatch, 1, (0.0, 0.5, 1.0), 100)
    assert record["time"]["mfu_full"] is record["time"]["mfu_causal"] is None


def test_the_pictures_of_a_step_count_in_its_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(replace(SETUP, picture_flops=PictureFlops(per_cell=2e9, per_square=1e9)))
    monkeypatch.setattr(meter, "mark", lambda: DeviceTimestamp(None, 102.0))
    # Pictures of 2 x 3 and 1 x 4 cells, and rows without one.
    grid = torch.tensor([[[2, 3], [1, 4]], [[0, 0], [0, 0]]], dtype=torch.int32)
    column = SimpleNamespace(extra={"picture.grid": grid})
    text = SimpleNamespace(extra={"picture.grid": torch.zeros_like(grid)})
    batch: Any = replace(step_of(550), microbatches=(column, text, text))
    result, update = result_of(2.5)
    begin = DeviceTimestamp(None, 100.0)
    meter.add(1, batch, {"lr": 0.1}, result, update, (begin, begin, 0.25))
    (record,) = meter.collect()
    tower = 2e9 * 10 + 1e9 * (6**2 + 4**2)
    assert record["time"]["mfu_full"] == pytest.approx((150 * 8e9 + tower / 2) / 312e12)
    assert record["time"]["mfu_causal"] == pytest.approx((150 * 7e9 + tower / 2) / 312e12)
