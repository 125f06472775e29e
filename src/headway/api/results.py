"""What the public functions return: frozen, typed, shown as a table in a terminal and in a notebook. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.api.table import ResultTable, as_html, as_text

if TYPE_CHECKING:
    from headway.eval.perplexity import Perplexity

MAX_ROWS = 20
"""Rows of the table of losses; metrics.jsonl has every step."""


@dataclass(frozen=True)
class _Shown:
    """A result that shows itself."""

    def _facts(self) -> tuple[str, Mapping[str, Any], ResultTable | None]:
        raise NotImplementedError

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
    """At most twenty rows: step, mean training loss since the row before, and the loss of each validation set."""
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
    """`headway stop`, or a signal that the program handles itself; None for a run that is complete."""
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
            "steps": self.steps, "tokens": self.tokens, "seconds": round(self.seconds, 1), "tokens/s": self.tokens_per_second,
            "loss": self.last_loss, "valid loss": self.last_valid_loss, "model": self.final, "stopped by": self.stopped_by,
        }  # fmt: skip
        return f"run {self.run}", facts, self.losses

    @staticmethod
    def of(summary: Mapping[str, Any]) -> TrainResult:
        """The result of a summary, with the losses of its metrics file."""
        run = Path(summary["run"])

        def path(key: str, there: Path) -> Path | None:
            if key in summary:
                return None if summary[key] is None else Path(summary[key])
            # a run that was complete already
            return there if there.is_dir() and "stopped_by" not in summary else None

        return TrainResult(
            run,
            summary.get("steps", 0),
            loss_table(run),
            path("final", run / "final"),
            path("checkpoint", run / "checkpoints" / "latest"),
            run / "metrics.jsonl",
            *(
                summary.get(key)
                for key in (
                    "first_loss",
                    "last_loss",
                    "best_loss",
                    "last_valid_loss",
                    "best_valid_loss",
                )
            ),
            tokens=summary.get("tokens", 0),
            seconds=summary.get("seconds", 0.0),
            tokens_per_second=summary.get("tokens_per_second"),
            stopped_by=summary.get("stopped_by"),
            stopped_early=summary.get("stopped_early") is not None,
            summary=dict(summary),
        )


def loss_table(run: Path) -> ResultTable:
    """The losses of a run as a small table; steps of a run with several stages are counted over all of them."""
    from headway.train.meter import AT_START

    losses: dict[int, float] = {}
    valid: dict[int, dict[str, float]] = {}
    for record in _records(run):
        step = int(record["step"])
        if isinstance(loss := record.get("loss"), int | float):
            losses[step] = loss
        for at, key in ((step - 1, AT_START), (step, "valid")):
            sets = record.get(key)
            for name, numbers in sets.items() if isinstance(sets, dict) else ():
                if isinstance(numbers, dict) and isinstance(
                    value := numbers.get("loss"), int | float
                ):
                    valid.setdefault(at, {})[name] = value
    names = sorted({name for sets in valid.values() for name in sets})
    columns = (
        "step",
        "loss",
        *(["valid"] if names == ["valid"] else [f"valid {name}" for name in names]),
    )
    shown = _evenly(sorted({*losses, *valid}), set(valid))
    rows: list[tuple[Any, ...]] = []
    before = -1
    for step in shown:
        some = [loss for at, loss in losses.items() if before < at <= step]
        rows.append(
            (
                step,
                sum(some) / len(some) if some else None,
                *(valid.get(step, {}).get(name) for name in names),
            )
        )
        before = step
    return ResultTable(columns, tuple(rows))


def _records(run: Path) -> Iterable[dict[str, Any]]:
    from headway.track.metrics_file import MetricsReader

    metrics = run / "metrics.jsonl"
    return MetricsReader(metrics) if metrics.is_file() else []


def _evenly(steps: list[int], wanted: set[int]) -> list[int]:
    """At most MAX_ROWS of the steps, the first and the last among them; those with a validation come first."""
    chosen = [step for step in steps if step in wanted or step == steps[-1]]
    chosen = steps if len(chosen) < 3 else chosen
    if len(chosen) <= MAX_ROWS:
        return chosen
    return [chosen[round(at * (len(chosen) - 1) / (MAX_ROWS - 1))] for at in range(MAX_ROWS)]


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
        tokens = sum(one.tokens for one in self.datasets.values())
        return sum(one.loss * one.tokens for one in self.datasets.values()) / tokens

    @property
    def table(self) -> ResultTable:
        """One row for each dataset."""
        names = ("loss", "perplexity", "bits_per_byte", "accuracy", "tokens", "documents")
        rows = tuple(
            (name, *(getattr(one, key) for key in names)) for name, one in self.datasets.items()
        )
        return ResultTable(("data", *(name.replace("_", " ") for name in names)), rows)

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
