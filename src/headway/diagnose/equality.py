"""Two equalities that must hold on the user's own data: packed = unpacked loss, and one microbatch of N rows = N of one row.

In: opened data and a model's shape. Out: two checks, with the largest difference. The model computes in fp32 on the CPU with random
weights: the recipe's own shape where it is small, else a small one of the same family.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from headway.data.batch import StepBatch
from headway.data.config import DataConfig
from headway.data.groups import GroupSource
from headway.data.loader import Loader
from headway.data.mixture import MixtureSource
from headway.data.selection import Selection
from headway.diagnose.check import Check
from headway.errors import HeadwayError
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.optim.adamw import Config as AdamWConfig
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.parallel.flat.engine import FlatEngine
from headway.store.source import Flags, Ids, Longs, SourceView, TokenSource
from headway.tasks.base import StepInfo
from headway.tasks.next_token import Config as NextTokenConfig

SMALL_PARAMETERS = 20_000_000
ROWS = 8
MOST_SEQ_LEN = 256
TOLERANCE = 1e-4
"""Largest relative difference: fp32 sums in another order differ by about 1e-6."""


def small_model(model: ModelConfig, seq_len: int) -> tuple[ModelConfig, str]:
    """A model of the same family that computes in a second, and what it is in words."""
    plain = {"dropout": 0.0, "head_gates": None}
    size = sum(prod(spec.shape) for spec in param_specs(model.with_(**plain)))
    if size <= SMALL_PARAMETERS and model.max_seq_len >= seq_len:
        return model.with_(**plain), "the recipe's model"
    if (
        model.hf_config is not None
    ):  # only its config.json could make a class of transformers smaller
        return ModelConfig(
            vocab_size=model.vocab, max_seq_len=max(seq_len, 2)
        ), "a small random llama"
    layers, heads = min(2, model.num_layers), 4
    kv_heads = 1 << max(
        0, (heads * model.kv_heads // model.num_heads).bit_length() - 1
    )  # the same share, as a power of two
    shape = {
        "preset": None, "hidden_size": 64, "num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 16,
        "ffn_size": 128, "max_seq_len": max(seq_len, 2), "no_rope_layers": tuple(i for i in model.no_rope_layers if i < layers),
        "window_layers": None if model.window_layers is None else tuple(i for i in model.window_layers if i < layers),
    }  # fmt: skip
    if model.experts is not None:
        first = min(model.experts.first_dense, layers - 1)
        every, shared = (
            min(model.experts.every, layers - first),
            min(model.experts.shared_ffn_size, 32),
        )
        shape["experts"] = {
            **model.experts.model_dump(),
            "ffn_size": 32,
            "shared_ffn_size": shared,
            "first_dense": first,
            "every": every,
        }
    if model.latent_attention is not None:
        sizes = {"kv_rank": 32, "nope_head_dim": 16, "rope_head_dim": 8, "value_head_dim": 16}
        q_rank = None if model.latent_attention.q_rank is None else 24
        shape |= {
            "num_kv_heads": None,
            "head_dim": None,
            "latent_attention": {**sizes, "q_rank": q_rank},
        }
    return model.with_(**plain, **shape), f"a small random {model.family}"


def make_engine(model: ModelConfig, seed: int) -> FlatEngine:
    """An engine of one process with random weights."""
    spec = EngineSpec(
        model, NextTokenConfig(), AdamWConfig(), chunk_tokens=1024, seed=seed, attention="auto"
    )
    engine = assemble(spec)
    assert isinstance(engine, FlatEngine)
    engine.fill((name, initial_value(spec, model, seed)) for name, spec in engine.specs.items())
    return engine


def equality_checks(
    config: DataConfig, sources: tuple[MixtureSource, ...], model: ModelConfig, seed: int
) -> list[Check]:
    """Both checks; a part of the data that gives no rows is said so."""
    seq_len = min(config.seq_len, MOST_SEQ_LEN)
    config = config.model_copy(
        update={"seq_len": seq_len, "workers": 0, "skip_batches": "", "pin_memory": False}
    )
    small, which = small_model(model, seq_len)
    plain = tuple(_without_groups(one) for one in sources)
    try:
        return [
            packing_check(config, plain, small, which, seed),
            accumulation_check(config, plain, small, which, seed),
        ]
    except HeadwayError as error:
        return [
            Check(
                "packing and accumulation",
                "warn",
                f"could not be tried on this data: {error}",
                "Correct the data first.",
            )
        ]


def _without_groups(one: MixtureSource) -> MixtureSource:
    """The documents of groups, each by itself: what is compared here does not depend on the objective."""
    source = one.selection.source
    if not isinstance(source, GroupSource) or source.store is None:
        return MixtureSource(replace(one.selection, max_length=None))
    limit = one.selection.limit
    if limit is not None:
        limit *= source.documents_per_group
    return MixtureSource(Selection(source.store, limit))


def packing_check(
    config: DataConfig,
    sources: tuple[MixtureSource, ...],
    model: ModelConfig,
    which: str,
    seed: int,
) -> Check:
    """The loss of documents in packed rows, and of the same documents alone in theirs."""
    title = "packed = unpacked"
    if config.packing == "one_document":
        return Check(
            title,
            "ok",
            "data.packing is one_document: documents of a row see each other, as the recipe asks",
        )
    chosen = tuple(
        MixtureSource(_short_documents(one.selection, config.seq_len)) for one in sources[:1]
    )
    if not chosen[0].selection.num_documents:
        return Check(
            title,
            "ok",
            f"no document is shorter than a row of {config.seq_len} tokens; nothing is packed",
        )
    found = {
        kind: _loss(config.model_copy(update={"packing": kind}), chosen, model, seed)
        for kind in ("best_fit", "pad")
    }
    (packed, targets, rows), (alone, same, single) = found["best_fit"], found["pad"]
    gap = abs(packed - alone) / max(abs(alone), 1e-9)
    detail = f"{single} documents in {rows} rows: loss {packed:.6f}, alone {alone:.6f} (relative difference {gap:.1e}, {which})"
    if targets != same or gap > TOLERANCE:
        counts = "" if targets == same else f"; {targets} and {same} targets"
        remedy = "Documents of a row see each other: report it with `headway --version`; until then use data.packing: pad."
        return Check(title, "fail", detail + counts, remedy)
    return Check(title, "ok", detail)


def _short_documents(selection: Selection, seq_len: int) -> Selection:
    """Up to a few rows of documents of which several fit into one row."""
    documents, lengths = selection.pick(0, min(selection.num_documents, 4096))
    short = (lengths > 1) & (lengths <= max(2, seq_len // 2))
    documents, lengths = documents[short], lengths[short]
    enough = int(np.searchsorted(np.cumsum(lengths), 4 * seq_len)) + 1
    return Selection(_Chosen(selection.source, documents[:enough]))


class _Chosen(SourceView):
    """Some documents of a source, numbered anew."""

    def __init__(self, source: TokenSource, documents: Longs) -> None:
        super().__init__(source, "", hashlib.sha256(documents.tobytes()).hexdigest()[:16])
        self._documents = documents
        self._lengths = np.array(
            [int(source.lengths(number, number + 1)[0]) for number in documents.tolist()], np.int64
        )
        self.num_documents, self.num_tokens = len(documents), int(self._lengths.sum())

    def lengths(self, first: int, last: int) -> Longs:
        return self._lengths[first:last]

    def first_at(self, token: int) -> int:
        return int(np.searchsorted(np.cumsum(self._lengths) - self._lengths, token))

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        return self.source.tokens(int(self._documents[document]), start, stop)

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        return self.source.mask(int(self._documents[document]), start, stop)


def _loss(
    config: DataConfig, sources: Sequence[MixtureSource], model: ModelConfig, seed: int
) -> tuple[float, int, int]:
    """(mean loss, targets, rows) of one pass over the documents."""
    engine = make_engine(model, seed)
    with Loader(
        config, sources=sources, rows_per_step=4, micro_rows=4, seed=seed, epochs=1, shuffle=False
    ) as loader:
        steps = [step for step, _ in loader]
    found = engine.evaluate(
        (batch for step in steps for batch in step.microbatches), StepInfo(0, 1, training=False)
    )
    total, weight = (float(value) for value in found["nll"])
    return total / max(weight, 1.0), round(weight), int(sum(step.totals["rows"] for step in steps))


def accumulation_check(
    config: DataConfig,
    sources: tuple[MixtureSource, ...],
    model: ModelConfig,
    which: str,
    seed: int,
) -> Check:
    """Loss and gradients of one step of ROWS rows: in one microbatch, and in ROWS microbatches of one row."""
    packing = "best_fit" if config.packing == "pad" else config.packing
    results = [
        _gradients(config.model_copy(update={"packing": packing}), sources, model, seed, rows)
        for rows in (ROWS, 1)
    ]
    (whole, grads), (split, others) = results
    gap = abs(whole - split) / max(abs(whole), 1e-9)
    largest, name = max((_relative(grads[name], others[name]), name) for name in grads)
    detail = f"1 x {ROWS} and {ROWS} x 1 rows: loss {whole:.6f} and {split:.6f}, gradients differ by {largest:.1e} at most ({which})"
    if max(gap, largest) > TOLERANCE:
        remedy = f"The largest difference is in {name}: report it with `headway --version`; until then use batch.accumulate: 1."
        return Check("accumulation", "fail", detail, remedy)
    return Check("accumulation", "ok", detail)


def _gradients(
    config: DataConfig,
    sources: Sequence[MixtureSource],
    model: ModelConfig,
    seed: int,
    micro_rows: int,
) -> tuple[float, dict[str, torch.Tensor]]:
    engine = make_engine(model, seed)
    with Loader(
        config, sources=sources, rows_per_step=ROWS, micro_rows=micro_rows, seed=seed
    ) as loader:
        step: StepBatch = next(loader)[0]
    result = engine.forward_backward(step, StepInfo(0, 1))
    return float(result.loss), {
        name: grad.clone() for buffer in engine.buffers for name, grad in buffer.gradients.items()
    }


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors, as a share of the largest element."""
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-12))
