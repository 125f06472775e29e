"""Checkpoints in S3: a folder that is complete on disk is uploaded, manifest last; retention applies in the store too.

    runs/NAME/checkpoints/step-500/  --ranks, in parts-->  s3://bucket/prefix/NAME/step-500/rank-*.safetensors, tokenizer/...
                                     --then rank 0------>  .../manifest.json: now it is a checkpoint

If a process dies during an upload, the next start continues it: parts that arrived are not sent again.
"""

from __future__ import annotations

import socket
from pathlib import Path

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import Reader, open_checkpoint, step_of
from headway.checkpoint.manifest import MANIFEST, read_manifest
from headway.checkpoint.retention import Entry, RunScope, choose
from headway.checkpoint.save import LATEST, STEP_FOLDER, Writers
from headway.errors import CheckpointError
from headway.runtime.paths import S3Path
from headway.runtime.s3 import S3
from headway.runtime.temporary import TEMPORARY_PREFIX

SET_ASIDE = "set-aside-manifest.json"
PROBE_SECONDS = 15.0


class RemoteCheckpoints:
    """The checkpoints of one run in a bucket."""

    def __init__(self, location: S3Path, config: CheckpointConfig) -> None:
        self.location, self.config = location, config
        self.store = S3(location.endpoint, config.retry_seconds)
        self._readers: dict[str, Reader] = {}

    def probe(self, timeout_seconds: float = PROBE_SECONDS) -> None:
        """Raise if the store cannot be written, before work starts. Leaves nothing behind."""
        store = S3(self.location.endpoint, min(timeout_seconds, self.config.retry_seconds))
        ping = self.location / f".ping-{socket.gethostname()}"
        store.write(ping, b"ping")
        store.remove(self.location, [ping.name])

    def names(self) -> list[str]:
        """Names of the complete checkpoints and snapshots."""
        return [
            name.split("/")[0]
            for name in self.store.sizes(self.location)
            if name.endswith("/" + MANIFEST) and name.count("/") == 1
        ]

    def set_aside_later(self, step: int) -> list[S3Path]:
        """Rename the manifest of every checkpoint after `step`, so that it no longer counts as a checkpoint."""
        later = [
            self.location / name
            for name in self.names()
            if STEP_FOLDER.fullmatch(name) and step_of(self.location / name) > step
        ]
        for folder in later:
            self.store.write(folder / SET_ASIDE, self.store.read(folder / MANIFEST) or b"")
            self.store.remove(folder, [MANIFEST])
        return later

    def publish(self, folder: Path, writers: Writers) -> None:
        """Upload a complete local checkpoint. All ranks call it; each file is sent by a rank that has it on disk."""
        target, is_first = self.location / folder.name, writers.rank == 0
        manifests = writers.share(
            target, lambda: (folder / MANIFEST).read_bytes() if is_first else None
        )
        if is_first:
            self._readers.pop(folder.name, None)
        writers.share(
            target,
            lambda: (
                self.store.remove(target, [MANIFEST])
                if is_first and self.store.size(target / MANIFEST) is not None
                else None
            ),
        )
        writers.share(target, lambda: self._send_local_files(folder, target, writers))

        def finish() -> None:
            sizes = self.store.sizes(target)
            for file in read_manifest(folder).files:
                if sizes.get(file.path) != file.size:
                    raise CheckpointError(
                        f"{target / file.path}: has {sizes.get(file.path)} bytes in the store; {file.size} were written."
                    )
            self.store.write(target / MANIFEST, manifests[0])
            self.store.write(self.location / LATEST, folder.name.encode())

        writers.share(target, lambda: finish() if is_first else None)

    def _send_local_files(self, folder: Path, target: S3Path, writers: Writers) -> None:
        """Rank 0 also sends files that belong to no rank. Without a shared disk, a rank's file still has its temporary name."""
        own = f"rank-{writers.rank:05}.safetensors"
        if writers.rank == 0:
            ranks = {f"rank-{rank:05}.safetensors" for rank in range(1, writers.world)}
            names = [file.path for file in read_manifest(folder).files if file.path not in ranks]
        else:
            names = [own]
        for name in names:
            path = folder / name
            if not path.exists():
                path = folder.with_name(TEMPORARY_PREFIX + folder.name) / name
            if path.exists() or name == own or writers.rank == 0:
                self.store.upload(target / name, path)

    def retain(self, own: RunScope = RunScope()) -> list[str]:
        """Write best-1, best-2, ... as objects that hold a name, delete what is not kept, and return what was deleted."""
        sizes = self.store.sizes(self.location)
        complete = {
            name.split("/")[0]
            for name in sizes
            if name.endswith("/" + MANIFEST) and name.count("/") == 1
        }
        names = [name for name in complete if STEP_FOLDER.fullmatch(name)]
        best, doomed = choose(
            [Entry.of(name, self._reader(name), self.config.metric) for name in names],
            self.config,
            own,
        )
        wanted = {f"best-{number}": name for number, name in enumerate(best, 1)}
        for link, name in wanted.items():
            self.store.write(self.location / link, name.encode())
        self.store.remove(
            self.location,
            [name for name in sizes if name.startswith("best-") and name not in wanted],
        )
        for name in doomed:
            objects = sorted(
                (one for one in sizes if one.startswith(name + "/")),
                key=lambda one: not one.endswith(MANIFEST),
            )
            self.store.remove(
                self.location, objects
            )  # the manifest first, so that no reader opens a half-deleted checkpoint
            self._readers.pop(name, None)
        self.store.abort_uploads(self.location)
        return doomed

    def _reader(self, name: str) -> Reader | None:
        """An open checkpoint, cached: a complete checkpoint does not change."""
        if name not in self._readers:
            try:
                self._readers[name] = open_checkpoint(self.location / name)
            except CheckpointError:
                return None
        return self._readers[name]
