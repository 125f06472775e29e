"""The losses of mixtures of experts, added to any objective: a model's `Routing` comes in, additive
terms and metrics go out.

    aux      E * sum over experts of (share of tokens that chose it) * (mean of its score)     k when all experts have the same load
    z        the mean over tokens and mixtures of the router's squared log-partition

`aux_scope: row` takes the product for each row by itself; the loss is the mean over rows.
`aux_scope: step` takes it over all tokens of a step: the choices of all microbatches and ranks are
counted in a pass without gradients, and given those counts the loss is a sum over tokens. Either
way microbatches and ranks do not change it. `aux_layers: pooled` counts all mixtures together
before the product, as transformers does; `each` takes the mean over mixtures. Padding never counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.errors import ConfigError
from headway.tasks.base import (
    Collectives,
    FirstPass,
    Loss,
    MetricSums,
    StepInfo,
    Task,
    Term,
    first_passes_of,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.model.base import ModelOut
    from headway.model.config import ModelConfig
    from headway.model.experts_config import ExpertsConfig
    from headway.model.router import Routing

LOAD = "expert_load"
"""The metric with the number of tokens of each expert, [mixtures, E]; engines balance biases with
it."""
SHARE = "expert_share/"
"""Prefix of the metric with one expert's share of the tokens of its mixture."""
MAX_SHARES = 256
"""Shares of single experts are recorded while a model has at most this many experts in all
layers."""


def with_balance(objective: Task, model: ModelConfig) -> Task:
    """A task and the losses of the model's mixtures; the task itself where the model has
    none."""
    experts = balanced_experts(model)
    if experts is None:
        return objective
    # A first pass over other rows (KTO's) goes together with experts: its routing counts nowhere.
    # One over the trained rows would have to be the pass that counts them.
    if any(first_pass.rows is None for first_pass in first_passes_of(objective)):
        raise ConfigError(
            "the model has experts to balance, with an objective that couples all rows of a step "
            f"({type(objective).__name__})."
        )
    by_step = bool(experts.aux_loss) and experts.aux_scope == "step"
    if by_step:
        return StepBalanced(objective, experts)
    return Balanced(objective, experts)


def balanced_experts(model: ModelConfig) -> ExpertsConfig | None:
    """How the experts of a model are balanced; None: it has none, or they are not."""
    if model.hf_config is None:
        return model.experts
    # Of a class of transformers, what its config.json says.
    from headway.model.stock.facts import facts_of

    balance = facts_of(model).balance
    return None if balance is None else balance.experts


class Balanced:
    """Another task's terms, and those of the mixtures."""

    def __init__(self, inner: Task, experts: ExpertsConfig) -> None:
        self.inner = inner
        self.experts = experts
        self.scope: Literal["row", "step"] = inner.scope
        self.module: nn.Module | None = inner.module

    def first_passes(self) -> tuple[FirstPass, ...]:
        """Those of the objective. The choices of routers in them count nowhere."""
        return first_passes_of(self.inner)

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The terms of both."""
        plain = self.inner.loss(out, batch, at, collectives)
        routing = out.routing
        assert routing is not None, "a model with experts says what its routers did"
        mixtures, _, experts = routing.load.shape
        # every token chose per_token experts in each mixture, so the load also counts tokens: [B]
        tokens = routing.load.sum((0, 2)) / (mixtures * self.experts.per_token)
        terms = dict(plain.terms)
        metrics = dict(plain.metrics)
        if self.experts.aux_loss:
            terms["aux_loss"], metrics["aux_loss"] = self._aux(routing, tokens, at)

        num_decisions = tokens.sum() * mixtures  # of routers: one per token and mixture
        if self.experts.z_loss:
            terms["router_z"] = Term(
                routing.z.sum() / mixtures, per="tokens", coefficient=self.experts.z_loss
            )
        metrics["router_z"] = (routing.z.detach().sum(), num_decisions)
        metrics["router_entropy"] = (routing.entropy.sum(), num_decisions)
        # Read as a sum (`load_metrics`), never divided: the weight is there because metrics are
        # pairs.
        metrics[LOAD] = (routing.load.sum(1), routing.load.new_full((mixtures, experts), 1.0))
        return Loss(terms, metrics)

    def _aux(
        self, routing: Routing, tokens: Tensor, at: StepInfo
    ) -> tuple[Term, tuple[Tensor, Tensor]]:
        """The balancing loss of each row by itself: its term and its metric (sum, weight)."""
        values = balancing(routing.load, routing.probability, tokens, self.experts)
        # rows of padding alone do not count
        has_tokens = (tokens > 0).to(values.dtype)
        total = (values * has_tokens).sum()
        term = Term(total, per="rows", coefficient=self.experts.aux_loss)
        return term, (total.detach(), has_tokens.sum())


class StepBalanced(Balanced):
    """Balances the load of a whole step; a pass without gradients counts the choices first."""

    def first_passes(self) -> tuple[FirstPass, ...]:
        """Those of the task, and one over the rows that are trained on. A validation balances
        what it sees."""
        count = FirstPass(LOAD, self.read_load, in_evaluation=False)
        return (*super().first_passes(), count)

    def read_load(self, out: ModelOut, batch: Batch) -> Tensor:
        """[1, mixtures, E]: the tokens of each expert."""
        assert out.routing is not None
        return out.routing.load.sum(1)[None]

    def _aux(
        self, routing: Routing, tokens: Tensor, at: StepInfo
    ) -> tuple[Term, tuple[Tensor, Tensor]]:
        """This microbatch's tokens of the balancing loss of the step: linear in their scores, given
        the load of all."""
        load = routing.load.sum(1)
        if at.training and LOAD in at.seen:
            load = at.seen[LOAD].values.sum(0)
        step_tokens = load.sum() / (len(load) * self.experts.per_token)
        # a step is one row for the formula: [mixtures,1,E]
        probability = routing.probability.sum(1)[:, None]
        value = balancing(load[:, None], probability, step_tokens[None], self.experts)[0]
        term = Term(value, per="step", coefficient=self.experts.aux_loss)
        # The weights of all microbatches add up to 1, so the metric is the loss of the step.
        return term, (value.detach(), tokens.sum() / step_tokens.clamp(min=1))


def balancing(load: Tensor, probability: Tensor, tokens: Tensor, experts: ExpertsConfig) -> Tensor:
    """The balancing loss of each row, [B], from load and probability [mixtures,B,E], both sums over
    `tokens` [B].

    E * sum_e (load_e / tokens) * (probability_e / tokens), the mean over mixtures: Switch
    Transformer's equation 4 (arXiv:2101.03961) for any number of experts per token."""
    mixtures = len(load)
    if experts.aux_layers == "pooled":
        load = load.mean(0, keepdim=True)
        probability = probability.mean(0, keepdim=True)
        mixtures = 1
    count = tokens.clamp(min=1)
    return experts.num * (load * probability).sum((0, 2)) / (mixtures * count * count)


def load_metrics(sums: MetricSums) -> dict[str, float]:
    """What a record says of the load: of the fullest and the emptiest expert of any mixture,
    relative to the mean."""
    if LOAD not in sums:
        return {}
    load, _ = sums[LOAD]
    ratios = load_ratios(load.tolist())
    return {name: ratio for name, ratio in ratios.items() if not name.startswith(SHARE)}


def load_ratios(load: list[list[float]]) -> dict[str, float]:
    """Load relative to the mean, from numbers of tokens [mixtures][E]; a mixture that saw no token
    is left out."""
    ratios: list[list[float]] = []
    for row in load:
        mean = sum(row) / len(row)
        if mean:
            ratios.append([tokens / mean for tokens in row])
    if not ratios:
        return {}
    metrics = {
        "expert_load_max": max(map(max, ratios)),
        "expert_load_min": min(map(min, ratios)),
        # Experts have no capacity limit here; other systems log how many tokens theirs dropped.
        "dropped_tokens": 0.0,
    }
    if sum(map(len, ratios)) <= MAX_SHARES:
        for mixture, row in enumerate(ratios):
            for expert, ratio in enumerate(row):
                metrics[f"{SHARE}{mixture}.{expert}"] = ratio / len(row)
    return metrics
