"""`headway push` and `headway pull`: models to and from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import typer

from headway.cli._options import JSON
from headway.cli._output import print_json
from headway.runtime.progress import quantity


def push(
    source: Path = typer.Argument(
        ...,
        metavar="RUN",
        help="A run that has ended, or a folder that `headway export` wrote.",
    ),
    repo_id: str = typer.Argument(
        ..., metavar="USER/NAME", help="The repository; it is created if it does not exist."
    ),
    form: str = typer.Option(
        "model", "--form", help="What to push of a run: model, adapter (PEFT) or gguf."
    ),
    gguf_type: str = typer.Option(
        "q8_0", "--type", help="With --form gguf: f32, f16, bf16, q8_0, q6_k, q5_k_m or q4_k_m."
    ),
    license: str | None = typer.Option(
        None, "--license", help="The licence on the card, as the hub writes it, e.g. apache-2.0."
    ),
    public: bool = typer.Option(
        False, "--public", help="Make a new repository public; by default it is private."
    ),
    replace: bool = typer.Option(
        False, "--replace", help="Replace the content of a repository that holds something else."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print the card and the files; send nothing. Needs no token."
    ),
    json: bool = JSON,
) -> None:
    """Push the model of a run to the Hugging Face hub, with a card made from the run. Run again, it sends what is missing."""
    from headway.workflows.model_card import Form
    from headway.workflows.publish import PushOptions, prepared
    from headway.workflows.publish import push as push_run

    # `PushOptions` checks the form.
    options = PushOptions(repo_id, cast(Form, form), gguf_type, license, public, replace)
    if dry_run:
        with prepared(source, options) as content:
            sizes = {name: path.stat().st_size for name, path in content.files.items()}
        if json:
            print_json({"repository": repo_id, "card": content.card, "files": sizes})
            return
        typer.echo(content.card)
        for name, size in sizes.items():
            typer.echo(f"{quantity(size, 'bytes'):>10}  {name}")
        typer.echo("nothing was sent")
        return

    result = push_run(source, options)
    if json:
        print_json(
            {
                "url": result.url,
                "commit": result.commit,
                "sent": list(result.sent),
                "present": list(result.present),
                "deleted": list(result.deleted),
            }
        )
        return
    if result.commit is None:
        typer.echo(f"{result.url} has all {len(result.present)} files already")
        return
    typer.echo(
        f"{result.url}: sent {len(result.sent)} files, {len(result.present)} were there, "
        f"{len(result.deleted)} removed"
    )
    if license is None:
        typer.echo("The card states no licence; --license adds one.")


def pull(
    repo_id: str = typer.Argument(
        ..., metavar="USER/NAME[@REVISION]", help="The repository, with a branch, tag or commit."
    ),
    to: Path | None = typer.Option(None, help="The folder to write; default: NAME."),
    json: bool = JSON,
) -> None:
    """Download a model of the Hugging Face hub into a folder and check it. Run again, it continues."""
    from headway.workflows.publish import pull as pull_model

    result = pull_model(repo_id, to)
    if json:
        print_json(
            {"path": str(result.folder), "form": result.form, "is_checked": result.is_checked}
        )
        return
    checked = ""
    if result.is_checked:
        checked = ", every file as headway wrote it"
    typer.echo(f"{result.folder}: {result.form or 'files'}{checked}")
    if result.form == "adapter":
        typer.echo(f"Use it: headway serve --model BASE --adapter mine={result.folder}")
    elif result.form is not None:
        typer.echo(f"Use it: headway chat {result.folder}")


VERBS = {"pull": pull, "push": push}
