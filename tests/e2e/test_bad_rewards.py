"""A run whose reward does everything wrong: every answer has its default and one line, nothing is lost, and the run ends well."""

import json
from pathlib import Path

import pytest
from support.rollout_runs import rollout_recipe, write_rollout_inputs

from headway.rollout.journal import RewardedBatch, SampledBatch, read_journal
from headway.track.metrics_file import read_metrics
from headway.train import train

BAD = """\
import os, signal, socket, time

def reward(prompt, answer, record):
    trick = record["trick"]
    if trick == "raise":
        raise KeyError("x\\ny")
    if trick == "hang":
        time.sleep(600)
    if trick == "string":
        return "high"
    if trick == "nan":
        return float("nan")
    if trick == "exit":
        os._exit(0)
    if trick == "fork":
        for _ in range(20):
            if os.fork() == 0:
                time.sleep(600)
        time.sleep(600)
    if trick == "disk":
        with open("/dev/full", "wb", 0) as file:
            file.write(bytes(1 << 20))
    if trick == "socket":
        socket.create_server(("127.0.0.1", 0)).accept()
    if trick == "kill":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(0, signal.SIGKILL)
    return 0.5
"""
TRICKS = ["raise", "hang", "string", "nan", "exit", "fork", "disk", "socket", "kill", "none"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_reward_that_does_everything_wrong_costs_its_answers_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead: int
) -> None:
    folder = write_rollout_inputs(tmp_path)
    records = [{"question": f"{trick}?", "trick": trick} for trick in TRICKS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "bad.py").write_text(BAD)
    recipe = rollout_recipe(
        folder, "bad", "rollout.prompts=5", "rollout.samples=2", "steps=4", "data.valid=null", "checkpoint.every=null",
        f"rollout.ahead={ahead}", "reward=[{kind: $/bad.py, timeout: 2, default: -1, max_failures: 1.0}]",
    )  # fmt: skip
    train(recipe)

    batches: list[tuple[SampledBatch, RewardedBatch | None]] = list(read_journal(recipe.run.folder))
    assert len(batches) == 4
    seen: set[str] = set()
    for sampled, rewarded in batches:
        assert rewarded is not None
        for index, answer in enumerate(sampled.answers):
            trick = TRICKS[answer.prompt]
            seen.add(trick)
            problems = rewarded.problems[index]
            if trick == "none":
                assert (rewarded.totals[index], problems) == (0.5, ())
                continue
            assert rewarded.totals[index] == -1.0, trick
            assert len(problems) == 1
            assert len(problems[0].splitlines()) == 1, trick
    assert seen == set(TRICKS)

    metrics = read_metrics(recipe.run.folder / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3, 4]
    assert sum(record["reward/failed"] for record in metrics) == pytest.approx(4 * 0.9)
    warnings = [text for text in caplog.messages if "failed on" in text]
    # The first failure, one line for each batch, and the count at the end.
    assert len(warnings) == 6
    assert all(len(text.splitlines()) == 1 for text in warnings)
