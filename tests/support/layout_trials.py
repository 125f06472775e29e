"""Layouts of ranks against one process: a table of trials, each trained for some steps on its ranks and alone.

A trial is an engine in words (`Setup`) on a number of ranks. Trials of one world run one after another in the same started ranks.
Add a trial to the list of its axis; `compare` runs a list and returns the table that a test prints.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import pytest
import torch

from headway.data.batch import TENSOR_FIELDS, StepBatch, StepStats
from headway.model.adapter.config import AdapterConfig
from headway.model.config import HeadGatesConfig, ModelConfig
from headway.optim.groups import hypers
from headway.parallel.collectives import RankGroup
from headway.tasks.base import StepInfo
from headway.tasks.dpo import Config as DPO
from headway.tasks.head_sparsity import Config as HeadSparsity
from headway.tasks.next_token import Config as NextToken
from support.engines import CONFIG, OPTIM, Setup, make_engine, share_of_step
from support.preference_pairs import pair_batch
from support.ranks import run_ranks

STEPS = 5
DRILL_STEPS = 10
TRIAL_OPTIM = OPTIM.model_copy(update={"eps": 1e-6, "lr": 3e-3})
"""Adam turns the rounding of a gradient near zero into a whole step; these keep it small."""
PLAIN = CONFIG.with_(dropout=0.0, num_heads=8, num_kv_heads=4, init_std=0.3)
BIASES = {"qkv_bias": True, "output_bias": True, "ffn_bias": True}
GATED = PLAIN.with_(head_gates=HeadGatesConfig(window=3, sinks=1, init_mean=0.0, init_std=1.5))
SPARSITY = HeadSparsity(start=0.5, target=0.7, mask_lr=0.3, reg_lr=0.3)
LORA = AdapterConfig(rank=4)
LORA_EXPERTS = AdapterConfig(rank=4, targets=("all", "experts"))
PACKED_EXPERTS = LORA_EXPERTS.model_copy(update={"base": "nf4"})
DORA = AdapterConfig(kind="dora", rank=4)
DORA_HEAD = DORA.model_copy(update={"targets": ("all", "lm_head")})
FSDP = {"strategy": "fsdp"}
SHAPED = NextToken(label_smoothing=0.1, z_loss=1e-3)


@dataclass(frozen=True)
class LayoutTrial:
    """One line of the table."""

    name: str
    world: int
    setup: Setup
    pairs: bool = False
    """The rows hold preference pairs."""


@dataclass(frozen=True)
class Outcome:
    """What a trial gives on one rank."""

    losses: list[float]
    norms: list[float]
    valid: dict[str, float]
    """The sums of a validation afterwards."""
    weights: dict[str, torch.Tensor]


def trial(
    name: str,
    world: int,
    parallel: dict[str, Any],
    *,
    config: ModelConfig = PLAIN,
    pairs: bool = False,
    **more: Any,
) -> LayoutTrial:
    """A trial with the small model, all of which trains unless `freeze` says otherwise."""
    setup = {
        "micro": 2,
        "freeze": (),
        "objective": DPO(reference_free=True) if pairs else None,
        **more,
    }
    return LayoutTrial(name, world, Setup(parallel, config=config, **setup), pairs)


def step_of(trial: LayoutTrial, index: int, rank: int, world: int) -> StepBatch:
    """This rank's rows of a step, the same rows however many ranks read them."""
    return (
        pair_step(index, trial.setup.micro, rank, world)
        if trial.pairs
        else share_of_step(index, trial.setup.micro, rank, world)
    )


def pair_step(index: int, micro: int, rank: int, world: int) -> StepBatch:
    """Rows of one or two pairs."""
    generator = torch.Generator().manual_seed(index)

    def text(length: int) -> list[int]:
        return torch.randint(1, 64, (length,), generator=generator).tolist()

    rows = [
        [(text(2), text(1 + number % 3), text(2)) for number in range(1 + row % 2)]
        for row in range(16)
    ]
    batch = pair_batch(rows, seq_len=16)
    size = 16 // micro
    each = micro // world
    mine = [slice(i * size, (i + 1) * size) for i in range(rank * each, (rank + 1) * each)]
    micros = tuple(
        replace(batch, **{name: getattr(batch, name)[part] for name in TENSOR_FIELDS})
        for part in mine
    )
    totals = {
        "targets": float(batch.loss_weight.sum()),
        "rows": 16.0,
        "pairs": float(sum(map(len, rows))),
    }
    return StepBatch(
        micros, totals, StepStats(batch.tokens.numel(), 1, 1, 1, 1, 0), first_microbatch=rank * each
    )


def train_some(trial: LayoutTrial, engine: Any, steps: range) -> tuple[list[float], list[float]]:
    """Losses and norms of some steps."""
    data = engine.ranks.data
    losses = []
    norms = []
    for index in steps:
        result = engine.forward_backward(
            step_of(trial, index, data.rank, data.size), StepInfo(index, 20)
        )
        update = engine.update(hypers(TRIAL_OPTIM, engine.groups, index, 20))
        assert not update.skipped
        losses.append(float(result.loss))
        norms.append(float(update.norm))
    return losses, norms


def train_trial(trial: LayoutTrial, group: RankGroup, steps: int = STEPS) -> Outcome:
    """Train one trial on this rank."""
    engine = make_engine(group, trial.setup)
    data = engine.ranks.data
    losses, norms = train_some(trial, engine, range(steps))
    batches = step_of(trial, steps, data.rank, data.size).microbatches
    sums = engine.evaluate(batches, StepInfo(steps, 20, training=False))
    valid = {
        name: float(total / weight) for name, (total, weight) in sums.items() if total.dim() == 0
    }
    return Outcome(losses, norms, valid, {name: value.clone() for name, value in engine.weights()})


def on_one_process(trial: LayoutTrial) -> LayoutTrial:
    """A trial without its layout."""
    kept = {
        key: value
        for key, value in trial.setup.parallel.items()
        if key in ("accumulate_dtype", "reduce_dtype")
    }
    return replace(
        trial,
        name="alone",
        world=1,
        setup=replace(trial.setup, parallel=kept, compile_blocks=False),
    )


def compare(
    trials: Sequence[LayoutTrial],
    tolerance: float = 1e-5,
    seconds_each: float = 10,
    steps: int = STEPS,
) -> list[str]:
    """Run trials; returns the table, a line for each. Losses, norms, validation and final weights must be those of one process."""
    table = [
        f"{'trial':<44}{'ranks':>6}  {'loss':>10}{'norm':>10}{'weights':>10}   largest relative difference in {steps} steps"
    ]
    wrong: list[str] = []
    for world, several in groupby(
        sorted(trials, key=lambda trial: trial.world), key=lambda trial: trial.world
    ):
        listed = list(several)
        results = run_ranks(
            functools.partial(_train_all, listed, steps),
            world,
            timeout=60 + seconds_each * len(listed),
        )
        for index, trial in enumerate(listed):
            try:
                differences = [
                    _differences(trial, outcomes[index], tolerance, steps) for outcomes in results
                ]
            except AssertionError as problem:
                wrong.append(str(problem)[:600])
                continue
            worst = [max(column) for column in zip(*differences, strict=True)]
            table.append(
                f"{trial.name:<44}{world:>6}  " + "".join(f"{value:>10.1e}" for value in worst)
            )
    assert not wrong, "\n\n".join(["\n".join(table), *wrong])
    return table


def _train_all(trials: Sequence[LayoutTrial], steps: int, group: RankGroup) -> list[Outcome]:
    return [train_trial(trial, group, steps) for trial in trials]


def _differences(
    trial: LayoutTrial, got: Outcome, tolerance: float, steps: int
) -> tuple[float, float, float]:
    right = _right(trial, steps)
    assert got.losses == pytest.approx(right.losses, rel=tolerance, abs=1e-7), trial.name
    assert got.norms == pytest.approx(right.norms, rel=10 * tolerance), trial.name
    assert got.valid == pytest.approx(right.valid, rel=10 * tolerance, abs=1e-6), trial.name
    assert got.weights.keys() == right.weights.keys(), trial.name
    # what starts at zero, such as a bias, is compared with a norm of at least 1
    far = {
        name: float(
            (got.weights[name].float() - value.float()).norm() / value.float().norm().clamp(min=1.0)
        )
        for name, value in right.weights.items()
    }
    assert max(far.values()) <= tolerance, (
        f"{trial.name}: {max(far, key=far.__getitem__)} differs by {max(far.values()):.1e}"
    )
    return _far(got.losses, right.losses), _far(got.norms, right.norms), max(far.values())


def _far(got: list[float], right: list[float]) -> float:
    return max(abs(a - b) / (abs(b) + 1e-7) for a, b in zip(got, right, strict=True))


_ALONE: dict[tuple[str, int], Outcome] = {}


def _right(trial: LayoutTrial, steps: int) -> Outcome:
    key = (repr(on_one_process(trial)), steps)
    if key not in _ALONE:
        _ALONE[key] = train_trial(on_one_process(trial), RankGroup(), steps)
    return _ALONE[key]


def tensor_trials() -> list[LayoutTrial]:
    """The tensor axis, alone and with others."""
    tensor = {"tensor": 2}
    whole = {"tensor": 2, "sequence": False}
    zero1 = {"tensor": 2, "zero1": {"size": "auto"}}
    both = {**tensor, "context": 2}
    fsdp = {**tensor, "strategy": "fsdp"}
    untied = PLAIN.with_(tie_embeddings=False)
    biased = untied.with_(norm="layernorm", qk_norm=True, **BIASES)
    gates = {"config": GATED, "objective": SPARSITY}
    return [
        trial("packed documents, clipping, tied", 2, tensor),
        trial("untied, biases, layernorm, qk norm; no sequence", 2, whole, config=biased),
        trial(
            "smoothing, z loss, dropout, uneven vocabulary",
            2,
            tensor,
            config=PLAIN.with_(vocab_size=67, dropout=0.2),
            objective=SHAPED,
        ),
        trial(
            "dora with its head, selective recompute",
            2,
            tensor,
            adapter=DORA_HEAD,
            config=untied,
            memory={"recompute": "selective"},
        ),
        trial(
            "2 KV heads on 4 ranks, gates",
            4,
            {"tensor": 4},
            config=GATED.with_(num_kv_heads=2),
            objective=SPARSITY,
        ),
        trial(
            "x zero1, accumulation, uneven vocabulary",
            4,
            zero1,
            config=PLAIN.with_(vocab_size=65),
            micro=4,
        ),
        trial("x fsdp, biases", 4, fsdp, config=PLAIN.with_(**BIASES)),
        trial("x context, gates", 4, both, **gates),
    ]


def more_tensor_trials() -> list[LayoutTrial]:
    """The rest of the tensor axis, for drills."""
    tensor = {"tensor": 2}
    whole = {"tensor": 2, "sequence": False}
    off = {"overlap": {"reduce": False, "gather": False, "step": False}}
    fsdp = {**tensor, "strategy": "fsdp"}
    biased = PLAIN.with_(tie_embeddings=False, norm="layernorm", qk_norm=True, **BIASES)
    gates = {"config": GATED, "objective": SPARSITY}
    return [
        trial(
            "dpo, recomputed, offloaded",
            2,
            whole,
            pairs=True,
            memory={"recompute": 1.0, "offload": ["activations", "optimizer"]},
        ),
        trial("head gates, frozen weights", 2, tensor, **gates, freeze=("weights",)),
        trial("no sequence, tied", 2, whole),
        trial(
            "lora with dropout, biases",
            2,
            tensor,
            adapter=LORA.model_copy(update={"dropout": 0.2}),
            config=PLAIN.with_(**BIASES),
        ),
        trial("untied, biases, layernorm, qk norm", 2, tensor, config=biased),
        trial("dropout, no sequence", 2, whole, config=PLAIN.with_(dropout=0.2)),
        trial(
            "kto, no sequence",
            2,
            whole,
            pairs=True,
            objective=DPO(reference_free=True, loss_type="kto_pair"),
        ),
        trial("dpo", 2, tensor, pairs=True),
        trial(
            "dora with dropout, no sequence",
            2,
            whole,
            adapter=DORA.model_copy(update={"dropout": 0.2}),
            config=PLAIN.with_(**BIASES),
        ),
        trial("head gates", 2, tensor, **gates),
        trial("every second block recomputed", 2, tensor, memory={"recompute": "every-2"}),
        trial(
            "frozen layers, embedding gradient scaled",
            2,
            tensor,
            freeze=("layers.0",),
            config=PLAIN.with_(embed_grad_scale=0.5, no_rope_layers=(1,)),
        ),
        trial("sliding windows", 2, tensor, config=PLAIN.with_(sliding_window=4)),
        trial(
            "2 KV heads on 4 ranks, qk norm, biases",
            4,
            {"tensor": 4},
            config=PLAIN.with_(num_kv_heads=2, qk_norm=True, qkv_bias=True),
        ),
        trial(
            "1 KV head on 4 ranks, lora",
            4,
            {"tensor": 4},
            config=PLAIN.with_(num_kv_heads=1),
            adapter=LORA,
        ),
        trial(
            "1 KV head on 4 ranks, no sequence",
            4,
            {"tensor": 4, "sequence": False},
            config=PLAIN.with_(num_kv_heads=1),
        ),
        trial("x ddp, accumulation", 4, {**tensor, "zero1": {"size": 1}}, micro=8),
        trial("x zero1, overlaps off", 4, {**tensor, **off}),
        trial("x zero1, dpo, lora", 4, tensor, pairs=True, adapter=LORA),
        trial("x fsdp, gates", 4, fsdp, **gates),
        trial(
            "x fsdp, dora, uneven vocabulary",
            4,
            fsdp,
            config=PLAIN.with_(vocab_size=65),
            adapter=DORA,
        ),
        trial("x context", 4, {**tensor, "context": 2}),
        trial(
            "x context, gates, frozen weights",
            4,
            {**tensor, "context": 2},
            **gates,
            freeze=("weights",),
        ),
        trial(
            "x ring, 2 KV heads", 4, {**tensor, "context": 2}, config=PLAIN.with_(num_kv_heads=2)
        ),
        trial("x ring x heads", 8, {**tensor, "context": 4}),
        trial("x context x fsdp", 4, {**tensor, "context": 2, "strategy": "fsdp"}),
        trial("x zero1 of 2, twice", 8, {**tensor, "zero1": {"size": 2}}, micro=4),
        trial("x fsdp of 2, twice", 8, {**fsdp, "fsdp": {"size": 2}}, micro=4),
        trial("x context x zero1", 8, {**tensor, "context": 2}, **gates),
        trial(
            "4 ranks x fsdp, 2 KV heads",
            8,
            {**fsdp, "tensor": 4},
            config=PLAIN.with_(num_kv_heads=2),
        ),
    ]


def expert_trials() -> list[LayoutTrial]:
    """Mixtures of experts on every axis they have."""
    balanced = {
        "num": 4,
        "per_token": 2,
        "ffn_size": 24,
        "shared_ffn_size": 16,
        "aux_loss": 0.1,
        "z_loss": 1e-2,
    }
    mixture = PLAIN.with_(experts=balanced)
    step = PLAIN.with_(
        experts={**balanced, "aux_scope": "step", "aux_layers": "pooled", "normalize": False}
    )
    biased = PLAIN.with_(
        experts={
            **balanced,
            "aux_loss": 0.0,
            "bias_rate": 0.02,
            "router": "sigmoid",
            "first_dense": 1,
        }
    )
    tensor = {"tensor": 2}
    shape = {
        "kv_rank": 12,
        "q_rank": 10,
        "nope_head_dim": 6,
        "rope_head_dim": 4,
        "value_head_dim": 8,
    }
    grouped = {
        **balanced,
        "router": "sigmoid",
        "num_groups": 2,
        "bias_rate": 0.02,
        "routed_scale": 2.0,
        "first_dense": 1,
    }
    latent = PLAIN.with_(
        latent_attention=shape,
        head_dim=None,
        num_kv_heads=None,
        experts=grouped,
        qkv_bias=True,
        output_bias=True,
    )
    return [
        trial("latent attention, tensor", 2, tensor, config=latent),
        trial("latent attention, tensor, no sequence", 2, {**tensor, "sequence": False}, config=latent),
        trial("experts, ddp, loss of each row", 2, {"zero1": {"size": 1}}, config=mixture, micro=4),
        trial("experts, zero1, loss of the step", 2, {}, config=step, micro=4),
        trial("experts, fsdp, bias without a loss", 2, {"strategy": "fsdp"}, config=biased),
        trial("experts, tensor, loss of each row", 2, tensor, config=mixture),
        trial("experts, tensor, no sequence, bias", 2, {**tensor, "sequence": False}, config=biased),
        trial("experts, lora on them, recomputed, offloaded", 2, tensor, config=mixture, adapter=LORA_EXPERTS,
              memory={"recompute": 1.0, "offload": ["activations", "optimizer"]}),
        trial("experts, fsdp, selective recompute", 2, {"strategy": "fsdp"}, config=step, memory={"recompute": "selective"}),
        trial("experts in nf4, lora on them, fsdp", 2, {"strategy": "fsdp"}, config=mixture, adapter=PACKED_EXPERTS),
        trial("nf4 base, ddp", 2, {"zero1": {"size": 1}}, adapter=PACKED_EXPERTS.model_copy(update={"targets": ("all",)})),
        trial("expert axis, ddp, loss of each row", 2, {"expert": 2, "zero1": {"size": 1}}, config=mixture, micro=4),
        trial("expert axis, zero1, loss of the step, recomputed", 2, {"expert": 2}, config=step, micro=4, memory={"recompute": "every-2"}),
        trial("expert axis, fsdp, bias, recomputed", 2, {"expert": 2, **FSDP}, config=biased, memory={"recompute": 1.0}),
    ]  # fmt: skip


def expert_axis_trials() -> list[LayoutTrial]:
    """Experts split over two and four of four ranks."""
    experts = {
        "num": 4,
        "per_token": 2,
        "ffn_size": 24,
        "shared_ffn_size": 16,
        "aux_loss": 0.1,
        "z_loss": 1e-2,
    }
    mixture = PLAIN.with_(experts=experts)
    biased = PLAIN.with_(
        experts={**experts, "aux_scope": "step", "bias_rate": 0.02, "router": "sigmoid"},
        tie_embeddings=False,
    )
    biases = PLAIN.with_(
        experts={**experts, "bias": True, "router_bias": True, "swiglu_limit": 7.0}
    )
    return [
        trial(
            "expert axis 4 x ddp", 4, {"expert": 4, "zero1": {"size": 1}}, config=biased, micro=4
        ),
        trial("expert axis 2 x zero1", 4, {"expert": 2}, config=mixture, micro=8),
        trial("expert axis 2 x fsdp", 4, {"expert": 2, **FSDP}, config=biased, micro=8),
        trial(
            "expert axis 2 x tensor, biases of experts",
            4,
            {"expert": 2, "tensor": 2},
            config=biases,
            micro=4,
        ),
    ]


def more_expert_axis_trials() -> list[LayoutTrial]:
    """The rest of the expert axis, for drills."""
    experts = {
        "num": 8,
        "per_token": 3,
        "ffn_size": 24,
        "aux_loss": 0.1,
        "aux_scope": "step",
        "bias_rate": 0.01,
    }
    mixture = PLAIN.with_(experts={**experts, "first_dense": 1})
    two = {"expert": 2}
    off = {"overlap": {"reduce": False, "gather": False, "step": False}}
    gates = {"config": GATED.with_(experts=experts), "objective": SPARSITY}
    offload = {"recompute": 1.0, "offload": ["activations", "optimizer"]}
    return [
        trial(
            "expert axis, lora on experts, recomputed",
            2,
            two,
            config=mixture,
            adapter=LORA_EXPERTS,
            memory=offload,
        ),
        trial(
            "expert axis, fsdp, lora on experts",
            2,
            {**two, **FSDP},
            config=mixture,
            adapter=LORA_EXPERTS,
        ),
        trial(
            "expert axis, fsdp, dora, offloaded",
            2,
            {**two, **FSDP},
            config=mixture,
            adapter=DORA,
            memory=offload,
        ),
        trial("expert axis, dpo, dropout", 2, two, config=mixture.with_(dropout=0.2), pairs=True),
        trial("expert axis, gates, frozen weights", 2, two, **gates, freeze=("weights",)),
        trial(
            "expert axis, frozen experts, overlaps off",
            2,
            {**two, **off},
            config=mixture,
            freeze=("*.mlp.experts.*",),
        ),
        trial(
            "expert axis, a hook", 2, {**two, "hook": {"kind": "reduce_scatter"}}, config=mixture
        ),
        trial("expert axis, compiled", 2, two, config=mixture, compile_blocks=True),
        trial(
            "expert axis, fsdp, compiled", 2, {**two, **FSDP}, config=mixture, compile_blocks=True
        ),
        trial(
            "expert axis 4 x zero1 of 2",
            4,
            {"expert": 4, "zero1": {"size": 2}},
            config=mixture,
            micro=4,
        ),
        trial(
            "expert axis 2 x zero1 of 2",
            4,
            {"expert": 2, "zero1": {"size": 2}},
            config=mixture,
            micro=4,
        ),
        trial(
            "expert axis 2 x fsdp of 2",
            4,
            {"expert": 2, **FSDP, "fsdp": {"size": 2}},
            config=mixture,
            micro=4,
        ),
        trial(
            "expert axis 4 x fsdp of 2",
            4,
            {"expert": 4, **FSDP, "fsdp": {"size": 2}},
            config=mixture,
            micro=4,
        ),
        trial("expert axis 4 x fsdp", 4, {"expert": 4, **FSDP}, config=mixture, micro=4),
        trial(
            "expert axis 2 x tensor x fsdp, no sequence",
            4,
            {"expert": 2, "tensor": 2, "sequence": False, **FSDP},
            config=mixture,
        ),
        trial(
            "expert axis 4 x fsdp of 2, twice",
            8,
            {"expert": 4, **FSDP, "fsdp": {"size": 2}},
            config=mixture,
            micro=8,
        ),
        trial(
            "expert axis 2 x zero1 of 4, twice",
            8,
            {"expert": 2, "zero1": {"size": 4}},
            config=mixture,
            micro=8,
        ),
        trial(
            "expert axis 2 x tensor x zero1", 8, {"expert": 2, "tensor": 2}, config=mixture, micro=4
        ),
    ]


def more_expert_trials() -> list[LayoutTrial]:
    """Axes together, for drills."""
    experts = {
        "num": 6,
        "per_token": 3,
        "ffn_size": 24,
        "aux_loss": 0.1,
        "aux_scope": "step",
        "bias_rate": 0.01,
    }
    mixture = PLAIN.with_(experts=experts, tie_embeddings=False)
    return [
        trial("experts, tensor x zero1", 4, {"tensor": 2}, config=mixture, micro=4),
        trial(
            "experts, tensor x fsdp", 4, {"tensor": 2, "strategy": "fsdp"}, config=mixture, micro=4
        ),
        trial(
            "experts, fsdp of 2, twice",
            4,
            {"strategy": "fsdp", "fsdp": {"size": 2}},
            config=mixture,
            micro=8,
        ),
        trial("experts, tensor, compiled", 2, {"tensor": 2}, config=mixture, compile_blocks=True),
        trial("experts, dpo", 2, {"tensor": 2}, config=mixture, pairs=True),
        trial(
            "experts, gates",
            2,
            {"tensor": 2},
            config=GATED.with_(experts=experts),
            objective=SPARSITY,
        ),
    ]


def compiled_tensor_trials() -> list[LayoutTrial]:
    """Compiled halves of blocks, whose graphs contain the exchanges."""
    return [
        trial(
            "compiled, no sequence, dora",
            2,
            {"tensor": 2, "sequence": False},
            compile_blocks=True,
            adapter=DORA,
        ),
        trial(
            "compiled, selective recompute, biases",
            2,
            {"tensor": 2},
            compile_blocks=True,
            memory={"recompute": "selective"},
            config=PLAIN.with_(**BIASES),
        ),
    ]
