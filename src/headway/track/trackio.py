"""Trackio: curves in a local database, seen with `trackio show`, or in a Hugging Face Space with
the token in HF_TOKEN.

Like every service, the package runs in a process of its own (service.py, tracker_process.py):
`open` and the client are called there.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from headway.config.section import setting
from headway.errors import ConfigError
from headway.runtime.web import has_secret
from headway.track.service import ServiceClient, ServiceConfig, TrackedRun


class Config(ServiceConfig):
    """Curves in Trackio."""

    PACKAGE: ClassVar[str] = "trackio"
    kind: str = setting("trackio", "trackio.", on_resume="free")
    project: str = setting("headway", "Project of the run.", on_resume="free", min_length=1)
    folder: Path | None = setting(
        None,
        "Where the database is; null = Trackio's own folder, where `trackio show` looks.",
        on_resume="free",
    )
    space: str | None = setting(
        None,
        "Hugging Face Space to send to, with the token in HF_TOKEN; null = local only.",
        on_resume="free",
    )

    def check(self) -> None:
        """Refuse a missing package, and a Space without a token."""
        super().check()
        if self.space is not None and not has_secret("HF_TOKEN"):
            raise ConfigError(
                f"track kind trackio has space {self.space!r}, but HF_TOKEN is not set. "
                "Set it, or remove space."
            )

    def target(self) -> str:
        """Space and project."""
        return f"trackio:{self.space or ''}/{self.project}"

    def variables(self, run_dir: Path) -> dict[str, str]:
        """Where its database is."""
        if self.folder is None:
            return {}
        return {"TRACKIO_DIR": str(self.folder)}

    def open(self, run: TrackedRun) -> ServiceClient:
        """Begin the run, or continue it under its name."""
        trackio = self.load("trackio")
        # Trackio knows runs by their names: two runs of one name would be one. `run.id` is the name
        # that an earlier start of this run got here.
        name = run.id or f"{run.name}-{uuid.uuid4().hex[:6]}"
        # The run's own metrics are logged, not those that Trackio measures itself.
        options: Any = {"auto_log_gpu": False, "auto_log_cpu": False}
        trackio.init(
            project=self.project,
            name=name,
            config=dict(run.params),
            space_id=self.space,
            resume="allow",
            **options,
        )
        return TrackioClient(trackio, name)


class TrackioClient:
    """A run in Trackio; `id` is its name there, which the next start of the run continues."""

    def __init__(self, package: Any, identity: str) -> None:
        self.package = package
        self.id = identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        self.package.log(dict(values), step=step)

    def event(self, name: str, text: str, step: int) -> None:
        """Add an alert."""
        self.package.alert(title=name, text=f"step {step}: {text}")

    def finish(self, *, ok: bool) -> None:
        """Write everything out. `ok` is not passed on."""
        self.package.finish()
