"""Rewards of a run: every answer has a score, and no reward ends more than itself."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from headway.errors import ConfigError, GaveUpError
from headway.rewards.base import RewardAnswer, RewardList
from headway.rewards.panel import RewardPanel, Score


def panel(rewards: Any, cache: Path | None = None, workers: int = 1) -> RewardPanel:
    return RewardPanel(TypeAdapter(RewardList).validate_python(rewards), cache, workers)


def answer(text: str, number: int = 0, **record: Any) -> RewardAnswer:
    return RewardAnswer(number, [{"role": "user", "content": "?"}], text, record)


def scores(rewards: Any, *answers: RewardAnswer, workers: int = 1) -> list[Score]:
    with panel(rewards, workers=workers) as opened:
        return opened.score(answers)


def user_reward(folder: Path, body: str, **settings: Any) -> dict[str, Any]:
    """A reward file whose function has this body."""
    path = folder / "mine.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    path.write_text(
        f"import os, sys, time, signal\n\ndef reward(prompt, answer, record):\n{lines}\n"
    )
    return {"kind": str(path), **settings}


FILL = """
with open("/dev/full", "wb", 0) as file:
    file.write(bytes(1 << 20))
"""
LISTEN = """
import socket
server = socket.create_server(("127.0.0.1", 0))
server.accept()
"""
FORKS = """
for _ in range(20):
    if os.fork() == 0:
        time.sleep(600)
time.sleep(600)
"""


def test_a_single_name_is_a_list_of_one_reward() -> None:
    (settings,) = TypeAdapter(RewardList).validate_python("number")
    assert settings.kind == "number"


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"reward kind is 'nmber'; it must be one of .*number"):
        panel("nmber")


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("it is 42.", "42", 1.0),
        ("1,234.50 dollars", "so\n#### 1234.5", 1.0),
        ("first 42, then 43", "42", 0.0),
        ("no number", "42", 0.0),
        ("0.5", "1/2", 1.0),
        ("-7", "7", 0.0),
        ("9" * 5000, "42", 0.0),
        ("1/0", "42", 0.0),
    ],
)
def test_the_last_numbers_are_compared_exactly(text: str, gold: str, value: float) -> None:
    (score,) = scores("number", answer(text, answer=gold))
    assert score.total == value


def test_the_ground_truth_of_verl_is_found() -> None:
    (score,) = scores("number", answer("5", reward_model={"ground_truth": "5", "style": "rule"}))
    assert score.total == 1.0


def test_a_record_without_a_right_answer_counts_as_the_default() -> None:
    (score,) = scores({"kind": "number", "default": -0.5}, answer("5"))
    assert score == Score(-0.5, {"number": -0.5}, ("number: the record has no right answer",))


def test_a_missing_column_is_refused_before_any_work() -> None:
    with panel("number") as opened, pytest.raises(ConfigError, match=r"needs one of the columns"):
        opened.check({"question"})


def test_the_total_is_the_weighted_sum_of_the_parts() -> None:
    rewards = [
        {"kind": "number", "weight": 2.0},
        {"kind": "number", "column": "other", "weight": 0.5},
    ]
    (score,) = scores(rewards, answer("5", answer="5", other="5"))
    assert score.total == 2.5
    assert score.parts == {"number": 1.0, "number_2": 1.0}


@pytest.mark.parametrize(("tokens", "value"), [(60, 0.0), (80, 0.0), (90, -0.5), (100, -1.0)])
def test_the_length_penalty_grows_over_the_buffer(tokens: int, value: float) -> None:
    long_answer = RewardAnswer(0, [], "", {}, tokens)
    (score,) = scores({"kind": "length", "max_tokens": 100, "buffer": 20}, long_answer)
    assert score.total == value


def test_a_format_must_match_the_whole_answer() -> None:
    good, bad = scores(
        {"kind": "format", "pattern": "<a>.*</a>"}, answer("<a>1</a>"), answer("<a>")
    )
    assert (good.total, bad.total) == (1.0, 0.0)


def test_a_pattern_that_backtracks_forever_costs_one_answer() -> None:
    hung, good = scores(
        {"kind": "format", "pattern": "(a+)+b", "timeout": 1.0}, answer("a" * 60), answer("aab")
    )
    assert hung.problems == ("format: no answer within 1 s; the process was ended",)
    assert good == Score(1.0, {"format": 1.0})


def test_a_wrong_pattern_is_refused() -> None:
    with pytest.raises(ValidationError) as refusal:
        panel({"kind": "format", "pattern": "("})
    nested = refusal.value.errors()[0].get("ctx", {})["error"]
    assert "which is wrong" in nested.errors[0]["msg"]


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"$x = \sqrt{8}$", r"2\sqrt{2}", 1.0),
        (r"\boxed{41}", "work #### 42", 0.0),
        (r"\boxed{42}", r"so it is \boxed{42}.", 1.0),
    ],
)
def test_math_answers_are_compared_by_value(text: str, gold: str, value: float) -> None:
    pytest.importorskip("math_verify")
    (score,) = scores({"kind": "math", "timeout": 60.0}, answer(text, answer=gold))
    assert score.problems == ()
    assert score.total == value


def test_math_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"reward kind math needs math-verify.*\[rl\]"):
        panel("math")


def test_a_file_of_the_user_sees_prompt_answer_and_record(tmp_path: Path) -> None:
    body = "return len(prompt[0]['content']) + len(answer) + record['bonus'] + penalty"
    path = tmp_path / "mine.py"
    path.write_text(f"def reward(prompt, answer, record, penalty):\n    {body}\n")
    (score,) = scores({"kind": str(path), "settings": {"penalty": -1}}, answer("abc", bonus=10))
    assert score == Score(13.0, {"mine": 13.0})


def test_further_numbers_of_a_mapping_are_parts_without_weight(tmp_path: Path) -> None:
    rewards = user_reward(tmp_path, "return {'reward': 1, 'words': 3}", weight=2.0)
    (score,) = scores(rewards, answer(""))
    assert score == Score(2.0, {"mine": 1.0, "mine/words": 3.0})


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise KeyError('x')", "KeyError"),
        ("return 'high'", "it must be a finite number"),
        ("return float('nan')", "it must be a finite number"),
        ("return None", "it must be a finite number"),
        ("return float('-inf')", "it must be a finite number"),
        ("return {'reward': 1, 'more': 'x'}", "its 'more' is no finite number"),
        ("return True if False else [1]", "it must be a finite number"),
        ("return type('N', (), {'__float__': lambda s: 1 / 0})()", "ZeroDivisionError"),
        ("raise BaseException('x')", ""),
        ("open(answer + '.bin', 'wb').truncate(1 << 50)", "OSError"),
        (FILL, "OSError"),
        # These three end at their time limit, as the endless loop below does.
        pytest.param(LISTEN, "no answer within", marks=pytest.mark.slow),
        pytest.param(FORKS, "no answer within", marks=pytest.mark.slow),
        ("import threading\nthreading.stack_size(1 << 20)\nraise RecursionError", "RecursionError"),
        ("sys.stdout.close(); sys.stderr.close(); os.closerange(3, 99); raise ValueError", ""),
        pytest.param(
            "sys.setrecursionlimit(1 << 30)\nf = lambda: f()\nf()", "", marks=pytest.mark.slow
        ),
        ("return {'score': 1}", "without the key `reward`"),
        ("sys.exit(0)", "SystemExit"),
        ("os._exit(0)", "the process ended"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process ended"),
        ("os.kill(os.getppid(), signal.SIGKILL)\nraise ValueError", ""),
        ("os.getpid() < 10 and os.kill(-1, signal.SIGKILL)\nraise ValueError", ""),
        ("return len(bytearray(64 << 30))", "more memory than memory_gib"),
        ("while True: pass", "no answer within"),
    ],
)
def test_a_reward_that_fails_costs_its_answer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, problem: str
) -> None:
    bad_body = "if answer == 'good': return 1.0\n" + body
    monkeypatch.chdir(tmp_path)
    rewards = user_reward(tmp_path, bad_body, default=-1.0, timeout=3.0)
    bad, good = scores(rewards, answer("bad"), answer("good"))
    assert bad.total == -1.0
    assert problem in bad.problems[0]
    assert good == Score(1.0, {"mine": 1.0})


def test_a_fork_that_returns_too_answers_nothing(tmp_path: Path) -> None:
    rewards = user_reward(tmp_path, "os.fork()\nreturn float(answer)")
    assert [s.total for s in scores(rewards, answer("1"), answer("2"), answer("3"))] == [1, 2, 3]


def test_what_a_reward_prints_is_no_answer(tmp_path: Path) -> None:
    rewards = user_reward(tmp_path, "print('x' * 100, flush=True)\nos.write(1, b'y')\nreturn 2")
    (score,) = scores(rewards, answer(""))
    assert score.total == 2.0


def test_a_reward_sees_no_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cret")
    (score,) = scores(user_reward(tmp_path, "return 'MY_API_KEY' in os.environ"), answer(""))
    assert score.total == 0.0


def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import nothing_of_this_name\n")
    with panel({"kind": str(path)}) as opened, pytest.raises(ConfigError, match="not installed"):
        opened.check(set())


def test_a_file_without_the_function_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    with panel({"kind": str(path)}) as opened, pytest.raises(ConfigError, match="no function"):
        opened.check(set())


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        panel({"kind": str(tmp_path / "none.py")})


def test_too_many_failures_end_the_run_with_the_last_reason(tmp_path: Path) -> None:
    rewards = user_reward(tmp_path, "raise ValueError('broken')")
    answers = [answer(str(number)) for number in range(60)]
    with pytest.raises(GaveUpError, match=r"reward mine failed on 60 of the last 60 .*broken"):
        scores(rewards, *answers)


def test_a_file_that_grows_without_end_is_an_error_of_the_reward(tmp_path: Path) -> None:
    body = f"open({str(tmp_path / 'big')!r}, 'wb').truncate(2 << 30)\nreturn 1.0"
    (score,) = scores(user_reward(tmp_path, body), answer("x"))
    assert "File too large" in score.problems[0]


def test_failures_are_logged_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = user_reward(tmp_path, "return 1 / (int(answer) % 2)")
    with panel(rewards) as opened:
        opened.score([answer(str(number)) for number in range(6)])
        opened.score([answer("8")])
        assert opened.failures == {"mine": 4}
        assert len(caplog.messages) == 1
    assert "reward mine failed on an answer, which gets its default of 0" in caplog.messages[0]
    assert caplog.messages[1].startswith("reward mine failed on 4 of 7 answers; the last reason:")
    assert len(caplog.messages) == 2


def test_a_changed_import_of_a_file_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards = user_reward(tmp_path, "import worth_of_mine\nreturn worth_of_mine.VALUE")
    for value in (1.0, 2.0):
        (tmp_path / "worth_of_mine.py").write_text(f"VALUE = {value}\n")
        with panel(rewards, tmp_path / "cache") as opened:
            assert opened.score([answer("4")])[0].total == value


def test_a_setting_that_a_kind_does_not_read_is_refused() -> None:
    with pytest.raises(ValidationError):
        panel({"kind": "length", "max_tokens": 5, "timeout": 3.0})


def test_two_workers_give_the_scores_of_one(tmp_path: Path) -> None:
    rewards = user_reward(tmp_path, "return float(answer) / 7")
    answers = [answer(str(number)) for number in range(40)]
    assert scores(rewards, *answers, workers=2) == scores(rewards, *answers)


def counting_reward(tmp_path: Path) -> dict[str, Any]:
    """A reward that leaves a line for every call."""
    return user_reward(
        tmp_path, f"open({str(tmp_path / 'calls')!r}, 'a').write('x')\nreturn float(answer)"
    )


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text())


def test_equal_answers_are_computed_once(tmp_path: Path) -> None:
    rewards = counting_reward(tmp_path)
    assert [s.total for s in scores(rewards, answer("4"), answer("4"))] == [4.0, 4.0]
    assert calls(tmp_path) == 1


def test_a_later_panel_reads_what_was_kept(tmp_path: Path) -> None:
    rewards = counting_reward(tmp_path)
    for _ in range(2):
        with panel(rewards, tmp_path / "cache") as opened:
            assert [s.total for s in opened.score([answer("4"), answer("5")])] == [4.0, 5.0]
    assert calls(tmp_path) == 2


def test_a_changed_file_is_asked_again(tmp_path: Path) -> None:
    with panel(user_reward(tmp_path, "return 1"), tmp_path / "cache") as opened:
        before = opened.digest()
        assert opened.score([answer("4")])[0].total == 1.0
    with panel(user_reward(tmp_path, "return 2"), tmp_path / "cache") as opened:
        assert opened.digest() != before
        assert opened.score([answer("4")])[0].total == 2.0


def test_a_damaged_line_is_computed_again(tmp_path: Path) -> None:
    rewards = counting_reward(tmp_path)
    with panel(rewards, tmp_path / "cache") as opened:
        opened.score([answer("4"), answer("5")])
    (path,) = (tmp_path / "cache").rglob("kept-*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"value": 5.0', b'"value": 9.0')[:-1])
    with panel(rewards, tmp_path / "cache") as opened:
        assert [s.total for s in opened.score([answer("4"), answer("5")])] == [4.0, 5.0]
    assert calls(tmp_path) == 3


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    marker = tmp_path / "works"
    rewards = user_reward(tmp_path, f"return 1.0 if os.path.exists({str(marker)!r}) else None")
    with panel(rewards, tmp_path / "cache") as opened:
        assert opened.score([answer("4")])[0].problems
        marker.touch()
        assert opened.score([answer("4")])[0].total == 1.0


KILLED = """
import os, sys
from pydantic import TypeAdapter
from headway.rewards.base import RewardAnswer, RewardList
from headway.rewards.panel import RewardPanel
panel = RewardPanel(TypeAdapter(RewardList).validate_python(sys.argv[1]))
panel.score([RewardAnswer(0, [], "hang", {})])
"""


def test_a_killed_trainer_leaves_no_worker(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    # The worker holds the pipe open as long as it lives: the end of the pipe is its end.
    rewards = user_reward(
        tmp_path, f"f = open({str(fifo)!r}, 'w')\nf.write('x')\nf.flush()\ntime.sleep(600)",
    )  # fmt: skip
    trainer = subprocess.Popen([sys.executable, "-c", KILLED, rewards["kind"]])
    with fifo.open() as pipe:
        assert pipe.read(1) == "x"
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        assert pipe.read() == ""


def test_a_panel_that_is_closed_ends_a_reward_that_runs(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    body = f"f = open({str(fifo)!r}, 'w')\nf.write('x')\nf.flush()\ntime.sleep(600)"
    opened = panel(user_reward(tmp_path, body, timeout=600.0))
    with ThreadPoolExecutor(1) as thread:
        scores = thread.submit(opened.score, [answer("4")])
        with fifo.open() as pipe:
            assert pipe.read(1) == "x"
            opened.close()
            assert pipe.read() == ""
        # A score of 0 would be taken for what the reward says.
        with pytest.raises(CancelledError):
            scores.result(20)


def test_settings_are_plain_data_again(tmp_path: Path) -> None:
    rewards = ["number", user_reward(tmp_path, "return 1", weight=0.5)]
    adapter = TypeAdapter(RewardList)
    text = adapter.dump_json(adapter.validate_python(rewards))
    assert adapter.validate_python(json.loads(text)) == adapter.validate_python(rewards)
