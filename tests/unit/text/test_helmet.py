"""HELMET's recall tasks: prompts, draws and scores of HELMET's own code, contexts that are cut, files that are missing or wrong."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.cli import main
from headway.errors import ConfigError
from headway.eval.long_cases import make_cases
from headway.eval.options import LongPlan, LongQuestions
from headway.infer.speed import GenerationSpeed
from headway.text import helmet

GOLDEN = Path(__file__).parents[2] / "golden/helmet"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
LENGTH: int = EXPECTED["length"]
JSON_KV = "json_kv/test_k105_dep6.jsonl"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def plan(task: str = "helmet", lengths: tuple[int, ...] = (LENGTH,), **changes: Any) -> LongPlan:
    options = {"depths": (0.0,), "samples": 4, "seed": 42, "helmet": GOLDEN, **changes}
    return LongPlan((task,), lengths, LongQuestions(**options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the files, to change."""
    return Path(shutil.copytree(GOLDEN / "data", tmp_path / "data"))


@pytest.mark.parametrize("task", helmet.NAMES)
def test_prompts_draws_and_scores_are_helmets(task: str) -> None:
    questions = EXPECTED["tasks"][task]
    cases = make_cases(byte_tokenizer(), plan(task))
    assert len(cases) == len(questions) == EXPECTED["drawn"] == 4
    for asked, question in zip(cases, questions, strict=True):
        assert asked.case.prompt.endswith(question["end"])
        assert sha256(asked.case.prompt) == question["sha256"]
        assert sha256(asked.case.question) == question["user"], "what a chat model is asked"
        scores = [asked.case.score(text) for text in question["texts"]]
        assert scores == question["scores"]
        assert set(scores) >= {0.0, 1.0}


def test_answers_have_the_room_of_helmets_configuration() -> None:
    cases = make_cases(byte_tokenizer(), plan())
    assert {asked.task: asked.new_tokens for asked in cases} == {
        "helmet_json_kv": 100,
        "helmet_niah_mk_2": 50,
        "helmet_niah_mk_3": 100,
        "helmet_niah_mv": 50,
    }


def test_a_context_that_is_too_long_loses_its_end(folder: Path) -> None:
    file = folder / JSON_KV
    entry = json.loads(file.read_text().splitlines()[0])
    entry["context"] = "begin " + "x" * 20_000 + " end"
    file.write_text(json.dumps(entry))
    (asked,) = make_cases(byte_tokenizer(), plan("helmet_json_kv", helmet=folder))
    assert len(asked.ids) == LENGTH - 100
    assert asked.case.prompt.startswith("begin xxx")
    assert " end" not in asked.case.prompt
    assert asked.case.prompt.endswith(f"Key: {entry['question']}\nCorresponding value:")
    # A checkout of HELMET and its folder data are the same.
    assert make_cases(byte_tokenizer(), plan("helmet_json_kv", helmet=folder.parent)) == [asked]


def test_a_length_without_room_for_question_and_answer_is_refused(folder: Path) -> None:
    (question, *_) = helmet.read_questions("helmet_json_kv", LENGTH, 1, 0, folder)
    tokenizer = byte_tokenizer()
    with pytest.raises(ConfigError, match="--lengths holds 300; helmet_json_kv needs more tokens"):
        helmet.cut_case(
            question,
            "helmet_json_kv",
            300,
            tokenizer.encode,
            tokenizer.decode,
            lambda case: len(tokenizer.encode(case.prompt)),
        )


def test_every_length_has_files_of_its_own(folder: Path) -> None:
    assert helmet.file_name("helmet_json_kv", 131072) == "json_kv/test_k1800_dep6.jsonl"
    assert (
        helmet.file_name("helmet_niah_mv", 131072)
        == "ruler/niah_multivalue/validation_131072.jsonl"
    )
    shutil.copy(folder / JSON_KV, folder / "json_kv/test_k220_dep6.jsonl")
    lengths = (8192, 16384)
    assert helmet.available(lengths, folder) == ["helmet_json_kv"]
    assert plan(lengths=lengths, helmet=folder).resolved().tasks == ("helmet_json_kv",)
    (note,) = helmet.notes(["helmet"], lengths, folder)
    assert note.startswith(
        "HELMET tasks left out: helmet_niah_mk_2 (no ruler/niah_multikey_2/validation_16384.jsonl);"
    )
    assert helmet.notes(["helmet"], (8192,), folder) == []
    assert helmet.notes(["helmet_json_kv"], lengths, folder) == []


@pytest.mark.parametrize(
    ("task", "lengths", "changes", "said"),
    [
        ("helmet_x", (LENGTH,), {}, "of HELMET there are helmet, helmet_json_kv"),
        ("helmet", (LENGTH,), {"helmet": None}, "Give --helmet DIR"),
        ("helmet", (4096,), {}, "there is not: a file of 4096 tokens (there are 8192, 16384"),
        ("helmet_niah_mv", (131072,), {}, "ruler/niah_multivalue/validation_131072.jsonl. Put"),
        ("helmet", (LENGTH,), {"helmet": Path("nowhere")}, "--helmet is 'nowhere', which is not"),
    ],
)
def test_wrong_names_and_missing_files_are_refused_in_one_line(
    task: str, lengths: tuple[int, ...], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(task, lengths, **changes)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_task_is_not_asked_twice() -> None:
    options = LongQuestions(helmet=GOLDEN)
    with pytest.raises(ConfigError, match="helmet holds it already"):
        LongPlan(("helmet", "helmet_json_kv"), (LENGTH,), options)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "holds no question"),
        (b"{\n", ":1: not JSON"),
        (b"\n[1]\n", ":2: must be an object"),
        ({"context": 3}, "context must be a text"),
        ({"question": None}, "question must be a text"),
        ({"answer": []}, "answer must be a text, or a list of texts"),
        ({"demos": [["a", "b"]]}, "demos must be a list of 2 or more"),
        ({"demos": [["a", "b"], ["c"]]}, "demos must hold [key, value]"),
    ],
)
def test_a_damaged_file_of_helmet_is_one_clear_line(
    folder: Path, line: bytes | dict[str, Any], said: str
) -> None:
    file = folder / JSON_KV
    if isinstance(line, dict):
        entry = json.loads(file.read_text().splitlines()[0])
        line = json.dumps({**entry, **line}).encode()
    file.write_bytes(line)
    with pytest.raises(ConfigError) as refused:
        make_cases(byte_tokenizer(), plan("helmet_json_kv", helmet=folder))
    assert said in str(refused.value)
    assert JSON_KV in str(refused.value)
    assert "\n" not in str(refused.value)


def test_eval_long_asks_helmets_questions_and_measures_again_when_a_file_changes(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.eval.long_report.can_draw", lambda: False)
    # Of prompts of 8,192 tokens, which takes long; the questions are short.
    speed = GenerationSpeed(1, 1.0, 1.0)
    monkeypatch.setattr("headway.infer.speed.measure_speed", lambda *_, **options: speed)
    model = write_model(tmp_path / "model", CONFIG.with_(max_seq_len=8192))
    out = tmp_path / "report"
    arguments = [
        "eval", "long", "--device", "cpu", "--model", str(model), "--tasks", "helmet", "--lengths", "8k", "--depths", "0",
        "--samples", "1", "--chunk-tokens", "512", "--helmet", str(folder), "--out", str(out), "--json",
    ]  # fmt: skip
    keys: list[str] = []
    for number in range(3):
        if number == 2:
            changed = (folder / JSON_KV).read_text().replace("JSON data", "Other data")
            (folder / JSON_KV).write_text(changed)
        assert main(arguments) == 0
        printed = json.loads(capsys.readouterr().out)
        keys.append(json.loads((out / "parts/full.json").read_text())["key"])
    assert keys[0] == keys[1] != keys[2]
    assert printed["plan"]["tasks"] == list(helmet.NAMES)
    assert [cell["task"] for cell in printed["variants"][0]["cells"]] == list(helmet.NAMES)
    assert "| helmet_json_kv |" in (out / "report.md").read_text()
