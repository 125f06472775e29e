"""A chain of assignments in noise: which variables hold the first one's number?"""

import itertools
import random

from headway.eval.long_tasks._words import noise, numbers
from headway.eval.long_tasks.base import Case

HOPS, CHAINS = 4, 2
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def write(rng: random.Random, units: int, depth: float) -> Case:
    """Two chains in their order among `units` sentences; the first is asked for."""
    names: dict[str, None] = {}
    while len(names) < CHAINS * (HOPS + 1):
        names["".join(rng.choices(LETTERS, k=5))] = None
    values = numbers(rng, CHAINS, digits=5)
    chains = [list(names)[chain * (HOPS + 1) : (chain + 1) * (HOPS + 1)] for chain in range(CHAINS)]
    lines = noise(rng, units)
    places = sorted((rng.randint(0, units), chain, hop) for chain in range(CHAINS) for hop in range(HOPS + 1))
    upcoming = [iter(_assignments(chain, value)) for chain, value in zip(chains, values, strict=True)]
    for shift, (place, chain, _) in enumerate(places):
        lines.insert(place + shift, next(upcoming[chain]))
    opening = "Memorize and track the chain of variable assignments hidden in the following text.\n"
    question = f"Find all variables that are assigned the value {values[0]} in the text above. They are:"
    return Case(f"{opening}{' '.join(lines)}\n{question}", tuple(chains[0]), None, answer_start="They are:")


def _assignments(chain: list[str], value: str) -> list[str]:
    first = f"VAR {chain[0]} = {value}"
    return [first, *(f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(chain))]
