"""A long curve comes in; at most `points` points go out that look the same on a screen: the lowest
and the highest of each bucket.

A spike of one step stays visible at any zoom, and every point that is sent is a point of the file.
Where the window holds no more points than may be sent, all of them are: at full zoom the board
shows the exact numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_POINTS = 2000
"""Of a curve; a screen has about as many columns."""
MAX_MARKS = 200
"""Of values that are not finite."""


@dataclass(frozen=True)
class Curve:
    """What is drawn of a curve in a window: chosen points, means of buckets, and where there is no
    number.
    """

    x: np.ndarray
    y: np.ndarray
    mean_x: np.ndarray
    """Middle of each bucket and its mean, for smoothing; empty where every point is sent."""
    mean_y: np.ndarray
    not_finite_x: np.ndarray
    """Where values are NaN or infinite, MAX_MARKS at most."""
    total: int
    """Points in the window, before down-sampling."""


def downsample(
    x: np.ndarray,
    y: np.ndarray,
    points: int = MAX_POINTS,
    start: float | None = None,
    end: float | None = None,
) -> Curve:
    """The curve in a window, with the nearest point on either side so that lines leave the picture
    rather than end in it.
    """
    points = max(4, min(points, MAX_POINTS))
    # Steps fall back where a run was rolled back.
    if len(x) and np.any(np.diff(x) < 0):
        order = np.argsort(x, kind="stable")
        x = x[order]
        y = y[order]

    first = 0
    if start is not None:
        first = max(0, int(np.searchsorted(x, start, "left")) - 1)

    last = len(x)
    if end is not None:
        last = min(len(x), int(np.searchsorted(x, end, "right")) + 1)

    x = x[first:last]
    y = y[first:last]
    finite = np.isfinite(y)
    not_finite = x[~finite]
    if len(not_finite) > MAX_MARKS:
        not_finite = not_finite[np.linspace(0, len(not_finite) - 1, MAX_MARKS).astype(np.int64)]

    total = len(x)
    if len(not_finite):
        x = x[finite]
        y = y[finite]

    none = np.empty(0)
    if len(x) <= points:
        return Curve(x, y, none, none, not_finite, total)

    chosen, means = _extremes(x, y, points // 2)
    return Curve(x[chosen], y[chosen], means[0], means[1], not_finite, total)


def _extremes(
    x: np.ndarray, y: np.ndarray, buckets: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Indices of the lowest and highest point of each bucket, in order, and the mean of each
    bucket. The two ends are always there.
    """
    # `count` full buckets of `size` points, and a shorter one of what is left.
    size = -(-len(y) // buckets)
    count = len(y) // size
    body = y[: count * size].reshape(count, size)
    base = np.arange(count) * size
    picked = [base + body.argmin(axis=1), base + body.argmax(axis=1), np.array([0, len(y) - 1])]
    mean_x = x[: count * size].reshape(count, size).mean(axis=1)
    mean_y = body.mean(axis=1)
    if tail_size := len(y) - count * size:
        tail = y[count * size :]
        picked.append(count * size + np.array([tail.argmin(), tail.argmax()]))
        # A short last bucket is as noisy as it is short; it counts for the mean only from half a
        # bucket on.
        if 2 * tail_size >= size or count == 0:
            mean_x = np.append(mean_x, x[count * size :].mean())
            mean_y = np.append(mean_y, tail.mean())

    # Sorted, and once where a bucket's lowest point is its highest.
    return np.unique(np.concatenate(picked)), (mean_x, mean_y)
