"""Settings of adapters."""

from typing import Any

from support.observe import Row, engine, numbers, observed, shapes

LORA = ("adapter.rank=4", "steps=4")


def chosen(overrides: tuple[str, ...]) -> Any:
    """The loss of a run whose overrides name the folders of an earlier one."""
    base = observed(("run.dir=$/adapter-base",)).folder
    first = observed((*LORA, "run.dir=$/adapter-first", f"init.from={base}")).folder
    places = {
        "BASE": base,
        "ADAPTER": first / "final" / "adapter",
        "CHECKPOINT": first / "checkpoints" / "latest",
    }
    texts = list(overrides)
    for name, path in places.items():
        texts = [text.replace(name, str(path)) for text in texts]
    return numbers(tuple(texts))


ROWS: dict[str, Row] = {
    "init.adapter": (("run.name=y", "init.from=BASE"), None, "ADAPTER", chosen),
    "init.merge": (("run.name=y", *LORA, "init.from=CHECKPOINT"), False, True, chosen),
    "adapter.kind": (("adapter.rank=4",), "lora", "dora", engine(shapes)),
    "adapter.rank": ((), 4, 8, engine(shapes)),
    "adapter.alpha": (LORA, 32.0, 1.0, numbers),
    "adapter.rslora": (LORA, False, True, numbers),
    "adapter.dropout": (LORA, 0.0, 0.5, numbers),
    "adapter.base": (LORA, None, "nf4", engine(shapes)),
    "adapter.targets": (LORA, ["all"], ["q_proj"], engine(shapes)),
}
