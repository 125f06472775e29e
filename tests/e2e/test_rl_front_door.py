"""A run of GRPO from the command line and in Python: what it reads, says on the screen, and advises next; and `doctor data` before it."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, write_model

import headway as hw
from headway.cli import main
from headway.config.load import load
from headway.train.config import Recipe

PROMPTS = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(24)]
SMALL = [
    "rollout={prompts: 2, samples: 2, max_new_tokens: 4}",
    "data.train.0.chat_template=alpaca",
    "data.seq_len=256",
    "batch.micro_rows=2",
    "track=[]",
    "device=cpu",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, CONFIG.with_(max_seq_len=256, init_std=0.2))


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps(record) for record in PROMPTS]
    Path("prompts.jsonl").write_text("\n".join(lines) + "\n")
    # A reward that tells answers apart, whatever an untrained model writes.
    Path("first.py").write_text(
        "def reward(prompt, answer, record):\n    return float(sum(map(ord, answer)) % 2)\n"
    )


def train(model: Path, *settings: str) -> int:
    return main(
        ["train", "grpo", f"init.from={model}", "data.train=prompts.jsonl", *SMALL, *settings]
    )


@pytest.mark.usefixtures("_here")
def test_a_run_from_the_command_line_says_what_it_reads_and_what_comes_next(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "reward=first.py", "steps=3", "eval.rows=4", "eval.every=2") == 0
    said = capfd.readouterr().err
    assert "prompts.jsonl: prompt (question), 24 records" in said
    assert "rollouts: 2 prompts x 2 answers of at most 4 tokens" in said
    assert "prompts: 2" in said
    assert "documents" not in said
    assert "WAITS FOR DATA" not in said
    assert "waited for data" not in said
    assert "1/3  reward " in said
    assert "  entropy " in said
    assert "rollouts and rewards took" in said
    assert "headway rollouts runs/grpo-laptop --best" in said

    record = json.loads(Path("runs/grpo-laptop/metrics.jsonl").read_text().splitlines()[-1])
    times = record["time"]
    assert times["rollout_seconds"] > 0
    assert times["data_wait_seconds"] < times["rollout_seconds"]
    assert 0 < times["rollout_share"] <= 1
    summary = json.loads(Path("runs/grpo-laptop/summary.json").read_text())
    assert 0 < summary["rollout_share"] <= 1

    assert main(["rollouts", "runs/grpo-laptop", "--step", "1", "--json"]) == 0
    answers: list[dict[str, Any]] = json.loads(capfd.readouterr().out)["answers"]
    assert len(answers) == 4
    assert answers[0]["question"] == PROMPTS[answers[0]["prompt"]]["question"]


@pytest.mark.usefixtures("_here")
def test_a_recipe_without_a_metric_keeps_the_checkpoint_of_the_best_reward(model: Path) -> None:
    Path("own.yaml").write_text(
        f"init: {{from: {model}}}\n"
        "data: {train: [prompts.jsonl], valid: {fraction: 0.2}}\n"
        "objective: {kind: grpo}\nreward: first.py\nsteps: 2\neval: {every: 1, rows: 2}\n"
    )
    recipe = load(Recipe, Path("own.yaml"), [*SMALL, "checkpoint.every=1", "run.name=own"])
    hw.train(recipe)
    assert load(Recipe, Path("runs/own/recipe.yaml")).checkpoint.metric == "reward"


@pytest.mark.usefixtures("_here")
def test_python_takes_records_as_prompts(model: Path) -> None:
    recipe = Recipe.load(
        "grpo",
        {
            "init.from": str(model),
            "reward": "number",
            "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": 4},
            "data.seq_len": 256,
            "data.train.0.chat_template": "alpaca",
            "data.valid": None,
            "eval.at_start": False,
            "batch.micro_rows": 2,
            "track": [],
            "device": "cpu",
        },
        steps=1,
    )
    result = hw.train(recipe, data=PROMPTS)
    assert result.steps == 1


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.train=[{path: prompts.jsonl, kind: chat}]"], "is of kind chat, and rollouts"),
        (["data.train=[{path: missing.jsonl, kind: prompt}]"], "missing.jsonl"),
        (["reward={kind: number, column: nothing}"], "needs one of the columns nothing"),
    ],
)
def test_data_that_holds_no_prompts_is_refused_in_one_line(
    settings: list[str], said: str, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reward = ["reward=number"]
    assert train(model, *reward, "steps=1", *settings) == 2
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(error) == 1
    assert said in error[0]


@pytest.mark.usefixtures("_here")
def test_doctor_data_shows_prompts_and_what_sampled_answers_earn(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["grpo", f"init.from={model}", "data.train=prompts.jsonl", "reward=first.py", *SMALL]
    assert main(["doctor", "data", *words, "--samples", "2"]) == 0
    shown = capfd.readouterr().out
    assert "0+1?" in shown
    assert "[reward " in shown
    assert "4 sampled answers to 2 prompts earn" in shown
    assert main(["doctor", "data", *words, "--document", "5", "--json"]) == 0
    (prompt,) = json.loads(capfd.readouterr().out)["prompts"]
    assert prompt["number"] == 5
    assert len(prompt["answers"]) == 2
    assert not Path("runs").exists()


def prompts_of_doctor(
    model: Path, capfd: pytest.CaptureFixture[str], *settings: str
) -> dict[str, Any]:
    """What `doctor data --json` says of three prompts."""
    words = ["grpo", f"init.from={model}", "data.train=prompts.jsonl", *SMALL, *settings]
    assert main(["doctor", "data", *words, "--samples", "3", "--json"]) == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.usefixtures("_here")
def test_doctor_data_counts_the_tokens_that_a_length_penalty_reads(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = prompts_of_doctor(model, capfd, "reward={kind: length, max_tokens: 1}")
    rewards = [answer["reward"] for prompt in report["prompts"] for answer in prompt["answers"]]
    # Every answer has a token, the one that ends it at least.
    assert set(rewards) == {-1.0}


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("cut", ["rollout.top_k=1", "rollout.top_p=1.0e-9", "rollout.min_p=1.0"])
def test_doctor_data_draws_from_the_tokens_that_the_run_draws_from(
    model: Path, capfd: pytest.CaptureFixture[str], cut: str
) -> None:
    settings = ("reward=first.py", "rollout.samples=6", "rollout.max_new_tokens=8")
    report = prompts_of_doctor(model, capfd, *settings)
    texts = [{answer["text"] for answer in prompt["answers"]} for prompt in report["prompts"]]
    assert min(len(different) for different in texts) > 1

    # The likeliest token each time: all answers to a prompt are equal.
    report = prompts_of_doctor(model, capfd, *settings, cut)
    texts = [{answer["text"] for answer in prompt["answers"]} for prompt in report["prompts"]]
    assert [len(different) for different in texts] == [1, 1, 1]


@pytest.mark.usefixtures("_here")
def test_doctor_data_says_which_share_of_the_prompts_has_no_signal(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Answers to the middle one of the three prompts earn as much as their first letter says.
    Path("middle.py").write_text(
        "def reward(prompt, answer, record):\n"
        "    return float(sum(map(ord, answer))) if record['answer'] == '12' else 1.0\n"
    )
    settings = ("reward=middle.py", "rollout.samples=6")
    report = prompts_of_doctor(model, capfd, *settings)
    assert report["signal"] == [
        {"stage": None, "prompts": 3, "answers": 6, "without_signal": pytest.approx(2 / 3)}
    ]
    assert [prompt["has_signal"] for prompt in report["prompts"]] == [False, True, False]
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["signal"]["state"] == "ok"
    assert checks["signal"]["detail"].startswith("2 of 3 prompts (67%) without signal")

    report = prompts_of_doctor(model, capfd, "reward={kind: length, max_tokens: 1}")
    assert report["signal"][0]["without_signal"] == 1.0
    (check,) = [check for check in report["checks"] if check["name"] == "signal"]
    assert check["state"] == "warn"


@pytest.mark.usefixtures("_here")
def test_doctor_data_names_a_reward_that_cannot_read_the_records(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["grpo", f"init.from={model}", "data.train=prompts.jsonl", *SMALL]
    reward = "reward={kind: number, column: nothing}"
    assert main(["doctor", "data", *words, reward, "--samples", "1", "--json"]) == 1
    assert "needs one of the columns nothing" in capfd.readouterr().out
