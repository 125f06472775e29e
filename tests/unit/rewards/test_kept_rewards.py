"""What a reward has said survives a kill: outcomes are on the disk as they come, not with the last of a batch."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from support.chat_endpoint import Handler, chat_endpoint, completion

from headway.rewards.base import RewardAnswer, RewardList, RewardOutcome
from headway.rewards.panel import RewardPanel
from headway.rewards.portions import OutcomeThreads

ANSWERS = 9
EXPECTED = [number / 10 for number in range(ANSWERS)]
SCORER = """
import json, sys
from pathlib import Path
from pydantic import TypeAdapter
from headway.rewards.base import RewardAnswer, RewardList
from headway.rewards.panel import RewardPanel

settings, folder, count, workers = sys.argv[1:]
answers = [RewardAnswer(number, [], f"answer {number}", {}) for number in range(int(count))]
rewards = TypeAdapter(RewardList).validate_python(json.loads(settings))
with RewardPanel(rewards, Path(folder), int(workers)) as panel:
    print(json.dumps([score.total for score in panel.score(answers)]))
"""


def start_scorer(reward: dict[str, Any], folder: Path, workers: int = 1) -> subprocess.Popen[str]:
    """A process that judges the answers; it prints their rewards."""
    words = [json.dumps([reward]), str(folder), str(ANSWERS), str(workers)]
    command = [sys.executable, "-c", SCORER, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


class Judge:
    """Rates an answer with its number. When it has given some answers, it kills whoever asks next, and answers nobody until another asks."""

    def __init__(self, num_answers: int) -> None:
        self.asked: list[int] = []
        self.answered: list[int] = []
        self._remaining = num_answers
        self._killed: subprocess.Popen[str] | None = None
        self._has_begun = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, handler: Handler, request: int) -> bool:
        prompt = handler.server.seen[request]["body"]["messages"][0]["content"]
        number = int(prompt.split()[-1])
        with self._lock:
            self.asked.append(number)
            self._remaining -= 1
            is_answered = self._remaining >= 0
            if is_answered:
                self.answered.append(number)
        if is_answered:
            return handler.answer(completion(f"Score: {number}"))
        assert self._has_begun.wait(20)
        assert self._killed is not None
        self._killed.send_signal(signal.SIGKILL)
        self._killed.wait()
        return handler.answer(b"", 500)

    def kill(self, scorer: subprocess.Popen[str]) -> None:
        """Kill this process after the answers."""
        self._killed = scorer
        self._has_begun.set()
        scorer.communicate(timeout=60)
        assert scorer.returncode == -signal.SIGKILL
        self._remaining = ANSWERS


def judge_settings(url: str, requests: int) -> dict[str, Any]:
    return {"kind": "judge", "url": url, "model": "m", "requests": requests, "prompt": "{answer}"}


def test_a_judge_is_not_asked_again_what_it_answered_before_a_kill(tmp_path: Path) -> None:
    judge = Judge(5)
    with chat_endpoint(judge) as server:
        reward = judge_settings(server.url, requests=1)
        judge.kill(start_scorer(reward, tmp_path))
        before = list(judge.asked)
        output, _ = start_scorer(reward, tmp_path).communicate(timeout=60)
    assert before == list(range(6))
    assert judge.asked[len(before) :] == list(range(5, ANSWERS))
    assert json.loads(output) == EXPECTED


def test_of_several_requests_none_but_those_in_flight_are_asked_again_after_a_kill(
    tmp_path: Path,
) -> None:
    judge = Judge(5)
    with chat_endpoint(judge) as server:
        reward = judge_settings(server.url, requests=3)
        judge.kill(start_scorer(reward, tmp_path))
        before = list(judge.asked)
        output, _ = start_scorer(reward, tmp_path).communicate(timeout=60)
    again = set(before) & set(judge.asked[len(before) :])
    assert len(again) <= 3
    assert sorted({*judge.answered}) == list(range(ANSWERS))
    assert json.loads(output) == EXPECTED


USER_REWARD = """
import os, sys, time

def reward(prompt, answer, record):
    number = int(answer.split()[-1])
    with open({calls!r}, "a") as file:
        file.write(f"{{number}}\\n")
    if number == {last} and not os.path.exists({resumed!r}):
        with open({reached!r}, "w") as file:
            file.write("x")
        time.sleep(600)
    time.sleep(0.11)
    return number / 10
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_a_slow_function_is_not_called_again_for_what_it_returned_before_a_kill(
    tmp_path: Path, workers: int
) -> None:
    calls = tmp_path / "calls"
    reached = tmp_path / "reached"
    resumed = tmp_path / "resumed"
    os.mkfifo(reached)
    path = tmp_path / "mine.py"
    path.write_text(
        USER_REWARD.format(
            calls=str(calls), resumed=str(resumed), reached=str(reached), last=ANSWERS - 1
        )
    )
    killed = start_scorer({"kind": str(path)}, tmp_path / "cache", workers)
    with reached.open() as pipe:
        assert pipe.read() == "x"
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    resumed.touch()
    output, _ = start_scorer({"kind": str(path)}, tmp_path / "cache").communicate(timeout=60)
    again = [number for number, count in Counter(calls.read_text().split()).items() if count > 1]
    # The others that were in flight with the last one may have returned, or not.
    assert str(ANSWERS - 1) in again
    assert len(again) <= workers
    assert json.loads(output) == EXPECTED


def test_a_slow_call_is_handed_over_before_its_thread_begins_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    events = [threading.Event() for _ in range(3)]
    both_began = threading.Event()

    def outcome(item: dict[str, Any]) -> RewardOutcome:
        if item["number"] == 0:
            both_began.wait(5)
            now[0] = 10.0
        elif item["number"] == 1:
            both_began.set()
        events[item["number"]].wait(5)
        return RewardOutcome(1.0)

    threads = OutcomeThreads(2, "test", seconds=3.0)
    portions = threads.portions(outcome, [{"number": number} for number in range(3)])
    events[0].set()
    first = next(portions)
    # Something was handed over just now, but this call took ten seconds.
    events[1].set()
    second = next(portions)
    # A quick one waits for others, or for the end.
    events[2].set()
    assert [list(portion) for portion in (first, second, *portions)] == [[0], [1], [2]]
    threads.close()


def test_quick_rewards_wait_for_the_disk_a_few_times_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    path = tmp_path / "mine.py"
    path.write_text("def reward(prompt, answer, record):\n    return float(answer)\n")
    answers = [RewardAnswer(number, [], str(number), {"answer": "1"}) for number in range(300)]
    rewards = TypeAdapter(RewardList).validate_python([str(path), "number"])
    with RewardPanel(rewards, tmp_path / "cache") as panel:
        panel.score(answers[:1])
        synced.clear()
        panel.score(answers)
        seconds = panel.seconds
    # `number` once, the function at most ten times a second and at the end.
    assert 2 <= len(synced) <= 3 + seconds / 0.1
