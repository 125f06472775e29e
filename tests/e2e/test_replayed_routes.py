"""Mixtures of experts that learn from rewards: the trainer takes the experts that the sampler chose, also after a resume and on ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import start_processes
from support.rollout_runs import (
    MIXTURE,
    SAME,
    journal_content,
    journal_of,
    rollout_recipe,
    sampled_ids,
    write_mixture,
    write_rollout_inputs,
)

from headway.data.batch import ROUTES
from headway.errors import GaveUpError
from headway.kernels.policy_scores import DrawnFrom
from headway.model.base import build_frozen_model
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.rollout.journal import RolloutJournal
from headway.rollout.rows import StepRows, TrainedAnswer, answer_step
from headway.rollout.sampler import PolicySampler
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.frozen_model import score_tokens_with

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_rollout_inputs(tmp_path_factory.mktemp("routes"))
    write_mixture(folder / "mixture")
    write_mixture(folder / "ties", near_ties=True)
    return folder


def run(folder: Path, name: str, model: str, *overrides: str, world: int = 1) -> Records:
    recipe = rollout_recipe(folder, name, f"init.from=$/{model}/out", *overrides)
    if world == 1:
        train(recipe)
    else:
        start_processes(lambda: train(recipe), world, timeout=240)
    return read_metrics(recipe.run.folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Records:
    return run(folder, "whole", "mixture")


def test_with_near_ties_the_trainer_agrees_with_the_sampler_through_its_experts_alone(
    folder: Path,
) -> None:
    small = ("steps=1", "rollout.difference_limit=null", "eval.every=null")
    replayed = run(folder, "replayed", "ties", *small)
    own = run(folder, "own", "ties", *small, "rollout.routes=own")
    assert sampled_ids(folder / "runs/own") == sampled_ids(folder / "runs/replayed")
    assert replayed[0]["agreement/max"] < 1e-4
    assert own[0]["agreement/max"] > 1e-2
    assert own[0]["agreement/mean"] > 100 * replayed[0]["agreement/mean"]


def test_without_the_replay_near_ties_can_end_a_run(folder: Path) -> None:
    strict = ("rollout.difference_limit=1e-4", "steps=2", "rollout.routes=own")
    with pytest.raises(GaveUpError, match=r"rollout\.difference_limit is 0\.0001"):
        run(folder, "strict", "ties", *strict)


def test_the_journal_has_the_experts_of_every_token_but_the_last(
    folder: Path, whole: Records
) -> None:
    assert max(record["agreement/mean"] for record in whole) < 1e-5
    for sampled in journal_of(folder / "runs/whole"):
        for answer in sampled.answers:
            assert answer.routes is not None
            tokens, layers, experts = answer.routes.shape
            assert (layers, experts) == (2, 2)
            assert tokens > len(answer.ids)
            assert answer.routes.min() >= 0
            assert answer.routes.max() < 8
            assert (answer.routes[..., 0] != answer.routes[..., 1]).all()


def test_a_resumed_run_takes_the_experts_of_the_journal(
    folder: Path, whole: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("init.from=$/mixture/out", "rollout.difference_limit=null")
    recipe = rollout_recipe(folder, "resumed", *settings)
    train(recipe)
    journal = RolloutJournal.open(recipe.run.folder)
    changed = journal.answers(2)
    assert changed is not None
    later = [journal.rewards(2), journal.answers(3), journal.rewards(3)]
    journal.forget_from(2)
    # Other experts than the routers choose: only from the journal can they be known.
    moved = [replace(a, routes=(a.routes + 1) % 8) for a in changed.answers if a.routes is not None]
    for record in (replace(changed, answers=tuple(moved)), *later):
        assert record is not None
        journal.add(record)

    plain_sample = PolicySampler.sample

    def for_validation(self: PolicySampler, requests: Any, *more: Any) -> Any:
        assert all(request.key.startswith("valid:") for request in requests)
        return plain_sample(self, requests, *more)

    monkeypatch.setattr(PolicySampler, "sample", for_validation)
    before = read_metrics(recipe.run.folder / "metrics.jsonl")
    train(recipe, resume=str(recipe.run.folder / "checkpoints/step-00000002"))
    after = read_metrics(recipe.run.folder / "metrics.jsonl")
    assert before[2]["agreement/mean"] < 1e-5
    assert after[2]["agreement/mean"] > 1e-3


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(folder: Path, whole: Records) -> None:
    recipe = rollout_recipe(folder, "again", "init.from=$/mixture/out")
    train(recipe)
    RolloutJournal.open(recipe.run.folder).forget_from(3)
    train(recipe, resume=str(recipe.run.folder / "checkpoints/step-00000002"))
    assert journal_content(recipe.run.folder) == journal_content(folder / "runs/whole")
    records = read_metrics(recipe.run.folder / "metrics.jsonl")
    for record, expected in zip(records, whole, strict=True):
        assert {key: record[key] for key in SAME} == {key: expected[key] for key in SAME}


LAYOUTS = {
    "zero1": (),
    "experts": ("parallel.expert=2", "parallel.strategy=fsdp"),
    "tensor": ("parallel.tensor=2",),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_take_the_same_experts(folder: Path, whole: Records, layout: str) -> None:
    records = run(folder, layout, "mixture", *LAYOUTS[layout], world=2)
    here = journal_of(folder / "runs" / layout)
    for sampled, expected in zip(here, journal_of(folder / "runs/whole"), strict=True):
        for answer, other in zip(sampled.answers, expected.answers, strict=True):
            assert answer.ids == other.ids
            assert answer.routes is not None
            assert other.routes is not None
            assert answer.routes.tolist() == other.routes.tolist()
    for record, expected in zip(records, whole, strict=True):
        assert {key: record[key] for key in SAME} == pytest.approx(
            {key: expected[key] for key in SAME}, rel=1e-4, abs=1e-5
        )


@pytest.mark.parametrize(
    "way",
    [
        ("memory.recompute=true",),
        ("memory.recompute=selective",),
        ("rollout.passes=2",),
        ("adapter.rank=4", "objective.beta=0.1"),
    ],
    ids=" ".join,
)
def test_ways_to_train_agree_with_the_sampler(folder: Path, way: tuple[str, ...]) -> None:
    records = run(folder, "-".join(way).replace("=", "-"), "ties", *way, "steps=2", "optim.lr=1e-8")
    for record in records:
        assert record["agreement/max"] < 1e-4


def test_a_reference_takes_its_own_experts() -> None:
    weights = ((spec.name, initial_value(spec, MIXTURE, 4)) for spec in param_specs(MIXTURE))
    model = build_frozen_model(MIXTURE, weights, torch.device("cpu"), torch.float32)
    answer = TrainedAnswer((1, 2, 3), (4, 5, 6), torch.zeros(3).numpy(), 0.0)
    forced = replace(answer, routes=torch.tensor([[[0, 1]] * 2] * 5, dtype=torch.int16).numpy())
    score = score_tokens_with(model, 8, "scored", DrawnFrom())
    plain, replayed = (
        answer_step([each], StepRows(8, 2, 1), 0).batch.microbatches[0] for each in (answer, forced)
    )
    assert ROUTES in replayed.extra
    assert torch.equal(score(replayed).extra["scored"], score(plain).extra["scored"])
    # The model itself takes what it is given.
    assert not torch.equal(model.forward_batch(replayed).hidden, model.forward_batch(plain).hidden)
