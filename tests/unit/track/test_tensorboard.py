"""TensorBoard's curves are not doubled by a resume."""

from pathlib import Path
from typing import Any

from headway.config.kinds import kind_config


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config: Any = kind_config("headway.track", "tensorboard").model_validate(
        {"kind": "tensorboard"}
    )
    for steps, value in ((range(1, 6), 1.0), (range(4, 8), 2.0)):  # killed after 5, resumed from 3
        tracker = config.build(tmp_path, "run")
        for step in steps:
            tracker.log(step, {"step": step, "loss": value, "time": {"tgs": 5, "mfu_full": None}})
        tracker.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in shown.Scalars("loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
        (5, 2.0),
        (6, 2.0),
        (7, 2.0),
    ]
    assert set(shown.Tags()["scalars"]) == {"loss", "tgs"}
