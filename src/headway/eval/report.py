"""Evaluations come in; a folder with results.json (every number), report.md (tables and
continuations) and plots goes out.

The cells of the tables are the same on a terminal and in a report.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headway import __version__
from headway.errors import ConfigError
from headway.eval.evaluate import Evaluation, TrainingCurves, ValidationPoint, share_a_tokenizer
from headway.eval.perplexity import PartPerplexity, Perplexity, finite_exp
from headway.eval.scoring import NUM_BINS
from headway.model.head_masks.masks import in_words
from headway.runtime.optional import how_to_get, is_installed
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

log = logging.getLogger("headway")

RESULTS = "results.json"
REPORT = "report.md"
LOSS_BY_POSITION = "loss-by-position.png"
RELIABILITY = "reliability.png"
TRAINING = "training.png"
NUMBERS = ("loss", "perplexity", "bits/byte", "accuracy", "ECE", "tokens", "documents")
MODELS = (
    "model",
    "rope_theta",
    "layers without RoPE",
    "masks",
    "begin token",
    "mean perplexity",
    "std",
    "range",
)
"""The spread is over the datasets."""
PART_NUMBERS = ("loss", "perplexity", "bits/byte", "accuracy", "tokens", "documents")
TRAINING_COLUMNS = ("run", "set", "number", "first validation", "last validation")
NOT_SHOWN = ("tokens",)
"""Counts of what was validated, the same every time."""
TRAINING_PLOTS = ("loss", "rewards/accuracies", "rewards/margins")
"""Numbers of validation that get a plot; runs without rewards have only the first."""
MAX_COLUMNS = 3
"""Panels side by side."""
OTHER_TOKENIZERS = (
    "The models have different tokenizers: compare bits per byte, not loss, perplexity or "
    "accuracy, which are per token."
)


def model_cells(evaluation: Evaluation) -> list[str]:
    """The cells under `MODELS`: what a model is, and its perplexity over the datasets."""
    theta = "unknown"
    if evaluation.rope_theta is not None:
        theta = f"{evaluation.rope_theta:g}"
    layers = ", ".join(map(str, evaluation.no_rope_layers)) or "none"

    perplexities = ["", "", ""]
    spread = evaluation.perplexities
    if spread is not None:
        value_range = f"{spread.min:.3f} - {spread.max:.3f}"
        perplexities = [f"{spread.mean:.3f}", f"{spread.std:.3f}", value_range]
    return [
        evaluation.model,
        theta,
        layers,
        in_words(evaluation.masks),
        evaluation.begin or "none",
        *perplexities,
    ]


def score_cells(result: Perplexity) -> list[str]:
    """The cells under `NUMBERS`."""
    cells = _cells(result)
    # The error stands behind the accuracy, before the counts.
    return [*cells[:4], f"{result.calibration_error:.4f}", *cells[4:]]


def part_cells(part: PartPerplexity) -> list[str]:
    """The cells under `PART_NUMBERS`."""
    return _cells(part)


def _cells(result: Perplexity | PartPerplexity) -> list[str]:
    bits = "unknown"
    if result.bits_per_byte is not None:
        bits = f"{result.bits_per_byte:.4f}"
    return [
        f"{result.loss:.4f}",
        f"{result.perplexity:.3f}",
        bits,
        f"{result.accuracy:.1%}",
        str(result.tokens),
        str(result.documents),
    ]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """A table in Markdown, followed by an empty line."""
    yield "| " + " | ".join(column.replace("|", r"\|") for column in columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
    yield ""


def training_rows(training: TrainingCurves) -> Iterable[list[str]]:
    """The cells under `TRAINING_COLUMNS`: every number of every set at its first and its last
    validation.
    """
    for name, points in training.valid.items():
        first = points[0]
        last = points[-1]
        for number in last.numbers:
            if number not in NOT_SHOWN:
                yield [training.run, name, number, _cell(first, number), _cell(last, number)]


def training_lines(trainings: Sequence[TrainingCurves]) -> Iterable[str]:
    """The section of a report about training."""
    yield "## Training"
    yield ""
    yield f"![training]({TRAINING})"
    yield ""

    rows: list[list[str]] = []
    has_zero_rewards = False
    for training in trainings:
        rows += training_rows(training)
        for points in training.valid.values():
            for point in points:
                is_zero = point.numbers.get("rewards/accuracies") == 0
                has_zero_rewards |= is_zero and point.step == 0
    if rows:
        yield from markdown_table(TRAINING_COLUMNS, rows)

    # An accuracy of 0 looks like a broken run, and is none.
    if has_zero_rewards:
        yield (
            "A reward is the gain of a model over its reference. Before the first step both are "
            "identical, so no pair is won."
        )
        yield ""


def make_report_folder(folder: Path) -> None:
    """Make the folder of a report; a file in its place is refused."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out is {str(folder)!r}, which is a file. Give a folder.")
    folder.mkdir(parents=True, exist_ok=True)


def write_report(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write the folder; a report that is already there is replaced."""
    make_report_folder(folder)
    models = [evaluation.to_json() for evaluation in evaluations]
    results = {"headway": __version__, "models": models}
    # NaN is no JSON. A number that is not finite must have become None before.
    content = json.dumps(results, ensure_ascii=False, indent=2, allow_nan=False)
    write_atomic(folder / RESULTS, content + "\n")

    if evaluations[0].datasets and can_draw():
        draw_plots(folder, evaluations)
    trainings = _trainings(evaluations)
    if trainings and can_draw():
        write_atomic(folder / TRAINING, draw_training(trainings))
    write_atomic(folder / REPORT, "\n".join(only_drawn(_lines(evaluations))) + "\n")


def can_draw() -> bool:
    """Whether matplotlib is there. Without it a report has no pictures."""
    return is_installed("matplotlib")


def only_drawn(lines: Iterable[str]) -> Iterable[str]:
    """The lines of a report; without matplotlib its pictures are left out.

    Text of models is indented, so it is never taken for one.
    """
    if can_draw():
        return lines
    log.warning(
        "the report has no pictures: matplotlib is not installed (%s)", how_to_get("matplotlib")
    )
    return (line for line in lines if not line.startswith("!["))


def _lines(evaluations: Sequence[Evaluation]) -> Iterable[str]:
    yield "# Evaluation"
    yield ""
    if evaluations[0].datasets:
        yield from _scores(evaluations)
    trainings = _trainings(evaluations)
    if trainings:
        yield from training_lines(trainings)
    if any(evaluation.samples for evaluation in evaluations):
        yield from _samples(evaluations)


def _trainings(evaluations: Sequence[Evaluation]) -> list[TrainingCurves]:
    """The curves of all models that are runs."""
    return [training for evaluation in evaluations for training in evaluation.training]


def _scores(evaluations: Sequence[Evaluation]) -> Iterable[str]:
    datasets = list(evaluations[0].datasets)
    for evaluation in evaluations:
        first = evaluation.datasets[datasets[0]]
        yield f"- `{evaluation.model}`: windows of {first.window} tokens with stride {first.stride}"
    yield ""
    yield from markdown_table(
        ["dataset", "model", *NUMBERS],
        (
            [name, evaluation.model, *score_cells(evaluation.datasets[name])]
            for name in datasets
            for evaluation in evaluations
        ),
    )
    yield from markdown_table(MODELS, map(model_cells, evaluations))
    yield "Mean, standard deviation and range of the perplexity are over the datasets."
    yield ""
    if not share_a_tokenizer(evaluations):
        yield OTHER_TOKENIZERS
        yield ""
    yield (
        "Loss is in nats per token. ECE is the expected calibration error of the first choice's "
        "probability, over 15 bins."
    )
    yield ""
    yield from _parts(evaluations, datasets)
    yield from _positions(evaluations, datasets)
    yield "## Calibration"
    yield ""
    yield f"![reliability]({RELIABILITY})"
    yield ""


def _parts(evaluations: Sequence[Evaluation], datasets: Sequence[str]) -> Iterable[str]:
    for name in datasets:
        rows = [
            [part.name, evaluation.model, *part_cells(part)]
            for evaluation in evaluations
            for part in evaluation.datasets[name].parts
        ]
        if rows:
            yield f"## Parts of {name}"
            yield ""
            yield from markdown_table(
                ["part", "model", *PART_NUMBERS], sorted(rows, key=lambda row: row[0])
            )


def _positions(evaluations: Sequence[Evaluation], datasets: Sequence[str]) -> Iterable[str]:
    yield "## Loss (and perplexity) by tokens of context"
    yield ""
    yield f"![loss by position]({LOSS_BY_POSITION})"
    yield ""
    for name in datasets:
        losses = [
            {
                (bucket.first, bucket.last): bucket.loss
                for bucket in evaluation.datasets[name].positions
            }
            for evaluation in evaluations
        ]
        # Models of other tokenizers have other lengths, so a bucket may be empty for some.
        spans = sorted({span for buckets in losses for span in buckets})
        yield f"### {name}"
        yield ""
        cells = (
            [
                f"{first}-{last}",
                *(_loss_and_perplexity(buckets.get((first, last))) for buckets in losses),
            ]
            for first, last in spans
        )
        yield from markdown_table(
            ["context", *(evaluation.model for evaluation in evaluations)], cells
        )


def _loss_and_perplexity(loss: float | None) -> str:
    if loss is None:
        return ""
    return f"{loss:.4f} ({finite_exp(loss):.2f})"


def _samples(evaluations: Sequence[Evaluation]) -> Iterable[str]:
    """Every prompt once, followed by the text of each model."""
    has_answers = evaluations[0].template is not None
    yield "## Answers" if has_answers else "## Continuations"
    for index, sample in enumerate(evaluations[0].samples):
        yield ""
        yield from _indented(sample.prompt)
        for evaluation in evaluations:
            # A continuation is shown with its prompt in front, as one text.
            headline = f"**{evaluation.model}**:"
            text = sample.prompt + evaluation.samples[index].text
            if has_answers:
                headline = f"**{evaluation.model}** answers:"
                text = evaluation.samples[index].text
            yield ""
            yield headline
            yield ""
            yield from _indented(text)


def _indented(text: str) -> Iterable[str]:
    """Indented, so that nothing a model writes is read as Markdown."""
    return (f"    {line}" for line in text.splitlines() or [""])


def draw_plots(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write one plot per kind of number, with a panel per dataset and a line per model."""
    for name, draw in ((LOSS_BY_POSITION, _loss_by_position), (RELIABILITY, _reliability)):
        # `draw` is a default, so that each panel function keeps the one of its turn.
        def panel(
            axes: Axes, dataset: str, draw: Callable[[Axes, Sequence[Evaluation], str], None] = draw
        ) -> None:
            draw(axes, evaluations, dataset)
            axes.set_title(_escaped(dataset))

        figure, first = _panels(list(evaluations[0].datasets), panel, extra_height=0.4)
        if len(evaluations) > 1:
            # Lines of models have points; the diagonal of perfect calibration has none.
            lines = [line for line in first.get_lines() if line.get_marker() == "o"]
            names = [_escaped(evaluation.model) for evaluation in evaluations]
            figure.legend(lines, names, loc="outside lower center", ncols=1)
        write_atomic(folder / name, png(figure))


def draw_training(trainings: Sequence[TrainingCurves]) -> bytes:
    """A PNG: the loss of each run, and the rewards of a preference run."""
    panels: list[tuple[TrainingCurves, str]] = []
    for training in trainings:
        for number in TRAINING_PLOTS:
            if number == "loss" or _has(training, number):
                panels.append((training, number))
    figure, _ = _panels(panels, lambda axes, panel: _training_panel(axes, *panel))
    return png(figure)


def _panels(
    items: Sequence[T], draw: Callable[[Axes, T], None], extra_height: float = 0.0
) -> tuple[Figure, Axes]:
    """A figure with a panel for each item, and its first panel."""
    # Figure, not pyplot: pyplot keeps figures and a choice of screen for the whole process.
    from matplotlib.figure import Figure

    # Sizes are in inches.
    columns = min(len(items), MAX_COLUMNS)
    rows = math.ceil(len(items) / columns)
    figure = Figure(figsize=(5 * columns, 4 * rows + extra_height), dpi=120, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, item in zip(grid, items, strict=False):
        draw(axes, item)
        axes.grid(alpha=0.3)
    for axes in grid[len(items) :]:
        axes.remove()
    return figure, grid[0]


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _training_panel(axes: Axes, training: TrainingCurves, number: str) -> None:
    """One number of one run over its steps, a line for each validation set."""
    if number == "loss" and training.loss:
        axes.plot(
            [step for step, _ in training.loss],
            [loss for _, loss in training.loss],
            color="lightgrey",
            label="training",
        )
    # A value that was not finite is unknown; the line skips it.
    for name, points in training.valid.items():
        known = [
            (point.step, value)
            for point in points
            if (value := point.numbers.get(number)) is not None
        ]
        axes.plot(
            [step for step, _ in known],
            [value for _, value in known],
            marker="o",
            label=_escaped(name),
        )
    axes.set_title(_escaped(training.run), fontsize="small")
    axes.set_xlabel("step")
    axes.set_ylabel(number)
    if axes.get_lines():
        axes.legend()


def _has(training: TrainingCurves, number: str) -> bool:
    return any(number in point.numbers for points in training.valid.values() for point in points)


def _cell(point: ValidationPoint, number: str) -> str:
    text = "unknown"
    value = point.numbers.get(number)
    if value is not None:
        text = f"{value:.4f}"
    return f"{text} (step {point.step})"


def _loss_by_position(axes: Axes, evaluations: Sequence[Evaluation], dataset: str) -> None:
    for evaluation in evaluations:
        buckets = evaluation.datasets[dataset].positions
        axes.plot(
            [bucket.first for bucket in buckets], [bucket.loss for bucket in buckets], marker="o"
        )
    # Buckets are powers of two.
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tokens of context (from here to twice as many)")
    axes.set_ylabel("loss (nats per token)")


def _reliability(axes: Axes, evaluations: Sequence[Evaluation], dataset: str) -> None:
    """Accuracy over confidence; on the diagonal a model is as often right as it says."""
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1)

    # Bars of several models would hide each other.
    if len(evaluations) == 1:
        scores = evaluations[0].datasets[dataset]
        lows = [bin.low for bin in scores.bins]
        shares = [bin.tokens / scores.tokens for bin in scores.bins]
        axes.bar(lows, shares, 1 / NUM_BINS, align="edge", color="lightgrey")
        caption = f"ECE {scores.calibration_error:.4f}; grey: share of tokens"
        axes.text(0.03, 0.93, caption, transform=axes.transAxes)

    for evaluation in evaluations:
        bins = evaluation.datasets[dataset].bins
        points = [
            (bin.confidence, bin.accuracy)
            for bin in bins
            if bin.confidence is not None and bin.accuracy is not None
        ]
        axes.plot(
            [confidence for confidence, _ in points],
            [accuracy for _, accuracy in points],
            marker="o",
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("probability of the first choice")
    axes.set_ylabel("accuracy")


def _escaped(text: str) -> str:
    """Text with dollar signs escaped, so that matplotlib reads none as a formula."""
    return text.replace("$", r"\$")
