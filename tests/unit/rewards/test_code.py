"""Programs of answers: right ones pass, and no trick passes in their place."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from support.sandboxes import why_no_sandbox

from headway.errors import ConfigError
from headway.rewards.base import RewardAnswer, RewardList
from headway.rewards.code import last_program
from headway.rewards.panel import RewardPanel, Score
from headway.rewards.sandbox.kernel import NUMBERS

needs_sandbox = pytest.mark.skipif(why_no_sandbox() is not None, reason=str(why_no_sandbox()))
ASSERTS = ["assert f(3) == 9", "assert f(-2) == 4", "assert [f(4)] == [16]"]
TEXTS = {"inputs": ["3\n", "-2\n"], "outputs": ["9\n", "4\n"]}
CALLS = {"inputs": [[3], [-2]], "outputs": [9, 4], "fn_name": "f"}
Run = Callable[[str, Any], Score]


def panel(**settings: Any) -> RewardPanel:
    kind = {"kind": "code", "test_timeout": 1.5, **settings}
    return RewardPanel(TypeAdapter(RewardList).validate_python([kind]))


def answer(program: str, tests: Any, **record: Any) -> RewardAnswer:
    text = f"Here it is:\n```python\n{program}\n```\nDone."
    return RewardAnswer(0, [], text, {"tests": tests, **record})


@pytest.fixture(scope="module")
def short() -> Iterator[Run]:
    """For programs that hang and get nothing."""
    yield from running(0.5)


@pytest.fixture(scope="module")
def share() -> Iterator[Run]:
    yield from running(5.0)


def running(test_timeout: float) -> Iterator[Run]:
    with panel(score="share", test_timeout=test_timeout) as opened:

        def run(program: str, tests: Any) -> Score:
            (score,) = opened.score([answer(program, tests)])
            assert score.problems == ()
            return score

        yield run


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x):\n    return x * x", ASSERTS),
        ("def f(x):\n    return x * x", "\n".join(ASSERTS)),
        ("class Solution:\n    def f(self, x):\n        return x ** 2", CALLS),
        ("def f(x):\n    return x * x", CALLS),
        ("print(int(input()) ** 2)", TEXTS),
        (
            "def main():\n    print(int(input()) ** 2)\nif __name__ == '__main__':\n    main()",
            TEXTS,
        ),
        ("import sys\nsys.stdout.write(str(int(sys.stdin.read()) ** 2))\nexit()", TEXTS),
        ("def f(x):\n    print('noise')\n    return x * x", ["assert abs(f(3) - 9) < 1e-6"]),
        ("def f(x):\n    x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
        ("class S:\n    def pop(self): return 7", "s = S()\nassert s.pop() == 7"),
        ("def f(x): return set(x)", "assert f('aab') == {'a', 'b'} and len(f('')) == 0"),
    ],
)
def test_a_right_program_passes(share: Run, program: str, tests: Any) -> None:
    assert share(program, tests).total == 1.0


@needs_sandbox
def test_the_share_of_tests_that_pass_is_the_reward(share: Run) -> None:
    score = share("def f(x):\n    return x * 3", ASSERTS)
    assert score.parts == {"code": 1 / 3, "code/passed": 1 / 3, "code/tests": 3.0}


@needs_sandbox
def test_one_failed_test_is_no_reward_by_default() -> None:
    with panel() as opened:
        right, wrong = opened.score(
            [
                answer("def f(x): return x * x", ASSERTS),
                answer("def f(x): return 9 if x == 3 else 4", ASSERTS),
            ]
        )
    assert (right.total, wrong.total) == (1.0, 0.0)


@needs_sandbox
def test_a_test_that_hangs_costs_itself() -> None:
    program = "def f(x):\n    while x == -2: pass\n    return x * x"
    with panel(score="share") as opened:
        (score,) = opened.score([answer(program, ASSERTS)])
    assert score.total == pytest.approx(2 / 3)


ALWAYS_EQUAL = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 0
    def __getattr__(self, name): return self
    def __getitem__(self, name): return self
    def __reduce__(self): return (eval, ("9",))
"""
SUBCLASS = """
class Equal(int):
    def __eq__(self, other): return True
    def __str__(self): return "9"
    def __index__(self): return 9
    __hash__ = int.__hash__
def f(x): return Equal(1)
"""
PATCHED = """
import builtins, json, sys, operator
builtins.eval = lambda *a: True
builtins.exec = lambda *a: None
builtins.isinstance = lambda *a: True
builtins.AssertionError = Exception
json.dumps = lambda *a, **k: '{"values": [["bool", true]]}'
json.load = lambda *a: {}
operator.eq = lambda *a: True
sys.exit = lambda *a: None
def f(x): return True
"""
FRAMES = """
import sys, gc
def everything():
    frame = sys._getframe()
    while frame is not None:
        yield from frame.f_locals.values()
        yield from frame.f_globals.values()
        frame = frame.f_back
    yield from gc.get_objects()
def numbers(value, depth=0):
    if type(value) is int: yield value
    if isinstance(value, str):
        for word in value.replace("(", " ").replace(")", " ").split():
            try: yield int(word.strip("[],;"), 0)
            except ValueError: pass
    if depth < 3 and isinstance(value, (list, tuple)):
        for item in value: yield from numbers(item, depth + 1)
    if depth < 3 and isinstance(value, dict):
        for item in value.values(): yield from numbers(item, depth + 1)
def f(x):
    # Without the number itself, which would be found in this very program.
    for value in everything():
        try:
            for number in numbers(value):
                if number ^ 5 == 987651: return number
        except Exception: pass
"""
FILES = """
import os
KEY = bytes(reversed(b"456789"))
def f(x):
    for folder, _, names in os.walk("/"):
        if folder.startswith(("/usr", "/lib", "/root", "/opt")): continue
        for name in names:
            try:
                if KEY in open(os.path.join(folder, name), "rb").read(1 << 20): return int(KEY)
            except OSError: pass
    for number in range(64):
        try:
            os.lseek(number, 0, 0)
            if KEY in os.read(number, 1 << 20): return int(KEY)
        except OSError: pass
"""
MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def f(x):
    for pid in (1, os.getppid()):
        if libc.ptrace(16, pid, 0, 0) == 0: return 987654
        try: open(f"/proc/{pid}/mem", "rb").read(1); return 987654
        except OSError: pass
"""
GUESSES = """
import os, json
for guess in range(100):
    try: os.write(4, json.dumps({"values": [["int", hex(guess)]]}).encode())
    except OSError: pass
os._exit(0)
"""
KILLS = "import os, signal\ntry: os.kill(os.getppid(), signal.SIGKILL)\nexcept OSError: pass\n"
TRICKS = {
    "exit 0": "import sys; sys.exit(0)",
    "early _exit": "import os; os._exit(0)",
    "printed passed": "print('passed'); print('9'); print('1.0', flush=True)",
    "atexit": "import atexit; atexit.register(lambda: print('9'))\natexit.register(__import__('os')._exit, 0)",
    "equals everything": ALWAYS_EQUAL + "def f(x): return Any()",
    "a subclass that equals everything": SUBCLASS,
    "patched builtins": PATCHED,
    "no assertions": "__debug__ if True else 0\nimport sys; sys.flags\ndef f(x): raise SystemExit(0)",
    "raises what passes": "def f(x): raise BaseException('passed')",
    "kills its parent": KILLS + "def f(x): return None",
    "kills all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "many guesses": GUESSES,
    "all values are true": "def f(x): return True",
    "forks": "import os\nfor _ in range(4): os.fork()\ndef f(x): return None",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "fills the disk": "open('/tmp/x', 'wb').write(bytes(1 << 30))",
    "threads": "import threading\nwhile True: threading.Thread(target=input).start()",
    "signals": "import signal\nsignal.raise_signal(signal.SIGSTOP)",
    "sockets": "import socket\ns = socket.create_connection(('127.0.0.1', 22), 1)\nprint(9)",
    "closes everything": "import os\nos.closerange(0, 64)",
    "stack": "import sys\nsys.setrecursionlimit(1 << 30)\ndef f(x): return f(x)\nf(1)",
    "no text": "\ud800",
}  # fmt: skip


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize(
    "tests", [["assert f(3) == 9"], TEXTS, CALLS], ids=["assert", "text", "call"]
)
def test_a_trick_earns_nothing(short: Run, trick: str, tests: Any) -> None:
    assert short(TRICKS[trick], tests).total == 0.0


@needs_sandbox
@pytest.mark.parametrize("program", [FRAMES, FILES, MEMORY], ids=["frames", "files", "memory"])
@pytest.mark.parametrize(
    "tests",
    [
        ["assert f(3) == 987654"],
        "expected = 987654\nassert f(3) == expected",
        "def near(a, b):\n    return abs(a - b) < 1\nassert near(f(3), 987654)",
        {"inputs": [[3]], "outputs": [987654], "fn_name": "f"},
    ],
    ids=["assert", "name", "function", "call"],
)
def test_expected_values_are_nowhere_in_the_sandbox(share: Run, program: str, tests: Any) -> None:
    assert share(program, tests).total == 0.0


@needs_sandbox
def test_the_search_finds_what_is_there(share: Run) -> None:
    """The search of the test above is no blind one: an argument is found."""
    assert share(FRAMES, ["assert f(987654) == 987654"]).total == 1.0


@needs_sandbox
def test_a_comparison_of_the_test_is_not_the_programs(share: Run) -> None:
    """A patched `isclose` or `sorted` in the program's process decides nothing."""
    program = "import math, builtins\nmath.isclose = lambda *a, **k: True\nbuiltins.sorted = lambda *a: [1]\n"
    program += "def f(x): return 5"
    tests = ["import math\nassert math.isclose(f(3), 9.0)", "assert sorted([f(3)]) == [1]"]
    assert share(program, tests).total == 0.0


@needs_sandbox
def test_a_value_that_makes_the_comparison_slow_has_not_passed() -> None:
    tests = ["assert 7 ** f(3) % 10 == 9"] * 8
    with panel(default=1.0, timeout=3.0, test_timeout=1.0) as opened:
        (score,) = opened.score([answer("def f(x): return 1 << 40", tests)])
    assert score.total == 0.0
    assert score.problems == ()


@needs_sandbox
def test_an_answer_without_a_program_gets_nothing() -> None:
    with panel() as opened:
        (score,) = opened.score([RewardAnswer(0, [], "I do not know.", {"tests": ASSERTS})])
    assert score.total == 0.0
    assert score.problems == ()


@needs_sandbox
def test_a_test_that_could_be_forged_counts_as_the_default_with_its_line() -> None:
    with panel(default=-0.25) as opened:
        (score,) = opened.score([answer("def f(x): return 1", "assert f(1) == f(2)")])
    assert score.total == -0.25
    assert "line 1 of a test has a comparison with 2 values" in score.problems[0]


@needs_sandbox
def test_a_record_without_tests_counts_as_the_default() -> None:
    with panel() as opened:
        (score,) = opened.score([answer("x = 1", None)])
    assert "the record has no tests" in score.problems[0]


@needs_sandbox
def test_the_time_of_all_tests_is_bounded() -> None:
    with panel(score="share", timeout=1.0) as opened:
        program = "import time\ndef f(x):\n    time.sleep(0.4)\n    return x * x"
        (score,) = opened.score([answer(program, ["assert f(3) == 9"] * 50)])
    assert 0 < score.total < 0.2


@needs_sandbox
def test_tests_are_read_from_columns_of_data_sets() -> None:
    with panel() as opened:
        square = "def f(x): return x * x"
        mbpp, humaneval, verl, named = opened.score(
            [
                RewardAnswer(0, [], f"```\n{square}\n```", {"test_list": ASSERTS}),
                RewardAnswer(
                    0,
                    [],
                    f"```py\n{square}\n```",
                    {
                        "test": "def check(candidate):\n    assert candidate(3) == 9\n",
                        "entry_point": "f",
                    },
                ),
                RewardAnswer(
                    0,
                    [],
                    "```python3\nprint(int(input()) + 1)\n```",
                    {"reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": ["2"]}'}},
                ),
                answer(square, CALLS, test_list=["assert f(1) == 2"]),
            ]
        )
    assert [score.total for score in (mbpp, humaneval, verl, named)] == [1.0] * 4


@needs_sandbox
def test_programs_on_two_workers_get_the_scores_of_one() -> None:
    answers = [answer(f"def f(x): return x * {number}", ASSERTS) for number in range(4)]
    settings = TypeAdapter(RewardList).validate_python([{"kind": "code", "score": "share"}])
    with RewardPanel(settings) as opened, RewardPanel(settings, workers=2) as double:
        assert opened.score(answers) == double.score(answers)


def test_records_without_tests_are_refused_before_any_work() -> None:
    with panel() as opened, pytest.raises(ConfigError, match=r"columns tests, .*reward\.N\.tests"):
        opened.check({"question"})


NO_NAMESPACES = """
import ctypes, os, struct, sys
from headway.rewards.sandbox import kernel
# As in a container whose filter forbids namespaces.
calls = kernel.NUMBERS[os.uname().machine]
allowed = kernel.SystemCalls(calls.audit, 0xFFFF, 0xFFFE, calls.pivot_root, (REFUSED,))
kernel.NUMBERS[os.uname().machine] = allowed
kernel.control(kernel.NO_NEW_PRIVILEGES, 1)
kernel.filter_system_calls()
from pydantic import TypeAdapter
from headway.rewards.base import RewardList
from headway.rewards.panel import RewardPanel
from headway.errors import ConfigError
with RewardPanel(TypeAdapter(RewardList).validate_python("code")) as panel:
    try:
        panel.check({"tests"})
    except ConfigError as problem:
        print(problem)
"""


@needs_sandbox
def test_a_system_without_sandboxes_is_refused_before_any_work() -> None:
    (refused,) = [calls.refused[4] for name, calls in NUMBERS.items() if name == os.uname().machine]
    script = NO_NAMESPACES.replace("REFUSED", str(refused))
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    (line,) = ended.stdout.splitlines()
    assert "reward kind code: no sandbox can be made: a new user namespace: " in line
    assert "sysctl" in line
    assert "score on another machine" in line


KILLED = """
import sys
from pydantic import TypeAdapter
from headway.rewards.base import RewardAnswer, RewardList
from headway.rewards.panel import RewardPanel
kind = {"kind": "code", "folders": [sys.argv[1]], "test_timeout": 600, "timeout": 600}
panel = RewardPanel(TypeAdapter(RewardList).validate_python([kind]))
program = f"f = open('{sys.argv[1]}/alive', 'w'); f.write('x'); f.flush()\\nwhile True: pass"
panel.score([RewardAnswer(0, [], f"```\\n{program}\\n```", {"tests": {"inputs": [""], "outputs": [""]}})])
"""


@needs_sandbox
def test_a_killed_trainer_leaves_no_program(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    tmp_path.chmod(0o755)
    trainer = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    # The program holds the pipe open as long as it lives.
    with fifo.open() as pipe:
        assert pipe.read(1) == "x"
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        assert pipe.read() == ""


@needs_sandbox
def test_a_closed_panel_leaves_no_program(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    tmp_path.chmod(0o755)
    opened = panel(folders=[str(tmp_path)], test_timeout=600.0, timeout=600.0)
    program = f"f = open({str(fifo)!r}, 'w'); f.write('x'); f.flush()\nwhile True: pass"
    with ThreadPoolExecutor(1) as thread:
        scores = thread.submit(opened.score, [answer(program, TEXTS)])
        with fifo.open() as pipe:
            assert pipe.read(1) == "x"
            opened.close()
            assert pipe.read() == ""
        with pytest.raises(CancelledError):
            scores.result(20)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\n```\nb\n```", "b"),
        ("```python\na\n```\n```bash\nls\n```", "a"),
        ("```python\na", None),
        ("  ```py\n  a\n  ```", "  a"),
        ("a = 1", None),
        ("```\n```", ""),
        ("```Python title=x\na\nb\n```", "a\nb"),
    ],
)
def test_the_last_whole_block_of_python_is_the_program(text: str, program: str | None) -> None:
    assert last_program(text, ("", "python", "py")) == program
