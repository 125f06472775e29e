"""Two equalities that must hold on the user's own data: packed = unpacked loss, and one microbatch
of N rows = N of one row.

In: opened data and a model's shape. Out: two checks, with the largest difference. The model
computes in fp32 on the CPU with random weights: the recipe's own shape where it is small, else a
small one of the same family.
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
"""A model with more is replaced by a small one of its family."""
ROWS = 8
"""Of the step that is computed in one microbatch and in as many as it has rows."""
MOST_SEQ_LEN = 256
PACKED_ROWS = 4
"""Rows of documents, and rows of a microbatch, that are compared packed and alone."""
PROBE_DOCUMENTS = 4096
"""Documents among which short ones are looked for."""
TOLERANCE = 1e-4
"""Largest relative difference: fp32 sums in another order differ by about 1e-6."""


def small_model(model: ModelConfig, seq_len: int) -> tuple[ModelConfig, str]:
    """A model of the same family that computes in a second, and what it is in words."""
    # Random: two forward passes of one row would differ.
    deterministic = {"dropout": 0.0, "head_gates": None}
    size = sum(prod(spec.shape) for spec in param_specs(model.with_(**deterministic)))
    if size <= SMALL_PARAMETERS and model.max_seq_len >= seq_len:
        return model.with_(**deterministic), "the recipe's model"

    # Only its config.json could make a class of transformers smaller.
    if model.hf_config is not None:
        llama = ModelConfig(vocab_size=model.vocab, max_seq_len=max(seq_len, 2))
        return llama, "a small random llama"

    layers = min(2, model.num_layers)
    heads = 4
    # The same share of KV heads, as a power of two so that it divides the heads.
    kv_heads = 1 << max(0, (heads * model.kv_heads // model.num_heads).bit_length() - 1)
    window_layers = model.window_layers
    if window_layers is not None:
        window_layers = tuple(layer for layer in window_layers if layer < layers)
    shape = {
        "preset": None,
        "hidden_size": 64,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 16,
        "ffn_size": 128,
        "max_seq_len": max(seq_len, 2),
        "no_rope_layers": tuple(layer for layer in model.no_rope_layers if layer < layers),
        "window_layers": window_layers,
    }

    if model.experts is not None:
        # At least one of the two layers must have experts.
        first = min(model.experts.first_dense, layers - 1)
        every = min(model.experts.every, layers - first)
        shared = min(model.experts.shared_ffn_size, 32)
        shape["experts"] = {
            **model.experts.model_dump(),
            "ffn_size": 32,
            "shared_ffn_size": shared,
            "first_dense": first,
            "every": every,
        }

    if model.latent_attention is not None:
        sizes = {"kv_rank": 32, "nope_head_dim": 16, "rope_head_dim": 8, "value_head_dim": 16}
        q_rank = None
        if model.latent_attention.q_rank is not None:
            q_rank = 24
        # Its sizes of heads replace the usual ones.
        shape |= {
            "num_kv_heads": None,
            "head_dim": None,
            "latent_attention": {**sizes, "q_rank": q_rank},
        }

    if model.linear_attention is not None:
        # Both kinds of layers, where the model has both.
        shape["linear_attention"] = {
            "key_heads": 2,
            "value_heads": 4,
            "key_head_dim": 16,
            "value_head_dim": 16,
            "taps": model.linear_attention.taps,
            "layers": (0,),
        }
        shape["num_layers"] = layers = 2

    if model.short_convolution is not None:
        short = model.short_convolution.model_dump()
        shape["short_convolution"] = {**short, "channels": None, "layers": (0,)}
        shape["num_layers"] = layers = 2

    if model.state_space is not None:
        space = model.state_space.model_dump()
        small = {"heads": 4, "head_dim": 16, "state_size": 8, "groups": 2, "layers": (0,)}
        shape["state_space"] = {**space, **small}
        shape["num_layers"] = layers = 2

    return model.with_(**deterministic, **shape), f"a small random {model.family}"


def make_engine(model: ModelConfig, seed: int) -> FlatEngine:
    """An engine of one process with random weights."""
    spec = EngineSpec(
        model, NextTokenConfig(), AdamWConfig(), chunk_tokens=1024, seed=seed, attention="auto"
    )
    engine = assemble(spec)
    assert isinstance(engine, FlatEngine)
    # Drawn from (seed, name): two engines of one seed have the same weights.
    engine.fill((name, initial_value(param, model, seed)) for name, param in engine.specs.items())
    return engine


def equality_checks(
    config: DataConfig, sources: tuple[MixtureSource, ...], model: ModelConfig, seed: int
) -> list[Check]:
    """Both checks; a part of the data that gives no rows is said so."""
    seq_len = min(config.seq_len, MOST_SEQ_LEN)
    # Small rows, and no processes: the check takes a second or two.
    config = config.model_copy(
        update={"seq_len": seq_len, "workers": 0, "skip_batches": "", "pin_memory": False}
    )
    small, model_words = small_model(model, seq_len)
    documents = tuple(_without_groups(source) for source in sources)
    try:
        return [
            packing_check(config, documents, small, model_words, seed),
            accumulation_check(config, documents, small, model_words, seed),
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


def _without_groups(member: MixtureSource) -> MixtureSource:
    """The documents of groups, each by itself: what is compared here does not depend on the
    objective.
    """
    source = member.selection.source
    if not isinstance(source, GroupSource) or source.store is None:
        return MixtureSource(replace(member.selection, max_length=None))
    limit = member.selection.limit
    if limit is not None:
        limit *= source.documents_per_group
    return MixtureSource(Selection(source.store, limit))


def packing_check(
    config: DataConfig,
    sources: tuple[MixtureSource, ...],
    model: ModelConfig,
    model_words: str,
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

    # One source is enough, and a mixture would repeat or leave out documents.
    short_documents = _short_documents(sources[0].selection, config.seq_len)
    if not short_documents.num_documents:
        return Check(
            title,
            "ok",
            f"no document is shorter than a row of {config.seq_len} tokens; nothing is packed",
        )

    # `pad` has one document in a row, so that its rows are the documents.
    mixture = (MixtureSource(short_documents),)
    packed_config = config.model_copy(update={"packing": "best_fit"})
    alone_config = config.model_copy(update={"packing": "pad"})
    packed, packed_targets, num_rows = _loss(packed_config, mixture, model, seed)
    alone, alone_targets, num_documents = _loss(alone_config, mixture, model, seed)

    gap = abs(packed - alone) / max(abs(alone), 1e-9)
    detail = (
        f"{num_documents} documents in {num_rows} rows: loss {packed:.6f}, alone {alone:.6f} "
        f"(relative difference {gap:.1e}, {model_words})"
    )
    if packed_targets != alone_targets or gap > TOLERANCE:
        counts = ""
        if packed_targets != alone_targets:
            counts = f"; {packed_targets} and {alone_targets} targets"
        remedy = (
            "Documents of a row see each other: report it with `headway --version`; until then "
            "use data.packing: pad."
        )
        return Check(title, "fail", detail + counts, remedy)

    return Check(title, "ok", detail)


def _short_documents(selection: Selection, seq_len: int) -> Selection:
    """Up to a few rows of documents of which several fit into one row."""
    documents, lengths = selection.pick(0, min(selection.num_documents, PROBE_DOCUMENTS))
    # A document of one token has no target.
    is_short = (lengths > 1) & (lengths <= max(2, seq_len // 2))
    documents = documents[is_short]
    lengths = lengths[is_short]
    enough = int(np.searchsorted(np.cumsum(lengths), PACKED_ROWS * seq_len)) + 1
    return Selection(_Chosen(selection.source, documents[:enough]))


class _Chosen(SourceView):
    """Some documents of a source, numbered anew."""

    def __init__(self, source: TokenSource, documents: Longs) -> None:
        super().__init__(source, "", hashlib.sha256(documents.tobytes()).hexdigest()[:16])
        self._documents = documents
        self._lengths = np.array(
            [int(source.lengths(number, number + 1)[0]) for number in documents.tolist()], np.int64
        )
        self.num_documents = len(documents)
        self.num_tokens = int(self._lengths.sum())

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
        config,
        sources=sources,
        rows_per_step=PACKED_ROWS,
        micro_rows=PACKED_ROWS,
        seed=seed,
        epochs=1,
        shuffle=False,
    ) as loader:
        steps = [step for step, _ in loader]

    batches = (batch for step in steps for batch in step.microbatches)
    metrics = engine.evaluate(batches, StepInfo(0, 1, training=False))
    total, weight = (float(value) for value in metrics["nll"])
    num_rows = int(sum(step.totals["rows"] for step in steps))
    return total / max(weight, 1.0), round(weight), num_rows


def accumulation_check(
    config: DataConfig,
    sources: tuple[MixtureSource, ...],
    model: ModelConfig,
    model_words: str,
    seed: int,
) -> Check:
    """Loss and gradients of one step of ROWS rows: in one microbatch, and in ROWS microbatches of
    one row.
    """
    # Packed rows, which such a recipe does not have, test more.
    if config.packing == "pad":
        config = config.model_copy(update={"packing": "best_fit"})
    whole_loss, whole_gradients = _gradients(config, sources, model, seed, ROWS)
    split_loss, split_gradients = _gradients(config, sources, model, seed, 1)

    gap = abs(whole_loss - split_loss) / max(abs(whole_loss), 1e-9)
    largest, name = max(
        (_relative(gradient, split_gradients[name]), name)
        for name, gradient in whole_gradients.items()
    )
    detail = (
        f"1 x {ROWS} and {ROWS} x 1 rows: loss {whole_loss:.6f} and {split_loss:.6f}, gradients "
        f"differ by {largest:.1e} at most ({model_words})"
    )
    if max(gap, largest) > TOLERANCE:
        remedy = (
            f"The largest difference is in {name}: report it with `headway --version`; until then "
            "use batch.accumulate: 1."
        )
        return Check("accumulation", "fail", detail, remedy)

    return Check("accumulation", "ok", detail)


def _gradients(
    config: DataConfig,
    sources: Sequence[MixtureSource],
    model: ModelConfig,
    seed: int,
    micro_rows: int,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by parameter of the first step, in microbatches of `micro_rows` rows."""
    engine = make_engine(model, seed)
    with Loader(
        config, sources=sources, rows_per_step=ROWS, micro_rows=micro_rows, seed=seed
    ) as loader:
        step: StepBatch = next(loader)[0]
    result = engine.forward_backward(step, StepInfo(0, 1))
    gradients: dict[str, torch.Tensor] = {}
    for buffer in engine.buffers:
        for name, gradient in buffer.gradients.items():
            gradients[name] = gradient.clone()
    return float(result.loss), gradients


def _relative(tensor: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors, as a share of the largest element."""
    return float((tensor - other).abs().max() / tensor.abs().max().clamp_min(1e-12))
