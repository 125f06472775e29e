"""store.json, the manifest of a token store, written last. In: the file; out: a `StoreManifest`, or
a DataError that says what is wrong.

It begins with a checksum of the rest of the file. Stores of earlier versions without it are read,
too.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from headway.errors import DataError
from headway.runtime.json_file import read_bounded

MANIFEST_NAME = "store.json"
JOURNAL_NAME = "progress.json"
VERSION = 1
Dtype = Literal["uint16", "uint32"]
CHECKSUM_LINE = '{{\n "checksum": "{}",'
"""The beginning of store.json, of fixed length, so that the rest can be hashed as bytes."""
KEYS = {
    "checksum",
    "kind",
    "version",
    "dtype",
    "documents",
    "tokens",
    "max_id",
    "masked",
    "spans",
    "tokenizer",
    "sources",
    "shards",
    "division",
    "types",
}
ITEM_BYTES = {"uint16": 2, "uint32": 4}
BOUND_BYTES = 8
"""Of a position in an index of documents or spans."""
TYPE_BYTES = 2
"""Of the type of a document."""


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard: its size and checksum."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoreShard:
    """Some of the documents: a tokens file, an index file, and optionally mask, spans and types
    files."""

    documents: int
    tokens: int
    spans: int
    files: dict[str, ShardFile]


@dataclass(frozen=True)
class Division:
    """The parts of a tokenization that one of several shards (`--shard I/N`) holds; `data merge`
    restores the order from it."""

    shard: int
    of: int
    parts: tuple[tuple[int, int, int], ...]
    """(unit, chunk, documents) of each part."""


@dataclass(frozen=True)
class StoreManifest:
    """Everything about a store except its tokens."""

    dtype: Dtype
    max_id: int
    masked: bool
    spans: bool
    tokenizer: str | None
    sources: tuple[str, ...]
    shards: tuple[StoreShard, ...]
    division: Division | None = None
    types: tuple[str, ...] | None = None
    """The names of the document types (folders, domains); None if documents have none."""
    key: str = field(default="", compare=False)

    @property
    def documents(self) -> int:
        """Documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    def dump(self) -> str:
        """The text of store.json; equal stores have equal text."""
        shards: list[dict[str, Any]] = []
        for shard in self.shards:
            counts = {"documents": shard.documents, "tokens": shard.tokens}
            if self.spans:
                counts["spans"] = shard.spans
            files = {
                name: {"bytes": file.bytes, "sha256": file.sha256}
                for name, file in shard.files.items()
            }
            shards.append({**counts, "files": files})

        # The order of keys is part of the format: the checksum is of the text.
        content: dict[str, Any] = {
            "kind": "headway-store",
            "version": VERSION,
            "dtype": self.dtype,
            "documents": self.documents,
            "tokens": self.tokens,
            "max_id": self.max_id,
            "masked": self.masked,
            "spans": self.spans,
            "tokenizer": self.tokenizer,
            "sources": list(self.sources),
        }

        if self.types is not None:
            content["types"] = list(self.types)
        content["shards"] = shards
        if self.division is not None:
            content["division"] = {
                "shard": self.division.shard,
                "of": self.division.of,
                "parts": [list(part) for part in self.division.parts],
            }

        # The checksum covers everything after its own line.
        rest = json.dumps(content, indent=1, ensure_ascii=False).removeprefix("{") + "\n"
        return CHECKSUM_LINE.format(hashlib.sha256(rest.encode()).hexdigest()) + rest

    @property
    def content(self) -> str:
        """The checksum of the content, independent of its origin."""
        # Without `sources`: two builds from differently named files are the same data.
        files = [(name, file.sha256) for shard in self.shards for name, file in shard.files.items()]
        parts = (self.dtype, self.masked, self.spans, self.tokenizer, files)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def file_names(number: int, masked: bool, spans: bool, typed: bool = False) -> list[str]:
    """The files of one shard: tokens, documents, then mask, spans and types if the store has
    them."""
    names = [f"tokens-{number:05}.bin", f"docs-{number:05}.idx"]
    if masked:
        names.append(f"mask-{number:05}.bin")
    if spans:
        names.append(f"spans-{number:05}.idx")
    if typed:
        names.append(f"types-{number:05}.bin")
    return names


def file_sizes(
    shard: StoreShard, dtype: str, masked: bool, spans: bool, typed: bool = False
) -> list[int]:
    """The sizes the counts of a shard imply, in the order of `file_names`."""
    # An index has the bound of each item, and the end of the last one.
    sizes = [shard.tokens * ITEM_BYTES[dtype], (shard.documents + 1) * BOUND_BYTES]
    if masked:
        # One bit for each token; the last byte may have bits to spare.
        sizes.append(math.ceil(shard.tokens / 8))
    if spans:
        sizes.append((shard.spans + 1) * BOUND_BYTES)
    if typed:
        sizes.append(shard.documents * TYPE_BYTES)
    return sizes


def read_manifest(folder: Path) -> StoreManifest:
    """Read and check store.json: right kind, version and types, counts that agree with the sizes it
    lists."""
    path = folder / MANIFEST_NAME
    try:
        content = read_bounded(path)
    except FileNotFoundError:
        raise DataError(_absent(folder)) from None
    except OSError as problem:
        raise DataError(f"{path}: cannot be read: {problem.strerror}.") from None
    try:
        parsed = json.loads(content)
    except ValueError as problem:
        raise DataError(
            f"{path}: not JSON ({problem}); the store is damaged. Build it again."
        ) from None
    except RecursionError:
        raise DataError(
            f"{path}: nested too deeply; the store is damaged. Build it again."
        ) from None
    if not isinstance(parsed, dict) or parsed.get("kind") != "headway-store":
        raise DataError(
            f"{path}: not a token store manifest. Give the folder that `headway data tokenize "
            "--out` wrote."
        )
    if parsed.get("version") != VERSION:
        raise DataError(
            f"{path}: version is {parsed.get('version')!r}; this headway reads version {VERSION}. "
            "Build the store again."
        )

    # An unknown key may be a known one with a flipped bit, which would be ignored without a
    # checksum.
    damage = ""
    unknown = sorted(set(map(str, parsed)) - KEYS)
    if unknown:
        damage = f"unknown key {unknown[0]!r}"
    elif "checksum" in parsed and not _has_its_checksum(content):
        damage = "its checksum does not match"
    if damage:
        raise DataError(f"{path}: damaged ({damage}). Copy or build the store again.")

    try:
        manifest = _parse(parsed, hashlib.sha256(content).hexdigest())
        _check(manifest, parsed)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise DataError(
            f"{path}: damaged ({type(problem).__name__}: {problem}). Build the store again."
        ) from None
    return manifest


def _has_its_checksum(content: bytes) -> bool:
    """Whether the first line of a manifest is the checksum of the rest."""
    line_bytes = len(CHECKSUM_LINE.format("0" * 64).encode())
    rest = content[line_bytes:]
    line = CHECKSUM_LINE.format(hashlib.sha256(rest).hexdigest())
    return content == line.encode() + rest


def _absent(folder: Path) -> str:
    if not folder.exists():
        return (
            f"{folder}: no such folder. Give the folder of a token store, e.g. what `headway data "
            "tokenize --out` wrote."
        )
    if (folder / JOURNAL_NAME).exists() or any(folder.glob("tokens-*.bin")):
        return (
            f"{folder}: an unfinished token store (no {MANIFEST_NAME}). Run the command that "
            "builds it again; it resumes."
        )
    return (
        f"{folder}: not a token store (no {MANIFEST_NAME}). Give the folder that `headway data "
        "tokenize --out` wrote."
    )


def _parse(parsed: dict[str, Any], key: str) -> StoreManifest:
    if parsed["dtype"] not in ITEM_BYTES:
        raise ValueError(f"dtype is {parsed['dtype']!r}")
    tokenizer = parsed["tokenizer"]
    if tokenizer is not None and not isinstance(tokenizer, str):
        raise ValueError("tokenizer is not a string")
    division = None
    if parsed.get("division") is not None:
        division = _parse_division(parsed["division"])
    types = None
    if parsed.get("types") is not None:
        types = tuple(str(name) for name in parsed["types"])
    return StoreManifest(
        dtype=cast(Dtype, parsed["dtype"]),
        max_id=_count(parsed["max_id"], least=-1),
        masked=bool(parsed["masked"]),
        spans=bool(parsed["spans"]),
        tokenizer=tokenizer,
        sources=tuple(str(source) for source in parsed["sources"]),
        shards=tuple(_parse_shard(shard) for shard in parsed["shards"]),
        division=division,
        types=types,
        key=key,
    )


def _parse_division(division: dict[str, Any]) -> Division:
    parts = tuple(
        (_count(unit), _count(chunk), _count(documents))
        for unit, chunk, documents in division["parts"]
    )
    return Division(_count(division["shard"]), _count(division["of"], least=1), parts)


def _parse_shard(shard: dict[str, Any]) -> StoreShard:
    files = {
        str(name): ShardFile(_count(file["bytes"]), str(file["sha256"]))
        for name, file in shard["files"].items()
    }
    return StoreShard(
        _count(shard["documents"]), _count(shard["tokens"]), _count(shard.get("spans", 0)), files
    )


def _count(value: Any, least: int = 0) -> int:
    # In Python a bool is an int, in a manifest it is damage.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} is not a count")
    return value


def _check(manifest: StoreManifest, parsed: dict[str, Any]) -> None:
    """Raise a ValueError for numbers that contradict each other: readers trust them."""
    if (manifest.documents, manifest.tokens) != (parsed["documents"], parsed["tokens"]):
        raise ValueError("the counts of the shards do not add up")
    typed = manifest.types is not None
    for number, shard in enumerate(manifest.shards):
        names = file_names(number, manifest.masked, manifest.spans, typed)
        if list(shard.files) != names:
            raise ValueError(f"shard {number} lists other files than {', '.join(names)}")
        sizes = file_sizes(shard, manifest.dtype, manifest.masked, manifest.spans, typed)
        if [file.bytes for file in shard.files.values()] != sizes:
            raise ValueError(f"the sizes of shard {number} contradict its counts")
