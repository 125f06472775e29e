"""What sparsify asks of a task before training."""

import pytest

from headway.errors import ConfigError
from headway.tasks.base import GateSpec, TaskConfig, TaskNeeds
from headway.tasks.head_sparsity import Config as HeadSparsity
from headway.train.config import Recipe
from headway.workflows.sparsify import SparsifyPlan, check


class Gates(TaskConfig):
    """A task of somebody else that trains head gates and aims at no share of them."""

    kind: str = "my_lab.gates"

    @property
    def needs(self) -> TaskNeeds:
        return TaskNeeds(gates=GateSpec())


def test_a_task_says_at_which_sparsity_it_aims() -> None:
    gates = HeadSparsity(target=0.4).needs.gates
    assert gates is not None
    assert gates.target == 0.4


def test_a_task_without_a_target_needs_sparsities() -> None:
    recipe = Recipe().model_copy(update={"objective": Gates()})
    with pytest.raises(ConfigError, match=r"my_lab\.gates has no target sparsity\. Give --spars"):
        check(recipe, SparsifyPlan())
    # With them, the next question is another one: the recipe names no tokenizer.
    with pytest.raises(ConfigError, match="the recipe has no tokenizer"):
        check(recipe, SparsifyPlan(sparsities=(0.5,), lengths=(64,)))
