"""`headway sparsify`."""

from __future__ import annotations

import json as json_module
import subprocess
from typing import TYPE_CHECKING, Any

import typer

from headway.cli._output import JSON_FLAG, print_json
from headway.cli._recipe import RECIPE_ARGUMENT
from headway.cli.eval._options import ASK_TEMPLATE, BOS, CHUNK_TOKENS

if TYPE_CHECKING:
    from headway.train.config import Recipe


MASKS = typer.Option(
    None, metavar="own|none|FILE", help="Also measure these masks: own (what the gates have come to) or a file; default: none."
)


def command(
    arguments: list[str] = RECIPE_ARGUMENT,
    sparsities: str | None = typer.Option(
        None, help="Shares of streaming heads to export and measure (0.5,0.7); default: objective.target."
    ),
    tasks: str = typer.Option("key_value", help="Questions asked, comma separated; `headway eval long --help` names them."),
    lengths: str | None = typer.Option(None, help="Tokens of the questions (4096 or 4k), comma separated; default: data.seq_len."),
    depths: str = typer.Option("0,0.25,0.5,0.75,1", help="Where the answer stands, 0 = the beginning, comma separated."),
    samples: int = typer.Option(2, help="Questions of each task, length and depth."),
    random_masks: bool = typer.Option(True, help="Also measure random masks with as many heads."),
    equal_per_layer: bool = typer.Option(False, "--equal-per-layer", help="As many full heads in every layer, the best of each."),
    data: list[str] = typer.Option([], "--data", "--input", help="Also score this text by tokens of context; may be given several times."),
    masks: str | None = MASKS,
    chat_template: str | None = ASK_TEMPLATE,
    bos: bool | None = BOS,
    chunk_tokens: int | None = CHUNK_TOKENS,
    rows: int = typer.Option(4, help="Prompts that are computed at once."),
    nproc: int | None = typer.Option(None, help="Train in this many ranks of this machine."),
    gpus: str | None = typer.Option(None, help="Train on these GPUs, as `headway train --gpus`."),
    seed: int = typer.Option(0, help="Seed of the questions and of the random masks."),
    json: bool = JSON_FLAG,
) -> None:
    """Train head gates, export masks, ask the model with and without them, and report what the cache saves: in one folder, resumable."""
    from headway.cli._recipe import read_recipe
    from headway.cli.eval.long import show, split_numbers, split_tokens
    from headway.runtime.process import own_command
    from headway.workflows.sparsify import SparsifyPlan, sparsify

    plan = SparsifyPlan(
        split_numbers("--sparsities", sparsities) if sparsities is not None else (),
        tuple(tasks.split(",")),
        split_tokens(lengths) if lengths is not None else (),
        split_numbers("--depths", depths),
        samples,
        random_masks,
        equal_per_layer,
        tuple(data),
        rows,
        seed,
        chunk_tokens,
        masks,
        chat_template,
        bos,
    )
    flags = [text for flag, value in (("--nproc", nproc), ("--gpus", gpus)) if value is not None for text in (flag, str(value))]

    def elsewhere(recipe: Recipe) -> dict[str, Any]:
        line = own_command(["train", *(arguments or []), *flags, "--json"])
        child = subprocess.run(line, stdout=subprocess.PIPE, check=False)
        return json_module.loads(child.stdout) if child.returncode == 0 else {"exit_code": child.returncode}

    done = sparsify(read_recipe(arguments), plan, train=elsewhere if flags else None)
    if isinstance(done, int):
        raise typer.Exit(done)
    if json:
        print_json(done.to_json())
    else:
        show(done.result)
        typer.echo(f"\nreport: {done.folder / 'report.md'}")
