"""One number hidden in noise."""

import random

from headway.eval.long_tasks._needle import case, needle
from headway.eval.long_tasks._words import keys, noise, numbers
from headway.eval.long_tasks.base import Case, placed


def write(rng: random.Random, units: int, depth: float) -> Case:
    """One needle among `units` sentences."""
    (key,), (value,) = keys(rng, 1), numbers(rng, 1)
    return case(placed(rng, noise(rng, units), [needle(key, value)], depth), key, [value], depth)
