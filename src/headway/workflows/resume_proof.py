"""`headway verify resume`: does a killed and resumed run of a recipe end like an undisturbed one?

    whole     ────────────────────────────────────────▶ step N      undisturbed
    killed    ───────────▶ step K ✗ SIGKILL
    resumed          └───(newest checkpoint)──────────▶ step N      must be equal: every tensor, the data cursor, the next batch

On a GPU without `deterministic: true` two undisturbed runs differ too. The recipe then runs a fourth time, and the difference after the
kill is compared with that spread. If the number of ranks changes, the order of sums changes: the order of samples must be the same, and
the parameters within a bound. With stages, every stage trains N steps, K counts over all of them, and all must agree.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.load import Reader, open_checkpoint
from headway.errors import ConfigError, TrainingError
from headway.runtime.child import run_command
from headway.runtime.device import backend_of
from headway.runtime.process import KILL_AT_STEP, headway_command
from headway.runtime.progress import progress
from headway.track.events import read_events
from headway.track.metrics_file import read_metrics

if TYPE_CHECKING:
    from headway.train.config import Recipe
    from headway.train.resolve import Resolved

SPREAD_FACTOR = 3.0
"""Without determinism: the difference after a resume may be this many times the run-to-run spread."""
BOUNDS = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2, "fp8": 1e-1}
"""With another number of ranks: the largest relative difference (L2) of a parameter."""
PARAMETERS = ("master", "param")
ORDER = ("step", "tokens", "num_samples_in_batch", "num_consumed_tokens", "epoch")


@dataclass(frozen=True)
class Trial:
    """A recipe as on the command line, and how it is disturbed."""

    arguments: tuple[str, ...]
    steps: int
    kill_at: int
    nproc: int | None = None
    resume_nproc: int | None = None
    bound: float | None = None
    num_stages: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.kill_at < self.steps * self.num_stages:
            stages = f" x {self.num_stages} stages" if self.num_stages > 1 else ""
            raise ConfigError(
                f"--kill-at is {self.kill_at}; it must be at least 1 and less than --steps {self.steps}{stages}."
            )

    @property
    def changes_world(self) -> bool:
        """Whether the run resumes with another number of ranks."""
        return self.resume_nproc is not None and self.resume_nproc != (self.nproc or 1)


Train = Callable[[list[str], int | None, int | None], None]
"""Trains with these arguments on this many ranks (None: as the recipe says), and is killed after a step if one is given."""


def prove_resume(
    trial: Trial, recipe: Recipe, folder: Path, train: Train | None = None
) -> dict[str, Any]:
    """Run the trial in a folder; returns the certificate, whose `holds` is the answer."""
    train = train or in_processes
    has_spread = (
        backend_of(recipe.device) == "nccl" and not recipe.deterministic and not trial.changes_world
    )
    with progress("verify resume", total=4 if has_spread else 3, unit="runs") as advance:
        whole, disturbed, again = (
            folder / "whole",
            folder / "killed",
            folder / "again" if has_spread else None,
        )
        train(_arguments(trial, whole), trial.nproc, None)
        advance(1)
        train(_arguments(trial, disturbed), trial.nproc, trial.kill_at)
        advance(1)
        train(
            _arguments(trial, disturbed),
            trial.resume_nproc if trial.resume_nproc is not None else trial.nproc,
            None,
        )
        advance(1)
        if again is not None:
            train(_arguments(trial, again), trial.nproc, None)
            advance(1)
    parts = _parts(recipe, whole)
    compared = [_compare(trial, part, whole, disturbed, again) for part in parts]
    found: dict[str, Any] = {
        "steps": trial.steps,
        "killed_after_step": trial.kill_at,
        "resumed_from_step": _resumed_from(disturbed, trial, [part.label for part in parts]),
        "whole": compared[-1]["whole"],
        "resumed": compared[-1]["resumed"],
        "unequal": [one for part in compared for one in part["unequal"]],
    }
    if recipe.stages:
        found["stages"] = [
            {"name": part.label, "whole": one["whole"], "resumed": one["resumed"]}
            for part, one in zip(parts, compared, strict=True)
        ]
    if again is not None:
        found["spread"] = max(one["spread"] for one in compared)
    return {**found, **_judge(trial, recipe, found, _same_order(whole, disturbed))}


@dataclass(frozen=True)
class _Part:
    """A run, or one stage of it: the folder of its checkpoints below the run folder, and its resolved recipe."""

    label: str
    folder: str
    resolved: Resolved


def _parts(recipe: Recipe, whole: Path) -> list[_Part]:
    from headway.checkpoint.stored_model import find_model
    from headway.train.resolve import resolve
    from headway.train.staged_run import resolve_stage
    from headway.train.stages import FOLDER, expand

    if not recipe.stages:
        return [_Part("", ".", resolve(recipe))]
    found: list[_Part] = []
    for stage in expand(recipe):
        before = find_model(whole / found[-1].folder) if stage.follows else None
        found.append(_Part(stage.label, f"{FOLDER}/{stage.label}", resolve_stage(stage, before)))
    return found


def _compare(
    trial: Trial, part: _Part, whole: Path, disturbed: Path, again: Path | None
) -> dict[str, Any]:
    """The certificates of a part, and the tensors that differ."""

    def reader(run: Path) -> Reader:
        return open_checkpoint(run / part.folder / "checkpoints" / f"step-{trial.steps:08}")

    one, two = reader(whole), reader(disturbed)
    prefix = f"{part.label}/" if part.label else ""
    return {
        "whole": _certificate(one, part.resolved),
        "resumed": _certificate(two, part.resolved),
        "unequal": [{**entry, "name": prefix + entry["name"]} for entry in _unequal(one, two)],
        "spread": None if again is None else _largest(_unequal(one, reader(again))),
    }


def _judge(trial: Trial, recipe: Recipe, found: dict[str, Any], same_order: bool) -> dict[str, Any]:
    difference = _largest(found["unequal"])
    judged: dict[str, Any] = {
        "same_sample_order": same_order,
        "largest_relative_difference": difference,
    }
    pairs = [(one["whole"], one["resumed"]) for one in found.get("stages", [found])]
    data_agrees = same_order and all(
        whole[key] == resumed[key]
        for whole, resumed in pairs
        for key in ("data_cursor", "next_batch")
    )
    if trial.changes_world:
        kind = (
            recipe.precision
            if recipe.precision != "auto"
            else "bf16"
            if backend_of(recipe.device) == "nccl"
            else "fp32"
        )
        bound = trial.bound if trial.bound is not None else BOUNDS[kind]
        parameters = _largest([one for one in found["unequal"] if one["role"] in PARAMETERS])
        rule = f"another number of ranks: the same sample order, parameters within {bound:g}"
        return {
            **judged,
            "rule": rule,
            "bound": bound,
            "parameter_difference": parameters,
            "holds": data_agrees and parameters <= bound,
        }
    if "spread" in found and found["spread"] > 0:
        rule = f"not deterministic on this GPU: the same data, tensors within {SPREAD_FACTOR:g} times the run-to-run spread"
        return {
            **judged,
            "rule": rule,
            "holds": data_agrees and difference <= SPREAD_FACTOR * found["spread"],
        }
    return {
        **judged,
        "rule": "bit for bit",
        "holds": data_agrees and all(a == b for a, b in pairs) and not found["unequal"],
    }


def _arguments(trial: Trial, run_dir: Path) -> list[str]:
    """The recipe with the changes of the trial."""
    every = max(
        1, ((trial.kill_at - 1) % trial.steps + 2) // 2
    )  # so that some steps are trained twice
    settings = {
        "steps": trial.steps, "epochs": "null", "track": "[]", "checkpoint.every": every, "checkpoint.at_end": "true",
        "checkpoint.to": "null", "eval.stop": "null", "log.every": trial.steps,
    }  # fmt: skip
    staged = [
        (f"stages.{index}.{key}", value)
        for index in range(trial.num_stages)
        for key, value in settings.items()
    ]
    run = {
        "run.dir": json.dumps(str(run_dir.parent)),
        "run.name": run_dir.name,
        "run.supervise": "false",
        **settings,
    }
    changes = [*run.items(), *(staged if trial.num_stages > 1 else [])]
    return [*trial.arguments, *(f"{key}={value}" for key, value in changes)]


def in_processes(arguments: list[str], nproc: int | None, kill_at: int | None) -> None:
    """Train as the command line does, in new processes."""
    command = headway_command(
        ["train", *arguments, *(["--nproc", str(nproc)] if nproc is not None else [])]
    )
    environment = {**os.environ, **({KILL_AT_STEP: str(kill_at)} if kill_at is not None else {})}
    done = run_command(command, environment, captures_errors=True)
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    if code != (0 if kill_at is None else 128 + signal.SIGKILL):
        last = "\n".join((done.stderr or done.stdout).rstrip().splitlines()[-5:])
        if code == ConfigError.exit_code:
            raise ConfigError(last.removeprefix("error: "))
        raise TrainingError(f"training ended with exit code {code}:\n{last}")


def _certificate(reader: Reader, resolved: Resolved) -> dict[str, Any]:
    """Hashes of everything that must be equal."""
    import torch

    parameters, optimizer = hashlib.sha256(), hashlib.sha256()
    for name in reader.names():
        for role in reader.roles(name):
            content = reader.read(name, role).contiguous()
            part = parameters if role in PARAMETERS else optimizer
            part.update(f"{name} {role} {tuple(content.shape)} {content.dtype}".encode())
            part.update(content.flatten().view(torch.uint8).numpy().tobytes())
    scalars: Any = reader.scalars
    batch = next_batch(resolved, scalars["cursor"])
    return {
        "parameters": parameters.hexdigest(),
        "optimizer": optimizer.hexdigest(),
        "rng": _hash(
            {"seed": resolved.recipe.seed, "step": reader.step, "engine": scalars["engine"]}
        ),
        "data_cursor": _hash(scalars["cursor"]),
        "next_batch": _hash(batch),
        "next_batch_documents": {name: ids[:8] for name, ids in batch.items()},
    }


def next_batch(resolved: Resolved, cursor: dict[str, Any]) -> dict[str, list[int]]:
    """The documents of the batch that a cursor points at."""
    from headway.data.loader import LoaderState
    from headway.parallel.collectives import RankGroups
    from headway.train.batches import make_loader, open_run_data

    config = resolved.recipe.model_copy(
        update={"data": resolved.recipe.data.model_copy(update={"workers": 0})}
    )
    data = open_run_data(resolved)
    state = LoaderState.from_json(cursor)
    batch = config.batch.resolve(config.data.seq_len, 1)
    with make_loader(config, data, batch, state, RankGroups()) as loader:
        return loader.documents_of(state, state.batch, state.batch)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _unequal(one: Reader, two: Reader) -> list[dict[str, Any]]:
    """The tensors that differ, and by how much."""
    found: list[dict[str, Any]] = []
    for name in sorted({*one.names(), *two.names()}):
        if name not in one.names() or name not in two.names():
            found.append(
                {"name": name, "role": "missing", "largest": None, "relative": float("inf")}
            )
            continue
        for role in sorted({*one.roles(name)} & {*two.roles(name)}):
            left, right = one.read(name, role).double(), two.read(name, role).double()
            gap = (left - right).abs()
            if bool((gap != 0).any()):
                relative = float(gap.norm() / left.norm().clamp(min=1e-30))
                found.append(
                    {"name": name, "role": role, "largest": float(gap.max()), "relative": relative}
                )
    return found


def _largest(unequal: Sequence[dict[str, Any]]) -> float:
    return max((one["relative"] for one in unequal), default=0.0)


def _same_order(one: Path, two: Path) -> bool:
    """Whether both runs read the same amounts at every step."""
    left, right = (
        [[record[key] for key in ORDER] for record in read_metrics(run / "metrics.jsonl")]
        for run in (one, two)
    )
    return left == right


def _resumed_from(run: Path, trial: Trial, labels: list[str]) -> int:
    """The step at which the second start resumed, counted over all stages: that of a checkpoint, or the first step of a stage."""
    killed_in = (trial.kill_at - 1) // trial.steps
    stage = labels[killed_in] or None
    starts = [
        one
        for one in read_events(run)
        if one.get("event") == "start" and one.get("stage") == stage and one.get("checkpoint")
    ]
    return killed_in * trial.steps + (starts[-1]["step"] if starts else 0)
