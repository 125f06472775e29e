"""`headway eval reward`: what a reward model says of pairs, of conversations and of several answers
to a prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._options import (
    GROUP,
    JSON,
    MODEL,
    ComputeOptions,
    on_ranks,
)
from headway.cli._output import print_json, print_table
from headway.eval.options import RewardSource
from headway.launch.options import LaunchOptions

if TYPE_CHECKING:
    from headway.eval.reward import RewardReport
    from headway.parallel.collectives import RankGroup

BAR_WIDTH = 40
"""Characters of the longest bar of the histogram."""


def reward(
    context: typer.Context,
    model: Path = MODEL,
    source: RewardSource = GROUP,
    batch_tokens: int = typer.Option(
        8192,
        help="Tokens that go through the model at once, padding included; a longer one goes alone.",
    ),
    out: Path = typer.Option(
        None, metavar="FILE.jsonl", help="Write every record with its scores."
    ),
    compute: ComputeOptions = GROUP,
    ranks: LaunchOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Score pairs with a reward model (accuracy, margin), or give every answer of a file its score."""
    compute.check()

    def work(group: RankGroup) -> None:
        from headway.eval.reward import evaluate_reward

        loaded = compute.load(model, scores=True)
        report = evaluate_reward(loaded, source, batch_tokens=batch_tokens, out=out, group=group)
        if group.rank != 0:
            return
        if json:
            print_json(report.to_json())
        else:
            _print(report)

    on_ranks(context, compute, ranks, work)


def _print(report: RewardReport) -> None:
    # Those that this kind of data does not have are None.
    named = {
        "accuracy": report.accuracy,
        "margin": report.margin,
        "chosen": report.chosen,
        "rejected": report.rejected,
        "loss": report.loss,
        "mean": report.mean,
        "std": report.std,
        "lowest": report.lowest,
        "highest": report.highest,
        "best of each prompt": report.best,
    }
    rows = [(name, f"{value:.4f}") for name, value in named.items() if value is not None]
    plural = {
        "pair": "pairs",
        "conversation": "conversations",
        "generations": "prompts with generations",
    }[report.kind]
    typer.echo(f"{report.records:,} {plural} of {report.data}")
    print_table(("score", "value"), rows)

    # Bars are relative to the fullest bin.
    most = max(bin.count for bin in report.histogram)
    cells = [
        (f"{bin.low:.6g}", f"{bin.high:.6g}", bin.count, "#" * round(BAR_WIDTH * bin.count / most))
        for bin in report.histogram
    ]
    typer.echo("\nchosen - rejected:" if report.kind == "pair" else "\nscores:")
    print_table(("from", "to", "count", ""), cells)

    for reason, count in (
        ("cut to the longest length", report.truncated),
        ("left out because they cannot be read", report.bad),
    ):
        if count:
            typer.echo(f"{count} records were {reason}")
    if report.out is not None:
        typer.echo(f"scores: {report.out}")


VERBS = {"eval reward": reward}
