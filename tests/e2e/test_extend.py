"""docs/extend.md: its code is that of examples/my_lab, and a run takes a loss, an optimizer, a family, ... of that package."""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model import byte_tokenizer
from support.runs import headway

import headway as hw
from headway import plugin
from headway.cli import main
from headway.model.layout import num_parameters
from headway.optim.base import Guard, Hyper
from headway.track.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]
LAB = ROOT / "examples" / "my_lab"
TINY: dict[str, Any] = {
    "model": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 24, "vocab_size": 320, "max_seq_len": 32},
    "data": {"seq_len": 32}, "batch": {"rows": 4}, "steps": 3, "device": "cpu", "log": {"every": 1}, "optim": {"lr": 0.01},
}  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, installed: on Python's path, with the metadata that pip writes."""
    project = tomllib.loads((LAB / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / f"my_lab-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    lines = [
        line
        for name, entries in groups
        for line in (f"[{name}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    shutil.copytree(LAB / "my_lab", tmp_path / "site" / "my_lab")
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["extend.md", "extend.zh-CN.md"])
def test_the_page_shows_a_whole_family(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    shown = re.findall(r"(?ms)^```python\n# headway/(model/families/\w+\.py)\n(.*?)^```", page)
    assert [path for path, _ in shown] == ["model/families/seed_oss.py"]
    for path, code in shown:
        assert code == (ROOT / "src" / "headway" / path).read_text(encoding="utf-8")


def test_the_page_shows_the_files_of_the_package() -> None:
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"(?ms)^```python\n# my_lab/(\w+\.py)\n(.*?)^```", page))
    files = {
        file.name: file.read_text(encoding="utf-8")
        for file in (LAB / "my_lab").glob("*.py")
        if file.name != "__init__.py"
    }
    assert shown == files, "docs/extend.md shows other code than examples/my_lab"
    assert re.findall(r"(?ms)^```toml\n(.*?)^```", page)[0] in (LAB / "pyproject.toml").read_text()


def test_the_page_lists_every_name_that_plug_ins_may_import() -> None:
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    section = page.partition("## What your code imports")[2].partition("\n## ")[0]
    table = section.partition("|---|---|")[2]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(plugin.__all__)


def test_a_run_takes_everything_from_the_package(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_tokenizer().save(lab / "tokenizer")
    (lab / "fortunes").mkdir()
    (lab / "fortunes" / "one").write_text(
        "\n%\n".join(f"fortune {number} says hello" for number in range(20)) + "\n"
    )
    recipe = hw.Recipe.load(TINY).with_(
        {
            "model.family": "my_lab.family", "objective.kind": "my_lab.focal_loss", "track": ["my_lab.text_log"],
            "optim": {"kind": "my_lab.momentum", "lr": 0.01, "momentum": 0.5}, "callbacks": ["my_lab.follow:Best"],
            "data.train": [{"path": "fortunes", "format": "my_lab.fortune"}], "data.cache_dir": lab / "cache",
            "data.valid": {"fraction": 0.2}, "tokenizer": "tokenizer", "run.dir": lab, "eval.every": 1,
        }
    )  # fmt: skip
    result = hw.train(recipe)
    assert (
        json.loads((lab / "run" / "final" / "config.json").read_text())["model_type"] == "my_llama"
    )
    log = (lab / "run" / "log.txt").read_text()
    assert "3 loss" in log
    assert "finish: done" in log
    assert float((lab / "run" / "best.txt").read_text()) == pytest.approx(
        result.best_valid_loss, abs=1e-3
    )
    assert {load["key"] for load in json.loads((lab / "run" / "code.json").read_text())} == {
        "model.family", "objective.kind", "optim.kind", "track.0.kind", "callbacks.0", "data.train.0.format"
    }  # fmt: skip
    assert result.history()[-1]["nll"] > 0 and hw.train(recipe.with_(steps=4)).steps == 4, (
        "it resumes"
    )
    capsys.readouterr()
    assert main(["losses", "run", "--last", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["losses", "nothing"]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "my_lab.verbs:losses of my-lab 0.1" in capsys.readouterr().out
    with pytest.raises(hw.ConfigError, match=r"optim.momentum is 2.0; it should be less than 1"):
        recipe.with_({"optim.momentum": 2.0})


def test_the_focal_loss_without_focus_is_the_plain_loss(lab: Path) -> None:
    recipe = hw.Recipe.load(TINY, {"run.dir": lab})
    plain = hw.train(recipe)
    focal = hw.train(
        recipe.with_({"run.name": "focal"}, objective={"kind": "my_lab.focal_loss", "gamma": 0.0})
    )
    assert [record["loss"] for record in focal.history()] == pytest.approx(
        [record["loss"] for record in plain.history()], rel=1e-5
    )


def test_the_momentum_optimizer_is_torchs(lab: Path) -> None:
    from my_lab.momentum import Momentum  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    mine = torch.randn(10)
    held = torch.zeros(10)
    step = torch.zeros(())
    parameter = torch.nn.Parameter(mine.clone())
    reference = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    for number in range(5):
        grad = torch.randn(10)
        guard = Guard(torch.tensor(2.0), torch.tensor(float(number == 2)))
        Momentum().update(
            [mine],
            [grad * 2],
            {"momentum": [held]},
            [step],
            Hyper(0.1, (0.9, 0.0), 0.0, 0.0),
            guard,
        )
        if number != 2:
            parameter.grad = grad
            reference.step()
    assert torch.allclose(mine, parameter)
    assert step == 4


@pytest.mark.drill
def test_files_in_the_working_directory_work_with_two_ranks(lab: Path) -> None:
    for name in ("focal_loss", "momentum", "text_log", "follow"):
        shutil.copy(LAB / "my_lab" / f"{name}.py", lab)
    (lab / "recipe.yaml").write_text(json.dumps({**TINY, "steps": 4}))
    kinds = [
        "objective=./focal_loss.py",
        "optim.kind=./momentum.py",
        "track=[./text_log.py]",
        "callbacks=[./follow.py:Best]",
    ]
    for name, ranks in (("one", "1"), ("two", "2")):
        done = headway(
            "train", "recipe.yaml", f"run.dir={lab}", f"run.name={name}", *kinds, "--nproc", ranks
        )
        assert done.returncode == 0, done.stderr
    alone = [record["loss"] for record in read_metrics(lab / "one" / "metrics.jsonl")]
    on_two_ranks = [record["loss"] for record in read_metrics(lab / "two" / "metrics.jsonl")]
    assert alone == pytest.approx(on_two_ranks, rel=1e-5)
    assert len(json.loads((lab / "two" / "code.json").read_text())) == 4
    done = headway(
        "train", "recipe.yaml", f"run.dir={lab}", "run.name=two", *kinds, "steps=6", "--nproc", "2"
    )
    assert done.returncode == 0
    assert len((lab / "two" / "metrics.jsonl").read_text().splitlines()) == 6


def write_graded(path: Path) -> None:
    """Answers to sums; every other one has grade 0."""
    records = [
        {"prompt": f"{number} + 1?", "response": str(number + 1), "grade": number % 2}
        for number in range(24)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


GRADED = {
    "objective.kind": "my_lab.graded",
    "data.train": [{"path": "graded.jsonl", "kind": "my_lab.graded"}],
    "data.valid": {"fraction": 0.25},
    "tokenizer": "tokenizer",
}


def test_a_task_of_the_package_is_checked_planned_and_trained(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(lab / "tokenizer")
    write_graded(lab / "graded.jsonl")
    recipe = hw.Recipe.load(TINY, {**GRADED, "run.dir": lab, "data.cache_dir": lab / "cache"})
    recipe = recipe.with_({"data.seq_len": 64, "model.max_seq_len": 64})
    (lab / "recipe.yaml").write_text(json.dumps(recipe.model_dump(mode="json", by_alias=True)))

    assert main(["data", "validate", "graded.jsonl", "--kind", "my_lab.graded"]) == 0
    assert "24 good, 0 bad" in capsys.readouterr().out
    assert main(["doctor", "data", "recipe.yaml", "--json"]) == 0
    checked = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checked["length of graded.jsonl"]["state"] == "ok"
    assert "0 of 18 answers are longer" in checked["length of graded.jsonl"]["detail"]
    assert main(["plan", "recipe.yaml", "--gpu", "h200", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["model"]["trained"] == num_parameters(recipe.model)
    assert planned["model"]["reference"] is None
    assert planned["layout"]["step_tokens"] == 4 * 64
    assert planned["memory"]["kinds"]["logits and head"] > 0
    # Its loss gathers the grade of each document, so `plan` shares no row among ranks.
    assert main(["plan", "recipe.yaml", "--gpu", "h200", "parallel.context=2"]) == 2
    assert "objective my_lab.graded needs whole rows" in capsys.readouterr().err

    trained = hw.train(recipe)
    last = trained.history()[-1]
    assert 0 < last["grade"] < 1
    assert last["loss"] < last["nll"], "answers of grade 0 carry no loss"
    with pytest.raises(hw.ConfigError, match=r"holds records of kind my_lab.graded"):
        hw.train(recipe.with_({"run.name": "plain"}, objective={"kind": "next_token"}))


def test_answers_without_a_grade_are_no_targets_of_the_task(lab: Path) -> None:
    """Trained on answers of which half have grade 0, the weights are those of training on the other half with their grades."""
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(lab / "tokenizer")
    write_graded(lab / "graded.jsonl")
    recipe = hw.Recipe.load(TINY, {**GRADED, "run.dir": lab, "data.cache_dir": lab / "cache"})
    recipe = recipe.with_({"data.seq_len": 64, "model.max_seq_len": 64, "data.valid": None})
    once = hw.train(recipe.with_({"batch": {"rows": 4, "micro_rows": 4}}))
    split = hw.train(recipe.with_({"batch": {"rows": 4, "micro_rows": 1}, "run.name": "split"}))
    assert [record["loss"] for record in split.history()] == pytest.approx(
        [record["loss"] for record in once.history()], rel=1e-5
    )


def test_plug_ins_that_import_other_modules_of_headway_are_told_once(
    lab: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (lab / "old.py").write_text(
        "from headway.config.section import setting\n"
        "from headway.objective.base import Loss, ObjectiveConfig, Term\n"
        "from headway.plugin import Batch\n\n\n"
        "class Config(ObjectiveConfig):\n"
        '    kind: str = setting("./old.py", "This file.")\n'
    )
    for _ in range(2):
        hw.Recipe.load(TINY, {"objective.kind": "./old.py"})
    warnings = [message for message in caplog.messages if "headway.plugin" in message]
    assert len(warnings) == 1
    assert "./old.py imports headway.config.section, headway.objective.base." in warnings[0]
