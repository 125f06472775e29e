"""`headway eval ppl`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli import _masks
from headway.cli._output import JSON_FLAG, print_json
from headway.cli._ranks import over_ranks
from headway.cli.eval import _options

if TYPE_CHECKING:
    from headway.eval.evaluate import Evaluation
    from headway.parallel.collectives import RankGroup


def command(
    context: typer.Context,
    model: Path = typer.Option(..., "--model", help="A run folder, a checkpoint folder or a Hugging Face folder."),
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
    """Perplexity, bits per byte, accuracy and calibration of a model on text, with a sliding window where documents are longer than it."""
    from headway.eval.dataset import Reading, parse_datasets
    from headway.eval.evaluate import EvalPlan, SamplePlan
    from headway.model.head_masks.choice import MaskChoice

    choice = MaskChoice(masks, equal_per_layer, stream_window, stream_sinks)
    prompts, times = _options.prompts_of(prompt, prompts_file, samples)
    plan = EvalPlan(
        parse_datasets(data, suite),
        Reading(split, text_key, bos, max_samples, by),
        window,
        stride,
        batch_tokens,
        SamplePlan(prompts, times, max_new_tokens, temperature, seed, chat_template),
    )
    _options.check_start(device, precision, out, tensorboard)

    def work(group: RankGroup) -> None:
        from headway.eval.evaluate import evaluate

        loaded = _options.load(model, device, precision, choice, quiet=group.rank != 0)
        result = _options.with_training(evaluate(loaded, plan, name=str(model), group=group), model)
        if group.rank != 0:
            return
        _options.keep([result], out, tensorboard)
        _print(result, json, out)

    over_ranks(context, device, nproc, gpus, work)


def _print(result: Evaluation, json: bool, out: Path | None) -> None:
    if not json:
        _options.show([result])
        _options.say_where(out)
    elif len(result.datasets) == 1:
        # One dataset: its numbers at the top, as a script reads them.
        plain = result.to_json()
        print_json(
            {
                "model": plain["model"],
                **next(iter(plain["datasets"].values())),
                **{key: plain[key] for key in ("masks", "rope_theta", "no_rope_layers", "begin", "samples", "template", "training")},
            }
        )
    else:
        print_json(result.to_json())
