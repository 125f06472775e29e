"""Writes a checkpoint: tensors in boxes and JSON scalars go into a folder `step-00000500`, complete
or not at all.

    .tmp-step-00000500/         every rank writes its file, fsync
      manifest.json             rank 0 writes it last, fsync
    -> step-00000500/           one rename makes the checkpoint exist
    -> link `latest`

A snapshot is written in the same way, into `snapshot-00000500`.

A process killed at any point leaves older checkpoints untouched; the next save removes its
leftovers. No pickle.
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
"""A checkpoint that a save of the same step is about to replace has this prefix for a moment."""
LATEST = "latest"
TOKENIZER = "tokenizer"
TOKENIZER_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
HEADER_ALIGN_BYTES = 8
"""The safetensors library pads its headers with spaces to a multiple of this."""


@dataclass(frozen=True)
class Writers:
    """The ranks that write together.

    `gather` gives every rank the JSON values of all ranks, in rank order.
    """

    rank: int = 0
    world: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    def share(self, path: object, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's part, then gather the results of all.

        A failure on one rank is raised on every rank, so none waits forever.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            with writing(path, error=CheckpointError):
                result = work()
        except Exception as problem:
            # Raised below. Raised here, it would leave the other ranks waiting in the gather.
            failure = problem

        message = None
        if failure is not None:
            message = str(failure)
        answers = self.gather({"result": result, "error": message})

        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer["error"] is not None:
                raise CheckpointError(f"rank {rank}: {answer['error']}")
        return [answer["result"] for answer in answers]


ALONE = Writers()


def step_folder(checkpoints: Path, step: int, *, snapshot: bool = False) -> Path:
    """The folder of a step's checkpoint or snapshot."""
    kind = "snapshot" if snapshot else "step"
    return checkpoints / f"{kind}-{step:08}"


def rank_file(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"rank-{rank:05}.safetensors"


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
    """Write one checkpoint, link `latest` to it, and return its folder.

    All ranks call it; `scalars`, `tokenizer` and `run` are rank 0's.

    `needed` names checkpoints that are being uploaded: files of theirs that still have a temporary
    name are not removed.
    """
    final = step_folder(checkpoints, step, snapshot=snapshot)
    temporary = checkpoints / f"{TEMPORARY_PREFIX}{final.name}"
    is_first = writers.rank == 0

    # Scalars that are not JSON fail here, before any rank has written a byte.
    plain_json(scalars)

    def prepare() -> None:
        if is_first:
            _prepare(checkpoints, temporary)

    def write() -> dict[str, Any]:
        # A snapshot is not read back: no checkpoint is ever deleted because of it.
        return _write_rank(temporary, records, writers.rank, read_back=not snapshot, needed=needed)

    def finish() -> None:
        # `parts` is what the second phase gathered.
        if is_first:
            manifest = _manifest(step, writers.world, parts, scalars)
            _finish(temporary, final, replace(manifest, run=run), tokenizer)

    # Three phases, each a barrier: the folder exists before ranks write into it, and every file is
    # on disk before the manifest that lists them.
    try:
        writers.share(final, prepare)
        parts = writers.share(final, write)
        writers.share(final, finish)
    except CheckpointError:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _prepare(checkpoints: Path, temporary: Path) -> None:
    checkpoints.mkdir(parents=True, exist_ok=True)
    # The entry of a new folder is in its parent: without this a crash could lose the whole folder.
    fsync_folder(checkpoints.parent)

    clean(checkpoints)
    temporary.mkdir()


def clean(checkpoints: Path) -> None:
    """Remove leftovers of killed saves and deletions.

    A checkpoint whose replacement never completed gets its name back.
    """
    for path in sorted(checkpoints.iterdir()):
        if path.name.startswith(REPLACED_PREFIX):
            # Killed between the two renames of `_finish`: the old checkpoint is still the good one.
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
    """Remove a rank's file `name` from the temporary folders of earlier saves.

    Without a shared disk a save fails (see `_finish`), and rank 0 cannot clean up on other nodes:
    only the rank itself can remove its file there.
    """
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
    """Write this rank's safetensors file; returns its part of the manifest as JSON values.

    Each box is hashed while it is written; at most one is copied to the host at a time.
    """
    path = folder / rank_file(rank)
    _remove_unshared(folder.parent, path.name, needed)
    folder.mkdir(parents=True, exist_ok=True)  # exists already on a shared disk

    records = list(records)
    pieces: list[tuple[StateTensor, Ints, torch.Tensor]] = []
    for record in records:
        for offset, tensor in record.boxes:
            # A rank may hold an empty part of a tensor; only a tensor that is empty as a whole is
            # stored as an empty box.
            if tensor.numel() or 0 in record.shape:
                pieces.append((record, tuple(offset), tensor))

    # Large elements first, so that every box begins at a multiple of its element size.
    pieces.sort(key=lambda piece: -piece[2].element_size())

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
            # Hashing and writing release the GIL, so they overlap.
            hashing = hasher.submit(hashlib.sha256, content)
            file.write(content)
            checksum = hashing.result().hexdigest()
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
            # Otherwise reading back would check the page cache instead of the disk.
            drop_cached(file.fileno())

    if read_back:
        sizes = [tensor.nbytes for _, _, tensor in pieces]
        checksums = [box.sha256 for box in boxes]
        _read_back(path, header, list(zip(sizes, checksums, strict=True)))

    stored = StoredFile(path.name, size, sha256_header=hashlib.sha256(header).hexdigest())
    shapes = {tensor_key(record.role, record.name): list(record.shape) for record in records}
    return {"file": asdict(stored), "shapes": shapes, "boxes": [asdict(box) for box in boxes]}


def _read_back(path: Path, header: bytes, pieces: Sequence[tuple[int, str]]) -> None:
    """Read the file back and compare, before an older checkpoint may be deleted.

    `pieces` has the bytes and the SHA-256 of each box, in file order.
    """
    with writing(path, error=CheckpointError), open(path, "rb") as file:
        same = file.read(len(header)) == header
        for size, checksum in pieces:
            digest = hashlib.sha256()
            bytes_left = size
            while bytes_left and (chunk := file.read(min(bytes_left, CHUNK_BYTES))):
                digest.update(chunk)
                bytes_left -= len(chunk)
            same = same and digest.hexdigest() == checksum
    if not same:
        raise CheckpointError(
            f"{path}: the disk returns other bytes than were written. "
            "Check the disk, or use another one."
        )


def _header(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """A safetensors header: its length in 8 bytes, then JSON, padded to align the data."""
    entries: dict[str, Any] = {}
    offset = 0
    for key, tensor in tensors:
        if key in entries:
            raise ValueError(f"box {key} is given twice")
        entries[key] = {
            "dtype": SAFETENSORS_DTYPES[dtype_name(tensor)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def _manifest(
    step: int, world: int, parts: Sequence[Any], scalars: Mapping[str, Json]
) -> CheckpointManifest:
    """Join what `_write_rank` returned on each rank, in rank order."""
    shapes: dict[str, Ints] = {}
    boxes: list[StoredBox] = []
    for part in parts:
        for key, shape in part["shapes"].items():
            if shapes.setdefault(key, tuple(shape)) != tuple(shape):
                raise ValueError(
                    f"ranks disagree on the shape of {key}: {shapes[key]} and {tuple(shape)}"
                )
        boxes.extend(StoredBox.from_json(box) for box in part["boxes"])

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
    """Rank 0's last phase: tokenizer, manifest, rename, link.

    Raises if a rank's file is missing here, because its node wrote to another disk.
    """
    for file in manifest.files:
        # Each rank saw its own file; only a disk that all nodes share has them in one folder.
        if not (temporary / file.path).exists():
            raise CheckpointError(
                f"{final}: {file.path} was written elsewhere. Put run.dir on a file system that "
                "all nodes share."
            )

    tokenizer_files = []
    if tokenizer is not None:
        tokenizer_files = _copy_tokenizer(tokenizer, temporary / TOKENIZER)

    complete = replace(manifest, files=(*manifest.files, *tokenizer_files))
    _write_file(temporary / MANIFEST, complete.to_bytes())
    fsync_folder(temporary)

    # A folder cannot be renamed onto a full one. An earlier save of the same step moves aside
    # first; `clean` moves it back if the process is killed before the second rename.
    replaced = final.with_name(REPLACED_PREFIX + final.name)
    if final.exists():
        rename_folder(final, replaced)
    rename_folder(temporary, final)
    link_atomic(final.with_name(LATEST), final.name)

    if replaced.exists():
        remove_folder(replaced)


def _copy_tokenizer(source: Path, target: Path) -> list[StoredFile]:
    """Copy the files of a tokenizer, not weights in the same folder."""
    if source.is_file():
        files = [source]
    else:
        files = [
            path
            for path in sorted(source.iterdir())
            if path.suffix in TOKENIZER_SUFFIXES and path.is_file()
        ]

    target.mkdir()
    stored: list[StoredFile] = []
    for path in files:
        copy = target / path.name
        _write_file(copy, path.read_bytes())
        stored.append(
            StoredFile(f"{TOKENIZER}/{path.name}", path.stat().st_size, sha256_file(copy))
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
    """A tensor's elements in row-major order as bytes.

    Copies only if the tensor is not contiguous on the host.
    """
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
