"""What a run is about to do, before its first step. In: a run that is built; out: log lines, and on a terminal a short table instead."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import prod

from headway.kernels.packed_layout import form_of, plain_name
from headway.model.layout import active_parameters, param_specs
from headway.optim.groups import count
from headway.plan.memory import Estimate, amount, estimate
from headway.runtime.log import FILE_ONLY, SCREEN_ONLY
from headway.runtime.progress import quantity
from headway.train.memory import describe_job
from headway.train.run import Run
from headway.train.run_form import run_form

log = logging.getLogger("headway")


def announce(run: Run) -> None:
    """Say what begins: lines in the log; a terminal with a progress bar shows the header above it."""
    has_header = run.console.bar is not None
    reading = DataLine.of(run)
    for line in [*describe(run), reading.line(run)]:
        log.info("%s", line, extra=FILE_ONLY if has_header else None)
    for label, text in header(run, reading) if has_header else ():
        log.info("  %-8s %s", label, text, extra=SCREEN_ONLY)


@dataclass(frozen=True)
class DataLine:
    """How much data there is and how much of it a run reads, in words."""

    there: str
    """The documents that are read, without those that are too short or for validation, and their tokens without padding."""
    read: str
    """The tokens that the steps read, without padding."""
    epochs: str
    """`, 1 epoch`; empty if there are no common passes over the data."""

    @staticmethod
    def of(run: Run) -> DataLine:
        """Count the documents and rows of a run."""
        if run.recipe.data.train is None:
            return DataLine(
                "as many as the steps need", quantity(run.total_steps * run.batch.tokens), ""
            )
        passes = run.recipe.epochs
        if passes is not None and not float(passes).is_integer():
            passes = None  # the last step is full, so that a little more is read
        amount = run.loader.amount(run.total_steps, passes)
        there = run_form(run.model).describe_amount(
            quantity(amount.documents), quantity(amount.tokens)
        )
        about = "about " if passes is None else ""
        epochs = ""
        if amount.epochs is not None:
            number = f"{amount.epochs:,.0f}" if amount.epochs >= 100 else f"{amount.epochs:.2g}"
            epochs = f", {about}{number} {'epoch' if number == '1' else 'epochs'}"
        return DataLine(there, about + quantity(round(amount.tokens_read)), epochs)

    def line(self, run: Run) -> str:
        """One line of the log."""
        what = run_form(run.model).unit
        return f"{what}: {self.there.removesuffix(' samples')}; {run.total_steps} steps read {self.read}{self.epochs}"


def header(run: Run, reading: DataLine) -> list[tuple[str, str]]:
    """Model, data, length, layout, memory and place, each in one short line."""
    trained, frozen = _sizes(run)
    began = "" if run.start.checkpoint is None else f" (resumes at step {run.state.step})"
    what = (
        "all train" if not frozen else f"{quantity(trained)} train, {quantity(frozen)} are frozen"
    )
    source = run.recipe.init.source
    layout = run.ranks.mesh.describe(run.recipe.parallel.strategy) or ["one process"]
    return [
        ("run", f"{run.start.folder}{began}"),
        (
            "model",
            f"{run.model.title}{f' from {source}' if source else ''}: {quantity(trained + frozen)} parameters, {what}",
        ),
        *[
            ("adapter", line.removeprefix("adapter "))
            for line in _match_lines(run)
            if line.startswith("adapter ")
        ],
        ("data", f"{_source(run)}: {reading.there}"),
        ("length", f"{run.total_steps:,} steps of {_row_size(run)}{reading.epochs}"),
        ("layout", f"{layout[0]}, {run.compute.precision} on {run.compute.name}"),
        *(
            [("memory", f"about {amount(_memory(run).total)} per rank")]
            if run_form(run.model).is_estimated
            else []
        ),
        (
            "results",
            "metrics.jsonl, train.log, checkpoints/"
            + (", final/" if run.recipe.checkpoint.at_end else ""),
        ),
    ]


def _row_size(run: Run) -> str:
    return run_form(run.model).describe_step(run.batch.rows, run.recipe.data.seq_len)


def _source(run: Run) -> str:
    return "generated data" if run.recipe.data.train is None else ", ".join(run.data.names)


def _sizes(run: Run) -> tuple[int, int]:
    """Parameters that train and parameters that do not."""
    training = {name for group in run.engine.groups for name in group.names}
    shapes = run.engine.shapes
    sizes = {name: prod(shape) for name, shape in shapes.items() if form_of(name) is None}
    quantised = [name for name in shapes if name not in sizes]
    if quantised:
        # Their shapes are those of bytes; the model's own say how many numbers they hold.
        known = {spec.name: spec.size for spec in param_specs(run.model)}
        sizes |= {name: known[plain_name(name)] for name in quantised}
    trained = sum(size for name, size in sizes.items() if name in training)
    return trained, sum(sizes.values()) - trained


def describe(run: Run) -> list[str]:
    """What a run is about to do, as log lines."""
    trained, frozen = _sizes(run)
    state = (
        "begins"
        if run.start.checkpoint is None
        else f"resumes {run.start.checkpoint.path} at step {run.state.step}"
    )
    return [
        f"run {run.start.folder} {state}; {run.total_steps} steps",
        f"model {run.model.title}: {trained + frozen:,} parameters, {trained:,} train"
        + (
            f", {active_parameters(run.model):,} active for one token"
            if run.model.experts is not None
            else ""
        )
        + (f", {frozen:,} frozen" if frozen else "")
        + f"; {run.compute.precision} on {run.compute.name}",
        *_match_lines(run),
        f"data {_source(run)}; {run.batch.describe(run.ranks.data.size)}",
        *_rate_lines(run),
        *run.targets.lines,
        *([run.reference.description] if run.reference is not None else []),
        *run.ranks.mesh.describe(run.recipe.parallel.strategy),
        *([_memory_line(run)] if run_form(run.model).is_estimated else []),
    ]


def _memory(run: Run) -> Estimate:
    return estimate(
        describe_job(run.recipe, run.model, run.compute, run.batch, run.ranks.mesh.world)
    )


def _memory_line(run: Run) -> str:
    found = _memory(run)
    host = f"; {amount(found.host)} in host memory" if found.host else ""
    return f"estimated memory of a rank: {amount(found.total)} ({found.describe()}){host}"


def _rate_lines(run: Run) -> list[str]:
    """The learning rate before and after its scaling by the batch."""
    config, optim = run.recipe.batch, run.recipe.optim
    if config.lr_scaling == "none":
        return []
    return [
        f"learning rate: {optim.lr:g} for {config.reference_rows} rows, {optim.lr * run.lr_factor:g} for {run.batch.rows} "
        f"({config.lr_scaling} scaling, factor {run.lr_factor:.4g}, all groups)"
    ]


def _match_lines(run: Run) -> list[str]:
    """What the patterns of a recipe match."""
    recipe, specs = run.recipe, run.engine.specs
    lines = [
        f"{key} {one.pattern}: {one.tensors} tensors, {one.parameters:,} parameters"
        for key, patterns in (("freeze", recipe.freeze), ("train", recipe.train))
        for one in count(patterns, specs)
    ]
    if recipe.adapter is not None:
        (matched,) = count(["adapter"], specs)
        linears = len(recipe.adapter.modules(run.model))
        lines.append(
            f"adapter {recipe.adapter.kind} of rank {recipe.adapter.rank} on {linears} linear layers: {matched.parameters:,} parameters"
            + (
                f"; the layers' matrices are stored in {recipe.adapter.base}"
                if recipe.adapter.base is not None
                else ""
            )
        )
    return lines
