"""Console output: one line of at most 100 columns per logged step.

A run with rollouts gets two more lines about them. With -v another line shows all other metrics.
Always on.

On a terminal the steps are a progress bar (`bar.py`) instead; the lines then go to train.log alone.
With log.style internlm the line is InternLM's (`internlm_line`), on a terminal too.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from headway.runtime.log import FILE_ONLY, SCREEN_ONLY
from headway.runtime.progress import duration, quantity
from headway.runtime.status_line import StatusLine
from headway.track.bar import ProgressBar
from headway.track.base import Event, Value, flatten

log = logging.getLogger("headway")

COLUMNS = 100
"""A line that is longer loses its least important parts."""
DATA_WAIT_SHOWN = 0.05
"""The share of a step spent waiting for data above which the line says so."""
RETRIEVAL = "/recall_at_1"
"""The end of the one retrieval metric that the console shows."""
SHOWN = (
    "loss",
    "reward",
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
"""Metrics of the line of a step; all others are in the second line of -v."""
INTERNLM_FIELDS = {
    "tflops": "tflops",
    "step": "step",
    "loss": "loss",
    "tgs (tokens/gpu/second)": "tgs",
    "lr": "lr",
    "loss_scale": "loss_scale",
    "grad_norm": "grad_norm",
    "micro_num": "micro_num",
    "num_consumed_tokens": "num_consumed_tokens",
    "inf_nan_skip_batches": "inf_nan_skip_batches",
    "num_samples_in_batch": "num_samples_in_batch",
    "largest_length": "largest_length",
    "largest_batch": "largest_batch",
    "smallest_batch": "smallest_batch",
    "adam_beta2": "adam_beta2",
    "fwd_bwd_time": "fwd_bwd_time",
}
"""InternLM's name -> the name in metrics.jsonl. Names and order are InternLM's, so that scripts
that read its logs keep working."""
INTERNLM_TWO_DIGITS = ("tgs (tokens/gpu/second)", "fwd_bwd_time")
"""Fields that InternLM rounds."""


class Console:
    """Writes steps to headway's log, which goes to the terminal and to train.log."""

    def __init__(
        self,
        total_steps: int | None = None,
        status: StatusLine | None = None,
        style: Literal["headway", "internlm"] = "headway",
    ) -> None:
        self.total_steps = total_steps
        self.style = style
        self.added: set[str] = set()
        """Metrics that callbacks add; they are part of the line of a step."""
        self.bar: ProgressBar | None = None
        if status is not None:
            self.bar = ProgressBar(status, total_steps)

    def tick(self, record: Mapping[str, Any]) -> None:
        """Move the bar; called with the record of every step."""
        if self.bar is not None:
            self.bar.tick(record)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show one step; validation results get a separate line."""
        flat = flatten(metrics)
        valid = {name: value for name, value in flat.items() if name.startswith("valid")}
        # Retrieval has dozens of numbers; metrics.jsonl and trackers have them all.
        if any(name.endswith(RETRIEVAL) for name in valid):
            shown_ends = (RETRIEVAL, "/loss")
            valid = {name: value for name, value in valid.items() if name.endswith(shown_ends)}

        # With a bar, the screen shows the steps and train.log the lines.
        destination = None if self.bar is None else FILE_ONLY
        # Validation before the first step has no training metrics.
        at_start = "validated at the start: " if valid and "loss" not in flat else ""
        if not at_start:
            if self.style == "headway":
                line = step_line(step, self.total_steps, flat, sorted(self.added))
            else:
                line = internlm_line(step, flat)
            log.info("%s", line, extra=destination)
            for line in rollout_lines(flat):
                log.info("%s", line, extra=destination)
        if valid:
            log.info("%s", at_start + _pairs(valid), extra=destination)
            if self.bar is not None:
                log.info("step %d  valid: %s", step, _short(valid), extra=SCREEN_ONLY)

        others: dict[str, Value] = {}
        shown = {*SHOWN, *ROLLOUT, *ROLLOUT_UPDATES, *self.added}
        for name, value in flat.items():
            if name not in shown and not name.startswith("valid") and value is not None:
                others[name] = value
        if others:
            log.debug("%s", "  " + _pairs(others))

    def note(self, text: str) -> None:
        """Show a note."""
        log.info("%s", text)

    def event(self, name: Event, text: str, step: int) -> None:
        """Show an event as a warning; start and finish appear only with -v."""
        # The run itself says on the console that it starts and ends.
        if name in ("start", "finish"):
            log.debug("%s: %s", name, text)
        else:
            log.warning("%s at step %d: %s", name.replace("_", " "), step, text)

    def close(self) -> None:
        """Leave the bar; nothing is queued."""
        if self.bar is not None:
            self.bar.status.close()


def step_line(
    step: int,
    total_steps: int | None,
    metrics: Mapping[str, Value],
    added: Sequence[str] = (),
) -> str:
    """The line of one step. Metrics that are absent from the record or unknown are left out.

    `added` are the names of metrics that callbacks add.
    """
    parts = [f"{step}/{total_steps}" if total_steps else f"step {step}"]
    for name, write in (("loss", _loss), ("lr", _rate), ("grad_norm", _norm)):
        if name in metrics:
            parts.append(write(metrics[name]))

    reward = metrics.get("reward")
    if isinstance(reward, (int, float)):
        # The loss of a policy says nothing by itself, so the reward comes first.
        parts.insert(1, f"reward {_number(reward)}")

    for name in added:
        if metrics.get(name) is not None:
            parts.append(f"{name} {_number(metrics[name])}")

    sparsity = metrics.get("sparsity")
    if isinstance(sparsity, (int, float)):
        text = f"sparsity {sparsity:.3f}"
        target = metrics.get("sparsity_target")
        if isinstance(target, (int, float)):
            text += f"/{target:.3f}"
        parts.append(text)

    speed = metrics.get("tokens_per_second")
    if isinstance(speed, (int, float)):
        parts.append(f"{quantity(speed)} tok/s")
    utilisation = _utilisation(metrics.get("mfu_full"), metrics.get("mfu_causal"))
    if utilisation:
        parts.append(utilisation)
    waiting = metrics.get("data_wait_share")
    if isinstance(waiting, (int, float)) and waiting > DATA_WAIT_SHOWN:
        parts.append(f"WAITS FOR DATA {waiting:.0%}")
    memory = metrics.get("memory_bytes")
    if isinstance(memory, (int, float)):
        digits = 0 if memory >= 10e9 else 1
        parts.append(f"{memory / 1e9:.{digits}f} GB")
    eta = metrics.get("eta_seconds")
    if isinstance(eta, (int, float)) and math.isfinite(eta):
        parts.append(f"eta {duration(eta)}")

    # Too long: first with single spaces, then without one part after the other.
    line = "  ".join(parts)
    for droppable in ("", "mfu ", " GB", " tok/s"):
        if len(line) > COLUMNS:
            parts = [part for part in parts if not droppable or droppable not in part]
            line = " ".join(parts)
    return line


def rollout_lines(metrics: Mapping[str, Value]) -> Iterator[str]:
    """What a step with rollouts says besides its reward: what was sampled and learned, and how
    fast. Nothing for other runs."""
    if "rollout/prompts" not in metrics:
        return
    for labels in (ROLLOUT, ROLLOUT_UPDATES):
        parts: list[str] = []
        for name, (label, write) in labels.items():
            value = metrics.get(name)
            if isinstance(value, (int, float)):
                parts.append(f"{label} {write(value)}")
        line = "  " + "  ".join(parts)
        # The last ones are the least important.
        while len(line) > COLUMNS:
            parts.pop()
            line = "  " + "  ".join(parts)
        if parts:
            yield line


def _share(value: float) -> str:
    return f"{value:.0%}"


def _short_number(value: float) -> str:
    return f"{value:.2g}"


def _token_rate(value: float) -> str:
    return f"{quantity(value)} tok/s"


ROLLOUT: dict[str, tuple[str, Callable[[float], str]]] = {
    "entropy": ("entropy", _short_number),
    "kl": ("kl", _short_number),
    "agreement/mean": ("agreement", _short_number),
    "answer/tokens": ("tokens", quantity),
    "answer/cut": ("cut", _share),
    "rollout/no_signal": ("no signal", _share),
}
"""Metrics of the second line of a step with rollouts, with their labels, in order."""
ROLLOUT_UPDATES: dict[str, tuple[str, Callable[[float], str]]] = {
    "rollout_share": ("rollouts", _share),
    "rollout/tokens_per_second": ("sampling", _token_rate),
    "update_tokens_per_second": ("updates", _token_rate),
    "clipped/low": ("clip low", _share),
    "clipped/high": ("clip high", _share),
    "rollout/staleness": ("staleness", quantity),
}
"""The same of the third line: how fast, and how far the weights are from those that sampled."""


def _loss(value: Value) -> str:
    return f"loss {_number(value)}"


def _rate(value: Value) -> str:
    if isinstance(value, (int, float)):
        # 3.0e-4 instead of 3.0e-04.
        return f"lr {value:.1e}".replace("e-0", "e-").replace("e+00", "e0")
    return f"lr {value}"


def _norm(value: Value) -> str:
    if isinstance(value, (int, float)) and math.isfinite(value):
        if value < 1000:
            return f"grad {value:.2f}"
        return f"grad {quantity(value)}"
    return f"grad {value}"


def _utilisation(full: Value, causal: Value) -> str:
    """`mfu full 41% causal 38%`, of what is known."""
    words: list[str] = []
    if isinstance(full, (int, float)):
        words.append(f"full {full:.0%}")
    if isinstance(causal, (int, float)):
        words.append(f"causal {causal:.0%}")
    if words:
        return f"mfu {' '.join(words)}"
    return ""


def _number(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _pairs(metrics: Mapping[str, Value]) -> str:
    return "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def _short(valid: Mapping[str, Value]) -> str:
    """Validation results for a terminal: shorter names, no counts of tokens."""
    shortened: dict[str, Value] = {}
    for name, value in valid.items():
        if not name.endswith("/tokens"):
            shortened[name.removeprefix("valid/")] = value
    return _pairs(shortened)


def internlm_line(step: int, metrics: Mapping[str, Value]) -> str:
    """The line that InternLM's trainer logs for a step: sixteen fields of the flat metrics.

        tflops=190.99,step=2,loss=11.49,tgs (tokens/gpu/second)=4300.69,lr=8e-07,...

    `step` is the number of updates so far, at least 1. A field that the run does not have (beta2
    of an optimizer without one) is None.
    """
    values: dict[str, Value] = {name: metrics.get(key) for name, key in INTERNLM_FIELDS.items()}
    # InternLM counts steps from 0.
    values["step"] = step - 1
    for name in INTERNLM_TWO_DIGITS:
        value = values[name]
        if isinstance(value, float):
            values[name] = round(value, 2)
    return ",".join(f"{name}={value}" for name, value in values.items())
