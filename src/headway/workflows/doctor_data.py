"""`headway doctor data`: a recipe comes in; what its data teaches goes out, as checks and as
documents with their loss mask.

Reads and tokenizes what `headway train` would (raw files go into the same cache), trains nothing,
makes no run folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from headway.data.config import DataConfig, SourceConfig
from headway.data.groups import ungrouped
from headway.data.open import OpenData
from headway.diagnose.check import Check
from headway.diagnose.data_checks import DataContext, data_checks
from headway.diagnose.equality import equality_checks
from headway.parallel.collectives import RankGroup
from headway.prepare.detect import format_of, local_path
from headway.prepare.inspect import DocumentPreview, preview_document
from headway.records.base import record_kind
from headway.runtime.device import choose_compute
from headway.text.read import read_documents
from headway.tokenizer.inspect import HARD_TEXTS, measure, texts_in
from headway.tokenizer.load import Tokenizer
from headway.train.batches import open_run_data
from headway.train.config import Recipe
from headway.train.resolve import Resolved, resolve
from headway.train.run_form import run_form
from headway.train.staged_run import check_stages
from headway.train.stages import expand
from headway.workflows.doctor_prompts import SampledSignal, ShownPrompt, check_prompts
from headway.workflows.far_check import far_check

ROUND_TRIP_TEXTS = 2000
"""Texts of each source that are encoded and decoded."""
MOST_CHARACTERS = 1 << 16
"""Of each of these texts, so that one huge document does not take all the time."""
NAMED_LOST = 5
"""Texts that a check names; it counts the others."""


@dataclass(frozen=True)
class SampleOptions:
    """Which documents are shown."""

    documents: int = 3
    max_tokens: int = 400
    wanted: tuple[int, ...] = ()
    """Numbers of documents of the first source; empty: some spread over each source."""


@dataclass(frozen=True)
class SourceSamples:
    """Documents of one source with their loss masks."""

    source: str
    masked: bool
    documents: tuple[DocumentPreview, ...]


@dataclass(frozen=True)
class DataCheckup:
    """What was found in the data of a recipe, or of one of its stages."""

    stage: str | None
    checks: tuple[Check, ...]
    samples: tuple[SourceSamples, ...] = field(default_factory=tuple)
    prompts: tuple[ShownPrompt, ...] = ()
    """Where rows are sampled: prompts with sampled answers instead of documents."""
    signal: SampledSignal | None = None
    """From how many of these prompts a policy could learn."""


def resolve_all(recipe: Recipe) -> list[tuple[str | None, Resolved]]:
    """The recipe as training would see it; one of each stage, on the model that the stage before it
    will leave.
    """
    if not recipe.stages:
        return [(None, resolve(recipe))]
    # As if no stage had been trained, so that those of a run that is half done are checked too.
    stages = check_stages(expand(recipe), [], recipe.run.folder, RankGroup())
    return [(stage.name, resolved) for stage, resolved in stages]


def check_data(recipe: Recipe, options: SampleOptions = SampleOptions()) -> list[DataCheckup]:
    """Check the data of a recipe; stages one by one."""
    return [check_resolved(stage, resolved, options) for stage, resolved in resolve_all(recipe)]


def check_resolved(stage: str | None, resolved: Resolved, options: SampleOptions) -> DataCheckup:
    """Check the data of one resolved recipe."""
    recipe = resolved.recipe
    data = open_resolved(resolved)
    # An aligner learns from whole samples, and the checks below are about tokens.
    if not run_form(resolved.model).has_targets:
        detail = f"opened: {', '.join(data.names)}; aligned samples have no loss mask to check"
        return DataCheckup(stage, (Check("samples", "ok", detail),))

    if recipe.objective.needs.rollouts:
        checkup = check_prompts(resolved, data, options.documents, options.wanted)
        return DataCheckup(stage, checkup.checks, prompts=checkup.prompts, signal=checkup.signal)

    end_ids = frozenset[int]()
    if resolved.weights:
        end_ids = resolved.weights.end_ids
    checks = data_checks(DataContext(recipe.data, data, resolved.tokenizer, end_ids))
    checks += round_trip_checks(recipe.data, resolved.tokenizer)

    # The equality checks run a small model on rows of tokens alone.
    if resolved.media is None and resolved.vision is None:
        checks += equality_checks(recipe.data, data.train, resolved.model, recipe.seed)
    else:
        checks.append(
            Check(
                "packing and accumulation",
                "ok",
                "not tried: these documents hold pictures or sounds",
            )
        )
    far = far_check(resolved, data)
    if far is not None:
        checks.append(far)
    return DataCheckup(stage, tuple(checks), tuple(take_samples(data, resolved.tokenizer, options)))


def open_resolved(resolved: Resolved) -> OpenData:
    """The data that a run would open; raw files are tokenized into the cache."""
    # Frozen encoders of media run on this device.
    compute = choose_compute(resolved.recipe.device, resolved.recipe.precision)
    return open_run_data(resolved, compute.device)


def take_samples(
    data: OpenData, tokenizer: Tokenizer | None, options: SampleOptions
) -> Iterator[SourceSamples]:
    """Documents to show; none without a tokenizer."""
    if tokenizer is None or not options.documents:
        return

    for position, train_source in enumerate(data.train):
        source = train_source.selection.source
        # The stored documents themselves: a group, such as a pair, has no text of its own.
        stored = ungrouped(source)
        if not options.wanted:
            spread = np.linspace(0, stored.num_documents - 1, options.documents)
            # A short source would be asked for a document twice.
            numbers = np.unique(spread.astype(np.int64)).tolist()
        elif position == 0:
            numbers = [number for number in options.wanted if number < stored.num_documents]
        else:
            numbers = []
        documents = tuple(
            preview_document(stored, number, tokenizer, options.max_tokens) for number in numbers
        )
        if documents:
            yield SourceSamples(source.name, source.masked, documents)


def round_trip_checks(config: DataConfig, tokenizer: Tokenizer | None) -> list[Check]:
    """Whether decoding gives back texts byte for byte: known hard ones, and the user's own where
    the data is raw.
    """
    if tokenizer is None:
        return []

    lost_hard: list[str] = []
    measure(tokenizer, ((repr(text), text) for text in HARD_TEXTS), lost_hard)
    detail = f"{len(HARD_TEXTS)} texts that tokenizers are known to lose"
    checks = [_round_trip("hard texts", detail, lost_hard)]

    for source in config.train or ():
        path = local_path(source.path, config.cache_dir)
        # A folder of pictures has no format of files.
        holds_media = source.kind != "auto" and record_kind(source.kind).holds_media
        # A token store has no text that its ids could be compared with.
        is_raw = source.format is None and (holds_media or format_of(path) == "raw")
        if not is_raw:
            continue
        lost: list[str] = []
        measured = measure(tokenizer, islice(_texts(path, source), ROUND_TRIP_TEXTS), lost)
        detail = f"{measured.texts} texts, {measured.bytes_per_token:.2f} bytes per token"
        checks.append(_round_trip(source.path, detail, lost))
    return checks


def _round_trip(name: str, detail: str, lost: list[str]) -> Check:
    """The check of some texts; `lost` names those that decoding did not give back."""
    if not lost:
        return Check(f"round trip of {name}", "ok", f"{detail}; all come back byte for byte")
    named = ", ".join(lost[:NAMED_LOST])
    if len(lost) > NAMED_LOST:
        named += f" and {len(lost) - NAMED_LOST} more"
    return Check(
        f"round trip of {name}",
        "warn",
        f"{detail}; {len(lost)} come back changed: {named}",
        "Such texts come back changed: use a tokenizer without normalisation (byte-level), if they "
        "matter to you.",
    )


def _texts(path: str, source: SourceConfig) -> Iterator[tuple[str, str]]:
    """(place, text) of what the tokenizer will see; of records every text in them."""
    kind = record_kind(source.kind)
    if not kind.is_text:
        for record in kind.read(kind.files([path])):
            for text in texts_in(dict(record.data)):
                yield record.place, text[:MOST_CHARACTERS]
        return
    for document in read_documents(
        [path], text_key=source.text_key, template=source.template, split=source.split
    ):
        yield document.place, document.text[:MOST_CHARACTERS]
