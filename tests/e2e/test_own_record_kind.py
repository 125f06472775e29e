"""A kind of records outside headway: `data validate`, `doctor data`, `data tokenize` and training read it, also in worker processes."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.byte_model import byte_tokenizer
from support.fuzzing import run_verb

from headway.prepare.build import BuildOptions, build_store
from headway.store.reader import open_store

LAB = Path(__file__).parents[2] / "examples" / "my_lab" / "my_lab"
ANIMALS = ("cat", "dog", "owl", "fox", "bee")
MODEL = ["model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "model.ffn_size=16"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of a user on Python's path, its records and a tokenizer."""
    shutil.copytree(LAB, tmp_path / "site" / "my_lab")
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(tmp_path / "tokenizer")
    lines = [
        {"ask": f"Which is number {number}?", "choices": list(ANIMALS), "right": number % 5}
        for number in range(40)
    ]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def settings(kind: str, *more: str) -> list[str]:
    source = json.dumps([{"path": "quiz.jsonl", "kind": kind}])
    overrides = [
        f"data.train={source}",
        "tokenizer=tokenizer",
        "data.cache_dir=cache",
        "run.dir=runs",
    ]
    return [*overrides, "data.seq_len=128", "model.max_seq_len=128", "device=cpu", *MODEL, *more]


@pytest.mark.parametrize("kind", ["my_lab.quiz", "./quiz_kind.py"])
def test_training_and_the_checks_read_a_users_kind(
    world: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    shutil.copy(LAB / "quiz.py", world / "quiz_kind.py")
    assert run_verb(["data", "validate", "quiz.jsonl", "--kind", kind, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == kind
    assert report["good"] == 40
    assert report["longest"] > 30

    assert run_verb(["doctor", "data", *settings(kind)]) == 0
    shown = capsys.readouterr().out
    assert "Which is number 0?" in shown
    assert "[warn]" not in shown

    assert run_verb(["train", *settings(kind, "steps=2", "batch.rows=2", "run.name=quiz")]) == 0
    said = capsys.readouterr().err
    assert "40 questions of 40 records" in said
    code = json.loads((world / "runs/quiz/code.json").read_text())
    assert [entry["key"] for entry in code] == ["data.train.0.kind"]
    # Only the right choice is learned.
    (folder,) = (path for path in (world / "cache/stores").iterdir() if path.is_dir())
    store = open_store(folder)
    mask = store.mask(0, 0, int(store.lengths(0, 1)[0]))
    assert store.num_documents == 40
    assert mask is not None
    assert 0 < mask.sum() < 20
    assert store.manifest.sources[0].startswith("kind=chat ")


@pytest.mark.parametrize("kind", ["my_lab.quiz", "./quiz_kind.py"])
def test_worker_processes_import_a_users_kind(
    world: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    shutil.copy(LAB / "quiz.py", world / "quiz_kind.py")
    monkeypatch.setattr("headway.prepare.workers.CHUNK_BYTES", 512)
    stores: list[bytes] = []
    for workers in (1, 2):
        options = BuildOptions(kind, workers=workers)
        build_store(["quiz.jsonl"], "tokenizer", world / f"out{workers}", options)
        stores.append(next((world / f"out{workers}").glob("*.bin")).read_bytes())
    assert stores[0] == stores[1]


def test_bad_records_and_mistakes_in_the_module_are_one_line(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("quiz.jsonl", "a") as file:
        file.write('{"ask": "?", "choices": ["a"], "right": 3}\n{"ask": "?"}\n')
    assert run_verb(["data", "validate", "quiz.jsonl", "--kind", "my_lab.quiz"]) == 1
    said = capsys.readouterr().out
    assert "quiz.jsonl:41: right is 3; there are 1 choices." in said
    assert "quiz.jsonl:42: my_lab.quiz failed: KeyError: 'choices'." in said

    (world / "site/my_lab/nothing.py").write_text("")
    assert run_verb(["data", "validate", "quiz.jsonl", "--kind", "my_lab.nothing"]) == 2
    assert "my_lab.nothing has no class Kind derived from" in capsys.readouterr().err
    assert run_verb(["train", *settings("my_lab.nothing")]) == 2
    assert "my_lab.nothing has no class Kind derived from" in capsys.readouterr().err


def test_edited_code_builds_another_store(world: Path) -> None:
    from headway.prepare.build import cached_store

    code = (LAB / "quiz.py").read_text()
    stores: list[Path] = []
    for text in (code, code, code.replace('f"- {choice}"', 'f"* {choice}"')):
        (world / "quiz_kind.py").write_text(text)
        options = BuildOptions("./quiz_kind.py")
        stores.append(cached_store(["quiz.jsonl"], "tokenizer", world / "cache", options))
    assert stores[0] == stores[1] != stores[2]
