"""What does not fit rollouts in a recipe that has some. A recipe comes in; a ConfigError names the
setting and the remedy, before anything is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.model.exact_config import why_not_exact
from headway.records.base import record_kind
from headway.tasks.answers import check_answers

if TYPE_CHECKING:
    from headway.model.config import ModelConfig
    from headway.tasks.base import TaskConfig
    from headway.train.config import Recipe


def check_rollouts(recipe: Recipe) -> None:
    """Refuse settings of rollouts that cannot work together, before anything is read."""
    objective = recipe.objective
    rollout = recipe.rollout
    _check_task(objective)
    if not recipe.reward and objective.needs_rewards:
        raise ConfigError(
            "reward is empty, so nothing says which answers are good. "
            "Name at least one, e.g. reward=math (docs/rl.md)."
        )
    if rollout.samples < objective.fewest_samples:
        raise ConfigError(
            f"rollout.samples is {rollout.samples}; an answer is compared with others to the same "
            f"prompt. Use at least {objective.fewest_samples}."
        )
    # Rates an example, so it comes after the number of samples was checked. It finds what a plug-in
    # lacks before hours of sampling.
    check_answers(objective, rollout.samples)
    if recipe.data.train is None:
        raise ConfigError("data.train is null; rollouts need prompts. Set data.train.")
    if recipe.data.seq_len <= rollout.max_new_tokens:
        raise ConfigError(
            f"data.seq_len is {recipe.data.seq_len}; a row must hold a prompt and an answer of "
            f"rollout.max_new_tokens={rollout.max_new_tokens}. Raise data.seq_len."
        )
    for key in ("tokens", "rows", "accumulate"):
        if getattr(recipe.batch, key) is not None:
            raise ConfigError(
                f"batch.{key} is set; with rollouts the answers decide how many rows a step has. "
                "Set rollout.prompts and rollout.samples, and batch.micro_rows for the rows of a "
                "microbatch."
            )
    if recipe.batch.micro_rows == "auto" or recipe.batch.rampup is not None:
        raise ConfigError(
            "batch.micro_rows=auto and batch.rampup are not for rollouts. Give a number of rows."
        )
    if rollout.refill and recipe.steps is None:
        raise ConfigError(
            "rollout.refill is set and the run has no steps; how many prompts it reads depends on "
            "rewards, so epochs cannot be counted. Set steps."
        )
    # A rollback leaves out one batch of the data. Here a batch is a rollout, whose other updates
    # would be left out with the bad one.
    if recipe.heal.rolls_back and rollout.num_updates > 1:
        raise ConfigError(
            "heal rolls back, and a rollout has several updates (rollout.updates, passes): a bad "
            "step cannot be skipped alone. Use skip or alert."
        )
    if recipe.optim.AVERAGES_WEIGHTS:
        raise ConfigError(
            f"optim.kind is {recipe.optim.kind}, which trains other weights than it gives out; "
            "answers would be sampled from weights that are not trained. Use adamw."
        )
    if rollout.exact:
        _check_exact(recipe)
    frozen = objective.needs.frozen
    changes_base = recipe.adapter is not None and bool(recipe.train or recipe.init.merge)
    # Without a path the frozen model is what lies under the adapter.
    if frozen is not None and frozen.path is None and changes_base:
        raise ConfigError(
            "the objective compares with the base under the adapter, and `train` or init.merge "
            f"changes the base. Name {frozen.setting}."
        )


def _check_task(objective: TaskConfig) -> None:
    """Refuse a task whose answers about rollouts do not fit together."""
    kinds = [record_kind(name) for name in objective.reads]
    if any(kind.has_tokens for kind in kinds):
        raise ConfigError(
            f"objective {objective.kind} learns from rollouts, which answer prompts, and reads "
            f'records of kind {", ".join(objective.reads)}. Let its `reads` return ("prompt",).'
        )
    frozen = objective.needs.frozen
    if objective.reward_divergence and (frozen is None or frozen.token_column is None):
        raise ConfigError(
            f"objective {objective.kind} has a reward_divergence and no frozen model that scores "
            "tokens. Let needs.frozen be a ReferenceSpec with token_column."
        )


def _check_exact(recipe: Recipe) -> None:
    """Refuse what has no form in which sampler and trainer compute the same bits."""
    parallel = recipe.parallel
    adapter = recipe.adapter
    # Reason -> whether it holds. Each lets the trainer compute a token with another kernel, in
    # another order or with other weights than the sampler.
    unfit = {
        f"rollout.ahead is {recipe.rollout.ahead}: answers are of older weights": (
            recipe.rollout.ahead > 0
        ),
        "adapter.base is quantised": adapter is not None and adapter.base is not None,
        "adapter.dropout is above 0": adapter is not None and adapter.dropout > 0,
        "adapter is set: the sampler has it merged in fp32, and precision is bf16": (
            adapter is not None and recipe.precision == "bf16"
        ),
        f"parallel.tensor is {parallel.tensor}": parallel.tensor > 1,
        f"parallel.pipeline is {parallel.pipeline}": parallel.pipeline > 1,
        f"parallel.context is {parallel.context}": parallel.context > 1,
        f"kernels.attention is {recipe.kernels.attention}": recipe.kernels.attention != "auto",
        "kernels.compile is true": recipe.kernels.compile is True,
        f"precision is {recipe.precision}": recipe.precision in ("fp16", "fp8"),
        f"device is {recipe.device}": recipe.device in ("cuda", "mps"),
    }
    for reason, holds in unfit.items():
        if holds:
            raise ConfigError(
                f"rollout.exact is true and {reason}; sampler and trainer would not compute the "
                "same bits. Change it, or set exact to false (docs/rl.md)."
            )


def check_exact_model(recipe: Recipe, model: ModelConfig) -> None:
    """Refuse a model that has no such form."""
    if not recipe.rollout.exact:
        return
    reason = why_not_exact(model, recipe.data.seq_len)
    if reason:
        raise ConfigError(
            f"rollout.exact is true and the model has {reason}; sampler and trainer would not "
            "compute the same bits. Set exact to false (docs/rl.md)."
        )
