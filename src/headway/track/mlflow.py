"""MLflow: metrics, the recipe as parameters, events as tags, and the files of a finished run as
artifacts, on a tracking server.

Passwords come from the environment.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from headway.config.section import setting
from headway.errors import ConfigError
from headway.runtime.web import has_secret, without_password
from headway.track.curve import CURVE
from headway.track.service import ServiceClient, ServiceConfig, TrackedRun

URI = "MLFLOW_TRACKING_URI"
LONGEST = 500
"""Characters of a parameter that every server accepts."""
PARAMS_AT_ONCE = 100
"""MLflow takes no more parameters in one request."""


class Config(ServiceConfig):
    """Curves on an MLflow server."""

    PACKAGE: ClassVar[str] = "mlflow"
    kind: str = setting("mlflow", "mlflow.", on_resume="free")
    uri: str | None = setting(
        None,
        "Address of the tracking server; null = the environment variable MLFLOW_TRACKING_URI.",
        on_resume="free",
    )
    experiment: str = setting(
        "headway",
        "Experiment of the run; made if it does not exist.",
        on_resume="free",
        min_length=1,
    )
    artifacts: bool = setting(
        True,
        "Upload the training curve, reports, the recipe and the final metrics when the run has "
        "finished.",
        on_resume="free",
    )
    weights: bool = setting(
        False,
        "Upload final/, too. It must arrive within timeout_seconds, or the tracker is dropped.",
        on_resume="free",
    )

    def check(self) -> None:
        """Refuse a missing package, a missing address, and a password in the recipe."""
        super().check()
        if self.uri is None and not has_secret(URI):
            raise ConfigError(
                f"track kind mlflow has no uri, and {URI} is not set. "
                "Set one of them to the server's address."
            )
        if self.uri is not None:
            without_password(self.uri, "track uri of kind mlflow")

    def target(self) -> str:
        """Server and experiment."""
        return f"mlflow:{self.uri or URI}/{self.experiment}"

    def files_of(self, run_dir: Path) -> list[tuple[Path, str]]:
        """What is there of a finished run, by the folder of its artifacts."""
        files: list[tuple[Path, str]] = []
        if self.artifacts:
            files += [
                (run_dir / CURVE, "plots"),
                (run_dir / "recipe.yaml", "config"),
                (run_dir / "environment.json", "config"),
                (run_dir / "summary.json", "metrics"),
            ]
            files += [(path, "reports") for path in sorted(run_dir.glob("*.html"))]
        if self.weights:
            files.append((run_dir / "final", "model"))
        return [(path, folder) for path, folder in files if path.exists()]

    def open(self, run: TrackedRun) -> ServiceClient:
        """Begin the run, or continue it under its id."""
        # The client rather than mlflow's global functions: it keeps no state of an active run.
        entities = self.load("mlflow.entities")
        client = self.load("mlflow").MlflowClient(self.uri)
        if run.id is not None:
            client.update_run(run.id, status="RUNNING")
            return ServerRun(client, entities, run.id)

        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            experiment_id = client.create_experiment(self.experiment)
        else:
            experiment_id = experiment.experiment_id
        tags = {"headway.folder": str(run.folder)}
        run_id = client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id

        # Once: a parameter of a run cannot be changed.
        params = [entities.Param(key, str(value)[:LONGEST]) for key, value in leaves(run.params)]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            client.log_batch(run_id, params=params[start : start + PARAMS_AT_ONCE])
        return ServerRun(client, entities, run_id)


class ServerRun:
    """One run on a server."""

    def __init__(self, client: Any, entities: Any, identity: str) -> None:
        self.client = client
        self.entities = entities
        self.id = identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve, in one request."""
        now_milliseconds = int(time.time() * 1000)
        metrics = [
            self.entities.Metric(name, float(value), now_milliseconds, step)
            for name, value in values.items()
        ]
        self.client.log_batch(self.id, metrics=metrics)

    def event(self, name: str, text: str, step: int) -> None:
        """The last event of each kind is a tag."""
        self.client.set_tag(self.id, f"headway.event.{name}", f"step {step}: {text}"[:LONGEST])

    def keep(self, path: Path, folder: str) -> None:
        """Upload a file or a folder as artifacts."""
        upload = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        upload(self.id, str(path), folder)

    def finish(self, *, ok: bool) -> None:
        """Say how it ended."""
        self.client.set_terminated(self.id, "FINISHED" if ok else "FAILED")


def leaves(params: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as `optim.lr` and the like; lists stay whole."""
    if not isinstance(params, Mapping):
        yield path, params
        return
    for key, value in params.items():
        yield from leaves(value, f"{path}.{key}" if path else str(key))
