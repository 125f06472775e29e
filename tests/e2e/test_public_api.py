"""The public API as a stranger uses it: a script that trains, evaluates, chats and sweeps, and is typed; data from Python; callbacks."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model

import headway as hw

ROOT = Path(__file__).parents[2]
SWEEP = ROOT / "examples" / "sweep.py"
ROWS = [{"text": f"{number} " * 12} for number in range(30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte tokenizer that knows chatml."""
    folder = tmp_path_factory.mktemp("model")
    return write_model(
        folder, CONFIG.with_(max_seq_len=128), byte_tokenizer("<|im_start|>", "<|im_end|>")
    )


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> hw.Recipe:
    changes = {
        "init.from": model,
        "run.dir": tmp_path,
        "data.cache_dir": tmp_path / "cache",
        "data.seq_len": 64,
        "device": "cpu",
    }
    return hw.Recipe.load(
        None, changes, steps=4, batch={"rows": 2}, eval={"every": 2, "rows": 2}, log={"every": 1}
    )


def test_the_sweep_trains_scores_answers_and_exports(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("sweep", SWEEP)
    assert spec is not None
    assert spec.loader is not None
    sweep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sweep)
    sweep.main(str(model), str(tmp_path), steps=2)
    shown = capsys.readouterr().out
    assert (tmp_path / "lr-0.001" / "final").is_dir()
    assert (tmp_path / "lr-0.0003" / "final").is_dir()
    assert (tmp_path / "best" / "config.json").is_file()
    assert f"exported to {tmp_path / 'best'}" in shown
    assert "step 2: valid loss" in shown
    assert "perplexity" in shown
    assert "letters" in shown
    assert len([line for line in SWEEP.read_text().splitlines() if line.strip()]) <= 30
    records = list((tmp_path / "cache" / "headway" / "records").iterdir())
    assert sorted(len(path.read_text().splitlines()) for path in records) == [1, 1, 40, 200], (
        "the second run reads the same files"
    )


@pytest.mark.drill
def test_the_sweep_passes_mypy_strict(tmp_path: Path) -> None:
    """`make lint` checks the examples with basedpyright; this is for users of mypy."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(SWEEP)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stdout


def test_training_on_records_equals_training_on_a_file(recipe: hw.Recipe, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    from_records = hw.train(recipe.with_({"run.name": "one"}), data=iter(ROWS), valid=ROWS[:5])
    from_file = hw.train(
        recipe.with_(
            {"run.name": "two", "data.valid": {"sets": {"valid": f"{tmp_path}/rows.jsonl"}}}
        ),
        data=tmp_path / "rows.jsonl",
    )
    assert [row[:2] for row in from_records.losses.rows] == [
        row[:2] for row in from_file.losses.rows
    ]
    assert len(from_records.losses) >= 2
    assert from_records.run == tmp_path / "one"
    assert from_records.steps == 4
    assert from_records.final == tmp_path / "one" / "final"
    assert from_records.final.is_dir()
    assert from_records.last_loss == from_records.history()[-1]["loss"]
    assert from_records.last_valid_loss == from_records.losses.rows[-1][2]
    assert from_records.stopped_by is None
    assert not from_records.stopped_early
    assert from_records.summary["tokens"] == from_records.tokens > 0
    assert f"run {from_records.run}" in str(from_records)
    assert "<table>" in from_records._repr_html_()
    store = hw.tokenize(
        ROWS,
        recipe.init.source + "/../tokenizer" if recipe.init.source else "",
        cache_dir=tmp_path / "cache",
    )
    assert store.documents == 30
    assert store.path.is_dir()
    assert "30" in str(store)
    three = hw.train(recipe.with_({"run.name": "three"}), data=store.path, valid=0.2)
    assert three.losses.rows[0][1] is not None
    assert "valid" in three.losses.columns


def test_conversations_take_their_kind_from_the_call_the_recipe_or_the_records(
    recipe: hw.Recipe, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{number}?", "response": "yes"} for number in range(12)]
    first = hw.train(recipe, data=rows)
    same = hw.train(recipe.with_({"run.name": "same"}), data=rows, kind="chat")
    assert same.losses == first.losses
    again = recipe.with_(
        {
            "run.name": "again",
            "data.train": [{"path": "none", "kind": "chat", "chat_template": "chatml"}],
        }
    )
    assert hw.train(again, data=rows).losses.rows == first.losses.rows
    detected = hw.tokenize(
        rows, recipe.with_().init.source + "/../tokenizer", cache_dir=tmp_path / "cache"
    )  # type: ignore[operator]
    assert (detected.kind, detected.documents) == ("chat", 12)
    done = hw.train(again, data=rows)
    assert done.final == tmp_path / "again" / "final" and done.losses.rows == first.losses.rows, (
        "a finished run is found again"
    )
    with pytest.raises(hw.ConfigError, match="neither data nor valid is given"):
        hw.train(recipe, kind="chat")
    with pytest.raises(hw.DataError, match=r"data\[0\] is a str"):
        hw.train(recipe, data=(text for text in ("a", "b")))  # type: ignore[arg-type]


class Watch(hw.Callback):
    """Notes what it is told; fails at one step."""

    background = True

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at
        self.steps: dict[int, Any] = {}
        self.saves: list[Path] = []
        self.valid: dict[int, Any] = {}
        self.summary: Mapping[str, Any] = {}

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self.fail_at:
            raise RuntimeError("mine")
        self.steps[step] = metrics["loss"]

    def on_validate(self, step: int, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        self.valid[step] = metrics["valid"]["loss"]

    def on_save(self, step: int, path: Path) -> None:
        self.saves.append(path)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


def test_background_callbacks_see_the_run_and_a_broken_one_is_an_event(recipe: hw.Recipe) -> None:
    good = Watch()
    bad = Watch(fail_at=2)
    result = hw.train(
        recipe.with_({"checkpoint.every": 2}), data=ROWS, valid=ROWS[:5], callbacks=[good, bad]
    )
    history = result.history()
    assert good.steps == {record["step"]: record["loss"] for record in history}
    assert result.steps == 4
    assert (
        good.valid
        == {
            record["step"]: record["valid"]["valid"]["loss"]
            for record in history
            if "valid" in record
        }
        != {}
    )
    assert [path.name for path in good.saves] == ["step-00000002", "step-00000004"]
    assert good.saves[-1].is_dir()
    assert good.summary["last_loss"] == result.last_loss
    events = [json.loads(line) for line in (result.run / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "callback"]
    assert "Watch failed in on_step: RuntimeError: mine" in event["text"]
    assert bad.summary == {}
    with pytest.raises(hw.ConfigError, match="callbacks has a int"):
        hw.train(recipe, callbacks=[3])  # type: ignore[list-item]


LOSS = """
from typing import Any, Literal
from headway.config.section import setting
from headway.tasks.base import Loss, TaskConfig, Term

class Config(TaskConfig):
    kind: str = setting("./my_loss.py", "This file.")
    power: float = setting(1.0, "Exponent.")

    def build(self) -> Any:
        return Power(self.power)

class Power:
    scope: Literal["row", "step"] = "row"
    module = None

    def __init__(self, power: float) -> None:
        self.power = power

    def loss(self, out: Any, batch: Any, at: Any, exchange: Any) -> Loss:
        log_prob, _ = out.head.scores(batch.targets)
        return Loss({"loss": Term(((-log_prob).pow(self.power) * batch.loss_weight).sum())})
"""


def test_a_loss_in_a_file_here_trains_resumes_and_is_recorded(
    recipe: hw.Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loss.py").write_text(LOSS)
    mine = recipe.with_(objective={"kind": "./my_loss.py"})
    trained = hw.train(mine, data=ROWS)
    plain = hw.train(recipe.with_({"run.name": "plain"}), data=ROWS)
    assert trained.last_loss == pytest.approx(plain.last_loss)
    (code,) = json.loads((trained.run / "code.json").read_text())
    assert (code["key"], code["name"], code["file"]) == (
        "objective.kind",
        "./my_loss.py",
        str(tmp_path / "my_loss.py"),
    )
    assert (
        trained.run / "logs" / "starts" / "0001" / "code" / "objective.kind-my_loss.py"
    ).read_text() == LOSS
    (tmp_path / "my_loss.py").write_text(LOSS + "# edited\n")
    assert hw.train(mine.with_(steps=5), data=ROWS).steps == 5
    assert "the code of ./my_loss.py has changed" in caplog.text
    assert json.loads((trained.run / "code.json").read_text())[0]["sha256"] != code["sha256"]
    assert not (plain.run / "code.json").exists()
