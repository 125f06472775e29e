"""All of the four numbers that one name has."""

import random

from headway.eval.long_tasks._needle import case, needle
from headway.eval.long_tasks._words import keys, noise, numbers
from headway.eval.long_tasks.base import Case, placed

VALUES = 4


def write(rng: random.Random, units: int, depth: float) -> Case:
    """Needles of one name among `units` sentences; the first at the depth, the others anywhere."""
    (key,), values = keys(rng, 1), numbers(rng, VALUES)
    lines = placed(rng, noise(rng, units), [needle(key, value) for value in values], depth)
    return case(lines, key, values, depth)
