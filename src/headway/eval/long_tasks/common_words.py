"""A numbered list in which ten words stand far more often than the others: which are they?"""

import random

from headway.eval.long_tasks._words import ADJECTIVES, NOUNS
from headway.eval.long_tasks.base import Case

COMMON = 10


def write(rng: random.Random, units: int, depth: float) -> Case:
    """`units` words and forty more: each common one makes up a twentieth of them, all others together the rest."""
    words = [*NOUNS, *ADJECTIVES]
    rng.shuffle(words)
    common, rare = words[:COMMON], words[COMMON:]
    total = units + 40
    listed = [word for word in common for _ in range(total // 20)]
    listed += [rare[index % len(rare)] for index in range(total - len(listed))]
    rng.shuffle(listed)
    lines = " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
    opening = "Below is a numbered list of words. Some of them appear more often than others. Memorize those that appear most often.\n"
    start = "The 10 most common words are:"
    question = f"What are the 10 most common words in the above list? {start}"
    return Case(f"{opening}{lines}\n{question}", tuple(common), None, answer_start=start)
