"""`headway verify resume`."""

from pathlib import Path
from typing import Any

import typer

from headway.cli._output import JSON_FLAG, print_json
from headway.cli._recipe import RECIPE_ARGUMENT


def command(
    arguments: list[str] = RECIPE_ARGUMENT,
    steps: int = typer.Option(20, min=2, help="Steps to train, of each stage where there are several."),
    kill_at: int = typer.Option(13, help="Kill the run with SIGKILL after this step, counted over all stages."),
    nproc: int | None = typer.Option(None, help="Ranks to train with; default: as `headway train`."),
    resume_nproc: int | None = typer.Option(None, help="Ranks to go on with after the kill; default: as many."),
    bound: float | None = typer.Option(None, help="Largest relative difference of a parameter where the number of ranks changes."),
    keep: Path | None = typer.Option(None, help="Keep the runs in this folder; default: a temporary one."),
    json: bool = JSON_FLAG,
) -> None:
    """Prove on your own recipe that a killed run, started again, ends exactly where it would have ended; exit code 1 if it does not."""
    from headway.cli._recipe import read_recipe
    from headway.errors import ConfigError
    from headway.runtime.temporary import temporary_folder
    from headway.workflows.resume_proof import Trial, prove_resume

    recipe = read_recipe(arguments)
    trial = Trial(tuple(arguments or ()), steps, kill_at, nproc, resume_nproc, bound, max(1, len(recipe.stages)))
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise ConfigError(f"--keep is {keep}; that folder is not empty. Give a new one.")
        found = prove_resume(trial, recipe, keep.absolute())
    else:
        with temporary_folder("verify") as folder:
            found = prove_resume(trial, recipe, folder)
    if json:
        print_json(found)
    else:
        show(found)
    if not found["holds"]:
        raise typer.Exit(1)


def show(found: dict[str, Any]) -> None:
    """The certificate, for people."""
    from headway.cli._output import print_table

    typer.echo(
        f"{found['steps']} steps; killed after step {found['killed_after_step']}, resumed from step {found['resumed_from_step']}; "
        f"rule: {found['rule']}"
    )
    for part in found.get("stages", [found]):
        rows: list[tuple[str, str, str, str]] = []
        for name in ("parameters", "optimizer", "rng", "data_cursor", "next_batch"):
            one, two = part["whole"][name], part["resumed"][name]
            rows.append((name.replace("_", " "), one[:16], two[:16], "=" if one == two else "DIFFERS"))
        print_table(("sha256 of", "undisturbed", "killed and resumed", ""), rows, title=part.get("name"))
    for source, ids in found["whole"]["next_batch_documents"].items():
        typer.echo(f"next batch of {source}: documents {', '.join(map(str, ids))} ...")
    if found["unequal"]:
        worst = sorted(found["unequal"], key=lambda one: -one["relative"])
        print_table(
            ("tensor", "of", "largest difference", "relative"),
            [(o["name"], o["role"], o["largest"], f"{o['relative']:.3g}") for o in worst],
        )
    if "spread" in found:
        typer.echo(f"difference after the resume {found['largest_relative_difference']:.3g}; run-to-run spread {found['spread']:.3g}")
    typer.echo(
        "the resume is exact" if found["holds"] and not found["unequal"] else "within the rule" if found["holds"] else "NOT the same run"
    )
