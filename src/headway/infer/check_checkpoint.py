"""Check a checkpoint: sizes, checksums, shapes, finite values, one generation. All problems are
listed, not only the first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.config import CHECKPOINTS
from headway.checkpoint.load import Reader, locate, open_checkpoint, step_folders
from headway.checkpoint.manifest import MANIFEST
from headway.checkpoint.save import STEP_FOLDER
from headway.config.load import validate
from headway.errors import CheckpointError, HeadwayError
from headway.infer.aligner import find_aligner
from headway.infer.load import load_model
from headway.model.adapter.config import AdapterConfig, all_specs
from headway.model.base import ScoreHead
from headway.model.config import Head, ModelConfig
from headway.model.layout import param_specs
from headway.model.paged_rows import PagedRows
from headway.model.projector import MediaTensors
from headway.runtime.paths import AnyPath, parse_path
from headway.runtime.progress import progress

NEW_TOKENS = 8
"""Tokens that the trial generates: enough that the cache is read several times."""


@dataclass
class CheckpointReport:
    """What was checked, and the problems found."""

    checkpoint: str
    step: int | None = None
    files: int = 0
    tensors: int = 0
    token_ids: list[int] = field(default_factory=list)
    """What the model generates after a few ids."""
    embeds: list[str] = field(default_factory=list)
    """Of an aligner, which generates nothing: the modalities whose vectors are finite."""
    score: float | None = None
    """Of a reward model, which generates nothing either: its score of a few ids."""
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, with `good` where there is no problem."""
        return {**asdict(self), "good": not self.problems}

    def found(self, work: Callable[[], Any]) -> Any:
        """The result of `work`; an error is added to `problems` and gives None."""
        try:
            return work()
        except HeadwayError as problem:
            if str(problem) not in self.problems:
                self.problems.append(str(problem))
            return None


def check_checkpoint(path: AnyPath | str) -> CheckpointReport:
    """Check everything in a checkpoint; of a run, its newest."""
    report = CheckpointReport(str(path))
    checkpoint = report.found(lambda: _newest(path))
    reader: Reader | None = None
    if checkpoint is not None:
        reader = report.found(lambda: open_checkpoint(checkpoint))
    if reader is None:
        return report
    report.checkpoint = str(checkpoint)
    report.step = reader.step
    report.files = len(reader.files)
    for file in reader.files:
        report.found(lambda name=file: reader.check_file(name))
    _check_tensors(reader, report)
    config = _check_shapes(reader, report)
    if config is not None and not report.problems:
        report.found(lambda: TRIALS[config.head](report))
    return report


def _newest(path: AnyPath | str) -> AnyPath:
    """The checkpoint itself, or the newest of a folder, good or not."""
    checkpoint = parse_path(path)
    if (
        isinstance(checkpoint, Path)
        and not (checkpoint / MANIFEST).is_file()
        and not STEP_FOLDER.fullmatch(checkpoint.resolve().name)
    ):
        folders = step_folders(checkpoint / CHECKPOINTS) or step_folders(checkpoint)
        if folders:
            return folders[-1]
        return locate(checkpoint)
    if isinstance(checkpoint, Path):
        return checkpoint
    return locate(checkpoint)


def _check_tensors(reader: Reader, report: CheckpointReport) -> None:
    """Every element of every tensor is there, unchanged and finite."""
    pairs = [(name, role) for name in reader.names() for role in reader.roles(name)]
    report.tensors = len(pairs)
    with progress("verify", total=len(pairs), unit="tensors") as advance:
        for name, role in pairs:
            value = report.found(lambda name=name, role=role: reader.read(name, role))
            if (
                value is not None
                and value.is_floating_point()
                and not bool(torch.isfinite(value.float()).all())
            ):
                bad = int((~torch.isfinite(value.float())).sum())
                report.problems.append(
                    f"{reader.path}: {role} of {name} has {bad} of {value.numel()} values that "
                    "are not finite."
                )
            advance(1)


def _check_shapes(reader: Reader, report: CheckpointReport) -> ModelConfig | None:
    """Every parameter of the model is there in its shape; returns the model's config."""
    shape: Any = reader.scalars.get("model")
    if not isinstance(shape, dict):
        report.problems.append(
            f"{reader.path}: its manifest does not say what shape the model has."
        )
        return None
    config: ModelConfig | None = report.found(lambda: validate(ModelConfig, shape))
    if config is None:
        return None
    # A checkpoint of an adapter run has the adapter's parameters, whose shapes follow from its
    # form.
    shapes = {spec.name: spec.shape for spec in param_specs(config)}
    form: Any = reader.scalars.get("adapter")
    if isinstance(form, dict):
        adapter = report.found(lambda: validate(AdapterConfig, form["config"]))
        if adapter is not None:
            specs = report.found(lambda: all_specs(config, adapter))
            if specs is not None:
                shapes = {name: spec.shape for name, spec in specs.items()}
    for name, expected in shapes.items():
        stored = report.found(lambda name=name: reader.shape(name))
        if stored is not None and tuple(stored) != expected:
            report.problems.append(
                f"{reader.path}: {name} has shape {list(stored)}; the model has {list(expected)}."
            )
    return config


@torch.inference_mode()
def _embed(report: CheckpointReport) -> None:
    """The modalities of an aligner, each tried with made-up inputs of its tower or features of its
    frozen encoder."""
    path = Path(report.checkpoint)
    stored = find_aligner(path)
    aligner = stored.load()
    generator = torch.Generator().manual_seed(0)
    for name, encoder in stored.config.encoders.items():
        encoder_input = None
        if encoder.TRAINS:
            encoder_input = encoder.input_of(name)
        # A frozen encoder is not tried: its features are what the aligner reads.
        shape = (1, stored.config.width_of(name))
        dtype = "float32"
        if encoder_input is not None:
            shape = encoder_input.shape
            dtype = encoder_input.dtype
        inputs = torch.randint(0, 100, (2, *shape), generator=generator).to(getattr(torch, dtype))
        if not bool(torch.isfinite(aligner.embed(name, inputs)).all()):
            raise CheckpointError(f"{path}: the {name} vectors it computes are not finite.")
    report.embeds = list(stored.config.encoders)


@torch.inference_mode()
def _score(report: CheckpointReport) -> None:
    """The score that a reward model gives to a few ids."""
    path = report.checkpoint
    loaded = load_model(path, scores=True)
    ids = torch.arange(8)[None] % loaded.config.vocab
    hidden = loaded.model.hidden_states(ids, torch.arange(8, dtype=torch.int32)[None])
    score = float(ScoreHead(hidden, loaded.model.head_weight).of_documents(torch.tensor([[0, 8]])))
    if not math.isfinite(score):
        raise CheckpointError(f"{path}: the score it computes is not finite.")
    report.score = score


@torch.inference_mode()
def _generate(report: CheckpointReport) -> None:
    """A few greedy ids, from the cache that generation uses."""
    path = report.checkpoint
    loaded = load_model(path)
    media, soft = _some_media(loaded.config)
    # Ids need no meaning: what counts is that everything is finite.
    prompt = [number % loaded.config.vocab for number in range(4 + soft)]
    rows = PagedRows(loaded.model, 1, len(prompt) + NEW_TOKENS)
    hidden = rows.read(torch.tensor([prompt]), media)[:, -1]
    ids: list[int] = []
    for _ in range(NEW_TOKENS):
        logits = loaded.model.logits(hidden).float()
        if not bool(torch.isfinite(logits).all()):
            raise CheckpointError(f"{path}: the model computes values that are not finite.")
        token = logits.argmax(-1)
        ids.append(int(token))
        if len(ids) < NEW_TOKENS:
            hidden = rows.step(token)
    report.token_ids = ids


TRIALS: dict[Head, Callable[[CheckpointReport], None]] = {
    "tokens": _generate,
    "scores": _score,
    "vectors": _embed,
}
"""How a model is tried, by what it puts out. The report gets the result; what is wrong is a
HeadwayError."""


def _some_media(config: ModelConfig) -> tuple[MediaTensors | None, int]:
    """One item of each modality with made-up features, and how many positions they take; an item
    more is absent."""
    shape = config.media
    if shape is None:
        return None, 0
    generator = torch.Generator().manual_seed(0)
    features = {
        media_input.modality: torch.randn(
            1, 2, media_input.vectors, media_input.width, generator=generator
        )
        for media_input in shape.inputs
    }
    soft = sum(2 * media_input.tokens for media_input in shape.inputs)
    slot = torch.full((1, soft + 4), -1, dtype=torch.int32)
    slot[0, 1 : soft + 1] = torch.arange(soft, dtype=torch.int32)
    present = {name: torch.tensor([[True, False]]) for name in features}
    return MediaTensors(slot, features, present), soft
