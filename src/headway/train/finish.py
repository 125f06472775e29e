"""The end of a run: final/ (a Hugging Face folder) and summary.json."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headway.checkpoint.save import step_folder
from headway.errors import ConfigError
from headway.export.adapter import FOLDER, write_adapter
from headway.export.huggingface import export_huggingface
from headway.infer.load import FINAL
from headway.model.adapter.lora import merged
from headway.model.layout import GATES
from headway.optim.groups import ADAPTER
from headway.runtime.process import leave_outcome
from headway.track.console import DATA_WAIT_SHOWN
from headway.track.jsonl import MetricsFile, MetricsReader
from headway.track.outside import end_claims
from headway.train.evaluate import AT_START
from headway.train.folder import METRICS, SUMMARY, write_json
from headway.train.meter import WARM_STEPS
from headway.train.orders import exit_code
from headway.train.patience import restore_best, stopped_early

if TYPE_CHECKING:
    from headway.train.build import Run

log = logging.getLogger("headway")


def finish(run: Run, stopped_by: str | None) -> dict[str, Any]:
    """Write what a finished run leaves behind; a stopped one says how to go on. Returns the summary."""
    folder = run.start.folder
    summary = run.ranks.world.gather(summarize(run) if run.process.is_first else None)[0]
    if stopped_by is not None and run.state.step < run.total_steps:
        log.info("stopped by %s after step %d; the same command goes on from there", stopped_by, run.state.step)
        run.tell(
            "finish", f"stopped by {stopped_by} after step {run.state.step} of {run.total_steps}, loss {_number(summary['last_loss'])}"
        )
        leave_outcome(exit_code(stopped_by))
        return {**summary, "stopped_by": stopped_by, "exit_code": exit_code(stopped_by)}
    summary["stopped_early"] = early = stopped_early(run)
    if early is not None:
        log.info(
            "stopped early after step %d of %d: %s has not improved by more than %g in %d validations; the best is %s, at step %s",
            run.state.step, run.total_steps, early["metric"], run.recipe.eval.stop.min_delta if run.recipe.eval.stop else 0.0,
            early["used"], _number(early["best"]), early["best_step"],
        )  # fmt: skip
    summary |= keep_model(run) if run.recipe.checkpoint.at_end else {"final": None, "checkpoint": None}
    if run.process.is_first:
        write_json(folder / SUMMARY, summary)
    if (summary["data_wait_share"] or 0) > DATA_WAIT_SHOWN:
        log.warning(
            "training waited for data %.0f %% of the time; raise data.workers or data.prefetch, or set data.stage_to",
            100 * summary["data_wait_share"],
        )
    run.tell("finish", f"{'done' if early is None else 'stopped early'}: {run.state.step} steps, loss {_number(summary['last_loss'])}")
    if run.process.is_first:
        end_claims(folder)
    log.info("done: %d steps in %.0f s, loss %s; %s", run.state.step, run.state.seconds, _number(summary["last_loss"]), folder)
    return summary


def keep_model(run: Run) -> dict[str, Any]:
    """Export the trained model, or the best one where the recipe asks for it, and say which checkpoint holds it."""
    step = restore_best(run)
    return {"final": write_final(run), "checkpoint": str(step_folder(run.checkpoints, step)), "final_step": step}


def write_final(run: Run) -> str | None:
    """Export the trained model; None, with the reason in the log, where its family has no Hugging Face form."""
    target = run.start.folder / FINAL
    if not run.process.is_first:
        for _ in run.engine.weights():
            pass  # a rank that does not write still gives its part of the weights
        return str(target)
    if target.exists():
        shutil.rmtree(target)
    dtype = "bfloat16" if run.compute.precision in ("bf16", "fp8") else "float32"
    adapter, weights, kept = run.recipe.adapter, run.engine.weights(), dict[str, Tensor]()
    if adapter is not None:
        weights = merged(_keeping(weights, run, kept), adapter, adapter.modules(run.model))
    try:
        export_huggingface(run.model, weights, target, tokenizer=run.tokenizer_path, dtype=dtype, end_ids=run.targets.end_ids)
        if adapter is not None:
            write_adapter(kept, adapter, run.model, target / FOLDER, base=run.state.adapter_base, dtype="float32")
    except ConfigError as reason:
        log.warning("no %s: %s", target, reason)
        return None
    return str(target)


def _keeping(weights: Iterator[tuple[str, Tensor]], run: Run, kept: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights as they come, and copies of those that trained; gates are no part of an adapter and lie beside the model."""
    training = {name for group in run.engine.groups for name in group.names}
    for name, value in weights:
        if (name in training or ADAPTER in name) and name != GATES:
            kept[name] = value.detach().to("cpu", copy=True)
        yield name, value


class Tally:
    """What the records of a run come to, added up one by one: a long run has millions. A record that lacks something counts without it."""

    def __init__(self) -> None:
        self.losses, self.valid = Extremes(), Extremes()
        self.records = self.samples = 0
        self.seconds = self.warm_seconds = self.warm_wait = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one more record."""
        self.records += 1
        self.losses.add(record.get("loss"))
        for key in (AT_START, "valid"):
            for values in _mapping(record.get(key)).values():
                self.valid.add(_mapping(values).get("loss"))
        self.samples += int(_amount(record.get("num_samples_in_batch")))
        times = _mapping(record.get("time"))
        seconds = _amount(times.get("step_seconds"))
        self.seconds += seconds
        if self.records > WARM_STEPS:
            self.warm_seconds += seconds
            self.warm_wait += _amount(times.get("data_wait_seconds"))

    @property
    def data_wait_share(self) -> float | None:
        """Share of the step time spent waiting for batches; None where there were too few steps to say."""
        return self.warm_wait / self.warm_seconds if self.warm_seconds else None


class Extremes:
    """The first, the last and the smallest of some numbers."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.least: float | None = None

    def add(self, value: Any) -> None:
        """Take one more; what is no number is left out."""
        if type(value) in (int, float):
            self.first = value if self.first is None else self.first
            self.last = value
            self.least = value if self.least is None else min(self.least, value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _amount(value: Any) -> float:
    return value if type(value) in (int, float) else 0


def tally(metrics: Path, *, repair: bool = False) -> Tally:
    """Add up a metrics file; with `repair` it is written anew without lines that are damaged, if there are any."""
    found = Tally()
    if metrics.exists():  # else stopped before the first step
        reader = MetricsReader(metrics)
        for record in reader:
            found.add(record)
        if reader.damaged and repair:
            MetricsFile(metrics).repair()
    return found


def summarize(run: Run) -> dict[str, Any]:
    """What a run came to, from its metrics file."""
    run.writes.retry()
    found = tally(run.start.folder / METRICS, repair=True)
    seconds = found.seconds or run.state.seconds
    return {
        "run": str(run.start.folder),
        "steps": run.state.step,
        "seconds": run.state.seconds,
        "tokens": run.state.consumed_tokens,
        "tokens_per_second": run.state.consumed_tokens / seconds if seconds else None,
        "samples_per_second": found.samples / seconds if seconds else None,
        "flops": run.meter.facts.flops.full * run.state.consumed_tokens,
        "first_loss": found.losses.first,
        "last_loss": found.losses.last,
        "best_loss": found.losses.least,
        "first_valid_loss": found.valid.first,
        "last_valid_loss": found.valid.last,
        "best_valid_loss": found.valid.least,
        "skipped_steps": run.meter.skipped,
        "save_stall_share": run.meter.stall_total / seconds if seconds else None,
        "saves": run.meter.saves,
        "data_wait_share": found.data_wait_share,
    }


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
