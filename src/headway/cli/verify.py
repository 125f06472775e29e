"""`headway verify`: is a resume exact, is a checkpoint complete, is a folder what was written?"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from headway.cli._options import JSON, RECIPE, read_recipe
from headway.cli._output import print_json, print_table
from headway.errors import ConfigError
from headway.runtime.digests import DIGESTS

SHOWN_DIGITS = 16
"""Of a SHA-256 digest, which has 64."""


def checkpoint(
    path: str = typer.Argument(
        ..., metavar="X", help="A checkpoint, a run (its newest checkpoint) or s3://bucket/prefix."
    ),
    json: bool = JSON,
) -> None:
    """Check a checkpoint: files, checksums, shapes, finite values, one generation; exit code 1 with a list of problems, if any."""
    from headway.infer.check_checkpoint import check_checkpoint
    from headway.runtime.paths import parse_path

    # A path of s3:// is none of this machine's, and is not looked up here.
    local = parse_path(path)
    if isinstance(local, Path) and not local.exists():
        raise ConfigError(
            f"{path}: no such folder. Give a run folder, a checkpoint folder or s3://bucket/prefix."
        )
    report = check_checkpoint(path)
    if json:
        print_json(report.to_json())
    elif report.problems:
        for problem in report.problems:
            typer.echo(problem)
        typer.echo(
            f"{report.checkpoint}: {len(report.problems)} "
            f"problem{'s' if len(report.problems) > 1 else ''} found"
        )
    else:
        # What the model was tried with: an aligner embeds, a reward model scores, others generate.
        trial = f"it generates {report.token_ids}"
        if report.embeds:
            trial = f"it embeds {', '.join(report.embeds)}"
        elif report.score is not None:
            trial = f"it gives a score of {report.score:.4g}"
        counts = f"step {report.step}, {report.files} files, {report.tensors} tensors"
        typer.echo(f"{report.checkpoint}: good: {counts}, {trial}")
    if report.problems:
        raise typer.Exit(1)


def folder(
    path: Path = typer.Argument(
        ...,
        metavar="PATH",
        help="A token store, a model folder, an adapter, or a folder with some of them below it.",
    ),
    update: bool = typer.Option(
        False,
        "--update",
        help="Write the digests of this model or adapter folder anew, after its files were "
        "changed on purpose.",
    ),
    json: bool = JSON,
) -> None:
    """Hash every file of stores, models, adapters and tables below a folder; exit code 1 with a list of problems, if any."""
    from headway.store.verify_folder import update_digests, verify_folder

    if update:
        written = update_digests(path)
        if json:
            print_json({"folder": str(path), "written": sorted(written.files)})
        else:
            typer.echo(f"{path / DIGESTS}: written, {len(written.files)} files")
        return

    report = verify_folder(path)
    if json:
        print_json({**asdict(report), "good": not report.problems})
    else:
        for problem in report.problems:
            typer.echo(problem)
        files = sum(item.files for item in report.checked)
        size = sum(item.bytes for item in report.checked)
        verdict = "good"
        if report.problems:
            verdict = f"{len(report.problems)} problems found"
        typer.echo(
            f"{path}: {verdict}: {len(report.checked)} checked, {files} files, {size / 1e6:.1f} MB"
        )
    if report.problems:
        raise typer.Exit(1)


def resume(
    arguments: list[str] = RECIPE,
    steps: int = typer.Option(20, min=2, help="Steps to train; with stages, steps of each stage."),
    kill_at: int = typer.Option(
        13, help="Kill the run with SIGKILL after this step, counted over all stages."
    ),
    nproc: int | None = typer.Option(
        None, help="Ranks to train with; default: as `headway train`."
    ),
    resume_nproc: int | None = typer.Option(
        None, help="Ranks after the kill; default: the same number."
    ),
    bound: float | None = typer.Option(
        None, help="Largest relative difference of a parameter if the number of ranks changes."
    ),
    keep: Path | None = typer.Option(
        None, help="Keep the runs in this folder; default: a temporary one."
    ),
    json: bool = JSON,
) -> None:
    """Prove on your own recipe that a killed and resumed run ends exactly like an undisturbed one; exit code 1 if it does not."""
    from headway.runtime.temporary import temporary_folder
    from headway.workflows.resume_proof import Trial, prove_resume

    # Steps are those of each stage, so the proof must know how many stages there are.
    recipe = read_recipe(arguments)
    trial = Trial(
        tuple(arguments or ()),
        steps,
        kill_at,
        nproc,
        resume_nproc,
        bound,
        max(1, len(recipe.stages)),
    )

    if keep is not None:
        # Runs of an earlier proof in the folder would be resumed instead of trained.
        if keep.exists() and any(keep.iterdir()):
            raise ConfigError(f"--keep is {keep}; that folder is not empty. Give a new one.")
        certificate = prove_resume(trial, recipe, keep.absolute())
    else:
        with temporary_folder("verify") as folder:
            certificate = prove_resume(trial, recipe, folder)

    if json:
        print_json(certificate)
    else:
        print_certificate(certificate)
    if not certificate["holds"]:
        raise typer.Exit(1)


def print_certificate(certificate: dict[str, Any]) -> None:
    """The result of `verify resume` as text."""
    typer.echo(
        f"{certificate['steps']} steps; killed after step {certificate['killed_after_step']}, "
        "resumed from "
        f"step {certificate['resumed_from_step']}; "
        f"rule: {certificate['rule']}"
    )

    # A recipe without stages has the digests at the top level.
    for part in certificate.get("stages", [certificate]):
        rows: list[tuple[str, str, str, str]] = []
        for name in ("parameters", "optimizer", "rng", "data_cursor", "next_batch"):
            undisturbed = part["whole"][name]
            resumed = part["resumed"][name]
            verdict = "DIFFERS"
            if undisturbed == resumed:
                verdict = "="
            digests = (undisturbed[:SHOWN_DIGITS], resumed[:SHOWN_DIGITS])
            rows.append((name.replace("_", " "), *digests, verdict))
        print_table(
            ("sha256 of", "undisturbed", "killed and resumed", ""), rows, title=part.get("name")
        )

    for source, ids in certificate["whole"]["next_batch_documents"].items():
        typer.echo(f"next batch of {source}: documents {', '.join(map(str, ids))} ...")
    if certificate["unequal"]:
        worst_first = sorted(certificate["unequal"], key=lambda tensor: -tensor["relative"])
        differences = [
            (tensor["name"], tensor["role"], tensor["largest"], f"{tensor['relative']:.3g}")
            for tensor in worst_first
        ]
        print_table(("tensor", "of", "largest difference", "relative"), differences)
    if "spread" in certificate:
        typer.echo(
            f"difference after the resume {certificate['largest_relative_difference']:.3g}; "
            "run-to-run "
            f"spread {certificate['spread']:.3g}"
        )

    conclusion = "NOT the same run"
    if certificate["holds"]:
        conclusion = "within the rule"
        if not certificate["unequal"]:
            conclusion = "the resume is exact"
    typer.echo(conclusion)


VERBS = {"verify checkpoint": checkpoint, "verify folder": folder, "verify resume": resume}
