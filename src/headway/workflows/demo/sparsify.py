"""The demo's long-context stage: which heads need the whole past is trained, and what a smaller cache saves and costs is measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.eval.perplexity import Piece

SPARSITY = 0.5
WINDOW, SINKS = 32, 4
STEPS = 60
DOCUMENTS = 12
RECIPE = """\
run: {{name: sparse, dir: {out}/runs}}
init: {{from: {model}}}
data: {{train: [{store}], valid: {{fraction: {fraction}}}, seq_len: 256, cache_dir: {out}/cache}}
objective: {{kind: head_sparsity, target: {sparsity}, window: {window}, sinks: {sinks}, mask_lr: 1.0, reg_lr: 1.0}}
freeze: [weights]
batch: {{tokens: 2048, micro_rows: 8}}
optim: {{schedule: {{kind: cosine, warmup: 0.1, floor: 0.05}}}}
steps: {steps}
eval: {{every: null, rows: 32}}
checkpoint: {{every: null}}
log: {{every: 20}}
device: cpu
"""


def sparsify_demo(out: Path, model: Path, store: Path, fraction: float, steps: int = STEPS) -> dict[str, Any]:
    """Train gates over the frozen model, cut them at a sparsity, and compare perplexity and cache with the whole model's."""
    from headway.config.load import load
    from headway.eval.long_context import LongPlan, evaluate_long
    from headway.eval.long_report import kv_rows, write_long_report
    from headway.infer.load import find_model, load_model
    from headway.model.head_masks.choice import MaskSpec
    from headway.train import train
    from headway.train.config import Recipe
    from headway.workflows.sparsify import FOLDER, write_mask_files

    file = out / "sparse.yaml"
    text = RECIPE.format(
        out=out.as_posix(), model=model.as_posix(), store=store.as_posix(), fraction=fraction,
        sparsity=SPARSITY, window=WINDOW, sinks=SINKS, steps=steps,
    )  # fmt: skip
    write_atomic(file, text)
    recipe = load(Recipe, file)
    train(recipe)
    run, spec = recipe.run.folder, MaskSpec(sparsities=(SPARSITY,), random=True)
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    files = write_mask_files(run, spec, folder)
    loaded = load_model(run)
    plan = LongPlan((), (256,), chunk_tokens=64, rows=8)
    texts = lambda: _held_out(store, fraction)  # noqa: E731
    result = evaluate_long(loaded, spec.variants(find_model(run).mask_source()), plan, name=str(run), texts=texts, keep=folder / "parts")
    write_long_report(folder, result)
    losses = {one.name: one.perplexity["loss"] for one in result.variants if one.perplexity is not None}
    table = kv_rows(result.variants)
    return {
        "sparse": {"run": str(run), "masks": str(folder / files[0]), "losses": losses, "kv": table, "report": str(folder / "report.md")}
    }


def _held_out(store: Path, fraction: float) -> Iterator[Piece]:
    """Some documents the demo's runs never trained on."""
    import numpy as np

    from headway.data.shuffle import in_valid
    from headway.eval.perplexity import Piece
    from headway.store.reader import open_store

    opened = open_store(store)
    for index in np.flatnonzero(in_valid(np.arange(opened.num_documents), fraction))[:DOCUMENTS].tolist():
        yield Piece(opened.document(index).tolist()[:4096], None, str(store))
