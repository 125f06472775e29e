"""`headway eval reward`: what a reward model says of pairs, of conversations and of several answers to a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._options import (
    GROUP,
    JSON,
    MODEL,
    RECORD_KEYS,
    TEMPLATE_FLAGS,
    ComputeOptions,
    RankOptions,
    on_ranks,
)
from headway.cli._output import print_json, print_table

if TYPE_CHECKING:
    from headway.eval.reward import RewardReport
    from headway.eval.reward_data import RewardSource
    from headway.parallel.collectives import RankGroup

BAR = 40


@dataclass(frozen=True)
class RewardOptions:
    """What is scored, and how it is read."""

    data: str = typer.Option(
        ...,
        "--data",
        "--input",
        help="Pairs, conversations or generations: .jsonl (or any records), or a store of preference pairs.",
    )
    chat_template: str | None = typer.Option(
        None,
        *TEMPLATE_FLAGS,
        help="Chat template of records: a name, tokenizer or a .jinja file; default: the model's own, else chatml.",
    )
    keys: str | None = RECORD_KEYS
    max_length: int | None = typer.Option(
        None,
        help="Tokens of a conversation; longer ones are cut; default: the model's max_seq_len.",
    )
    limit: int | None = typer.Option(None, min=1, help="Only the first records, this many.")
    drop_bad: bool = typer.Option(
        False,
        "--drop-bad",
        help="Leave out and count records that cannot be read instead of refusing them.",
    )
    batch_tokens: int = typer.Option(
        8192,
        help="Tokens that go through the model at once, padding included; a longer one goes alone.",
    )

    def source(self) -> RewardSource:
        """The options as one value."""
        from headway.eval.reward_data import RewardSource
        from headway.text.record_keys import KeyMap

        return RewardSource(
            self.data,
            self.chat_template,
            KeyMap.parse(self.keys),
            self.max_length,
            self.limit,
            self.drop_bad,
        )


def reward(
    context: typer.Context,
    model: Path = MODEL,
    options: RewardOptions = GROUP,
    out: Path = typer.Option(
        None, metavar="FILE.jsonl", help="Write every record with its scores."
    ),
    compute: ComputeOptions = GROUP,
    ranks: RankOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Score pairs with a reward model (accuracy, margin), or give every answer of a file its score."""
    source = options.source()
    compute.check()

    def work(group: RankGroup) -> None:
        from headway.eval.reward import evaluate_reward

        loaded = compute.load(model, scores=True)
        report = evaluate_reward(
            loaded, source, batch_tokens=options.batch_tokens, out=out, group=group
        )
        if group.rank == 0:
            print_json(report.to_json()) if json else _print(report)

    on_ranks(context, compute, ranks, work)


def _print(report: RewardReport) -> None:
    named = {
        "accuracy": report.accuracy, "margin": report.margin, "chosen": report.chosen, "rejected": report.rejected, "loss": report.loss,
        "mean": report.mean, "std": report.std, "lowest": report.lowest, "highest": report.highest, "best of each prompt": report.best,
    }  # fmt: skip
    rows = [(name, f"{value:.4f}") for name, value in named.items() if value is not None]
    many = {
        "pair": "pairs",
        "conversation": "conversations",
        "generations": "prompts with generations",
    }[report.kind]
    typer.echo(f"{report.records:,} {many} of {report.data}")
    print_table(("score", "value"), rows)
    most = max(one.count for one in report.histogram)
    cells = [
        (f"{one.low:.6g}", f"{one.high:.6g}", one.count, "#" * round(BAR * one.count / most))
        for one in report.histogram
    ]
    typer.echo("\nchosen - rejected:" if report.kind == "pair" else "\nscores:")
    print_table(("from", "to", "count", ""), cells)
    for what, count in (
        ("cut to the longest length", report.truncated),
        ("left out because they cannot be read", report.bad),
    ):
        if count:
            typer.echo(f"{count} records were {what}")
    if report.out is not None:
        typer.echo(f"scores: {report.out}")


VERBS = {"eval reward": reward}
