"""Settings of mixtures of experts."""

from typing import Any

import torch

from headway.config.load import load
from headway.model.router import Router
from headway.train.config import Recipe
from support.setting_runs import (
    Row,
    built_run,
    data_folder,
    loss_numbers,
    parameter_shapes,
    trained_run,
)

MIXTURE = ("model.experts.num=4", "model.init_std=0.3")
DENSE = ("run.name=x", "model.hidden_size=16", "init.from=$/runs1/run")


def routed(overrides: tuple[str, ...]) -> Any:
    """The experts and weights that a router gives one token."""
    model = load(Recipe, None, list(overrides)).model
    experts, weights = Router(model).choose(torch.tensor([0.4, 0.02, 0.3, 0.28]))
    return experts.tolist(), weights.tolist()


def upcycled(overrides: tuple[str, ...]) -> Any:
    """The numbers of a run that starts from a dense one."""
    trained_run((f"run.dir={data_folder()}/runs1",))
    return loss_numbers(overrides)


ROWS: dict[str, Row] = {
    "model.experts.num": ((), 4, 6, built_run(parameter_shapes)),
    "model.experts.per_token": (MIXTURE, 2, 3, loss_numbers),
    "model.experts.ffn_size": (MIXTURE, None, 16, built_run(parameter_shapes)),
    "model.experts.shared_ffn_size": (MIXTURE, 0, 16, built_run(parameter_shapes)),
    "model.experts.normalize": (MIXTURE, True, False, loss_numbers),
    "model.experts.sum_offset": (MIXTURE, 0.0, 0.5, loss_numbers),
    "model.experts.router": (MIXTURE, "softmax", "sigmoid", loss_numbers),
    "model.experts.routed_scale": (MIXTURE, 1.0, 2.0, routed),
    "model.experts.num_groups": (MIXTURE, 1, 2, routed),
    "model.experts.groups_per_token": (("model.experts.num_groups=2", *MIXTURE), 1, 2, routed),
    "model.experts.group_score": (("model.experts.num_groups=2", *MIXTURE), "top2", "top1", routed),
    "model.experts.first_dense": (MIXTURE, 0, 1, built_run(parameter_shapes)),
    "model.experts.every": (MIXTURE, 1, 2, built_run(parameter_shapes)),
    "model.experts.aux_loss": (MIXTURE, 0.01, 0.0, loss_numbers),
    "model.experts.aux_scope": (MIXTURE, "row", "step", loss_numbers),
    "model.experts.aux_layers": (MIXTURE, "each", "pooled", loss_numbers),
    "model.experts.z_loss": (MIXTURE, 0.0, 0.01, loss_numbers),
    "model.experts.bias_rate": (MIXTURE, None, 0.1, loss_numbers),
    "model.experts.router_bias": (MIXTURE, False, True, built_run(parameter_shapes)),
    "model.experts.bias": (MIXTURE, False, True, built_run(parameter_shapes)),
    "model.experts.swiglu_limit": (MIXTURE, None, 7.0, loss_numbers),
    "model.experts.swiglu_alpha": (
        (*MIXTURE, "model.experts.swiglu_limit=7.0"),
        1.702,
        0.5,
        loss_numbers,
    ),
    "init.upcycle.experts": (DENSE, 4, 6, upcycled),
    "init.upcycle.per_token": (DENSE, 2, 1, upcycled),
    "init.upcycle.noise": (DENSE, 0.0, 0.5, upcycled),
    "init.upcycle.router_std": (DENSE, 0.02, 1.0, upcycled),
}
