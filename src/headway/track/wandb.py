"""Weights & Biases.

Offline unless the recipe says online; it never asks for a key. Files are in run_dir/wandb; `wandb
sync` sends them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from headway.config.section import setting
from headway.errors import ConfigError
from headway.runtime.web import has_secret
from headway.track.service import ServiceClient, ServiceConfig, TrackedRun


class Config(ServiceConfig):
    """Curves in Weights & Biases."""

    PACKAGE: ClassVar[str] = "wandb"
    kind: str = setting("wandb", "wandb.", on_resume="free")
    project: str = setting("headway", "Project of the run.", on_resume="free", min_length=1)
    entity: str | None = setting(None, "User or team; null = the key's own.", on_resume="free")
    mode: Literal["offline", "online"] = setting(
        "offline",
        "offline writes files for `wandb sync`; online sends, with the key in WANDB_API_KEY or "
        "~/.netrc.",
        on_resume="free",
    )
    group: str | None = setting(None, "Group of the run.", on_resume="free")
    tags: tuple[str, ...] = setting((), "Tags of the run.", on_resume="free")

    def check(self) -> None:
        """Refuse a missing package, and online without a key."""
        super().check()
        if self.mode == "online" and not has_secret("WANDB_API_KEY", "api.wandb.ai"):
            raise ConfigError(
                "track kind wandb has mode 'online', but WANDB_API_KEY is not set. "
                "Set it, or use mode: offline."
            )

    def target(self) -> str:
        """Project and entity."""
        return f"wandb:{self.entity or ''}/{self.project}"

    def variables(self, run_dir: Path) -> dict[str, str]:
        """No questions, no output, and the mode of the recipe."""
        return {
            "WANDB_MODE": self.mode,
            "WANDB_SILENT": "true",
            "WANDB_CONSOLE": "off",
            "WANDB_DISABLE_CODE": "true",
        }

    def open(self, run: TrackedRun) -> ServiceClient:
        """Begin the run, or continue it under its id."""
        wandb = self.load("wandb")
        identity = run.id or uuid.uuid4().hex[:8]
        options: Any = {
            "silent": True,
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "x_disable_stats": True,
        }
        run.folder.mkdir(parents=True, exist_ok=True)
        wandb_run = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=list(self.tags) or None,
            name=run.name,
            id=identity,
            resume="allow",
            mode=self.mode,
            dir=str(run.folder),
            settings=wandb.Settings(**options),
        )
        # A resumed run may have other settings than its first start.
        wandb_run.config.update(dict(run.params), allow_val_change=True)
        # wandb's own step must increase; a run that resumes before its last point logs steps again.
        wandb_run.define_metric("*", step_metric="step")
        return WandbClient(wandb_run, identity)


class WandbClient:
    """A run in Weights & Biases."""

    def __init__(self, run: Any, identity: str) -> None:
        self.run = run
        self.id = identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        self.run.log({**values, "step": step})

    def event(self, name: str, text: str, step: int) -> None:
        """The last event of each kind is in the summary."""
        self.run.summary[f"event/{name}"] = f"step {step}: {text}"

    def finish(self, *, ok: bool) -> None:
        """Write everything out."""
        self.run.finish(exit_code=0 if ok else 1)
