"""Settings of memory against time, and of narrow arithmetic."""

from typing import Any

from support.setting_runs import BASE, Row, built_run, loss_numbers, numbers_or_refusal


def eight_bit(overrides: tuple[str, ...]) -> Any:
    """The scales of a model's fp8 layers, as if this machine had such arithmetic."""
    import torch

    from headway.config.load import load
    from headway.parallel.assemble import assemble
    from headway.parallel.collectives import RankGroups
    from headway.runtime.device import Compute
    from headway.train.build import engine_spec
    from headway.train.config import Recipe

    recipe = load(Recipe, None, [*BASE, "model.ffn_size=32", "model.vocab_size=64", *overrides])
    compute = Compute(torch.device("cpu"), "cpu", torch.bfloat16, "fp8")
    return (
        assemble(engine_spec(recipe, recipe.model, compute, RankGroups()))
        .model.model.layers["0"]
        .mlp.up_proj.scaling
    )


ROWS: dict[str, Row] = {
    "optim[adamw].state_dtype": ((), "fp32", "8bit", loss_numbers),
    "fp8.scaling": ((), "tensorwise", "rowwise", eight_bit),
    "memory.offload": ((), [], ["optimizer"], built_run(lambda run: run.engine.host_state is None)),
    "memory.recompute": ((), "none", 0.5, built_run(lambda run: [block.forward.__qualname__ for block in run.engine.model.model.layers.values()])),
    "memory.limit_gib": ((), None, 1e-4, numbers_or_refusal),
}  # fmt: skip
