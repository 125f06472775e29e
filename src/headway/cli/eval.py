"""`headway eval`: perplexity, comparisons, lm-evaluation-harness and long-context tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli import _eval_output as output
from headway.cli._options import (
    CHAT_TEMPLATE,
    GROUP,
    JSON,
    MODEL,
    TEMPLATE_FLAGS,
    ComputeOptions,
    MaskOptions,
    RankOptions,
    on_ranks,
    with_masks,
)
from headway.cli._output import print_json, print_report_path, print_table
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.eval.evaluate import EvalPlan
    from headway.parallel.collectives import RankGroup

MAX_DIGITS = 12
BATCH_TOKENS = typer.Option(
    8192,
    help="Tokens that go through the model at once, padding included; a longer window goes alone.",
)
OUT = typer.Option(None, help="Write results.json, report.md and plots into this folder.")
BOS = typer.Option(
    None,
    "--bos/--no-bos",
    help="Put the begin token before each window; default: if the tokenizer or its chat template does.",
)
TASKS_HELP = "Tasks, comma separated; default: all. needle_* hide numbers, passkey, key_value, variable_tracking, common_words."


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
        help="Also score a suite: default (wikitext-2, wikitext-103, ptb, lambada). --data NAME=PATH gives the path of a member.",
    )
    window: int | None = typer.Option(
        None, help="Tokens of a window; default: the model's max_seq_len."
    )
    stride: int | None = typer.Option(
        None, help="Tokens between the starts of two windows; default: the window (no overlap)."
    )
    batch_tokens: int = BATCH_TOKENS
    max_samples: int | None = typer.Option(
        None, help="Score only the first documents of each dataset, this many."
    )
    split: str = typer.Option(
        "file", help="A .txt file is one document (file), or each of its lines is one (line)."
    )
    text_key: str | None = typer.Option(
        None, help="Key that holds the text of a record; default: the suite's key, else text."
    )
    by: str | None = typer.Option(
        None,
        help="Also split each dataset: by file, or by this key of its records (nested: meta.source).",
    )
    bos: bool | None = BOS
    prompt: list[str] = typer.Option([], help="Also continue this text; may be repeated.")
    prompts_file: Path | None = typer.Option(
        None, help="More prompts: one per line, or a .jsonl file with a key `prompt`."
    )
    chat_template: str | None = CHAT_TEMPLATE
    samples: int | None = typer.Option(None, help="Continuations of each prompt; default: 1.")
    max_new_tokens: int = typer.Option(64, help="Maximum tokens of a continuation.")
    temperature: float = typer.Option(
        0.8, help="Temperature of the continuations; 0 takes the most likely token each time."
    )
    seed: int = typer.Option(0, help="Seed of the continuations.")
    out: Path | None = OUT
    tensorboard: Path | None = typer.Option(
        None, help="Write the numbers as TensorBoard scalars here, at the step of the checkpoint."
    )

    def plan(self, *, needs_data: bool, window: Callable[[], int | None]) -> EvalPlan:
        """What to measure. Without `needs_data`, prompts alone are enough; `window` gives the default window."""
        from headway.eval.dataset import ReadOptions, parse_datasets
        from headway.eval.evaluate import EvalPlan, SamplePlan
        from headway.infer.generate import read_prompts

        prompts = (
            *self.prompt,
            *(read_prompts(self.prompts_file) if self.prompts_file is not None else ()),
        )
        if self.samples is not None and not prompts:
            raise ConfigError(
                f"--samples is {self.samples}, but there is no prompt to continue. Give --prompt TEXT."
            )
        times = 1 if self.samples is None else self.samples
        return EvalPlan(
            parse_datasets(self.data, self.suite)
            if needs_data or self.data or self.suite or not prompts
            else [],
            ReadOptions(self.split, self.text_key, self.bos, self.max_samples, self.by),
            window() if self.window is None else self.window,
            self.stride,
            self.batch_tokens,
            SamplePlan(
                prompts, times, self.max_new_tokens, self.temperature, self.seed, self.chat_template
            ),
        )


@dataclass(frozen=True)
class LongOptions:
    """Questions in long prompts."""

    depths: str = typer.Option(
        "0,0.25,0.5,0.75,1", help="Positions of the answer, 0 = the beginning, comma separated."
    )
    samples: int = typer.Option(2, help="Questions per task, length and depth.")
    data: list[str] = typer.Option(
        [], "--data", "--input", help="Also score this text by tokens of context; may be repeated."
    )
    chat_template: str | None = typer.Option(
        None,
        *TEMPLATE_FLAGS,
        help="Ask in this chat template: a name, tokenizer (the model's own) or a .jinja file; default: plain text.",
    )
    bos: bool | None = BOS
    chunk_tokens: int | None = typer.Option(
        None, help="Prefill chunk in tokens; default: length/8, at most 4096."
    )
    rows: int = typer.Option(4, help="Prompts computed at once.")
    seed: int = typer.Option(0, help="Seed of the questions and of random masks.")


def ppl(
    context: typer.Context,
    model: Path = MODEL,
    options: EvalOptions = GROUP,
    masks: MaskOptions = GROUP,
    compute: ComputeOptions = GROUP,
    ranks: RankOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Perplexity, bits per byte, accuracy and calibration of a model on text; longer documents are read with a sliding window."""
    choice = masks.choice()
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
    masks: MaskOptions = GROUP,
    compute: ComputeOptions = GROUP,
    ranks: RankOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Compare models on the same data and prompts, with the training curves of those that are runs; one is loaded at a time."""
    from headway.checkpoint.stored_model import find_model

    choice = masks.choice()
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
    tasks: list[str] = typer.Option(
        ..., help="Names or patterns of tasks (`lm-eval ls tasks`); repeated or comma separated."
    ),
    task_dir: Path | None = typer.Option(
        None, help="A folder with your own tasks as YAML; code that they name is run."
    ),
    limit: int | None = typer.Option(
        None, help="Only the first documents of each task, this many."
    ),
    shots: int | None = typer.Option(
        None, help="Few-shot examples before each question; default: as each task says."
    ),
    batch_tokens: int = BATCH_TOKENS,
    online: bool = typer.Option(
        False,
        "--online",
        help="Let tasks download their data from the hub; else it must be on this machine.",
    ),
    log_samples: bool = typer.Option(
        False,
        "--log-samples",
        help="With --out: also write every document with the model's answers.",
    ),
    out: Path | None = typer.Option(
        None, help="Write results.json and report.md into this folder."
    ),
    masks: MaskOptions = GROUP,
    compute: ComputeOptions = GROUP,
    ranks: RankOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Run tasks of lm-evaluation-harness. Without masks, results equal those of its `--model hf` on the exported model."""
    from headway.checkpoint.stored_model import find_model
    from headway.eval.harness import (
        COLUMNS,
        HarnessPlan,
        check_installed,
        run_harness,
        write_results,
    )

    check_installed()
    choice = masks.choice()
    if log_samples and out is None:
        raise ConfigError(
            "--log-samples is given without --out. Give a folder with --out, or leave it out."
        )
    plan = HarnessPlan(
        [name for given in tasks for name in given.split(",") if name],
        task_dir,
        limit,
        shots,
        online,
    )
    check_start(compute, out)
    find_model(model)

    def work(group: RankGroup) -> None:
        from headway.eval.harness_model import HarnessModel

        loaded = with_masks(compute.load(model), choice, is_first=group.rank == 0)
        result = run_harness(
            HarnessModel(loaded, batch_tokens=batch_tokens, group=group), plan, name=str(model)
        )
        if result is None:
            return
        if out is not None:
            write_results(out, result, samples=log_samples)
        if json:
            print_json(result.to_json())
        else:
            print_table(list(COLUMNS), [one.cells() for one in result.metrics])
            print_report_path(out)

    on_ranks(context, compute, ranks, work)


def long(
    model: Path = MODEL,
    tasks: str | None = typer.Option(None, help=TASKS_HELP),
    lengths: str = typer.Option(
        "4096", help="Tokens of the prompts, comma separated; 4k means 4096."
    ),
    sparsities: str | None = typer.Option(
        None, help="Also measure masks at these shares of streaming heads (0.3,0.5,0.7)."
    ),
    random_masks: bool = typer.Option(
        False,
        "--random-masks",
        help="Also measure random masks with as many heads, for comparison.",
    ),
    masks: MaskOptions = GROUP,
    options: LongOptions = GROUP,
    out: Path | None = OUT,
    compute: ComputeOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Long-context tasks (made offline), without and with head masks, and the size and speed of the KV cache."""
    from headway.checkpoint.stored_model import find_model
    from headway.eval.dataset import read_texts
    from headway.eval.long_context import LongPlan, evaluate_long
    from headway.eval.long_report import write_long_report
    from headway.eval.long_tasks import task_names
    from headway.model.head_masks.choice import MaskSpec

    plan = LongPlan(
        tuple(tasks.split(",")) if tasks is not None else tuple(task_names()),
        parse_lengths(lengths),
        parse_numbers("--depths", options.depths),
        options.samples,
        options.seed,
        options.chunk_tokens,
        options.rows,
        options.chat_template,
        options.bos,
    )
    spec = MaskSpec(
        masks.choice(),
        parse_numbers("--sparsities", sparsities) if sparsities is not None else (),
        random_masks,
    )
    check_start(compute, out)
    variants = spec.variants(find_model(model).mask_source())
    loaded = compute.load(model)
    texts = read_texts(options.data, loaded, options.bos)
    result = evaluate_long(
        loaded,
        variants,
        plan,
        name=str(model),
        texts=texts,
        results_dir=None if out is None else out / "parts",
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
    """Refuse an unknown device or precision, and folders that cannot be written, before anything is measured."""
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
    try:
        text = str(folder).encode()
    except UnicodeEncodeError:
        text = b"\0"
    if b"\0" in text:
        raise ConfigError(
            f"the name of the folder {str(folder)!r} is not valid text. Give another one."
        )


def parse_lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens separated by commas; k means 1024."""
    return tuple(map(_parse_tokens, text.split(",")))


def _parse_tokens(text: str) -> int:
    plain = text.strip().lower()
    digits, scale = (plain[:-1], 1024) if plain.endswith("k") else (plain, 1)
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS):
        raise ConfigError(
            f"--lengths holds {text!r}; write whole numbers of tokens, 4096 or 4k, comma separated."
        )
    return int(digits) * scale


def parse_numbers(flag: str, text: str) -> tuple[float, ...]:
    """Numbers between commas."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; write numbers, comma separated.") from None


VERBS = {"eval compare": compare, "eval harness": harness, "eval long": long, "eval ppl": ppl}
