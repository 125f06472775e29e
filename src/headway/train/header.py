"""What a run is about to do, before its first step.

In: a run that is built; out: log lines, and on a terminal a short table instead.
"""

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
    """Log what begins. A terminal with a progress bar shows a short table above the bar instead."""
    reading = DataLine.of(run)
    lines = [*describe(run), reading.line(run)]
    if run.console.bar is None:
        for line in lines:
            log.info("%s", line)
        return

    # The screen gets the short table instead; train.log has the lines in any case.
    for line in lines:
        log.info("%s", line, extra=FILE_ONLY)
    for label, text in header(run, reading):
        log.info("  %-8s %s", label, text, extra=SCREEN_ONLY)


@dataclass(frozen=True)
class DataLine:
    """How much data there is and how much of it a run reads, in words."""

    there: str
    """The documents that are read, without those that are too short or for validation, and their
    tokens without padding.
    """
    read: str
    """The tokens that the steps read, without padding."""
    epochs: str
    """`, 1 epoch`; empty if there are no common passes over the data."""

    @staticmethod
    def of(run: Run) -> DataLine:
        """Count the documents and rows of a run."""
        # Generated data has no end.
        if run.recipe.data.train is None:
            return DataLine(
                "as many as the steps need", quantity(run.total_steps * run.batch.tokens), ""
            )

        passes = run.recipe.epochs
        if passes is not None and not float(passes).is_integer():
            # The last step is full, so that a little more is read than the recipe asks for.
            passes = None
        amount = run.loader.amount(run.total_steps, passes)
        if run.rollouts is None:
            amount_text = run_form(run.model).describe_amount(
                quantity(amount.documents), quantity(amount.tokens)
            )
        else:
            # The answers are sampled, so that nobody knows how many tokens they have.
            amount_text = f"{quantity(amount.documents)} prompts"
        # A run of whole epochs reads exactly them; of other runs the amount is computed from means.
        about = "about " if passes is None else ""
        epochs = ""
        if amount.epochs is not None:
            if amount.epochs >= 100:
                epochs_text = f"{amount.epochs:,.0f}"
            else:
                epochs_text = f"{amount.epochs:.2g}"
            noun = "epoch" if epochs_text == "1" else "epochs"
            epochs = f", {about}{epochs_text} {noun}"
        return DataLine(amount_text, about + quantity(round(amount.tokens_read)), epochs)

    def line(self, run: Run) -> str:
        """One line of the log."""
        unit = run_form(run.model).unit
        if run.rollouts is not None:
            unit = "prompts"
        there = self.there.removesuffix(" samples").removesuffix(" prompts")
        return f"{unit}: {there}; {run.total_steps} steps read {self.read}{self.epochs}"


def header(run: Run, reading: DataLine) -> list[tuple[str, str]]:
    """Model, data, length, layout, memory and place, each in one short line."""
    trained, frozen = _sizes(run)
    began = ""
    if run.start.checkpoint is not None:
        began = f" (resumes at step {run.state.step})"
    lines = [("run", f"{run.start.folder}{began}")]

    origin = ""
    if run.recipe.init.source:
        origin = f" from {run.recipe.init.source}"
    training = "all train"
    if frozen:
        training = f"{quantity(trained)} train, {quantity(frozen)} are frozen"
    size = quantity(trained + frozen)
    lines.append(("model", f"{run.model.title}{origin}: {size} parameters, {training}"))
    for line in _match_lines(run):
        if line.startswith("adapter "):
            lines.append(("adapter", line.removeprefix("adapter ")))

    layout = run.ranks.mesh.describe(run.recipe.parallel.strategy) or ["one process"]
    lines += [
        ("data", f"{_source(run)}: {reading.there}"),
        ("length", f"{run.total_steps:,} steps of {_row_size(run)}{reading.epochs}"),
        ("layout", f"{layout[0]}, {run.compute.precision} on {run.compute.name}"),
    ]
    if run_form(run.model).is_estimated:
        lines.append(("memory", f"about {amount(_memory(run).total)} per rank"))

    results = "metrics.jsonl, train.log, checkpoints/"
    if run.recipe.checkpoint.at_end:
        results += ", final/"
    lines.append(("results", results))
    return lines


def _row_size(run: Run) -> str:
    if run.rollouts is not None:
        return _rollout_size(run)
    return run_form(run.model).describe_step(run.batch.rows, run.recipe.data.seq_len)


def _rollout_size(run: Run) -> str:
    """`8 prompts x 4 answers of at most 256 tokens`"""
    rollout = run.recipe.rollout
    size = (
        f"{rollout.prompts} prompts x {rollout.samples} answers of at most "
        f"{rollout.max_new_tokens} tokens"
    )
    if rollout.num_updates > 1:
        size += f" every {rollout.num_updates} steps"
    if rollout.ahead:
        size += ", one rollout ahead"
    return size


def _source(run: Run) -> str:
    if run.recipe.data.train is None:
        return "generated data"
    return ", ".join(run.data.names)


def _sizes(run: Run) -> tuple[int, int]:
    """Parameters that train and parameters that do not."""
    training = {name for group in run.engine.groups for name in group.names}
    shapes = run.engine.shapes
    sizes = {name: prod(shape) for name, shape in shapes.items() if form_of(name) is None}
    quantised = [name for name in shapes if name not in sizes]
    if quantised:
        # Their shapes are those of bytes; the model's own say how many numbers they hold.
        plain_sizes = {spec.name: spec.size for spec in param_specs(run.model)}
        sizes |= {name: plain_sizes[plain_name(name)] for name in quantised}
    trained = sum(size for name, size in sizes.items() if name in training)
    return trained, sum(sizes.values()) - trained


def describe(run: Run) -> list[str]:
    """What a run is about to do, as log lines."""
    state = "begins"
    if run.start.checkpoint is not None:
        state = f"resumes {run.start.checkpoint.path} at step {run.state.step}"

    trained, frozen = _sizes(run)
    sizes = f"{trained + frozen:,} parameters, {trained:,} train"
    if run.model.experts is not None:
        sizes += f", {active_parameters(run.model):,} active for one token"
    if frozen:
        sizes += f", {frozen:,} frozen"

    lines = [
        f"run {run.start.folder} {state}; {run.total_steps} steps",
        f"model {run.model.title}: {sizes}; {run.compute.precision} on {run.compute.name}",
        *_match_lines(run),
        f"data {_source(run)}; {_batch(run)}",
        *_rate_lines(run),
        *run.targets.lines,
    ]
    if run.reference is not None:
        lines.append(run.reference.description)
    lines += run.ranks.mesh.describe(run.recipe.parallel.strategy)
    if run_form(run.model).is_estimated:
        lines.append(_memory_line(run))
    return lines


def _batch(run: Run) -> str:
    if run.rollouts is None:
        return run.batch.describe(run.ranks.data.size)
    rows = f"microbatches of {run.batch.micro_rows} rows x {run.recipe.data.seq_len} tokens"
    return f"rollouts: {_rollout_size(run)}, in {rows}"


def _memory(run: Run) -> Estimate:
    return estimate(
        describe_job(run.recipe, run.model, run.compute, run.batch, run.ranks.mesh.world, run.data)
    )


def _memory_line(run: Run) -> str:
    needed = _memory(run)
    host = ""
    if needed.host:
        host = f"; {amount(needed.host)} in host memory"
    return f"estimated memory of a rank: {amount(needed.total)} ({needed.describe()}){host}"


def _rate_lines(run: Run) -> list[str]:
    """The learning rate before and after its scaling by the batch."""
    config = run.recipe.batch
    lr = run.recipe.optim.lr
    if config.lr_scaling == "none":
        return []
    return [
        f"learning rate: {lr:g} for {config.reference_rows} rows, "
        f"{lr * run.lr_factor:g} for {run.batch.rows} "
        f"({config.lr_scaling} scaling, factor {run.lr_factor:.4g}, all groups)"
    ]


def _match_lines(run: Run) -> list[str]:
    """What the patterns of a recipe match."""
    recipe = run.recipe
    specs = run.engine.specs
    lines: list[str] = []
    for key, patterns in (("freeze", recipe.freeze), ("train", recipe.train)):
        for match in count(patterns, specs):
            lines.append(
                f"{key} {match.pattern}: {match.tensors} tensors, {match.parameters:,} parameters"
            )

    adapter = recipe.adapter
    if adapter is not None:
        (matched,) = count(["adapter"], specs)
        num_linears = len(adapter.modules(run.model))
        line = (
            f"adapter {adapter.kind} of rank {adapter.rank} on {num_linears} linear layers: "
            f"{matched.parameters:,} parameters"
        )
        if adapter.base is not None:
            line += f"; the layers' matrices are stored in {adapter.base}"
        lines.append(line)
    return lines
