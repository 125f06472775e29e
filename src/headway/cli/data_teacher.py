"""`headway data teacher-logits`: what a teacher expects at every position of token stores, written
once for distillation.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._options import GROUP, JSON, ComputeOptions, read_recipe
from headway.cli._output import print_json, print_table
from headway.errors import ConfigError
from headway.infer.generate_options import LogitsOptions

if TYPE_CHECKING:
    from headway.store.reader import Store


def teacher_logits(
    sources: list[str] = typer.Argument(
        ...,
        metavar="STORE...|RECIPE [section.key=value]...",
        help="Token stores, or a recipe whose training and validation data is read.",
    ),
    teacher: Path = typer.Option(
        ...,
        help="The model to learn from: a run, a checkpoint, a Hugging Face folder, a GGUF file or "
        "a hub id.",
    ),
    out: Path = typer.Option(
        None,
        help="Folder of the logits, for several stores of one folder each; default: beside the "
        "store, STORE.logits.",
    ),
    options: LogitsOptions = GROUP,
    compute: ComputeOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Run a teacher once over token stores and keep its likeliest next tokens; `objective: {kind: distill, cache: OUT}` trains with them.

    A command that was stopped continues where it was.
    """
    from headway.infer.teacher_logits import write_logits

    # The teacher is loaded last: it takes longest, and mistakes in the rest are found before.
    compute.check()
    stores = _stores(sources)
    folders = _folders(stores, out, options.shard)
    loaded = compute.load(teacher)
    results = [
        write_logits(loaded, store, folder, options)
        for store, folder in zip(stores, folders, strict=True)
    ]
    if json:
        print_json({"logits": [asdict(result) for result in results]})
        return
    rows = [
        (
            result.store,
            result.out,
            result.documents,
            result.tokens,
            f"{result.bytes / 1e6:.1f} MB",
            f"{result.coverage:.2%}",
            f"{result.seconds:.1f} s",
        )
        for result in results
    ]
    print_table(
        ("store", "logits", "documents", "tokens", "size", "probability kept", "time"), rows
    )


def _stores(sources: list[str]) -> list[Store]:
    """The stores that are named, or those that a recipe reads; each one once."""
    from headway.store.reader import Store, is_store, open_store
    from headway.store.source import SourceView

    # A recipe is a file or a name; a folder that is no store gets the message of `open_store`.
    if is_store(Path(sources[0])) or Path(sources[0]).is_dir():
        return [open_store(path) for path in sources]

    recipe = read_recipe(sources)
    if recipe.stages:
        raise ConfigError(
            "stages is set; `data teacher-logits` takes recipes of one stage, or token stores."
        )
    if recipe.data.train is None:
        raise ConfigError(
            "data.train is null: the data is generated while training. Set data.train, or give "
            "token stores."
        )
    from headway.train.batches import open_run_data
    from headway.train.resolve import resolve

    # Distillation needs the logits that are about to be written, so the data is opened as for the
    # default objective.
    objective = type(recipe).model_fields["objective"].get_default(call_default_factory=True)
    recipe = recipe.model_copy(update={"objective": objective})
    data = open_run_data(resolve(recipe))

    # By content: the training and validation parts of one store are two views of it.
    stores: dict[str, Store] = {}
    for part in (data.train, *data.valid.values()):
        for entry in part:
            source = entry.selection.source
            while isinstance(source, SourceView):
                source = source.source
            if not isinstance(source, Store):
                raise ConfigError(
                    f"{source.name}: not a headway store. Make one with `headway data convert`."
                )
            stores[source.manifest.content] = source
    return list(stores.values())


def _folders(stores: list[Store], out: Path | None, part: tuple[int, int]) -> list[Path]:
    """Where the logits of each store go. `part` is (index, number of parts), as --shard has it."""
    ending = ""
    if part[1] != 1:
        ending = f"-{part[0]}-of-{part[1]}"
    if out is None:
        return [store.folder.with_name(f"{store.folder.name}.logits{ending}") for store in stores]
    if len(stores) == 1:
        return [out]
    return [out / f"{store.folder.name}{ending}" for store in stores]


VERBS = {"data teacher-logits": teacher_logits}
