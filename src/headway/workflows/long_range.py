"""`headway data long-range`: a source of documents and a model come in; a folder with the gain that
the model has from far context in each document goes out, and a store of the chosen documents.

    OUT/journal.jsonl   the gains of finished batches, written as they finish
    OUT/scores.jsonl    one line per document, in the order of the source
    OUT/results.json    settings and summary; report.md and gains.png show them
    OUT/selected/       a token store of the documents with the highest gains

A command that was stopped continues behind its last finished batch. Batches follow from the
documents and the settings alone, so the scores are the same bit for bit.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.regular_file import regular_only
from headway.data.config import DataConfig, SourceConfig
from headway.errors import ConfigError
from headway.eval.far_options import FarOptions, FarReach
from headway.runtime.json_file import load_json
from headway.runtime.progress import progress
from headway.runtime.storage import write_atomic, writing
from headway.workflows.long_range_options import LongRangePlan

if TYPE_CHECKING:
    from headway.eval.far_gain import DocumentGain
    from headway.infer.load import LoadedModel
    from headway.store.source import TokenSource

log = logging.getLogger("headway")

JOURNAL = "journal.jsonl"
SCORES = "scores.jsonl"
SELECTED = "selected"
SETTINGS = "settings.json"


@dataclass(frozen=True)
class LongRangeScores:
    """The gains of a source, and the chosen documents."""

    out: Path
    source: str
    model: str
    reach: FarReach
    gains: list[DocumentGain]
    selected: list[int] | None
    """Numbers of the documents in OUT/selected; None: no store was asked for."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        from headway.eval.far_report import summarize

        selection = None
        if self.selected is not None:
            chosen = set(self.selected)
            gains = [gain for gain in self.gains if gain.document in chosen]
            selection = {
                "path": str(self.out / SELECTED),
                "documents": len(gains),
                "tokens": sum(gain.tokens for gain in gains),
                "gain": summarize(gains).gain,
            }
        return {
            "out": str(self.out),
            "source": self.source,
            "model": self.model,
            **asdict(self.reach),
            "scores": str(self.out / SCORES),
            "summary": asdict(summarize(self.gains)),
            "selected": selection,
        }


def long_range(path: str, loaded: LoadedModel, plan: LongRangePlan, out: Path) -> LongRangeScores:
    """Score the documents of a source that no earlier call has scored, and write the folder."""
    from headway.eval.far_gain import check_far_model, no_gain, score_gains, spread
    from headway.eval.far_report import write_far_report

    check_far_model(loaded)
    reach = plan.far.reach(loaded.config)
    if plan.selection.is_wanted and (out / SELECTED / "store.json").exists():
        raise ConfigError(
            f"{out / SELECTED}: already holds a store. Remove it, or give another --out."
        )
    source = open_far_source(plan.reading.source(path), loaded)
    documents = spread(source.num_documents, plan.far.sample)
    journal = GainJournal(out, _settings(source, loaded, plan.far, reach))
    gains = {gain.document: gain for batch in journal.batches.values() for gain in batch}
    if gains:
        log.info("%s: %d documents are scored already", out, len(gains))

    todo = score_gains(
        loaded,
        source,
        documents,
        reach,
        batch_tokens=plan.far.batch_tokens,
        done=journal.batches.keys(),
    )
    with progress("score far context", total=len(documents), unit="documents") as advance:
        advance(len(gains))
        for index, batch in todo:
            journal.add(index, batch)
            gains.update((gain.document, gain) for gain in batch)
            advance(len(batch))
    # What was read is vouched for by now, and by the checksums of what is written below.
    source.require_checked()

    in_order = [gains.get(document) or no_gain(source, document) for document in documents]
    lines = [json.dumps({**asdict(gain), "gain": gain.gain}) for gain in in_order]
    write_atomic(out / SCORES, "".join(f"{line}\n" for line in lines))

    selected = None
    if plan.selection.is_wanted:
        selected = plan.selection.choose(in_order)
        if not selected:
            raise ConfigError(
                f"no document of {path} is chosen: none has far tokens and the gain that "
                f"--min-gain asks for. {out / SCORES} has the gains; lower --min-gain or --window."
            )
        write_selection(source, selected, out / SELECTED)

    scores = LongRangeScores(out, path, str(loaded.path), reach, in_order, selected)
    write_far_report(out, scores.to_json(), in_order)
    return scores


def open_far_source(settings: SourceConfig, loaded: LoadedModel) -> TokenSource:
    """The documents of a source with the model's tokenizer, which training would read, too."""
    from headway.checkpoint.stored_model import find_model
    from headway.data.groups import DocumentReader
    from headway.eval.far_gain import check_far_source
    from headway.prepare.sources import prepare_source
    from headway.store.open import open_source

    folder = find_model(loaded.path).tokenizer_folder
    store = prepare_source(settings, DataConfig(), folder)
    source = DocumentReader().read(open_source(store.path))
    check_far_source(source, loaded)
    return source


def write_selection(source: TokenSource, documents: Sequence[int], folder: Path) -> None:
    """A store of some documents, with their loss masks and types."""
    from headway.store.reader import Store, dtype_for
    from headway.store.writer import StoreWriter

    origin: Sequence[str] = [source.name]
    # A store's `sources` also say what its documents are.
    if isinstance(source, Store):
        origin = source.manifest.sources
    with StoreWriter(
        folder,
        dtype=dtype_for(source.max_id + 1),
        tokenizer_fingerprint=source.fingerprint,
        masked=source.masked,
        typed=any(source.count_types()),
        sources=origin,
    ) as writer:
        for document in documents:
            length = int(source.lengths(document, document + 1)[0])
            writer.add(
                source.tokens(document, 0, length),
                source.mask(document, 0, length),
                type_name=source.type_of(document),
            )
        writer.finish()


def _settings(
    source: TokenSource, loaded: LoadedModel, far: FarOptions, reach: FarReach
) -> dict[str, Any]:
    """What decides the scores."""
    from headway.infer.content import content_of

    return {
        "source": source.content_key,
        "documents": source.num_documents,
        **asdict(reach),
        "sample": far.sample,
        "batch_tokens": far.batch_tokens,
        "device": str(loaded.device),
        "precision": str(loaded.model.head_weight.dtype).removeprefix("torch."),
        **content_of(loaded),
    }


class GainJournal:
    """The gains of finished batches; whole lines survive a kill."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        """Begins a journal in `out`, or continues one that was begun with the same settings."""
        self.path = out / JOURNAL
        self.batches: dict[int, list[DocumentGain]] = {}
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)

        file = out / SETTINGS
        if file.exists():
            before = load_json(file)
            for key, value in settings.items():
                if before.get(key) != value:
                    raise ConfigError(
                        f"--out is {out}, which was begun with {key} {before.get(key)}; now it is "
                        f"{value}. Give another folder, or the same settings."
                    )
            self._read()
        else:
            self.path.unlink(missing_ok=True)
            write_atomic(file, json.dumps(settings, indent=1) + "\n")

    def add(self, index: int, gains: Sequence[DocumentGain]) -> None:
        """Write one batch to the disk."""
        rows = [
            [gain.document, gain.tokens, gain.far_tokens, gain.loss, gain.window_loss]
            for gain in gains
        ]
        line = json.dumps({"batch": index, "gains": rows})
        with (
            writing(self.path),
            open(self.path, "a", encoding="utf-8", opener=regular_only) as file,
        ):
            file.write(f"{line}\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        """Take the whole lines, and remove one that a kill cut short."""
        from headway.eval.far_gain import DocumentGain

        if not self.path.exists():
            return
        with open(self.path, "rb", opener=regular_only) as file:
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            write_atomic(self.path, whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            self.batches[entry["batch"]] = [DocumentGain(*row) for row in entry["gains"]]
