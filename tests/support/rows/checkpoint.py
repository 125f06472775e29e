"""Settings of checkpoints."""

from headway.checkpoint.remote import RemoteCheckpoints
from headway.runtime.paths import S3Path
from headway.train.config import Recipe
from support.observe import STORES, Row, engine, files, load, observed, refused

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
    "checkpoint.keep_last": (("checkpoint.every=1",), 1, 3, files("checkpoints/step-*")),
    "checkpoint.keep_best": (WORSE, 0, 3, files("checkpoints/best-*")),
    "checkpoint.keep_every": (("checkpoint.every=1", "checkpoint.keep_last=1"), None, 1, files("checkpoints/step-*")),
    "checkpoint.on_best": ((*VALIDATED, "checkpoint.every=null"), False, True, files("checkpoints/step-*")),
    "checkpoint.metric": (VALIDATED, "loss", "nothing", refused),
    "checkpoint.goal": (WORSE, "min", "max", lambda o: str((observed(o).folder / "checkpoints" / "best-1").readlink())),
    "checkpoint.snapshot_every": ((), None, 2, files("checkpoints/snapshot-*")),
    "checkpoint.every": ((), None, 1, files("checkpoints/step-*")),
    "checkpoint.to": ((), None, "$/elsewhere", files("checkpoints/step-*")),
    "checkpoint.retry_seconds": (("checkpoint.to=s3://bucket/x",), 120.0, 5.0, lambda o: RemoteCheckpoints(S3Path("bucket", "x"), load(Recipe, None, list(o)).checkpoint).store.retry_seconds),
    "checkpoint.async": ((), True, False, engine(lambda run: run.saver._is_asynchronous([]))),
    "checkpoint.at_end": ((), True, False, files("*")),
}  # fmt: skip
