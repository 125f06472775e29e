"""Settings of adapters."""

from typing import Any

from support.setting_runs import Row, built_run, loss_numbers, parameter_shapes, trained_run

LORA = ("adapter.rank=4", "steps=4")


def chosen(overrides: tuple[str, ...]) -> Any:
    """The loss of a run whose overrides name the folders of an earlier one."""
    base = trained_run(("run.dir=$/adapter-base",)).folder
    first = trained_run((*LORA, "run.dir=$/adapter-first", f"init.from={base}")).folder
    places = {
        "BASE": base,
        "ADAPTER": first / "final" / "adapter",
        "CHECKPOINT": first / "checkpoints" / "latest",
    }
    texts = list(overrides)
    for name, path in places.items():
        texts = [text.replace(name, str(path)) for text in texts]
    return loss_numbers(tuple(texts))


ROWS: dict[str, Row] = {
    "init.adapter": (("run.name=y", "init.from=BASE"), None, "ADAPTER", chosen),
    "init.merge": (("run.name=y", *LORA, "init.from=CHECKPOINT"), False, True, chosen),
    "adapter.kind": (("adapter.rank=4",), "lora", "dora", built_run(parameter_shapes)),
    "adapter.rank": ((), 4, 8, built_run(parameter_shapes)),
    "adapter.alpha": (LORA, 32.0, 1.0, loss_numbers),
    "adapter.rslora": (LORA, False, True, loss_numbers),
    "adapter.dropout": (LORA, 0.0, 0.5, loss_numbers),
    "adapter.base": (LORA, None, "nf4", built_run(parameter_shapes)),
    "adapter.targets": (LORA, ["all"], ["q_proj"], built_run(parameter_shapes)),
}
