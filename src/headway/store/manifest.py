"""store.json, the manifest of a token store, written last. In: the file; out: a `StoreManifest`, or a DataError that says what is wrong.

It begins with a checksum of the rest of the file. Stores of earlier versions without it are read, too.
"""

from __future__ import annotations

import hashlib
import json
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
}
KEYS |= {"division", "types"}
ITEM_BYTES = {"uint16": 2, "uint32": 4}


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard: its size and checksum."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoreShard:
    """Some of the documents: a tokens file, an index file, and optionally mask, spans and types files."""

    documents: int
    tokens: int
    spans: int
    files: dict[str, ShardFile]


@dataclass(frozen=True)
class Division:
    """The parts of a tokenization that one of several shards (`--shard I/N`) holds; `data merge` restores the order from it."""

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
        shards = [
            {
                "documents": s.documents,
                "tokens": s.tokens,
                **({"spans": s.spans} if self.spans else {}),
                "files": {
                    name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in s.files.items()
                },
            }
            for s in self.shards
        ]
        head: dict[str, Any] = {
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
            head["types"] = list(self.types)
        tail: dict[str, Any] = {"shards": shards}
        if self.division is not None:
            tail["division"] = {
                "shard": self.division.shard,
                "of": self.division.of,
                "parts": [list(part) for part in self.division.parts],
            }
        rest = json.dumps(head | tail, indent=1, ensure_ascii=False).removeprefix("{") + "\n"
        return CHECKSUM_LINE.format(hashlib.sha256(rest.encode()).hexdigest()) + rest

    @property
    def content(self) -> str:
        """The checksum of the content, independent of its origin."""
        files = [(name, file.sha256) for shard in self.shards for name, file in shard.files.items()]
        return hashlib.sha256(
            repr((self.dtype, self.masked, self.spans, self.tokenizer, files)).encode()
        ).hexdigest()


def file_names(number: int, masked: bool, spans: bool, typed: bool = False) -> list[str]:
    """The files of one shard: tokens, documents, then mask, spans and types if the store has them."""
    names = [f"tokens-{number:05}.bin", f"docs-{number:05}.idx"]
    return (
        names
        + [f"mask-{number:05}.bin"] * masked
        + [f"spans-{number:05}.idx"] * spans
        + [f"types-{number:05}.bin"] * typed
    )


def file_sizes(
    shard: StoreShard, dtype: str, masked: bool, spans: bool, typed: bool = False
) -> list[int]:
    """The sizes the counts of a shard imply, in the order of `file_names`."""
    sizes = [shard.tokens * ITEM_BYTES[dtype], (shard.documents + 1) * 8]
    return (
        sizes
        + [-(-shard.tokens // 8)] * masked
        + [(shard.spans + 1) * 8] * spans
        + [shard.documents * 2] * typed
    )


def read_manifest(folder: Path) -> StoreManifest:
    """Read and check store.json: right kind, version and types, counts that agree with the sizes it lists."""
    path = folder / MANIFEST_NAME
    try:
        content = read_bounded(path)
    except FileNotFoundError:
        raise DataError(_absent(folder)) from None
    except OSError as problem:
        raise DataError(f"{path}: cannot be read: {problem.strerror}.") from None
    try:
        given = json.loads(content)
    except ValueError as problem:
        raise DataError(
            f"{path}: not JSON ({problem}); the store is damaged. Build it again."
        ) from None
    except RecursionError:
        raise DataError(
            f"{path}: nested too deeply; the store is damaged. Build it again."
        ) from None
    if not isinstance(given, dict) or given.get("kind") != "headway-store":
        raise DataError(
            f"{path}: not a token store manifest. Give the folder that `headway data tokenize --out` wrote."
        )
    if given.get("version") != VERSION:
        raise DataError(
            f"{path}: version is {given.get('version')!r}; this headway reads version {VERSION}. Build the store again."
        )
    unknown = sorted(set(map(str, given)) - KEYS)
    rest = content[len(CHECKSUM_LINE.format("0" * 64).encode()) :]
    if unknown or (
        "checksum" in given
        and content != CHECKSUM_LINE.format(hashlib.sha256(rest).hexdigest()).encode() + rest
    ):
        why = f"unknown key {unknown[0]!r}" if unknown else "its checksum does not match"
        raise DataError(f"{path}: damaged ({why}). Copy or build the store again.")
    try:
        manifest = _parse(given, hashlib.sha256(content).hexdigest())
        _check(manifest, given)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise DataError(
            f"{path}: damaged ({type(problem).__name__}: {problem}). Build the store again."
        ) from None
    return manifest


def _absent(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder. Give the folder of a token store, e.g. what `headway data tokenize --out` wrote."
    if (folder / JOURNAL_NAME).exists() or any(folder.glob("tokens-*.bin")):
        return f"{folder}: an unfinished token store (no {MANIFEST_NAME}). Run the command that builds it again; it resumes."
    return f"{folder}: not a token store (no {MANIFEST_NAME}). Give the folder that `headway data tokenize --out` wrote."


def _parse(given: dict[str, Any], key: str) -> StoreManifest:
    if given["dtype"] not in ITEM_BYTES:
        raise ValueError(f"dtype is {given['dtype']!r}")
    tokenizer = given["tokenizer"]
    if tokenizer is not None and not isinstance(tokenizer, str):
        raise ValueError("tokenizer is not a string")
    division = given.get("division")
    return StoreManifest(
        dtype=cast(Dtype, given["dtype"]),
        max_id=_count(given["max_id"], least=-1),
        masked=bool(given["masked"]),
        spans=bool(given["spans"]),
        tokenizer=tokenizer,
        sources=tuple(str(source) for source in given["sources"]),
        shards=tuple(_parse_shard(one) for one in given["shards"]),
        division=None if division is None else _parse_division(division),
        types=None if given.get("types") is None else tuple(str(one) for one in given["types"]),
        key=key,
    )


def _parse_division(given: dict[str, Any]) -> Division:
    parts = tuple(
        (_count(unit), _count(chunk), _count(documents))
        for unit, chunk, documents in given["parts"]
    )
    return Division(_count(given["shard"]), _count(given["of"], least=1), parts)


def _parse_shard(one: dict[str, Any]) -> StoreShard:
    files = {
        str(name): ShardFile(_count(f["bytes"]), str(f["sha256"]))
        for name, f in one["files"].items()
    }
    return StoreShard(
        _count(one["documents"]), _count(one["tokens"]), _count(one.get("spans", 0)), files
    )


def _count(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} is not a count")
    return value


def _check(manifest: StoreManifest, given: dict[str, Any]) -> None:
    if (manifest.documents, manifest.tokens) != (given["documents"], given["tokens"]):
        raise ValueError("the counts of the shards do not add up")
    for number, shard in enumerate(manifest.shards):
        typed = manifest.types is not None
        names = file_names(number, manifest.masked, manifest.spans, typed)
        if list(shard.files) != names:
            raise ValueError(f"shard {number} lists other files than {', '.join(names)}")
        sizes = file_sizes(shard, manifest.dtype, manifest.masked, manifest.spans, typed)
        if [f.bytes for f in shard.files.values()] != sizes:
            raise ValueError(f"the sizes of shard {number} contradict its counts")
