"""A pass key in noise, in the words such tests are known by."""

import random

from headway.eval.long_tasks._words import noise, numbers
from headway.eval.long_tasks.base import Case, placed


def write(rng: random.Random, units: int, depth: float) -> Case:
    """The key among `units` sentences."""
    (key,) = numbers(rng, 1, digits=5)
    lines = placed(rng, noise(rng, units), [f"The pass key is {key}. Remember it. {key} is the pass key."], depth)
    opening = "There is important information hidden inside a lot of irrelevant text. Find it and memorize it.\n"
    start = "The pass key is"
    return Case(f"{opening}{' '.join(lines)}\nWhat is the pass key? {start}", (key,), depth, ("\n",), start)
