"""What the public functions return: frozen, typed, shown as a table in a terminal and in a
notebook. Imports without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.api.table import ResultTable, as_html, as_text

if TYPE_CHECKING:
    from headway.eval.perplexity import Perplexity

MAX_ROWS = 20
"""Rows of the table of losses; metrics.jsonl has every step."""


@dataclass(frozen=True)
class _Shown(ABC):
    """A result that shows itself: as text in a terminal, as HTML in a notebook, which calls
    `_repr_html_`.
    """

    @abstractmethod
    def _facts(self) -> tuple[str, Mapping[str, Any], ResultTable | None]:
        """A title, named values, and a table below them."""

    def __str__(self) -> str:
        return as_text(*self._facts())

    def _repr_html_(self) -> str:
        return as_html(*self._facts())


@dataclass(frozen=True)
class TrainResult(_Shown):
    """What a run did, and where its files are.

    Example:
        >>> result = hw.train(hw.Recipe.load("laptop/pretrain", ["steps=20"]))
        >>> result.last_loss, result.final
    """

    run: Path
    """The run folder."""
    steps: int
    """Steps done so far, those of earlier starts included."""
    losses: ResultTable
    """At most twenty rows: step, mean training loss since the row before, and the loss of each
    validation set.
    """
    final: Path | None
    """The exported model; None where the run was stopped, or `checkpoint.at_end` is false."""
    checkpoint: Path | None
    """The checkpoint `final` was made from."""
    metrics: Path
    """metrics.jsonl: one line of JSON for every step."""
    first_loss: float | None
    last_loss: float | None
    best_loss: float | None
    last_valid_loss: float | None
    best_valid_loss: float | None
    tokens: int
    seconds: float
    tokens_per_second: float | None
    stopped_by: str | None = None
    """`headway stop`, or a signal that the program handles itself; None for a run that is complete.
    """
    stopped_early: bool = False
    """Whether `eval.stop` ended the run."""
    summary: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """All of summary.json."""

    def history(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl."""
        from headway.track.metrics_file import read_metrics

        return list(read_metrics(self.metrics))

    def _facts(self) -> tuple[str, Mapping[str, Any], ResultTable | None]:
        facts = {
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "tokens/s": self.tokens_per_second,
            "loss": self.last_loss,
            "valid loss": self.last_valid_loss,
            "model": self.final,
            "stopped by": self.stopped_by,
        }
        return f"run {self.run}", facts, self.losses

    @staticmethod
    def of(summary: Mapping[str, Any]) -> TrainResult:
        """The result of a summary, with the losses of its metrics file."""
        run = Path(summary["run"])

        def path(key: str, usual: Path) -> Path | None:
            if key in summary:
                if summary[key] is None:
                    return None
                return Path(summary[key])
            # A run that was complete before this call has a summary without these keys.
            if usual.is_dir() and "stopped_by" not in summary:
                return usual
            return None

        return TrainResult(
            run=run,
            steps=summary.get("steps", 0),
            losses=loss_table(run),
            final=path("final", run / "final"),
            checkpoint=path("checkpoint", run / "checkpoints" / "latest"),
            metrics=run / "metrics.jsonl",
            first_loss=summary.get("first_loss"),
            last_loss=summary.get("last_loss"),
            best_loss=summary.get("best_loss"),
            last_valid_loss=summary.get("last_valid_loss"),
            best_valid_loss=summary.get("best_valid_loss"),
            tokens=summary.get("tokens", 0),
            seconds=summary.get("seconds", 0.0),
            tokens_per_second=summary.get("tokens_per_second"),
            stopped_by=summary.get("stopped_by"),
            stopped_early=summary.get("stopped_early") is not None,
            summary=dict(summary),
        )


def loss_table(run: Path) -> ResultTable:
    """The losses of a run as a small table.

    Steps of a run with several stages are counted over all of them.
    """
    from headway.train.meter import AT_START

    losses: dict[int, float] = {}
    valid: dict[int, dict[str, float]] = {}
    for record in _records(run):
        step = int(record["step"])
        # A loss that is not finite is null in the file.
        if isinstance(loss := record.get("loss"), int | float):
            losses[step] = loss

        # The validation before the first step stands in that step's record.
        for valid_step, key in ((step - 1, AT_START), (step, "valid")):
            for name, loss in _valid_losses(record.get(key)):
                valid.setdefault(valid_step, {})[name] = loss

    names = sorted(set().union(*valid.values()))
    headings = [f"valid {name}" for name in names]
    if names == ["valid"]:  # a single set without a name of its own
        headings = ["valid"]

    # Each row has the mean loss since the row before, so that the table leaves no step out.
    rows: list[tuple[Any, ...]] = []
    before = -1  # step 0 may have a row: the validation before the first step
    for step in _evenly(sorted({*losses, *valid}), set(valid)):
        since = [loss for loss_step, loss in losses.items() if before < loss_step <= step]
        mean = sum(since) / len(since) if since else None
        rows.append((step, mean, *(valid.get(step, {}).get(name) for name in names)))
        before = step

    return ResultTable(("step", "loss", *headings), tuple(rows))


def _valid_losses(sets: Any) -> Iterator[tuple[str, float]]:
    """Name and loss of each validation set in a record, whatever else it holds."""
    if not isinstance(sets, dict):
        return
    for name, numbers in sets.items():
        if isinstance(numbers, dict) and isinstance(numbers.get("loss"), int | float):
            yield name, numbers["loss"]


def _records(run: Path) -> Iterable[dict[str, Any]]:
    from headway.track.metrics_file import MetricsReader

    metrics = run / "metrics.jsonl"
    if metrics.is_file():
        return MetricsReader(metrics)
    return []


def _evenly(steps: list[int], validated: set[int]) -> list[int]:
    """At most MAX_ROWS of the steps, the first and the last among them.

    Those with a validation come first.
    """
    chosen = [step for step in steps if step in validated or step == steps[-1]]
    # Too few of them would hide how the loss fell.
    if len(chosen) < 3:
        chosen = steps
    if len(chosen) <= MAX_ROWS:
        return chosen
    stride = (len(chosen) - 1) / (MAX_ROWS - 1)
    return [chosen[round(row * stride)] for row in range(MAX_ROWS)]


@dataclass(frozen=True)
class EvalResult(_Shown):
    """The scores of a model, by dataset.

    Example:
        >>> hw.evaluate(result, {"wiki": "wiki.txt"}).datasets["wiki"].perplexity
    """

    model: str
    """The folder of the weights."""
    datasets: Mapping[str, Perplexity]
    """Loss, perplexity, bits per byte, accuracy and calibration of each dataset."""

    @property
    def loss(self) -> float:
        """The loss of the only dataset; of several, the mean over all their tokens."""
        # By tokens: in a mean of means a token of a small dataset would count more.
        tokens = sum(scores.tokens for scores in self.datasets.values())
        return sum(scores.loss * scores.tokens for scores in self.datasets.values()) / tokens

    @property
    def table(self) -> ResultTable:
        """One row for each dataset."""
        keys = ("loss", "perplexity", "bits_per_byte", "accuracy", "tokens", "documents")
        headings = [key.replace("_", " ") for key in keys]
        rows = tuple(
            (name, *(getattr(scores, key) for key in keys))
            for name, scores in self.datasets.items()
        )
        return ResultTable(("data", *headings), rows)

    def _facts(self) -> tuple[str, Mapping[str, Any], ResultTable | None]:
        return f"scores of {self.model}", {}, self.table


@dataclass(frozen=True)
class ExportResult(_Shown):
    """A model in a Hugging Face folder.

    Example:
        >>> hw.export(result, "my-model", dtype="bfloat16").path
    """

    path: Path
    dtype: str
    adapter_only: bool = False

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def _facts(self) -> tuple[str, Mapping[str, Any], ResultTable | None]:
        rows = tuple(
            (str(file.relative_to(self.path)), file.stat().st_size)
            for file in sorted(self.path.rglob("*"))
            if file.is_file()
        )
        return (
            f"exported to {self.path}",
            {"dtype": self.dtype, "bytes": self.num_bytes},
            ResultTable(("file", "bytes"), rows),
        )


@dataclass(frozen=True)
class TokenizeResult(_Shown):
    """A token store, ready for `data.train`.

    Example:
        >>> store = hw.tokenize([{"text": "Hello."}], tokenizer="tokenizers/mine")
        >>> store.documents, store.tokens
    """

    path: Path
    """The store; with `valid_fraction` the folder that holds `train` and `valid`."""
    kind: str
    """text, chat or preference."""
    documents: int
    tokens: int

    def _facts(self) -> tuple[str, Mapping[str, Any], ResultTable | None]:
        return (
            f"token store {self.path}",
            {"kind": self.kind, "documents": self.documents, "tokens": self.tokens},
            None,
        )
