"""Long-context tasks: prompts whose answer is far back in the text.

Everything is generated from a seed; no file is read.

A task is a function `write_NAME(rng, units, depth) -> Case` here, listed in TASKS. The same rng and
units give the same text; more units give a longer one. Prompts end in the beginning of the answer,
so that models which were never trained to chat answer too.

`depth` 0..1 is where the answer stands; of several needles, where the first one stands. A task
whose answer has no place of this kind ignores it and sets `Case.depth` to None.

Stored results (long_context.py) are found by the plan, not by the prompts: a change of a text here
does not make them invalid.

The needle, variable and word tasks are of the kinds of RULER (Hsieh et al. 2024, arXiv 2404.06654).
Their words and sizes are headway's; ruler.py has RULER's own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.errors import ConfigError

LEAST_UNITS = 4
LEAST_TOKENS_PER_UNIT = 0.25
"""Keeps the steps of `fit` finite where more units hardly make a text longer."""
MAX_FIT_STEPS = 8


@dataclass(frozen=True)
class Case:
    """One question."""

    prompt: str
    answers: tuple[str, ...]
    """Strings expected in the model's answer; the score is the share found."""
    depth: float | None
    """Where the answer, or the first of several needles, is: from 0 (the beginning) to 1 (the end).
    None: the task has no such place.
    """
    stop: tuple[str, ...] = ()
    """The answer ends before one of these."""
    answer_start: str = ""
    """How the prompt ends: the beginning of the answer, which in a chat is the assistant's."""
    any_answer: bool = False
    """One of the answers is enough: the score is 1 where any is found."""

    @property
    def question(self) -> str:
        """The prompt without the beginning of the answer: what a user asks in a chat."""
        return self.prompt[: len(self.prompt) - len(self.answer_start)].rstrip()

    def score(self, text: str) -> float:
        """Share of the answers that a text holds."""
        # Models write answers with capitals of their own.
        lower = text.lower()
        found = [answer.lower() in lower for answer in self.answers]
        if self.any_answer:
            return float(any(found))
        return sum(found) / len(found)


Write = Callable[[random.Random, int, float], Case]


@dataclass(frozen=True)
class Generator:
    """How cases of a task are made."""

    write: Write
    least_units: int = LEAST_UNITS
    answer_tokens: int | None = None
    """Tokens that an answer may have; None: as many as the expected answers need."""
    most_units: int | None = None
    """What the texts that cases are made of are enough for; None: for any."""


def task_names() -> list[str]:
    """All tasks, by name."""
    return sorted(TASKS)


def find_task(name: str) -> Write:
    """The writer of a task."""
    if name not in TASKS:
        raise ConfigError(f"--tasks holds {name!r}; there are {', '.join(task_names())}.")
    return TASKS[name]


def smallest(
    task: str, depth: float, seed: Sequence[float | str], generator: Generator | None = None
) -> Case:
    """The shortest case of a task: its answers are as long as those of longer ones."""
    if generator is None:
        generator = Generator(find_task(task))
    return generator.write(random.Random(_key(task, seed)), generator.least_units, depth)


def _key(task: str, seed: Sequence[float | str]) -> str:
    return "-".join(map(str, (task, *seed)))


def fit(
    task: str,
    count: Callable[[Case], int],
    length: int,
    depth: float,
    seed: Sequence[float | str],
    room: int = 0,
    generator: Generator | None = None,
) -> tuple[Case, int]:
    """About the longest case that leaves `room` in `length` tokens, and its number of tokens.

    `count` counts the tokens of a case. Counting takes long, so the units are estimated from the
    tokens per unit so far, and corrected a few times. The same seed gives the same case.
    `generator`: of a task that is not in TASKS.
    """
    if generator is None:
        generator = Generator(find_task(task))
    write = generator.write
    key = _key(task, seed)

    def write_units(units: int) -> tuple[Case, int]:
        case = write(random.Random(key), units, depth)
        return case, count(case)

    least = generator.least_units
    units = least
    best, tokens = write_units(units)
    if tokens + room > length:
        raise ConfigError(
            f"--lengths holds {length}; {task} needs at least {tokens + room} tokens with this "
            "tokenizer. Give a greater length."
        )

    limit = length - room
    _, more_tokens = write_units(2 * least)
    per_unit = max(LEAST_TOKENS_PER_UNIT, (more_tokens - tokens) / least)
    for _ in range(MAX_FIT_STEPS):
        step = int((limit - tokens) / per_unit)
        if generator.most_units is not None:
            step = min(step, generator.most_units - units)
        if step < 1:
            break
        while step >= 1:
            case, case_tokens = write_units(units + step)
            if case_tokens <= limit:
                per_unit = max(LEAST_TOKENS_PER_UNIT, (case_tokens - tokens) / step)
                units = units + step
                best = case
                tokens = case_tokens
                break
            # Too long: back by the excess and 3 %, so that the next one most likely fits.
            step = min(step - 1, int(step * 0.97 - (case_tokens - limit) / per_unit))
        else:
            break
    if units == generator.most_units:
        raise ConfigError(
            f"--lengths holds {length}; {task} fills only {tokens + room} tokens with the files "
            "there are. Give a smaller length, or more files (docs/long-context.md)."
        )
    return best, tokens


def cut_to_fit(
    whole: Case,
    encode: Callable[[], list[int]],
    cut: Callable[[list[int], int], Case],
    count: Callable[[Case], int],
    limit: int,
    least: int,
) -> Case | None:
    """A case whose text is cut until it has at most `limit` tokens; None where fewer than `least`
    tokens of the text would stay.

    `encode` gives the ids of the text, `cut` the case with so many of them. `count` counts a case
    with all that stands around its prompt.
    """
    case = whole
    tokens = count(whole)
    if tokens <= limit:
        return whole
    ids = encode()
    keep = len(ids)
    while tokens > limit:
        # What is left may be other tokens where it was cut: again, until it fits.
        keep -= tokens - limit
        if keep < least:
            return None
        case = cut(ids, keep)
        tokens = count(case)
    return case


def check_group(
    task: str, tasks: Sequence[str], group: str, names: Sequence[str], owner: str
) -> None:
    """Refuse a name that is not in a group of tasks, and a task beside the name of its group."""
    if task != group and task not in names:
        raise ConfigError(
            f"--tasks holds {task!r}; of {owner} there are {group}, {', '.join(names)}."
        )
    if task != group and group in tasks:
        raise ConfigError(
            f"--tasks holds {group} and {task}; {group} holds it already. Give one of them."
        )


def placed(rng: random.Random, filler: list[str], needles: list[str], depth: float) -> list[str]:
    """Filler with the first needle at a depth and the others at random places."""
    lines = list(filler)
    for needle in needles[1:]:
        lines.insert(rng.randint(0, len(lines)), needle)
    # Last, so that no other needle moves it away from its depth.
    lines.insert(round(depth * len(lines)), needles[0])
    return lines


ADJECTIVES = (
    "amber", "ancient", "bitter", "bold", "brave", "brief", "bright", "broad", "calm", "careful",
    "clever", "cold", "cosmic", "crisp", "curious", "daring", "deep", "distant", "dusty", "eager",
    "early", "elegant", "faint", "fancy", "fierce", "final", "fond", "fresh", "gentle", "giant",
    "golden", "grand", "grey", "happy", "hidden", "hollow", "honest", "humble", "icy", "jolly",
    "keen", "large", "late", "lively", "lonely", "loud", "lucky", "mellow", "merry", "mild",
    "narrow", "noble", "odd", "pale", "patient", "plain", "polite", "proud", "quick", "quiet",
    "rapid", "rare", "red", "rough", "royal",
)  # fmt: skip
NOUNS = (
    "anchor", "apple", "arrow", "badge", "barrel", "basket", "beacon", "bell", "bench", "bird",
    "blanket", "boat", "book", "bottle", "branch", "bridge", "brush", "bucket", "cabin", "candle",
    "canyon", "castle", "chair", "clock", "cloud", "coast", "coin", "comet", "copper", "corner",
    "cotton", "cradle", "crown", "desert", "dragon", "drum", "eagle", "engine", "feather", "fence",
    "field", "flag", "flute", "forest", "fountain", "garden", "gate", "glove", "hammer", "harbor",
    "hill", "horse", "island", "jacket", "kettle", "key", "ladder", "lake", "lamp", "lantern",
    "lemon", "letter", "lighthouse", "magnet", "map", "marble", "meadow", "mirror", "mountain",
    "needle", "ocean", "orchard", "paper", "pearl", "pencil", "piano", "pillow", "planet", "pocket",
    "pond", "rabbit", "river", "road", "robin", "rocket", "rope", "saddle", "sail", "salt",
    "shadow", "shell", "shield", "silver", "spoon", "stone", "storm", "table", "temple", "thread",
    "tiger", "torch", "tower", "train", "tree", "trumpet", "tunnel", "valley", "velvet", "violin",
    "wagon", "wheel", "whistle", "window", "winter", "wolf",
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
    num_pairs = len(ADJECTIVES) * len(NOUNS)
    names: list[str] = []
    # When all pairs are used up they come again, with a number: amber-anchor-1.
    for turn in range(-(-number // num_pairs)):
        for index in rng.sample(range(num_pairs), min(num_pairs, number - len(names))):
            pair = f"{ADJECTIVES[index // len(NOUNS)]}-{NOUNS[index % len(NOUNS)]}"
            if turn:
                pair = f"{pair}-{turn}"
            names.append(pair)
    return names


def numbers(rng: random.Random, number: int, digits: int = 7) -> list[str]:
    """Distinct numbers of `digits` digits, as text."""
    distinct: dict[str, None] = {}
    while len(distinct) < number:
        distinct[str(rng.randint(10 ** (digits - 1), 10**digits - 1))] = None
    return list(distinct)


def noise(rng: random.Random, number: int) -> list[str]:
    """Sentences that mean nothing."""
    return [rng.choice(NOISE) for _ in range(number)]


INTRODUCTION = (
    "Some special magic numbers are hidden in the following text. Remember them; there is a "
    "question about them at the end.\n"
)


def needle(key: str, value: str) -> str:
    """The sentence that hides a number."""
    return needle_of("numbers", key, value)


def needle_of(kind: str, key: str, value: str) -> str:
    """The sentence that hides a value of another kind."""
    return f"One of the special magic {kind} for {key} is: {value}."


def case(lines: list[str], asked: str, values: Sequence[str], depth: float) -> Case:
    """Introduction, text, question and the beginning of the answer."""
    noun = "number"
    verb = "is"
    if len(values) > 1:
        noun = "numbers"
        verb = "are"
    question = f"What {verb} the special magic {noun} for {asked} mentioned in the text?"
    start = f"The special magic {noun} for {asked} mentioned in the text {verb}"
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
    opening = (
        "There is important information hidden inside a lot of irrelevant text. Find it and "
        "memorize it.\n"
    )
    start = "The pass key is"
    return Case(
        f"{opening}{' '.join(lines)}\nWhat is the pass key? {start}", (key,), depth, ("\n",), start
    )


VALUE_DIGITS = 3
"""Of the numbers in a table of keys and values."""


def pairs(rng: random.Random, number: int) -> list[tuple[str, str]]:
    """Distinct keys, each with a number; the keys of a short table are single words."""
    words = [*ADJECTIVES, *NOUNS]
    if number <= len(words):
        names = rng.sample(words, number)
    else:
        names = keys(rng, number)
    return [
        (name, str(rng.randrange(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS))) for name in names
    ]


def table(lines: list[tuple[str, str]]) -> str:
    """One line per pair."""
    return "".join(f"{key}={value}\n" for key, value in lines)


def write_key_value(rng: random.Random, units: int, depth: float) -> Case:
    """A table of keys and values; the question is the value of one key.

    The form is bare (`key=value`), so that small models can learn it.

    A table of `units` lines; the question is about the line at the depth.
    """
    lines = pairs(rng, units)
    index = round(depth * (units - 1))
    key, value = lines[index]
    return Case(f"{table(lines)}{key}=", (value,), index / max(1, units - 1), stop=("\n",))


def write_needle_single(rng: random.Random, units: int, depth: float) -> Case:
    """One number hidden in noise. One needle among `units` sentences."""
    (key,) = keys(rng, 1)
    (value,) = numbers(rng, 1)
    return case(placed(rng, noise(rng, units), [needle(key, value)], depth), key, [value], depth)


def write_needle_multi_key(rng: random.Random, units: int, depth: float) -> Case:
    """One number to find among many that look the same and belong to other names.

    One needle among `units` other needles.
    """
    key, *other_keys = keys(rng, units + 1)
    value, *other_values = numbers(rng, units + 1)
    filler = [needle(*pair) for pair in zip(other_keys, other_values, strict=True)]
    return case(placed(rng, filler, [needle(key, value)], depth), key, [value], depth)


QUERIES = 4
"""Names that one question asks for."""


def write_needle_multi_query(rng: random.Random, units: int, depth: float) -> Case:
    """The numbers of four names, in one question.

    Needles of several names among `units` sentences; the first at the depth, the others anywhere.
    """
    names = keys(rng, QUERIES)
    values = numbers(rng, QUERIES)
    needles = [needle(*pair) for pair in zip(names, values, strict=True)]
    lines = placed(rng, noise(rng, units), needles, depth)
    return case(lines, ", ".join(names[:-1]) + f" and {names[-1]}", values, depth)


VALUES = 4
"""Numbers of one name."""


def write_needle_multi_value(rng: random.Random, units: int, depth: float) -> Case:
    """All of the four numbers that one name has.

    Needles of one name among `units` sentences; the first at the depth, the others anywhere.
    """
    (key,) = keys(rng, 1)
    values = numbers(rng, VALUES)
    lines = placed(rng, noise(rng, units), [needle(key, value) for value in values], depth)
    return case(lines, key, values, depth)


HOPS = 4
"""Assignments from one variable to the next in a chain."""
CHAINS = 2
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def write_variable_tracking(rng: random.Random, units: int, depth: float) -> Case:
    """A chain of assignments in noise: which variables hold the first one's number?

    Two chains in their order among `units` sentences; the question is about the first.
    """
    chain_length = HOPS + 1
    # A dict is a set that keeps its order.
    names: dict[str, None] = {}
    while len(names) < CHAINS * chain_length:
        names["".join(rng.choices(LETTERS, k=5))] = None
    values = numbers(rng, CHAINS, digits=5)
    chains = [
        list(names)[chain * chain_length : (chain + 1) * chain_length] for chain in range(CHAINS)
    ]

    # Positions are sorted, and assignments of a chain are taken in their order: a variable is
    # assigned before another is set to it. Each insertion moves the later positions by one.
    lines = noise(rng, units)
    positions = sorted(
        (rng.randint(0, units), chain, hop)
        for chain in range(CHAINS)
        for hop in range(chain_length)
    )
    upcoming = [
        iter(_assignments(chain, value)) for chain, value in zip(chains, values, strict=True)
    ]
    for shift, (position, chain, _) in enumerate(positions):
        lines.insert(position + shift, next(upcoming[chain]))

    opening = "Memorize and track the chain of variable assignments hidden in the following text.\n"
    question = (
        f"Find all variables that are assigned the value {values[0]} in the text above. They are:"
    )
    return Case(
        f"{opening}{' '.join(lines)}\n{question}", tuple(chains[0]), None, answer_start="They are:"
    )


def _assignments(chain: list[str], value: str) -> list[str]:
    """`VAR A = 5`, `VAR B = VAR A`, ..."""
    first = f"VAR {chain[0]} = {value}"
    return [first, *(f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(chain))]


COMMON = 10
"""Words that occur often. Each makes up a twentieth of the list."""


def write_common_words(rng: random.Random, units: int, depth: float) -> Case:
    """A numbered list in which ten words occur far more often than the others: which are they?

    `units` words and forty more: each common one makes up a twentieth of them, all others together
    the rest.
    """
    # Frequencies, not positions, decide, so the depth means nothing here.
    words = [*NOUNS, *ADJECTIVES]
    rng.shuffle(words)
    common = words[:COMMON]
    rare = words[COMMON:]
    # Forty more, so that each common word occurs at least twice in the shortest list.
    total = units + 40
    listed = [word for word in common for _ in range(total // 20)]
    listed += [rare[index % len(rare)] for index in range(total - len(listed))]
    rng.shuffle(listed)
    lines = " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
    opening = (
        "Below is a numbered list of words. Some of them appear more often than others. Memorize "
        "those that appear most often.\n"
    )
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
