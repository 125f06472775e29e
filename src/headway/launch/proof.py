"""`headway verify resume`: does a recipe, killed and started again, end where it would have ended? Tried on the recipe itself.

    whole     ────────────────────────────────────────▶ step N      undisturbed
    killed    ───────────▶ step K ✗ SIGKILL
    resumed          └───(newest checkpoint)──────────▶ step N      must be the same: every tensor, the data cursor, the next batch

On a GPU without `deterministic: true` two undisturbed runs differ too; then the recipe runs a fourth time, and the difference after the
kill is held against that spread. Where the number of ranks changes, sums are taken in another order: the order of samples must be the
same, and the parameters within a bound.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from headway.checkpoint.load import Reader, open_checkpoint
from headway.errors import ConfigError, TrainingError
from headway.runtime.device import backend_of
from headway.runtime.process import KILL_AT_STEP
from headway.runtime.progress import progress
from headway.track.jsonl import read_metrics

if TYPE_CHECKING:
    from headway.train.build import Run
    from headway.train.config import Recipe

SPREAD_FACTOR = 3.0
"""Without determinism: how many times the run-to-run spread the difference after a resume may be."""
BOUNDS = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2, "fp8": 1e-1}
"""After a change of the number of ranks: the largest relative difference (L2) of a parameter."""
PARAMETERS = ("master", "param")
ORDER = ("step", "tokens", "num_samples_in_batch", "num_consumed_tokens", "epoch")


@dataclass(frozen=True)
class Trial:
    """What is tried: a recipe as the command line has it, and how it is disturbed."""

    arguments: tuple[str, ...]
    steps: int
    kill_at: int
    nproc: int | None = None
    resume_nproc: int | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.kill_at < self.steps:
            raise ConfigError(f"--kill-at is {self.kill_at}; it must be at least 1 and less than --steps {self.steps}.")

    @property
    def changes_world(self) -> bool:
        """Whether the run goes on with another number of ranks."""
        return self.resume_nproc is not None and self.resume_nproc != (self.nproc or 1)


Train = Callable[[list[str], int | None, int | None], None]
"""Trains with these arguments on so many ranks (None = as the recipe says), and is killed after a step if one is given."""


def prove_resume(trial: Trial, recipe: Recipe, folder: Path, train: Train | None = None) -> dict[str, Any]:
    """Run the trial in a folder; returns the certificate, in which `holds` is the answer."""
    train = train or in_processes
    if recipe.stages:
        raise ConfigError("the recipe has stages; give one of them as a recipe of its own to `headway verify resume`.")
    has_spread = backend_of(recipe.device) == "nccl" and not recipe.deterministic and not trial.changes_world
    with progress("verify resume", total=4 if has_spread else 3, unit="runs") as advance:
        whole, disturbed, again = folder / "whole", folder / "killed", folder / "again" if has_spread else None
        train(_arguments(trial, whole), trial.nproc, None)
        advance(1)
        train(_arguments(trial, disturbed), trial.nproc, trial.kill_at)
        advance(1)
        train(_arguments(trial, disturbed), trial.resume_nproc if trial.resume_nproc is not None else trial.nproc, None)
        advance(1)
        if again is not None:
            train(_arguments(trial, again), trial.nproc, None)
            advance(1)
    readers = {run.name: open_checkpoint(run / "checkpoints" / f"step-{trial.steps:08}") for run in (whole, disturbed, again) if run}
    certificates = {name: _certificate(reader, recipe, folder / name) for name, reader in readers.items()}
    found: dict[str, Any] = {
        "steps": trial.steps,
        "killed_after_step": trial.kill_at,
        "resumed_from_step": _resumed_from(disturbed),
        "whole": certificates["whole"],
        "resumed": certificates["killed"],
        "unequal": _unequal(readers["whole"], readers["killed"]),
    }
    if again is not None:
        found["spread"] = _largest(_unequal(readers["whole"], readers["again"]))
    return {**found, **_judge(trial, recipe, found, _same_order(whole, disturbed))}


def _judge(trial: Trial, recipe: Recipe, found: dict[str, Any], same_order: bool) -> dict[str, Any]:
    difference = _largest(found["unequal"])
    judged: dict[str, Any] = {"same_sample_order": same_order, "largest_relative_difference": difference}
    data_agrees = same_order and all(found["whole"][key] == found["resumed"][key] for key in ("data_cursor", "next_batch"))
    if trial.changes_world:
        kind = recipe.precision if recipe.precision != "auto" else "bf16" if backend_of(recipe.device) == "nccl" else "fp32"
        bound = trial.bound if trial.bound is not None else BOUNDS[kind]
        parameters = _largest([one for one in found["unequal"] if one["role"] in PARAMETERS])
        rule = f"another number of ranks: the same sample order, parameters within {bound:g}"
        return {**judged, "rule": rule, "bound": bound, "parameter_difference": parameters, "holds": data_agrees and parameters <= bound}
    if "spread" in found and found["spread"] > 0:
        rule = f"not deterministic on this GPU: the same data, tensors within {SPREAD_FACTOR:g} times the run-to-run spread"
        return {**judged, "rule": rule, "holds": data_agrees and difference <= SPREAD_FACTOR * found["spread"]}
    return {**judged, "rule": "bit for bit", "holds": data_agrees and found["whole"] == found["resumed"] and not found["unequal"]}


def _arguments(trial: Trial, run_dir: Path) -> list[str]:
    """The recipe with what the trial changes in it."""
    every = max(1, (trial.kill_at + 1) // 2)  # so that some steps after the checkpoint are trained twice
    settings = {
        "run.dir": json.dumps(str(run_dir.parent)), "run.name": run_dir.name, "run.supervise": "false", "steps": trial.steps,
        "epochs": "null", "track": "[]", "checkpoint.every": every, "checkpoint.at_end": "true", "log.every": trial.steps,
    }  # fmt: skip
    return [*trial.arguments, *(f"{key}={value}" for key, value in settings.items())]


def in_processes(arguments: list[str], nproc: int | None, kill_at: int | None) -> None:
    """Train as the command line does, in processes of their own."""
    command = [sys.executable, "-m", "headway", "train", *arguments, *(["--nproc", str(nproc)] if nproc is not None else [])]
    environment = {**os.environ, **({KILL_AT_STEP: str(kill_at)} if kill_at is not None else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    if code != (0 if kill_at is None else 128 + signal.SIGKILL):
        last = "\n".join((done.stderr or done.stdout).rstrip().splitlines()[-5:])
        if code == ConfigError.exit_code:
            raise ConfigError(last.removeprefix("error: "))
        raise TrainingError(f"training ended with exit code {code}:\n{last}")


def killed_at(step: int) -> Callable[[Run], Any]:
    """A probe: the last rank kills itself, as kill -9 would, when this step and the save under way are done."""

    @contextmanager
    def probe(run: Run) -> Iterator[None]:
        def after_step(done: int) -> None:
            if done < step:
                return
            run.saver.wait()
            run.ranks.world.most(0)  # the first rank writes what makes a checkpoint whole
            if run.process.rank == run.process.world - 1:
                os.kill(os.getpid(), signal.SIGKILL)

        run.after_step = after_step
        yield

    return probe


def _certificate(reader: Reader, recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """Hashes of all that must be the same."""
    parameters, optimizer = hashlib.sha256(), hashlib.sha256()
    for name in reader.names():
        for role in reader.roles(name):
            content = reader.read(name, role).contiguous()
            part = parameters if role in PARAMETERS else optimizer
            part.update(f"{name} {role} {tuple(content.shape)} {content.dtype}".encode())
            part.update(content.flatten().view(dtype=_bytes()).numpy().tobytes())
    scalars: Any = reader.scalars
    batch = next_batch(recipe, scalars["cursor"])
    return {
        "parameters": parameters.hexdigest(),
        "optimizer": optimizer.hexdigest(),
        "rng": _hash({"seed": recipe.seed, "step": reader.step, "engine": scalars["engine"]}),
        "data_cursor": _hash(scalars["cursor"]),
        "next_batch": _hash(batch),
        "next_batch_documents": {name: ids[:8] for name, ids in batch.items()},
    }


def _bytes() -> Any:
    import torch

    return torch.uint8


def next_batch(recipe: Recipe, cursor: dict[str, Any]) -> dict[str, list[int]]:
    """The documents of the batch that a cursor points at."""
    from headway.data.loader import LoaderState
    from headway.data.sources import open_data
    from headway.parallel.collectives import alone
    from headway.train.build import make_loader
    from headway.train.resolve import resolve

    resolved = resolve(recipe)
    config = resolved.recipe.model_copy(update={"data": resolved.recipe.data.model_copy(update={"workers": 0})})
    data = open_data(
        config.data, tokenizer=resolved.tokenizer_path, vocab_size=resolved.model.vocab, seed=config.seed, pairs=config.objective.PAIRS
    )
    state = LoaderState.from_json(cursor)
    batch = config.batch.resolve(config.data.seq_len, 1)
    with make_loader(config, data, batch, SimpleNamespace(cursor=state), alone()) as loader:  # pyright: ignore[reportArgumentType]
        return loader.documents_of(state, state.batch, state.batch)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _unequal(one: Reader, two: Reader) -> list[dict[str, Any]]:
    """Tensor by tensor, what differs and by how much."""
    found: list[dict[str, Any]] = []
    for name in sorted({*one.names(), *two.names()}):
        if name not in one.names() or name not in two.names():
            found.append({"name": name, "role": "missing", "largest": None, "relative": float("inf")})
            continue
        for role in sorted({*one.roles(name)} & {*two.roles(name)}):
            left, right = one.read(name, role).double(), two.read(name, role).double()
            gap = (left - right).abs()
            if bool((gap != 0).any()):
                relative = float(gap.norm() / left.norm().clamp(min=1e-30))
                found.append({"name": name, "role": role, "largest": float(gap.max()), "relative": relative})
    return found


def _largest(unequal: Sequence[dict[str, Any]]) -> float:
    return max((one["relative"] for one in unequal), default=0.0)


def _same_order(one: Path, two: Path) -> bool:
    """Whether both runs read the same amounts at every step."""
    left, right = ([[record[key] for key in ORDER] for record in read_metrics(run / "metrics.jsonl")] for run in (one, two))
    return left == right


def _resumed_from(run: Path) -> int:
    """The step of the checkpoint the second start read, from its log; 0 where there was none yet."""
    found = re.findall(r"continues \S+ at step (\d+)", (run / "train.log").read_text(encoding="utf-8"))
    return int(found[-1]) if found else 0
