"""Long-context tasks: prompts whose answer is far back in the text. Everything is generated from a seed; no file is read.

A task is a function `write_NAME(rng, units, depth) -> Case` here, listed in TASKS. The same rng and units give the same text; more units
give a longer one. `depth` 0..1 is where the answer stands (a task with several places sets `Case.depth` to None). Prompts end in the
beginning of the answer, so that models which were never trained to chat answer too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.errors import ConfigError

LEAST_UNITS = 4


@dataclass(frozen=True)
class Case:
    """One question."""

    prompt: str
    answers: tuple[str, ...]
    """Strings expected in the model's answer; the score is the share found."""
    depth: float | None
    """Where the answer is, from 0 (the beginning) to 1 (the end); None = in many places."""
    stop: tuple[str, ...] = ()
    """The answer ends before one of these."""
    answer_start: str = ""
    """How the prompt ends: the beginning of the answer, which in a chat is the assistant's."""

    @property
    def question(self) -> str:
        """The prompt without the beginning of the answer: what a user asks in a chat."""
        return self.prompt[: len(self.prompt) - len(self.answer_start)].rstrip()

    def score(self, text: str) -> float:
        """Share of the answers that a text holds."""
        lower = text.lower()
        return sum(answer.lower() in lower for answer in self.answers) / len(self.answers)


Write = Callable[[random.Random, int, float], Case]


def task_names() -> list[str]:
    """All tasks, by name."""
    return sorted(TASKS)


def find_task(name: str) -> Write:
    """The writer of a task."""
    if name not in TASKS:
        raise ConfigError(f"--tasks holds {name!r}; there are {', '.join(task_names())}.")
    return TASKS[name]


def smallest(task: str, depth: float, seed: Sequence[float | str]) -> Case:
    """The shortest case of a task: its answers are as long as those of longer ones."""
    return find_task(task)(random.Random(_key(task, seed)), LEAST_UNITS, depth)


def _key(task: str, seed: Sequence[float | str]) -> str:
    return "-".join(map(str, (task, *seed)))


def fit(
    task: str,
    count: Callable[[Case], int],
    length: int,
    depth: float,
    seed: Sequence[float | str],
    room: int = 0,
) -> tuple[Case, int]:
    """The longest case that leaves `room` in `length` tokens as `count` counts them, and its tokens; the same for the same seed."""
    write = find_task(task)
    key = _key(task, seed)

    def made(units: int) -> tuple[Case, int]:
        case = write(random.Random(key), units, depth)
        return case, count(case)

    units = LEAST_UNITS
    best, tokens = made(units)
    if tokens + room > length:
        raise ConfigError(
            f"--lengths holds {length}; {task} needs at least {tokens + room} tokens with this tokenizer. Give a greater length."
        )
    length -= room
    per_unit = max(0.25, (made(2 * LEAST_UNITS)[1] - tokens) / LEAST_UNITS)
    for _ in range(8):
        step = int((length - tokens) / per_unit)
        if step < 1:
            break
        while step >= 1:
            case, found = made(units + step)
            if found <= length:
                per_unit = max(0.25, (found - tokens) / step)
                units, best, tokens = units + step, case, found
                break
            step = min(step - 1, int(step * 0.97 - (found - length) / per_unit))
        else:
            break
    return best, tokens


def placed(rng: random.Random, filler: list[str], needles: list[str], depth: float) -> list[str]:
    """Filler with the first needle at a depth and the others at random places."""
    lines = list(filler)
    for needle in needles[1:]:
        lines.insert(rng.randint(0, len(lines)), needle)
    lines.insert(round(depth * len(lines)), needles[0])
    return lines


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
    """Distinct names such as `amber-anchor`."""
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


INTRODUCTION = "Some special magic numbers are hidden in the following text. Remember them; there is a question about them at the end.\n"


def needle(key: str, value: str) -> str:
    """The sentence that hides a number."""
    return f"One of the special magic numbers for {key} is: {value}."


def case(lines: list[str], asked: str, values: Sequence[str], depth: float) -> Case:
    """Introduction, text, question and the beginning of the answer."""
    numbers, are = ("numbers", "are") if len(values) > 1 else ("number", "is")
    question = f"What {are} the special magic {numbers} for {asked} mentioned in the text?"
    start = f"The special magic {numbers} for {asked} mentioned in the text {are}"
    return Case(
        f"{INTRODUCTION}{' '.join(lines)}\n{question} {start}",
        tuple(values),
        depth,
        answer_start=start,
    )


def write_passkey(rng: random.Random, units: int, depth: float) -> Case:
    """A pass key in noise, in the words such tests are known by. The key among `units` sentences."""
    (key,) = numbers(rng, 1, digits=5)
    lines = placed(
        rng,
        noise(rng, units),
        [f"The pass key is {key}. Remember it. {key} is the pass key."],
        depth,
    )
    opening = "There is important information hidden inside a lot of irrelevant text. Find it and memorize it.\n"
    start = "The pass key is"
    return Case(
        f"{opening}{' '.join(lines)}\nWhat is the pass key? {start}", (key,), depth, ("\n",), start
    )


VALUE_DIGITS = 3


def pairs(rng: random.Random, number: int) -> list[tuple[str, str]]:
    """Different keys, each with a number; the keys of a short table are single words."""
    words = [*ADJECTIVES, *NOUNS]
    names = rng.sample(words, number) if number <= len(words) else keys(rng, number)
    return [
        (name, str(rng.randrange(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS))) for name in names
    ]


def table(lines: list[tuple[str, str]]) -> str:
    """One line per pair."""
    return "".join(f"{key}={value}\n" for key, value in lines)


def write_key_value(rng: random.Random, units: int, depth: float) -> Case:
    """A table of keys and values; the question is the value of one key. The form is bare (`key=value`), so that small models can learn it.

    A table of `units` lines; the question is about the line at the depth.
    """
    lines = pairs(rng, units)
    at = round(depth * (units - 1))
    key, value = lines[at]
    return Case(f"{table(lines)}{key}=", (value,), at / max(1, units - 1), stop=("\n",))


def write_needle_single(rng: random.Random, units: int, depth: float) -> Case:
    """One number hidden in noise. One needle among `units` sentences."""
    (key,), (value,) = keys(rng, 1), numbers(rng, 1)
    return case(placed(rng, noise(rng, units), [needle(key, value)], depth), key, [value], depth)


def write_needle_multi_key(rng: random.Random, units: int, depth: float) -> Case:
    """One number to find among many that look the same and belong to other names. One needle among `units` other needles."""
    (key, *others), (value, *wrong) = keys(rng, units + 1), numbers(rng, units + 1)
    filler = [needle(*pair) for pair in zip(others, wrong, strict=True)]
    return case(placed(rng, filler, [needle(key, value)], depth), key, [value], depth)


QUERIES = 4


def write_needle_multi_query(rng: random.Random, units: int, depth: float) -> Case:
    """The numbers of four names, in one question.

    Needles of several names among `units` sentences; the first at the depth, the others anywhere.
    """
    names, values = keys(rng, QUERIES), numbers(rng, QUERIES)
    lines = placed(
        rng, noise(rng, units), [needle(*pair) for pair in zip(names, values, strict=True)], depth
    )
    return case(lines, ", ".join(names[:-1]) + f" and {names[-1]}", values, depth)


VALUES = 4


def write_needle_multi_value(rng: random.Random, units: int, depth: float) -> Case:
    """All of the four numbers that one name has.

    Needles of one name among `units` sentences; the first at the depth, the others anywhere.
    """
    (key,), values = keys(rng, 1), numbers(rng, VALUES)
    lines = placed(rng, noise(rng, units), [needle(key, value) for value in values], depth)
    return case(lines, key, values, depth)


HOPS, CHAINS = 4, 2
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def write_variable_tracking(rng: random.Random, units: int, depth: float) -> Case:
    """A chain of assignments in noise: which variables hold the first one's number?

    Two chains in their order among `units` sentences; the question is about the first.
    """
    names: dict[str, None] = {}
    while len(names) < CHAINS * (HOPS + 1):
        names["".join(rng.choices(LETTERS, k=5))] = None
    values = numbers(rng, CHAINS, digits=5)
    chains = [list(names)[chain * (HOPS + 1) : (chain + 1) * (HOPS + 1)] for chain in range(CHAINS)]
    lines = noise(rng, units)
    places = sorted(
        (rng.randint(0, units), chain, hop) for chain in range(CHAINS) for hop in range(HOPS + 1)
    )
    upcoming = [
        iter(_assignments(chain, value)) for chain, value in zip(chains, values, strict=True)
    ]
    for shift, (place, chain, _) in enumerate(places):
        lines.insert(place + shift, next(upcoming[chain]))
    opening = "Memorize and track the chain of variable assignments hidden in the following text.\n"
    question = (
        f"Find all variables that are assigned the value {values[0]} in the text above. They are:"
    )
    return Case(
        f"{opening}{' '.join(lines)}\n{question}", tuple(chains[0]), None, answer_start="They are:"
    )


def _assignments(chain: list[str], value: str) -> list[str]:
    first = f"VAR {chain[0]} = {value}"
    return [first, *(f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(chain))]


COMMON = 10


def write_common_words(rng: random.Random, units: int, depth: float) -> Case:
    """A numbered list in which ten words occur far more often than the others: which are they?

    `units` words and forty more: each common one makes up a twentieth of them, all others together the rest.
    """
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


TASKS: dict[str, Write] = {
    "common_words": write_common_words,
    "key_value": write_key_value,
    "needle_multi_key": write_needle_multi_key,
    "needle_multi_query": write_needle_multi_query,
    "needle_multi_value": write_needle_multi_value,
    "needle_single": write_needle_single,
    "passkey": write_passkey,
    "variable_tracking": write_variable_tracking,
}
