"""What a run has achieved, in a few lines at its end.

In: its summary and samples; out: lines for the screen and train.log.

validation loss: 2.3104 before, 1.9012 best (step 30), 1.9100 last
1,234 tokens/s, 1.2 GB of memory at most
held-out prompt: Describe a process of making crepes.
  before: ...
  after:  ...
"""

from __future__ import annotations

import logging
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.runtime.log import FILE_ONLY, SCREEN_ONLY
from headway.runtime.output import Lossy
from headway.runtime.progress import quantity
from headway.runtime.status_line import screen_width
from headway.train.samples import Answer, HeldOutPrompt

log = logging.getLogger("headway")

COLUMNS = 100
"""Where the width of the screen is not known."""
MIN_COLUMNS = 20
"""A text gets so many, however narrow the screen is."""
TEXT_LINES = 3
"""Of an answer on the screen; train.log and samples.json have all of it."""
CUT = " ..."
NAMES = {"loss": "loss", "rewards/accuracies": "accuracy", "reward": "reward"}
"""Metrics as the lines call them."""


def close_with(summary: Mapping[str, Any], samples: Sequence[HeldOutPrompt]) -> None:
    """Log what the run has achieved."""
    for line in [*validation_lines(summary["validation"]), *speed_lines(summary)]:
        log.info("%s", line)
    # train.log gets whole texts; on the screen an answer has a few lines.
    width = screen_width(Lossy(sys.stderr), COLUMNS)
    for sample in samples:
        for label, text in _labelled(sample):
            log.info("%s%s", label, text, extra=FILE_ONLY)
            for line in fold(text, label, width):
                log.info("%s", line, extra=SCREEN_ONLY)


def validation_lines(validation: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """One line for each validation set and metric: before, best and last."""
    for name, metrics in validation.items():
        of_set = ""
        if len(validation) != 1:
            of_set = f" of {name}"
        for metric, span in metrics.items():
            before = span["before"]
            parts: list[str] = []
            if before is not None:
                parts.append(f"{before:.4f} before")
            if span["best"] is not None:
                parts.append(f"{span['best']:.4f} best (step {span['best_step']})")
            # JSON has no nan: a metric that was no number is null.
            if span["last"] is not None:
                parts.append(f"{span['last']:.4f} last")
            else:
                parts.append("not a number last")
            line = f"validation {NAMES[metric]}{of_set}: {', '.join(parts)}"
            if before is not None and not span["improved"]:
                line += "; never better than before"
            yield line


def speed_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Tokens per second and memory, as far as they are known."""
    parts: list[str] = []
    if summary["tokens_per_second"]:
        parts.append(f"{quantity(summary['tokens_per_second'])} tokens/s")
    if summary["peak_memory_bytes"]:
        parts.append(f"{summary['peak_memory_bytes'] / 1e9:.1f} GB of memory at most")
    if parts:
        yield ", ".join(parts)
    share = summary.get("rollout_share")
    if share is not None:
        yield f"rollouts and rewards took {share:.0%} of the time"


def _labelled(sample: HeldOutPrompt) -> Iterator[tuple[str, str]]:
    yield "held-out prompt: ", plain(sample.prompt)
    yield "  before: ", _answer_text(sample.before)
    yield "  after:  ", _answer_text(sample.after)


def _answer_text(answer: Answer | None) -> str:
    if answer is None:
        return "(not known: the run was resumed from one without samples)"
    text = plain(answer.text) or "(nothing)"
    if answer.was_cut:
        return text + CUT
    return text


def plain(text: str) -> str:
    """A text in one line, without characters that would do something to a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def fold(text: str, label: str, width: int) -> list[str]:
    """A text in lines of at most `width` columns, the first after its label.

    What is beyond the last line is left out.
    """
    room = max(MIN_COLUMNS, width - len(label) - 1)
    lines: list[str] = []
    while text and len(lines) < TEXT_LINES:
        end = _fitting(text, room)
        is_last = len(lines) == TEXT_LINES - 1
        if is_last and end < len(text):
            end = _fitting(text, room - len(CUT))
            lines.append(text[:end].rstrip() + CUT)
            break
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()

    first, *others = lines or [""]
    margin = " " * len(label)
    return [label + first, *(margin + line for line in others)]


def _fitting(text: str, room: int) -> int:
    """How many letters fit into so many columns: whole words where there are any.

    A Chinese letter takes two columns.
    """
    used = 0
    last_space = 0
    for index, letter in enumerate(text):
        used += 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if used > room:
            # A word that is longer than a line is cut; one letter always fits, or nothing would.
            return last_space or max(1, index)
        if letter == " ":
            last_space = index + 1
    return len(text)
