"""`headway sparsify`: training, masks, questions and KV report in one folder; started again, nothing is done twice."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.runs import headway

from headway.cli import main
from headway.config.load import load
from headway.eval import long_context
from headway.eval.long_cases import LongCase, make_cases
from headway.eval.options import LongPlan, LongQuestions
from headway.model.head_masks.choice import MaskVariant
from headway.model.head_masks.file import read_masks
from headway.prepare.build import build_store
from headway.text.long_tasks import pairs, table
from headway.tokenizer.load import Tokenizer
from headway.train.config import Recipe
from headway.workflows import sparsify
from headway.workflows.sparsify_options import SparsifyPlan

RECIPE = """\
run: {{name: sparse, dir: {out}/runs}}
init: {{from: {model}}}
data: {{train: [{out}/store], valid: {{fraction: 0.1}}, seq_len: 128, cache_dir: {out}/cache}}
objective: {{kind: head_sparsity, target: 0.5, window: 16, sinks: 4}}
freeze: [weights]
batch: {{rows: 2, micro_rows: 2}}
optim: {{schedule: {{kind: cosine, warmup: 0.1, floor: 0.1}}}}
steps: 4
eval: {{every: null, rows: 2}}
checkpoint: {{every: null}}
device: cpu
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "model", CONFIG.with_(max_seq_len=160))
    rng = random.Random(0)
    (tmp_path / "tables.jsonl").write_text(
        "".join(json.dumps({"text": table(pairs(rng, 9))}) + "\n" for _ in range(30))
    )
    build_store([tmp_path / "tables.jsonl"], tmp_path / "model" / "tokenizer", tmp_path / "store")
    file = tmp_path / "sparse.yaml"
    file.write_text(RECIPE.format(out=tmp_path, model=model))
    return file


@pytest.mark.slow
def test_one_command_trains_exports_asks_and_reports_and_does_nothing_twice(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [
        "sparsify",
        str(recipe),
        "--sparsities",
        "0.25,0.5",
        "--samples",
        "1",
        "--depths",
        "0",
        "--random-draws",
        "2",
        "--json",
    ]
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    run = tmp_path / "runs" / "sparse"
    folder = run / "sparsify"
    names = [variant["name"] for variant in printed["variants"]]
    assert [name for name in names if not name.startswith(("random", "equal"))] == [
        "full",
        "s=0.25",
        "first s=0.25",
        "windows",
        "s=0.5",
        "first s=0.5",
    ]
    assert sum(name.startswith("random") for name in names) == 2 * 2
    assert [compared["sparsity"] for compared in printed["comparisons"]] == [0.25, 0.5]
    for sparsity, full in ((0.25, 3), (0.5, 2)):
        masks = read_masks(folder / f"masks_sp{sparsity}.tsv")
        assert (masks.num_full, masks.window, masks.sinks) == (full, 16, 4)
    sizes = {variant["name"]: variant["cache_bytes"] for variant in printed["variants"]}
    assert sizes["full"] > sizes["s=0.25"] == sizes["random 2 s=0.25"] > sizes["s=0.5"]
    assert sizes["s=0.5"] == sizes["random 2 s=0.5"] == sizes["first s=0.5"] > sizes["windows"]
    report = (folder / "report.md").read_text()
    assert "Training: steps 4" in report
    # Four steps move no gate, and this model finds nothing.
    assert printed["gates"]["target"] == 0.5
    assert printed["gates"]["sparsity"] < 0.4
    verdict = printed["verdict"]
    assert verdict["kind"] == "full_model_fails"
    assert [mask["variant"] for mask in verdict["masks"]] == ["s=0.25", "s=0.5"]
    assert f"**Verdict**: {verdict['line']}" in report
    assert "![gates of all heads](heads.png)" in report
    assert "## Keys and values" in report
    assert json.loads((folder / "results.json").read_text())["variants"] == printed["variants"]
    assert {path.name for path in folder.iterdir()} >= {
        "heads.png",
        "heat-map.png",
        "score-by-footprint.png",
        "parts",
        "masks_sp0.5.json",
    }

    template = tmp_path / "short.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    )
    assert main([*command, "--masks", "own", "--chat-template", str(template)]) == 0
    asked = json.loads(capsys.readouterr().out)
    further = asked["variants"][len(names) :]
    assert [(variant["name"], variant["masks_from"]) for variant in further][:2] == [
        ("own", "own"),
        ("random own", "random"),
    ]
    assert "windows" not in {variant["name"] for variant in further}, "measured once"
    assert asked["prompts"] == f"questions in chat template {template}"
    assert asked["chunks"] == {"128": 16}
    assert main(command[:-1]) == 0
    assert f"\nverdict: {verdict['line']}\n" in capsys.readouterr().out
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)

    monkeypatch.setattr(
        "headway.eval.long_context._Evaluation._measure", lambda *_: pytest.fail("asked again")
    )
    steps = (run / "metrics.jsonl").read_text()
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["variants"] == printed["variants"]
    assert (run / "metrics.jsonl").read_text() == steps


SHORT = ["--sparsities", "0.5", "--samples", "1", "--depths", "0", "--random-draws", "2", "--no-simple-masks"]  # fmt: skip


def test_cases_are_made_once_before_training_and_serve_the_trained_model(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(tokenizer: Tokenizer, plan: LongPlan) -> list[LongCase]:
        calls.append(tokenizer.fingerprint)
        return make_cases(tokenizer, plan)

    monkeypatch.setattr("headway.eval.long_report.can_draw", lambda: False)
    monkeypatch.setattr("headway.workflows.sparsify.can_draw", lambda: False)
    monkeypatch.setattr("headway.workflows.sparsify.make_cases", counted)
    monkeypatch.setattr("headway.eval.long_context.make_cases", counted)
    assert main(["sparsify", str(recipe), *SHORT, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["variants"]) == 4
    assert len(calls) == 1


def test_a_model_with_another_tokenizer_gets_cases_of_its_own(recipe: Path) -> None:
    checked = sparsify.check(load(Recipe, recipe), SparsifyPlan(questions=LongQuestions((0.0,))))
    tokenizer = checked.tokenizer
    assert checked.cases_for(tokenizer.with_chat_template(tokenizer.chat_template)) is checked.cases
    assert checked.cases_for(tokenizer.with_chat_template("{{ messages }}")) is None
    assert checked.cases_for(byte_tokenizer("<more>")) is None
    assert checked.cases_for(None) is None


@pytest.mark.slow
def test_sparsify_killed_between_measurements_ends_like_an_uninterrupted_one(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = headway("sparsify", str(recipe), *SHORT, "--json", "run.name=whole")
    assert whole.returncode == 0, whole.stderr
    measure = long_context._Evaluation._measure

    def killed_at_a_draw(evaluation: Any, variant: MaskVariant) -> Any:
        if variant.kind == "random":
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(evaluation, variant)

    command = ["sparsify", str(recipe), *SHORT, "--json", "run.name=killed"]
    with monkeypatch.context() as patched:
        patched.setattr(long_context._Evaluation, "_measure", killed_at_a_draw)
        assert headway(*command).returncode == -signal.SIGKILL
    parts = tmp_path / "runs/killed/sparsify/parts"
    before = {file.name: file.read_text() for file in parts.iterdir()}
    assert sorted(before) == ["full.json", "s=0.5.json"]
    resumed = headway(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert {name: (parts / name).read_text() for name in before} == before
    expected = json.loads(whole.stdout)
    printed = json.loads(resumed.stdout)
    for report in (expected, printed):
        for variant in report["variants"]:
            del variant["prefill_tokens_per_second"]
            del variant["decode_tokens_per_second"]
    for key in ("variants", "comparisons", "critical", "gates", "verdict"):
        assert printed[key] == expected[key], key


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["objective.kind=next_token"], "objective"),
        (["--lengths", "4k"], "--lengths holds 4096; the model's max_seq_len is 160"),
        (["--tasks", "needle_single"], "--lengths holds 128; needle_single needs at least"),
        (["--tasks", "haystack"], "--tasks holds 'haystack'"),
        (["--sparsities", "1.5"], "--sparsities is 1.5"),
        (["--chat-template", "nothing"], "template is 'nothing'"),
        (["--data", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--masks", "nowhere.tsv"], "masks is 'nowhere.tsv'"),
        (["--masks", "none", "--random-masks", "--chunk-tokens", "0"], "--chunk-tokens is 0"),
        (["checkpoint.at_end=false"], "checkpoint.at_end is false"),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    recipe: Path, tmp_path: Path, wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sparsify", str(recipe), *wrong]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert not (tmp_path / "runs").exists()
