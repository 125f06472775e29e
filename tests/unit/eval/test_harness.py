"""What `headway eval harness` reports is what lm-evaluation-harness's own `--model hf` reports for the same folder."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.harness_tasks import write_tasks

from headway.cli import main
from headway.runtime.optional import install_command

TASKS = ["--tasks", "choices,texts", "--tasks", "written"]


def output(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["eval", "harness", *arguments]) == code
    captured = capfd.readouterr()
    return captured.out if code == 0 else captured.err


@pytest.fixture(scope="module", params=["plain", "opening"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts nothing before a text, and one that puts its begin token there."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    if request.param == "opening":
        tokenizer.fast.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 256)]
        )
    return write_model(
        tmp_path_factory.mktemp("model"), CONFIG.with_(vocab_size=258, max_seq_len=96), tokenizer
    )


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


def test_without_the_extra_one_line_says_how_to_get_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = output(capfd, "--model", str(model), *TASKS, code=2)
    remedy = f"Run {install_command('eval')}."
    assert (
        said
        == f"error: headway eval harness needs lm-evaluation-harness, which is not installed. {remedy}\n"
    )


@pytest.mark.filterwarnings("ignore")
def test_the_results_are_those_of_the_harness_on_the_same_folder(
    capfd: pytest.CaptureFixture[str], model: Path, tasks: Path, tmp_path: Path
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    from lm_eval.tasks import TaskManager

    options = [
        "--model",
        str(model),
        *TASKS,
        "--task-dir",
        str(tasks),
        "--batch-tokens",
        "300",
        "--json",
    ]
    ours = json.loads(output(capfd, *options, "--out", str(tmp_path / "out"), "--log-samples"))
    settings: dict[str, Any] = {
        "pretrained": str(model),
        "dtype": "float32",
        "device": "cpu",
        "batch_size": 2,
    }
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    reference = lm_eval.simple_evaluate(
        "hf", settings, tasks=["choices", "texts", "written"], task_manager=manager
    )
    for task, numbers in reference["results"].items():
        for key, value in numbers.items():
            assert ours["results"][task][key] == (
                pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            ), (task, key)
    compared = 0
    for task, documents in reference["samples"].items():
        lines = (tmp_path / "out" / f"samples-{task}.jsonl").read_text().splitlines()
        for mine, other in zip(map(json.loads, lines), documents, strict=True):
            for answer, expected in zip(mine["resps"], other["resps"], strict=True):
                (answer,) = answer
                (expected,) = expected
                if isinstance(expected, tuple):
                    assert answer == [pytest.approx(expected[0], rel=1e-4), expected[1]]
                else:
                    assert answer == (
                        pytest.approx(expected, rel=1e-4)
                        if isinstance(expected, float)
                        else expected
                    )
                compared += 1
    assert compared == 6 * 3 + 4 + 6
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == ours
    assert "| choices | 1 |  | acc | " in (tmp_path / "out" / "report.md").read_text()
    assert "HF_HUB_OFFLINE" not in os.environ, "what starts later may use the network again"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["opening"], indirect=True)
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_and_a_limit_find_what_one_finds(
    capfd: pytest.CaptureFixture[str], model: Path, tasks: Path
) -> None:
    pytest.importorskip("lm_eval")
    options = [
        "--model",
        str(model),
        *TASKS,
        "--task-dir",
        str(tasks),
        "--limit",
        "3",
        "--batch-tokens",
        "200",
        "--json",
    ]
    alone = json.loads(output(capfd, *options))
    both = json.loads(output(capfd, *options, "--nproc", "2"))
    assert alone["n-samples"]["written"] == {"original": 6, "effective": 3}
    assert alone["results"] == both["results"]


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_option_of_the_harness_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], model: Path, tasks: Path, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    options = ["--model", str(model), "--task-dir", str(tasks)]
    (tasks / "written.jsonl").unlink()
    for wrong, word in (
        (["--tasks", "written"], "written.jsonl"),
        (["--tasks", "texts", "--limit", "0"], "--limit is 0"),
        (["--tasks", "texts", "--log-samples"], "--log-samples is given without --out"),
        (["--tasks", "texts", "--task-dir", str(tmp_path / "none")], "--task-dir is"),
        (["--tasks", ","], "no task is given"),
    ):
        said = [
            line
            for line in output(capfd, *options, *wrong, code=2).splitlines()
            if line.startswith("error: ")
        ]
        assert len(said) == 1
        assert word in said[0]
