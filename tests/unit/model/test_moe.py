"""Mixtures of experts: equal to experts computed one by one, balanced by losses that no layout changes, and compiled once."""

import importlib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.batches import make_batch
from support.engines import CONFIG, Setup, make_engine, share_of_step
from support.initial_weights import initialize

from headway.kernels.grouped import grouped_inputs, grouped_linear, grouped_weights
from headway.model.config import ModelConfig
from headway.model.expert_products import dispatch
from headway.model.flops import token_flops
from headway.model.layout import active_parameters, num_parameters, param_specs
from headway.model.moe import MixtureOfExperts
from headway.model.router import counted_tokens
from headway.model.transformer import Transformer
from headway.optim.base import Guard
from headway.optim.groups import hypers
from headway.parallel.collectives import RankGroup
from headway.tasks.balance import LOAD, load_ratios
from headway.tasks.base import StepInfo

EXPERTS = {"num": 5, "per_token": 2, "ffn_size": 24}
MIXTURE = CONFIG.with_(dropout=0.0, init_std=0.3, experts=EXPERTS)


def mixture(**changes: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    mixture_of_experts = MixtureOfExperts(MIXTURE.with_(experts={**EXPERTS, **changes}))
    for parameter in mixture_of_experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return mixture_of_experts


def one_by_one(of: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Every token through every expert, weighted by 0 where it is not chosen."""
    logits = F.linear(x, of.gate.weight)
    if of.config.router == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = logits.sigmoid()
    # The bias decides which experts are chosen, not their weights.
    ranks = scores
    if of.gate.e_score_correction_bias is not None:
        ranks = scores + of.gate.e_score_correction_bias
    chosen = ranks.topk(of.config.per_token).indices
    weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    if of.config.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    gates = torch.einsum("btd,efd->btef", x, of.experts.gate_proj.weight)
    ups = torch.einsum("btd,efd->btef", x, of.experts.up_proj.weight)
    inner = F.silu(gates) * ups
    out = torch.einsum("btef,edf,bte->btd", inner, of.experts.down_proj.weight, weights)
    if of.shared_experts is not None:
        out = out + of.shared_experts(x)
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalize": False},
        {"router": "sigmoid", "bias_rate": 0.1},
        {"shared_ffn_size": 8, "per_token": 1},
        {"per_token": 5},
    ],
)
def test_a_mixture_equals_experts_computed_one_by_one(changes: dict[str, Any]) -> None:
    of = mixture(**changes)
    x = torch.randn(2, 7, 32, requires_grad=True)
    output = of(x)
    expected = one_by_one(of, x)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)
    upstream = torch.randn_like(output)
    inputs = [x, *(parameter for parameter in of.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(output, inputs, upstream)
    expected_gradients = torch.autograd.grad(expected, inputs, upstream)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-4, rtol=1e-3)


def test_grouped_products_leave_out_experts_without_tokens() -> None:
    x = torch.randn(6, 4)
    dy = torch.randn(6, 3)
    weight = torch.randn(3, 3, 4)
    ends = torch.tensor([0, 6, 6], dtype=torch.int32)
    torch.testing.assert_close(grouped_linear(x, weight, ends), x @ weight[1].T)
    torch.testing.assert_close(grouped_inputs(dy, weight, ends), dy @ weight[1])
    gradient = grouped_weights(dy, x, ends, weight)
    torch.testing.assert_close(gradient[1], dy.T @ x)
    assert not gradient[0].any()
    assert not gradient[2].any()


def test_dispatch_sorts_slots_by_expert_and_keeps_their_order() -> None:
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1]])
    plan = dispatch(chosen, torch.tensor([2.0, 2.0, 2.0]))
    assert plan.order.tolist() == [1, 2, 3, 5, 0, 4]
    assert plan.ends.tolist() == [2, 4, 6]
    assert torch.equal(plan.order[plan.places], torch.arange(6))


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.drill)]
)
def test_compiled_halves_equal_eager_ones_and_never_compile_again_for_other_tokens(
    backend: str,
) -> None:
    of = mixture(z_loss=0.1)
    compiled = torch.compile(of.route, fullgraph=True, dynamic=False, backend=backend)
    counted = torch.ones(2, 7)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 7, 32, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            got, routing = compiled(x, counted)
        right, plain = of.route(x, counted)
        torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-4)
        assert routing is not None
        assert plain is not None
        torch.testing.assert_close(routing.load, plain.load)
        wanted = [x, *of.parameters()]
        for a, b in zip(
            torch.autograd.grad(got.sum(), wanted),
            torch.autograd.grad(right.sum(), wanted),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("scope", ["row", "step"])
@pytest.mark.parametrize("layers", ["each", "pooled"])
def test_microbatches_do_not_change_the_losses_of_a_step(scope: str, layers: str) -> None:
    config = MIXTURE.with_(
        experts={
            **EXPERTS,
            "aux_loss": 0.3,
            "z_loss": 0.1,
            "aux_scope": scope,
            "aux_layers": layers,
        }
    )
    losses = []
    for micro in (1, 4, 8):
        engine = make_engine(RankGroup(), Setup(micro=micro, config=config, freeze=()))
        result = engine.forward_backward(share_of_step(0, micro, 0, 1), StepInfo(0, 2))
        norm = engine.update(hypers(engine.spec.optim, engine.groups, 0, 2)).norm
        load = result.metrics[LOAD][0]
        (aux, weight) = result.metrics["aux_loss"]
        losses.append(
            [float(result.loss), float(norm), float(aux / weight), *load.flatten().tolist()]
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_padding_counts_nowhere() -> None:
    batch = make_batch([[3, 2], [5, 3]], seq_len=8, vocab=64)
    batch = replace(batch, tokens=batch.tokens * torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8]))
    assert counted_tokens(batch).tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8]
    # zeros with a loss are tokens: id 0 may be a word
    zeros = replace(
        batch,
        tokens=torch.zeros_like(batch.tokens),
        loss_weight=torch.tensor([[0.0] * 7 + [1.0], [0.0] * 8]),
    )
    assert counted_tokens(zeros).tolist() == [[1] * 8, [1, 1, 1, 1, 1, 0, 0, 0]]


def test_the_bias_moves_against_the_load_and_not_in_a_skipped_step() -> None:
    of = mixture(bias_rate=0.5)
    bias = of.gate.e_score_correction_bias
    assert bias is not None
    assert not bias.requires_grad
    bias.zero_()
    of.balance(torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0]), torch.tensor(0.0))
    assert not bias.any()
    of.balance(torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0]), torch.tensor(1.0))
    assert bias.tolist() == [0.5, 0.0, -0.5, -0.5, 0.5]
    bias.zero_()
    # a whole step also near the mean of 2.2
    of.balance(torch.tensor([2.0, 2.0, 2.0, 2.0, 3.0]), torch.tensor(1.0))
    assert bias.tolist() == [0.5, 0.5, 0.5, 0.5, -0.5]


def test_a_skipped_step_of_an_engine_leaves_the_bias_where_it_was() -> None:
    config = MIXTURE.with_(experts={**EXPERTS, "bias_rate": 0.5})
    engine = make_engine(RankGroup(), Setup(micro=2, config=config, freeze=()))
    biases = [
        value
        for name, value in engine.model.named_parameters()
        if name.endswith("e_score_correction_bias")
    ]
    assert len(biases) == config.num_layers
    for bias in biases:
        bias.zero_()
    for skip in (1.0, 0.0):
        load = engine.forward_backward(share_of_step(0, 2, 0, 1), StepInfo(0, 2)).metrics[LOAD][0]
        engine.update(hypers(engine.spec.optim, engine.groups, 0, 2), torch.tensor(skip))
        for bias, tokens in zip(biases, load.tolist(), strict=True):
            if skip:
                assert not bias.any()
                continue
            # Experts below the mean load become more likely.
            load_of_experts = torch.tensor(tokens)
            moved = 0.5 * (load_of_experts.mean() - load_of_experts).sign()
            assert bias.tolist() == moved.tolist()
    assert any(bias.any() for bias in biases)


def test_experts_outside_of_the_best_groups_are_never_chosen() -> None:
    groups = {
        "num": 6,
        "per_token": 2,
        "num_groups": 3,
        "groups_per_token": 1,
        "router": "sigmoid",
        "bias_rate": 0.0,
        "normalize": False,
    }
    router = mixture(**groups).gate
    bias = router.e_score_correction_bias
    assert bias is not None
    bias.fill_(-1.0)  # every biased score is below zero, so a zero would win
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.3, 0.2]])
    for kind, expected in (("top2", [2, 3]), ("top1", [0, 1])):
        # sums of pairs: 1.0, 1.1, 0.5; best of each: 0.9, 0.6, 0.3
        router.config = router.config.model_copy(update={"group_score": kind})
        chosen, weights = router.choose(scores)
        assert chosen.tolist() == [expected]
        assert weights.tolist() == [
            pytest.approx([float(scores[0, expert]) for expert in expected])
        ]
    other_config = router.config.model_copy(
        update={"groups_per_token": 2, "group_score": "top1", "per_token": 3}
    )
    router.config = other_config
    assert router.choose(scores)[0].tolist() == [[0, 2, 3]]


def test_load_is_reported_relative_to_the_mean() -> None:
    ratios = load_ratios([[1.0, 3.0], [2.0, 2.0]])
    assert ratios == {
        "expert_load_max": 1.5, "expert_load_min": 0.5, "dropped_tokens": 0.0, "expert_share/0.0": 0.25, "expert_share/0.1": 0.75,
        "expert_share/1.0": 0.5, "expert_share/1.1": 0.5,
    }  # fmt: skip
    assert len(load_ratios([[1.0] * 257])) == 3
    assert load_ratios([[0.0, 0.0]]) == {}


def test_arithmetic_counts_active_parameters_and_memory_all() -> None:
    config = MIXTURE.with_(
        experts={**EXPERTS, "first_dense": 1, "shared_ffn_size": 16, "bias_rate": 0.0},
        tie_embeddings=False,
    )
    with torch.device("meta"):
        model = Transformer(config)
    assert {spec.name: spec.shape for spec in param_specs(config)} == {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }
    experts = sum(spec.size for spec in param_specs(config) if ".experts." in spec.name)
    assert experts == 3 * 5 * 24 * 32
    assert num_parameters(config) - active_parameters(config) == experts * 3 // 5
    dense = config.with_(
        experts={
            **EXPERTS,
            "per_token": 5,
            "first_dense": 1,
            "shared_ffn_size": 16,
            "bias_rate": 0.0,
        }
    )
    assert token_flops(dense, 8).matrices - token_flops(config, 8).matrices == pytest.approx(
        6 * experts * 3 / 5
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"experts": {"num": 4, "per_token": 5}}, "per_token is 5"),
        ({"experts": {"num": 4, "first_dense": 2}, "num_layers": 2}, "none of the num_layers=2"),
        ({"experts": {"num": 4}, "ffn_bias": True}, "the biases of experts are experts.bias"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelConfig(**changes)


@pytest.mark.parametrize("kind", ["muon", "adafactor", "lion", "schedule_free"])
def test_every_optimizer_trains_stacked_experts(kind: str) -> None:
    optim = importlib.import_module(f"headway.optim.{kind}").Config(lr=1e-2)
    engine = make_engine(RankGroup(), Setup(micro=2, config=MIXTURE, freeze=(), optim=optim))
    losses = []
    for step in range(4):
        losses.append(
            float(engine.forward_backward(share_of_step(0, 2, 0, 1), StepInfo(step, 4)).loss)
        )
        engine.update(hypers(optim, engine.groups, step, 4))
    assert losses[-1] < losses[0]


def test_muon_orthogonalizes_each_expert_by_itself() -> None:
    optim = importlib.import_module("headway.optim.muon").Config(
        lr=1.0, momentum=0.0, weight_decay=0.0, nesterov=False
    )
    gradient = torch.randn(3, 8, 6)
    guard = Guard(torch.ones(()), torch.zeros(()))
    hyper = optim.hyper(1, 2)

    def stepped(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        params = [torch.zeros_like(part) for part in parts]
        state = {"momentum": [torch.zeros_like(part) for part in parts]}
        optim.build().update(params, parts, state, [torch.zeros(()) for _ in parts], hyper, guard)
        return params

    stacked = stepped([gradient])[0]
    single = stepped([expert.clone() for expert in gradient])
    torch.testing.assert_close(stacked, torch.stack(single))
    assert stacked.abs().max() > 0


@pytest.mark.parametrize(
    "changes", [{}, {"router": "sigmoid", "bias_rate": 0.1, "normalize": False}]
)
def test_given_experts_are_taken_with_the_weights_that_the_router_gives_them(
    changes: dict[str, Any],
) -> None:
    of = mixture(**changes)
    x = torch.randn(2, 7, 32, requires_grad=True)
    counted = torch.ones(2, 7)
    _, own = of.chosen(x)
    # Other experts for some tokens; the router chooses for those of -1.
    given = ((own + 1) % 5).to(torch.int16)
    given[0, :3] = -1
    taken = torch.where(given >= 0, given.long(), own)
    out, routing = of.route(x, counted, given)
    assert routing.load.tolist() == [
        torch.bincount(row.flatten(), minlength=5).tolist() for row in taken
    ]

    logits = F.linear(x, of.gate.weight)
    scores = logits.softmax(-1) if of.config.router == "softmax" else logits.sigmoid()
    weights = scores.gather(-1, taken)
    if of.config.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    inner = F.silu(torch.einsum("btd,efd->btef", x, of.experts.gate_proj.weight))
    inner = inner * torch.einsum("btd,efd->btef", x, of.experts.up_proj.weight)
    every = torch.einsum("btef,edf->bted", inner, of.experts.down_proj.weight)
    chosen = every.gather(2, taken[..., None].expand(-1, -1, -1, 32))
    expected = (chosen * weights[..., None]).sum(2)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    inputs = [x, of.gate.weight, of.experts.up_proj.weight]
    upstream = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        atol=1e-4,
        rtol=1e-3,
    )


def test_halves_that_replay_or_report_experts_are_one_graph() -> None:
    model = Transformer(MIXTURE)
    initialize(model, 1)
    block = model.blocks()["model.layers.0"]
    x = torch.randn(1, 7, 32)
    o = torch.randn(1, 7, MIXTURE.num_heads, MIXTURE.head_size)
    compiler = partial(torch.compile, fullgraph=True, backend="aot_eager")
    out, chosen = compiler(block.post_attention_chosen)(x, o)
    torch.testing.assert_close(out, block.post_attention(x, o))
    replayed = compiler(block.post_attention)(x, o, torch.ones(1, 7), chosen.to(torch.int16))
    assert not isinstance(replayed, torch.Tensor)
    got, routing = replayed
    torch.testing.assert_close(got, out)
    assert routing.load.sum() == 14
