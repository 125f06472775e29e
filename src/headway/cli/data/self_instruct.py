"""`headway data self-instruct`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json, print_table


def command(
    endpoint: str = typer.Option(
        ..., help="Any OpenAI-compatible server, e.g. http://localhost:8000/v1; its key is read from OPENAI_API_KEY alone."
    ),
    model: str = typer.Option(..., help="The model's name on that server."),
    num: int = typer.Option(..., help="How many tasks to keep in all."),
    out: Path = typer.Option(..., help="Output folder: tasks.jsonl. Killed and started again, the command continues there."),
    seeds: Path = typer.Option(None, help="Seed tasks of your own: records with instruction, input, output. Without it: headway's."),
    language: str = typer.Option("en", help="Language of prompts and tasks: en or zh."),
    temperature: float = typer.Option(1.0, help="How freely the model writes."),
    max_tokens: int = typer.Option(3072, help="Longest answer in tokens; a task that is cut there is dropped."),
    requests_per_round: int = typer.Option(5, help="Requests under way at the same time."),
    per_request: int = typer.Option(20, help="Tasks asked for in one request."),
    rate_limit: float = typer.Option(0.0, help="At most so many requests a minute; 0: as fast as the server answers."),
    timeout: float = typer.Option(120.0, help="Seconds to wait for an answer before asking again."),
    max_retries: int = typer.Option(8, help="How often one request is tried again (429, 5xx, no answer, nonsense) before the run ends."),
    give_up_after: int = typer.Option(20, help="End after so many answers in a row without a task to keep."),
    seed: int = typer.Option(0, help="Seed of the choice of examples."),
    json: bool = JSON_FLAG,
) -> None:
    """Let a model write new instruction tasks from a few seed tasks; keep those that are readable, new and fit for text."""
    import os
    from dataclasses import asdict
    from typing import cast

    from headway.text.self_instruct.endpoint import KEY_VARIABLE, Endpoint
    from headway.text.self_instruct.generate import SelfInstruct, self_instruct
    from headway.text.self_instruct.tasks import Language

    key = os.environ.get(KEY_VARIABLE, "").strip() or None
    server = Endpoint(endpoint, model, key, temperature, max_tokens, timeout, max_retries, rate_limit)
    wanted = SelfInstruct(num, out, cast(Language, language), seeds, per_request, requests_per_round, seed, give_up_after)
    report = self_instruct(wanted, server)
    if json:
        print_json(asdict(report))
        return
    rows = [("kept", report.kept), *((f"dropped: {why}", n) for why, n in report.dropped.items())]
    rows += [(f"asked again: {why}", n) for why, n in report.retries.items()]
    print_table(("tasks", "count"), rows)
    spent = f"{report.prompt_tokens} prompt and {report.completion_tokens} answer tokens"
    typer.echo(f"{report.tasks}: {report.kept} tasks from {report.requests} requests, {spent}")
