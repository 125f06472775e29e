"""The flat-buffer engine against a plain module with torch's own optimizer, and the exactness of accumulation."""

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.batches import make_batch, make_step
from support.engines import Setup, make_engine, train_steps
from support.initial_weights import initialize
from torch import nn

from headway.data.batch import Batch, StepBatch
from headway.kernels.attention import mask_of
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import ParamSpec, param_specs
from headway.model.transformer import Transformer
from headway.optim.adamw import Config as AdamW
from headway.optim.base import GroupRule
from headway.optim.groups import hypers
from headway.optim.scaler import ScalerConfig
from headway.parallel import assemble as assembling
from headway.parallel import base
from headway.parallel.assemble import assemble
from headway.parallel.collectives import RankGroup
from headway.parallel.engine import EngineSpec
from headway.parallel.flat.engine import FlatEngine
from headway.tasks.base import StepInfo
from headway.tasks.next_token import Config as NextToken

CONFIG = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=64,
    max_seq_len=32,
)
AT = StepInfo(0, 10)


def engine_for(
    config: ModelConfig = CONFIG,
    optim: AdamW | None = None,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> FlatEngine:
    optim = optim or AdamW(lr=1e-2)
    engine = assemble(
        EngineSpec(config, NextToken(), optim, dtype=dtype, chunk_tokens=16, seed=3, **options)
    )  # pyright: ignore[reportArgumentType]
    assert isinstance(engine, FlatEngine)
    engine.fill((name, initial_value(spec, config, 1)) for name, spec in engine.specs.items())
    return engine


def plain_model() -> Transformer:
    model = Transformer(CONFIG)
    initialize(model, 1)
    return model


def mean_loss(model: Transformer, batch: Batch) -> torch.Tensor:
    hidden = model(batch.tokens, batch.position, mask_of(batch))
    losses = F.cross_entropy(
        model.logits(hidden).flatten(0, 1), batch.targets.flatten(), reduction="none"
    )
    return (losses * batch.loss_weight.flatten()).sum() / batch.loss_weight.sum()


def gradients(engine: FlatEngine, step: StepBatch) -> dict[str, torch.Tensor]:
    engine.forward_backward(step, AT)
    return {
        name: view.clone() for buffer in engine.buffers for name, view in buffer.gradients.items()
    }


def uneven_batch() -> Batch:
    """Eight rows, a different number of targets in each, the last two with none."""
    rows = [[16], [7, 5], [3, 3, 3], [12], [2, 9], [4, 4, 4, 4], [9], [5]]
    return make_batch(rows, seq_len=16, vocab=64, targets=[11, 4, 6, 1, 9, 8, 0, 0])


def test_accumulation_gives_the_gradients_of_one_big_batch_where_a_mean_of_means_would_not() -> (
    None
):
    batch = uneven_batch()
    whole = gradients(engine_for(), make_step(batch, 1))
    split = gradients(engine_for(), make_step(batch, 8))
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=1e-4, atol=1e-7)

    model = plain_model()
    for micro in make_step(batch, 4).microbatches:
        if micro.loss_weight.sum() > 0:
            (mean_loss(model, micro) / 4).backward()
    wrong = model.model.norm.weight.grad
    assert wrong is not None
    assert not torch.allclose(wrong, whole["model.norm.weight"], rtol=1e-2)


def test_training_equals_a_plain_module_with_torch_adamw_and_clipping() -> None:
    optim = AdamW(lr=1e-2, clip=0.5, weight_decay=0.1)
    engine = engine_for(optim=optim)
    model = plain_model()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    torch_optim = torch.optim.AdamW(
        [{"params": decay}, {"params": rest, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    for index in range(5):
        batch = make_batch([[16], [7, 9], [3, 13], [10]], seq_len=16, vocab=64, seed=index)
        numbers = hypers(optim, engine.groups, index, 10)
        for group in torch_optim.param_groups:
            group["lr"] = optim.hyper(index, 10).lr
        result = engine.forward_backward(make_step(batch, 2), AT)
        update = engine.update(numbers)
        loss = mean_loss(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch_optim.step()
        torch_optim.zero_grad()
        torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(update.norm, norm, rtol=1e-4, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(engine.masters[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_a_step_with_a_non_finite_gradient_changes_nothing_and_is_counted() -> None:
    engine = engine_for()
    engine.forward_backward(make_step(uneven_batch(), 2), AT)
    before = {name: value.clone() for name, value in engine.masters.items()}
    engine.buffers[0].grads[0][5] = float("nan")
    update = engine.update(hypers(AdamW(), engine.groups, 0, 10))
    assert update.skipped.item() == 1
    assert all(torch.equal(before[name], value) for name, value in engine.masters.items())
    assert engine.scalars()["skipped"] == 1
    assert set(engine.scalars()["steps"].values()) == {0}
    engine.forward_backward(make_step(uneven_batch(), 2), AT)
    assert all(bool(grad.isfinite().all()) for buffer in engine.buffers for grad in buffer.grads), (
        "the next step starts clean"
    )


def test_frozen_parameters_take_no_gradient_and_no_optimizer_state_and_stay() -> None:
    engine = engine_for(freeze=("embeddings", "layers.0"))
    size = sum(buffer.master.numel() for buffer in engine.buffers)
    assert size < sum(value.numel() for value in engine.masters.values())
    before = {name: value.clone() for name, value in engine.masters.items()}
    engine.forward_backward(make_step(uneven_batch(), 2), AT)
    engine.update(hypers(AdamW(lr=1e-1, schedule={"warmup": 0}), engine.groups, 0, 10))  # pyright: ignore[reportArgumentType]
    moved = {name for name, value in engine.masters.items() if not torch.equal(before[name], value)}
    assert moved == {
        name for name in engine.masters if "layers.1" in name or name == "model.norm.weight"
    }


def test_groups_follow_their_own_numbers() -> None:
    optim = AdamW(
        lr=1e-2,
        schedule={"warmup": 0},
        groups=(GroupRule(match=("norms",), lr=0.5, maximize=True, weight_decay=0.0),),
    )  # pyright: ignore[reportArgumentType]
    engine = engine_for(optim=optim)
    numbers = hypers(optim, engine.groups, 0, 10)
    norms = next(g for g in engine.groups if "model.norm.weight" in g.names)
    assert numbers[norms.name].lr == pytest.approx(0.5)
    assert numbers[norms.name].maximize
    engine.forward_backward(make_step(uneven_batch(), 1), AT)
    grad = next(
        b.gradients["model.norm.weight"]
        for b in engine.buffers
        if "model.norm.weight" in b.gradients
    ).clone()
    engine.update(numbers)
    moved = engine.masters["model.norm.weight"] - 1
    assert torch.equal(torch.sign(moved), torch.sign(grad))


def test_bf16_keeps_fp32_masters_and_gradients() -> None:
    engine = engine_for(dtype=torch.bfloat16)
    exact = engine_for()
    step = make_step(uneven_batch(), 4)
    low = engine.forward_backward(step, AT)
    high = exact.forward_backward(step, AT)
    assert engine.model.model.norm.weight.dtype == torch.bfloat16
    assert all(g.dtype == b.master.dtype == torch.float32 for b in engine.buffers for g in b.grads)
    torch.testing.assert_close(low.loss, high.loss, rtol=1e-2, atol=1e-2)
    engine.update(hypers(AdamW(), engine.groups, 5, 10))
    for buffer in engine.buffers:
        assert torch.equal(buffer.param, buffer.master.bfloat16())


def test_saved_tensors_restore_an_engine_bit_for_bit() -> None:
    engine = engine_for()
    optim = AdamW(lr=1e-2)
    for index in range(3):
        engine.forward_backward(make_step(uneven_batch(), 2), AT)
        engine.update(hypers(optim, engine.groups, index, 10))
    saved = {(name, role): boxes[0][1].clone() for name, role, _, boxes in engine.tensors()}
    scalars = copy.deepcopy(engine.scalars())
    other = engine_for()
    other.load(lambda name, role, offset, shape: saved[name, role], scalars)
    for an_engine in (engine, other):
        an_engine.forward_backward(make_step(uneven_batch(), 2), AT)
        an_engine.update(hypers(optim, an_engine.groups, 3, 10))
    assert all(torch.equal(engine.masters[name], other.masters[name]) for name in engine.masters)


def test_an_fp16_engine_resumes_with_its_loss_scale() -> None:
    engine = make_engine(
        RankGroup(),
        Setup(
            dtype=torch.float16,
            loss_scale=ScalerConfig(initial=512.0, hysteresis=1, growth_interval=3),
        ),
    )
    for index in range(3):
        engine.forward_backward(make_step(uneven_batch(), 2), AT)
        if index == 0:
            engine.buffers[0].grads[0][5] = float("inf")  # one overflow halves the scale
        engine.update(hypers(AdamW(), engine.groups, index, 10))
    scalars = copy.deepcopy(engine.scalars())
    assert scalars["scaler"] == {"scale": 256.0, "good": 2, "overflows": 1}
    saved = {(name, role): boxes[0][1].clone() for name, role, _, boxes in engine.tensors()}
    other = make_engine(
        RankGroup(),
        Setup(
            dtype=torch.float16,
            loss_scale=ScalerConfig(initial=512.0, hysteresis=1, growth_interval=3),
        ),
    )
    other.load(lambda name, role, offset, shape: saved[name, role], scalars)
    other.forward_backward(make_step(uneven_batch(), 2), AT)
    assert float(other.update(hypers(AdamW(), other.groups, 3, 10)).loss_scale) == 256.0
    # the third good step in a row
    assert other.scalars()["scaler"] == {
        "scale": 512.0,
        "good": 0,
        "overflows": 0,
    }


@pytest.mark.parametrize("bad", ["layers.9", "*.nothing.*"])
def test_a_pattern_that_matches_nothing_is_a_mistake(bad: str) -> None:
    from headway.errors import ConfigError

    with pytest.raises(ConfigError, match="matches no parameter"):
        engine_for(freeze=(bad,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_halves_train_like_eager_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda fn, **options: compiler(fn, backend="aot_eager", **options)
    )
    eager = engine_for(dtype=dtype)
    compiled = engine_for(dtype=dtype, compile_blocks=True)
    for index in range(3):
        step = make_step(
            make_batch([[16], [7, 9], [3, 13], [10]], seq_len=16, vocab=64, seed=index), 2
        )
        losses = []
        for engine in (eager, compiled):
            losses.append(engine.forward_backward(step, AT).loss)
            engine.update(hypers(AdamW(lr=1e-2), engine.groups, index, 10))
        torch.testing.assert_close(
            losses[1], losses[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
        )


def test_a_parameter_without_a_part_in_the_step_gets_no_gradient() -> None:
    engine = engine_for()
    engine.forward_backward(make_step(uneven_batch(), 2), AT)
    owner, leaf = engine.param_owners["model.norm.weight"]
    kept = owner._parameters[leaf]
    engine.update(hypers(AdamW(lr=0.0), engine.groups, 0, 10))
    owner._parameters[leaf] = nn.Parameter(kept.detach().clone(), requires_grad=False)  # pyright: ignore[reportOptionalMemberAccess]
    engine.forward_backward(make_step(uneven_batch(), 2), AT)
    engine.update(hypers(AdamW(lr=0.0), engine.groups, 0, 10))
    view = next(
        b.gradients["model.norm.weight"]
        for b in engine.buffers
        if "model.norm.weight" in b.gradients
    )
    assert view.abs().max() == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_micro", [1, 4])
@pytest.mark.parametrize("freeze", [(), ("layers.0-1", "norms")])
def test_the_heads_gradient_in_its_place_equals_the_one_that_travels(
    tied: bool, num_micro: int, freeze: tuple[str, ...]
) -> None:
    config = CONFIG.model_copy(update={"tie_embeddings": tied})
    gradients_of = []
    for in_place in (True, False):
        engine = engine_for(config, freeze=freeze)
        assert engine.model.head_grad_buffer is not None
        if not in_place:
            engine.model.head_grad_buffer = None
        for _ in range(2):  # the second step finds the first one's gradients in the buffer
            seen = gradients(engine, make_step(uneven_batch(), num_micro))
        gradients_of.append(seen)
    assert gradients_of[0].keys() == gradients_of[1].keys()
    for name, gradient in gradients_of[0].items():
        torch.testing.assert_close(gradient, gradients_of[1][name], rtol=1e-6, atol=1e-8, msg=name)


def test_a_pass_that_was_never_back_propagated_leaves_the_heads_place_free() -> None:
    engine = engine_for()
    plain = engine_for()
    batch = uneven_batch()
    unused = engine.runner.objective.loss(
        engine.model.forward_batch(batch), batch, AT, engine.runner.exchange
    )
    assert unused.terms
    expected = gradients(engine, make_step(batch, 1))
    other = gradients(plain, make_step(batch, 1))
    assert all(torch.equal(expected[name], other[name]) for name in expected)


def test_a_model_that_holds_a_slice_of_a_parameter_saves_and_loads_it_as_a_box_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on the second of two ranks of a tensor axis: it holds the upper half of the rows of one projection, and copies of the norms."""
    split = "model.layers.0.self_attn.q_proj.weight"

    def split_model(model: Any, _spec: Any) -> base.LocalModel:
        boxes = {
            name: base.ParamBox.whole(spec) for name, spec in assembling.model_specs(model).items()
        }
        rows, columns = boxes[split].shape
        whole = replace(boxes[split].spec, shape=(2 * rows, columns))
        boxes[split] = base.ParamBox((rows, 0), (rows, columns), whole)
        return base.LocalModel(
            {
                name: replace(box, copies=2, copy=1) if "norm" in name else box
                for name, box in boxes.items()
            }
        )

    def whole_specs(model: Any, objective: Any) -> dict[str, ParamSpec]:
        specs = assembling.model_specs(model)
        rows, columns = specs[split].shape
        return specs | {split: replace(specs[split], shape=(2 * rows, columns))}

    plain = engine_for()
    monkeypatch.setattr(assembling, "split_model", split_model)
    monkeypatch.setattr(assembling, "whole_specs", whole_specs)
    engine, other = (
        assemble(EngineSpec(CONFIG, NextToken(), AdamW(lr=1e-2), chunk_tokens=16, seed=3))
        for _ in range(2)
    )
    assert engine.shapes[split] == (64, 32)
    whole = {spec.name: initial_value(spec, CONFIG, 1) for spec in param_specs(CONFIG)}
    whole[split] = torch.cat([torch.full((32, 32), 7.0), whole[split]])
    engine.fill(whole.items())
    step = make_step(uneven_batch(), 2)
    result = engine.forward_backward(step, AT)
    expected = plain.forward_backward(step, AT)
    assert torch.equal(result.loss, expected.loss)
    grads = {name: view for buffer in plain.buffers for name, view in buffer.gradients.items()}
    counted = (
        torch.stack(
            [grad.double().square().sum() for name, grad in grads.items() if "norm" not in name]
        )
        .sum()
        .sqrt()
    )
    assert float(engine.update(hypers(AdamW(lr=1e-2), engine.groups, 1, 10)).norm) == pytest.approx(
        float(counted), rel=1e-6
    )
    saved = {(name, role): (shape, boxes) for name, role, shape, boxes in engine.tensors()}
    for role in ("master", "exp_avg", "exp_avg_sq"):
        shape, [(offset, value)] = saved[split, role]
        assert (shape, offset, tuple(value.shape)) == ((64, 32), (32, 0), (32, 32))

    def read(name: str, role: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            assert not saved[name, role][1], "the rank that counts a copy saves it"
            return torch.zeros(shape)
        [(start, value)] = saved[name, role][1]
        assert (start, tuple(value.shape)) == (offset, shape)
        return value.clone()

    other.load(read, engine.scalars())
    assert isinstance(engine, FlatEngine)
    assert isinstance(other, FlatEngine)
    assert all(
        torch.equal(value, other.masters[name])
        for name, value in engine.masters.items()
        if "norm" not in name
    )


@pytest.mark.parametrize(
    "setup",
    [
        Setup(),
        Setup(memory={"recompute": 1}),
        Setup(memory={"offload": ["activations"]}),
        Setup(memory={"offload": ["optimizer"]}),
    ],
    ids=["plain", "recompute", "activations", "optimizer"],
)
def test_an_engine_that_is_not_used_any_more_leaves_memory(setup: Setup) -> None:
    # A sweep trains many models in one process; hooks of tensors are invisible to the collector of cycles.
    engine = make_engine(RankGroup(), setup)
    train_steps(engine, RankGroup(), setup.micro, 0, 2)
    known = weakref.ref(engine), weakref.ref(engine.model)
    del engine
    gc.collect()
    assert [reference() for reference in known] == [None, None]
