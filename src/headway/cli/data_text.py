"""`headway data clean | dedup | sample | self-instruct` and `headway download`: raw text before it becomes tokens."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from headway.cli._options import (
    GROUP,
    JSON,
    TASKS_AT_A_TIME,
    ManyMachines,
    option_of,
    refuse_flags,
)
from headway.cli._output import print_json, print_table
from headway.errors import ConfigError
from headway.text.clean_rules import ONLY_DUPLICATES, CleanRules
from headway.text.document import Reading

if TYPE_CHECKING:
    from headway.runtime.executor.work import Placement


MAX_MEMORY = typer.Option(
    "4GB",
    help="Memory of the near-duplicate index; when it is full, the oldest documents are forgotten. With --on: an upper bound "
    "for each task, and nothing is forgotten.",
)


def clean(
    paths: list[str] = typer.Argument(
        ...,
        metavar="SRC... DST",
        help="Raw files, folders or globs, and last the output: .jsonl or .parquet.",
    ),
    rules: CleanRules = GROUP,
    max_memory: str = MAX_MEMORY,
    reading: Reading = GROUP,
    many: ManyMachines = GROUP,
    workers: int = TASKS_AT_A_TIME,
    simplified: bool = typer.Option(
        False,
        "--simplified",
        help="Convert Chinese text to simplified characters first (needs OpenCC, the extra zh).",
    ),
    seed: int = typer.Option(0, help="Seed of the near-duplicate hashes."),
    json: bool = JSON,
) -> None:
    """Drop bad and duplicate documents and report what was dropped and why. With --template, the text is written under the key text."""
    from headway.text.sample import parse_bytes

    memory = parse_bytes(max_memory, "--max-memory")
    rules = replace(rules, seed=seed, max_memory_bytes=memory)
    _clean(paths, rules, reading, _placement(many, workers), simplified, json)


def dedup(
    paths: list[str] = typer.Argument(
        ...,
        metavar="SRC... DST",
        help="Raw files, folders or globs, and last the output: .jsonl or .parquet.",
    ),
    duplicates: str = typer.Option(
        "near", help="exact: drop exact duplicates; near: drop near ones too."
    ),
    similarity: float = option_of(CleanRules, "similarity"),
    max_memory: str = MAX_MEMORY,
    reading: Reading = GROUP,
    many: ManyMachines = GROUP,
    workers: int = TASKS_AT_A_TIME,
    seed: int = typer.Option(0, help="Seed of the near-duplicate hashes."),
    json: bool = JSON,
) -> None:
    """Drop duplicate and blank documents, and nothing else. The first of similar documents is kept."""
    from headway.text.sample import parse_bytes

    if duplicates not in ("exact", "near"):
        raise ConfigError(f"--duplicates is {duplicates!r}; it must be exact or near.")
    found = {"duplicates": duplicates, "similarity": similarity, "seed": seed}
    rules = replace(
        ONLY_DUPLICATES, **found, max_memory_bytes=parse_bytes(max_memory, "--max-memory")
    )
    _clean(paths, rules, reading, _placement(many, workers), False, json)


def _placement(many: ManyMachines, workers: int | None) -> Placement | None:
    placement = many.placement(workers)
    if placement is None:
        refuse_flags("a run without --on", {"--workers": workers})
    return placement


def _clean(
    paths: list[str],
    rules: CleanRules,
    reading: Reading,
    placement: Placement | None,
    simplified: bool,
    json: bool,
) -> None:
    """Clean files and print what was dropped."""
    from headway.text.clean import clean_files, simplifier
    from headway.text.tasks.clean import clean_files_on

    if len(paths) < 2:
        raise ConfigError(
            "give at least one source and, last, the output: headway data clean SRC... DST.jsonl"
        )
    out = Path(paths[-1])
    if placement is None:
        report = clean_files(
            paths[:-1],
            out,
            rules,
            convert=simplifier("--simplified") if simplified else None,
            **asdict(reading),
        )
    else:
        report = clean_files_on(paths[:-1], out, rules, placement, reading, simplified=simplified)
    if json:
        print_json({"out": paths[-1], **report.to_dict()})
        return
    share = 100 * report.kept_bytes / max(1, report.bytes)
    typer.echo(
        f"{paths[-1]}: kept {report.kept_documents} of {report.documents} documents, {share:.1f} % of the bytes\n"
    )
    removed = [
        (why, n, report.removed_bytes[why], report.examples[why][0])
        for why, n in report.removed_documents.most_common()
    ]
    print_table(("reason", "documents", "bytes", "first"), removed)
    if report.forgotten_documents:
        typer.echo(
            f"\nThe index was full: {report.forgotten_documents} documents were forgotten before the end. Raise --max-memory, or use --on "
            "local, which forgets nothing."
        )


def sample(
    inputs: list[str] = typer.Option(
        ...,
        "--input",
        help="PATH@SHARE, e.g. a.jsonl@0.7; may be repeated. Without @SHARE, all shares are equal.",
    ),
    size: str = typer.Option(..., "--bytes", help="Total size of the sample, e.g. 100MB."),
    out: Path = typer.Option(..., help="The output: .jsonl (also .gz, .zst) or .parquet."),
    seed: int = typer.Option(0, help="Seed of the sample."),
    reading: Reading = GROUP,
    many: ManyMachines = GROUP,
    workers: int = TASKS_AT_A_TIME,
    json: bool = JSON,
) -> None:
    """Draw a random sample of several sources in given shares, in one pass."""
    from headway.text.sample import SourceShare, parse_bytes
    from headway.text.sample import sample as draw
    from headway.text.tasks.sample import sample_on

    placement = _placement(many, workers)
    shares, total = [SourceShare.parse(share) for share in inputs], parse_bytes(size, "--bytes")
    if placement is None:
        taken = draw(shares, total, out, seed=seed, **asdict(reading))
    else:
        taken = sample_on(shares, total, out, placement, reading, seed=seed)
    documents, num_bytes = sum(t.documents for t in taken), sum(t.bytes for t in taken)
    if json:
        print_json(
            {
                "out": out,
                "documents": documents,
                "bytes": num_bytes,
                "sources": [vars(t) for t in taken],
            }
        )
        return
    rows = [(t.path, t.documents, t.bytes, t.available_documents, t.available_bytes) for t in taken]
    print_table(("source", "documents taken", "bytes taken", "of documents", "of bytes"), rows)
    typer.echo(f"{out}: {documents} documents, {num_bytes} bytes")


def self_instruct(
    endpoint: str = typer.Option(
        ...,
        help="An OpenAI-compatible server, e.g. http://localhost:8000/v1. The API key is read from OPENAI_API_KEY only.",
    ),
    model: str = typer.Option(..., help="The model's name on that server."),
    num: int = typer.Option(..., help="Total number of tasks to keep."),
    out: Path = typer.Option(
        ..., help="Output folder: tasks.jsonl. Run again after a kill, the command resumes there."
    ),
    seeds: Path = typer.Option(
        None,
        help="Your own seed tasks: records with instruction, input, output. Default: headway's.",
    ),
    language: str = typer.Option("en", help="Language of prompts and tasks: en or zh."),
    temperature: float = typer.Option(1.0, help="Sampling temperature."),
    max_tokens: int = typer.Option(
        3072, help="Maximum tokens of an answer; a task cut off there is dropped."
    ),
    requests_per_round: int = typer.Option(5, help="Concurrent requests."),
    per_request: int = typer.Option(20, help="Tasks per request."),
    rate_limit: float = typer.Option(0.0, help="Maximum requests per minute; 0: no limit."),
    timeout: float = typer.Option(120.0, help="Seconds to wait for an answer before a retry."),
    max_retries: int = typer.Option(
        8, help="Retries of one request (429, 5xx, no answer, invalid answer) before the run ends."
    ),
    give_up_after: int = typer.Option(
        20, help="End after this many answers in a row without a task to keep."
    ),
    seed: int = typer.Option(0, help="Seed of the choice of examples."),
    json: bool = JSON,
) -> None:
    """Let a model write new instruction tasks from a few seed tasks; keep the readable and new ones that need no images or files."""
    from headway.text.self_instruct.endpoint import KEY_VARIABLE, Endpoint
    from headway.text.self_instruct.generate import SelfInstruct
    from headway.text.self_instruct.generate import self_instruct as generate_tasks
    from headway.text.self_instruct.tasks import Language

    key = os.environ.get(KEY_VARIABLE, "").strip() or None
    server = Endpoint(
        endpoint, model, key, temperature, max_tokens, timeout, max_retries, rate_limit
    )
    settings = SelfInstruct(
        num,
        out,
        cast(Language, language),
        seeds,
        per_request,
        requests_per_round,
        seed,
        give_up_after,
    )
    report = generate_tasks(settings, server)
    if json:
        print_json(asdict(report))
        return
    rows = [("kept", report.kept), *((f"dropped: {why}", n) for why, n in report.dropped.items())]
    rows += [(f"retried: {why}", n) for why, n in report.retries.items()]
    print_table(("tasks", "count"), rows)
    tokens = f"{report.prompt_tokens} prompt and {report.completion_tokens} answer tokens"
    typer.echo(f"{report.tasks}: {report.kept} tasks from {report.requests} requests, {tokens}")


def download(
    repo_id: str = typer.Argument(
        ...,
        metavar="ID",
        help="ORGANISATION/NAME on the Hugging Face hub (or the mirror in HF_ENDPOINT).",
    ),
    dataset: bool = typer.Option(False, "--dataset", help="A dataset; otherwise a model."),
    include: list[str] = typer.Option(
        [], help="Only matching files, e.g. '*.safetensors'; may be repeated."
    ),
    revision: str = typer.Option(None, help="A branch, tag or commit; default: main."),
    to: Path = typer.Option(
        None, help="Put the files into this folder; otherwise into the shared cache."
    ),
    cache_dir: Path = typer.Option(
        None, help="The cache to use instead of the hub's (HF_HOME); in a recipe: data.cache_dir."
    ),
    json: bool = JSON,
) -> None:
    """Fetch a model or a dataset. Run again, it resumes inside the interrupted file."""
    from headway.text.hub import fetch

    folder = fetch(
        repo_id, dataset=dataset, include=include, revision=revision, to=to, cache_dir=cache_dir
    )
    if json:
        print_json({"id": repo_id, "path": folder})
    else:
        typer.echo(str(folder))


VERBS = {
    "data clean": clean,
    "data dedup": dedup,
    "data sample": sample,
    "data self-instruct": self_instruct,
    "download": download,
}
