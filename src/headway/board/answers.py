"""What a board says to a request of its page: a name and a query come in; bytes and their type go
out, or a BadRequest with one line.

Curves are packed: 4 bytes with the length of a JSON head, the head, spaces to a multiple of 8, then
float64 numbers, little-endian. Numbers in JSON would cost ten times the processor time on both
sides.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from headway.board.curves import X_AXES, Window, XAxis
from headway.board.details import read_details, read_log, read_picture
from headway.board.downsample import MAX_POINTS, Curve
from headway.board.rollouts import ORDERS, RolloutOrder
from headway.board.watch import Board, WatchedRun

MAX_SERIES = 1000
JSON_TYPE = "application/json"
PACKED_TYPE = "application/octet-stream"
Query = dict[str, list[str]]


class BadRequest(Exception):
    """A request that cannot be answered; the message says why."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def answer(board: Board, name: str, query: Query) -> tuple[bytes, str]:
    """The content and type of the answer to /api/NAME."""
    if name not in ANSWERS:
        raise BadRequest("There is no such address.", 404)
    return ANSWERS[name](board, query)


def as_json(value: Any) -> bytes:
    """JSON that a browser reads: numbers it cannot hold are texts.

    Names of runs may be bytes that are no text: surrogates are escaped.
    """
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )


def _plain(value: Any) -> Any:
    """A value without what JSON does not have: numbers that are not finite, keys and objects of
    other types.
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    # Paths, dates and the like become text.
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


def pack(head: dict[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """A JSON head and numbers, in the form that the module describes."""
    text = as_json(head)
    # JavaScript reads a Float64Array in place only from a multiple of 8 bytes on.
    text += b" " * (-(len(text) + 4) % 8)
    numbers = b"".join(np.ascontiguousarray(array, dtype="<f8").tobytes() for array in arrays)
    return struct.pack("<I", len(text)) + text + numbers


def curve_head(curve: Curve) -> dict[str, Any]:
    """The lengths of a curve's parts, in the order in which they are packed."""
    return {
        "n": len(curve.x),
        "means": len(curve.mean_x),
        "bad": len(curve.not_finite_x),
        "total": curve.total,
    }


def curve_arrays(curve: Curve) -> list[np.ndarray]:
    """The numbers of a curve, in the order in which they are packed."""
    return [curve.x, curve.y, curve.mean_x, curve.mean_y, curve.not_finite_x]


def series(board: Board, query: Query) -> tuple[bytes, str]:
    """Curves of several runs and metrics in one window."""
    runs = board.want(query.get("run", []))
    metrics = query.get("metric", [])
    window = _window(query)
    # A page asks for what is on the screen; more is a mistake or an attack.
    if len(runs) * len(metrics) > MAX_SERIES:
        raise BadRequest(
            f"{len(runs)} runs x {len(metrics)} metrics; at most "
            f"{MAX_SERIES} curves are sent at once."
        )

    heads: list[dict[str, Any]] = []
    arrays: list[np.ndarray] = []
    for run in runs:
        for metric in metrics:
            # Before the curve is made: one that grows meanwhile is asked for once more, not once
            # too little.
            version = run.curves.version
            is_partial = run.curves.is_partial
            curve = run.curves.view(metric, window)
            heads.append(
                {
                    "run": run.id,
                    "metric": metric,
                    "version": version,
                    "partial": is_partial,
                    **curve_head(curve),
                }
            )
            arrays += curve_arrays(curve)

    return pack({"series": heads}, arrays), PACKED_TYPE


def _window(query: Query) -> Window:
    """The part of the curves that is asked for."""
    x = query.get("x", ["step"])[0]
    if x not in X_AXES:
        raise BadRequest(f"x is {x[:40]!r}; it must be one of {', '.join(X_AXES)}.")
    points = _number(query, "points", 1000.0)
    if points is None or not 4 <= points <= MAX_POINTS:
        raise BadRequest(f"points must be between 4 and {MAX_POINTS}.")
    return Window(cast(XAxis, x), int(points), _number(query, "from"), _number(query, "to"))


def _number(query: Query, name: str, default: float | None = None) -> float | None:
    """A finite number of a query."""
    if name not in query:
        return default
    try:
        number = float(query[name][0])
    except ValueError:
        raise BadRequest(f"{name} is {query[name][0][:40]!r}; it must be a number.") from None
    if not math.isfinite(number):
        raise BadRequest(f"{name} must be finite.")
    return number


def state(board: Board, query: Query) -> tuple[bytes, str]:
    """Runs that changed since a version."""
    return as_json(board.rows(int(_number(query, "since", 0.0) or 0))), JSON_TYPE


def metrics(board: Board, query: Query) -> tuple[bytes, str]:
    """The metrics of some runs and how many values each has."""
    counts: dict[str, int] = {}
    for run in board.want(query.get("run", [])):
        for name, count in run.curves.names().items():
            counts[name] = max(counts.get(name, 0), count)
    return as_json(counts), JSON_TYPE


def _one_run(board: Board, query: Query) -> WatchedRun:
    """The run that a request is about; its curves are kept up to date from now on."""
    runs = board.want(query.get("run", [])[:1])
    if not runs:
        raise BadRequest("There is no such run.", 404)
    return runs[0]


def details(board: Board, query: Query) -> tuple[bytes, str]:
    """Everything about a run but its curves and its log."""
    return as_json(read_details(_one_run(board, query).folder)), JSON_TYPE


def log_tail(board: Board, query: Query) -> tuple[bytes, str]:
    """The end of a run's log."""
    return as_json({"text": read_log(_one_run(board, query).folder)}), JSON_TYPE


def rollouts(board: Board, query: Query) -> tuple[bytes, str]:
    """What a run has sampled: distributions of all batches, and a page of answers."""
    order = query.get("order", ["sampled"])[0]
    if order not in ORDERS:
        raise BadRequest(f"order is {order[:40]!r}; it must be one of {', '.join(ORDERS)}.")
    batch = _number(query, "batch")
    first = _number(query, "from", 0.0) or 0.0
    run = _one_run(board, query)
    view = run.rollouts.view(
        cast(RolloutOrder, order), None if batch is None else int(batch), max(0, int(first))
    )
    return as_json(view), JSON_TYPE


def picture(board: Board, query: Query) -> tuple[bytes, str]:
    """A picture of a run, by the name that its details give."""
    content_and_type = read_picture(_one_run(board, query).folder, query.get("path", [""])[0])
    if content_and_type is None:
        raise BadRequest("There is no such picture.", 404)
    return content_and_type


ANSWERS: dict[str, Callable[[Board, Query], tuple[bytes, str]]] = {
    "state": state,
    "series": series,
    "metrics": metrics,
    "details": details,
    "log": log_tail,
    "rollouts": rollouts,
    "file": picture,
}
