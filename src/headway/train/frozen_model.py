"""The frozen second model of DPO, KTO and distillation. A recipe, its weights and the data come in; a function that adds the reference's
log-probabilities, or a teacher's hidden states, to a microbatch goes out.

live     the reference stays in memory as a second model in the compute dtype and reads every microbatch too; it is whole on every rank,
         or split along the tensor axis like the model that trains. Weights the run starts from are quantised as adapter.base says
cached   it reads every pair or record once before training and is freed; its numbers are stored in data.cache_dir/reference under a
         hash of the weights, the model's shape, the store's content and the compute dtype; they are recomputed when any of these changes.
         A run of less than one epoch scores only what it will read, in the rows of its own steps, into a file of its own next to that
         one. A run that is extended scores the rest
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.checkpoint.stored_model import find_model
from headway.data.batch import Batch
from headway.data.config import DataConfig, default_cache_dir
from headway.data.groups import GroupSource
from headway.data.loader import Loader
from headway.data.mixture import MixtureSource
from headway.data.open import OpenData
from headway.data.selection import Selection
from headway.errors import CheckpointError, ConfigError, DataError, ParallelError
from headway.kernels.distill_loss import TeacherHead
from headway.model.adapter.config import AdapterConfig
from headway.model.adapter.lora import adapt, pack_linears, with_updates
from headway.model.adapter.packed_base import packed_values
from headway.model.base import Model, build_frozen_model, build_model
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import GATES, param_specs
from headway.parallel.assemble import wrap_blocks
from headway.parallel.config import MemoryConfig
from headway.parallel.engine import EngineSpec
from headway.parallel.layout_rules import LayoutCase, check_layout
from headway.parallel.tensor import build_frozen_part
from headway.runtime.json_file import load_json
from headway.runtime.progress import progress
from headway.runtime.storage import (
    parse_sealed_json,
    read_sealed,
    sealed_json,
    write_atomic,
    write_sealed,
)
from headway.tasks.base import ReferenceSpec, ScoreColumns, TaskConfig
from headway.tasks.distill import TAUGHT
from headway.tasks.preference.loss import document_sums
from headway.train.batches import PlannedRows
from headway.train.resolve import Resolved
from headway.train.start import Start

log = logging.getLogger("headway")
FILE = "reference.json"
Weights = Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Reference:
    """A reference model, ready to use."""

    prepare: Callable[[Batch], Batch] | None
    """Adds the reference's log-probability of every document to a microbatch, or a teacher's hidden states; None: the loader reads them."""
    sha256: str
    """Of its weights, or of its stored logits."""
    description: str
    objective: TaskConfig
    """The recipe's objective, with a teacher's head where it learns from one."""
    cover: Callable[[PlannedRows | None], None] | None = None
    """Cached log-probabilities: score what a changed plan reads and nobody has scored yet."""

    def check_same(self, start: Start) -> None:
        """Refuse to resume with another reference than the run began with."""
        path = start.folder / FILE
        if start.checkpoint is None or not path.is_file():
            return
        try:
            given = load_json(path)
            before = str(
                (parse_sealed_json(json.dumps(given)) if "checksum" in given else given)["sha256"]
            )
        except (OSError, ValueError, KeyError, TypeError) as problem:
            log.warning(
                "%s is damaged (%s): cannot check whether the reference is still the same",
                path,
                problem,
            )
            return
        if before != self.sha256:
            role = self.description.split()[0]
            raise CheckpointError(
                f"{path}: the run began with other {role} weights ({before[:12]}) than it would resume with ({self.sha256[:12]}). "
                "Put the old weights back, or use --resume never to start a new run."
            )

    def record(self, start: Start) -> None:
        """Write to the run folder which reference it is."""
        write_atomic(
            start.folder / FILE, sealed_json({"sha256": self.sha256, "reference": self.description})
        )


@dataclass(frozen=True)
class _Scoring:
    """How the reference is computed: as the engine computes, in which rows."""

    spec: EngineSpec
    data: DataConfig
    micro_rows: int


@dataclass(frozen=True)
class _Source:
    """Where the reference comes from."""

    config: ModelConfig
    weights: Weights
    name: str
    adapter: AdapterConfig | None = None
    """Of a run that starts from these weights and stores them quantised: the reference is what this run starts from."""
    has_updates: bool = False
    """`weights` has a carried adapter beside the base."""


def make_reference(
    resolved: Resolved,
    data: OpenData,
    spec: EngineSpec,
    micro_rows: int,
    plan: Callable[[], PlannedRows | None] | None = None,
) -> Reference | None:
    """The reference that a recipe's objective needs; None where it needs none. `plan` says which rows the run will read; without it
    everything is scored."""
    wanted = resolved.recipe.objective.needs.frozen
    if data.teacher is not None:
        origin = data.teacher.origin
        how = f"top {origin.top_k} of every position from {len(data.teacher.parts)} stores of logits, no model in memory"
        description = f"teacher {origin.teacher} ({origin.teacher_sha256[:12]}), {how}"
        return Reference(None, data.teacher.key, description, resolved.recipe.objective)
    if wanted is None:
        return None
    source, objective = _find(resolved, wanted), resolved.recipe.objective
    scoring, digest = (
        _Scoring(spec, resolved.recipe.data, micro_rows),
        _Digest(source.adapter.base if source.adapter else None),
    )
    cover = None
    columns = wanted.columns
    if wanted.cached:
        assert columns is not None, "hidden states of a teacher are too large to be kept"
        for name, value in source.weights():
            digest.add(name, value)
        scores = _CachedScores(data, source, digest.sha256, scoring, columns)
        planned = None if plan is None else plan()
        scores.cover(planned)
        prepare = scores.prepare
        cover = scores.cover
        extent = "all" if planned is None else "the"
        how = f"log-probabilities of {extent} pairs or records{'' if planned is None else ' that the run reads'}"
    else:
        frozen = _load(source, digest.through(source.weights()), scoring)
        how = "as a second model in memory"
        if columns is not None:
            prepare = score_with(frozen, spec.chunk_tokens, columns)
        else:
            prepare = teach_with(frozen)
            head = TeacherHead(frozen.head_weight, source.config.logit_softcap)
            objective = objective.with_teacher_head(head)
    role = "teacher" if wanted.is_teacher else "reference"
    return Reference(
        prepare,
        digest.sha256,
        f"{role} {source.name} ({digest.sha256[:12]}), {how}",
        objective,
        cover,
    )


def check_reference(resolved: Resolved) -> None:
    """Refuse a reference that does not exist or does not fit, before anything is read."""
    wanted = resolved.recipe.objective.needs.frozen
    if wanted is not None:
        _find(resolved, wanted)


def _find(resolved: Resolved, wanted: ReferenceSpec) -> _Source:
    model, path, role = resolved.model, wanted.path, wanted.setting.rpartition(".")[2]
    if (
        path is None
        and resolved.recipe.adapter is not None
        and resolved.recipe.adapter.base is not None
    ):
        return _quantised(resolved, resolved.recipe.adapter, wanted)
    if path is None:
        stored = resolved.weights
        if stored is None and wanted.is_teacher:
            raise ConfigError(
                "objective.teacher is null and the run starts from random weights, which teach nothing. Set objective.teacher."
            )
        if stored is not None:
            return _Source(model, stored.weights, f"{stored.path}, the weights the run starts from")
        seed = resolved.recipe.seed
        return _Source(
            model,
            lambda: ((spec.name, initial_value(spec, model, seed)) for spec in param_specs(model)),
            "with the random weights the run starts from",
        )
    try:
        stored = find_model(path, resolved.recipe.data.cache_dir)
        stored.check_head()
    except (ConfigError, DataError) as problem:
        raise ConfigError(f"{wanted.setting}: {problem}") from None
    recipe = resolved.recipe
    try:
        check_layout(
            LayoutCase(recipe.parallel, stored.config, recipe.data.seq_len, recipe.objective)
        )
    except ParallelError as problem:
        raise ParallelError(f"{wanted.setting} is {path}: {problem}") from None
    if stored.config.vocab != model.vocab:
        raise ConfigError(
            f"{wanted.setting} is {path}, with a vocabulary of {stored.config.vocab}; the model has {model.vocab}. "
            f"Use a {role} with the same tokenizer."
        )
    if stored.config.max_seq_len < resolved.recipe.data.seq_len:
        raise ConfigError(
            f"{wanted.setting} is {path}, made for {stored.config.max_seq_len} tokens; "
            f"data.seq_len is {resolved.recipe.data.seq_len}. Lower it."
        )
    if stored.tokenizer_folder is not None and resolved.tokenizer is not None:
        from headway.tokenizer.load import load_tokenizer

        if load_tokenizer(stored.tokenizer_folder).fingerprint != resolved.tokenizer.fingerprint:
            raise ConfigError(
                f"{wanted.setting} is {path}, with another tokenizer than the recipe's. Use a {role} with the same tokenizer."
            )
    return _Source(stored.config, stored.weights, str(stored.path))


def _quantised(resolved: Resolved, adapter: AdapterConfig, wanted: ReferenceSpec) -> _Source:
    """What a run with a quantised base starts from: the base, and the adapter that it continues."""
    model, carried, layouts = resolved.model, resolved.continued, adapter.layouts(resolved.model)
    if carried is None:
        plain = _find(
            replace(resolved, recipe=resolved.recipe.model_copy(update={"adapter": None})), wanted
        )
        return replace(plain, name=f"{plain.name}, in {adapter.base}", adapter=adapter)

    def weights() -> Iterator[tuple[str, Tensor]]:
        base = carried.base_in(adapter.base)
        return with_updates(
            base,
            adapter,
            adapter.modules(model),
            resolved.recipe.seed,
            carried.updates(),
            layouts=layouts,
        )

    name = f"{carried.base or 'base'} in {adapter.base} with the adapter the run starts from"
    return _Source(model, weights, name, adapter, has_updates=True)


class _Digest:
    """The checksum of named tensors, in their order."""

    def __init__(self, form: str | None = None) -> None:
        self._hash = hashlib.sha256(b"" if form is None else f"stored in {form}\n".encode())

    def add(self, name: str, value: Tensor) -> None:
        self._hash.update(f"{name}|{tuple(value.shape)}|{value.dtype}\n".encode())
        self._hash.update(
            value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        )

    def through(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            self.add(name, value)
            yield name, value

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def _load(source: _Source, weights: Iterable[tuple[str, Tensor]], scoring: _Scoring) -> Model:
    spec = scoring.spec
    if source.adapter is not None:
        model = _build_quantised(source, source.adapter, weights, spec)
    elif spec.ranks.tensor.size > 1:
        model = build_frozen_part(replace(spec, model=source.config), weights)
    else:
        model = build_frozen_model(source.config, weights, spec.device, spec.dtype)
    wrap_blocks(model, replace(scoring.spec, memory=MemoryConfig()))
    return model


@torch.no_grad()
def _build_quantised(
    source: _Source, adapter: AdapterConfig, weights: Iterable[tuple[str, Tensor]], spec: EngineSpec
) -> Model:
    """A frozen model whose layers are stored quantised; one matrix at a time is read and quantised."""
    config = source.config.with_(head_gates=None)
    layouts = adapter.layouts(config)
    with torch.device("meta"):
        model = build_model(config)
        if source.has_updates:
            adapt(model, adapter, adapter.modules(config))
        pack_linears(model, layouts)
    model = model.to(spec.dtype).to_empty(device=spec.device).eval().requires_grad_(False)
    parameters = dict(model.named_parameters())
    for name, value in packed_values(weights, layouts, spec.device):
        if name != GATES:
            parameters[name].copy_(value)
    return model


def score_with(model: Model, chunk_tokens: int, columns: ScoreColumns) -> Callable[[Batch], Batch]:
    """A function that adds the model's log-probabilities of documents to a microbatch."""
    model.chunk_tokens = chunk_tokens

    def score(batch: Batch) -> Tensor:
        log_prob, _ = model.forward_batch(batch).head.scores(batch.targets)
        return document_sums(log_prob * batch.loss_weight, batch)

    @torch.no_grad()
    def prepare(batch: Batch) -> Batch:
        scores = {name: score(rows) for name, rows in columns.scored(batch).items()}
        return replace(batch, extra=batch.extra | scores)

    return prepare


def teach_with(model: Model) -> Callable[[Batch], Batch]:
    """A function that adds the model's hidden states to a microbatch; its logits are computed with the loss, a chunk at a time."""

    @torch.no_grad()
    def prepare(batch: Batch) -> Batch:
        return replace(batch, extra={**batch.extra, TAUGHT: model.forward_batch(batch).hidden})

    return prepare


class _CachedScores:
    """Two log-probabilities of the reference for each group (a pair's answers, a record and its mismatch), indexed by the groups' numbers
    over all sources. NaN where nothing was scored."""

    def __init__(
        self,
        data: OpenData,
        source: _Source,
        digest: str,
        scoring: _Scoring,
        columns: ScoreColumns,
    ) -> None:
        self.source = source
        self.digest = digest
        self.scoring = scoring
        self.columns = columns
        mixtures = (data.train, *data.valid.values())
        # Both sides of a split are selections of one source.
        selections = {id(one.selection.source): one.selection for many in mixtures for one in many}
        self.selections = sorted(selections.values(), key=lambda one: _groups_of(one).first_number)
        self.table = torch.empty(0)
        """On the device; the engine's passes look it up."""

    def prepare(self, batch: Batch) -> Batch:
        """A microbatch with the reference's log-probabilities."""
        number = batch.extra[self.columns.number]
        # A place without a group must not read another group's number, which may be NaN.
        scores = torch.where((number >= 0)[..., None], self.table[number.clamp(min=0)], 0.0)
        return replace(batch, extra=batch.extra | self.columns.from_table(scores))

    def cover(self, planned: PlannedRows | None) -> None:
        """Find the numbers of what a run will read, or of everything; the reference computes what is missing. All ranks together."""
        tables = self._all() if planned is None else self._planned(planned)
        self.table = torch.cat(tables).to(self.scoring.spec.device)

    def _all(self) -> list[Tensor]:
        """The table of every source, of all its pairs."""
        model: Model | None = None
        tables: list[Tensor] = []
        for selection in self.selections:
            path = _cache_path(selection, self.source, self.digest, self.scoring)
            found = self._stored(selection, path)
            if found is None:
                model = model or self._load()
                found = _score(model, selection, self.scoring, self.columns)
                self._store(path, found, f"of {selection.source.name}")
            tables.append(found)
        return tables

    def _planned(self, planned: PlannedRows) -> list[Tensor]:
        """The table of every source, with the pairs that the run reads."""
        paths: list[Path] = []
        tables: list[Tensor] = []
        for selection in self.selections:
            whole = _cache_path(selection, self.source, self.digest, self.scoring)
            rows = hashlib.sha256(planned.key.encode()).hexdigest()[:16]
            path = whole.with_name(f"{whole.stem}-{rows}{whole.suffix}")
            found = self._stored(selection, path)
            if found is None:
                found = self._stored(selection, whole)
            if found is None:
                found = torch.full((_groups_of(selection).num_documents, 2), torch.nan)
            paths.append(path)
            tables.append(found)
        table = torch.cat(tables)
        is_new = self._score_missing(planned, table)
        found = list(torch.split(table, [len(one) for one in tables]))
        for selection, path, one in zip(self.selections, paths, found, strict=True):
            if is_new:
                num_scored = int((~one[:, 0].isnan()).sum())
                self._store(
                    path,
                    one,
                    f"of {num_scored} of {len(one)} in {selection.source.name}, those this run reads,",
                )
        return found

    @torch.no_grad()
    def _score_missing(self, planned: PlannedRows, table: Tensor) -> bool:
        """Score what the planned rows hold and the table lacks, each rank its own rows; False if it lacks nothing."""
        ranks = self.scoring.spec.ranks.data
        device = self.scoring.spec.device
        sums = torch.zeros_like(table)
        times = torch.zeros(len(table))
        is_known = ~table[:, 0].isnan()
        score: Callable[[Batch], Batch] | None = None
        with progress("reference reads", unit="documents") as advance:
            for micro in planned.microbatches():
                numbers = micro.extra[self.columns.number].cpu()
                if is_known[numbers[numbers >= 0]].all():
                    continue
                if score is None:
                    score = score_with(self._load(), self.scoring.spec.chunk_tokens, self.columns)
                number, scored = _scores_of(score(micro.to(device)), self.columns)
                is_missing = (number >= 0) & ~is_known[number.clamp(min=0)]
                sums[number[is_missing]] = scored[is_missing]
                times[number[is_missing]] = 1
                is_known[number[is_missing]] = True
                advance(int(is_missing.sum()))
        ranks.all_reduce(sums).wait()
        ranks.all_reduce(times).wait()
        is_scored = times > 0
        # A source that repeats may give one pair to two ranks.
        table[is_scored] = sums[is_scored] / times[is_scored, None]
        return bool(is_scored.any())

    def _load(self) -> Model:
        return _load(self.source, self.source.weights(), self.scoring)

    def _stored(self, selection: Selection, path: Path) -> Tensor | None:
        """The table in a file; ranks on other machines may not see the file: then it is missing for all."""
        found = read_table(path, _groups_of(selection).num_documents)
        return None if self.scoring.spec.ranks.world.max(0 if found is not None else 1) else found

    def _store(self, path: Path, table: Tensor, content: str) -> None:
        """On the first rank: write a table; `content` says for the log what it holds."""
        if self.scoring.spec.ranks.world.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, table.numpy().astype("<f4").tobytes())
            log.info("reference log-probabilities %s are stored in %s", content, path)


def _groups_of(selection: Selection) -> GroupSource:
    source = selection.source
    assert isinstance(source, GroupSource), "only groups have numbers over all sources"
    return source


def _cache_path(selection: Selection, source: _Source, digest: str, scoring: _Scoring) -> Path:
    parts = (
        digest,
        source.config.model_dump_json(),
        selection.source.content_key,
        selection.limit,
        selection.max_length,
        str(scoring.spec.dtype),
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    return (scoring.data.cache_dir or default_cache_dir()) / "reference" / f"{key[:32]}.sealed"


def read_table(path: Path, pairs: int) -> Tensor | None:
    """The log-probabilities in a file; None if the file is missing or damaged (with a warning)."""
    try:
        content = read_sealed(path)
    except (OSError, ValueError) as problem:
        log.warning("%s is damaged (%s); computing it again", path, problem)
        return None
    if content is None or len(content) != 8 * pairs:
        return None
    return torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float32).reshape(pairs, 2))


@torch.no_grad()
def _score(model: Model, selection: Selection, scoring: _Scoring, columns: ScoreColumns) -> Tensor:
    """Score every group, divided among ranks; groups that fit no row stay NaN."""
    source = _groups_of(selection)
    ranks = scoring.spec.ranks.data
    table = torch.zeros(source.num_documents, 2)
    seen = torch.zeros(source.num_documents)
    prepare = score_with(model, scoring.spec.chunk_tokens, columns)
    config = scoring.data.model_copy(
        update={"workers": 0, "skip_batches": "", "max_tokens": None, "balance": False}
    )
    whole = MixtureSource(Selection(source, selection.limit, max_length=selection.max_length))
    with (
        Loader(
            config, sources=[whole], rows_per_step=scoring.micro_rows * ranks.size, micro_rows=scoring.micro_rows, rank=ranks.rank,
            world=ranks.size, seed=0, epochs=1, shuffle=False,
        ) as loader,
        progress(f"reference reads {source.name}", total=selection.num_documents, unit="documents") as advance,
    ):  # fmt: skip
        for step, _ in loader:
            for micro in step.microbatches:
                number, scored = _scores_of(prepare(micro.to(scoring.spec.device)), columns)
                filled = number >= 0
                numbers = number[filled] - source.first_number
                table[numbers] = scored[filled]
                seen[numbers] = 1
            assert source.total is not None
            advance(step.totals[source.total])
    ranks.all_reduce(table).wait()
    ranks.all_reduce(seen).wait()
    return torch.where(seen[:, None] > 0, table, torch.nan)


def _scores_of(batch: Batch, columns: ScoreColumns) -> tuple[Tensor, Tensor]:
    """The numbers of a scored microbatch's groups, and the two log-probabilities of each: [rows, places] and [rows, places, 2]."""
    number = batch.extra[columns.number].cpu()
    scores = {name: batch.extra[name].float().cpu() for name in columns.scored(batch)}
    return number, columns.to_table(scores, number.shape[1])
