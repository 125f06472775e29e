"""What dropout drops follows from the seed, the step and the microbatch, and from nothing else."""

from dataclasses import replace

import torch
from support.batches import make_batch, make_step
from support.engines import CONFIG, Setup, make_engine

from headway.parallel.collectives import RankGroup
from headway.tasks.base import StepInfo


def loss(step: int, first_microbatch: int = 0, num_micro: int = 1) -> float:
    """The loss of the same rows and weights; only where they stand in the run differs."""
    engine = make_engine(RankGroup(), Setup(config=CONFIG.with_(dropout=0.5), freeze=()))
    row = make_batch([[16]], seq_len=16, vocab=64)
    rows = replace(
        row,
        **{
            name: torch.cat([getattr(row, name)] * num_micro)
            for name in ("tokens", "targets", "loss_weight")
        },
    )
    same = ("position", "document", "source", "bounds")
    rows = replace(rows, **{name: torch.cat([getattr(row, name)] * num_micro) for name in same})
    batch = replace(make_step(rows, num_micro), first_microbatch=first_microbatch)
    return float(engine.forward_backward(batch, StepInfo(step, 10)).loss)


def test_every_step_and_every_microbatch_drops_other_places_and_a_rerun_the_same() -> None:
    found = {(step, micro): loss(step, micro) for step in (0, 1) for micro in (0, 1)}
    assert len(set(found.values())) == 4, found
    assert loss(1, 1) == found[1, 1]


def test_microbatches_of_one_step_drop_other_places_counted_over_all_ranks() -> None:
    first, second = loss(0, 0), loss(0, 1)
    # two equal microbatches share one mean: half of each one's own loss, the second drawn as number 1
    assert abs(loss(0, 0, num_micro=2) - (first + second) / 2) < 1e-6
    assert abs(loss(0, 1, num_micro=2) - (second + loss(0, 2)) / 2) < 1e-6
