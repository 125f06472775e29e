"""`headway data tokenize`."""

from pathlib import Path
from typing import Any, Literal

import typer

from headway.cli._output import JSON_FLAG, print_json


def command(
    more: list[str] = typer.Argument(None, metavar="[FILE]...", help="More input files, as `--input *.jsonl` expands to."),
    inputs: list[str] = typer.Option(..., "--input", help="Raw files, folders or globs; may be given several times."),
    tokenizer: Path = typer.Option(..., help="A tokenizer folder, a tokenizer.json or a sentencepiece .model."),
    out: Path = typer.Option(..., help="The folder of the new token store."),
    kind: str = typer.Option("text", help="What the records are: text, chat or preference."),
    to: str = typer.Option("headway", help="Format of the result: headway, internlm, zero2all, mds."),
    text_key: str = typer.Option(None, help="Text: key that holds the text of a record (text)."),
    template: str = typer.Option(
        None,
        help="Text: several keys, e.g. '{title}\\n{content}'. Chat, preference: chatml (default), llama3, qwen, alpaca, internlm, "
        "internlm_alpaca, zero2all, `tokenizer` for the tokenizer's own, or a .jinja file.",
    ),
    split: str = typer.Option(None, help="Text: a .txt file is one document (file), or each line is one (line, the default to internlm)."),
    eos: bool = typer.Option(None, "--append-eos/--no-eos", help="Text: end documents with the end token; default: where there is one."),
    bos: bool = typer.Option(False, "--bos", help="Text: begin each document with the begin token."),
    clean: bool = typer.Option(False, "--clean", help="Text: leave out bad texts and (near) duplicates on the way, as `data clean` does."),
    max_length: int = typer.Option(None, help="Chat, preference: most tokens of a conversation."),
    too_long: str = typer.Option(None, help="Chat: what happens to longer ones: truncate_right (default), truncate_left, drop."),
    valid_fraction: float = typer.Option(
        None, help="Chat, preference: share of the records that goes to OUT/valid, the rest to OUT/train."
    ),
    drop_bad: bool = typer.Option(False, "--drop-bad", help="Chat, preference: leave out bad records (counted) instead of refusing them."),
    keys: str = typer.Option(
        None, metavar="NAME=KEY,...", help="Chat, preference: which key of a record is what, e.g. prompt=question,response=answer."
    ),
    seed: int = typer.Option(None, help="Chat, preference: chooses the records for validation."),
    type_name: str = typer.Option(None, "--type", help="To internlm: the data type (folder), en if not given."),
    begin_id: int = typer.Option(None, help="To zero2all: the begin token; default: the one all documents start with."),
    workers: int = typer.Option(None, min=1, help="Worker processes; default: one per core."),
    shard: str = typer.Option(None, metavar="I/N", help="Text: do only part I (from 0) of N; `headway data merge` joins the parts."),
    json: bool = JSON_FLAG,
) -> None:
    """Turn raw text, conversations or preference pairs into a token store. Killed and started again, it continues where it was."""
    _check(kind, out)
    for_text = {"--text-key": text_key, "--split": split, "--append-eos/--no-eos": eos, "--bos": bos or None, "--shard": shard}
    for_text |= {"--clean": clean or None}
    for_records = {"--max-length": max_length, "--valid-fraction": valid_fraction, "--drop-bad": drop_bad or None, "--seed": seed}
    for_records |= {"--keys": keys}
    _refuse(f"--kind {kind}", (for_records if kind == "text" else for_text) | {"--too-long": too_long if kind != "chat" else None})
    _refuse(f"--to {to}", {"--type": type_name if to != "internlm" else None, "--begin-id": begin_id if to != "zero2all" else None})
    files, part = [*inputs, *(more or [])], None if shard is None else part_of(shard)
    records = {"template": template or "chatml", "max_length": max_length, "valid_fraction": valid_fraction or 0.0, "to": to}
    records |= {"seed": seed or 0, "drop_bad": drop_bad, "workers": workers}
    if kind == "text":
        from headway.prepare.tokenize import TokenizeOptions, tokenize, tokenize_as
        from headway.store.convert import ConvertOptions
        from headway.text.clean import CleanRules

        rules = CleanRules() if clean else None
        options = TokenizeOptions(text_key or "text", template, _split(split, to), eos, bos, workers, part, rules)
        layout = ConvertOptions(type=type_name, begin_id=begin_id)
        report = tokenize(files, tokenizer, out, options) if to == "headway" else tokenize_as(files, tokenizer, out, to, options, layout)
    else:
        for_chat = {"too_long": too_long or "truncate_right", "type": type_name or "en"} if kind == "chat" else {}
        report = _tokenize_records(files, tokenizer, out, keys, records | for_chat)
    print_json(vars(report)) if json else typer.echo(report.describe())


def _tokenize_records(files: list[str], tokenizer: Path, out: Path, keys: str | None, options: dict[str, Any]) -> Any:
    """Conversations where the options say what happens to long ones, else preference pairs."""
    from headway.text.record_keys import KeyMap

    named = KeyMap.parse(keys)
    if "too_long" in options:
        from headway.prepare.chat import ChatOptions, tokenize_chat

        return tokenize_chat(files, tokenizer, out, ChatOptions(**options, keys=named))
    from headway.prepare.preference import PreferenceOptions, tokenize_preference

    return tokenize_preference(files, tokenizer, out, PreferenceOptions(**options, keys=named))


def _check(kind: str, out: Path) -> None:
    from headway.errors import ConfigError
    from headway.runtime.storage import check_writable

    if kind not in ("text", "chat", "preference"):
        raise ConfigError(f"--kind is {kind!r}; it must be text, chat or preference.")
    check_writable(out)


def _split(split: str | None, to: str) -> Literal["file", "line"]:
    """How .txt files are cut; InternLM's own tool makes each line a document."""
    from headway.errors import ConfigError

    chosen = split or ("line" if to == "internlm" else "file")
    if chosen not in ("file", "line"):
        raise ConfigError(f"--split is {split!r}; it must be 'file' or 'line'.")
    return chosen


def _refuse(what: str, flags: dict[str, Any]) -> None:
    """Refuse flags that mean nothing here."""
    from headway.errors import ConfigError

    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        raise ConfigError(f"{given[0]} has no meaning with {what}. Leave it out.")


def part_of(text: str) -> tuple[int, int]:
    """`2/8` -> (2, 8)."""
    from headway.errors import ConfigError

    part, slash, parts = text.partition("/")
    if not slash or not part.isdigit() or not parts.isdigit() or int(part) >= int(parts):
        raise ConfigError(f"--shard is {text!r}; it must be I/N with I from 0 to N - 1, e.g. 0/8.")
    return int(part), int(parts)
