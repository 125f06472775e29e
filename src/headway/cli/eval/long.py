"""`headway eval long`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli import _masks
from headway.cli._output import JSON_FLAG, print_json, print_table
from headway.cli.eval import _options
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.eval.long_context import LongResult
    from headway.eval.perplexity import Piece
    from headway.infer.load import LoadedModel

MAX_DIGITS = 12
TASKS_HELP = "Tasks, comma separated; default: all. needle_* hide numbers, passkey, key_value, variable_tracking, common_words."


def command(
    model: Path = typer.Option(..., "--model", help="A run folder, a checkpoint folder or a Hugging Face folder."),
    tasks: str | None = typer.Option(None, help=TASKS_HELP),
    lengths: str = typer.Option("4096", help="Tokens of the prompts, comma separated; 4k means 4096."),
    depths: str = typer.Option("0,0.25,0.5,0.75,1", help="Where the answer stands, 0 = the beginning, comma separated."),
    samples: int = typer.Option(2, help="Questions of each task, length and depth."),
    sparsities: str | None = typer.Option(None, help="Also under masks at these shares of streaming heads (0.3,0.5,0.7), best heads kept."),
    masks: str | None = _masks.MASKS,
    random_masks: bool = typer.Option(False, "--random-masks", help="Also under random masks with as many heads, to compare with."),
    equal_per_layer: bool = _masks.EQUAL_PER_LAYER,
    stream_window: int | None = _masks.STREAM_WINDOW,
    stream_sinks: int | None = _masks.STREAM_SINKS,
    data: list[str] = typer.Option([], "--data", "--input", help="Also score this text by tokens of context; may be given several times."),
    chat_template: str | None = _options.ASK_TEMPLATE,
    bos: bool | None = _options.BOS,
    chunk_tokens: int | None = _options.CHUNK_TOKENS,
    rows: int = typer.Option(4, help="Prompts that are computed at once."),
    seed: int = typer.Option(0, help="Seed of the questions."),
    out: Path | None = _options.OUT,
    device: str = _options.DEVICE,
    precision: str = _options.PRECISION,
    json: bool = JSON_FLAG,
) -> None:
    """What a model finds in long prompts, as it is and with head masks, and what its keys and values cost; tasks are made offline."""
    from headway.eval.long_context import LongPlan, evaluate_long
    from headway.eval.long_report import write_long_report
    from headway.eval.long_tasks.base import task_names
    from headway.infer.load import find_model
    from headway.model.head_masks.choice import MaskChoice, MaskSpec

    plan = LongPlan(
        tuple(tasks.split(",")) if tasks is not None else tuple(task_names()),
        split_tokens(lengths),
        split_numbers("--depths", depths),
        samples,
        seed,
        chunk_tokens,
        rows,
        chat_template,
        bos,
    )
    shares = split_numbers("--sparsities", sparsities) if sparsities is not None else ()
    spec = MaskSpec(MaskChoice(masks, equal_per_layer, stream_window, stream_sinks), shares, random_masks)
    _options.check_start(device, precision, out)
    variants = spec.variants(find_model(model).mask_source())
    loaded = _options.load_in_full(model, device, precision)
    keep = None if out is None else out / "parts"
    result = evaluate_long(loaded, variants, plan, name=str(model), texts=_texts(data, loaded, bos), keep=keep)
    if out is not None:
        write_long_report(out, result)
    if json:
        print_json(result.to_json())
    else:
        show(result)
        _options.say_where(out)


def show(result: LongResult) -> None:
    """The tables of a report, for people."""
    from headway.eval.long_report import KV_COLUMNS, kv_rows, score_table

    if result.plan.tasks:
        print_table(*score_table(result))
        typer.echo()
    print_table(KV_COLUMNS, kv_rows(result.variants))


def split_tokens(texts: str) -> tuple[int, ...]:
    """Numbers of tokens between commas; k stands for 1024."""
    return tuple(_tokens(text) for text in texts.split(","))


def split_numbers(flag: str, texts: str) -> tuple[float, ...]:
    """Numbers between commas."""
    return tuple(_number(flag, text) for text in texts.split(","))


def _tokens(text: str) -> int:
    plain = text.strip().lower()
    digits, scale = (plain[:-1], 1024) if plain.endswith("k") else (plain, 1)
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS):
        raise ConfigError(f"--lengths holds {text!r}; write whole numbers of tokens, 4096 or 4k, comma separated.")
    return int(digits) * scale


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{flag} holds {text!r}; write numbers, comma separated.") from None


def _texts(data: list[str], loaded: LoadedModel, bos: bool | None) -> Callable[[], Iterable[Piece]] | None:
    if not data:
        return None
    from headway.eval.dataset import Reading, parse_datasets, read_pieces

    datasets = parse_datasets(data)
    return lambda: (piece for dataset in datasets for piece in read_pieces(dataset, loaded, Reading(bos=bos)))
