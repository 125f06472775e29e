"""`headway eval compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._output import JSON_FLAG, print_json
from headway.cli._ranks import over_ranks
from headway.cli.eval import _options
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.parallel.collectives import Group


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
    bos: bool = _options.BOS,
    prompt: list[str] = _options.PROMPT,
    samples: int | None = _options.SAMPLES,
    max_new_tokens: int = _options.MAX_NEW_TOKENS,
    temperature: float = _options.TEMPERATURE,
    seed: int = _options.SEED,
    out: Path | None = _options.OUT,
    tensorboard: Path | None = _options.TENSORBOARD,
    device: str = _options.DEVICE,
    precision: str = _options.PRECISION,
    nproc: int | None = _options.NPROC,
    gpus: str | None = _options.GPUS,
    json: bool = JSON_FLAG,
) -> None:
    """Several models side by side on the same data; each is loaded, measured and let go before the next."""
    from headway.eval.dataset import Reading, parse_datasets
    from headway.eval.evaluate import EvalPlan, SamplePlan
    from headway.infer.load import find_model

    names = [str(model) for model in models]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"models are {', '.join(names)}; give two or more different ones. `headway eval ppl` measures one.")
    plan = EvalPlan(
        parse_datasets(data, suite),
        Reading(split, text_key, bos, max_samples, by),
        # The same windows for all: a longer context alone makes a lower loss.
        min(find_model(model).config.max_seq_len for model in models) if window is None else window,
        stride,
        batch_tokens,
        SamplePlan(tuple(prompt), _options.num_samples(samples, prompt), max_new_tokens, temperature, seed),
    )
    _options.check_compute(device, precision)

    def work(group: Group) -> None:
        from headway.eval.evaluate import evaluate, share_a_tokenizer

        pairs = zip(models, names, strict=True)
        results = [evaluate(_options.load(model, device, precision), plan, name=name, group=group) for model, name in pairs]
        if group.rank != 0:
            return
        _options.keep(results, out, tensorboard)
        if json:
            print_json({"same_tokenizer": share_a_tokenizer(results), "models": [result.to_json() for result in results]})
        else:
            _options.show(results)

    over_ranks(context, device, nproc, gpus, work)
