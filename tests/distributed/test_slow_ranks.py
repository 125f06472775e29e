"""A slow rank is named in any run of several ranks, whatever the engine and whatever makes it slow."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.ranks import start_processes
from support.runs import make_stores, tiny_settings

from headway.config.load import load
from headway.data.loader import Loader
from headway.diagnose.slow_ranks import SlowRule
from headway.tasks.next_token import NextToken
from headway.train import train
from headway.train.config import Recipe

pytestmark = pytest.mark.slow

SLOW_SECONDS = 0.2


def slowed(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a method of one class take longer on rank 1."""
    plain = getattr(owner, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(SLOW_SECONDS if os.environ["RANK"] == "1" else 0)
        return plain(*arguments)

    monkeypatch.setattr(owner, name, slow)


@pytest.mark.parametrize(
    ("owner", "method", "said", "more"),
    [
        pytest.param(NextToken, "loss", "rank 1: compute took", [], marks=pytest.mark.drill),
        (NextToken, "loss", "rank 1: compute took", ["parallel.strategy=fsdp"]),
        (Loader, "_fill_microbatch", "rank 1: waited", ["data.workers=0"]),
        pytest.param(NextToken, "loss", None, ["log.slow_ratio=null"], marks=pytest.mark.drill),
    ],
)
def test_a_slow_rank_is_named_once_without_a_profile(
    owner: type,
    method: str,
    said: str | None,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_stores(tmp_path)
    monkeypatch.setattr(
        "headway.diagnose.slow_ranks.SlowRule", lambda ratio: SlowRule(ratio, min_seconds=0.15)
    )
    slowed(owner, method, monkeypatch)
    settings = [
        *tiny_settings(tmp_path, "run"),
        "data.valid=null",
        "steps=18",
        "eval.every=null",
        "checkpoint.at_end=false",
        "log.slow_ratio=1.3",
        "log.slow_every=6",
    ]
    recipe = load(Recipe, None, [*settings, *more])
    start_processes(lambda: train(recipe), 2)
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    slow = [event["text"] for event in events if event["event"] == "slow_rank"]
    assert [text.startswith(said) for text in slow] == [True] if said else slow == []
    assert ("slow rank at step" in (tmp_path / "run" / "train.log").read_text()) is bool(said)
