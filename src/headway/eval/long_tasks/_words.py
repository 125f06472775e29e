"""Words and numbers that prompts are made of."""

from __future__ import annotations

import random

ADJECTIVES = (
    "amber", "ancient", "bitter", "bold", "brave", "brief", "bright", "broad", "calm", "careful", "clever", "cold", "cosmic", "crisp",
    "curious", "daring", "deep", "distant", "dusty", "eager", "early", "elegant", "faint", "fancy", "fierce", "final", "fond",
    "fresh", "gentle", "giant", "golden", "grand", "grey", "happy", "hidden", "hollow", "honest", "humble", "icy", "jolly", "keen",
    "large", "late", "lively", "lonely", "loud", "lucky", "mellow", "merry", "mild", "narrow", "noble", "odd", "pale", "patient",
    "plain", "polite", "proud", "quick", "quiet", "rapid", "rare", "red", "rough", "royal",
)  # fmt: skip
NOUNS = (
    "anchor", "apple", "arrow", "badge", "barrel", "basket", "beacon", "bell", "bench", "bird", "blanket", "boat", "book", "bottle",
    "branch", "bridge", "brush", "bucket", "cabin", "candle", "canyon", "castle", "chair", "clock", "cloud", "coast", "coin", "comet",
    "copper", "corner", "cotton", "cradle", "crown", "desert", "dragon", "drum", "eagle", "engine", "feather", "fence", "field",
    "flag", "flute", "forest", "fountain", "garden", "gate", "glove", "hammer", "harbor", "hill", "horse", "island", "jacket",
    "kettle", "key", "ladder", "lake", "lamp", "lantern", "lemon", "letter", "lighthouse", "magnet", "map", "marble", "meadow",
    "mirror", "mountain", "needle", "ocean", "orchard", "paper", "pearl", "pencil", "piano", "pillow", "planet", "pocket", "pond",
    "rabbit", "river", "road", "robin", "rocket", "rope", "saddle", "sail", "salt", "shadow", "shell", "shield", "silver", "spoon",
    "stone", "storm", "table", "temple", "thread", "tiger", "torch", "tower", "train", "tree", "trumpet", "tunnel", "valley",
    "velvet", "violin", "wagon", "wheel", "whistle", "window", "winter", "wolf",
)  # fmt: skip
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
    "The road is long and the day is short.",
    "A light rain fell over the hills.",
    "Nobody was at the station.",
)


def keys(rng: random.Random, number: int) -> list[str]:
    """Different names, `amber-anchor` and the like."""
    size, found = len(ADJECTIVES) * len(NOUNS), []
    for turn in range(-(-number // size)):
        for index in rng.sample(range(size), min(size, number - len(found))):
            pair = f"{ADJECTIVES[index // len(NOUNS)]}-{NOUNS[index % len(NOUNS)]}"
            found.append(f"{pair}-{turn}" if turn else pair)
    return found


def numbers(rng: random.Random, number: int, digits: int = 7) -> list[str]:
    """Different numbers of as many digits."""
    found: dict[str, None] = {}
    while len(found) < number:
        found[str(rng.randint(10 ** (digits - 1), 10**digits - 1))] = None
    return list(found)


def noise(rng: random.Random, number: int) -> list[str]:
    """Sentences that mean nothing."""
    return [rng.choice(NOISE) for _ in range(number)]
