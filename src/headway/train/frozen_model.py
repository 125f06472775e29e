"""The frozen second model of DPO, KTO and distillation.

A recipe, its weights and the data come in; a function that adds the reference's log-probabilities,
or a teacher's hidden states, to a microbatch goes out.

live     The reference stays in memory as a second model in the compute dtype and reads every
         microbatch too. It is whole on every rank, or split along the tensor axis like the model
         that trains. Weights the run starts from are quantised as adapter.base says.
cached   It reads every pair or record once before training and is freed. Its numbers are stored in
         data.cache_dir/reference under a hash of the weights, the model's shape, the store's
         content and the compute dtype; they are recomputed when any of these changes.
         A run of less than one epoch scores only what it will read, in the rows of its own steps,
         into a file of its own next to that one. A run that is extended scores the rest.

The table of cached numbers has one row per group (a pair, or a record and its KL completion):

    batch.extra[number] [rows, places] -> table[number] [rows, places, 2] -> columns of the task
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headway.checkpoint.stored_model import find_model
from headway.data.batch import KEPT, ROUTES, TEACHER_STATES, Batch
from headway.data.config import DataConfig, default_cache_dir
from headway.data.groups import GroupSource
from headway.data.loader import Loader
from headway.data.mixture import MixtureSource
from headway.data.open import OpenData
from headway.data.selection import Selection
from headway.errors import CheckpointError, ConfigError, DataError, ParallelError
from headway.model.adapter.config import AdapterConfig
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
from headway.train.batches import PlannedRows
from headway.train.resolve import Resolved
from headway.train.start import Start

if TYPE_CHECKING:
    from headway.kernels.policy_scores import DrawnFrom
    from headway.tasks.answers import AnswerSampling

log = logging.getLogger("headway")

FILE = "reference.json"
"""In the run folder: which reference the run began with."""
ROW_BYTES = 8
"""Of a group in a stored table: two float32."""
Weights = Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Reference:
    """A reference model, ready to use."""

    prepare: Callable[[Batch], Batch] | None
    """Adds the reference's log-probability of every document to a microbatch, or a teacher's hidden
    states; None: the loader reads them.
    """
    sha256: str
    """Of its weights, or of its stored logits."""
    description: str
    objective: TaskConfig
    """The recipe's objective, with a teacher's head where it learns from one."""
    cover: Callable[[PlannedRows | None], None] | None = None
    """Cached log-probabilities: score what a changed plan reads and nobody has scored yet."""
    bind: Callable[[Model], None] | None = None
    """Give it the model that trains, where that model without its adapter is the reference."""

    def check_same(self, start: Start) -> None:
        """Refuse to resume with another reference than the run began with."""
        path = start.folder / FILE
        if start.checkpoint is None or not path.is_file():
            return
        try:
            content = load_json(path)
            # Files of early versions have no checksum of their own.
            if "checksum" in content:
                content = parse_sealed_json(json.dumps(content))
            recorded = str(content["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as problem:
            log.warning(
                "%s is damaged (%s): cannot check whether the reference is still the same",
                path,
                problem,
            )
            return
        if recorded != self.sha256:
            role = self.description.split()[0]
            raise CheckpointError(
                f"{path}: the run began with other {role} weights ({recorded[:12]}) "
                f"than it would resume with ({self.sha256[:12]}). "
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
    """Of a run that starts from these weights and stores them quantised: the reference is what this
    run starts from.
    """
    has_updates: bool = False
    """`weights` has a carried adapter beside the base."""


def make_reference(
    resolved: Resolved,
    data: OpenData,
    spec: EngineSpec,
    micro_rows: int,
    plan: Callable[[], PlannedRows | None] | None = None,
) -> Reference | None:
    """The reference that a recipe's objective needs; None where it needs none.

    `plan` says which rows the run will read; without it everything is scored.
    """
    objective = resolved.recipe.objective
    recipe_adapter = resolved.recipe.adapter
    if data.teacher is not None:
        origin = data.teacher.origin
        description = (
            f"teacher {origin.teacher} ({origin.teacher_sha256[:12]}), top {origin.top_k} "
            f"of every position from {len(data.teacher.parts)} stores of logits, "
            "no model in memory"
        )
        return Reference(None, data.teacher.key, description, objective)

    wanted = objective.needs.frozen
    if wanted is None:
        return None
    if wanted.token_column is not None and wanted.path is None and recipe_adapter is not None:
        return _base_of_adapter(resolved, wanted.token_column)

    source = _find_source(resolved, wanted)
    scoring = _Scoring(spec, resolved.recipe.data, micro_rows)
    # A quantised model is another reference than the same weights in floats.
    digest = _Digest(source.adapter.base if source.adapter else None)
    cover = None
    columns = wanted.columns
    if wanted.cached:
        assert columns is not None, "hidden states of a teacher are too large to be kept"
        # The hash names the cached tables, so it is needed before anything is loaded.
        for name, value in source.weights():
            digest.add(name, value)
        scores = _CachedScores(data, source, digest.sha256, scoring, columns)
        planned = None
        if plan is not None:
            planned = plan()
        scores.cover(planned)
        prepare = scores.prepare
        cover = scores.cover
        detail = "log-probabilities of the pairs or records that the run reads"
        if planned is None:
            detail = "log-probabilities of all pairs or records"
    else:
        # Weights are read once: they are hashed on their way into the model.
        frozen = _load(source, digest.through(source.weights()), scoring)
        detail = "as a second model in memory"
        if columns is not None:
            prepare = score_with(frozen, spec.chunk_tokens, columns)
        elif wanted.token_column is not None:
            prepare = score_tokens_with(
                frozen, spec.chunk_tokens, wanted.token_column, answer_sampling(resolved).drawn
            )
        else:
            from headway.kernels.distill_loss import TeacherHead

            prepare = teach_with(frozen)
            head = TeacherHead(frozen.head_weight, source.config.logit_softcap)
            objective = objective.with_teacher_head(head)

    description = f"{wanted.role} {source.name} ({digest.sha256[:12]}), {detail}"
    return Reference(prepare, digest.sha256, description, objective, cover)


def _base_of_adapter(resolved: Resolved, column: str) -> Reference:
    """The frozen base under the adapter that trains: no second copy of the weights."""
    from headway.model.adapter.lora import without_updates

    drawn = answer_sampling(resolved).drawn
    models: list[Model] = []

    @torch.no_grad()
    def prepare(batch: Batch) -> Batch:
        model = models[0]
        is_training = model.training
        model.eval()
        try:
            with without_updates(model):
                return with_token_scores(model, batch, column, drawn)
        finally:
            model.train(is_training)

    # What the base is, is part of the run: its weights are frozen in every checkpoint.
    name = "the frozen base under the adapter"
    digest = hashlib.sha256(name.encode()).hexdigest()
    description = f"reference {name}, without a second copy"
    return Reference(prepare, digest, description, resolved.recipe.objective, bind=models.append)


def check_reference(resolved: Resolved) -> None:
    """Refuse a reference that does not exist or does not fit, before anything is read."""
    wanted = resolved.recipe.objective.needs.frozen
    if wanted is None:
        return
    if wanted.token_column is not None and wanted.path is None:
        # The frozen base of an adapter, or the weights that the run starts from.
        return
    _find_source(resolved, wanted)


def _find_source(resolved: Resolved, wanted: ReferenceSpec) -> _Source:
    """Where the reference comes from: a model of its own, or what the run starts from."""
    recipe = resolved.recipe
    model = resolved.model
    path = wanted.path
    role = wanted.role
    if path is None and recipe.adapter is not None and recipe.adapter.base is not None:
        return _quantised_source(resolved, recipe.adapter, wanted)

    if path is None:
        stored = resolved.weights
        if stored is None and wanted.is_teacher:
            raise ConfigError(
                "objective.teacher is null and the run starts from random weights, "
                "which teach nothing. Set objective.teacher."
            )
        if stored is not None:
            return _Source(model, stored.weights, f"{stored.path}, the weights the run starts from")

        def random_weights() -> Iterator[tuple[str, Tensor]]:
            for spec in param_specs(model):
                yield spec.name, initial_value(spec, model, recipe.seed)

        return _Source(model, random_weights, "with the random weights the run starts from")

    try:
        stored = find_model(path, recipe.data.cache_dir)
        stored.check_head()
    except (ConfigError, DataError) as problem:
        raise ConfigError(f"{wanted.setting}: {problem}") from None

    # Another model than the one that trains: it must fit the layout, the rows and the vocabulary.
    try:
        check_layout(
            LayoutCase(recipe.parallel, stored.config, recipe.data.seq_len, recipe.objective)
        )
    except ParallelError as problem:
        raise ParallelError(f"{wanted.setting} is {path}: {problem}") from None
    if stored.config.vocab != model.vocab:
        raise ConfigError(
            f"{wanted.setting} is {path}, with a vocabulary of {stored.config.vocab}; "
            f"the model has {model.vocab}. "
            f"Use a {role} with the same tokenizer."
        )
    if stored.config.max_seq_len < recipe.data.seq_len:
        raise ConfigError(
            f"{wanted.setting} is {path}, made for {stored.config.max_seq_len} tokens; "
            f"data.seq_len is {recipe.data.seq_len}. Lower it."
        )
    if stored.tokenizer_folder is not None and resolved.tokenizer is not None:
        from headway.tokenizer.load import load_tokenizer

        if load_tokenizer(stored.tokenizer_folder).fingerprint != resolved.tokenizer.fingerprint:
            raise ConfigError(
                f"{wanted.setting} is {path}, with another tokenizer than the recipe's. "
                f"Use a {role} with the same tokenizer."
            )
    return _Source(stored.config, stored.weights, str(stored.path))


def _quantised_source(resolved: Resolved, adapter: AdapterConfig, wanted: ReferenceSpec) -> _Source:
    """What a run with a quantised base starts from: the base, and the adapter that it continues."""
    model = resolved.model
    carried = resolved.continued
    layouts = adapter.layouts(resolved.model)
    if carried is None:
        # A new adapter changes nothing at the start: the reference is the base alone.
        without_adapter = resolved.recipe.model_copy(update={"adapter": None})
        plain = _find_source(replace(resolved, recipe=without_adapter), wanted)
        return replace(plain, name=f"{plain.name}, in {adapter.base}", adapter=adapter)

    from headway.model.adapter.lora import with_updates

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
    """The checksum of named tensors, in their order. `form`: how the model will store them."""

    def __init__(self, form: str | None = None) -> None:
        self._hash = hashlib.sha256()
        if form is not None:
            self._hash.update(f"stored in {form}\n".encode())

    def add(self, name: str, value: Tensor) -> None:
        self._hash.update(f"{name}|{tuple(value.shape)}|{value.dtype}\n".encode())
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        self._hash.update(data.numpy().data)

    def through(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors on and add each."""
        for name, value in weights:
            self.add(name, value)
            yield name, value

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def _load(source: _Source, weights: Iterable[tuple[str, Tensor]], scoring: _Scoring) -> Model:
    """The reference as a model in memory, whole or this rank's part of it."""
    spec = scoring.spec
    if source.adapter is not None:
        model = _build_quantised(source, source.adapter, weights, spec)
    elif spec.ranks.tensor.size > 1:
        model = build_frozen_part(replace(spec, model=source.config), weights)
    else:
        model = build_frozen_model(source.config, weights, spec.device, spec.dtype)
    # Without gradients there is nothing to recompute or to offload.
    wrap_blocks(model, replace(scoring.spec, memory=MemoryConfig()))
    return model


@torch.no_grad()
def _build_quantised(
    source: _Source, adapter: AdapterConfig, weights: Iterable[tuple[str, Tensor]], spec: EngineSpec
) -> Model:
    """A frozen model whose layers are stored quantised.

    One matrix at a time is read and quantised.
    """
    from headway.model.adapter.lora import adapt, pack_linears
    from headway.model.adapter.packed_base import packed_values

    # A reference has no gates: all of its heads are full.
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
    """A function that adds the model's log-probabilities of documents to a microbatch.

    Of a document: the sum over its targets of log p(target) * loss weight.
    """
    model.chunk_tokens = chunk_tokens

    def score(batch: Batch) -> Tensor:
        log_prob, _ = model.forward_batch(batch).head.scores(batch.targets)
        return batch.sum_documents(log_prob * batch.loss_weight)

    @torch.no_grad()
    def prepare(batch: Batch) -> Batch:
        scores = {name: score(rows) for name, rows in columns.scored(batch).items()}
        return replace(batch, extra=batch.extra | scores)

    return prepare


def score_tokens_with(
    model: Model, chunk_tokens: int, column: str, drawn: DrawnFrom
) -> Callable[[Batch], Batch]:
    """A function that adds the model's log-probability of every target to a microbatch, in the
    distribution of rollouts."""
    model.chunk_tokens = chunk_tokens

    @torch.no_grad()
    def prepare(batch: Batch) -> Batch:
        return with_token_scores(model, batch, column, drawn)

    return prepare


def answer_sampling(resolved: Resolved) -> AnswerSampling:
    """How the answers of a run are sampled."""
    from headway.tasks.answers import AnswerSampling

    assert resolved.tokenizer is not None, "prompts need one"
    rollout = resolved.recipe.rollout
    return AnswerSampling(
        rollout.temperature,
        resolved.tokenizer.vocab_size,
        rollout.max_new_tokens,
        rollout.exact,
    )


def with_token_scores(model: Model, batch: Batch, column: str, drawn: DrawnFrom) -> Batch:
    """The microbatch with a model's log-probability of every target."""
    # Experts that are replayed are those of the model that trains; the frozen one chooses its own.
    without_routes = {name: column for name, column in batch.extra.items() if name != ROUTES}
    head = model.forward_batch(replace(batch, extra=without_routes)).head
    scores = head.policy(batch.targets, drawn, batch.extra.get(KEPT))
    return replace(batch, extra={**batch.extra, column: scores.log_prob})


def teach_with(model: Model) -> Callable[[Batch], Batch]:
    """A function that adds the model's hidden states to a microbatch.

    Its logits are computed with the loss, a chunk at a time.
    """

    @torch.no_grad()
    def prepare(batch: Batch) -> Batch:
        return replace(
            batch, extra={**batch.extra, TEACHER_STATES: model.forward_batch(batch).hidden}
        )

    return prepare


class _CachedScores:
    """Two log-probabilities of the reference for each group, in one table over all sources.

    A group is a pair's answers, or a record and its KL completion. A row of the table is found by
    the group's number, which counts over all sources. NaN where nothing was scored.
    """

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
        # Both sides of a split are selections of one source: it is scored once, as a whole.
        selections: dict[int, Selection] = {}
        for mixture in (data.train, *data.valid.values()):
            for part in mixture:
                selections[id(part.selection.source)] = part.selection
        # In the order of their numbers, so that their tables one after another are the table.
        self.selections = sorted(
            selections.values(), key=lambda selection: _groups_of(selection).first_number
        )
        self.table = torch.empty(0)
        """[groups of all sources, 2], on the device; the engine's passes look it up."""

    def prepare(self, batch: Batch) -> Batch:
        """A microbatch with the reference's log-probabilities."""
        group_numbers = batch.extra[self.columns.number]
        # A place without a group must not read another group's number, which may be NaN.
        scores = torch.where(
            (group_numbers >= 0)[..., None], self.table[group_numbers.clamp(min=0)], 0.0
        )
        return replace(batch, extra=batch.extra | self.columns.from_table(scores))

    def cover(self, planned: PlannedRows | None) -> None:
        """Find the numbers of what a run will read, or of everything.

        The reference computes what is missing. All ranks together.
        """
        if planned is None:
            tables = self._tables_of_all()
        else:
            tables = self._tables_of_planned(planned)
        self.table = torch.cat(tables).to(self.scoring.spec.device)

    def _tables_of_all(self) -> list[Tensor]:
        """The table of every source, of all its pairs."""
        model: Model | None = None
        tables: list[Tensor] = []
        for selection in self.selections:
            path = _cache_path(selection, self.source, self.digest, self.scoring)
            table = self._read_stored(selection, path)
            if table is None:
                model = model or self._load()
                table = _score_all(model, selection, self.scoring, self.columns)
                self._store(path, table, f"of {selection.source.name}")
            tables.append(table)
        return tables

    def _tables_of_planned(self, planned: PlannedRows) -> list[Tensor]:
        """The table of every source, with the pairs that the run reads."""
        # What else stands in a row may change the last bits of a score. So runs with other rows
        # have other files; the one in which all groups were scored serves them all.
        rows_key = hashlib.sha256(planned.key.encode()).hexdigest()[:16]
        paths: list[Path] = []
        known: list[Tensor] = []
        for selection in self.selections:
            whole_path = _cache_path(selection, self.source, self.digest, self.scoring)
            path = whole_path.with_name(f"{whole_path.stem}-{rows_key}{whole_path.suffix}")
            table = self._read_stored(selection, path)
            if table is None:
                table = self._read_stored(selection, whole_path)
            if table is None:
                table = torch.full((_groups_of(selection).num_documents, 2), torch.nan)
            paths.append(path)
            known.append(table)

        # A microbatch holds groups of several sources, so all tables are filled at once.
        joined = torch.cat(known)
        is_new = self._score_missing(planned, joined)
        tables = list(torch.split(joined, [len(table) for table in known]))
        if is_new:
            for selection, path, table in zip(self.selections, paths, tables, strict=True):
                num_scored = int((~table[:, 0].isnan()).sum())
                content = f"of {num_scored} of {len(table)} in {selection.source.name}"
                self._store(path, table, f"{content}, those this run reads,")
        return tables

    @torch.no_grad()
    def _score_missing(self, planned: PlannedRows, table: Tensor) -> bool:
        """Score what the planned rows hold and the table lacks, each rank its own rows.

        False if it lacks nothing.
        """
        ranks = self.scoring.spec.ranks.data
        device = self.scoring.spec.device
        # Of what this rank has scored: the numbers of each group, and how many ranks scored it.
        sums = torch.zeros_like(table)
        times = torch.zeros(len(table))
        is_known = ~table[:, 0].isnan()
        # The model is loaded for the first microbatch that needs it: often nothing is missing.
        score: Callable[[Batch], Batch] | None = None
        with progress("reference reads", unit="documents") as advance:
            for micro in planned.microbatches():
                numbers = micro.extra[self.columns.number].cpu()
                if is_known[numbers[numbers >= 0]].all():
                    continue
                if score is None:
                    score = score_with(self._load(), self.scoring.spec.chunk_tokens, self.columns)
                group_numbers, scored = _scores_of(score(micro.to(device)), self.columns)
                # Known groups of the same microbatch keep their numbers: a resumed run must see
                # the ones that it began with.
                is_missing = (group_numbers >= 0) & ~is_known[group_numbers.clamp(min=0)]
                sums[group_numbers[is_missing]] = scored[is_missing]
                times[group_numbers[is_missing]] = 1
                is_known[group_numbers[is_missing]] = True
                advance(int(is_missing.sum()))
        ranks.all_reduce(sums).wait()
        ranks.all_reduce(times).wait()
        is_scored = times > 0
        # A source that repeats may give one pair to two ranks.
        table[is_scored] = sums[is_scored] / times[is_scored, None]
        return bool(is_scored.any())

    def _load(self) -> Model:
        return _load(self.source, self.source.weights(), self.scoring)

    def _read_stored(self, selection: Selection, path: Path) -> Tensor | None:
        """The table in a file.

        Ranks on other machines may not see the file: then it is missing for all.
        """
        table = read_table(path, _groups_of(selection).num_documents)
        is_missing_anywhere = self.scoring.spec.ranks.world.max(int(table is None))
        if is_missing_anywhere:
            return None
        return table

    def _store(self, path: Path, table: Tensor, content: str) -> None:
        """On the first rank: write a table; `content` says for the log what it holds."""
        if self.scoring.spec.ranks.world.rank != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Little-endian on every machine: caches are shared.
        write_sealed(path, table.numpy().astype("<f4").tobytes())
        log.info("reference log-probabilities %s are stored in %s", content, path)


def _groups_of(selection: Selection) -> GroupSource:
    source = selection.source
    assert isinstance(source, GroupSource), "only groups have numbers over all sources"
    return source


def _cache_path(selection: Selection, source: _Source, digest: str, scoring: _Scoring) -> Path:
    # All that decides the numbers, and how many of them there are.
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
    if content is None or len(content) != ROW_BYTES * pairs:
        return None
    return torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float32).reshape(pairs, 2))


@torch.no_grad()
def _score_all(
    model: Model, selection: Selection, scoring: _Scoring, columns: ScoreColumns
) -> Tensor:
    """Score every group, divided among ranks; groups that fit no row stay NaN."""
    source = _groups_of(selection)
    ranks = scoring.spec.ranks.data
    table = torch.zeros(source.num_documents, 2)
    is_scored = torch.zeros(source.num_documents)
    prepare = score_with(model, scoring.spec.chunk_tokens, columns)

    # Every group once and in order, whatever the run does with them: numbers do not depend on it.
    config = scoring.data.model_copy(
        update={"workers": 0, "skip_batches": "", "max_tokens": None, "balance": False}
    )
    everything = MixtureSource(Selection(source, selection.limit, max_length=selection.max_length))
    loader = Loader(
        config,
        sources=[everything],
        rows_per_step=scoring.micro_rows * ranks.size,
        micro_rows=scoring.micro_rows,
        rank=ranks.rank,
        world=ranks.size,
        seed=0,
        epochs=1,
        shuffle=False,
    )
    reading = progress(
        f"reference reads {source.name}", total=selection.num_documents, unit="documents"
    )
    with loader, reading as advance:
        for step, _ in loader:
            for micro in step.microbatches:
                group_numbers, scored = _scores_of(prepare(micro.to(scoring.spec.device)), columns)
                has_group = group_numbers >= 0
                indices = group_numbers[has_group] - source.first_number
                table[indices] = scored[has_group]
                is_scored[indices] = 1
            assert source.total is not None
            advance(step.totals[source.total])

    # Ranks have scored different groups, and zeros elsewhere: their sum is the table.
    ranks.all_reduce(table).wait()
    ranks.all_reduce(is_scored).wait()
    return torch.where(is_scored[:, None] > 0, table, torch.nan)


def _scores_of(batch: Batch, columns: ScoreColumns) -> tuple[Tensor, Tensor]:
    """The numbers of a scored microbatch's groups, and the two log-probabilities of each.

    Their shapes are [rows, places] and [rows, places, 2]; a place without a group has a negative
    number.
    """
    group_numbers = batch.extra[columns.number].cpu()
    scores = {name: batch.extra[name].float().cpu() for name in columns.scored(batch)}
    return group_numbers, columns.to_table(scores, group_numbers.shape[1])
