"""Writes a checkpoint: tensors in boxes and JSON scalars go into a folder `step-00000500`, complete or not at all.

    .tmp-step-00000500/  each rank writes its file, fsync -> manifest.json last, fsync -> rename to step-00000500 -> link `latest`

A process killed at any point leaves older checkpoints untouched; the next save removes its leftovers. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.manifest import (
    MANIFEST,
    SAFETENSORS_DTYPES,
    CheckpointManifest,
    Json,
    StoredBox,
    StoredFile,
    box_key,
    plain_json,
    tensor_key,
)
from headway.errors import CheckpointError
from headway.parallel.box import Ints, StateTensor
from headway.runtime.storage import (
    CHUNK_BYTES,
    drop_cached,
    fsync_file,
    fsync_folder,
    link_atomic,
    remove_folder,
    remove_tree,
    rename_folder,
    require_space,
    sha256_file,
    writing,
)
from headway.runtime.temporary import TEMPORARY_PREFIX

if TYPE_CHECKING:
    import torch

STEP_FOLDER = re.compile(r"(step|snapshot)-(\d{8,})")
REPLACED_PREFIX = ".replaced-"
LATEST = "latest"
TOKENIZER = "tokenizer"
TOKENIZER_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")


@dataclass(frozen=True)
class Writers:
    """The ranks that write together: this rank, their number, and a gather that gives every rank the JSON values of all, in rank order."""

    rank: int = 0
    world: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    def share(self, path: object, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's part, then gather the results of all. A failure on one rank is raised on every rank, so none waits forever."""
        failure: Exception | None = None
        result: Any = None
        try:
            with writing(path, error=CheckpointError):
                result = work()
        except Exception as problem:  # raised below, after the other ranks know
            failure = problem
        answers = self.gather(
            {"result": result, "error": None if failure is None else str(failure)}
        )
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer["error"] is not None:
                raise CheckpointError(f"rank {rank}: {answer['error']}")
        return [answer["result"] for answer in answers]


ALONE = Writers()


def step_folder(checkpoints: Path, step: int, *, snapshot: bool = False) -> Path:
    """The folder of a step's checkpoint or snapshot."""
    return checkpoints / f"{'snapshot' if snapshot else 'step'}-{step:08}"


def save_checkpoint(
    checkpoints: Path,
    step: int,
    records: Iterable[StateTensor],
    scalars: Mapping[str, Json],
    tokenizer: Path | None = None,
    writers: Writers = ALONE,
    *,
    snapshot: bool = False,
    run: str = "",
    needed: Collection[str] = (),
) -> Path:
    """Write one checkpoint, link `latest` to it, and return its folder. All ranks call it; `scalars`, `tokenizer` and `run` are rank 0's.

    `needed` names checkpoints that are being uploaded: a rank without a shared disk keeps its files of them.
    """
    final = step_folder(checkpoints, step, snapshot=snapshot)
    temporary = checkpoints / f"{TEMPORARY_PREFIX}{final.name}"
    plain_json(scalars)

    is_first = writers.rank == 0
    try:
        writers.share(final, lambda: _prepare(checkpoints, temporary) if is_first else None)
        parts = writers.share(
            final,
            lambda: _write_rank(
                temporary, records, writers.rank, read_back=not snapshot, needed=needed
            ),
        )
        writers.share(
            final,
            lambda: (
                _finish(
                    temporary,
                    final,
                    replace(_manifest(step, writers.world, parts, scalars), run=run),
                    tokenizer,
                )
                if is_first
                else None
            ),
        )
    except CheckpointError:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _prepare(checkpoints: Path, temporary: Path) -> None:
    checkpoints.mkdir(parents=True, exist_ok=True)
    fsync_folder(checkpoints.parent)
    clean(checkpoints)
    temporary.mkdir()


def clean(checkpoints: Path) -> None:
    """Remove leftovers of killed saves and deletions. A checkpoint whose replacement never completed gets its name back."""
    for path in sorted(checkpoints.iterdir()):
        if path.name.startswith(REPLACED_PREFIX):
            original = path.with_name(path.name.removeprefix(REPLACED_PREFIX))
            if original.exists():
                remove_folder(path)
            else:
                rename_folder(path, original)
        elif path.name.startswith(TEMPORARY_PREFIX):
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)


def _remove_unshared(checkpoints: Path, name: str, needed: Collection[str]) -> None:
    """Without a shared disk a rank's files keep their temporary names; only the rank itself can remove those of earlier saves."""
    for path in checkpoints.glob(f"{TEMPORARY_PREFIX}*/{name}"):
        if path.parent.name.removeprefix(TEMPORARY_PREFIX) in needed:
            continue
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


def _write_rank(
    folder: Path,
    records: Iterable[StateTensor],
    rank: int,
    *,
    read_back: bool,
    needed: Collection[str] = (),
) -> dict[str, Any]:
    """Write this rank's safetensors file. Each box is hashed while it is written; at most one is copied to the host at a time."""
    path = folder / f"rank-{rank:05}.safetensors"
    _remove_unshared(folder.parent, path.name, needed)
    folder.mkdir(parents=True, exist_ok=True)  # exists already on a shared disk
    records = list(records)
    pieces = [
        (record, tuple(offset), tensor)
        for record in records
        for offset, tensor in record.boxes
        if tensor.numel() or 0 in record.shape
    ]
    pieces.sort(
        key=lambda piece: -piece[2].element_size()
    )  # every box begins at a multiple of its element size
    header = _header(
        [(box_key(record.role, record.name, offset), tensor) for record, offset, tensor in pieces]
    )
    size = len(header) + sum(tensor.nbytes for _, _, tensor in pieces)
    require_space(folder, size, CheckpointError)
    boxes: list[StoredBox] = []
    with (
        writing(path, size, CheckpointError),
        open(path, "xb") as file,
        ThreadPoolExecutor(1) as hasher,
    ):
        file.write(header)
        for record, offset, tensor in pieces:
            content = tensor_bytes(tensor)
            digest = hasher.submit(hashlib.sha256, content)
            file.write(content)
            checksum = digest.result().hexdigest()
            boxes.append(
                StoredBox(
                    record.name,
                    record.role,
                    offset,
                    tuple(tensor.shape),
                    dtype_name(tensor),
                    path.name,
                    checksum,
                )
            )
        file.flush()
        fsync_file(file.fileno())
        if read_back:
            drop_cached(file.fileno())
    if read_back:
        _read_back(
            path,
            header,
            [
                (tensor.nbytes, box.sha256)
                for (_, _, tensor), box in zip(pieces, boxes, strict=True)
            ],
        )
    stored = StoredFile(path.name, size, sha256_header=hashlib.sha256(header).hexdigest())
    shapes = {tensor_key(record.role, record.name): list(record.shape) for record in records}
    return {"file": asdict(stored), "shapes": shapes, "boxes": [asdict(box) for box in boxes]}


def _read_back(path: Path, header: bytes, pieces: Sequence[tuple[int, str]]) -> None:
    """Read the file back and compare, before an older checkpoint may be deleted."""
    with writing(path, error=CheckpointError), open(path, "rb") as file:
        same = file.read(len(header)) == header
        for size, checksum in pieces:
            digest, left = hashlib.sha256(), size
            while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
            same = same and digest.hexdigest() == checksum
    if not same:
        raise CheckpointError(
            f"{path}: the disk returns other bytes than were written. Check the disk, or use another one."
        )


def _header(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """A safetensors header: its length in 8 bytes, then JSON, padded so that the data is aligned."""
    entries: dict[str, Any] = {}
    at = 0
    for key, tensor in tensors:
        if key in entries:
            raise ValueError(f"box {key} is given twice")
        entries[key] = {
            "dtype": SAFETENSORS_DTYPES[dtype_name(tensor)],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _manifest(
    step: int, world: int, parts: Sequence[Any], scalars: Mapping[str, Json]
) -> CheckpointManifest:
    shapes: dict[str, Ints] = {}
    for part in parts:
        for key, shape in part["shapes"].items():
            if shapes.setdefault(key, tuple(shape)) != tuple(shape):
                raise ValueError(
                    f"ranks disagree on the shape of {key}: {shapes[key]} and {tuple(shape)}"
                )
    boxes = [
        StoredBox(**{**box, "offset": tuple(box["offset"]), "shape": tuple(box["shape"])})
        for part in parts
        for box in part["boxes"]
    ]
    return CheckpointManifest(
        step,
        world,
        tuple(StoredFile(**part["file"]) for part in parts),
        shapes,
        tuple(boxes),
        scalars,
    )


def _finish(
    temporary: Path, final: Path, manifest: CheckpointManifest, tokenizer: Path | None
) -> None:
    for file in manifest.files:
        if not (temporary / file.path).exists():
            raise CheckpointError(
                f"{final}: {file.path} was written elsewhere. Put run.dir on a file system that all nodes share."
            )
    copied = _copy_tokenizer(tokenizer, temporary / TOKENIZER) if tokenizer is not None else []
    whole = replace(manifest, files=(*manifest.files, *copied))
    _write_file(temporary / MANIFEST, whole.to_bytes())
    fsync_folder(temporary)
    replaced = final.with_name(REPLACED_PREFIX + final.name)
    if final.exists():
        rename_folder(final, replaced)
    rename_folder(temporary, final)
    link_atomic(final.with_name(LATEST), final.name)
    if replaced.exists():
        remove_folder(replaced)


def _copy_tokenizer(source: Path, target: Path) -> list[StoredFile]:
    """Copy the files of a tokenizer, not weights in the same folder."""
    files = (
        [source]
        if source.is_file()
        else [
            path
            for path in sorted(source.iterdir())
            if path.suffix in TOKENIZER_SUFFIXES and path.is_file()
        ]
    )
    target.mkdir()
    stored: list[StoredFile] = []
    for path in files:
        _write_file(target / path.name, path.read_bytes())
        stored.append(
            StoredFile(
                f"{TOKENIZER}/{path.name}", path.stat().st_size, sha256_file(target / path.name)
            )
        )
    fsync_folder(target)
    return stored


def _write_file(path: Path, content: bytes) -> None:
    with writing(path, len(content), CheckpointError), open(path, "xb") as file:
        file.write(content)
        file.flush()
        fsync_file(file.fileno())


def dtype_name(tensor: torch.Tensor) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements in row-major order as bytes. Copies only if the tensor is not contiguous on the host."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
