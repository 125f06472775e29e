"""log.style internlm prints the line of InternLM's trainer: its sixteen names in its order, with the numbers of metrics.jsonl."""

import logging
import re
from pathlib import Path

import pytest
from support.setting_runs import BASE

from headway.config.load import load
from headway.track.base import flatten
from headway.track.console import Console, internlm_line
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

NAMES = [
    "tflops", "step", "loss", "tgs (tokens/gpu/second)", "lr", "loss_scale", "grad_norm", "micro_num", "num_consumed_tokens",
    "inf_nan_skip_batches", "num_samples_in_batch", "largest_length", "largest_batch", "smallest_batch", "adam_beta2", "fwd_bwd_time",
]  # fmt: skip


def parse(line: str) -> dict[str, str]:
    """As scripts that read InternLM's logs do: a name is everything up to the equals sign."""
    return dict(re.findall(r"([\w ()/]+)=([^,]*)(?:,|$)", line))


def test_the_sample_of_the_guide_comes_out_again() -> None:
    sample = (
        "tflops=189.83371103277346,step=1,loss=11.613704681396484,tgs (tokens/gpu/second)=4274.45,lr=6.000000000000001e-07,"
        "loss_scale=65536.0,grad_norm=65.150786641452,micro_num=4,num_consumed_tokens=262144,inf_nan_skip_batches=0,"
        "num_samples_in_batch=16,largest_length=2048,largest_batch=5,smallest_batch=3,adam_beta2=0.95,fwd_bwd_time=3.67"
    )
    flat = {
        "tflops": 189.83371103277346, "loss": 11.613704681396484, "tgs": 4274.4512, "lr": 6.000000000000001e-07, "loss_scale": 65536.0,
        "grad_norm": 65.150786641452, "micro_num": 4, "num_consumed_tokens": 262144, "inf_nan_skip_batches": 0, "num_samples_in_batch": 16,
        "largest_length": 2048, "largest_batch": 5, "smallest_batch": 3, "adam_beta2": 0.95, "fwd_bwd_time": 3.6718, "mfu_full": 0.4,
    }  # fmt: skip
    assert internlm_line(2, flat) == sample


def test_a_run_logs_all_sixteen_fields_with_its_own_numbers(tmp_path: Path) -> None:
    settings = [
        "steps=3",
        f"run.dir={tmp_path}",
        "run.name=r",
        "log.every=1",
        "log.style=internlm",
        "checkpoint.at_end=false",
    ]
    recipe = load(Recipe, None, [*BASE, *settings])
    train(recipe)
    lines = [
        line
        for line in (recipe.run.folder / "train.log").read_text().splitlines()
        if "tflops=" in line
    ]
    records = [flatten(record) for record in read_metrics(recipe.run.folder / "metrics.jsonl")]
    assert len(lines) == len(records) == 3
    for number, (line, record) in enumerate(zip(lines, records, strict=True)):
        fields = parse(line[line.index("tflops=") :])
        assert list(fields) == NAMES
        assert fields["step"] == str(number)
        for name in NAMES[2:]:
            value = record["tgs" if name.startswith("tgs") else name]
            assert float(fields[name]) == pytest.approx(
                value, abs=0.005 if name.startswith(("tgs", "fwd")) else 0
            ), name


def test_what_a_run_does_not_have_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headway"):
        Console(10, style="internlm").log(4, {"loss": 2.5, "time": {"tgs": 10.0}})
    fields = parse(caplog.messages[0])
    assert list(fields) == NAMES
    assert fields["adam_beta2"] == "None"
    assert fields["step"] == "3"
    assert fields["loss"] == "2.5"
