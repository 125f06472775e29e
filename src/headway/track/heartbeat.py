"""Heartbeats: every N steps, post all metrics of the step to a monitor as one flat JSON object, in
the format of InternLM's light_monitor.

    {"msg_type": "train_metrics", "cluster": "a", "job": "7", "run": "pretrain", "step": 50,
     "loss": 3.1, "valid_wiki_loss": null, ...}

Characters of a name other than letters, digits and _ become _. Values that are not finite become
null. Heartbeats are sent in the background; if two are already queued, the next one is dropped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.config.section import setting
from headway.runtime.web import address_from_environment, cluster_name, job_id
from headway.track.base import Event, TrackerConfig, flatten
from headway.track.sender import Sender, poster

MAX_QUEUED = 2


class Config(TrackerConfig):
    """Post metrics to a monitor every few steps."""

    kind: str = setting("heartbeat", "heartbeat.", on_resume="free")
    url_env: str = setting(
        "MONITOR_ADDRESS",
        "Environment variable that holds the address to post to.",
        on_resume="free",
        min_length=1,
    )
    every: int = setting(
        50,
        "Steps between heartbeats; sent with the first logged step at or after each.",
        gt=0,
        on_resume="free",
    )
    timeout_seconds: float = setting(
        5.0, "Seconds to wait for the monitor's answer.", gt=0, on_resume="free"
    )

    def build(self, run_dir: Path, run_name: str) -> HeartbeatPost:
        """Make the tracker; raises ConfigError if the address is not set."""
        address = address_from_environment(self.url_env, "track url_env")
        return HeartbeatPost(self, run_name, address)


class HeartbeatPost:
    """Posts every Nth step in the background."""

    def __init__(self, config: Config, run_name: str, address: str) -> None:
        self._every = config.every
        self._identity = {
            "msg_type": "train_metrics",
            "cluster": cluster_name(),
            "job": job_id(),
            "run": run_name,
        }
        send = poster(address, config.timeout_seconds)
        self._sender = Sender("heartbeats", send, capacity=MAX_QUEUED)
        self._next = 0
        """The step from which on the next heartbeat is due."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Post this step if a heartbeat is due."""
        if step < self._next:
            return
        # By multiples of `every`, not by distance: logged steps need not be multiples of it.
        self._next = (step // self._every + 1) * self._every
        numbers = {
            re.sub(r"\W", "_", name, flags=re.ASCII): _finite(value)
            for name, value in flatten(metrics).items()
        }
        content = {**self._identity, "step": step, **numbers}
        self._sender.put(json.dumps(content, ensure_ascii=False, allow_nan=False).encode())

    def note(self, text: str) -> None:
        """Ignored: a heartbeat carries only metrics."""

    def event(self, name: Event, text: str, step: int) -> None:
        """Ignored: a heartbeat carries only metrics."""

    def close(self) -> None:
        """Wait briefly for the last heartbeat to be sent."""
        self._sender.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
