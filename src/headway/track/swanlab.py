"""SwanLab.

Offline unless the recipe says online; it never asks for a key. Files are in run_dir/swanlab;
`swanlab sync` sends them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from headway.config.section import setting
from headway.errors import ConfigError
from headway.runtime.web import has_secret
from headway.track.service import ServiceClient, ServiceConfig, TrackedRun

KEY = "SWANLAB_API_KEY"


class Config(ServiceConfig):
    """Curves in SwanLab."""

    PACKAGE: ClassVar[str] = "swanlab"
    kind: str = setting("swanlab", "swanlab.", on_resume="free")
    project: str = setting("headway", "Project of the run.", on_resume="free", min_length=1)
    workspace: str | None = setting(
        None, "Workspace of the project; null = the key's own.", on_resume="free"
    )
    mode: Literal["offline", "online"] = setting(
        "offline",
        "offline writes files for `swanlab sync`; online sends, with the key in SWANLAB_API_KEY.",
        on_resume="free",
    )

    def check(self) -> None:
        """Refuse a missing package, and online without a key."""
        super().check()
        if self.mode == "online" and not has_secret(KEY):
            raise ConfigError(
                f"track kind swanlab has mode 'online', but {KEY} is not set. Set it, or use mode: "
                "offline."
            )

    def target(self) -> str:
        """Project and workspace."""
        return f"swanlab:{self.workspace or ''}/{self.project}"

    def open(self, run: TrackedRun) -> ServiceClient:
        """Begin the run; online, continue it under its id.

        Offline, every start writes files of one id.
        """
        swanlab = self.load("swanlab")
        # An id of our own, so that a resumed run can name it.
        identity = run.id or uuid.uuid4().hex[:20]
        folder = run.folder / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        swanlab_run = swanlab.init(
            project=self.project,
            workspace=self.workspace,
            name=run.name,
            id=identity,
            resume="allow",
            mode=self.mode,
            log_dir=str(folder),
            config=dict(run.params),
        )
        return SwanClient(swanlab, swanlab_run, identity)


class SwanClient:
    """A run in SwanLab."""

    def __init__(self, package: Any, run: Any, identity: str) -> None:
        self.package = package
        self.run = run
        self.id = identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        self.run.log(dict(values), step=step)

    def event(self, name: str, text: str, step: int) -> None:
        """Add the text of an event."""
        self.run.log({f"event/{name}": self.package.Text(text)}, step=step)

    def finish(self, *, ok: bool) -> None:
        """Write everything out."""
        self.run.finish("success" if ok else "crashed")
