"""manifest.json: the content of a checkpoint.

Every box of every tensor with its checksum, the files, and all non-tensor state as JSON.

    step-00000500/
      rank-00000.safetensors     keys `role:name|offset`: `master:model.embed_tokens.weight|0,0`
      tokenizer/...              the tokenizer the model was trained with
      manifest.json              written last; begins with a checksum of all its bytes that follow

Each byte of a rank's file has one checksum: `sha256_header` covers the header, the `sha256` of each
box covers the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from headway.errors import CheckpointError
from headway.parallel.box import Box, Ints
from headway.runtime.json_file import read_bounded
from headway.runtime.paths import AnyPath

MANIFEST = "manifest.json"
VERSION = 1
SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
CHECKSUM_LINE = '{{\n "checksum": "{}",'
"""The first bytes of the file: the SHA-256 of all bytes after them."""
SHA256_DIGITS = 64
Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None


@dataclass(frozen=True)
class StoredBox:
    """One stored box of a tensor."""

    name: str
    role: str
    offset: Ints
    shape: Ints
    dtype: str
    file: str
    sha256: str

    @classmethod
    def from_json(cls, box: Mapping[str, Any]) -> StoredBox:
        """From its `asdict` after a trip through JSON, which turns tuples into lists."""
        return cls(**{**box, "offset": tuple(box["offset"]), "shape": tuple(box["shape"])})

    @property
    def key(self) -> str:
        """Its key in the safetensors file."""
        return box_key(self.role, self.name, self.offset)

    @property
    def span(self) -> Box:
        return Box(self.offset, self.shape)


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint: `sha256` covers all its bytes, or `sha256_header` its header and
    the boxes the rest.
    """

    path: str
    size: int
    sha256: str | None = None
    sha256_header: str | None = None


@dataclass(frozen=True)
class CheckpointManifest:
    """The parsed manifest."""

    step: int
    world: int
    files: tuple[StoredFile, ...]
    shapes: Mapping[str, Ints]
    """Global shape by `role:name`."""
    boxes: tuple[StoredBox, ...]
    scalars: Mapping[str, Json]
    run: str = ""
    """The id of the run that saved it; empty if unknown."""

    def to_bytes(self) -> bytes:
        """The content of manifest.json, with its checksum."""
        body: dict[str, Any] = {
            "version": VERSION,
            "step": self.step,
            "world": self.world,
        }
        if self.run:
            body["run"] = self.run
        # `read_summary` relies on this order: shapes and boxes come last.
        body["scalars"] = plain_json(self.scalars)
        body["files"] = [
            {key: value for key, value in asdict(file).items() if value is not None}
            for file in self.files
        ]
        body["shapes"] = {name: list(shape) for name, shape in self.shapes.items()}
        body["boxes"] = [asdict(box) for box in self.boxes]

        text = json.dumps(body, indent=1, allow_nan=False).removeprefix("{").encode()
        return _with_checksum(text)


@dataclass(frozen=True)
class ManifestSummary:
    """The part of a manifest before its thousands of boxes."""

    step: int
    run: str
    scalars: Mapping[str, Json]
    files: tuple[StoredFile, ...]


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read and verify a folder's manifest.json. Damage is a CheckpointError that names it."""
    return parse_manifest(folder, _read_content(folder))


def read_summary(folder: Path) -> ManifestSummary:
    """The summary of a folder's manifest.json.

    The checksum is verified; shapes and boxes, most of the file, are not parsed.
    """
    path = folder / MANIFEST
    content = _read_content(folder)
    if content is None or not _matches_checksum(content):
        return _summary(parse_manifest(folder, content))  # raises the right error

    # The bytes from "version" up to "shapes" are an object of their own, once braces are put around
    # them. `indent=1` puts a line break and one space before the keys of the outermost object, and
    # before nothing else.
    try:
        begin = content.index(b'\n "version": ')
        end = content.rindex(b'\n "shapes": ')
        body: Any = json.loads(b"{" + content[begin:end].rstrip().rstrip(b",") + b"}")
        if body["version"] != VERSION:
            return _summary(parse_manifest(folder, content))
        return ManifestSummary(
            body["step"],
            body.get("run", ""),
            body["scalars"],
            tuple(StoredFile(**file) for file in body["files"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise CheckpointError(f"{path}: damaged: {problem}. Use another checkpoint.") from None


def _summary(manifest: CheckpointManifest) -> ManifestSummary:
    return ManifestSummary(manifest.step, manifest.run, manifest.scalars, manifest.files)


def _read_content(folder: Path) -> bytes | None:
    path = folder / MANIFEST
    try:
        if path.exists():
            return read_bounded(path)
        return None
    except OSError as problem:
        raise CheckpointError(
            f"{path}: cannot be read: {problem.strerror}. Use another checkpoint."
        ) from None


def _with_checksum(text: bytes) -> bytes:
    """A JSON object without its opening brace, behind a first entry that holds its SHA-256."""
    return CHECKSUM_LINE.format(hashlib.sha256(text).hexdigest()).encode() + text


def _matches_checksum(content: bytes) -> bool:
    begin = len(CHECKSUM_LINE.format("0" * SHA256_DIGITS))
    return content == _with_checksum(content[begin:])


def parse_manifest(folder: AnyPath, content: bytes | None) -> CheckpointManifest:
    """Verify and parse a manifest.json; None = there is no such file."""
    path = folder / MANIFEST
    if content is None:
        raise CheckpointError(
            f"{path}: no such file, so this checkpoint is not complete. Use another one."
        )
    try:
        if not _matches_checksum(content):
            raise ValueError("its checksum does not match")
        body: Any = json.loads(content)
        if body["version"] != VERSION:
            raise CheckpointError(
                f"{path}: format version {body['version']}; this headway reads {VERSION}. "
                "Use the headway that wrote it."
            )
        return _parse(body)
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise CheckpointError(f"{path}: damaged: {problem}. Use another checkpoint.") from None


def _parse(body: dict[str, Any]) -> CheckpointManifest:
    """Build the manifest, and refuse what would make a reader leave the folder or a tensor."""
    files = [StoredFile(**file) for file in body["files"]]
    for file in files:
        # A checkpoint may come from elsewhere: no path of it may point out of its folder.
        parts = PurePosixPath(file.path).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ValueError(f"file {file.path!r} is outside the checkpoint")
    file_names = {file.path for file in files}

    shapes = {name: tuple(shape) for name, shape in body["shapes"].items()}
    boxes = [StoredBox.from_json(box) for box in body["boxes"]]
    for box in boxes:
        whole = shapes.get(tensor_key(box.role, box.name))
        if whole is None or box.file not in file_names:
            raise ValueError(f"box {box.key!r} matches no tensor or file")
        if not len(whole) == len(box.shape) == len(box.offset):
            raise ValueError(f"box {box.key!r} matches no tensor or file")
        for start, size, limit in zip(box.offset, box.shape, whole, strict=True):
            if start < 0 or size < 0 or start + size > limit:
                raise ValueError(
                    f"box {box.key!r} reaches outside its tensor of shape {list(whole)}"
                )

    return CheckpointManifest(
        body["step"],
        body["world"],
        tuple(files),
        shapes,
        tuple(boxes),
        body["scalars"],
        str(body.get("run", "")),
    )


def tensor_key(role: str, name: str) -> str:
    """`role:name`, the key of a whole tensor."""
    return f"{role}:{name}"


def box_key(role: str, name: str, offset: Iterable[int]) -> str:
    """`role:name|o0,o1`, the key of a box in a rank's file."""
    return f"{role}:{name}|{','.join(map(str, offset))}"


def plain_json(value: Any, path: str = "scalars") -> Any:
    """The value as plain JSON.

    Anything JSON would change or lose (other types, keys that are not strings) is a TypeError.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        wrong_keys = [key for key in value if not isinstance(key, str)]
        if wrong_keys:
            raise TypeError(f"{path} has a key {wrong_keys[0]!r}; keys must be text")
        return {key: plain_json(child, f"{path}.{key}") for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(child, f"{path}.{index}") for index, child in enumerate(value)]
    raise TypeError(f"{path} is a {type(value).__name__}; a checkpoint's scalars must be JSON")
