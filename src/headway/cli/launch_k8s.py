"""`headway launch k8s`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._launch import JOB, JobOptions, describe_job, read_job
from headway.cli._options import GROUP, JSON
from headway.cli._output import print_json

if TYPE_CHECKING:
    from headway.train.config import Recipe
    from headway.train.k8s_config import K8sConfig


@dataclass(frozen=True)
class K8sOptions:
    """What is asked of the cluster; each overrides the setting of launch.k8s with the same name."""

    image: str | None = typer.Option(None, help="Image with headway in it.")
    nodes: int | None = typer.Option(None, help="Number of nodes.")
    gpus_per_node: int | None = typer.Option(None, help="GPUs of each node; one rank for each.")
    nproc: int | None = typer.Option(None, help="Ranks on each node; default: one per GPU, or one.")
    cpus: str | None = typer.Option(None, help="CPU cores of each node.")
    mem: str | None = typer.Option(None, help="Memory of each node, e.g. 500Gi.")
    namespace: str | None = typer.Option(None, "--namespace", "-n", help="Namespace.")
    context: str | None = typer.Option(None, help="Context of kubectl.")
    queue: str | None = typer.Option(None, help="Local queue of Kueue.")
    volume: list[str] = typer.Option(
        [], "--volume", metavar="CLAIM:/PATH", help="A claim to mount; repeatable."
    )
    secret: list[str] = typer.Option(
        [], "--secret", metavar="NAME", help="A Secret for the environment; repeatable."
    )

    def settings(self, recipe: Recipe) -> K8sConfig:
        """The settings of the recipe with these on top, checked."""
        from headway.config.load import validate
        from headway.train.config import Recipe

        data = recipe.launch.k8s.model_dump(mode="json")
        for name, value in vars(self).items():
            if name not in ("volume", "secret") and value is not None:
                data[name] = value
        # Volumes and secrets add to those of the recipe.
        data["volumes"] = [*data["volumes"], *self.volume]
        data["secrets"] = [*data["secrets"], *self.secret]

        # As part of a recipe, so that a mistake is named by its key: launch.k8s.mem.
        return validate(Recipe, {"launch": {"k8s": data}}).launch.k8s


def k8s(
    arguments: list[str] = JOB,
    asked: K8sOptions = GROUP,
    options: JobOptions = GROUP,
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print the manifest; nothing is submitted."
    ),
    out: Path | None = typer.Option(
        None, "--out", help="Write the manifest into this file instead of submitting it."
    ),
    json: bool = JSON,
) -> None:
    """Train as a JobSet of Kubernetes: nodes start together, restart together and resume. Returns when the job is created."""
    from headway.errors import ConfigError
    from headway.launch.k8s_manifest import manifest_text
    from headway.launch.targets.k8s import K8sTarget, plan_k8s
    from headway.runtime.storage import write_atomic

    if dry_run and out is not None:
        raise ConfigError("--dry-run and --out are both given. Give one of them.")
    job, recipe = read_job(arguments, options)
    plan = plan_k8s(job, asked.settings(recipe))
    for path in plan.not_here:
        typer.echo(
            f"note: {path} is not on this machine; the recipe is checked when the job starts",
            err=True,
        )

    if dry_run or out is not None:
        text = manifest_text(plan.manifest)
        if out is not None:
            write_atomic(out, text)
        if json:
            print_json(
                {
                    "run": str(plan.run_dir),
                    "job": plan.name,
                    "manifest": plan.manifest,
                    "out": None if out is None else str(out),
                }
            )
        elif out is not None:
            typer.echo(f"wrote {out}; submit it with `kubectl create -f {out}`")
        else:
            typer.echo(text, nl=False)
        return

    target = K8sTarget(plan.settings)
    handle = target.submit_plan(plan, job)
    if json:
        print_json(describe_job(handle, target.status(handle)))
        return
    typer.echo(
        f"created JobSet {plan.name}; where it is: `headway launch status {job.run_dir}`, what it "
        f"prints: `headway launch logs {job.run_dir}`"
    )


VERBS = {"launch k8s": k8s}
