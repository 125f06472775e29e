"""The numbers of four names, asked for at once."""

import random

from headway.eval.long_tasks._needle import case, needle
from headway.eval.long_tasks._words import keys, noise, numbers
from headway.eval.long_tasks.base import Case, placed

QUERIES = 4


def write(rng: random.Random, units: int, depth: float) -> Case:
    """Needles of several names among `units` sentences; the first at the depth, the others anywhere."""
    names, values = keys(rng, QUERIES), numbers(rng, QUERIES)
    lines = placed(rng, noise(rng, units), [needle(*pair) for pair in zip(names, values, strict=True)], depth)
    return case(lines, ", ".join(names[:-1]) + f" and {names[-1]}", values, depth)
