"""`headway eval compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli import _masks
from headway.cli._output import JSON_FLAG, print_json
from headway.cli._ranks import over_ranks
from headway.cli.eval import _options
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.eval.evaluate import Evaluation
    from headway.parallel.collectives import RankGroup


def command(
    context: typer.Context,
    models: list[Path] = typer.Argument(..., metavar="MODEL MODEL...", help="Run folders, checkpoint folders or Hugging Face folders."),
    data: list[str] = _options.DATA,
    suite: str | None = _options.SUITE,
    window: int | None = _options.WINDOW,
    stride: int | None = _options.STRIDE,
    batch_tokens: int = _options.BATCH_TOKENS,
    max_samples: int | None = _options.MAX_SAMPLES,
    split: str = _options.SPLIT,
    text_key: str | None = _options.TEXT_KEY,
    by: str | None = _options.BY,
    bos: bool | None = _options.BOS,
    prompt: list[str] = _options.PROMPT,
    prompts_file: Path | None = _options.PROMPTS_FILE,
    chat_template: str | None = _options.CHAT_TEMPLATE,
    samples: int | None = _options.SAMPLES,
    max_new_tokens: int = _options.MAX_NEW_TOKENS,
    temperature: float = _options.TEMPERATURE,
    seed: int = _options.SEED,
    out: Path | None = _options.OUT,
    tensorboard: Path | None = _options.TENSORBOARD,
    masks: str | None = _masks.MASKS,
    equal_per_layer: bool = _masks.EQUAL_PER_LAYER,
    stream_window: int | None = _masks.STREAM_WINDOW,
    stream_sinks: int | None = _masks.STREAM_SINKS,
    device: str = _options.DEVICE,
    precision: str = _options.PRECISION,
    nproc: int | None = _options.NPROC,
    gpus: str | None = _options.GPUS,
    json: bool = JSON_FLAG,
) -> None:
    """Several models side by side: the same data, the same prompts, and how those that are runs trained; one is loaded at a time."""
    from headway.eval.dataset import Reading, parse_datasets
    from headway.eval.evaluate import EvalPlan, SamplePlan
    from headway.model.head_masks.choice import MaskChoice

    choice = MaskChoice(masks, equal_per_layer, stream_window, stream_sinks)
    _check_models(models)
    prompts, times = _options.prompts_of(prompt, prompts_file, samples)
    plan = EvalPlan(
        # Prompts and the runs' own curves are something to compare without any data.
        parse_datasets(data, suite) if data or suite or not prompts else [],
        Reading(split, text_key, bos, max_samples, by),
        _shortest(models) if window is None else window,
        stride,
        batch_tokens,
        SamplePlan(prompts, times, max_new_tokens, temperature, seed, chat_template),
    )
    _options.check_start(device, precision, out, tensorboard)

    def work(group: RankGroup) -> None:
        from headway.eval.evaluate import evaluate

        load = partial(_options.load, device=device, precision=precision, choice=choice, quiet=group.rank != 0)
        results = [evaluate(load(model), plan, name=str(model), group=group) for model in models]
        if group.rank == 0:
            _report([_options.with_training(*pair) for pair in zip(results, models, strict=True)], out, tensorboard, json)

    over_ranks(context, device, nproc, gpus, work)


def _check_models(models: list[Path]) -> None:
    if len(models) < 2 or len(set(models)) < len(models):
        names = ", ".join(map(str, models))
        raise ConfigError(f"models are {names}; give two or more different ones. `headway eval ppl` measures one.")


def _shortest(models: list[Path]) -> int:
    """The same windows for all: a longer context alone makes a lower loss."""
    from headway.infer.load import find_model

    return min(find_model(model).config.max_seq_len for model in models)


def _report(results: list[Evaluation], out: Path | None, tensorboard: Path | None, json: bool) -> None:
    from headway.eval.evaluate import share_a_tokenizer

    _options.keep(results, out, tensorboard)
    if json:
        print_json({"same_tokenizer": share_a_tokenizer(results), "models": [result.to_json() for result in results]})
    else:
        _options.show(results)
        _options.say_where(out)
