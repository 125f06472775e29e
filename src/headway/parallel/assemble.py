"""The one place where a model is put together for a run: which parameters train, flat buffers under them, kernels in their seams.

Order: build on the meta device -> choose what trains and its groups -> engine allocates buffers and re-registers parameters as views
-> attention core -> compile the halves of every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from headway.kernels.attention import attend
from headway.model.config import ModelConfig
from headway.model.transformer import Block, Transformer
from headway.objective.base import Objective
from headway.optim.base import OptimConfig
from headway.optim.groups import OBJECTIVE, Group, make_groups, trainable
from headway.parallel.collectives import Alone
from headway.parallel.zero1 import FlatEngine, Settings


def assemble(
    config: ModelConfig,
    objective: Objective,
    optim: OptimConfig,
    settings: Settings,
    *,
    freeze: Sequence[str] = (),
    train: Sequence[str] = (),
    attention: str = "auto",
    compile_blocks: bool = False,
) -> FlatEngine:
    """Make the engine of one process, its parameters still zero."""
    with torch.device("meta"):
        model = Transformer(config)
    groups = group_parameters(model, objective, optim, freeze, train)
    engine = FlatEngine(model, objective, groups, optim.build(), settings, Alone())
    for block in model.model.layers.values():
        assert isinstance(block, Block)
        if attention != "auto":
            block.core = partial(attend, backend=attention)
        if compile_blocks:
            block.before = torch.compile(block.before, fullgraph=True, dynamic=False)
            block.after = torch.compile(block.after, fullgraph=True, dynamic=False)
    return engine


def group_parameters(
    model: Transformer, objective: Objective, optim: OptimConfig, freeze: Sequence[str], train: Sequence[str]
) -> list[Group]:
    """The groups of what trains: the model's parameters and the objective's own."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if objective.module is not None:
        shapes |= {OBJECTIVE + name: tuple(parameter.shape) for name, parameter in objective.module.named_parameters()}
    return make_groups(optim, shapes, trainable(shapes, freeze, train))
