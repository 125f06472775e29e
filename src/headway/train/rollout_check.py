"""What of a recipe does not fit rollouts. A recipe comes in; a ConfigError names the setting and the
remedy, before anything is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.model.exact_config import why_not_exact
from headway.rollout.config import RolloutConfig
from headway.tasks.grpo import Config as PolicyConfig

if TYPE_CHECKING:
    from headway.model.config import ModelConfig
    from headway.train.config import Recipe


def check_rollouts(recipe: Recipe) -> None:
    """Refuse settings of rollouts that cannot work together, before anything is read."""
    objective = recipe.objective
    if not objective.needs.rollouts:
        for name, is_set in (("reward", bool(recipe.reward)), ("rollout", _states_rollout(recipe))):
            if is_set:
                raise ConfigError(
                    f"{name} is set, but objective {objective.kind} samples no answers. "
                    "Use objective.kind=grpo, or remove it."
                )
        return

    assert isinstance(objective, PolicyConfig)
    rollout = recipe.rollout
    if not recipe.reward and objective.teacher is None:
        raise ConfigError(
            "reward is empty, so nothing says which answers are good. "
            "Name at least one, e.g. reward=math (docs/rl.md)."
        )
    if rollout.samples == 1 and objective.teacher is None:
        raise ConfigError(
            "rollout.samples is 1; an answer is compared with others to the same prompt. "
            "Use at least 2."
        )
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
    keeps_base = recipe.adapter is not None and objective.reference is None
    if objective.beta and keeps_base and (recipe.train or recipe.init.merge):
        raise ConfigError(
            "objective.beta compares with the base under the adapter, and `train` or init.merge "
            "changes the base. Name objective.reference."
        )


def _check_exact(recipe: Recipe) -> None:
    """Refuse what has no form in which sampler and trainer compute the same bits."""
    parallel = recipe.parallel
    adapter = recipe.adapter
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
    for reason, stands in unfit.items():
        if stands:
            raise ConfigError(
                f"rollout.exact is true and {reason}; sampler and trainer would not compute the "
                "same bits. Change it, or set exact to false (docs/rl.md)."
            )


def check_exact_model(recipe: Recipe, model: ModelConfig) -> None:
    """Refuse a model that has no such form."""
    if not (recipe.objective.needs.rollouts and recipe.rollout.exact):
        return
    reason = why_not_exact(model, recipe.data.seq_len)
    if reason:
        raise ConfigError(
            f"rollout.exact is true and the model has {reason}; sampler and trainer would not "
            "compute the same bits. Set exact to false (docs/rl.md)."
        )


def _states_rollout(recipe: Recipe) -> bool:
    # By value: the recipe in a run folder states every section.
    return recipe.rollout != RolloutConfig()


def scores_rollouts(recipe: Recipe) -> bool:
    """Whether a divergence from the reference is part of the reward: answers are then scored once,
    when they were sampled."""
    objective = recipe.objective
    return (
        isinstance(objective, PolicyConfig) and objective.beta > 0 and objective.kl_in == "reward"
    )
