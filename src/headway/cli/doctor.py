"""`headway doctor`: is this machine ready, are these hosts, this data, this recipe and this model?"""

import json as json_text
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headway.cli._complete import complete_recipe
from headway.cli._options import GROUP, JSON, RECIPE, command_line, read_recipe
from headway.cli._output import exit_with, print_document, print_json, print_table, readable
from headway.errors import ConfigError
from headway.launch.options import LaunchOptions

if TYPE_CHECKING:
    from headway.diagnose.check import Check, RanksReport
    from headway.diagnose.doctor import DoctorPlan
    from headway.parallel.collectives import RankGroup
    from headway.workflows.doctor_data import SourceSamples
    from headway.workflows.doctor_prompts import ShownPrompt

DATA = typer.Argument(
    ...,
    metavar="RECIPE|FILE [section.key=value]...",
    help="A recipe and overrides, or data (raw files or a token store) with tokenizer=PATH or "
    "init.from=MODEL.",
    autocompletion=complete_recipe,
)

LONGEST_VALUE = 40
"""Characters of a value of config.json in a table."""


@dataclass(frozen=True)
class NodeOptions:
    """The machines that take part; each starts the same command with its own rank."""

    nnodes: int = typer.Option(
        1,
        help="Machines to check together; start the same command on each with its own --node-rank.",
    )
    node_rank: int = typer.Option(0, help="The index of this machine, from 0.")
    master: str | None = typer.Option(
        None, metavar="HOST:PORT", help="Where machine 0 listens; the same on all."
    )
    node_timeout: float = typer.Option(300.0, help="Seconds to wait for the other machines.")


def doctor(
    context: typer.Context,
    run_dir: Path | None = typer.Option(
        None, "--run-dir", help="Folder of future runs; default: the working folder."
    ),
    cache_dir: Path | None = typer.Option(
        None, "--cache-dir", help="Folder for cached data; default: headway's cache."
    ),
    fast: bool = typer.Option(
        False,
        "--fast",
        help="Only the checks that run before a job on several hosts: about a second, no GPU work.",
    ),
    port: int | None = typer.Option(
        None, help="Also check that this port is free.", min=1, max=65535
    ),
    ranks: LaunchOptions = GROUP,
    nodes: NodeOptions = GROUP,
    # Hidden: the process that starts ranks gives it to them.
    report: Path | None = typer.Option(None, hidden=True),
    json: bool = JSON,
) -> None:
    """Check this machine: Python, packages, GPUs, memory, disks, limits; with --nproc also the speed between ranks.

    Each line is ok, warn or fail, with a remedy; the exit code is 1 if one failed.
    """
    # `headway doctor data` comes here first: the verb is also the callback of its group.
    if context.invoked_subcommand is not None:
        _refuse_own_options(context)
        return

    from headway.diagnose.doctor import DoctorPlan
    from headway.launch.external import external_launcher
    from headway.launch.launcher import is_launched
    from headway.launch.nodes import parse_nodes

    plan = DoctorPlan(run_dir, cache_dir, port)
    if fast:
        _check_fast(context, plan, json)
        return

    machines = parse_nodes(nodes.nnodes, nodes.node_rank, nodes.master, nodes.node_timeout)
    is_rank = is_launched(os.environ) or external_launcher(os.environ)
    needs_ranks = ranks.nproc not in (None, 1) or ranks.gpus or nodes.nnodes > 1
    if is_rank or needs_ranks:
        _check_ranks(context, plan, replace(ranks, nodes=machines), report, json)
        return

    from headway.diagnose.doctor import examine

    show_checks(examine(plan, os.environ), json)


def _refuse_own_options(context: typer.Context) -> None:
    """Refuse options of `doctor` in front of one of its verbs, which would not see them."""
    options = command_line(context)[1:]
    if options:
        raise ConfigError(
            f"{options[0]} stands before `{context.invoked_subcommand}`, where it has no meaning. "
            "Put it behind, or leave it out."
        )


def _check_fast(context: typer.Context, plan: "DoctorPlan", json: bool) -> None:
    from headway.diagnose.host import HostNeeds, host_checks

    for name in ("nproc", "gpus", "master", "cache_dir"):
        if context.params[name] is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no meaning with --fast, which checks this "
                "machine alone. Leave one out."
            )
    facts, checks = host_checks(plan.folder, HostNeeds(port=plan.port), os.environ)
    show_checks(checks, json, {"facts": facts.to_json()})


def _check_ranks(
    context: typer.Context,
    plan: "DoctorPlan",
    launching: LaunchOptions,
    report: Path | None,
    json: bool,
) -> None:
    """Start ranks, or be one.

    The first rank of a node leaves its report for the process that started it, which prints it.
    """
    from headway.diagnose.check import RanksReport
    from headway.launch.launcher import is_launched, run_on_ranks
    from headway.runtime.process import from_environment
    from headway.runtime.temporary import temporary_folder

    reports: list[RanksReport] = []

    def work(group: "RankGroup") -> None:
        from headway.diagnose.rank_checks import check_ranks
        from headway.runtime.device import choose_compute

        process = from_environment()
        compute = choose_compute("auto", "auto", process.local_rank)
        # The same on all ranks: the checks end with a gather.
        reports.append(check_ranks(group, process, compute.device, plan, os.environ))
        if report is not None and process.local_rank == 0:
            report.write_text(json_text.dumps(reports[0].to_json()), encoding="utf-8")

    # A rank of the process below, which prints for all.
    if is_launched(os.environ):
        exit_with(run_on_ranks("auto", launching, [], work))
        return

    with temporary_folder("doctor") as folder:
        path = folder / "report.json"
        code = run_on_ranks("auto", launching, [*command_line(context), f"--report={path}"], work)
        exit_with(code)
        # Without the file, `work` ran in this process and `reports` has its result already.
        if path.exists():
            reports.append(RanksReport.from_json(json_text.loads(path.read_text(encoding="utf-8"))))

    is_first = launching.nodes.rank == 0 and from_environment().is_first
    show_ranks(reports[0], json, is_first=is_first)


def show_ranks(report: "RanksReport", json: bool, *, is_first: bool) -> None:
    """Print what the ranks found, on the first node; every node has the exit code."""
    if not is_first:
        if any(check.state == "fail" for check in report.checks):
            raise typer.Exit(1)
        return
    if not json:
        rows = [
            (
                bandwidth.collective.replace("_", "-"),
                f"{bandwidth.bytes / 1e6:.2f}",
                f"{bandwidth.seconds * 1e6:,.0f}",
                f"{bandwidth.algorithm / 1e9:.2f}",
                f"{bandwidth.bus / 1e9:.2f}",
            )
            for bandwidth in report.bandwidths
        ]
        print_table(("collective", "MB", "µs", "GB/s", "bus GB/s"), rows, "Between all ranks")
        typer.echo()
    show_checks(report.checks, json, {"bandwidth": report.to_json()["bandwidth"]})


def data(
    arguments: list[str] = DATA,
    samples: int = typer.Option(
        3, help="Documents of each source to show with their loss mask; 0 = none.", min=0, max=1000
    ),
    document: list[int] = typer.Option(
        [], help="Show this document of the first source; may be repeated."
    ),
    max_tokens: int = typer.Option(400, help="Tokens of a document to show.", min=1),
    json: bool = JSON,
) -> None:
    """Check your data as training reads it: loss mask, stop tokens, packing, accumulation, round trip, copies.

    Of prompts (objective grpo) it shows what a few sampled answers earn, and the share without signal.
    Targets are green on a terminal and between ⟦ ⟧ elsewhere; other text is input only. The exit code is 1 if a check fails.
    """
    from headway.workflows.doctor_data import SampleOptions, check_data

    if any(number < 0 for number in document):
        raise ConfigError(f"--document is {min(document)}; documents are counted from 0.")
    recipe = read_recipe(_as_data(arguments), makes_tokenizer=True)
    stage_reports = check_data(recipe, SampleOptions(samples, max_tokens, tuple(document)))

    checks: list[Check] = []
    json_samples: list[dict[str, Any]] = []
    json_prompts: list[dict[str, Any]] = []
    json_signals: list[dict[str, Any]] = []
    for stage_report in stage_reports:
        # A recipe without stages has one report, whose checks need no name before theirs.
        stage = stage_report.stage
        for check in stage_report.checks:
            checks.append(check if stage is None else check.on(stage))
        for source in stage_report.samples:
            json_samples.append(_sample_json(stage, source))
            if json:
                continue
            typer.echo(f"\n{source.source}:" if stage is None else f"\n{stage}: {source.source}:")
            for preview in source.documents:
                print_document(preview, source.masked)
        if stage_report.signal is not None:
            json_signals.append({"stage": stage, **asdict(stage_report.signal)})
        for prompt in stage_report.prompts:
            json_prompts.append({"stage": stage, **asdict(prompt)})
            if not json:
                _print_prompt(prompt)
    if not json:
        typer.echo()

    more: dict[str, Any] = {"samples": json_samples}
    if json_prompts:
        more["prompts"] = json_prompts
        more["signal"] = json_signals
    show_checks(checks, json, more)


def _print_prompt(prompt: "ShownPrompt") -> None:
    """A prompt as the model reads it, and what sampled answers to it earn."""
    typer.echo(f"\n— prompt {prompt.number} ({prompt.place}): {prompt.tokens} tokens")
    typer.echo(readable(prompt.text))
    for answer in prompt.answers:
        typer.echo(f"[reward {answer.reward:.4g}] {readable(answer.text)}")
        for problem in answer.problems:
            typer.echo(f"  failed: {problem}")


def _as_data(arguments: list[str]) -> list[str]:
    """A data file or store in the place of a recipe becomes data.train of a run without a recipe."""
    from headway.config.shipped import recipe_names

    first, *overrides = arguments
    if "=" in first or first in recipe_names() or Path(first).suffix in (".yaml", ".yml"):
        return arguments

    # A word that no file has, without a folder or a suffix, is a recipe's name, perhaps misspelt:
    # the recipe reader suggests the right one.
    recipe_folders = {name.partition("/")[0] for name in recipe_names()}
    looks_like_recipe = first.partition("/")[0] in recipe_folders or not set("/.") & set(first)
    if looks_like_recipe and not Path(first).exists():
        return arguments
    return [f"data.train={first}", *overrides]


def _sample_json(stage: str | None, source: "SourceSamples") -> dict[str, Any]:
    documents = [
        {**document._asdict(), "runs": [run._asdict() for run in document.runs]}
        for document in source.documents
    ]
    return {
        "stage": stage,
        "source": source.source,
        "masked": source.masked,
        "documents": documents,
    }


def recipe(
    arguments: list[str] = RECIPE,
    gpu: str | None = typer.Option(
        None,
        help="GPU it will run on, as in `headway plan`: h200, a100, 4090, ...; default: this "
        "machine.",
    ),
    world: int | None = typer.Option(None, help="Number of GPUs it will run on.", min=1),
    step: bool = typer.Option(
        False,
        "--step",
        help="Also build the model here and train one step, as `headway train --dry-run` does.",
    ),
    json: bool = JSON,
) -> None:
    """Check a recipe: all that training refuses, memory, and settings that make no sense together; exit code 1 if a check fails."""
    from headway.plan.hardware import find_gpu
    from headway.workflows.doctor_recipe import RecipeTarget, check_recipe, check_step

    if world is not None and gpu is None:
        raise ConfigError(
            f"--world is {world} without --gpu. Give the kind of GPU too, such as --gpu h100."
        )
    loaded = read_recipe(arguments, makes_tokenizer=True)
    hardware = None
    if gpu is not None:
        hardware = find_gpu(gpu)
    checks = check_recipe(loaded, RecipeTarget(hardware, world))

    # A recipe that training would refuse cannot be built.
    if step and not any(check.state == "fail" for check in checks):
        checks.append(check_step(loaded))
    show_checks(checks, json)


def model(
    folder: Path = typer.Argument(
        ..., metavar="FOLDER", help="A folder with a config.json, a run folder, or a config.json."
    ),
    compare: bool = typer.Option(
        True, help="Also compare with transformers on random weights of a small copy."
    ),
    json: bool = JSON,
) -> None:
    """Check a model folder: family, every key of config.json, tensors, tokenizer, what it can be used for.

    Also how far headway and transformers agree. The exit code is 2 if the folder cannot be used.
    """
    from headway.diagnose.model_folder import examine_model

    report = examine_model(folder, compares=compare)
    if json:
        print_json(report.to_json())
    else:
        rows = [(fact.state, fact.key, _short_value(fact.value), fact.why) for fact in report.keys]
        print_table(["state", "key", "value", "why"], rows, str(report.folder / "config.json"))
        typer.echo()
        print_table(
            ["state", "check", "found", "remedy"],
            [
                (check.state, check.name, check.detail, check.remedy or "")
                for check in report.checks
            ],
        )
    if not report.is_usable:
        raise typer.Exit(2)


def _short_value(value: Any) -> str:
    text = json_text.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= LONGEST_VALUE:
        return text
    return text[: LONGEST_VALUE - 3] + "..."


def show_checks(checks: "Sequence[Check]", json: bool, more: dict[str, Any] | None = None) -> None:
    """Print checks as a table or JSON; exit code 1 if one failed."""
    failed = any(check.state == "fail" for check in checks)
    if json:
        print_json(
            {"ok": not failed, "checks": [check.to_json() for check in checks], **(more or {})}
        )
    else:
        print_table(
            ["state", "check", "found", "remedy"],
            [(check.state, check.name, check.detail, check.remedy or "") for check in checks],
        )
    if failed:
        raise typer.Exit(1)


VERBS = {"doctor": doctor, "doctor data": data, "doctor recipe": recipe, "doctor model": model}
