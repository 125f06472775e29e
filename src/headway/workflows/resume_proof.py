"""`headway verify resume`: does a killed and resumed run of a recipe end like an undisturbed one?

    whole     ────────────────────────────────────────▶ step N      undisturbed
    killed    ───────────▶ step K ✗ SIGKILL
    resumed          └───(newest checkpoint)──────────▶ step N      must be equal

Equal are every tensor, the data cursor and the next batch. On a GPU without `deterministic: true`
two undisturbed runs differ too. The recipe then runs a fourth time, and the difference after the
kill is compared with that spread. If the number of ranks changes, the order of sums changes: the
order of samples must be the same, and the parameters within a bound. With stages, every stage
trains N steps, K counts over all of them, and all must agree.
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
"""Without determinism: the difference after a resume may be this many times the run-to-run spread.
"""
BOUNDS = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2, "fp8": 1e-1}
"""With another number of ranks: the largest relative difference (L2) of a parameter."""
PARAMETERS = ("master", "param")
"""Roles of the tensors of a checkpoint that are parameters; the others are optimizer state."""
ORDER = ("step", "tokens", "num_samples_in_batch", "num_consumed_tokens", "epoch")
"""Metrics of a step that depend on its rows alone."""
NAMED_DOCUMENTS = 8
"""Documents of each source that a certificate names."""
TINY_NORM = 1e-30
"""Keeps the relative difference of a tensor of zeros finite."""


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
            stages = ""
            if self.num_stages > 1:
                stages = f" x {self.num_stages} stages"
            raise ConfigError(
                f"--kill-at is {self.kill_at}; it must be at least 1 and less than --steps "
                f"{self.steps}{stages}."
            )

    @property
    def changes_world(self) -> bool:
        """Whether the run resumes with another number of ranks."""
        return self.resume_nproc is not None and self.resume_nproc != (self.nproc or 1)


Train = Callable[[list[str], int | None, int | None], None]
"""Trains with these arguments on this many ranks (None: as the recipe says), and is killed after a
step if one is given.
"""


def prove_resume(
    trial: Trial, recipe: Recipe, folder: Path, train: Train | None = None
) -> dict[str, Any]:
    """Run the trial in a folder; returns the certificate, whose `holds` is the answer."""
    train = train or in_processes
    resume_nproc = trial.nproc
    if trial.resume_nproc is not None:
        resume_nproc = trial.resume_nproc

    # With another number of ranks a fixed bound applies, and the spread is not needed.
    has_spread = (
        backend_of(recipe.device) == "nccl" and not recipe.deterministic and not trial.changes_world
    )
    whole = folder / "whole"
    disturbed = folder / "killed"
    repeated = folder / "again" if has_spread else None
    with progress("verify resume", total=4 if has_spread else 3, unit="runs") as advance:
        train(_arguments(trial, whole), trial.nproc, None)
        advance(1)
        train(_arguments(trial, disturbed), trial.nproc, trial.kill_at)
        advance(1)
        # The same arguments again: a run that finds its folder resumes.
        train(_arguments(trial, disturbed), resume_nproc, None)
        advance(1)
        if repeated is not None:
            train(_arguments(trial, repeated), trial.nproc, None)
            advance(1)

    parts = _parts(recipe, whole)
    compared = [_compare(trial, part, whole, disturbed, repeated) for part in parts]
    certificate: dict[str, Any] = {
        "steps": trial.steps,
        "killed_after_step": trial.kill_at,
        "resumed_from_step": _resumed_from(disturbed, trial, [part.label for part in parts]),
        "whole": compared[-1]["whole"],
        "resumed": compared[-1]["resumed"],
        "unequal": [entry for comparison in compared for entry in comparison["unequal"]],
    }
    if recipe.stages:
        certificate["stages"] = [
            {"name": part.label, "whole": comparison["whole"], "resumed": comparison["resumed"]}
            for part, comparison in zip(parts, compared, strict=True)
        ]
    if repeated is not None:
        certificate["spread"] = max(comparison["spread"] for comparison in compared)
    same_order = _same_order(whole, disturbed)
    return {**certificate, **_judge(trial, recipe, certificate, same_order)}


@dataclass(frozen=True)
class _Part:
    """A run, or one stage of it: the folder of its checkpoints below the run folder, and its
    resolved recipe.
    """

    label: str
    folder: str
    resolved: Resolved


def _parts(recipe: Recipe, whole: Path) -> list[_Part]:
    """The run, or each of its stages resolved on the model that the stage before it left."""
    from headway.checkpoint.stored_model import find_model
    from headway.train.resolve import resolve
    from headway.train.staged_run import resolve_stage
    from headway.train.stages import FOLDER, expand

    if not recipe.stages:
        return [_Part("", ".", resolve(recipe))]
    parts: list[_Part] = []
    for stage in expand(recipe):
        previous = None
        if stage.follows:
            previous = find_model(whole / parts[-1].folder)
        resolved = resolve_stage(stage, previous)
        parts.append(_Part(stage.label, f"{FOLDER}/{stage.label}", resolved))
    return parts


def _compare(
    trial: Trial, part: _Part, whole: Path, disturbed: Path, repeated: Path | None
) -> dict[str, Any]:
    """The certificates of a part, and the tensors that differ."""

    def last_checkpoint(run: Path) -> Reader:
        return open_checkpoint(run / part.folder / "checkpoints" / f"step-{trial.steps:08}")

    undisturbed = last_checkpoint(whole)
    resumed = last_checkpoint(disturbed)
    unequal = _unequal(undisturbed, resumed)
    if part.label:
        unequal = [{**entry, "name": f"{part.label}/{entry['name']}"} for entry in unequal]
    spread = None
    if repeated is not None:
        spread = _largest(_unequal(undisturbed, last_checkpoint(repeated)))
    return {
        "whole": _certificate(undisturbed, part.resolved),
        "resumed": _certificate(resumed, part.resolved),
        "unequal": unequal,
        "spread": spread,
    }


def _judge(
    trial: Trial, recipe: Recipe, certificate: dict[str, Any], same_order: bool
) -> dict[str, Any]:
    """Whether the resume holds, and by which of the three rules."""
    unequal = certificate["unequal"]
    difference = _largest(unequal)
    judged: dict[str, Any] = {
        "same_sample_order": same_order,
        "largest_relative_difference": difference,
    }

    # Data is exact under every rule: the order of samples depends on neither ranks nor rounding.
    stages = certificate.get("stages", [certificate])
    pairs = [(stage["whole"], stage["resumed"]) for stage in stages]
    data_agrees = same_order
    for whole, resumed in pairs:
        for key in ("data_cursor", "next_batch"):
            data_agrees = data_agrees and whole[key] == resumed[key]

    if trial.changes_world:
        bound = trial.bound
        if bound is None:
            bound = BOUNDS[_precision(recipe)]
        parameters = _largest([entry for entry in unequal if entry["role"] in PARAMETERS])
        rule = f"another number of ranks: the same sample order, parameters within {bound:g}"
        return {
            **judged,
            "rule": rule,
            "bound": bound,
            "parameter_difference": parameters,
            "holds": data_agrees and parameters <= bound,
        }

    # Two runs without any difference were deterministic after all, so the strict rule applies.
    if "spread" in certificate and certificate["spread"] > 0:
        rule = (
            f"not deterministic on this GPU: the same data, tensors within {SPREAD_FACTOR:g} times "
            "the run-to-run spread"
        )
        return {
            **judged,
            "rule": rule,
            "holds": data_agrees and difference <= SPREAD_FACTOR * certificate["spread"],
        }
    return {
        **judged,
        "rule": "bit for bit",
        "holds": data_agrees and all(whole == resumed for whole, resumed in pairs) and not unequal,
    }


def _precision(recipe: Recipe) -> str:
    """What `precision: auto` means on the recipe's device; another value is itself."""
    if recipe.precision != "auto":
        return recipe.precision
    if backend_of(recipe.device) == "nccl":
        return "bf16"
    return "fp32"


def _arguments(trial: Trial, run_dir: Path) -> list[str]:
    """The recipe with the changes of the trial."""
    # About half of the steps before the kill, so that some steps are trained twice.
    kill_step = (trial.kill_at - 1) % trial.steps + 1
    every = max(1, (kill_step + 1) // 2)
    settings = {
        "steps": trial.steps,
        "epochs": "null",
        "track": "[]",
        "checkpoint.every": every,
        "checkpoint.at_end": "true",
        "checkpoint.to": "null",
        "eval.stop": "null",
        "log.every": trial.steps,
    }
    changes = {
        "run.dir": json.dumps(str(run_dir.parent)),
        "run.name": run_dir.name,
        # A supervisor would restart the killed run at once.
        "run.supervise": "false",
        **settings,
    }
    # A stage's own settings win over those of the recipe, so each stage is changed as well.
    if trial.num_stages > 1:
        for index in range(trial.num_stages):
            changes |= {f"stages.{index}.{key}": value for key, value in settings.items()}
    return [*trial.arguments, *(f"{key}={value}" for key, value in changes.items())]


def in_processes(arguments: list[str], nproc: int | None, kill_at: int | None) -> None:
    """Train as the command line does, in new processes."""
    flags: list[str] = []
    if nproc is not None:
        flags = ["--nproc", str(nproc)]
    environment = dict(os.environ)
    expected = 0
    if kill_at is not None:
        environment[KILL_AT_STEP] = str(kill_at)
        expected = 128 + signal.SIGKILL

    child = run_command(
        headway_command(["train", *arguments, *flags]), environment, captures_errors=True
    )
    # A process that a signal ended has a negative code here. A launcher reports the same end of a
    # rank as 128 + signal, as shells do.
    code = child.returncode
    if code < 0:
        code = 128 - code
    if code == expected:
        return
    last = "\n".join((child.stderr or child.stdout).rstrip().splitlines()[-5:])
    if code == ConfigError.exit_code:
        raise ConfigError(last.removeprefix("error: "))
    raise TrainingError(f"training ended with exit code {code}:\n{last}")


def _certificate(reader: Reader, resolved: Resolved) -> dict[str, Any]:
    """Hashes of everything that must be equal."""
    import torch

    parameters = hashlib.sha256()
    optimizer = hashlib.sha256()
    for name in reader.names():
        for role in reader.roles(name):
            content = reader.read(name, role).contiguous()
            digest = parameters if role in PARAMETERS else optimizer
            # Names and shapes too: the same bytes under another name are not the same state.
            digest.update(f"{name} {role} {tuple(content.shape)} {content.dtype}".encode())
            digest.update(content.flatten().view(torch.uint8).numpy().tobytes())
    scalars: Any = reader.scalars
    batch = next_batch(resolved, scalars["cursor"])
    # Randomness is derived from seed and step, so these stand for the state of all generators.
    return {
        "parameters": parameters.hexdigest(),
        "optimizer": optimizer.hexdigest(),
        "rng": _hash(
            {"seed": resolved.recipe.seed, "step": reader.step, "engine": scalars["engine"]}
        ),
        "data_cursor": _hash(scalars["cursor"]),
        "next_batch": _hash(batch),
        "next_batch_documents": {name: ids[:NAMED_DOCUMENTS] for name, ids in batch.items()},
    }


def next_batch(resolved: Resolved, cursor: dict[str, Any]) -> dict[str, list[int]]:
    """The documents of the batch that a cursor points at."""
    from headway.data.loader import LoaderState
    from headway.parallel.collectives import RankGroups
    from headway.train.batches import make_loader, open_run_data

    # Rows depend on no number of workers, and one batch is not worth starting processes for.
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


def _unequal(reference: Reader, other: Reader) -> list[dict[str, Any]]:
    """The tensors that differ, and by how much."""
    differences: list[dict[str, Any]] = []
    reference_names = set(reference.names())
    other_names = set(other.names())
    for name in sorted(reference_names | other_names):
        if name not in reference_names or name not in other_names:
            differences.append(
                {"name": name, "role": "missing", "largest": None, "relative": float("inf")}
            )
            continue

        # A role that only one of them has shows in the hashes of the certificates.
        for role in sorted({*reference.roles(name)} & {*other.roles(name)}):
            expected = reference.read(name, role).double()
            gap = (expected - other.read(name, role).double()).abs()
            if bool((gap != 0).any()):
                relative = float(gap.norm() / expected.norm().clamp(min=TINY_NORM))
                differences.append(
                    {"name": name, "role": role, "largest": float(gap.max()), "relative": relative}
                )
    return differences


def _largest(unequal: Sequence[dict[str, Any]]) -> float:
    return max((entry["relative"] for entry in unequal), default=0.0)


def _same_order(whole: Path, disturbed: Path) -> bool:
    """Whether both runs read the same amounts at every step."""

    def amounts(run: Path) -> list[list[Any]]:
        records = read_metrics(run / "metrics.jsonl")
        return [[record[key] for key in ORDER] for record in records]

    return amounts(whole) == amounts(disturbed)


def _resumed_from(run: Path, trial: Trial, labels: list[str]) -> int:
    """The step at which the second start resumed, counted over all stages: that of a checkpoint, or
    the first step of a stage.
    """
    killed_stage = (trial.kill_at - 1) // trial.steps
    label = labels[killed_stage] or None
    step = 0
    for event in read_events(run):
        is_start = event.get("event") == "start" and event.get("stage") == label
        if is_start and event.get("checkpoint"):
            step = event["step"]
    return killed_stage * trial.steps + step
