"""An objective with parameters of its own: one that takes part, one that never does, one that takes turns."""

from types import SimpleNamespace
from typing import Any, Literal

import torch

from headway.tasks.base import Loss, TaskNeeds, Term
from headway.tasks.next_token import Config as NextToken


class Spare:
    """Next-token loss times a trained scale; `spare` is never used, `turns` from the step `since` on."""

    scope: Literal["row", "step"] = "row"

    def __init__(self, since: int) -> None:
        self.plain = NextToken().build()
        self.since = since
        self.module = torch.nn.Module()
        for name, value in (("scale", 1.5), ("spare", 2.0), ("turns", 3.0)):
            setattr(self.module, name, torch.nn.Parameter(torch.tensor([value])))

    def loss(self, out: Any, batch: Any, at: Any, exchange: Any) -> Loss:
        loss = self.plain.loss(out, batch, at, exchange)
        total = loss.terms["next_token"].sum
        if at.step >= self.since:
            total = total * self.module.turns.sum() / 3
        return Loss({"next_token": Term(total * self.module.scale.sum())}, loss.metrics)


def spare(since: int = 10**9) -> Any:
    """What `Setup.objective` takes."""
    return SimpleNamespace(build=lambda: Spare(since), rules=(), needs=TaskNeeds())
