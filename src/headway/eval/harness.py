"""Tasks of lm-evaluation-harness over a model: names of tasks come in, their metrics, a table and results.json go out.

The harness is an extra (`pip install headway[eval]`) and is imported only here, when it is used. Its data is read from this machine
unless `online` is set.
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
from headway.eval.report import REPORT, RESULTS, make_report_folder, markdown_table
from headway.model.head_masks.masks import in_words
from headway.runtime.optional import need
from headway.runtime.process import environment
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.eval.harness_model import HarnessModel

COLUMNS = ("task", "shots", "filter", "metric", "value", "stderr", "samples")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class HarnessPlan:
    """Which tasks, and how much of them."""

    tasks: Sequence[str]
    task_dir: Path | None = None
    """A folder with your own tasks (YAML)."""
    limit: int | None = None
    """Only the first N documents of each task."""
    shots: int | None = None
    """Solved examples before each question; None = the task's default."""
    online: bool = False
    """Tasks may download their data from the hub."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("no task is given. Use --tasks NAME, several times or with commas.")
        for name, value, least in (("--limit", self.limit, 1), ("--shots", self.shots, 0)):
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more.")
        if self.task_dir is not None and not self.task_dir.is_dir():
            raise ConfigError(
                f"--task-dir is {str(self.task_dir)!r}, which is not a folder. Give a folder of tasks in YAML."
            )


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
        value = (
            str(self.value)
            if isinstance(self.value, str)
            else f"{self.value:.4f}"
            if abs(self.value) < 1e6
            else f"{self.value:.4e}"
        )
        texts = ("" if one is None else str(one) for one in (self.shots, self.filter, self.name))
        return [
            self.task,
            *texts,
            value,
            "" if self.stderr is None else f"{self.stderr:.4f}",
            str(self.samples or ""),
        ]


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
        named = {
            "headway": __version__,
            "model": self.model,
            "path": self.path,
            "masks": self.masks,
            "lm_eval": self.harness,
        }
        return json.loads(
            json.dumps(
                {**named, "metrics": [vars(one) for one in self.metrics], **self.details},
                default=_plain,
            )
        )


def check_installed() -> None:
    """Refuse if the harness is not installed."""
    need("lm_eval", "headway eval harness")


def run_harness(
    answers: HarnessModel, plan: HarnessPlan, *, name: str | None = None
) -> HarnessResult | None:
    """Run the tasks; None on every rank but the first."""
    check_installed()
    offline = {} if plan.online else OFFLINE  # read when the libraries are imported
    # The harness prints to stdout; that would end up in the middle of our output.
    with contextlib.redirect_stdout(sys.stderr), environment(offline):
        import lm_eval

        manager = _manager(plan)
        loaded = _load(manager, plan)
        manager.load = lambda _: loaded  # read once
        found: Any = lm_eval.simple_evaluate(
            as_lm(answers),
            tasks=list(plan.tasks),
            num_fewshot=plan.shots,
            limit=plan.limit,
            task_manager=manager,
        )
    if found is None or (answers.group is not None and answers.group.rank != 0):
        return None
    path = str(answers.loaded.path)
    kept = {
        key: found[key]
        for key in ("results", "groups", "versions", "n-shot", "n-samples", "configs")
        if key in found
    }
    masks = answers.loaded.describe_masks()
    return HarnessResult(
        name or path,
        path,
        masks,
        lm_eval.__version__,
        list(_metrics(found)),
        kept,
        found.get("samples", {}),
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
    """The index of tasks: of the user's folder alone where that is enough, since the harness's own takes seconds to read."""
    from lm_eval.tasks import TaskManager

    if plan.task_dir is not None:
        own = TaskManager(include_path=str(plan.task_dir), include_defaults=False)
        if not _unknown(own, plan.tasks):
            return own
    manager = TaskManager(include_path=None if plan.task_dir is None else str(plan.task_dir))
    for task in _unknown(manager, plan.tasks):
        near = difflib.get_close_matches(task, manager.all_tasks, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"--tasks has {task!r}; there is no such task. `lm-eval ls tasks` lists them, --task-dir adds your own.{hint}"
        )
    return manager


def _unknown(manager: Any, tasks: Sequence[str]) -> list[str]:
    return [task for task in tasks if not manager.match_tasks([task])]


def _load(manager: Any, plan: HarnessPlan) -> Any:
    try:
        return manager.load(manager.match_tasks(list(plan.tasks)))
    except (
        OSError,
        ValueError,
        ImportError,
    ) as error:  # each library raises a different error for missing data
        said = " ".join(str(error).split())
        offline = (
            ""
            if plan.online
            else " Tasks read data from this machine alone; --online lets them fetch it."
        )
        raise DataError(
            f"the data of --tasks {' '.join(plan.tasks)} cannot be read: {said}.{offline}"
        ) from None


def _metrics(found: Mapping[str, Any]) -> Iterator[TaskMetric]:
    for task, numbers in {**found["results"], **(found.get("groups") or {})}.items():
        shots, counts = found.get("n-shot", {}).get(task), found.get("n-samples", {}).get(task, {})
        for key, value in numbers.items():
            name, comma, way = key.partition(",")
            if not comma or name.endswith("_stderr") or isinstance(value, Mapping):
                continue
            error = numbers.get(f"{name}_stderr,{way}")
            number = value if isinstance(value, str) else float(value)
            stderr = None if error is None or isinstance(error, str) else float(error)
            yield TaskMetric(
                task,
                shots,
                "" if way == "none" else way,
                name,
                number,
                stderr,
                counts.get("effective"),
            )


def write_results(folder: Path, result: HarnessResult, *, samples: bool = False) -> None:
    """Write results.json and report.md, and the documents with their answers if they are wanted."""
    make_report_folder(folder)
    write_atomic(
        folder / RESULTS, json.dumps(result.to_json(), ensure_ascii=False, indent=2) + "\n"
    )
    named = (
        f"`{result.model}`, masks: {in_words(result.masks)}; lm-evaluation-harness {result.harness}"
    )
    lines = [
        "# Tasks",
        "",
        named,
        "",
        *markdown_table(COLUMNS, (one.cells() for one in result.metrics)),
    ]
    write_atomic(folder / REPORT, "\n".join(lines))
    if samples:
        for task, documents in result.samples.items():
            text = "".join(
                json.dumps(one, ensure_ascii=False, default=_plain) + "\n" for one in documents
            )
            write_atomic(folder / f"samples-{task.replace('/', '_')}.jsonl", text)


def _plain(value: Any) -> Any:
    """What JSON does not know: numbers of numpy as numbers, functions of a task's config and the rest by name."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
