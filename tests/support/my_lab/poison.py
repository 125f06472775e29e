"""Next-token loss that is multiplied in microbatches with a certain token: a batch that spoils training."""

from typing import Any, Literal

from headway.config.section import setting
from headway.tasks.base import Loss, TaskConfig, Term
from headway.tasks.next_token import Config as NextToken


class Config(TaskConfig):
    """Settings of the poisoned loss."""

    kind: str = setting("support.my_lab.poison", "This module.")
    token: int = setting(63, "What spoils a microbatch.")
    factor: float = setting(100.0, "By how much; 0 = not a number.")

    def build(self) -> Any:
        return Poisoned(self)


class Poisoned:
    scope: Literal["row", "step"] = "row"
    module = None

    def __init__(self, config: Config) -> None:
        self.config = config
        self.plain = NextToken().build()

    def loss(self, out: Any, batch: Any, at: Any, exchange: Any) -> Loss:
        loss = self.plain.loss(out, batch, at, exchange)
        if not at.training or not (batch.tokens == self.config.token).any():
            return loss
        factor = self.config.factor or float("nan")
        return Loss(
            {
                name: Term(term.sum * factor, term.per, term.coefficient)
                for name, term in loss.terms.items()
            },
            loss.metrics,
        )
