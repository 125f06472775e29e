"""A model that is no Transformer, from a family module of a user's, trains in every engine like plain autograd with torch's AdamW."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.engines import CONFIG, OPTIM, Setup, make_engine, share_of_step, train_steps
from support.initial_weights import initialize
from support.my_lab.mlp_model import MLPModel
from support.ranks import run_ranks

from headway.optim.groups import hypers, matching, trainable
from headway.parallel.collectives import RankGroup

MLP = CONFIG.model_copy(update={"family": "support.my_lab.mlp_model"})
STEPS = 4


def trained(
    setup: Setup, group: RankGroup
) -> tuple[list[tuple[float, float, float]], dict[str, torch.Tensor]]:
    engine = make_engine(group, setup)
    assert isinstance(engine.model, MLPModel)
    seen = train_steps(engine, group, setup.micro, 0, STEPS)
    return seen, {name: value.clone() for name, value in engine.weights()}


@functools.cache
def plain() -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of plain autograd over whole batches."""
    model = MLPModel(MLP)
    initialize(model, 1)
    trained_groups = make_engine(RankGroup(), Setup(config=MLP, freeze=())).groups
    decay = max(hyper.weight_decay for hyper in hypers(OPTIM, trained_groups, 0, 20).values())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=OPTIM.betas, eps=OPTIM.eps)
    seen: list[tuple[float, float]] = []
    for index in range(STEPS):
        step = share_of_step(index, 1, 0, 1)
        batch = step.microbatches[0]
        losses = F.cross_entropy(
            model.logits(model(batch.tokens)).flatten(0, 1),
            batch.targets.flatten(),
            reduction="none",
        )
        loss = (losses * batch.loss_weight.flatten()).sum() / step.totals["targets"]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip or torch.inf)
        for group in optimizer.param_groups:
            group["lr"] = next(iter(hypers(OPTIM, trained_groups, index, 20).values())).lr
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(loss.detach()), float(norm)))
    return seen, {name: parameter.detach() for name, parameter in model.named_parameters()}


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "recomputed and offloaded": (1, {}, {"recompute": 1, "offload": ["activations"]}),
    "selectively recomputed": (1, {}, {"recompute": "selective"}),
    "zero1": (2, {"zero1": {"size": "auto"}}, {}),
    "fsdp": (2, {"strategy": "fsdp"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_another_model_trains_like_plain_autograd(case: str) -> None:
    ranks, parallel, memory = CASES[case]
    expected, weights = plain()
    setup = Setup(parallel, micro=2 * ranks, config=MLP, freeze=(), memory=memory)
    for seen, got in run_ranks(functools.partial(trained, setup), ranks):
        for (loss, norm, skipped), (right_loss, right_norm) in zip(seen, expected, strict=True):
            assert loss == pytest.approx(right_loss, rel=1e-6)
            assert norm == pytest.approx(right_norm, rel=1e-4)
            assert skipped == 0
        assert got.keys() == weights.keys()
        for name in weights:
            torch.testing.assert_close(got[name], weights[name], rtol=1e-4, atol=1e-5, msg=name)


SPLIT = CONFIG.model_copy(update={"family": "support.my_lab.split_model"})


def split_steps(
    setup: Setup, group: RankGroup
) -> tuple[list[tuple[float, float, float]], dict[str, torch.Tensor]]:
    """Every rank has all rows and a part of every layer; norms start at other values on purpose, so that a wrong sum shows."""
    engine = make_engine(group, setup)
    generator = torch.Generator().manual_seed(7)
    engine.fill(
        (name, torch.randn(shape, generator=generator) * 0.3)
        for name, shape in engine.shapes.items()
    )
    seen = train_steps(engine, RankGroup(), setup.micro, 0, STEPS)
    return seen, {name: value.clone() for name, value in engine.weights()}


@pytest.mark.parametrize("sequence", [False, True], ids=["whole tokens", "own tokens"])
def test_gradients_are_summed_as_the_spec_says_whatever_a_parameter_is_called(
    sequence: bool,
) -> None:
    alone = Setup(micro=2, config=SPLIT, freeze=())
    expected, weights = split_steps(alone, RankGroup())
    setup = Setup({"tensor": 2, "sequence": sequence}, micro=2, config=SPLIT, freeze=())
    for seen, got in run_ranks(functools.partial(split_steps, setup), 2):
        for (loss, norm, _), (right_loss, right_norm, _) in zip(seen, expected, strict=True):
            assert loss == pytest.approx(right_loss, rel=1e-5)
            assert norm == pytest.approx(right_norm, rel=1e-4)
        for name in weights:
            torch.testing.assert_close(got[name], weights[name], rtol=1e-4, atol=1e-5, msg=name)


def test_modules_say_how_parameters_begin_and_group_whatever_they_are_called() -> None:
    engine = make_engine(RankGroup(), Setup(config=SPLIT, freeze=()))
    norms = {name for name in engine.specs if ".ln_1." in name or name.startswith("ln_f.")}
    assert matching("norms", engine.specs) == norms
    assert len(norms) == 2 * SPLIT.num_layers + 2
    for name, value in engine.weights():
        if name in norms or name.endswith("bias"):
            assert (value == (0.0 if name.endswith("bias") else 1.0)).all(), name
    assert "scale" in trainable(engine.specs, (), ())
