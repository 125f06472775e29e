"""Settings of ranks and of the loss scale."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from headway.train.config import Recipe
from support.setting_runs import BASE, Row, built_run, load, loss_numbers, trained_run

FP16 = ("precision=fp16",)
OVERFLOWS = (
    *FP16,
    "steps=4",
    "loss_scale.initial=1e30",
    "loss_scale.max=1e38",
    "loss_scale.hysteresis=1",
)


def scales(overrides: tuple[str, ...]) -> Any:
    return [r["loss_scale"] for r in trained_run(overrides).records]


def bucket_count(run: Any) -> Any:
    return len(run.engine.reducer.buckets)


def on_two_ranks(overrides: tuple[str, ...]) -> Any:
    """The layout and the hook the first of two ranks would have, or why it is refused."""
    from headway.errors import HeadwayError
    from headway.parallel.collectives import RankGroups
    from headway.parallel.engine import EngineSpec
    from headway.parallel.flat.engine import choose_hook

    recipe = load(Recipe, None, list(overrides))
    parallel = recipe.parallel
    try:
        mesh = parallel.mesh(0, 2)
        parallel.check(mesh, "float32")
        ranks = replace(RankGroups(), mesh=mesh)
        return mesh, type(
            choose_hook(
                EngineSpec(
                    recipe.model, recipe.objective, recipe.optim, parallel=parallel, ranks=ranks
                )
            )
        ).__name__
    except HeadwayError as error:
        return str(error)


def sharding(overrides: tuple[str, ...]) -> Any:
    """What `fully_shard` is called with for the blocks and for the root."""
    from headway.parallel import fsdp
    from headway.parallel.assemble import meta_model
    from headway.parallel.engine import EngineSpec

    recipe = load(Recipe, None, [*BASE, *overrides])
    spec = EngineSpec(recipe.model, recipe.objective, recipe.optim, parallel=recipe.parallel)
    with patch.object(fsdp, "fully_shard") as called, patch.object(fsdp, "_device_mesh"):
        fsdp.shard_model(meta_model(spec), spec)
    return [call.kwargs["reshard_after_forward"] for call in called.call_args_list]


def norm_box(overrides: tuple[str, ...]) -> Any:
    """Whether a tensor rank's gradient of a norm covers some tokens or all."""
    from headway.model.layout import param_specs
    from headway.parallel.collectives import RankGroup
    from headway.parallel.tensor import TensorPlan

    recipe = load(Recipe, None, [*BASE, "model.vocab_size=64", "parallel.tensor=2", *overrides])
    specs = {spec.name: spec for spec in param_specs(recipe.model)}
    return TensorPlan(RankGroup(0, 2), recipe.parallel.sequence, 1).box(specs["model.norm.weight"])


def program_of_two(overrides: tuple[str, ...]) -> Any:
    """What the first of two ranks of a pipeline does in a step."""
    from headway.parallel.pipeline.program import training_programs

    return training_programs(load(Recipe, None, list(overrides)).parallel.pipeline_shape, 4)[0]


def layers_of_two(overrides: tuple[str, ...]) -> Any:
    from headway.parallel.pipeline.stages import stage_layers

    recipe = load(Recipe, None, list(overrides))
    return stage_layers(recipe.parallel, recipe.model, 64)


POWERSGD = (
    "steps=4", "parallel.hook.kind=powersgd", "parallel.hook.rank=2", "parallel.hook.min_compression_rate=0", "parallel.hook.start_step=0",
)  # fmt: skip
ROWS: dict[str, Row] = {
    "loss_scale.initial": (FP16, 65536.0, 1024.0, scales),
    "loss_scale.min": (OVERFLOWS, 1.0, 9e29, scales),
    "loss_scale.max": ((*FP16, "loss_scale.growth_interval=1"), 2.0**24, 65536.0, scales),
    "loss_scale.growth_interval": (FP16, 1000, 1, scales),
    "loss_scale.growth_factor": ((*FP16, "loss_scale.growth_interval=1"), 2.0, 4.0, scales),
    "loss_scale.backoff_factor": (OVERFLOWS, 0.5, 0.25, scales),
    "loss_scale.hysteresis": (OVERFLOWS, 1, 2, scales),
    "parallel.strategy": (("parallel.hook.kind=all_reduce",), "zero1", "fsdp", on_two_ranks),
    "parallel.fsdp.size": (("parallel.strategy=fsdp",), "auto", 1, on_two_ranks),
    "parallel.fsdp.reshard_after_forward": ((), True, False, sharding),
    "parallel.zero1.size": ((), "auto", 1, on_two_ranks),
    "parallel.bucket_bytes": ((), 1 << 20, 4096, built_run(bucket_count)),
    "parallel.accumulate_dtype": (("precision=bf16",), "fp32", "compute", loss_numbers),
    "parallel.reduce_dtype": ((), "fp32", "bf16", on_two_ranks),
    "parallel.overlap.reduce": ((), True, False, built_run(lambda run: run.engine.reducer.overlap)),
    "parallel.overlap.gather": ((), True, False, built_run(lambda run: run.engine.overlap.gather)),
    "parallel.overlap.step": ((), True, False, built_run(lambda run: run.engine.overlap.step)),
    "parallel.hook[all_reduce].kind": ((), "all_reduce", "reduce_scatter", on_two_ranks),
    "parallel.hook[reduce_scatter].kind": (("parallel.zero1.size=1",), "reduce_scatter", "all_reduce", on_two_ranks),
    "parallel.hook[compress].kind": ((), "compress", "all_reduce", on_two_ranks),
    "parallel.hook[compress].dtype": (("parallel.hook.kind=compress",), "bf16", "fp16", loss_numbers),
    "parallel.hook[powersgd].kind": ((), "powersgd", "all_reduce", on_two_ranks),
    "parallel.hook[powersgd].rank": (POWERSGD, 2, 1, loss_numbers),
    "parallel.hook[powersgd].start_step": (POWERSGD, 0, 2, loss_numbers),
    "parallel.hook[powersgd].error_feedback": (POWERSGD, True, False, loss_numbers),
    "parallel.hook[powersgd].q": (POWERSGD, "warm", "fixed", loss_numbers),
    "parallel.hook[powersgd].min_compression_rate": (POWERSGD, 0.0, 100.0, loss_numbers),
    "parallel.hook[powersgd].max_dim": (POWERSGD, 1000, 8, loss_numbers),
    "parallel.hook[torch_style].kind": ((), "torch_style", "all_reduce", on_two_ranks),
    "parallel.hook[torch_style].function": (("parallel.hook.kind=torch_style",), "operator:add", "operator:nothing", on_two_ranks),
    "parallel.hook[torch_style].state": (("parallel.hook.kind=torch_style",), None, "operator:nothing", on_two_ranks),
    "parallel.hook[torch_style].options": (("parallel.hook.kind=torch_style", "parallel.hook.state=builtins:dict"), "{a: 1}", "{a: 2}", built_run(lambda run: run.engine.reducer.hook.state)),
    "parallel.context": ((), 1, 2, on_two_ranks),
    "parallel.tensor": ((), 1, 2, on_two_ranks),
    "parallel.expert": ((), 1, 2, on_two_ranks),
    "parallel.sequence": ((), True, False, norm_box),
    "parallel.pipeline": ((), 1, 2, on_two_ranks),
    "parallel.schedule": (("parallel.pipeline=2",), "1f1b", "zero_bubble", program_of_two),
    "parallel.virtual_stages": (("parallel.pipeline=2", "parallel.schedule=interleaved"), 2, 3, program_of_two),
    "parallel.pipeline_split": (("parallel.pipeline=2", "model.num_layers=4"), "[2, 2]", "[3, 1]", layers_of_two),
    "parallel.timeout_seconds": ((), 1800.0, 1.0, lambda o: load(Recipe, None, list(o)).parallel.timeout_seconds),
}  # fmt: skip
