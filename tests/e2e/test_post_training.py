"""Preference training as whole runs: however the step is cut, packed, resumed or spread, and however the reference is kept."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.byte_model import byte_tokenizer
from support.preference_pairs import make_pair_store
from support.ranks import start_processes
from support.runs import assert_same_run, deterministic

from headway.config.load import load
from headway.data.batch import Batch
from headway.errors import HeadwayError
from headway.model.base import Model
from headway.runtime.storage import read_sealed
from headway.store.writer import StoreWriter
from headway.tasks.base import ScoreColumns
from headway.tasks.preference.source import PAIR
from headway.tokenizer.load import load_tokenizer
from headway.track.metrics_file import read_metrics
from headway.train import dry_run, train
from headway.train.build import build
from headway.train.config import Recipe
from headway.train.frozen_model import score_with
from headway.train.health import BadStep
from headway.train.resolve import resolve
from headway.train.run import Run
from headway.train.start import decide_start

RECIPE = """\
run: {{name: {name}, dir: {dir}/runs}}
model: {{hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 48, vocab_size: 64, max_seq_len: 64}}
data:
  train: [{dir}/pairs]
  valid: {{fraction: 0.2}}
  seq_len: 64
  tokenizer_unchecked: true
  cache_dir: {dir}/cache
objective: {{kind: dpo}}
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
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dpo")
    make_pair_store(path / "pairs", pairs=80)
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


def assert_same(got: list[dict[str, Any]], right: list[dict[str, Any]], rel: float = 1e-4) -> None:
    assert len(got) == len(right)
    for measured, other in zip(got, right, strict=True):
        # at first both answers of a pair have the same reward
        keys = [k for k in SAME if k != "rewards/accuracies" or measured["step"] > 1]
        assert {k: measured[k] for k in keys} == pytest.approx(
            {k: other[k] for k in keys}, rel=rel, abs=1e-6
        ), f"step {measured['step']}"
        for name, values in other.get("valid", {}).items():
            assert measured["valid"][name] == pytest.approx(values, rel=rel, abs=1e-6)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[dict[str, Any]]:
    return run(folder, "plain")


def test_a_run_starts_at_ln_2_learns_and_reports_rewards(
    plain: list[dict[str, Any]], folder: Path
) -> None:
    assert plain[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert plain[-1]["loss"] < 0.65
    assert set(SAME) <= set(plain[0])
    valid = plain[-1]["valid"]["valid"]
    assert valid["rewards/accuracies"] > 0.8
    assert valid["loss"] < math.log(2)
    log = (folder / "runs" / "plain" / "train.log").read_text()
    assert "each of 160 answers has a target" in log
    assert "reference with the random weights" in log


def test_rewards_may_say_which_checkpoint_is_best_and_a_wrong_name_is_refused_before_the_first_step(
    folder: Path,
) -> None:
    run(folder, "best", "checkpoint.metric=rewards/accuracies")
    assert (folder / "runs" / "best" / "checkpoints" / "best-1").is_symlink()
    with pytest.raises(
        HeadwayError,
        match=r"checkpoint.metric is 'rewards/accuracy'; .* reports .*rewards/accuracies",
    ) as raised:
        run(folder, "wrong", "checkpoint.metric=rewards/accuracy")
    assert raised.value.exit_code == 2
    assert not (folder / "runs" / "wrong" / "metrics.jsonl").exists()


LAYOUTS = {
    "ddp": ("parallel.zero1.size=1",),
    "zero1": (),
    "fsdp": ("parallel.strategy=fsdp",),
    "tensor": ("parallel.tensor=2",),
}
QUICK = [("zero1", "sigmoid"), ("fsdp", "kto_pair"), ("tensor", "sigmoid")]
REST = [
    (layout, loss)
    for layout in LAYOUTS
    for loss in ("sigmoid", "kto_pair")
    if (layout, loss) not in QUICK
]


@pytest.mark.parametrize(
    ("layout", "loss_type"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.drill) for case in REST)],
)
def test_dpo_on_two_ranks_leaves_what_one_process_leaves(
    folder: Path, plain: list[dict[str, Any]], layout: str, loss_type: str
) -> None:
    kind = f"objective.loss_type={loss_type}"
    # the whole step at once
    right = plain if loss_type == "sigmoid" else run(folder, "one-kto", kind, "batch.micro_rows=8")
    assert_same(run(folder, f"two-{loss_type}-{layout}", kind, *LAYOUTS[layout], world=2), right)


def test_pairs_packed_into_rows_are_pairs_on_their_own(folder: Path) -> None:
    whole = ("data.valid=null", "steps=null", "epochs=1", "objective.reference_free=true")
    packed = run(folder, "packed", *whole, "batch.rows=64", "batch.micro_rows=32")
    alone = run(folder, "alone", *whole, "batch.rows=80", "batch.micro_rows=80", "data.packing=pad")
    assert [record["num_samples_in_batch"] for record in packed] == [160]
    assert_same(packed, alone)


def test_cached_log_probabilities_are_the_live_ones_and_are_made_once(
    folder: Path, plain: list[dict[str, Any]]
) -> None:
    cached = "objective.reference_logps=cached"
    assert_same(run(folder, "cached", cached), plain)
    files = sorted((folder / "cache" / "reference").iterdir())
    assert len(files) == 1
    before = files[0].stat().st_mtime_ns
    assert deterministic(folder / "runs" / "cached" / "metrics.jsonl") == run_without_time(
        folder, "cached-again", cached
    )
    assert sorted((folder / "cache" / "reference").iterdir()) == files
    assert files[0].stat().st_mtime_ns == before
    run(folder, "other-weights", cached, "seed=7", "steps=1")
    assert len(list((folder / "cache" / "reference").iterdir())) == 2
    shutil.rmtree(folder / "cache" / "reference")
    assert_same(run(folder, "cached-two", cached, world=2), plain)
    assert [path.name for path in (folder / "cache" / "reference").iterdir()] == [files[0].name]


@pytest.mark.drill
def scored(cache: Path) -> dict[str, np.ndarray]:
    """The log-probabilities of a cache: NaN where the reference has read nothing."""
    paths = sorted((cache / "reference").glob("*.sealed"))
    return {
        path.name: np.frombuffer(read_sealed(path) or b"", "<f4").reshape(-1, 2) for path in paths
    }


def read_pairs(loaded: Recipe, steps: int) -> set[int]:
    """The pairs in the batches of a run."""
    with build(resolve(loaded), decide_start(loaded, "never")).loader as loader:
        numbers = [
            micro.extra[PAIR] for step, _ in islice(loader, steps) for micro in step.microbatches
        ]
    return set(torch.cat(numbers)[torch.cat(numbers) >= 0].tolist())


SHORT = (
    "objective.reference_logps=cached", "batch={rows: 2, micro_rows: 2}", "eval={every: 1, rows: 2}", "checkpoint.every=1",
    "optim.schedule.kind=constant",
)  # fmt: skip


def test_a_short_run_scores_the_pairs_it_reads_and_a_longer_one_the_rest(
    folder: Path, tmp_path: Path
) -> None:
    cache = f"data.cache_dir={tmp_path}/cache"
    run(folder, "short", *SHORT, cache, "steps=3")
    ((name, first),) = scored(tmp_path / "cache").items()
    is_scored = ~np.isnan(first[:, 0])
    assert len(first) == 80
    loaded = recipe(folder, "short", *SHORT, f"data.cache_dir={tmp_path}/other", "steps=3")
    wanted = read_pairs(loaded, 3)
    assert wanted < set(np.flatnonzero(is_scored))
    assert len(wanted) < 20
    assert is_scored.sum() <= len(wanted) + 8, "and those of two rows of validation"

    run(folder, "short", *SHORT, cache, "steps=6")
    ((again, longer),) = scored(tmp_path / "cache").items()
    assert again == name
    assert (~np.isnan(longer[:, 0])).sum() > is_scored.sum()
    assert np.array_equal(longer[is_scored], first[is_scored])
    run(folder, "straight", *SHORT, f"data.cache_dir={tmp_path}/straight", "steps=6")
    assert_same_run(folder / "runs" / "short", folder / "runs" / "straight", 6)
    live = run(folder, "live", *SHORT, "objective.reference_logps=live", "steps=6")
    assert_same(read_metrics(folder / "runs" / "short" / "metrics.jsonl"), live)

    # what reads everything scores everything, as ever, and short runs then use that
    run(folder, "whole", *SHORT, cache, "steps=null", "epochs=1")
    whole = {key: table for key, table in scored(tmp_path / "cache").items() if key != name}
    assert len(whole) == 1
    assert "-" not in next(iter(whole))
    assert not np.isnan(next(iter(whole.values()))).any()
    assert np.allclose(next(iter(whole.values()))[is_scored], first[is_scored], rtol=1e-5)
    run(folder, "other-rows", *SHORT, cache, "data.window_tokens=128", "steps=1")
    assert len(scored(tmp_path / "cache")) == 2


def test_a_dry_run_scores_one_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counting(
        model: Model, chunk_tokens: int, columns: ScoreColumns
    ) -> Callable[[Batch], Batch]:
        score = score_with(model, chunk_tokens, columns)

        def prepare(batch: Batch) -> Batch:
            read.append(int((batch.extra[PAIR] >= 0).sum()))
            return score(batch)

        return prepare

    monkeypatch.setattr("headway.train.frozen_model.score_with", counting)
    loaded = recipe(
        folder,
        "dry",
        "objective.reference_logps=cached",
        f"data.cache_dir={tmp_path}/cache",
        "steps=null",
        "epochs=1",
    )
    outcome = dry_run(loaded)
    assert outcome["first_step"]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert len(read) == 4
    assert sum(read) == outcome["first_step"]["num_samples_in_batch"] // 2 < 40
    assert not (tmp_path / "cache").exists()
    train(loaded)
    read.clear()
    (sealed,) = (tmp_path / "cache" / "reference").glob("*.sealed")
    sealed.unlink()
    dry_run(loaded.with_(epochs=2), resume="auto")
    assert len(read) == 4, "the step after the checkpoint"


def test_a_run_that_rolls_back_scores_the_batches_that_take_the_place_of_skipped_ones(
    folder: Path, tmp_path: Path
) -> None:
    loaded = recipe(
        folder,
        "back",
        *SHORT,
        f"data.cache_dir={tmp_path}/cache",
        "steps=3",
        "data.valid=null",
        "heal.on_spike=rollback",
    )
    fractions: list[float] = []

    @contextmanager
    def spoiled(run: Run) -> Iterator[None]:
        def after_step(step: int) -> None:
            (table,) = scored(tmp_path / "cache").values()
            fractions.append(float((~np.isnan(table[:, 0])).mean()))
            if step == 2 and len(fractions) == 2:
                run.healer.bad = BadStep(2, "spike", "a test says so")

        run.on_step(after_step)
        yield

    train(loaded, hook=spoiled)
    records = read_metrics(loaded.run.folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(
        math.isfinite(record["loss"]) and not record["inf_nan_skip_batches"] for record in records
    )
    assert fractions[-1] > fractions[0]


def test_ranks_that_share_layers_share_the_reference_and_its_cache(
    folder: Path, plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    cached = ("objective.reference_logps=cached", f"data.cache_dir={tmp_path}", "parallel.tensor=2")
    assert_same(run(folder, "cached-tensor", *cached, world=2), plain)
    assert_same(run(folder, "cached-tensor-again", *cached, world=4), plain)


def run_without_time(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    run(folder, name, *overrides)
    return deterministic(folder / "runs" / name / "metrics.jsonl")


@pytest.mark.drill
def test_a_damaged_cache_of_log_probabilities_is_made_again(
    folder: Path, plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    cached = ("objective.reference_logps=cached", f"data.cache_dir={tmp_path}")
    run(folder, "whole-cache", *cached, "steps=1")
    (file,) = (tmp_path / "reference").iterdir()
    file.write_bytes(file.read_bytes()[:60])
    assert_same(run(folder, "damaged-cache", *cached), plain)


@pytest.mark.parametrize(
    "overrides",
    [("objective.loss_type=kto_pair",), ("objective.reference_logps=cached",)],
    ids=["kto", "cached"],
)
def test_a_resumed_dpo_run_is_bit_for_bit_the_uninterrupted_one(
    folder: Path, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    make_pair_store(tmp_path / "pairs", pairs=80)
    run(tmp_path, "straight", *overrides)
    loaded = recipe(tmp_path, "again", *overrides)
    train(loaded, resume=str(tmp_path / "runs" / "straight" / "checkpoints" / "step-00000002"))
    assert (
        deterministic(tmp_path / "runs" / "again" / "metrics.jsonl")
        == deterministic(tmp_path / "runs" / "straight" / "metrics.jsonl")[2:]
    )
    shutil.copyfile(
        tmp_path / "runs" / "straight" / "metrics.jsonl",
        tmp_path / "runs" / "again" / "metrics.jsonl",
    )
    assert_same_run(tmp_path / "runs" / "straight", tmp_path / "runs" / "again", 4)


def test_another_reference_than_the_run_began_with_is_refused(folder: Path, tmp_path: Path) -> None:
    base = (
        "objective.kind=next_token",
        f"data.train=[{text_store(tmp_path)}]",
        "steps=1",
        "data.valid=null",
    )
    for name, seed in (("one", 1), ("two", 2)):
        run(folder, f"base-{name}", *base, f"seed={seed}")
    weights = folder / "runs" / "weights"
    shutil.copytree(folder / "runs" / "base-one" / "final", weights)
    start = (f"init.from={weights}", f"objective.reference={weights}", "steps=2")
    run(folder, "moved", *start)
    shutil.rmtree(weights)
    shutil.copytree(folder / "runs" / "base-two" / "final", weights)
    with pytest.raises(HeadwayError, match="other reference weights"):
        run(folder, "moved", *start, "steps=3")


@pytest.mark.drill
def test_a_reference_of_its_own_is_the_margin_to_beat(folder: Path, tmp_path: Path) -> None:
    base = (
        "objective.kind=next_token",
        f"data.train=[{text_store(tmp_path)}]",
        "steps=1",
        "data.valid=null",
        "seed=9",
    )
    run(folder, "other", *base)
    got = run(
        folder, "against-other", f"objective.reference={folder / 'runs' / 'other'}", "steps=2"
    )
    assert got[0]["loss"] != pytest.approx(math.log(2), abs=1e-6)


def test_the_reference_of_an_adapter_is_the_model_without_it(folder: Path) -> None:
    got = run(folder, "adapter", "adapter={kind: lora, rank: 4}", "steps=2", "optim.lr=0.05")
    assert got[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert got[1]["loss"] != got[0]["loss"]
    line = next(
        line
        for line in (folder / "runs" / "adapter" / "train.log").read_text().splitlines()
        if "frozen" in line
    )
    assert "train," in line


def text_store(folder: Path) -> Path:
    rng = np.random.default_rng(3)
    writer = StoreWriter(folder / "text", dtype="uint16", tokenizer_fingerprint=None)
    for _ in range(40):
        writer.add(rng.integers(0, 64, 30).astype(np.uint16))
    writer.finish()
    return folder / "text"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("data.train=[$/text]",), "holds no preference pairs"),
        (("objective.kind=next_token",), "train on the rejected answers"),
        (("data.train=null", "data.valid=null"), "data.train is null"),
        (("data.packing=concat",), "which splits pairs"),
        (("data.max_documents=2",), "data.max_documents is 2"),
        (("data.seq_len=8", "data.max_documents=3"), "no pair fits into"),
        (("objective.reference=$/nowhere",), "objective.reference"),
    ],
)
def test_dpo_that_cannot_work_is_refused_in_one_line(
    folder: Path, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    text_store(tmp_path)
    with pytest.raises(HeadwayError, match=said) as refused:
        run(folder, "refused", *(text.replace("$", str(tmp_path)) for text in overrides))
    assert "\n" not in str(refused.value)
    assert not (folder / "runs" / "refused").exists()


def test_packed_conversations_are_conversations_on_their_own_and_the_result_stops(
    tmp_path: Path,
) -> None:
    """Supervised fine-tuning: loss on answers alone, documents isolated; final/ ends a text where the answers do."""
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(tmp_path / "tokenizer")
    records = [{"instruction": f"Repeat {n}", "output": f"{n} " * (1 + n % 7)} for n in range(40)]
    (tmp_path / "alpaca.json").write_text(json.dumps(records))
    data = (
        f"data.train=[{{path: {tmp_path}/alpaca.json, kind: chat}}]",
        f"tokenizer={tmp_path}/tokenizer",
        "data.seq_len=128",
    )
    shape = (
        "objective.kind=next_token",
        "model.vocab_size=null",
        "model.max_seq_len=128",
        "data.valid=null",
        "steps=null",
        "epochs=1",
    )
    packed = run(tmp_path, "packed", *data, *shape, "batch.rows=40", "batch.micro_rows=20")
    alone = run(
        tmp_path, "alone", *data, *shape, "batch.rows=40", "batch.micro_rows=40", "data.packing=pad"
    )
    for record in (packed, alone):
        assert [entry["num_samples_in_batch"] for entry in record] == [40]
    for key in ("loss", "nll", "accuracy", "grad_norm"):
        assert packed[0][key] == pytest.approx(alone[0][key], rel=1e-5)
    ends = json.loads(
        (tmp_path / "runs" / "packed" / "final" / "generation_config.json").read_text()
    )["eos_token_id"]
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert ends == [tokenizer.eos_id, tokenizer.token_to_id("<|im_end|>")]
    assert (
        "each of 40 samples has a target"
        in (tmp_path / "runs" / "packed" / "train.log").read_text()
    )


STAGED = """\
run: {{name: staged, dir: {dir}/runs}}
model: {{hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 48, vocab_size: 64, max_seq_len: 64}}
data: {{train: [{dir}/text], seq_len: 64, tokenizer_unchecked: true, cache_dir: {dir}/cache}}
batch: {{rows: 4, micro_rows: 2}}
steps: 3
checkpoint: {{every: 1}}
device: cpu
stages:
  - {{name: learn, optim: {{lr: 1e-2}}}}
  - {{name: prefer, data: {{train: [{dir}/pairs]}}, objective: {{kind: dpo, reference: {reference}}}}}
"""


def test_a_preference_stage_compares_with_what_the_stage_before_it_left(tmp_path: Path) -> None:
    make_pair_store(tmp_path / "pairs")
    text_store(tmp_path)
    path = tmp_path / "staged.yaml"
    path.write_text(STAGED.format(dir=tmp_path, reference=tmp_path / "nowhere"))
    with pytest.raises(HeadwayError, match=r"stage prefer: objective\.reference"):
        train(load(Recipe, path))
    path.write_text(STAGED.format(dir=tmp_path, reference="null"))
    train(load(Recipe, path))
    (prefer,) = (tmp_path / "runs" / "staged" / "stages").glob("*prefer")
    records = read_metrics(prefer / "metrics.jsonl")
    assert len(records) == 3
    assert records[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert records[0]["logps/chosen"] != pytest.approx(records[1]["logps/chosen"])
