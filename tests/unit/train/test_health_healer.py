"""When a run gives up: counts of skips in a row and of ways back to the same checkpoint, each one step before and at its limit."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from headway.checkpoint.save import save_checkpoint
from headway.data.loader import LoaderState
from headway.data.mixture import MixtureState
from headway.parallel.box import StateTensor
from headway.train import health
from headway.train.config import HealConfig
from headway.train.health import BadStep, Healer


def state(batch: int) -> LoaderState:
    return LoaderState(batch, MixtureState(0, batch, ()))


def healer_of(**settings: Any) -> tuple[Healer, Any, list[str]]:
    """A healer that has seen which batch each of twenty steps trains on, and a run that keeps what it is told."""
    told: list[str] = []
    healer = Healer(HealConfig.model_validate(settings), scales_loss=False)
    loader = SimpleNamespace(documents_of=lambda *_: {"web": [1]})
    run = SimpleNamespace(
        process=SimpleNamespace(is_first=True),
        loader=loader,
        emit=lambda kind, text, **facts: told.append(f"{kind} {facts.get('batches')}"),
    )
    return healer, run, told


def see(healer: Healer, run: Any, *kinds: str | None, first: int = 1) -> None:
    for step, kind in enumerate(kinds, first):
        healer.remember(step, state(step - 1), state(step))
        record: dict[str, Any] = {"step": step, "loss": 1.0, "grad_norm": 1.0}
        healer.check(run, record if kind is None else {**record, "anomaly": kind})


def test_the_limit_counts_skips_in_a_row_and_a_good_step_begins_anew() -> None:
    healer, run, told = healer_of(on_spike="skip", limit=2)
    see(healer, run, "nan", "spike", None, "nan", "nan", None, "spike", "spike")
    assert healer.gave_up is None, "never more than two in a row"
    assert told == [
        f"{kind} [{batch}, {batch}]"
        for kind, batch in zip(
            ("nan", "spike") + ("nan",) * 2 + ("spike",) * 2, (0, 1, 3, 4, 6, 7), strict=True
        )
    ]
    see(healer, run, "nan", first=9)
    assert healer.gave_up is not None
    assert healer.gave_up.startswith(
        "3 steps in a row were skipped (heal.limit is 2); the last: step 9 has "
    )


def test_a_gradient_that_is_not_finite_is_trouble_unless_a_loss_scale_looks_after_it() -> None:
    for scales, bad in ((False, True), (True, False)):
        healer, run, told = healer_of()
        healer.scales_loss = scales
        healer.remember(1, state(0), state(1))
        healer.check(run, {"step": 1, "loss": 1.0, "grad_norm": float("inf")})
        assert bool(told) == bad


def test_only_ways_back_to_the_same_checkpoint_count_and_the_limit_is_the_last_that_is_tried(
    tmp_path: Path,
) -> None:
    (tmp_path / "logs").mkdir()
    record = StateTensor("w", "master", (2,), [((0,), torch.zeros(2))])
    for step in (5, 10):
        save_checkpoint(tmp_path / "checkpoints", step, [record], {})
    healer, _, _ = healer_of()
    for step in range(5, 13):
        healer.remember(step, state(step - 1), state(step))
    loader = SimpleNamespace(documents_of=lambda *_: {})
    run: Any = SimpleNamespace(
        healer=healer, checkpoints=tmp_path / "checkpoints", saver=SimpleNamespace(remote=None), start=SimpleNamespace(folder=tmp_path),
        recipe=SimpleNamespace(heal=HealConfig(limit=2)), loader=loader,
        writes=SimpleNamespace(replace=lambda path, text: path.write_text(text)),
    )  # fmt: skip
    (tmp_path / health.FILE).write_text(json.dumps([{"to_step": 5, "batches": [6, 6]}] * 3))
    plans = [
        health.plan_rollback(run, BadStep(12, "spike", "too high"), (11, 11)) for _ in range(3)
    ]
    assert ["gave_up" in plan for plan in plans] == [False, False, True]
    assert "rolled back to step 10 2 times already" in plans[-1]["gave_up"]
    assert [rollback["to_step"] for rollback in health.read_healed(tmp_path)] == [5, 5, 5, 10, 10]


def test_batches_and_steps_are_found_from_what_was_remembered() -> None:
    healer, _, _ = healer_of()
    for step in range(1, 11):
        # batches 3 to 7 left out
        healer.remember(
            step, state(step + 4 if step > 3 else step - 1), state(step + 5 if step > 3 else step)
        )
    assert healer.batch_of(3) == 2
    assert healer.batch_of(4) == 8
    assert healer.step_of(8, 6) == 4
    assert healer.before(8).batch == 8
    healer.rolled_back(6)
    assert [step for step, _, _ in healer._cursors][-1] == 6
