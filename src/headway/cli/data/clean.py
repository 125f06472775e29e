"""`headway data clean`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json, print_table


def command(
    paths: list[str] = typer.Argument(
        ..., metavar="SRC... DST", help="Raw files, folders or globs, and last the output: .jsonl or .parquet."
    ),
    min_characters: int = typer.Option(10, help="Leave out shorter documents."),
    max_characters: int = typer.Option(None, help="Leave out longer documents."),
    min_letters: float = typer.Option(0.25, help="Least share of letters (Han characters are letters)."),
    max_digits: float = typer.Option(0.5, help="Largest share of digits."),
    max_signs: float = typer.Option(0.5, help="Largest share of punctuation and symbols."),
    max_controls: float = typer.Option(0.01, help="Largest share of control and replacement characters."),
    max_repeated_lines: float = typer.Option(0.5, help="Largest share of characters in lines that stood in the document before."),
    min_line_length: float = typer.Option(0.0, help="Least mean length of lines."),
    duplicates: str = typer.Option("near", help="keep all, leave out exact duplicates, or near ones too: keep, exact, near."),
    similarity: float = typer.Option(0.8, help="Share of common character runs from which two documents are near duplicates."),
    max_memory: str = typer.Option("4GB", help="Memory of the near-duplicate index; when it is full, older documents are forgotten."),
    text_key: str = typer.Option("text", help="Key that holds the text of a record."),
    template: str = typer.Option(None, help="Text made of several keys, e.g. '{title}\\n{content}'; written under the key text."),
    split: str = typer.Option("file", help="A .txt file is one document (file), or each line is one (line)."),
    simplified: bool = typer.Option(
        False, "--simplified", help="Convert Chinese text to simplified characters first (OpenCC: pip install 'headway[zh]')."
    ),
    seed: int = typer.Option(0, help="Seed of the near-duplicate hashes."),
    json: bool = JSON_FLAG,
) -> None:
    """Leave out bad and duplicate documents, and report what was left out and why."""
    from headway.errors import ConfigError
    from headway.text.clean import CleanRules, clean_files, simplifier
    from headway.text.sample import parse_bytes

    if len(paths) < 2:
        raise ConfigError("give at least one source and, last, the output: headway data clean SRC... DST.jsonl")
    if split not in ("file", "line"):
        raise ConfigError(f"--split is {split!r}; it must be 'file' or 'line'.")
    rules = CleanRules(
        min_characters, max_characters, min_letters, max_digits, max_signs, max_controls, max_repeated_lines, min_line_length,
        duplicates, similarity, seed, parse_bytes(max_memory, "--max-memory"),  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    convert = simplifier("--simplified") if simplified else None
    report = clean_files(paths[:-1], Path(paths[-1]), rules, text_key=text_key, template=template, split=split, convert=convert)
    if json:
        print_json({"out": paths[-1], **report.to_dict()})
        return
    share = 100 * report.kept_bytes / max(1, report.bytes)
    typer.echo(f"{paths[-1]}: kept {report.kept_documents} of {report.documents} documents, {share:.1f} % of the bytes\n")
    removed = [(why, n, report.removed_bytes[why], report.examples[why][0]) for why, n in report.removed_documents.most_common()]
    print_table(("left out because", "documents", "bytes", "first"), removed)
    if report.forgotten_documents:
        typer.echo(f"\nThe index was full: {report.forgotten_documents} documents were forgotten before the end. Give --max-memory more.")
