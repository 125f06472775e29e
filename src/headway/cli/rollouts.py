"""`headway rollouts`: what a run has sampled, and what it earned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._options import JSON
from headway.cli._output import print_json, print_table, readable
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.train.rollout_comparison import DrawnToken, FirstDifference, RolloutComparison
    from headway.train.rollout_report import ReadAnswer, RolloutFigures, RolloutReport


def rollouts(
    run: Path = typer.Argument(..., metavar="RUN", help="The folder of a run with rollouts."),
    step: int | None = typer.Option(
        None, min=1, help="The answers that this update trained on, prompt by prompt."
    ),
    best: bool = typer.Option(False, "--best", help="The answers with the highest rewards first."),
    worst: bool = typer.Option(False, "--worst", help="The answers with the lowest rewards first."),
    prompt: int | None = typer.Option(
        None, min=0, help="The answers to the prompt of this number, counted from 0."
    ),
    limit: int | None = typer.Option(
        None, min=1, help="At most this many answers (10) or batches (20, the newest)."
    ),
    against: Path | None = typer.Option(
        None,
        metavar="OTHER",
        help="Another run of the same recipe: the first token that both drew differently.",
    ),
    json: bool = JSON,
) -> None:
    """What a run with rollouts has sampled: a line for each batch, or answers beside what they earned.

    Works while the run is alive, and changes nothing.
    """
    from headway.train.rollout_report import Order, RolloutChoice, read_rollouts

    if against is not None:
        for name, value in {
            "--step": step,
            "--best": best or None,
            "--worst": worst or None,
            "--prompt": prompt,
            "--limit": limit,
        }.items():
            if value is not None:
                raise ConfigError(f"--against and {name} are both given; give one of them.")
        _compare(run, against, json)
        return
    if best and worst:
        raise ConfigError("--best and --worst are both given; give one of them.")
    order: Order = "sampled"
    if best:
        order = "best"
    elif worst:
        order = "worst"
    report = read_rollouts(run, RolloutChoice(step, prompt, order, limit))
    if json:
        print_json(report.to_json())
    elif report.answers:
        _print_answers(report)
    else:
        _print_batches(report)


def _compare(run: Path, other: Path, json: bool) -> None:
    from headway.train.rollout_comparison import compare_rollouts

    comparison = compare_rollouts(run, other)
    if json:
        print_json(comparison.to_json())
    else:
        _print_comparison(comparison)


def _print_comparison(comparison: RolloutComparison) -> None:
    """What differs first, then how near the runs were before it."""
    first = comparison.first
    counted = f"{comparison.rollouts} rollouts, {comparison.tokens:,} tokens"
    nearness = f"log-probabilities differ by {comparison.logprob_difference:.2g} at most"
    if first is None:
        typer.echo(f"equal: {counted}; {nearness}")
    else:
        _print_difference(comparison, first)
        typer.echo(f"equal before it: {counted}; {nearness}")

    worst = comparison.worst_metric
    if not comparison.steps:
        typer.echo("metrics: no update to compare")
    elif worst is None:
        typer.echo(f"metrics: equal in {comparison.steps} updates")
    else:
        typer.echo(
            f"metrics: {comparison.steps} updates; the worst is {worst.name} at step {worst.step}: "
            f"{_precise(worst.value)} and {_precise(worst.other)}, difference {worst.difference:.2g}"
        )
    if comparison.trained_otherwise_from is not None:
        typer.echo(
            "settings of training (objective, reward, optim, ...) differ from step "
            f"{comparison.trained_otherwise_from} on"
        )
    for count, path in (
        (comparison.more_rollouts, comparison.run),
        (comparison.more_rollouts_of_other, comparison.other),
    ):
        if count and first is None:
            typer.echo(f"{path} has {count} more rollouts")


def _print_difference(comparison: RolloutComparison, first: FirstDifference) -> None:
    stage = "" if first.stage is None else f"{first.stage}, "
    where = f"{stage}step {_steps(first)} (rollout {first.batch})"
    if first.drawn is None or first.other_drawn is None:
        typer.echo(f"first difference: {where}: other prompts, or other settings of sampling")
        return
    typer.echo(
        f"first difference: {where}, prompt {first.prompt}, sample {first.sample}, "
        f"position {first.position}"
    )
    if first.question:
        typer.echo(readable(first.question))
    for path, drawn in ((comparison.run, first.drawn), (comparison.other, first.other_drawn)):
        typer.echo(f"\n[{path}: {_draw(drawn)}]")
        typer.echo(readable(drawn.text))
    typer.echo()
    if first.gap is not None:
        typer.echo(f"gap of the two log-probabilities: {first.gap:.4g}")
    typer.echo(f"{first.answers_differing} of {first.answers} answers of this rollout differ")


def _draw(drawn: DrawnToken) -> str:
    weights = f"weights after {drawn.version} updates"
    if drawn.id is None or drawn.logprob is None:
        return f"had ended; {weights}"
    return f"id {drawn.id}, log-probability {drawn.logprob:.4f}; {weights}"


def _precise(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.9g}"


def _print_batches(report: RolloutReport) -> None:
    columns = ["step", "prompts", "answers", "reward", "low", "high"]
    columns += ["no signal", "tokens", "cut", "tok/s", "time"]
    is_staged = any(figures.stage is not None for figures in report.batches)
    rows: list[list[str]] = []
    for figures in report.batches:
        row = [
            _steps(figures),
            str(figures.prompts),
            str(figures.answers),
            _number(figures.reward),
            _number(figures.lowest),
            _number(figures.highest),
            _share(figures.without_signal),
            f"{figures.tokens:.0f}",
            _share(figures.cut),
            _rate(figures.tokens_per_second),
            f"{figures.seconds + (figures.reward_seconds or 0):.1f} s",
        ]
        if is_staged:
            row.insert(0, figures.stage or "")
        rows.append(row)
    if is_staged:
        columns.insert(0, "stage")
    print_table(columns, rows)

    failed = sum(figures.failed for figures in report.batches)
    if failed:
        typer.echo(f"\na reward failed on {failed} of these answers, which get its default")
    if report.left_out:
        typer.echo(f"\n{report.left_out} earlier batches are left out (--limit)")
    typer.echo(f"\nanswers: headway rollouts {report.run} --best | --worst | --step N | --prompt N")


def _print_answers(report: RolloutReport) -> None:
    question: tuple[str | None, int, int] | None = None
    for answer in report.answers:
        key = (answer.stage, answer.batch, answer.prompt)
        if key != question:
            question = key
            stage = "" if answer.stage is None else f"{answer.stage}, "
            typer.echo(f"\n— prompt {answer.prompt}, {stage}step {_steps(answer)}")
            if answer.question:
                typer.echo(readable(answer.question))
        typer.echo(f"\n[{_facts(answer)}]")
        typer.echo(readable(answer.text))
        for problem in answer.problems:
            typer.echo(f"  failed: {problem}")
    if report.left_out:
        typer.echo(f"\n{report.left_out} more answers match (--limit)")


def _facts(answer: ReadAnswer) -> str:
    """`reward 1.2: math 1, format 0.2; eos after 31 tokens; weights of update 4`"""
    reward = "no reward yet"
    if answer.reward is not None:
        reward = f"reward {_number(answer.reward)}"
    if len(answer.parts) > 1:
        parts = ", ".join(f"{name} {_number(value)}" for name, value in answer.parts.items())
        reward += f": {parts}"
    ending = f"{answer.finished} after {answer.tokens} tokens"
    return f"{reward}; {ending}; weights after {answer.version} updates"


def _steps(entry: RolloutFigures | ReadAnswer | FirstDifference) -> str:
    if entry.first_step == entry.last_step:
        return str(entry.first_step)
    return f"{entry.first_step}-{entry.last_step}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


VERBS = {"rollouts": rollouts}
