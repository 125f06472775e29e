"""`headway data`: raw records become token stores, which are inspected, merged, packed and converted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

import typer

from headway.cli._documents import print_document
from headway.cli._options import (
    GROUP,
    INPUTS,
    JSON,
    MORE_INPUTS,
    RECORD_KEYS,
    STORE_KIND,
    TEMPLATE_FLAGS,
    ManyMachines,
    option_of,
    refuse_flags,
)
from headway.cli._output import print_json, print_table
from headway.cli.data_media import MultimodalChecks, validate_multimodal
from headway.config.options import parse_shard
from headway.errors import ConfigError
from headway.prepare.pack_options import PackOptions

BAR_WIDTH = 40
TEMPLATES = "chatml, llama3, qwen, alpaca, internlm, internlm_alpaca, zero2all, tokenizer (the tokenizer's own) or a .jinja file"
TEMPLATE_DEFAULT = "default: the tokenizer's own, else chatml."


def tokenize(
    more: list[str] = MORE_INPUTS,
    inputs: list[str] = INPUTS,
    tokenizer: Path = typer.Option(
        ..., help="A tokenizer folder, a tokenizer.json or a sentencepiece .model."
    ),
    out: Path = typer.Option(..., help="The folder of the new token store."),
    kind: str = typer.Option(
        "text",
        help="What the records are: text, chat, preference (pairs) or unpaired (labelled answers).",
    ),
    format: str | None = typer.Option(
        None,
        help="Your module or file that reads the input, e.g. ./my_format.py; default: by suffix.",
    ),
    to: str = typer.Option(
        "headway", help="Format of the result: headway, internlm, zero2all, mds."
    ),
    text_key: str = typer.Option(
        None, help="Text: key that holds the text of a record; default: text."
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
        help="Text: a .txt file is one document (file), or each line is one (line, the default to internlm).",
    ),
    eos: bool = typer.Option(
        None,
        "--append-eos/--no-eos",
        help="Text: end documents with the end token; default: if there is one.",
    ),
    bos: bool = typer.Option(
        False, "--bos", help="Text: begin each document with the begin token."
    ),
    clean: bool = typer.Option(
        False, "--clean", help="Text: drop bad texts and (near) duplicates, as `data clean` does."
    ),
    max_length: int = typer.Option(None, help="All but text: maximum tokens of a conversation."),
    too_long: str = typer.Option(
        None,
        help="Chat: what to do with longer ones: truncate_right (default), truncate_left, drop.",
    ),
    valid_fraction: float = typer.Option(
        None,
        help="All but text: share of the records for validation (OUT/valid); the rest is in OUT/train.",
    ),
    drop_bad: bool = typer.Option(
        False,
        "--drop-bad",
        help="All but text: drop and count bad records instead of refusing them.",
    ),
    keys: str = RECORD_KEYS,
    seed: int = typer.Option(None, help="All but text: chooses the records for validation."),
    type_name: str = typer.Option(
        None, "--type", help="To internlm: the data type (folder); default: en."
    ),
    begin_id: int = typer.Option(
        None, help="To zero2all: the begin token; default: the token all documents start with."
    ),
    workers: int = typer.Option(
        None, min=1, help="Worker processes; default: one per core. With --on: tasks at a time."
    ),
    many: ManyMachines = GROUP,
    shard: str = typer.Option(
        None,
        metavar="I/N",
        help="Text: do only part I (from 0) of N; `headway data merge` joins the parts.",
    ),
    json: bool = JSON,
) -> None:
    """Turn raw text, conversations, preference pairs or labelled answers into a token store. Run again after a kill, it resumes."""
    from headway.prepare.build import BuildOptions, BuildReport, build_converted, build_store
    from headway.records.base import is_user_kind, record_kind, tokenized_kinds
    from headway.runtime.storage import check_writable
    from headway.store.convert import ConvertOptions
    from headway.text.clean import CleanRules
    from headway.text.record_keys import KeyMap
    from headway.tokenizer.chat import default_template
    from headway.tokenizer.load import load_tokenizer

    if not is_user_kind(kind) and kind not in tokenized_kinds():
        raise ConfigError(
            f"--kind is {kind!r}; it must be one of {', '.join(tokenized_kinds())}. Media: `headway data prepare RECIPE --workers N`."
        )
    records = record_kind(kind)
    is_text = records.is_text
    check_writable(out)
    for_text = {
        "--text-key": text_key,
        "--split": split,
        "--append-eos/--no-eos": eos,
        "--bos": bos or None,
        "--clean": clean or None,
    }
    for_text["--shard"] = shard
    for_records = {
        "--max-length": max_length,
        "--valid-fraction": valid_fraction,
        "--drop-bad": drop_bad or None,
        "--keys": keys,
    }
    for_records["--seed"] = seed
    refuse_flags(
        f"--kind {kind}",
        (for_records if is_text else for_text)
        | {"--too-long": None if records.may_drop_long else too_long},
    )
    refuse_flags(
        f"--to {to}",
        {
            "--type": type_name if to != "internlm" else None,
            "--begin-id": begin_id if to != "zero2all" else None,
        },
    )
    chat_template = "chatml"
    if not is_text:
        chat_template = template or default_template(load_tokenizer(tokenizer))
    layout = (
        ConvertOptions(type=type_name, begin_id=begin_id)
        if is_text
        else ConvertOptions(type=type_name or "en")
    )
    options = BuildOptions(
        kind, workers, to, layout, text_key or "text", template if is_text else None, _split(split, to), eos, bos,
        None if shard is None else parse_shard(shard), CleanRules() if clean else None,
        chat_template=chat_template, max_length=max_length,
        too_long=too_long or "truncate_right",  # pyright: ignore[reportArgumentType] - checked there
        valid_fraction=valid_fraction or 0.0, seed=seed or 0, drop_bad=drop_bad, keys=KeyMap.parse(keys), placement=many.placement(workers),
    )  # fmt: skip
    build = build_converted if is_text and to != "headway" else build_store
    report = build(_inputs([*inputs, *(more or [])], format), tokenizer, out, options)
    print_json(
        report.fields() if isinstance(report, BuildReport) else vars(report)
    ) if json else typer.echo(report.describe())


def _inputs(paths: list[str], format: str | None) -> list[str]:
    """The files to read; those of the user's own format as JSONL."""
    from headway.prepare.own_format import read_own_format

    return paths if format is None else [str(read_own_format(path, format)) for path in paths]


def _split(split: str | None, to: str) -> Literal["file", "line"]:
    """How .txt files are split; InternLM's own tool makes each line a document."""
    chosen = split or ("line" if to == "internlm" else "file")
    if chosen not in ("file", "line"):
        raise ConfigError(f"--split is {split!r}; it must be 'file' or 'line'.")
    return chosen


def validate(
    paths: list[str] = typer.Argument(..., metavar="PATH...", help="Raw files, folders or globs."),
    kind: str = typer.Option(
        "text", help="What the records should be: text, chat, preference, unpaired or multimodal."
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
    from headway.records.base import describe_unread, is_user_kind, record_kind, validated_kinds
    from headway.text.document import TextOf
    from headway.text.record_keys import KeyMap
    from headway.tokenizer.load import load_tokenizer

    if not is_user_kind(kind) and kind not in validated_kinds():
        raise ConfigError(f"--kind is {kind!r}; it must be one of {', '.join(validated_kinds())}.")
    records = record_kind(kind)
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
    for_records, for_text = (
        {"--template": template, "--keys": keys},
        {"--text-key": text_key, "--text-template": text_template},
    )
    refuse_flags(f"--kind {kind}", for_records if records.is_text else for_text)
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    options = ValidateOptions(
        kind, loaded, template, KeyMap.parse(keys), TextOf(text_key or "text", text_template)
    )
    report = validate_records(paths, options)
    bins = report.histogram()
    if json:
        counts = {
            name: getattr(report, name)
            for name in ("kind", "files", "records", "good", "unit", "total", "longest")
        }
        counts |= {
            "unread": {
                key.partition(":")[2]: number for key, number in sorted(report.unread.items())
            }
        }
        print_json(
            counts
            | {
                "bad": [asdict(one) for one in report.bad],
                "histogram": [asdict(one) for one in bins],
            }
        )
    else:
        for one in report.bad:
            typer.echo(f"{one.place}: {one.message}")
        typer.echo(
            f"{report.records} records in {report.files} files: {report.good} good, {len(report.bad)} bad"
        )
        if (unread := describe_unread(report.unread)) is not None:
            typer.echo(unread)
        if report.good:
            typer.echo(
                f"{report.total} {report.unit}, {report.total / report.good:.0f} on average, {report.longest} at most"
            )
        most = max((one.records for one in bins), default=1)
        for one in bins:
            bar = "█" * round(BAR_WIDTH * one.records / most) or ("▏" if one.records else "")
            typer.echo(f"{one.low:>9} to {one.high:>9} {report.unit}  {bar} {one.records}")
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
    kind: str = STORE_KIND,
    json: bool = JSON,
) -> None:
    """Describe what a path holds: its format, the number of documents and tokens, and some samples."""
    from headway.prepare.inspect import inspect as inspect_path
    from headway.prepare.inspect import preview_documents
    from headway.store.open import parse_kind
    from headway.tokenizer.load import load_tokenizer

    chosen = parse_kind(kind) if kind else None
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    found = inspect_path(path, chosen, loaded)
    if json:
        print_json(asdict(found))
        return
    rows = [
        (name, value)
        for name, value in asdict(found).items()
        if name not in ("types", "files") and value is not None
    ]
    print_table(("", ""), [*rows, ("files", len(found.files))], title=path)
    if found.types:
        print_table(
            ("type", "documents", "tokens"),
            [(name or "(none)", one.documents, one.tokens) for name, one in found.types.items()],
        )
    if loaded is not None and found.kind != "raw" and samples:
        for sample in preview_documents(path, loaded, samples, kind=chosen):
            print_document(sample, bool(found.masked))


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
    kind: str = STORE_KIND,
    tokenizer: Path = typer.Option(
        None,
        help="The tokenizer that made the ids: they are checked against it, and a headway store records its fingerprint.",
    ),
    rebuild_index: bool = typer.Option(
        False,
        "--rebuild-index",
        help="InternLM, zero2all: rebuild the index from the data, ignore index files.",
    ),
    begin_id: int = typer.Option(
        None, help="zero2all: the token every document begins with; default: taken from the data."
    ),
    seq_len: int = typer.Option(
        2048, min=1, help="To zero2all: tokens of a sample in the index map."
    ),
    type_name: str = typer.Option(
        None,
        "--type",
        help="To internlm: one data type (folder) for all; default: the source's types, else en.",
    ),
    compression: str = option_of(PackOptions, "compression"),
    json: bool = JSON,
) -> None:
    """Write a token store in another format."""
    from headway.store.convert import ConvertOptions
    from headway.store.convert import convert as convert_store
    from headway.store.open import parse_kind
    from headway.tokenizer.load import load_tokenizer

    options = ConvertOptions(
        parse_kind(kind) if kind else None, rebuild_index, begin_id, seq_len, type_name, compression
    )
    report = convert_store(
        source, out, to, options, load_tokenizer(tokenizer) if tokenizer else None
    )
    if json:
        print_json(vars(report))
    else:
        typer.echo(report.describe())


VERBS = {
    "data convert": convert,
    "data inspect": inspect,
    "data merge": merge,
    "data pack": pack,
    "data tokenize": tokenize,
    "data validate": validate,
}
