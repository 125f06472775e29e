"""Whether gates that train on a recipe's data can learn anything: the gain of a few documents from
far context, with the model the recipe starts from.

    few documents of each source -> gain (eval/far_gain.py) -> one check, for `headway doctor data`
                                                            -> one warning, for `headway sparsify`

Nothing is trained or written. The sample is bounded by tokens and by arithmetic, so that the check
takes a minute at most, also without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.diagnose.check import Check
from headway.eval.far_gain import DocumentGain, score_gains, spread
from headway.eval.far_options import FarReach
from headway.eval.far_report import summarize
from headway.model.layout import num_parameters
from headway.runtime.device import choose_compute

if TYPE_CHECKING:
    from headway.data.mixture import MixtureSource
    from headway.data.open import OpenData
    from headway.infer.load import LoadedModel
    from headway.runtime.device import Compute
    from headway.train.config import Recipe
    from headway.train.resolve import Resolved

log = logging.getLogger("headway")

NAME = "far context"
LOW_GAIN = 0.05
"""Nats per far token. Below it, streaming costs less than the noise of a training step, and gates
settle as they began."""
CANDIDATES = 256
"""Documents of each source whose lengths are looked at."""
MOST_DOCUMENTS = 8
"""Documents of each source that are scored."""
MOST_TOKENS = 1 << 16
BATCH_TOKENS = 4096
WORK_ON_CPU = 5e11
"""Parameters times tokens: some ten seconds for both passes."""
WORK_ON_GPU = 5e13
REMEDY = (
    "Mix in documents that need their past: `headway data long-range` selects them "
    "(docs/long-data.md)."
)


@dataclass(frozen=True)
class SourceGain:
    """What was measured of one source."""

    name: str
    share: float
    """Of the mixture's tokens."""
    gains: list[DocumentGain]

    @property
    def gain(self) -> float:
        """Nats per far token; 0 without far tokens: such documents teach gates nothing."""
        return summarize(self.gains).gain or 0.0


def far_check(resolved: Resolved, data: OpenData) -> Check | None:
    """The check of a recipe; None where no head gates train, or there is no model to ask yet."""
    recipe = resolved.recipe
    trains_gates = recipe.objective.needs.gates is not None
    if not trains_gates or resolved.weights is None or resolved.media is not None:
        return None
    # The recipe starts from other weights than those on disk.
    if recipe.init.upcycle is not None:
        return None

    # Window and sinks of the recipe are in the model's config by now.
    gates = resolved.model.head_gates
    assert gates is not None
    reach = FarReach(gates.window, gates.sinks, recipe.data.seq_len)
    if reach.window + reach.sinks + 1 >= reach.length:
        detail = (
            f"rows of data.seq_len={reach.length} tokens end inside window {reach.window} + sinks "
            f"{reach.sinks}: a streaming head loses nothing in them"
        )
        return Check(
            NAME, "warn", detail, "Raise data.seq_len, or lower objective.window and sinks."
        )

    compute = choose_compute(recipe.device, recipe.precision)
    most_tokens = _most_tokens(resolved, compute)
    if most_tokens < 2 * reach.length:
        detail = (
            f"not measured: two rows of {num_parameters(resolved.model):,} parameters would take "
            f"long on {compute.device}"
        )
        return Check(NAME, "ok", detail)

    loaded = _load(resolved, compute)
    tokens_each = most_tokens // len(data.train)
    shares = _shares(data.train)
    measured = [
        SourceGain(member.selection.source.name, share, _sample(loaded, member, reach, tokens_each))
        for member, share in zip(data.train, shares, strict=True)
    ]
    return judge(measured, reach)


def judge(measured: Sequence[SourceGain], reach: FarReach) -> Check:
    """One line about all sources; the gain of each counts by its share of the mixture."""
    gain = sum(source.share * source.gain for source in measured)
    summary = summarize([gain for source in measured for gain in source.gains])
    detail = (
        f"gain {gain:.3f} nats per far token (window {reach.window}, sinks {reach.sinks}; "
        f"{summary.far_tokens} far tokens of {summary.documents} documents)"
    )
    if len(measured) > 1:
        detail += ": " + ", ".join(f"{source.name} {source.gain:.3f}" for source in measured)
    if gain >= LOW_GAIN:
        return Check(NAME, "ok", detail)
    detail += f"; below {LOW_GAIN:g}, gates learn little about which heads need the past"
    return Check(NAME, "warn", detail, REMEDY)


def warn_without_far_gain(recipe: Recipe) -> None:
    """Log a warning before a new run trains gates on text from which they can learn little."""
    from headway.train.batches import open_run_data
    from headway.train.resolve import resolve

    # A run that continues was warned at its beginning, and its gates have moved.
    if recipe.stages or recipe.run.folder.exists():
        return
    resolved = resolve(recipe)
    if resolved.weights is None:
        return
    compute = choose_compute(recipe.device, recipe.precision)
    check = far_check(resolved, open_run_data(resolved, compute.device))
    if check is not None and check.state == "warn":
        log.warning("%s: %s. %s", check.name, check.detail, check.remedy)
    elif check is not None:
        log.info("%s: %s", check.name, check.detail)


def _most_tokens(resolved: Resolved, compute: Compute) -> int:
    work = WORK_ON_GPU
    if compute.device.type == "cpu":
        work = WORK_ON_CPU
    return min(MOST_TOKENS, int(work / num_parameters(resolved.model)))


def _load(resolved: Resolved, compute: Compute) -> LoadedModel:
    """The weights that the run starts from, in the model of the recipe."""
    from headway.infer.load import LoadedModel
    from headway.model.base import build_frozen_model

    assert resolved.weights is not None
    model = build_frozen_model(
        resolved.model, resolved.weights.weights(), compute.device, compute.dtype
    )
    return LoadedModel(model, model.config, resolved.tokenizer, resolved.weights.path)


def _shares(members: Sequence[MixtureSource]) -> list[float]:
    """The share of each source of the tokens that training reads."""
    sizes: list[float] = []
    for member in members:
        if member.weight is not None:
            sizes.append(member.weight)
        else:
            sizes.append(member.selection.num_tokens * member.repeat)
    return [size / sum(sizes) for size in sizes]


def _sample(
    loaded: LoadedModel, member: MixtureSource, reach: FarReach, most_tokens: int
) -> list[DocumentGain]:
    """The gains of some documents with far tokens, evenly spread over the source."""
    selection = member.selection
    candidates: list[int] = []
    for number in spread(selection.num_documents, CANDIDATES):
        picked, lengths = selection.pick(number, number + 1)
        far = lengths > reach.window + reach.sinks + 1
        candidates += picked[far].tolist()
    most = max(1, min(MOST_DOCUMENTS, most_tokens // reach.length))
    documents = [candidates[index] for index in spread(len(candidates), most)]
    batches = score_gains(loaded, selection.source, documents, reach, batch_tokens=BATCH_TOKENS)
    return [gain for _, batch in batches for gain in batch]
