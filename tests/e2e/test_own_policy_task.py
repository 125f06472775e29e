"""A task outside headway that learns from rewards: examples/my_lab/my_lab/reinforce.py, used by `plan`, `doctor data` and `train`."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fuzzing import run_verb
from support.rollout_runs import journal_content, rollout_recipe, write_rollout_inputs
from support.runs import assert_same_run

from headway.errors import ConfigError, GaveUpError
from headway.tasks.answers import AnswerGroup
from headway.track.metrics_file import read_metrics
from headway.train import train

LAB = Path(__file__).parents[2] / "examples" / "my_lab" / "my_lab"
MINE = "objective=my_lab.reinforce"
PLAIN_TASK = """\
from headway import plugin

class Config(plugin.TaskConfig):
    kind: str = "{name}"
    samples: int = 1
    weight: float = 0.0

    @property
    def reads(self):
        return ({reads!r},)

    @property
    def needs(self):
        return plugin.TaskNeeds(rollouts=True)

    @property
    def fewest_samples(self):
        return self.samples

    @property
    def reward_divergence(self):
        return self.weight
"""
SILENT_LOSS = """
    def advantages_of(self, groups):
        return [group.rewards for group in groups]

    def build(self):
        return Silent()

class Silent:
    scope = "row"
    module = None

    def loss(self, out, batch, at, collectives):
        log_prob, _ = out.head.scores(batch.targets)
        return plugin.Loss({"silent": plugin.Term(-(log_prob * batch.loss_weight).sum())})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_rollout_inputs(tmp_path_factory.mktemp("policy"))
    shutil.copytree(LAB, folder / "site" / "my_lab")
    return folder


@pytest.fixture(autouse=True)
def _lab(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder / "site"))
    monkeypatch.chdir(folder)


def run(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    recipe = rollout_recipe(folder, name, *overrides)
    train(recipe)
    return read_metrics(recipe.run.folder / "metrics.jsonl")


@pytest.mark.slow
def test_plan_doctor_and_a_dry_run_take_the_task(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout_recipe(folder, "asked")
    assert run_verb(["plan", "asked.yaml", MINE, "--gpu", "h200", "--json"]) == 0
    planned = capsys.readouterr().out
    assert run_verb(["plan", "asked.yaml", "--gpu", "h200", "--json"]) == 0
    # The same memory as of grpo without a reference: the sampler's copy is counted.
    assert json.loads(planned) == json.loads(capsys.readouterr().out)
    assert run_verb(["doctor", "data", "asked.yaml", MINE]) in (0, 1)
    assert "prompts" in capsys.readouterr().out
    assert run_verb(["train", "asked.yaml", MINE, "--dry-run"]) == 0


def test_the_task_is_that_of_grpo_put_together_from_the_same_parts(folder: Path) -> None:
    """With one prompt a rollout the baseline is the mean of its answers; cispo's gradient goes
    through the log-probability alone; `longest` divides by 8 what REINFORCE does not."""
    small = ("steps=1", "eval.every=null", "rollout.prompts=1", "data.valid=null")
    (mine,) = run(folder, "mine", *small, MINE)
    (grpo,) = run(
        folder,
        "grpo",
        *small,
        "objective={kind: grpo, algorithm: cispo, advantage: mean, weighting: longest}",
    )
    for name in ("loss", "grad_norm"):
        assert mine[name] == pytest.approx(8 * grpo[name], rel=1e-4)
    for name in ("reward", "entropy", "agreement/mean", "agreement/max", "answer/tokens"):
        assert mine[name] == pytest.approx(grpo[name], rel=1e-5)
    assert mine["grad_norm"] > 0


@pytest.mark.slow
def test_a_resumed_run_rates_its_answers_as_a_straight_one(folder: Path) -> None:
    """In the middle of a rollout: what is left of it is rated again, with all of its prompts."""
    settings = (MINE, "rollout.updates=2", "rollout.passes=2", "checkpoint.every=1", "steps=6")
    straight = rollout_recipe(folder, "straight", *settings, "checkpoint.keep_last=9")
    train(straight)
    resumed = rollout_recipe(folder, "resumed", *settings, "checkpoint.keep_last=9")
    shutil.copytree(straight.run.folder, resumed.run.folder)
    train(resumed, resume=str(resumed.run.folder / "checkpoints/step-00000003"))
    assert_same_run(straight.run.folder, resumed.run.folder, 6)
    assert journal_content(resumed.run.folder) == journal_content(straight.run.folder)


def test_the_baseline_is_that_of_all_answers_and_long_ones_pay_for_it() -> None:
    from my_lab.reinforce import Config  # pyright: ignore[reportMissingImports]

    groups = (AnswerGroup((1.0, 0.0), (4, 2)), AnswerGroup((0.5,), (2,)))
    assert Config().advantages_of(groups) == [[0.5, -0.5], [0.0]]
    costly = Config(token_cost=0.25).advantages_of(groups)
    # Worth 0, -0.5 and 0 with the cost; the mean is -1/6.
    assert costly == [pytest.approx([1 / 6, -1 / 3]), pytest.approx([1 / 6])]


@pytest.mark.slow
def test_the_reward_rises_with_a_task_of_the_user(folder: Path) -> None:
    records = run(folder, "rising", MINE, "steps=24", "optim.lr=1e-2", "eval.every=null")
    rewards = [record["reward"] for record in records]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.1
    assert max(record["agreement/mean"] for record in records) < 1e-5


@pytest.mark.parametrize(
    ("reads", "more", "overrides", "said"),
    [
        ("prompt", "", [], "Define advantages_of in its Config"),
        ("chat", SILENT_LOSS, [], 'Let its `reads` return ("prompt",)'),
        ("prompt", SILENT_LOSS, ["objective.weight=0.5"], "no frozen model that scores tokens"),
        ("prompt", SILENT_LOSS, ["objective.samples=5"], "rollout.samples is 4"),
        ("prompt", SILENT_LOSS, ["reward=[]"], "reward is empty"),
    ],
)
def test_a_task_without_answers_is_refused_in_one_line_before_anything_is_read(
    folder: Path, reads: str, more: str, overrides: list[str], said: str
) -> None:
    name = f"./task{abs(hash((reads, more)))}.py"
    (folder / name).write_text(PLAIN_TASK.format(name=name, reads=reads) + more)
    recipe = rollout_recipe(folder, "refused", f"objective={name}", *overrides)
    (folder / "refused.yaml").unlink()
    with pytest.raises(ConfigError) as refusal:
        train(recipe)
    assert said in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    assert not (folder / "runs" / "refused").exists()


def test_a_loss_that_does_not_report_the_agreement_ends_the_run(folder: Path) -> None:
    (folder / "silent.py").write_text(
        PLAIN_TASK.format(name="./silent.py", reads="prompt") + SILENT_LOSS
    )
    with pytest.raises(GaveUpError, match=r"objective \./silent\.py does not report") as refusal:
        run(folder, "silent", "objective=./silent.py", "eval.every=null")
    assert "set difference_limit to null" in str(refusal.value)
    records = run(
        folder,
        "unlimited",
        "objective=./silent.py",
        "eval.every=null",
        "steps=1",
        "rollout.difference_limit=null",
    )
    assert len(records) == 1
