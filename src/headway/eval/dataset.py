"""Datasets to score: `NAME=PATH`, a path or a suite come in; documents of ids come out, in the
order of the files.

A suite's member that is one running text split into records is joined again, so that its lines have
their context. Long texts are encoded in blocks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError, DataError
from headway.eval.options import ReadOptions
from headway.eval.perplexity import EvalDocument

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.store.open import StoreKind
    from headway.text.document import Document
    from headway.tokenizer.load import Tokenizer

IN_MEMORY_TOKENS = 1 << 22
"""A text with more ids is kept in a temporary file."""


@dataclass(frozen=True)
class Dataset:
    """Files to score under one name."""

    name: str
    paths: tuple[str, ...]
    text_key: str = "text"
    join: str | None = None
    """The texts are one document, joined with this."""


@dataclass(frozen=True)
class HubText:
    """A suite's member on the hub."""

    repo_id: str
    folder: str
    text_key: str
    join: str | None
    revision: str | None = None

    def files(self) -> list[Path]:
        """Its test files in the cache; empty if it was not downloaded."""
        from headway.text.hub import in_cache

        snapshot = in_cache(self.repo_id, dataset=True, revision=self.revision)
        if snapshot is None:
            return []
        # Uploaded files have the first form, those that the hub converted to Parquet the second.
        uploaded = snapshot.glob(f"{self.folder}/test-*.parquet")
        converted = snapshot.glob(f"{self.folder}/test/*.parquet")
        return sorted([*uploaded, *converted])

    def command(self) -> str:
        """The command that downloads it."""
        revision = ""
        if self.revision:
            revision = f" --revision {self.revision}"
        return (
            f"headway download {self.repo_id} --dataset{revision} --include '{self.folder}/test*'"
        )


# Records of WikiText and PTB are lines of one running text. They are joined with blank lines, as
# the
# guide on perplexity of transformers does. Records of LAMBADA are passages of their own.
SUITES: Mapping[str, Mapping[str, HubText]] = {
    "default": {
        "wikitext-2": HubText("Salesforce/wikitext", "wikitext-2-raw-v1", "text", "\n\n"),
        "wikitext-103": HubText("Salesforce/wikitext", "wikitext-103-raw-v1", "text", "\n\n"),
        "ptb": HubText(
            "ptb-text-only/ptb_text_only",
            "penn_treebank",
            "sentence",
            "\n\n",
            "refs/convert/parquet",
        ),
        "lambada": HubText("cimec/lambada", "plain_text", "text", None),
    }
}


def parse_datasets(texts: Sequence[str], suite: str | None = None) -> list[Dataset]:
    """The datasets of `--data` and `--suite`; a name that is also a member of the suite gives that
    member's path.
    """
    named: dict[str, list[str]] = {}
    for text in texts:
        name, path = _name_and_path(text)
        if name is None:
            # Two paths with the same last part keep the whole path as name; a name given twice
            # collects its paths.
            name = Path(path).name
            if name in ("", *named):
                name = path
        named.setdefault(name, []).append(path)

    # Members of the suite take their paths out of `named`; the rest are datasets of their own.
    datasets = []
    if suite is not None:
        datasets = _members(suite, named)
    datasets += [Dataset(name, tuple(paths)) for name, paths in named.items()]
    if not datasets:
        raise ConfigError(
            "no data to score is given. Use --data PATH, --data NAME=PATH or --suite default."
        )
    return datasets


def _name_and_path(text: str) -> tuple[str | None, str]:
    name, equals, path = text.partition("=")
    # A path may contain "=", such as Hive's folders `lang=en/part.parquet`.
    if not equals or Path(text).exists() or "/" in name:
        return None, text
    if not name or not path:
        raise ConfigError(f"--data is {text!r}; write NAME=PATH or PATH.")
    return name, path


def _members(suite: str, named: dict[str, list[str]]) -> list[Dataset]:
    if suite not in SUITES:
        raise ConfigError(f"--suite is {suite!r}; the suites are: {', '.join(SUITES)}.")
    datasets: list[Dataset] = []
    missing: list[str] = []
    for name, member in SUITES[suite].items():
        # A path on the command line replaces the files of the hub.
        paths = named.pop(name, None) or [str(file) for file in member.files()]
        if paths:
            datasets.append(Dataset(name, tuple(paths), member.text_key, member.join))
        else:
            missing.append(f"{name} (`{member.command()}`, or --data {name}=PATH)")
    if missing:
        raise DataError(f"suite {suite}: not in the hub's cache: {'; '.join(missing)}.")
    return datasets


def read_eval_documents(
    dataset: Dataset, loaded: LoadedModel, options: ReadOptions = ReadOptions()
) -> Iterator[EvalDocument]:
    """Documents to score: token stores as they are, raw files through the model's tokenizer."""
    return islice(_documents(dataset, loaded, options), options.max_samples)


def read_texts(
    data: Sequence[str], loaded: LoadedModel, bos: bool | None
) -> Callable[[], Iterator[EvalDocument]] | None:
    """A function that reads all documents of `data` from the start each time; None without data."""
    if not data:
        return None
    datasets = parse_datasets(data)

    def read() -> Iterator[EvalDocument]:
        for dataset in datasets:
            yield from read_eval_documents(dataset, loaded, ReadOptions(bos=bos))

    return read


def _documents(
    dataset: Dataset, loaded: LoadedModel, options: ReadOptions
) -> Iterator[EvalDocument]:
    if options.text_key is not None:
        dataset = replace(dataset, text_key=options.text_key)
    # All raw files go through one reader, since they may be joined to one text.
    kinds: dict[str, StoreKind] = {path: data_kind(path) for path in dataset.paths}
    for path, kind in kinds.items():
        if kind != "raw":
            yield from _stored(Path(path), kind, loaded, options)
    raw = [path for path, kind in kinds.items() if kind == "raw"]
    if raw:
        yield from _encoded(raw, dataset, loaded, options)


def data_kind(path: str) -> StoreKind:
    """The format of a path; everything that only the reader of raw files knows (a hub id, a split,
    a file without a suffix) is raw.
    """
    from headway.store.open import detect_kind

    try:
        return detect_kind(path)
    except DataError:
        # A folder without known files is a mistake; its message lists the formats.
        if Path(path).is_dir():
            raise
        return "raw"


def _stored(
    path: Path, kind: StoreKind, loaded: LoadedModel, options: ReadOptions
) -> Iterator[EvalDocument]:
    from headway.store.open import open_source
    from headway.store.source import iter_documents
    from headway.tokenizer.chat import expected_bos_ids

    store = open_source(path, kind)

    # A store has no keys of records; it may have a type of each document.
    by_type = options.by in ("type", "domain") and any(store.count_types())
    if options.by not in (None, "file") and not by_type:
        raise ConfigError(
            f"--by is {options.by!r}; {path} is a token store, whose documents have no keys. Use "
            "--by file or --by type."
        )
    tokenizer = loaded.tokenizer
    if tokenizer is not None and store.fingerprint not in (None, tokenizer.fingerprint):
        raise DataError(
            f"{path}: was made with another tokenizer than the one of {loaded.path}. Give the "
            "text itself, or another store."
        )

    # A store is scored unchanged unless --bos is given; a begin token that is already there is not
    # added twice.
    lead = ()
    if options.bos and tokenizer is not None:
        lead = tuple(expected_bos_ids(tokenizer, True))

    # Packs become documents again: none is scored with another one as its context.
    for item in iter_documents(store, split_packs=True):
        highest = 0
        if len(item.ids):
            highest = int(item.ids.max())
        if highest >= loaded.config.vocab:
            raise DataError(
                f"{path}: holds id {highest}; the model has {loaded.config.vocab} ids. Give data "
                "made with its tokenizer."
            )

        part = None
        if by_type:
            part = item.type
        elif options.by is not None:
            part = str(path)
        ids = item.ids.tolist()
        if lead and ids[:1] == [*lead]:
            ids = ids[1:]
        # Without a length in bytes: nothing says which text the ids were made of.
        yield EvalDocument(ids, None, part, lead)


def _encoded(
    raw: Sequence[str], dataset: Dataset, loaded: LoadedModel, options: ReadOptions
) -> Iterator[EvalDocument]:
    from headway.text.read import read_blocks
    from headway.tokenizer.chat import expected_bos_ids

    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{loaded.path} has no tokenizer, so text cannot be scored. Give a token store as "
            "--data."
        )
    # Before every window, not only the first: a model that needs it fails in the later ones.
    lead = tuple(expected_bos_ids(tokenizer, options.bos))
    split = "line" if options.split == "line" else "file"

    # The record of a document is kept only where a key of it is asked for.
    by_key = options.by not in (None, "file")
    documents = read_blocks(raw, text_key=dataset.text_key, split=split, keep_record=by_key)
    if dataset.join is None:
        for document, blocks in documents:
            part = _part(document, options.by)
            ids, num_bytes = encode_blocks(blocks, tokenizer)
            yield EvalDocument(ids, num_bytes, part, lead)
        return

    if options.by is not None:
        raise ConfigError(
            f"--by is {options.by!r}; {dataset.name} is scored as one text. Leave --by or "
            "--suite out."
        )
    # --max-samples counts records here, since the whole set is one document.
    records = islice(documents, options.max_samples)
    text = dataset.join.join("".join(blocks) for _, blocks in records)
    ids, num_bytes = encode_blocks([text], tokenizer)
    yield EvalDocument(ids, num_bytes, None, lead)


def _part(document: Document, by: str | None) -> str | None:
    """The part of the dataset that a document belongs to."""
    if by is None:
        return None
    if by == "file":
        return document.source

    # meta.source: a key of a key.
    value: Any = document.record
    for key in by.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise DataError(
                f"{document.place}: has no key {by!r}, by which --by splits. Give a key that "
                "every record has, or file."
            )
        value = value[key]
    return str(value)


class FileIds(Sequence[int]):
    """Ids in a file; a slice is read on access."""

    def __init__(self, values: npt.NDArray[np.uint32]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._values[index].tolist()


def encode_blocks(blocks: Iterable[str], tokenizer: Tokenizer) -> tuple[Sequence[int], int]:
    """The ids of a text, and its length in bytes.

    Where the tokenizer can split a text, memory does not grow with it.
    """
    ids: list[int] = []
    num_bytes = 0
    file = None
    for piece in tokenizer.pieces(blocks):
        ids += tokenizer.encode_pieces([piece])[0]
        num_bytes += len(piece.text.encode())
        if len(ids) > IN_MEMORY_TOKENS:
            if file is None:
                file = tempfile.TemporaryFile(prefix="headway-ids-")  # noqa: SIM115 - closed below
            file.write(np.array(ids, np.uint32).data)
            ids = []

    if file is None:
        return ids, num_bytes
    # The mapping keeps the file's content after the file is closed.
    with file:
        file.write(np.array(ids, np.uint32).data)
        file.flush()
        return FileIds(np.memmap(file, np.uint32, "r")), num_bytes
