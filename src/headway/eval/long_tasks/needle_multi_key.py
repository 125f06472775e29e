"""One number to find among many that look the same and belong to other names."""

import random

from headway.eval.long_tasks._needle import case, needle
from headway.eval.long_tasks._words import keys, numbers
from headway.eval.long_tasks.base import Case, placed


def write(rng: random.Random, units: int, depth: float) -> Case:
    """One needle among `units` other needles."""
    (key, *others), (value, *wrong) = keys(rng, units + 1), numbers(rng, units + 1)
    filler = [needle(*pair) for pair in zip(others, wrong, strict=True)]
    return case(placed(rng, filler, [needle(key, value)], depth), key, [value], depth)
