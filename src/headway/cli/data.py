"""`headway data`: raw records become token stores, which are inspected, merged, packed and
converted. `data prepare` makes everything that a recipe reads, before it trains.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import typer

from headway.cli._options import (
    GROUP,
    INPUTS,
    JSON,
    MORE_INPUTS,
    RECIPE,
    RECORD_KEYS,
    ManyMachines,
    group,
    read_recipe,
    refuse_flags,
    refuse_options,
)
from headway.cli._output import print_checked, print_document, print_json, print_table
from headway.cli.data_media import MultimodalChecks, validate_multimodal
from headway.config.options import TEMPLATE_FLAGS
from headway.errors import ConfigError
from headway.prepare.build_options import BuildOptions
from headway.prepare.pack_options import PackOptions
from headway.store.convert_options import ConvertOptions

BAR_WIDTH = 40
"""Characters of the longest bar of a histogram."""
TEMPLATES = (
    "chatml, llama3, qwen, alpaca, internlm, internlm_alpaca, zero2all, tokenizer (the "
    "tokenizer's own) or a .jinja file"
)
TEMPLATE_DEFAULT = "default: the tokenizer's own, else chatml."
TEXT_ONLY = ("text_key", "split", "append_eos", "bos", "clean", "shard")
"""Options of `data tokenize` for plain text."""
RECORDS_ONLY = ("max_length", "valid_fraction", "drop_bad", "keys", "seed")
"""Those for all other kinds of records."""


def tokenize(
    context: typer.Context,
    more: list[str] = MORE_INPUTS,
    inputs: list[str] = INPUTS,
    tokenizer: Path = typer.Option(
        ..., help="A tokenizer folder, a tokenizer.json or a sentencepiece .model."
    ),
    out: Path = typer.Option(..., help="The folder of the new token store."),
    format: str | None = typer.Option(
        None,
        help="Your module or file that reads the input, e.g. ./my_format.py; default: by suffix.",
    ),
    template: str = typer.Option(
        None,
        *TEMPLATE_FLAGS,
        help="Text: several keys, e.g. '{title}\\n{content}'. All but text: "
        + TEMPLATES
        + "; "
        + TEMPLATE_DEFAULT,
    ),
    split: str = typer.Option(
        None,
        help="Text: a .txt file is one document (file), or each line is one (line, the default to "
        "internlm).",
    ),
    options: BuildOptions = GROUP,
    type_name: str = typer.Option(
        None, "--type", help="To internlm: the data type (folder); default: en."
    ),
    begin_id: int = typer.Option(
        None, help="To zero2all: the begin token; default: the token all documents start with."
    ),
    many: ManyMachines = GROUP,
    json: bool = JSON,
) -> None:
    """Turn raw text, conversations, preference pairs or labelled answers into a token store. Run again after a kill, it resumes."""
    from headway.prepare.build import BuildReport, build_converted, build_store
    from headway.records.base import is_user_kind, record_kind, tokenized_kinds
    from headway.runtime.storage import check_writable
    from headway.tokenizer.chat import default_template
    from headway.tokenizer.load import load_tokenizer

    kind = options.kind
    if not is_user_kind(kind) and kind not in tokenized_kinds():
        raise ConfigError(
            f"--kind is {kind!r}; it must be one of {', '.join(tokenized_kinds())}. Media: "
            "`headway data prepare RECIPE --workers N`."
        )
    records = record_kind(kind)
    check_writable(out)

    # Options that have no effect for this kind or format are refused, not ignored.
    refuse_options(f"--kind {kind}", context, RECORDS_ONLY if records.is_text else TEXT_ONLY)
    if not records.may_drop_long:
        refuse_options(f"--kind {kind}", context, ("too_long",))
    if options.to != "internlm":
        refuse_options(f"--to {options.to}", context, ("type_name",))
    if options.to != "zero2all":
        refuse_options(f"--to {options.to}", context, ("begin_id",))

    # --template is a text template of plain text, and a chat template of all other records. For
    # those the default of --type is set here, so that its folder is checked before anything is
    # tokenized. --begin-id is for text: zero2all's format for records has no begin token.
    if records.is_text:
        options = replace(
            options,
            layout=ConvertOptions(type=type_name, begin_id=begin_id),
            text_template=template,
        )
    else:
        options = replace(
            options,
            layout=ConvertOptions(type=type_name or "en"),
            chat_template=template or default_template(load_tokenizer(tokenizer)),
        )
    options = replace(
        options, split=_split(split, options.to), placement=many.placement(options.workers)
    )

    # Plain text in another format is written as a store first, which is converted.
    build = build_store
    if records.is_text and options.to != "headway":
        build = build_converted
    report = build(_inputs([*inputs, *(more or [])], format), tokenizer, out, options)

    # Stores and conversions have reports of their own.
    if not json:
        typer.echo(report.describe())
    elif isinstance(report, BuildReport):
        print_json(report.fields())
    else:
        print_json(vars(report))


def _inputs(paths: list[str], format: str | None) -> list[str]:
    """The files to read; those of the user's own format as JSONL."""
    from headway.prepare.own_format import read_own_format

    if format is None:
        return paths
    return [str(read_own_format(path, format)) for path in paths]


def _split(split: str | None, to: str) -> Literal["file", "line"]:
    """How .txt files are split; InternLM's own tool makes each line a document."""
    if not split:
        return "line" if to == "internlm" else "file"
    if split not in ("file", "line"):
        raise ConfigError(f"--split is {split!r}; it must be 'file' or 'line'.")
    return split


def validate(
    paths: list[str] = typer.Argument(..., metavar="PATH...", help="Raw files, folders or globs."),
    kind: str = typer.Option(
        "text",
        help="What the records should be: text, chat, preference, unpaired, multimodal or prompt.",
    ),
    tokenizer: Path = typer.Option(
        None, help="Count lengths in tokens, chat and preference records with the template applied."
    ),
    template: str = typer.Option(
        None,
        *TEMPLATE_FLAGS,
        help="Chat template: " + TEMPLATES + "; with --tokenizer " + TEMPLATE_DEFAULT,
    ),
    keys: str = RECORD_KEYS,
    text_key: str = typer.Option(
        None, help="Text: key that holds the text of a record; default: text."
    ),
    text_template: str = typer.Option(
        None, help="Text: build it from several keys, e.g. '{title}\\n{content}'."
    ),
    schema: str = typer.Option(
        None, help="Multimodal: answers must follow this JSON schema: a file, or purrsight_v3."
    ),
    media_dir: Path = typer.Option(
        None,
        help="Multimodal: relative paths begin here; default: the folder of the record's file.",
    ),
    json: bool = JSON,
) -> None:
    """Read everything and report every bad record with file and line; exit code 1 if there is one."""
    from headway.prepare.validate import ValidateOptions
    from headway.prepare.validate import validate as validate_records
    from headway.records.base import is_user_kind, record_kind, unread_counts, validated_kinds
    from headway.text.document import TextOf
    from headway.text.record_keys import KeyMap
    from headway.tokenizer.load import load_tokenizer

    if not is_user_kind(kind) and kind not in validated_kinds():
        raise ConfigError(f"--kind is {kind!r}; it must be one of {', '.join(validated_kinds())}.")
    records = record_kind(kind)
    # Media have a report of their own: files are decoded, and nothing is tokenized.
    if records.holds_media:
        other = {
            "--tokenizer": tokenizer,
            "--template": template,
            "--text-key": text_key,
            "--text-template": text_template,
        }
        refuse_flags(f"--kind {kind}", other)
        validate_multimodal(paths, MultimodalChecks(schema, media_dir, KeyMap.parse(keys)), json)
        return
    refuse_flags(f"--kind {kind}", {"--schema": schema, "--media-dir": media_dir})
    if records.is_text:
        refuse_flags(f"--kind {kind}", {"--template": template, "--keys": keys})
    else:
        text_flags = {"--text-key": text_key, "--text-template": text_template}
        refuse_flags(f"--kind {kind}", text_flags)

    loaded = None
    if tokenizer:
        loaded = load_tokenizer(tokenizer)
    options = ValidateOptions(
        kind, loaded, template, KeyMap.parse(keys), TextOf(text_key or "text", text_template)
    )
    report = validate_records(paths, options)
    bins = report.histogram()

    if json:
        result = {
            name: getattr(report, name)
            for name in ("kind", "files", "records", "good", "unit", "total", "longest")
        }
        result["unread"] = unread_counts(report.unread)
        result["bad"] = [asdict(problem) for problem in report.bad]
        result["histogram"] = [asdict(bin) for bin in bins]
        print_json(result)
    else:
        print_checked(report, num_bad=len(report.bad))
        if report.good:
            typer.echo(
                f"{report.total} {report.unit}, {report.total / report.good:.0f} on average, "
                f"{report.longest} at most"
            )
        most = max((bin.records for bin in bins), default=1)
        for bin in bins:
            bar = "█" * round(BAR_WIDTH * bin.records / most)
            if not bar and bin.records:
                # Few records differ from none.
                bar = "▏"
            typer.echo(f"{bin.low:>9} to {bin.high:>9} {report.unit}  {bar} {bin.records}")

    if report.bad:
        raise typer.Exit(1)


def inspect(
    path: str = typer.Argument(
        ..., metavar="PATH", help="A token store of any format, or raw files."
    ),
    tokenizer: Path = typer.Option(
        None, help="Show samples as text, with the loss mask in colour; count raw text in tokens."
    ),
    samples: int = typer.Option(3, min=0, help="Number of samples to show."),
    source: ConvertOptions = group(only=("kind",)),
    json: bool = JSON,
) -> None:
    """Describe what a path holds: its format, the number of documents and tokens, and some samples."""
    from headway.prepare.inspect import inspect as inspect_path
    from headway.prepare.inspect import preview_documents
    from headway.tokenizer.load import load_tokenizer

    loaded = None
    if tokenizer:
        loaded = load_tokenizer(tokenizer)
    description = inspect_path(path, source.kind, loaded)
    if json:
        print_json(asdict(description))
        return

    rows = [
        (name, value)
        for name, value in asdict(description).items()
        if name not in ("types", "files") and value is not None
    ]
    print_table(("", ""), [*rows, ("files", len(description.files))], title=path)

    if description.types:
        print_table(
            ("type", "documents", "tokens"),
            [
                (name or "(none)", counts.documents, counts.tokens)
                for name, counts in description.types.items()
            ],
        )
    # Samples of raw files would be the files themselves.
    if loaded is not None and description.kind != "raw" and samples:
        for sample in preview_documents(path, loaded, samples, kind=source.kind):
            print_document(sample, bool(description.masked))


def merge(
    stores: list[Path] = typer.Argument(
        ...,
        metavar="STORE...",
        help="Token stores, or all the shards of one `data tokenize --shard`.",
    ),
    out: Path = typer.Option(..., help="The folder of the new token store."),
    json: bool = JSON,
) -> None:
    """Join token stores into one. The shards of one `data tokenize` give the same store as an undivided run."""
    from headway.store.merge import merge as merge_stores

    store = merge_stores(stores, out)
    if json:
        print_json({"out": out, "documents": store.num_documents, "tokens": store.num_tokens})
    else:
        typer.echo(f"{out}: {store.num_tokens} tokens in {store.num_documents} documents")


def pack(
    source: Path = typer.Argument(..., metavar="SRC", help="A token store of any format."),
    out: Path = typer.Argument(..., metavar="DST", help="The folder of the new store of packs."),
    options: PackOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Pack documents into packs of one length before training; each pack records the documents inside it."""
    from headway.prepare.pack import pack as pack_store

    report = pack_store(source, out, options)
    if json:
        print_json({"out": out, **asdict(report), "utilisation": report.utilisation})
    else:
        typer.echo(f"{out}: {report.describe()}")


def convert(
    source: Path = typer.Argument(
        ..., metavar="SRC", help="A token store: headway, InternLM, zero2all, MDS or Megatron."
    ),
    out: Path = typer.Argument(..., metavar="DST", help="The folder of the new store."),
    to: str = typer.Option("headway", help="headway, internlm, zero2all or mds."),
    tokenizer: Path = typer.Option(
        None,
        help="The tokenizer that made the ids: they are checked against it, and a headway store "
        "records its fingerprint.",
    ),
    options: ConvertOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Write a token store in another format."""
    from headway.store.convert import convert as convert_store
    from headway.tokenizer.load import load_tokenizer

    loaded = None
    if tokenizer:
        loaded = load_tokenizer(tokenizer)
    report = convert_store(source, out, to, options, loaded)
    if json:
        print_json(vars(report))
    else:
        typer.echo(report.describe())


def prepare(
    arguments: list[str] = RECIPE,
    workers: int = typer.Option(
        None,
        min=1,
        help="Processes that tokenize; default: one per core. The result does not depend on them.",
    ),
    json: bool = JSON,
) -> None:
    """Download, tokenize and encode the data of a recipe into its cache, where training finds it; media pass their encoders here, too."""
    from headway.runtime.log import start_logging
    from headway.train.batches import prepare_data

    with start_logging():
        sources = prepare_data(read_recipe(arguments, makes_tokenizer=True), workers)
    if json:
        print_json({"sources": [asdict(source) for source in sources]})
        return
    print_table(
        ("set", "source", "documents", "tokens"),
        [(source.set, source.source, source.documents, source.tokens) for source in sources],
    )


VERBS = {
    "data convert": convert,
    "data inspect": inspect,
    "data merge": merge,
    "data pack": pack,
    "data prepare": prepare,
    "data tokenize": tokenize,
    "data validate": validate,
}
