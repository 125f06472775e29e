"""Runs with rollout.exact: no log-probability of the trainer has other bits than the sampler recorded while decoding, and a run with one ends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model import CONFIG, write_model
from support.ranks import start_processes
from support.rollout_runs import (
    journal_content,
    journal_of,
    rollout_recipe,
    sampled_ids,
    write_rollout_inputs,
)

from headway.errors import GaveUpError, HeadwayError
from headway.rollout.journal import FILE, RolloutJournal
from headway.rollout.sampler import PolicySampler, Weights
from headway.tasks.answers import DIFFERING
from headway.track.metrics_file import read_metrics
from headway.train import train

Records = list[dict[str, Any]]
EXACT = "rollout.exact=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollout_inputs(tmp_path_factory.mktemp("exact"))


def run(folder: Path, name: str, *overrides: str, world: int = 1) -> Records:
    recipe = rollout_recipe(folder, name, EXACT, *overrides)
    if world == 1:
        train(recipe)
    else:
        start_processes(lambda: train(recipe), world, timeout=240)
    return read_metrics(recipe.run.folder / "metrics.jsonl")


def assert_exact(records: Records) -> None:
    for record in records:
        assert record[DIFFERING] == 0
        assert record["agreement/mean"] == 0
        assert record["agreement/max"] == 0
        assert record["grad_norm"] > 0


@pytest.fixture(scope="module")
def plain(folder: Path) -> Records:
    return run(folder, "plain")


WAYS = {
    "several updates": ("rollout.passes=2", "rollout.updates=2"),
    "cut": ("rollout.top_p=0.8", "rollout.top_k=40", "rollout.temperature=0.7"),
    "bf16": ("precision=bf16",),
    "recomputed": ("memory.recompute=true", "batch.micro_rows=1"),
    "recomputed in parts": ("memory.recompute=selective",),
    "lora": ("adapter.rank=4", "optim.lr=1e-2", "objective.beta=0.1"),
    "dora": ("adapter.rank=4", "adapter.kind=dora", "optim.lr=1e-2"),
    "a reference": ("objective.beta=0.1", "objective.kl_in=reward"),
}


STRATEGIES = {
    "ddp": ("parallel.zero1.size=1",),
    "zero1": (),
    "fsdp": ("parallel.strategy=fsdp",),
}


def test_no_bit_differs_and_the_journal_has_what_the_sampler_recorded(
    folder: Path, plain: Records
) -> None:
    assert len(plain) == 4
    assert_exact(plain)
    # What is compared is the engine's, not a repetition of the trainer's: it is in the journal.
    recorded = [answer.logprobs for batch in journal_of(folder / "runs/plain") for answer in batch.answers]  # fmt: skip
    assert sum(map(len, recorded)) > 300
    assert all((values < 0).all() for values in recorded)


@pytest.mark.slow
def test_merged_adapters_have_the_gradients_of_updates_beside_the_weights(folder: Path) -> None:
    adapter = ("adapter.rank=4", "optim.lr=1e-2", "steps=3")
    exact = run(folder, "merged", *adapter)
    plain = run(folder, "beside", *adapter, "rollout.exact=false")
    for got, expected in zip(exact, plain, strict=True):
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_no_bit_differs(folder: Path, way: str) -> None:
    assert_exact(run(folder, way.replace(" ", "-"), *WAYS[way], "steps=2"))


def test_batches_that_change_and_packing_change_no_bit_of_an_answer(
    folder: Path, plain: Records
) -> None:
    more = ("rollout.at_once=3", "data.seq_len=256", "batch.micro_rows=5", "steps=1")
    assert_exact(run(folder, "other-batches", *more))
    here = journal_of(folder / "runs/other-batches")[0].answers
    there = journal_of(folder / "runs/plain")[0].answers
    for answer, other in zip(here, there, strict=True):
        assert answer.ids == other.ids
        assert answer.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_bit_differs_on_two_ranks(folder: Path, plain: Records, strategy: str) -> None:
    records = run(folder, strategy, *STRATEGIES[strategy], world=2)
    assert len(records) == 4
    assert_exact(records)
    assert sampled_ids(folder / "runs" / strategy) == sampled_ids(folder / "runs/plain")


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_bits(folder: Path, plain: Records) -> None:
    recipe = rollout_recipe(folder, "again", EXACT)
    train(recipe)
    # The journal has all answers: those of the later steps are sampled anew.
    RolloutJournal.open(recipe.run.folder).forget_from(3)
    train(recipe, resume=str(recipe.run.folder / "checkpoints/step-00000002"))
    records = read_metrics(recipe.run.folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert_exact(records)
    assert journal_content(recipe.run.folder) == journal_content(folder / "runs/plain")


def test_a_sampler_whose_weights_differ_by_one_rounding_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh: Callable[..., None] = PolicySampler.refresh

    def nearly(sampler: PolicySampler, weights: Weights, version: int) -> None:
        def rounded() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in weights:
                changed = value
                if name == "model.norm.weight":
                    changed = value.nextafter(torch.full_like(value, torch.inf))
                yield name, changed

        refresh(sampler, rounded(), version)

    monkeypatch.setattr(PolicySampler, "refresh", nearly)
    with pytest.raises(GaveUpError, match=r"not the sampler's, bit for bit, and rollout.exact is true") as ended:  # fmt: skip
        run(folder, "one-rounding")
    assert len(str(ended.value).splitlines()) == 1
    records = read_metrics(folder / "runs/one-rounding/metrics.jsonl")
    assert records[0][DIFFERING] == 0
    # Not an amount that the bound on the mean would have seen.
    assert records[1][DIFFERING] > 0
    assert records[1]["agreement/mean"] < 1e-5


REFUSED = {
    "rollout.ahead is 1": ("rollout.ahead=1",),
    "adapter.base is quantised": ("adapter.rank=4", "adapter.base=nf4"),
    "adapter.dropout is above 0": ("adapter.rank=4", "adapter.dropout=0.1"),
    "precision is bf16": ("adapter.rank=4", "precision=bf16"),
    "parallel.tensor is 2": ("parallel.tensor=2",),
    "parallel.pipeline is 2": ("parallel.pipeline=2",),
    "kernels.attention is reference": ("kernels.attention=reference",),
    "kernels.compile is true": ("kernels.compile=true",),
    "precision is fp16": ("precision=fp16",),
    "device is cuda": ("device=cuda",),
    "the model has experts": ("init.from=$/mixture/out",),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_exact_form_is_one_line_before_anything_is_sampled(
    folder: Path, words: str
) -> None:
    if "mixture" in REFUSED[words][0]:
        config = CONFIG.with_(max_seq_len=256, experts={"num": 4, "per_token": 2})
        write_model(folder / "mixture", config)
    with pytest.raises(HeadwayError, match=r"rollout.exact is true") as refusal:
        run(folder, "refused", *REFUSED[words])
    assert words in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    assert not (folder / "runs/refused" / FILE).exists()
