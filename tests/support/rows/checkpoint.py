"""Settings of checkpoints."""

from headway.checkpoint.remote import RemoteCheckpoints
from headway.runtime.paths import S3Path
from headway.train.config import Recipe
from support.setting_runs import (
    STORES,
    Row,
    built_run,
    files_left,
    load,
    numbers_or_refusal,
    trained_run,
)

VALIDATED = (
    *STORES,
    "data.valid.fraction=0.4",
    "eval.every=1",
    "eval.rows=8",
    "checkpoint.every=1",
    "checkpoint.keep_last=1",
    "steps=4",
)
WORSE = (*VALIDATED, "optim.lr=3")
ROWS: dict[str, Row] = {
    "checkpoint.keep_last": (("checkpoint.every=1",), 1, 3, files_left("checkpoints/step-*")),
    "checkpoint.keep_best": (WORSE, 0, 3, files_left("checkpoints/best-*")),
    "checkpoint.keep_every": (("checkpoint.every=1", "checkpoint.keep_last=1"), None, 1, files_left("checkpoints/step-*")),
    "checkpoint.on_best": ((*VALIDATED, "checkpoint.every=null"), False, True, files_left("checkpoints/step-*")),
    "checkpoint.metric": (VALIDATED, "loss", "nothing", numbers_or_refusal),
    "checkpoint.goal": (WORSE, "min", "max", lambda o: str((trained_run(o).folder / "checkpoints" / "best-1").readlink())),
    "checkpoint.snapshot_every": ((), None, 2, files_left("checkpoints/snapshot-*")),
    "checkpoint.every": ((), None, 1, files_left("checkpoints/step-*")),
    "checkpoint.to": ((), None, "$/elsewhere", files_left("checkpoints/step-*")),
    "checkpoint.retry_seconds": (("checkpoint.to=s3://bucket/x",), 120.0, 5.0, lambda o: RemoteCheckpoints(S3Path("bucket", "x"), load(Recipe, None, list(o)).checkpoint).store.retry_seconds),
    "checkpoint.async": ((), True, False, built_run(lambda run: run.saver._is_asynchronous([]))),
    "checkpoint.at_end": ((), True, False, files_left("*")),
}  # fmt: skip
