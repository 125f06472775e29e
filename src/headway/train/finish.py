"""The end of a run: a run whose loop has ended comes in; final/ (a Hugging Face folder) and
summary.json go out.

All ranks call `finish`. Exporting gathers whole parameters from their shards, so every rank takes
part in it; the first rank alone writes.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headway.checkpoint.save import step_folder
from headway.checkpoint.stored_model import FINAL
from headway.errors import CheckpointError, ConfigError
from headway.export.huggingface import atomic_folder, export_huggingface
from headway.model.adapter.config import expert_linears
from headway.model.layout import GATES
from headway.model.loading.other_parts import kept_parts
from headway.model.media_files import is_media
from headway.optim.groups import ADAPTER, OBJECTIVE
from headway.runtime.process import leave_outcome
from headway.runtime.storage import writing
from headway.track.base import KeepsFiles
from headway.track.console import DATA_WAIT_SHOWN
from headway.track.curve import write_curve
from headway.track.events import clear_crash_report
from headway.train.closing import close_with
from headway.train.control import exit_code
from headway.train.early_stopping import restore_best, stopped_early
from headway.train.history import total_metrics
from headway.train.run_folder import METRICS, SUMMARY, write_json
from headway.train.run_form import run_form
from headway.train.samples import as_plain, plain_weights, sample_after

if TYPE_CHECKING:
    from headway.train.run import Run

log = logging.getLogger("headway")


def finish(run: Run, stopped_by: str | None) -> dict[str, Any]:
    """Export the model and write the summary of a finished run; a stopped run says how to resume.

    Returns the summary.
    """
    folder = run.start.folder
    # The progress bar ends here, so that the last lines do not mix with it.
    run.console.close()

    # The first rank alone has the metrics file.
    summary = None
    if run.process.is_first:
        summary = summarize(run)
    summary = run.ranks.world.gather(summary)[0]

    # A signal that came with the last step stops nothing: the run is complete.
    if stopped_by is not None and run.state.step < run.total_steps:
        if run.state.step == 0:
            log.info(
                "stopped by %s before the first step: no checkpoint is kept; "
                "the same command starts the run anew",
                stopped_by,
            )
        else:
            log.info(
                "stopped by %s after step %d; the same command resumes from there",
                stopped_by,
                run.state.step,
            )
        run.emit(
            "finish",
            f"stopped by {stopped_by} after step {run.state.step} of {run.total_steps}, "
            f"loss {_number(summary['last_loss'])}",
        )
        leave_outcome(exit_code(stopped_by))
        return {**summary, "stopped_by": stopped_by, "exit_code": exit_code(stopped_by)}

    early = stopped_early(run)
    summary["stopped_early"] = early
    if early is not None and "reason" in early:
        log.info(
            "stopped by a callback after step %d of %d: %s",
            run.state.step,
            run.total_steps,
            early["reason"],
        )
    elif early is not None:
        stop = run.recipe.eval.stop
        log.info(
            "stopped early after step %d of %d: %s has not improved by more than %g "
            "in %d validations; the best is %s, at step %s",
            run.state.step,
            run.total_steps,
            early["metric"],
            stop.min_delta if stop else 0.0,
            early["used"],
            _number(early["best"]),
            early["best_step"],
        )

    # Samples come after the export, which may put the best weights into the engine.
    if run.recipe.checkpoint.at_end:
        summary |= _export(run)
    else:
        summary |= {"final": None, "checkpoint": None}
    samples = sample_after(run)
    summary["samples"] = [as_plain(sample) for sample in samples]

    if run.process.is_first:
        write_json(folder / SUMMARY, summary)
        write_curve(folder / METRICS, f"{run.recipe.run.name}, {run.state.step} steps")
        for tracker in run.trackers:
            if isinstance(tracker, KeepsFiles):
                tracker.keep_files(folder)
    if (summary["data_wait_share"] or 0) > DATA_WAIT_SHOWN:
        log.warning(
            "training waited for data %.0f %% of the time; "
            "raise data.workers or data.prefetch, or set data.stage_to",
            100 * summary["data_wait_share"],
        )

    outcome = "done" if early is None else "stopped early"
    reason = ""
    if early is not None and "reason" in early:
        reason = f" ({early['reason']})"
    run.emit(
        "finish",
        f"{outcome}: {run.state.step} steps, loss {_number(summary['last_loss'])}{reason}",
    )
    # If this run is extended, its next crash is a new one.
    if run.process.is_first:
        clear_crash_report(folder)
    close_with(summary, samples)
    log.info(
        "done: %d steps in %.0f s, loss %s; %s",
        run.state.step,
        run.state.seconds,
        _number(summary["last_loss"]),
        folder,
    )
    return summary


def _export(run: Run) -> dict[str, Any]:
    """Export the last model, or the best one with `eval.stop.restore_best`.

    Returns the entries of the summary that name it and its checkpoint.
    """
    step = restore_best(run)
    return {
        "final": write_final(run),
        "checkpoint": str(step_folder(run.checkpoints, step)),
        "final_step": step,
    }


def write_final(run: Run) -> str | None:
    """Export the model to final/.

    None, with the reason in the log, where its family has no Hugging Face form.
    """
    target = run.start.folder / FINAL
    if not run.process.is_first:
        for _ in run.engine.weights():
            pass  # a rank that does not write still sends its shard of the weights
        return str(target)
    # Of an earlier end of a run that was extended.
    if target.exists():
        shutil.rmtree(target)
    return run_form(run.model).write_final(run, target)


def write_final_model(run: Run, target: Path) -> str | None:
    """Export a language model, and the adapter beside it where one was trained."""
    dtype = "bfloat16" if run.compute.precision in ("bf16", "fp8") else "float32"
    adapter = run.recipe.adapter
    weights = run.engine.weights()
    trained = dict[str, Tensor]()
    if adapter is not None:
        # Weights are gathered once: what trained is copied on its way into the merged model.
        weights = plain_weights(run.recipe, run.model, _copy_trained(weights, run, trained))
    try:
        export_huggingface(
            run.model,
            weights,
            target,
            tokenizer=run.tokenizer_path,
            dtype=dtype,
            end_ids=run.targets.end_ids,
            parts=kept_parts(run.start.folder),
        )
        # PEFT has no form for adapters of experts.
        if adapter is not None and set(adapter.modules(run.model)).isdisjoint(
            expert_linears(run.model)
        ):
            from headway.export.adapter import FOLDER, write_adapter

            write_adapter(
                trained,
                adapter,
                run.model,
                target / FOLDER,
                base=run.state.adapter_base,
                dtype="float32",
            )
    except ConfigError as reason:
        log.warning("no %s: %s", target, reason)
        return None
    return str(target)


def write_final_aligner(run: Run, target: Path) -> str:
    """Export an aligner: heads under PurrSight's names, and the towers."""
    from headway.model.loading.aligner_file import write_aligner_folder

    aligner = run.model.aligner_settings
    weights = {name: value.detach().to("cpu", copy=True) for name, value in run.engine.weights()}
    trained = {
        name.removeprefix(OBJECTIVE): value for name, value in run.engine.objective_values().items()
    }
    scales = run.recipe.objective.scales_of(aligner.modalities, trained)
    with writing(target, error=CheckpointError), atomic_folder(target) as folder:
        write_aligner_folder(folder, aligner, weights, scales)
    return str(target)


def _copy_trained(
    weights: Iterator[tuple[str, Tensor]], run: Run, trained: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Pass weights on and copy those that trained.

    Gates and media inputs are not part of an adapter; they are exported with the model.
    """
    training = {name for group in run.engine.groups for name in group.names}
    for name, value in weights:
        if (name in training or ADAPTER in name) and name != GATES and not is_media(name):
            trained[name] = value.detach().to("cpu", copy=True)
        yield name, value


def summarize(run: Run) -> dict[str, Any]:
    """The summary of a run, from its metrics file."""
    run.writes.retry()
    totals = total_metrics(run.start.folder / METRICS, repair=True)
    # Time of steps alone, without validations and saves. A run whose metrics are lost has its own.
    seconds = totals.seconds or run.state.seconds
    tokens_per_second = None
    samples_per_second = None
    save_stall_share = None
    if seconds:
        tokens_per_second = run.state.consumed_tokens / seconds
        samples_per_second = totals.samples / seconds
        save_stall_share = run.meter.stall_total / seconds
    return {
        "run": str(run.start.folder),
        "steps": run.state.step,
        "seconds": run.state.seconds,
        "start_seconds": run.session.start_time.parts,
        "tokens": run.state.consumed_tokens,
        "tokens_per_second": tokens_per_second,
        "samples_per_second": samples_per_second,
        "flops": run.meter.setup.flops.full * run.state.consumed_tokens,
        "first_loss": totals.losses.first,
        "last_loss": totals.losses.last,
        "best_loss": totals.losses.smallest,
        "first_valid_loss": totals.valid.first,
        "last_valid_loss": totals.valid.last,
        "best_valid_loss": totals.valid.smallest,
        "validation": totals.validation(),
        "peak_memory_bytes": totals.peak_memory_bytes,
        "skipped_steps": run.meter.skipped,
        "save_stall_share": save_stall_share,
        "saves": run.meter.saves,
        "data_wait_share": totals.data_wait_share,
        "rollout_share": totals.rollout_share,
    }


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4f}"
