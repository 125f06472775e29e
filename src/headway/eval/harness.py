"""Tasks of lm-evaluation-harness over a model: names of tasks come in, their metrics, a table and
results.json go out.

The harness is an extra (`pip install headway[eval]`) and is imported only here, when it is used.
Its data is read from this machine unless `online` is set.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway import __version__
from headway.errors import ConfigError, DataError
from headway.eval.options import HarnessPlan
from headway.eval.report import REPORT, RESULTS, make_report_folder, markdown_table
from headway.model.head_masks.masks import in_words
from headway.runtime.optional import need
from headway.runtime.process import environment
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.eval.harness_model import HarnessModel

COLUMNS = ("task", "shots", "filter", "metric", "value", "stderr", "samples")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Environment variables with which huggingface_hub and datasets stay on this machine."""


@dataclass(frozen=True)
class TaskMetric:
    """One number about one task or group of tasks."""

    task: str
    shots: int | None
    filter: str
    name: str
    value: float | str
    stderr: float | None
    samples: int | None

    def cells(self) -> list[str]:
        """As a row under `COLUMNS`."""
        if isinstance(self.value, str):
            value = str(self.value)
        elif abs(self.value) < 1e6:
            value = f"{self.value:.4f}"
        else:
            # Perplexities of words may be astronomic.
            value = f"{self.value:.4e}"

        shots = ""
        if self.shots is not None:
            shots = str(self.shots)
        stderr = ""
        if self.stderr is not None:
            stderr = f"{self.stderr:.4f}"
        samples = str(self.samples or "")
        return [self.task, shots, self.filter, self.name, value, stderr, samples]


@dataclass(frozen=True)
class HarnessResult:
    """The metrics of one model."""

    model: str
    path: str
    masks: dict[str, Any] | None
    """The head masks it ran under."""
    harness: str
    """Version of lm-evaluation-harness."""
    metrics: list[TaskMetric]
    details: dict[str, Any]
    """What the harness itself reports: results, versions and configs of tasks."""
    samples: dict[str, list[Any]]
    """Every document of each task with the model's answers."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        content = {
            "headway": __version__,
            "model": self.model,
            "path": self.path,
            "masks": self.masks,
            "lm_eval": self.harness,
            "metrics": [vars(metric) for metric in self.metrics],
            **self.details,
        }
        # Through JSON and back: configs of tasks hold functions and numbers of numpy.
        return json.loads(json.dumps(content, default=_plain))


def check_installed() -> None:
    """Refuse if the harness is not installed."""
    need("lm_eval", "headway eval harness")


def run_harness(
    answers: HarnessModel, plan: HarnessPlan, *, name: str | None = None
) -> HarnessResult | None:
    """Run the tasks; None on every rank but the first."""
    check_installed()
    variables = OFFLINE
    if plan.online:
        variables = {}

    # The harness prints to stdout; that would end up in the middle of our output. Libraries read
    # the variables when they are imported, which is here.
    with contextlib.redirect_stdout(sys.stderr), environment(variables):
        import lm_eval

        # Tasks are loaded here for their errors; the harness must not load them a second time.
        manager = _manager(plan)
        loaded = _load(manager, plan)
        manager.load = lambda _: loaded
        results: Any = lm_eval.simple_evaluate(
            as_lm(answers),
            tasks=list(plan.tasks),
            num_fewshot=plan.shots,
            limit=plan.limit,
            task_manager=manager,
        )
    if results is None or (answers.group is not None and answers.group.rank != 0):
        return None

    path = str(answers.loaded.path)
    details = {
        key: results[key]
        for key in ("results", "groups", "versions", "n-shot", "n-samples", "configs")
        if key in results
    }
    masks = answers.loaded.describe_masks()
    return HarnessResult(
        name or path,
        path,
        masks,
        lm_eval.__version__,
        list(_metrics(results)),
        details,
        results.get("samples", {}),
    )


def as_lm(answers: HarnessModel) -> Any:
    """The model as the harness knows models: give it to `lm_eval.simple_evaluate`."""
    from lm_eval.api.model import LM

    class HeadwayLM(LM):
        """HarnessModel requests; ranks share them inside, so that the harness sees one process."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return answers.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return answers.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return answers.generate([request.args for request in requests])

    return HeadwayLM()


def _manager(plan: HarnessPlan) -> Any:
    """The index of tasks: of the user's folder alone where that is enough, since the harness's own
    takes seconds to read.
    """
    from lm_eval.tasks import TaskManager

    task_dir = None
    if plan.task_dir is not None:
        task_dir = str(plan.task_dir)
        user_tasks = TaskManager(include_path=task_dir, include_defaults=False)
        if not _unknown(user_tasks, plan.tasks):
            return user_tasks

    manager = TaskManager(include_path=task_dir)
    for task in _unknown(manager, plan.tasks):
        near = difflib.get_close_matches(task, manager.all_tasks, n=1)
        hint = ""
        if near:
            hint = f" Did you mean {near[0]!r}?"
        raise ConfigError(
            f"--tasks has {task!r}; there is no such task. `lm-eval ls tasks` lists them, "
            f"--task-dir adds your own.{hint}"
        )
    return manager


def _unknown(manager: Any, tasks: Sequence[str]) -> list[str]:
    """Names and patterns that match no task."""
    return [task for task in tasks if not manager.match_tasks([task])]


def _load(manager: Any, plan: HarnessPlan) -> Any:
    try:
        return manager.load(manager.match_tasks(list(plan.tasks)))
    except (OSError, ValueError, ImportError) as error:
        # Each library raises a different error for missing data.
        reason = " ".join(str(error).split())
        hint = ""
        if not plan.online:
            hint = " Tasks read data from this machine alone; --online lets them fetch it."
        raise DataError(
            f"the data of --tasks {' '.join(plan.tasks)} cannot be read: {reason}.{hint}"
        ) from None


def _metrics(results: Mapping[str, Any]) -> Iterator[TaskMetric]:
    """The numbers of the harness, whose keys are `METRIC,FILTER` and `METRIC_stderr,FILTER`."""
    for task, numbers in {**results["results"], **(results.get("groups") or {})}.items():
        shots = results.get("n-shot", {}).get(task)
        counts = results.get("n-samples", {}).get(task, {})
        for key, value in numbers.items():
            # Keys without a comma are names (`alias`), not numbers.
            name, comma, filter_name = key.partition(",")
            if not comma or name.endswith("_stderr") or isinstance(value, Mapping):
                continue

            number = value
            if not isinstance(value, str):
                number = float(value)
            # "N/A" where a metric has no standard error.
            error = numbers.get(f"{name}_stderr,{filter_name}")
            stderr = None
            if error is not None and not isinstance(error, str):
                stderr = float(error)
            if filter_name == "none":
                filter_name = ""
            samples = counts.get("effective")
            yield TaskMetric(task, shots, filter_name, name, number, stderr, samples)


def write_results(folder: Path, result: HarnessResult, *, samples: bool = False) -> None:
    """Write results.json and report.md, and the documents with their answers if they are wanted."""
    make_report_folder(folder)
    content = json.dumps(result.to_json(), ensure_ascii=False, indent=2)
    write_atomic(folder / RESULTS, content + "\n")

    headline = (
        f"`{result.model}`, masks: {in_words(result.masks)}; lm-evaluation-harness {result.harness}"
    )
    table = markdown_table(COLUMNS, (metric.cells() for metric in result.metrics))
    write_atomic(folder / REPORT, "\n".join(["# Tasks", "", headline, "", *table]))

    if not samples:
        return
    for task, documents in result.samples.items():
        lines = [
            json.dumps(document, ensure_ascii=False, default=_plain) + "\n"
            for document in documents
        ]
        write_atomic(folder / f"samples-{task.replace('/', '_')}.jsonl", "".join(lines))


def _plain(value: Any) -> Any:
    """A value that JSON does not have: numbers of numpy as numbers, functions of a task's config
    and everything else as text.
    """
    # Scalars of numpy and torch have `item`.
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    return str(value)
