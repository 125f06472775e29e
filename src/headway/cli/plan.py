"""`headway plan`: memory, arithmetic, traffic and speed of a recipe on GPUs that need not be here."""

from __future__ import annotations

import math
import re
from pathlib import Path

import typer

from headway.cli._options import JSON, RECIPE, read_recipe
from headway.cli._output import print_json, print_table
from headway.errors import ConfigError

MAX_WORLD = 1 << 17
"""GPUs; a bound against typing errors."""
MAX_TOKENS = 1e18
"""Limit of the number before the unit of --tokens."""
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def plan(
    arguments: list[str] = RECIPE,
    gpu: str = typer.Option(
        "h200",
        help="b200, h200, h100, h800, a100, a800, a40, l40s, 4090 and others; see docs/plan.md.",
    ),
    world: int | None = typer.Option(
        None,
        help="Number of GPUs; default: the fewest that the recipe's axes need.",
        min=1,
        max=MAX_WORLD,
    ),
    gpus_per_node: int | None = typer.Option(
        None, help="GPUs of one node; default 8.", min=1, max=MAX_WORLD
    ),
    network_gbps: float | None = typer.Option(
        None, help="Gbit/s of the network per GPU; default: by GPU.", min=0.001
    ),
    tokens: str | None = typer.Option(
        None, help="Token budget, such as 2T or 300B: prints days and GPU hours."
    ),
    price: float | None = typer.Option(
        None, help="Price of a GPU hour; with --tokens, prints the cost.", min=0
    ),
    prompt_tokens: int | None = typer.Option(
        None,
        help="With sampled answers: tokens of a prompt; default: read from data.train, else "
        "assumed.",
        min=1,
    ),
    answer_tokens: int | None = typer.Option(
        None,
        help="With sampled answers: their expected mean length; default: rollout.max_new_tokens.",
        min=1,
    ),
    search: bool = typer.Option(
        False, "--search", help="List the ten fastest layouts that fit, for the same batch."
    ),
    groups: bool = typer.Option(
        False, "--groups", help="Also print which ranks form a group along each axis."
    ),
    plot: Path | None = typer.Option(
        None, help="Write a picture (.png, .svg, .pdf): memory bars and the step's timeline."
    ),
    json: bool = JSON,
) -> None:
    """Compute what a recipe needs before it runs: parameters, bytes per rank, FLOPs, traffic, bubble, tokens/s, days and cost."""
    from headway.plan.hardware import find_gpu
    from headway.plan.result import as_dict, make_plan, rank_groups
    from headway.plan.search import best_plans, nearest_fitting
    from headway.plan.table import COLUMNS, summary_row, tables
    from headway.train.planning import PlanTarget, plan_job

    for flag, number in (("--network-gbps", network_gbps), ("--price", price)):
        if number is not None and not math.isfinite(number):
            raise ConfigError(f"{flag} is {number}; it must be a finite number.")

    token_budget = None
    if tokens is not None:
        token_budget = parse_tokens(tokens)
    if price is not None and token_budget is None:
        raise ConfigError(
            f"--price is {price:g}, but --tokens is not given. Give the token budget, such as "
            "--tokens 300B."
        )

    recipe = read_recipe(arguments)
    hardware = find_gpu(gpu).with_network(network_gbps, gpus_per_node)
    job = plan_job(recipe, PlanTarget(hardware, world, prompt_tokens, answer_tokens))
    estimate = make_plan(job)

    # All work is done before anything is printed, so that an error does not end a half table.
    best = []
    if search:
        best = best_plans(job)
    nearest = []
    if not estimate.fits:
        nearest = nearest_fitting(job)
    if plot is not None:
        from headway.plan.picture import draw_plan

        draw_plan(estimate, plot)
    cost = None
    if token_budget is not None:
        cost = estimate.budget(token_budget, price)

    if json:
        result = as_dict(estimate)
        result["nearest_that_fit"] = [as_dict(layout) for layout in nearest]
        result["budget"] = cost
        if groups:
            result["groups"] = rank_groups(job)
        if search:
            result["best"] = [as_dict(layout) for layout in best]
        print_json(result)
        return

    for table in tables(estimate):
        print_table(table.columns, table.rows, table.title)
        typer.echo()
    if cost is not None:
        print_table(("what", "value"), _budget_rows(cost), f"Training on {tokens} tokens")
        typer.echo()
    if groups:
        rows: list[tuple[str, str]] = []
        for axis, axis_groups in rank_groups(job).items():
            listed = [",".join(map(str, ranks)) for ranks in axis_groups]
            rows.append((axis, " ".join(f"[{ranks}]" for ranks in listed)))
        print_table(("axis", "ranks"), rows, "Groups of ranks")
        typer.echo()
    if search:
        print_table(
            COLUMNS,
            map(summary_row, best),
            f"Fastest layouts that fit on {job.layout.world} x {job.gpu.name}",
        )
        typer.echo("" if best else "none fits")
    if not estimate.fits:
        print_table(
            COLUMNS, map(summary_row, nearest), "It does not fit. The nearest layouts that do"
        )
        typer.echo("" if nearest else "none fits: use more GPUs, shorter rows or a smaller model")
    if plot is not None:
        typer.echo(f"picture: {plot}")


def parse_tokens(text: str) -> float:
    """`2T`, `300B`, `1.5e12` -> a number of tokens."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmbt]?)\s*", text.lower())
    # Zero, and numbers such as 1e999 that become infinite, have no plan.
    if match is None or not 0 < float(match[1]) < MAX_TOKENS:
        raise ConfigError(
            f"--tokens is {text!r}; it must be a number above 0 such as 2T, 300B or 1e9."
        )
    return float(match[1]) * UNITS[match[2]]


def _budget_rows(cost: dict[str, float | None]) -> list[tuple[str, str]]:
    days = cost["days"]
    hours = cost["gpu_hours"]
    money = cost["cost"]
    rows = [("days", f"{days:,.1f}"), ("GPU hours", f"{hours:,.0f}")]
    if money is None:
        return rows
    return [*rows, ("cost", f"{money:,.0f}")]


VERBS = {"plan": plan}
