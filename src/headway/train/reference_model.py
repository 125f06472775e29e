"""The frozen reference an objective compares with. In: a recipe, the weights it means, the pairs; out: what puts its log-probabilities
into a microbatch.

live     the reference stays as a second model, whole on every rank, in the compute dtype, and reads every microbatch once more
cached   it reads every pair once before training and is let go; the numbers lie in data.cache_dir/reference under a name made of the
         weights' bytes, the model's shape, the store's content and the compute dtype, so that whatever changes, they are made again
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

from headway.data.batch import Batch
from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.mixture import MixtureSource
from headway.data.open import OpenData
from headway.data.pairs import PAIR, PairSource
from headway.data.shuffle import Selection
from headway.errors import CheckpointError, ConfigError, DataError
from headway.infer.load import find_model, frozen_model
from headway.model.base import Model
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.objective.dpo import REFERENCE, document_sums
from headway.parallel.assemble import wrap_blocks
from headway.parallel.collectives import RankGroup
from headway.parallel.config import MemoryConfig
from headway.parallel.engine import EngineSpec
from headway.prepare.cache import default_cache_dir
from headway.runtime.json_file import load_json
from headway.runtime.progress import progress
from headway.runtime.sealed import parse_sealed_json, read_sealed, sealed_json, write_sealed
from headway.runtime.storage import write_atomic
from headway.text.hub import is_hub_id, local_or_hub
from headway.train.folder import Start
from headway.train.resolve import Resolved

log = logging.getLogger("headway")
FILE = "reference.json"
Weights = Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Reference:
    """A reference that is ready."""

    prepare: Callable[[Batch], Batch]
    """Adds its log-probability of every document to a microbatch."""
    sha256: str
    """Of its weights."""
    line: str
    """What it is, for the log."""

    def check_same(self, start: Start) -> None:
        """Refuse to go on with another reference than the run began with."""
        path = start.folder / FILE
        if start.checkpoint is None or not path.is_file():
            return
        try:
            given = load_json(path)
            before = str((parse_sealed_json(json.dumps(given)) if "checksum" in given else given)["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as problem:
            log.warning("%s is damaged (%s): whether the reference is still the same cannot be checked", path, problem)
            return
        if before != self.sha256:
            raise CheckpointError(
                f"{path}: the run began with other reference weights ({before[:12]}) than it would go on with ({self.sha256[:12]}). "
                "Put the old weights back, or use --resume never to begin anew."
            )

    def keep(self, start: Start) -> None:
        """Write down in the run folder which reference it was."""
        write_atomic(start.folder / FILE, sealed_json({"sha256": self.sha256, "reference": self.line}))


@dataclass(frozen=True)
class Scoring:
    """How the reference is computed: on what, in which rows, with which ranks."""

    spec: EngineSpec
    data: DataConfig
    micro_rows: int
    ranks: RankGroup


@dataclass(frozen=True)
class _Wanted:
    config: ModelConfig
    weights: Weights
    name: str


def make_reference(resolved: Resolved, data: OpenData, scoring: Scoring) -> Reference | None:
    """The reference a recipe's objective asks for; None where it needs none."""
    wish = resolved.recipe.objective.reference_spec
    if wish is None:
        return None
    wanted = _find(resolved, wish.path)
    digest = _Digest()
    if wish.cached:
        for name, value in wanted.weights():
            digest.add(name, value)
        table = _table(data, wanted, digest.sha256, scoring)
        prepare, how = _looking_up(table), "log-probabilities of all pairs"
    else:
        frozen = _load(wanted, digest.through(wanted.weights()), scoring)
        prepare, how = _scoring(frozen, scoring.spec.chunk_tokens), "kept as a second model"
    return Reference(prepare, digest.sha256, f"reference {wanted.name} ({digest.sha256[:12]}), {how}")


def check_reference(resolved: Resolved) -> None:
    """Refuse a reference that is not there or does not fit, before anything is read."""
    wish = resolved.recipe.objective.reference_spec
    if wish is not None:
        _find(resolved, wish.path)


def _find(resolved: Resolved, path: str | None) -> _Wanted:
    model = resolved.model
    if path is None:
        stored = resolved.weights
        if stored is not None:
            return _Wanted(model, stored.weights, f"{stored.path}, which the run starts from")
        seed = resolved.recipe.seed
        return _Wanted(
            model,
            lambda: ((spec.name, initial_value(spec.name, spec.shape, model, seed)) for spec in param_specs(model)),
            "of random weights, which the run starts from",
        )
    try:
        stored = find_model(local_or_hub(path, cache_dir=resolved.recipe.data.cache_dir) if is_hub_id(path) else path)
    except (ConfigError, DataError) as problem:
        raise ConfigError(f"objective.reference: {problem}") from None
    if stored.config.vocab != model.vocab:
        raise ConfigError(
            f"objective.reference is {path}, which has {stored.config.vocab} ids; the model has {model.vocab}. Give one of its tokenizer."
        )
    if stored.config.max_seq_len < resolved.recipe.data.seq_len:
        raise ConfigError(
            f"objective.reference is {path}, made for {stored.config.max_seq_len} tokens; data.seq_len is {resolved.recipe.data.seq_len}."
        )
    if stored.tokenizer_folder is not None and resolved.tokenizer is not None:
        from headway.tokenizer.load import load_tokenizer

        if load_tokenizer(stored.tokenizer_folder).fingerprint != resolved.tokenizer.fingerprint:
            raise ConfigError(
                f"objective.reference is {path}, which has another tokenizer than the recipe. Their ids mean different things."
            )
    return _Wanted(stored.config, stored.weights, str(stored.path))


class _Digest:
    """The checksum of named tensors, in their order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, name: str, value: Tensor) -> None:
        self._hash.update(f"{name}|{tuple(value.shape)}|{value.dtype}\n".encode())
        self._hash.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def through(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            self.add(name, value)
            yield name, value

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def _load(wanted: _Wanted, weights: Iterable[tuple[str, Tensor]], scoring: Scoring) -> Model:
    model = frozen_model(wanted.config, weights, scoring.spec.device, scoring.spec.dtype)
    wrap_blocks(model, replace(scoring.spec, memory=MemoryConfig()))
    return model


def _scoring(model: Model, chunk_tokens: int) -> Callable[[Batch], Batch]:
    model.chunk_tokens = chunk_tokens

    @torch.no_grad()
    def prepare(batch: Batch) -> Batch:
        log_prob, _ = model.forward_batch(batch).head.scores(batch.targets)
        return replace(batch, extra={**batch.extra, REFERENCE: document_sums(log_prob * batch.loss_weight, batch)})

    return prepare


def _looking_up(table: Tensor) -> Callable[[Batch], Batch]:
    def prepare(batch: Batch) -> Batch:
        pair = batch.extra[PAIR]
        # A row's places without a pair must not bring in another's number, which may be none.
        found = torch.where((pair >= 0)[..., None], table[pair.clamp(min=0)], 0.0)
        return replace(batch, extra={**batch.extra, REFERENCE: found.flatten(1)})

    return prepare


def _table(data: OpenData, wanted: _Wanted, digest: str, scoring: Scoring) -> Tensor:
    """Log-probabilities of every pair of every source, chosen and rejected, by the pairs' numbers over all sources."""
    selections = {id(one.selection.source): one.selection for many in (data.train, *data.valid.values()) for one in many}
    parts: list[tuple[int, Tensor]] = []
    model: Model | None = None
    for selection in selections.values():
        source = selection.source
        assert isinstance(source, PairSource)
        path = _cache_path(selection, wanted, digest, scoring)
        found = read_table(path, source.num_documents)
        if scoring.ranks.max(0 if found is not None else 1):  # ranks on other machines may not see it: then all make it again
            model = model or _load(wanted, wanted.weights(), scoring)
            found = _score(model, selection, scoring)
            if scoring.ranks.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_sealed(path, found.numpy().astype("<f4").tobytes())
                log.info("reference log-probabilities of %s are kept in %s", source.name, path)
        assert found is not None
        parts.append((source.first_pair, found))
    return torch.cat([part for _, part in sorted(parts, key=lambda one: one[0])]).to(scoring.spec.device)


def _cache_path(selection: Selection, wanted: _Wanted, digest: str, scoring: Scoring) -> Path:
    parts = (
        digest,
        wanted.config.model_dump_json(),
        selection.source.content_key,
        selection.limit,
        selection.max_length,
        str(scoring.spec.dtype),
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    return (scoring.data.cache_dir or default_cache_dir()) / "reference" / f"{key[:32]}.sealed"


def read_table(path: Path, pairs: int) -> Tensor | None:
    """The log-probabilities kept in a file; None where there are none, or where they are damaged, which is a warning."""
    try:
        content = read_sealed(path)
    except (OSError, ValueError) as problem:
        log.warning("%s is damaged (%s) and is made again", path, problem)
        return None
    if content is None or len(content) != 8 * pairs:
        return None
    return torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float32).reshape(pairs, 2))


@torch.no_grad()
def _score(model: Model, selection: Selection, scoring: Scoring) -> Tensor:
    """Every rank scores its share of the pairs; those that fit no row stay unscored."""
    source, ranks = selection.source, scoring.ranks
    assert isinstance(source, PairSource)
    table = torch.zeros(source.num_documents, 2)
    seen = torch.zeros(source.num_documents)
    prepare = _scoring(model, scoring.spec.chunk_tokens)
    config = scoring.data.model_copy(update={"workers": 0, "skip_batches": "", "max_tokens": None, "balance": False})
    whole = MixtureSource(Selection(source, selection.limit, max_length=selection.max_length))
    with (
        Loader(
            config, sources=[whole], rows_per_step=scoring.micro_rows * ranks.size, micro_rows=scoring.micro_rows, rank=ranks.rank,
            world=ranks.size, seed=0, epochs=1, shuffle=False,
        ) as loader,
        progress(f"reference reads {source.name}", total=selection.num_documents, unit="pairs") as advance,
    ):  # fmt: skip
        for step, _ in loader:
            for micro in step.microbatches:
                scored = prepare(micro.to(scoring.spec.device)).extra[REFERENCE].float().cpu()
                pair = micro.extra[PAIR]
                held = pair >= 0
                numbers = pair[held] - source.first_pair
                table[numbers] = scored[:, : 2 * pair.shape[1]].unflatten(1, (-1, 2))[held]
                seen[numbers] = 1
            advance(step.totals["pairs"])
    ranks.all_reduce(table).wait()
    ranks.all_reduce(seen).wait()
    return torch.where(seen[:, None] > 0, table, torch.nan)
