"""Console output: one line of at most 100 columns per logged step. With -v a second line shows all other metrics. Always on.

On a terminal the steps are a progress bar (`bar.py`) instead; the lines then go to train.log alone. With log.style internlm the line is
InternLM's (`internlm_line.py`), on a terminal too.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from headway.runtime.log import FILE_ONLY, SCREEN_ONLY
from headway.runtime.progress import duration, quantity
from headway.runtime.status_line import StatusLine
from headway.track.bar import ProgressBar
from headway.track.base import Event, Value, flatten
from headway.track.internlm_line import internlm_line

COLUMNS = 100
DATA_WAIT_SHOWN = 0.05
RETRIEVAL = "/recall_at_1"
SHOWN = (
    "loss",
    "lr",
    "grad_norm",
    "sparsity",
    "sparsity_target",
    "tokens_per_second",
    "mfu_full",
    "mfu_causal",
    "memory_bytes",
    "eta_seconds",
)
log = logging.getLogger("headway")


class Console:
    """Writes steps to headway's log, which goes to the terminal and to train.log."""

    def __init__(
        self,
        total_steps: int | None = None,
        status: StatusLine | None = None,
        style: Literal["headway", "internlm"] = "headway",
    ) -> None:
        self.total_steps, self.style = total_steps, style
        self.bar = None if status is None else ProgressBar(status, total_steps)

    def tick(self, record: Mapping[str, Any]) -> None:
        """Move the bar; called with the record of every step."""
        if self.bar is not None:
            self.bar.tick(record)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show one step; validation results get a separate line."""
        flat = flatten(metrics)
        valid = {name: value for name, value in flat.items() if name.startswith("valid")}
        if any(
            name.endswith(RETRIEVAL) for name in valid
        ):  # dozens of numbers; metrics.jsonl and trackers have them all
            valid = {
                name: value for name, value in valid.items() if name.endswith((RETRIEVAL, "/loss"))
            }
        # Validation before the first step has no training metrics.
        at_start = "validated at the start: " if valid and "loss" not in flat else ""
        if not at_start:
            line = (
                step_line(step, self.total_steps, flat)
                if self.style == "headway"
                else internlm_line(step, flat)
            )
            log.info("%s", line, extra=None if self.bar is None else FILE_ONLY)
        if valid:
            line = at_start + "  ".join(f"{name} {_number(value)}" for name, value in valid.items())
            log.info("%s", line, extra=None if self.bar is None else FILE_ONLY)
            if self.bar is not None:
                log.info("step %d  valid: %s", step, _short(valid), extra=SCREEN_ONLY)
        rest = {
            name: value
            for name, value in flat.items()
            if name not in SHOWN and not name.startswith("valid") and value is not None
        }
        if rest:
            log.debug(
                "%s", "  " + "  ".join(f"{name} {_number(value)}" for name, value in rest.items())
            )

    def note(self, text: str) -> None:
        """Show a note."""
        log.info("%s", text)

    def event(self, name: Event, text: str, step: int) -> None:
        """Show an event as a warning; start and finish appear only with -v."""
        if name in ("start", "finish"):
            log.debug("%s: %s", name, text)
        else:
            log.warning("%s at step %d: %s", name.replace("_", " "), step, text)

    def close(self) -> None:
        """Leave the bar; nothing is queued."""
        if self.bar is not None:
            self.bar.status.close()


def step_line(step: int, total_steps: int | None, metrics: Mapping[str, Value]) -> str:
    """The line of one step. Metrics that are absent from the record or unknown are left out."""
    parts = [f"{step}/{total_steps}" if total_steps else f"step {step}"]
    for name, write in (("loss", _loss), ("lr", _rate), ("grad_norm", _norm)):
        if name in metrics:
            parts.append(write(metrics[name]))
    if isinstance(sparsity := metrics.get("sparsity"), (int, float)):
        target = metrics.get("sparsity_target")
        parts.append(
            f"sparsity {sparsity:.3f}"
            + (f"/{target:.3f}" if isinstance(target, (int, float)) else "")
        )
    speed = metrics.get("tokens_per_second")
    if isinstance(speed, (int, float)):
        parts.append(f"{quantity(speed)} tok/s")
    if used := _utilisation(metrics.get("mfu_full"), metrics.get("mfu_causal")):
        parts.append(used)
    waiting = metrics.get("data_wait_share")
    if isinstance(waiting, (int, float)) and waiting > DATA_WAIT_SHOWN:
        parts.append(f"WAITS FOR DATA {waiting:.0%}")
    memory = metrics.get("memory_bytes")
    if isinstance(memory, (int, float)):
        parts.append(f"{memory / 1e9:.{0 if memory >= 10e9 else 1}f} GB")
    eta = metrics.get("eta_seconds")
    if isinstance(eta, (int, float)) and math.isfinite(eta):
        parts.append(f"eta {duration(eta)}")
    line = "  ".join(parts)
    for droppable in ("", "mfu ", " GB", " tok/s"):
        if len(line) > COLUMNS:
            parts = [part for part in parts if not droppable or droppable not in part]
            line = " ".join(parts)
    return line


def _loss(value: Value) -> str:
    return f"loss {_number(value)}"


def _rate(value: Value) -> str:
    return (
        f"lr {value:.1e}".replace("e-0", "e-").replace("e+00", "e0")
        if isinstance(value, (int, float))
        else f"lr {value}"
    )


def _norm(value: Value) -> str:
    if isinstance(value, (int, float)) and math.isfinite(value):
        return f"grad {value:.2f}" if value < 1000 else f"grad {quantity(value)}"
    return f"grad {value}"


def _utilisation(full: Value, causal: Value) -> str:
    known = [
        f"{name} {value:.0%}"
        for name, value in (("full", full), ("causal", causal))
        if isinstance(value, (int, float))
    ]
    return f"mfu {' '.join(known)}" if known else ""


def _number(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(valid: Mapping[str, Value]) -> str:
    """Validation results for a terminal: without the first word of their names and without counts."""
    names = {name: name.removeprefix("valid/") for name in valid}
    return "  ".join(
        f"{names[name]} {_number(value)}"
        for name, value in valid.items()
        if not name.endswith("/tokens")
    )
