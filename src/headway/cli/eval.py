"""`headway eval`: perplexity, comparisons, lm-evaluation-harness and long-context tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli import _eval_output as output
from headway.cli._options import (
    GROUP,
    JSON,
    MODEL,
    ComputeOptions,
    on_ranks,
    with_masks,
)
from headway.cli._output import print_json, print_report_path, print_table
from headway.config.options import inner_options
from headway.errors import ConfigError
from headway.eval.options import (
    AttentionPlan,
    ContinuationOptions,
    HarnessPlan,
    LongPlan,
    ReadOptions,
)
from headway.launch.options import LaunchOptions
from headway.model.head_masks.choice import MaskChoice, MaskSpec

if TYPE_CHECKING:
    from headway.eval.evaluate import EvalPlan
    from headway.parallel.collectives import RankGroup

BATCH_TOKENS = typer.Option(
    8192,
    help="Tokens that go through the model at once, padding included; a longer window goes alone.",
)
OUT = typer.Option(None, help="Write results.json, report.md and plots into this folder.")


@dataclass(frozen=True)
class EvalOptions:
    """The data to score, the prompts to continue and where results go."""

    data: list[str] = typer.Option(
        [],
        "--data",
        "--input",
        help="NAME=PATH or PATH: text files, a folder or a token store; may be repeated.",
    )
    suite: str | None = typer.Option(
        None,
        help="Also score a suite: default (wikitext-2, wikitext-103, ptb, lambada). --data "
        "NAME=PATH gives the path of a member.",
    )
    window: int | None = typer.Option(
        None, help="Tokens of a window; default: the model's max_seq_len."
    )
    stride: int | None = typer.Option(
        None, help="Tokens between the starts of two windows; default: the window (no overlap)."
    )
    batch_tokens: int = BATCH_TOKENS
    reading: ReadOptions = inner_options(ReadOptions())
    samples: ContinuationOptions = inner_options(ContinuationOptions())
    prompts_file: Path | None = typer.Option(
        None, help="More prompts: one per line, or a .jsonl file with a key `prompt`."
    )
    out: Path | None = OUT
    tensorboard: Path | None = typer.Option(
        None, help="Write the numbers as TensorBoard scalars here, at the step of the checkpoint."
    )

    def plan(self, *, needs_data: bool, window: Callable[[], int | None]) -> EvalPlan:
        """What to measure.

        Without `needs_data`, prompts alone are enough; `window` gives the default window.
        """
        from headway.eval.dataset import parse_datasets
        from headway.eval.evaluate import EvalPlan
        from headway.infer.generate import read_prompts

        samples = self.samples
        if self.prompts_file is not None:
            samples = replace(samples, prompts=(*samples.prompts, *read_prompts(self.prompts_file)))

        # `parse_datasets` refuses a command line that names no data.
        datasets = []
        if needs_data or self.data or self.suite or not samples.prompts:
            datasets = parse_datasets(self.data, self.suite)

        window_tokens = self.window
        if window_tokens is None:
            window_tokens = window()
        return EvalPlan(
            datasets, self.reading, window_tokens, self.stride, self.batch_tokens, samples
        )


def ppl(
    context: typer.Context,
    model: Path = MODEL,
    options: EvalOptions = GROUP,
    choice: MaskChoice = GROUP,
    compute: ComputeOptions = GROUP,
    ranks: LaunchOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Perplexity, bits per byte, accuracy and calibration of a model on text; longer documents are read with a sliding window."""
    # Without a window each model takes the longest it was made for.
    plan = options.plan(needs_data=True, window=lambda: None)
    check_start(compute, options.out, tensorboard=options.tensorboard)

    def work(group: RankGroup) -> None:
        from headway.eval.evaluate import evaluate

        loaded = with_masks(compute.load(model), choice, is_first=group.rank == 0)
        result = output.with_training(evaluate(loaded, plan, name=str(model), group=group), model)
        if group.rank == 0:
            output.write([result], options.out, options.tensorboard)
            output.print_one(result, json, options.out)

    on_ranks(context, compute, ranks, work)


def compare(
    context: typer.Context,
    models: list[Path] = typer.Argument(
        ...,
        metavar="MODEL MODEL...",
        help="Run folders, checkpoint folders or Hugging Face folders.",
    ),
    options: EvalOptions = GROUP,
    choice: MaskChoice = GROUP,
    compute: ComputeOptions = GROUP,
    ranks: LaunchOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Compare models on the same data and prompts, with the training curves of those that are runs; one is loaded at a time."""
    from headway.checkpoint.stored_model import find_model

    if len(models) < 2 or len(set(models)) < len(models):
        names = ", ".join(map(str, models))
        raise ConfigError(
            f"models are {names}; give two or more different ones. `headway eval ppl` measures one."
        )
    # The same windows for all: a longer context alone lowers the loss.
    plan = options.plan(
        needs_data=False,
        window=lambda: min(find_model(model).config.max_seq_len for model in models),
    )
    check_start(compute, options.out, tensorboard=options.tensorboard)

    def work(group: RankGroup) -> None:
        from headway.eval.evaluate import evaluate

        # One model at a time: the next is loaded when the last one is freed.
        masked = partial(with_masks, choice=choice, is_first=group.rank == 0)
        results = [
            evaluate(masked(compute.load(model)), plan, name=str(model), group=group)
            for model in models
        ]
        if group.rank == 0:
            trained = [output.with_training(*pair) for pair in zip(results, models, strict=True)]
            output.write(trained, options.out, options.tensorboard)
            output.print_all(trained, json, options.out)

    on_ranks(context, compute, ranks, work)


def harness(
    context: typer.Context,
    model: Path = MODEL,
    plan: HarnessPlan = GROUP,
    batch_tokens: int = BATCH_TOKENS,
    log_samples: bool = typer.Option(
        False,
        "--log-samples",
        help="With --out: also write every document with the model's answers.",
    ),
    out: Path | None = typer.Option(
        None, help="Write results.json and report.md into this folder."
    ),
    choice: MaskChoice = GROUP,
    compute: ComputeOptions = GROUP,
    ranks: LaunchOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Run tasks of lm-evaluation-harness. Without masks, results equal those of its `--model hf` on the exported model."""
    from headway.checkpoint.stored_model import find_model
    from headway.eval.harness import COLUMNS, check_installed, run_harness, write_results

    check_installed()
    if log_samples and out is None:
        raise ConfigError(
            "--log-samples is given without --out. Give a folder with --out, or leave it out."
        )
    check_start(compute, out)
    find_model(model)  # refuses a wrong path before ranks are started

    def work(group: RankGroup) -> None:
        from headway.eval.harness_model import HarnessModel

        loaded = with_masks(compute.load(model), choice, is_first=group.rank == 0)
        result = run_harness(
            HarnessModel(loaded, batch_tokens=batch_tokens, group=group), plan, name=str(model)
        )
        # lm_eval gives the results to the first rank alone.
        if result is None:
            return
        if out is not None:
            write_results(out, result, samples=log_samples)
        if json:
            print_json(result.to_json())
        else:
            print_table(list(COLUMNS), [metric.cells() for metric in result.metrics])
            print_report_path(out)

    on_ranks(context, compute, ranks, work)


def long(
    model: Path = MODEL,
    plan: LongPlan = GROUP,
    masks: MaskSpec = GROUP,
    data: list[str] = typer.Option(
        [], "--data", "--input", help="Also score this text by tokens of context; may be repeated."
    ),
    out: Path | None = OUT,
    compute: ComputeOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Long-context tasks (made offline), without and with head masks, and the size and speed of the KV cache."""
    from headway.checkpoint.stored_model import find_model
    from headway.eval.dataset import read_texts
    from headway.eval.long_context import evaluate_long
    from headway.eval.long_report import write_long_report
    from headway.train.run_folder import read_sparsity_target

    check_start(compute, out)
    # The seed of the questions is that of random masks, too.
    spec = replace(masks, seed=plan.questions.seed)
    variants = spec.variants(find_model(model).mask_source())

    # With --out, each measurement is kept when it is done: a command that was stopped continues.
    results_dir = None
    if out is not None:
        results_dir = out / "parts"
    loaded = compute.load(model)
    texts = read_texts(data, loaded, plan.questions.bos)
    result = evaluate_long(
        loaded,
        variants,
        plan,
        name=str(model),
        texts=texts,
        results_dir=results_dir,
        target=read_sparsity_target(model),
    )
    if out is not None:
        write_long_report(out, result)
    if json:
        print_json(result.to_json())
    else:
        output.print_long(result)
        print_report_path(out)


def check_start(
    compute: ComputeOptions, *folders: Path | None, tensorboard: Path | None = None
) -> None:
    """Refuse an unknown device or precision, and folders that cannot be written, before anything is
    measured.
    """
    from headway.runtime.optional import need
    from headway.runtime.storage import check_writable

    if tensorboard is not None:
        need("tensorboard", "--tensorboard")
    for folder in (*folders, tensorboard):
        if folder is not None:
            _check_name(folder)
            check_writable(folder)
    compute.check()


def _check_name(folder: Path) -> None:
    """Refuse a name that no file system or report can hold."""
    # Python reads bytes that are no UTF-8 from the command line as lone surrogates.
    try:
        is_text = b"\0" not in str(folder).encode()
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise ConfigError(
            f"the name of the folder {str(folder)!r} is not valid text. Give another one."
        )


def attention(
    model: Path = MODEL,
    plan: AttentionPlan = GROUP,
    out: Path | None = typer.Option(
        None, help="Write attention.csv, a heat map, results.json and report.md into this folder."
    ),
    compute: ComputeOptions = GROUP,
    json: bool = JSON,
) -> None:
    """How much every head of every layer attends to a needle, by the distance to it."""
    from headway.eval.attention import measure_attention
    from headway.eval.attention_report import COLUMNS, summary_rows, write_attention_report

    check_start(compute, out)
    result = measure_attention(compute.load(model), plan, name=str(model))
    if out is not None:
        write_attention_report(out, result)
    if json:
        print_json(result.to_json())
    else:
        print_table(COLUMNS, summary_rows(result))
        print_report_path(out)


VERBS = {
    "eval attention": attention,
    "eval compare": compare,
    "eval harness": harness,
    "eval long": long,
    "eval ppl": ppl,
}
