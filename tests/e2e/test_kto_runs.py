"""KTO as whole runs: from raw records, however the step is cut, packed, resumed or spread, and however the reference is kept."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import byte_tokenizer
from support.preference_pairs import make_pair_store
from support.ranks import start_processes
from support.runs import assert_same_run, deterministic
from support.unpaired_records import random_records, write_unpaired_store

from headway.config.load import load
from headway.errors import HeadwayError
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

RECIPE = """\
run: {{name: {name}, dir: {dir}/runs}}
model: {{hidden_size: 32, num_layers: 1, num_heads: 4, num_kv_heads: 2, ffn_size: 48, vocab_size: 64, max_seq_len: 64}}
data:
  train: [{dir}/answers]
  valid: {{fraction: 0.2}}
  seq_len: 32
  tokenizer_unchecked: true
  cache_dir: {dir}/cache
objective: {{kind: kto, beta: 0.3, undesirable_weight: 1.5}}
batch: {{rows: 8, micro_rows: 2}}
optim: {{lr: 5e-3}}
steps: 4
eval: {{every: 2, rows: 8}}
checkpoint: {{every: 2}}
device: cpu
"""
SAME = (
    "loss",
    "grad_norm",
    "kl",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kto")
    write_unpaired_store(path / "answers", random_records(100))
    return path


def recipe(folder: Path, name: str, *overrides: str) -> Recipe:
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(name=name, dir=folder), encoding="utf-8")
    return load(Recipe, path, list(overrides))


def run(folder: Path, name: str, *overrides: str, world: int = 1) -> list[dict[str, Any]]:
    loaded = recipe(folder, name, *overrides)
    if world == 1:
        train(loaded)
    else:
        start_processes(lambda: train(loaded), world)
    return read_metrics(loaded.run.folder / "metrics.jsonl")


def assert_same(got: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    assert len(got) == len(right)
    for measured, other in zip(got, right, strict=True):
        assert {k: measured[k] for k in SAME} == pytest.approx(
            {k: other[k] for k in SAME}, rel=1e-4, abs=1e-6
        ), f"step {measured['step']}"
        for name, values in other.get("valid", {}).items():
            assert measured["valid"][name] == pytest.approx(values, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[dict[str, Any]]:
    return run(folder, "plain")


def test_a_run_starts_at_half_learns_and_reports_rewards(
    folder: Path, plain: list[dict[str, Any]]
) -> None:
    seen = read_log(folder, "plain")
    # half of each weight, of the records of one step
    assert plain[0]["loss"] == pytest.approx(0.5 * (66 + 34 * 1.5) / 100, abs=0.04)
    assert plain[-1]["valid"]["valid"]["rewards/accuracies"] > 0.7
    assert plain[-1]["rewards/margins"] > 0.3
    assert "66 are desirable, 34 undesirable" in seen
    assert "reference with the random weights" in seen


def read_log(folder: Path, name: str) -> str:
    return (folder / "runs" / name / "train.log").read_text()


LAYOUTS = {
    "ddp": ("parallel.zero1.size=1",),
    "zero1": (),
    "fsdp": ("parallel.strategy=fsdp",),
    "tensor": ("parallel.tensor=2",),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if layout == "ddp" else pytest.mark.drill)
        for layout in LAYOUTS
    ],
)
def test_kto_on_two_ranks_leaves_what_one_process_leaves(
    folder: Path, plain: list[dict[str, Any]], layout: str
) -> None:
    how = "cached" if layout in ("ddp", "tensor") else "live"
    assert_same(
        run(folder, f"two-{layout}", f"objective.reference_logps={how}", *LAYOUTS[layout], world=2),
        plain,
    )


@pytest.mark.drill
def test_records_packed_into_rows_are_records_on_their_own(folder: Path) -> None:
    whole = (
        "data.valid=null",
        "steps=null",
        "epochs=1",
        "batch.rows=100",
        "objective.reference_logps=cached",
    )
    packed = run(folder, "packed", *whole, "batch.micro_rows=50")
    alone = run(folder, "alone", *whole, "batch.micro_rows=100", "data.packing=pad")
    assert [record["num_samples_in_batch"] for record in packed] == [100]
    assert_same(packed, alone)


@pytest.mark.parametrize("how", ["live", pytest.param("cached", marks=pytest.mark.drill)])
def test_a_resumed_kto_run_is_bit_for_bit_the_uninterrupted_one(how: str, tmp_path: Path) -> None:
    write_unpaired_store(tmp_path / "answers", random_records(60))
    run(tmp_path, "straight", f"objective.reference_logps={how}")
    loaded = recipe(tmp_path, "again", f"objective.reference_logps={how}")
    straight = tmp_path / "runs" / "straight"
    again = tmp_path / "runs" / "again"
    train(loaded, resume=str(straight / "checkpoints" / "step-00000002"))
    assert deterministic(again / "metrics.jsonl") == deterministic(straight / "metrics.jsonl")[2:]
    shutil.copyfile(straight / "metrics.jsonl", again / "metrics.jsonl")
    assert_same_run(straight, again, 4)


@pytest.mark.drill
def test_an_adapter_is_compared_with_the_model_without_it(folder: Path) -> None:
    got = run(
        folder,
        "adapter",
        "adapter={kind: lora, rank: 4}",
        "steps=2",
        "optim.lr=0.05",
        "objective.undesirable_weight=1.0",
    )
    assert got[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    assert got[1]["loss"] != got[0]["loss"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("objective={kind: dpo}",),
            "holds answers labelled good or bad, which objective kto reads",
        ),
        (("data.train=null", "data.valid=null"), "data.train is null"),
        (("data.packing=concat",), "which splits records"),
        (("data.train=[$/long]", "data.seq_len=8"), "no record fits into"),
        (("parallel.context=2",), "needs whole rows"),
    ],
)
def test_kto_that_cannot_work_is_refused_in_one_line(
    folder: Path, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    write_unpaired_store(tmp_path / "long", [([1] * 9, [2], True), ([3] * 9, [4], False)])
    with pytest.raises(HeadwayError, match=said) as refused:
        run(folder, "refused", *(text.replace("$", str(tmp_path)) for text in overrides))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_the_recipe_learns_from_raw_records_what_held_out_ones_confirm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good answers repeat a word of the question, bad ones another word; labels of unseen questions are told apart."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(tmp_path / "tokenizer")
    rng = random.Random(1)
    words = ["red", "blue", "green", "black"]
    lines = []
    for number in range(160):
        word = rng.choice(words)
        is_good = number % 2 == 0
        answer = f"It is {word}." if is_good else f"Never {rng.choice(words)} then."
        lines.append(
            json.dumps(
                {"prompt": f"Is it {word} ({number})?", "completion": answer, "label": is_good}
            )
        )
    (tmp_path / "labelled.jsonl").write_text("\n".join(lines) + "\n")
    small = "{hidden_size: 32, num_layers: 1, num_heads: 4, ffn_size: 48, max_seq_len: 128}"
    settings = ["init.from=null", f"model={small}", f"tokenizer={tmp_path}/tokenizer", f"data.train.0.path={tmp_path}/labelled.jsonl",
                f"run.dir={tmp_path}/runs", "data.seq_len=128", "optim.lr=3e-3", "epochs=3", "device=cpu", "track=[]"]  # fmt: skip
    loaded = load(Recipe, Path("src/headway/recipes/laptop/kto.yaml"), settings)
    train(loaded)
    metrics = read_metrics(loaded.run.folder / "metrics.jsonl")
    before = metrics[0]["valid_at_start"]["valid"]
    after = metrics[-1]["valid"]["valid"]
    assert before["loss"] == pytest.approx(0.5, abs=1e-3)
    assert abs(before["rewards/margins"]) < 1e-3
    assert after["rewards/accuracies"] > 0.9
    assert after["rewards/margins"] > 0.1
    assert after["loss"] < 0.48


@pytest.mark.drill
def test_a_mixture_of_experts_learns_the_same_however_a_step_is_cut(folder: Path) -> None:
    experts = ("model.experts={num: 4, per_token: 2, ffn_size: 24, aux_loss: 0.01}", "steps=3")
    right = run(folder, "experts", *experts, "batch.micro_rows=8")
    assert "expert_load_max" in right[0]
    assert right[-1]["loss"] < right[0]["loss"]
    assert_same(run(folder, "experts-cut", *experts), right)
    # Both the divergence of KTO and the load of experts are those of the whole step, each by a pass of its own.
    # A validation balances what it sees at once, so only training is compared.
    by_step = (*experts, "model.experts.aux_scope=step")
    whole = [
        {key: value for key, value in record.items() if key != "valid"}
        for record in run(folder, "experts-step", *by_step, "batch.micro_rows=8")
    ]
    cut = [
        {key: value for key, value in record.items() if key != "valid"}
        for record in run(folder, "experts-step-cut", *by_step)
    ]
    assert_same(cut, whole)


@pytest.mark.drill
def test_pairs_are_learned_as_labelled_answers(tmp_path: Path) -> None:
    make_pair_store(tmp_path / "answers", pairs=60)
    got = run(tmp_path, "pairs", "steps=8", "objective.undesirable_weight=1.0")
    assert got[0]["loss"] == pytest.approx(0.5, abs=1e-5)
    assert got[-1]["valid"]["valid"]["rewards/accuracies"] > 0.8
    assert "60 are desirable, 60 undesirable" in read_log(tmp_path, "pairs")
