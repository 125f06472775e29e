"""Settings of reward code: what it gives to small programs that need room, time or several tests."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from headway.errors import HeadwayError
from headway.rewards.base import RewardAnswer
from headway.rewards.panel import RewardPanel
from headway.train.config import Recipe
from support.sandboxes import why_no_sandbox
from support.setting_runs import BASE, Row, data_folder, load

THREE = ["assert f(3) == 9", "assert f(-2) == 4", "assert f(4) == 16"]
"""Of a function that squares."""
MIB = 1 << 20


def answer(program: str, tests: Any, **columns: Any) -> RewardAnswer:
    """An answer that has one program."""
    return RewardAnswer(0, (), f"```python\n{program}\n```", {"tests": tests, **columns})


def printing(program: str, output: str) -> list[RewardAnswer]:
    """An answer whose program must print this."""
    return [answer(program, {"inputs": [""], "outputs": [output]})]


RIGHT = [answer("def f(x): return x * x", THREE, harder=["assert f('a') == 'aa'"])]
WRONG_ON_THE_SECOND = [answer("def f(x): return x * x if x > 0 else 0", THREE)]
SLOW = [answer("import time\ndef f(x):\n    time.sleep(0.3)\n    return x * x", THREE[:2])]
LARGE = printing("data = bytes(400 << 20)\nprint(len(data))", str(400 * MIB))
LONG = printing("print('x' * (2 << 20))", "x" * 2 * MIB)
IMPRECISE = printing("print(3.1416)", "3.14159265")
WRITING = printing("print(open('/tmp/x', 'wb').write(bytes(16 << 20)))", str(16 * MIB))
THREADED = printing(
    "import threading, time\n"
    "threads = [threading.Thread(target=time.sleep, args=(0.1,)) for _ in range(6)]\n"
    "for thread in threads: thread.start()\n"
    "print('done')",
    "done",
)
IMPORTING = printing("import squares_of_rows\nprint(squares_of_rows.square(3))", "9")
UNTESTED = [answer(f"x = {number}", None) for number in range(60)]
"""The reward fails on each of these, and they are enough to end a run."""


@functools.cache
def _module_folder() -> None:
    """`$/programs` of the rows, with a module that programs can import there."""
    folder = data_folder() / "programs"
    folder.mkdir()
    module = folder / "squares_of_rows.py"
    module.write_text("def square(x):\n    return x * x\n")
    # Programs of root run as nobody, who must read these under any umask.
    folder.chmod(0o755)
    module.chmod(0o644)


def judged(answers: Sequence[RewardAnswer], overrides: tuple[str, ...]) -> Any:
    """Totals, parts and problems of these answers, or why the reward is refused."""
    _module_folder()
    try:
        settings = load(Recipe, None, [*BASE, *overrides]).reward
        with RewardPanel(settings) as panel:
            scores = panel.score(answers)
    except HeadwayError as refusal:
        return str(refusal)
    return [(score.total, score.parts, score.problems) for score in scores]


def judged_in_sandboxes(answers: Sequence[RewardAnswer], overrides: tuple[str, ...]) -> Any:
    """The same, where programs can run: elsewhere each answer has the same failure."""
    problem = why_no_sandbox()
    if problem is not None:
        pytest.skip(problem)
    return judged(answers, overrides)


def programs(
    answers: Sequence[RewardAnswer], name: str, first: object, second: object, *more: str
) -> Row:
    """Programs that are scored under two values of one setting."""
    values = [
        ["{" + ", ".join(("kind: code", *more, f"{name}: {value}")) + "}"]
        for value in (first, second)
    ]
    return ((), values[0], values[1], functools.partial(judged_in_sandboxes, answers))


JUDGED_RIGHT = functools.partial(judged, RIGHT)
"""For values that are refused, which needs no sandbox."""

ROWS: dict[str, Row] = {
    "reward[code].kind": ((), ["{kind: code}"], ["{kind: nothing}"], JUDGED_RIGHT),
    "reward[code].language": ((), ["{kind: code, language: python}"], ["{kind: code, language: lua}"], JUDGED_RIGHT),
    "reward[code].weight": programs(RIGHT, "weight", 1.0, 2.0),
    "reward[code].default": programs(UNTESTED[:1], "default", 0.0, -1.0),
    "reward[code].max_failures": programs(UNTESTED, "max_failures", 1.0, 0.5),
    "reward[code].tests": programs(RIGHT, "tests", "null", "harder"),
    "reward[code].score": programs(WRONG_ON_THE_SECOND, "score", "all", "share"),
    "reward[code].max_tests": programs(WRONG_ON_THE_SECOND, "max_tests", "null", 1),
    "reward[code].tolerance": programs(IMPRECISE, "tolerance", 0.0, 0.01),
    "reward[code].timeout": programs(SLOW, "timeout", 30.0, 0.5, "score: share"),
    "reward[code].test_timeout": programs(SLOW, "test_timeout", 5.0, 0.15),
    "reward[code].memory_gib": programs(LARGE, "memory_gib", 1.0, 0.25),
    "reward[code].processes": programs(THREADED, "processes", 16, 3),
    "reward[code].disk_mib": programs(WRITING, "disk_mib", 64, 4),
    "reward[code].output_mib": programs(LONG, "output_mib", 1, 4),
    "reward[code].folders": programs(IMPORTING, "folders", "[]", "[$/programs]"),
}  # fmt: skip
