"""Options that the verbs of this group share, how they load a model, and how they show results."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli import _masks
from headway.cli._output import print_table
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.eval.evaluate import Evaluation
    from headway.infer.load import LoadedModel
    from headway.model.head_masks.choice import MaskChoice

DATA = typer.Option([], "--data", "--input", help="NAME=PATH or PATH: text files, a folder or a token store; may be given several times.")
SUITE = typer.Option(
    None, help="Also score a suite: default (wikitext-2, wikitext-103, ptb, lambada). --data NAME=PATH says where a member is."
)
WINDOW = typer.Option(None, help="Tokens read at once; the model's max_seq_len if not given.")
STRIDE = typer.Option(None, help="Tokens between the beginnings of windows; the window if not given (no overlap).")
BATCH_TOKENS = typer.Option(8192, help="Tokens that go through the model at once, padding included; a longer window goes alone.")
BY = typer.Option(None, help="Also split each dataset: by file, or by this key of its records (dots go deeper: meta.source).")
MAX_SAMPLES = typer.Option(None, help="Score only this many documents of each dataset, from its beginning.")
SPLIT = typer.Option("file", help="A .txt file is one document (file), or each line is one (line).")
TEXT_KEY = typer.Option(None, help="Key that holds the text of a record; if not given 'text', or what the suite knows.")
BOS = typer.Option(
    None, "--bos/--no-bos", help="Put the begin token before each window; default: where the tokenizer or its chat template does."
)
PROMPT = typer.Option([], help="Also continue this text; may be given several times.")
PROMPTS_FILE = typer.Option(None, help="More prompts: one per line, or a .jsonl file with a key `prompt`.")
CHAT_TEMPLATE = typer.Option(
    None, help="Prompts are questions to answer, in this template: a name, tokenizer (the model's own) or a .jinja file."
)
ASK_TEMPLATE = typer.Option(
    None, "--chat-template", help="Ask in this chat template: a name, tokenizer (the model's own) or a .jinja file; default: plain text."
)
CHUNK_TOKENS = typer.Option(None, help="Tokens of a prompt that go through the model at once; default: length/8, at most 4096.")
SAMPLES = typer.Option(None, help="Continuations of each prompt; 1 if not given.")
MAX_NEW_TOKENS = typer.Option(64, help="Tokens of a continuation at most.")
TEMPERATURE = typer.Option(0.8, help="Of the continuations; 0 takes the likeliest token each time.")
SEED = typer.Option(0, help="Seed of the continuations.")
OUT = typer.Option(None, help="Write results.json, report.md and plots into this folder.")
TENSORBOARD = typer.Option(None, help="Write the numbers as TensorBoard scalars into this folder, at the step of the checkpoint.")
DEVICE = typer.Option("auto", help="auto, cpu or cuda.")
PRECISION = typer.Option("auto", help="auto (bf16 on a GPU that has it, else fp32), fp32 or bf16.")
NPROC = typer.Option(None, help="Ranks that share the work on this machine; default: one per chosen GPU, else one.")
GPUS = typer.Option(None, help="GPUs: ids as nvidia-smi has them (0,1), UUIDs, a type (A800), auto (all free ones) or none.")


def check_start(device: str, precision: str, *places: Path | None) -> None:
    """Refuse what is no device or precision, and folders that cannot be written, before anything is measured."""
    from headway.runtime.storage import check_writable

    for place in places:
        if place is not None:
            _check_name(place)
            check_writable(place)
    for name, value, known in (("device", device, ("auto", "cpu", "cuda")), ("precision", precision, ("auto", "fp32", "bf16"))):
        if value not in known:
            raise ConfigError(f"--{name} is {value!r}; it must be {', '.join(known[:-1])} or {known[-1]}.")


def _check_name(place: Path) -> None:
    """Refuse what no file system or report can hold."""
    try:
        text = os.fspath(place).encode()
    except UnicodeEncodeError:
        text = b"\0"
    if b"\0" in text:
        raise ConfigError(f"the folder {str(place)!r} has a name that is no text. Give another one.")


def load(model: Path, device: str, precision: str, choice: MaskChoice, *, quiet: bool = False) -> LoadedModel:
    """A model where and as exactly as it was asked for, under the chosen masks; `quiet` on all ranks but the first."""
    return _masks.with_masks(load_in_full(model, device, precision), choice, quiet=quiet)


def load_in_full(model: Path, device: str, precision: str) -> LoadedModel:
    """A model where and as exactly as it was asked for, without masks."""
    from headway.infer.load import load_model
    from headway.runtime.device import choose_compute
    from headway.runtime.process import from_environment

    compute = choose_compute(device, precision, from_environment().local_rank)
    return load_model(model, device=compute.device, dtype=compute.dtype)


def prompts_of(given: Sequence[str], file: Path | None, samples: int | None) -> tuple[tuple[str, ...], int]:
    """All prompts and how often each is continued; a number without a prompt is an error."""
    from headway.infer.generate import read_prompts

    prompts = (*given, *(read_prompts(file) if file is not None else ()))
    if samples is not None and not prompts:
        raise ConfigError(f"--samples is {samples}, and there is nothing to continue. Give --prompt TEXT.")
    return prompts, 1 if samples is None else samples


def with_training(evaluation: Evaluation, model: Path) -> Evaluation:
    """With the curves of the run that made the model, where it is given as a run folder."""
    from headway.train.history import read_training

    return replace(evaluation, training=read_training(model))


def say_where(out: Path | None) -> None:
    """Say where the report lies."""
    if out is not None:
        typer.echo(f"\nreport: {out / 'report.md'}")


def keep(evaluations: Sequence[Evaluation], out: Path | None, tensorboard: Path | None) -> None:
    """Write the report and the scalars that were asked for."""
    from headway.eval.report import write_report

    if out is not None:
        write_report(out, evaluations)
    if tensorboard is not None:
        for one in evaluations:
            _write_scalars(tensorboard / one.model.strip("/").replace("/", "_") if len(evaluations) > 1 else tensorboard, one)


def _write_scalars(folder: Path, evaluation: Evaluation) -> None:
    from headway.track.tensorboard import TensorBoard

    named = re.fullmatch(r"step-(\d+)", Path(evaluation.path).name)
    tracker = TensorBoard(folder)
    tracker.log(int(named[1]) if named else 0, {"eval": {name: result.scalars() for name, result in evaluation.datasets.items()}})
    tracker.close()


def show(evaluations: Sequence[Evaluation]) -> None:
    """Tables and continuations for people."""
    from headway.eval.training import COLUMNS, rows

    several = len(evaluations) > 1
    if evaluations[0].datasets:
        _show_scores(evaluations)
    for training in (one for evaluation in evaluations for one in evaluation.training if one.valid):
        typer.echo(f"\nvalidations while {training.run} was trained")
        print_table(COLUMNS[1:], [row[1:] for row in rows(training)])
    for at, asked in enumerate(evaluations[0].samples):
        if several or asked_in_chat(evaluations):
            typer.echo(f"\n{asked.prompt}")
            for one in evaluations:
                typer.echo(f"  [{one.model}] {one.samples[at].text}")
        else:
            typer.echo(f"\n{asked.prompt}{asked.text}")


def asked_in_chat(evaluations: Sequence[Evaluation]) -> bool:
    """Whether the samples are answers rather than continuations."""
    return evaluations[0].template is not None


def _show_scores(evaluations: Sequence[Evaluation]) -> None:
    from headway.eval.evaluate import share_a_tokenizer
    from headway.eval.tables import MODELS, NUMBERS, OTHER_TOKENIZERS, PART_NUMBERS, model_cells, numbers, part_numbers

    several = len(evaluations) > 1
    # The counts at the end leave their room to the models' names; reports and --json have them.
    shown = len(NUMBERS) - (2 if several else 0)
    rows: list[Sequence[str]] = []
    for name in evaluations[0].datasets:
        for one in evaluations:
            rows.append([name, *([one.model] if several else []), *numbers(one.datasets[name])[:shown]])
    print_table(["dataset", *(["model"] if several else []), *NUMBERS[:shown]], rows)
    for name in evaluations[0].datasets:
        parts = [(part.name, one.model, *part_numbers(part)) for one in evaluations for part in one.datasets[name].parts]
        if parts:
            typer.echo(f"\n{name} by part")
            shown_parts = [row if several else (row[0], *row[2:]) for row in parts]
            print_table(["part", *(["model"] if several else []), *PART_NUMBERS], shown_parts)
    if several:
        typer.echo("\nmodels, and their perplexity over the datasets")
        print_table(MODELS, map(model_cells, evaluations))
    if not share_a_tokenizer(evaluations):
        typer.echo(OTHER_TOKENIZERS)
