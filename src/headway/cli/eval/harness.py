"""`headway eval harness`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli import _masks
from headway.cli._output import JSON_FLAG, print_json, print_table
from headway.cli._ranks import over_ranks
from headway.cli.eval import _options

if TYPE_CHECKING:
    from headway.parallel.collectives import RankGroup


def command(
    context: typer.Context,
    model: Path = typer.Option(..., "--model", help="A run folder, a checkpoint folder or a Hugging Face folder."),
    tasks: list[str] = typer.Option(..., "--tasks", help="Names or patterns of tasks (`lm-eval ls tasks`); several times or with commas."),
    task_dir: Path | None = typer.Option(None, help="A folder with tasks of your own as YAML; code that they name is run."),
    limit: int | None = typer.Option(None, help="Only this many documents of each task, from its beginning."),
    shots: int | None = typer.Option(None, help="Solved examples before each question; as each task says if not given."),
    batch_tokens: int = _options.BATCH_TOKENS,
    online: bool = typer.Option(False, "--online", help="Let tasks fetch their data from the hub; else it must be on this machine."),
    log_samples: bool = typer.Option(False, "--log-samples", help="With --out: also write every document with the model's answers."),
    out: Path | None = typer.Option(None, help="Write results.json and report.md into this folder."),
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
    """Run tasks of lm-evaluation-harness; without masks the results are those of its own `--model hf` on the exported model."""
    from headway.errors import ConfigError
    from headway.eval.harness import COLUMNS, HarnessPlan, check_installed, run_harness, write_results
    from headway.infer.load import find_model
    from headway.model.head_masks.choice import MaskChoice

    check_installed()
    choice = MaskChoice(masks, equal_per_layer, stream_window, stream_sinks)
    if log_samples and out is None:
        raise ConfigError("--log-samples is given without --out. Give a folder with --out, or leave it out.")
    plan = HarnessPlan([name for given in tasks for name in given.split(",") if name], task_dir, limit, shots, online)
    _options.check_start(device, precision, out)
    find_model(model)

    def work(group: RankGroup) -> None:
        from headway.eval.answers import Answers

        loaded = _options.load(model, device, precision, choice, quiet=group.rank != 0)
        answers = Answers(loaded, batch_tokens=batch_tokens, group=group)
        result = run_harness(answers, plan, name=str(model))
        if result is None:
            return
        if out is not None:
            write_results(out, result, samples=log_samples)
        if json:
            print_json(result.to_json())
        else:
            print_table(list(COLUMNS), [one.cells() for one in result.metrics])
            _options.say_where(out)

    over_ranks(context, device, nproc, gpus, work)
