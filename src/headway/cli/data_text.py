"""`headway data clean | dedup | sample | self-instruct` and `headway download`: raw text before it
becomes tokens.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._options import (
    GROUP,
    JSON,
    TASKS_AT_A_TIME,
    ManyMachines,
    group,
    refuse_flags,
)
from headway.cli._output import print_json, print_table
from headway.errors import ConfigError
from headway.text.clean_rules import ONLY_DUPLICATES, CleanRules
from headway.text.document import Reading
from headway.text.self_instruct.settings import KEY_VARIABLE, Endpoint, SelfInstruct

if TYPE_CHECKING:
    from headway.runtime.executor.work import Placement


def clean(
    paths: list[str] = typer.Argument(
        ...,
        metavar="SRC... DST",
        help="Raw files, folders or globs, and last the output: .jsonl or .parquet.",
    ),
    rules: CleanRules = GROUP,
    reading: Reading = GROUP,
    many: ManyMachines = GROUP,
    workers: int = TASKS_AT_A_TIME,
    simplified: bool = typer.Option(
        False,
        "--simplified",
        help="Convert Chinese text to simplified characters first (needs OpenCC, the extra zh).",
    ),
    json: bool = JSON,
) -> None:
    """Drop bad and duplicate documents and report what was dropped and why. With --template, the text is written under the key text."""
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
    rules: CleanRules = group(ONLY_DUPLICATES, ("similarity", "seed", "max_memory_bytes")),
    reading: Reading = GROUP,
    many: ManyMachines = GROUP,
    workers: int = TASKS_AT_A_TIME,
    json: bool = JSON,
) -> None:
    """Drop duplicate and blank documents, and nothing else. The first of similar documents is kept."""
    if duplicates not in ("exact", "near"):
        raise ConfigError(f"--duplicates is {duplicates!r}; it must be exact or near.")
    rules = replace(rules, duplicates=duplicates)
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

    *sources, last = paths
    out = Path(last)
    if placement is not None:
        report = clean_files_on(sources, out, rules, placement, reading, simplified=simplified)
    else:
        convert = None
        if simplified:
            convert = simplifier("--simplified")
        report = clean_files(sources, out, rules, convert=convert, **asdict(reading))

    if json:
        print_json({"out": last, **report.to_dict()})
        return

    # Empty input has no bytes.
    share = 100 * report.kept_bytes / max(1, report.bytes)
    typer.echo(
        f"{last}: kept {report.kept_documents} of {report.documents} documents, {share:.1f} "
        "% of the bytes\n"
    )
    removed = [
        (reason, number, report.removed_bytes[reason], report.examples[reason][0])
        for reason, number in report.removed_documents.most_common()
    ]
    print_table(("reason", "documents", "bytes", "first"), removed)
    if report.forgotten_documents:
        typer.echo(
            f"\nThe index was full: {report.forgotten_documents} documents were forgotten before "
            "the end. Raise --max-memory, or use --on "
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
    shares = [SourceShare.parse(share) for share in inputs]
    total = parse_bytes(size, "--bytes")
    if placement is None:
        taken = draw(shares, total, out, seed=seed, **asdict(reading))
    else:
        taken = sample_on(shares, total, out, placement, reading, seed=seed)

    documents = sum(source.documents for source in taken)
    num_bytes = sum(source.bytes for source in taken)
    if json:
        print_json(
            {
                "out": out,
                "documents": documents,
                "bytes": num_bytes,
                "sources": [vars(source) for source in taken],
            }
        )
        return

    rows = [
        (
            source.path,
            source.documents,
            source.bytes,
            source.available_documents,
            source.available_bytes,
        )
        for source in taken
    ]
    print_table(("source", "documents taken", "bytes taken", "of documents", "of bytes"), rows)
    typer.echo(f"{out}: {documents} documents, {num_bytes} bytes")


def self_instruct(
    endpoint: Endpoint = GROUP,
    wanted: SelfInstruct = GROUP,
    json: bool = JSON,
) -> None:
    """Let a model write new instruction tasks from a few seed tasks; keep the readable and new ones that need no images or files."""
    from headway.text.self_instruct.generate import self_instruct as generate_tasks

    # From the environment: options are seen by everybody who lists the processes of a machine.
    key = os.environ.get(KEY_VARIABLE, "").strip() or None
    report = generate_tasks(wanted, replace(endpoint, key=key))
    if json:
        print_json(asdict(report))
        return

    rows = [("kept", report.kept)]
    rows += [(f"dropped: {reason}", number) for reason, number in report.dropped.items()]
    rows += [(f"retried: {reason}", number) for reason, number in report.retries.items()]
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
