"""Checkpoints in S3: a folder that is complete on disk is uploaded, manifest last.

Retention applies in the store too.

    runs/NAME/checkpoints/step-500/   -->   s3://bucket/prefix/NAME/step-500/
      rank-*.safetensors, tokenizer/...       every rank sends its file, in parts
      manifest.json                           rank 0 sends it last: now it is a checkpoint

If a process dies during an upload, the next start continues it: parts that arrived are not sent
again.
"""

from __future__ import annotations

import socket
from pathlib import Path

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import Reader, complete_names, open_checkpoint, step_of
from headway.checkpoint.manifest import MANIFEST, read_manifest
from headway.checkpoint.retention import Entry, RunScope, choose
from headway.checkpoint.save import LATEST, STEP_FOLDER, Writers, rank_file
from headway.errors import CheckpointError
from headway.runtime.paths import S3Path
from headway.runtime.s3 import S3
from headway.runtime.temporary import TEMPORARY_PREFIX

SET_ASIDE = "set-aside-manifest.json"
"""The name of a manifest whose checkpoint no longer counts."""
PROBE_SECONDS = 15.0
"""How long a new run retries before it reports that the store cannot be written."""


class RemoteCheckpoints:
    """The checkpoints of one run in a bucket."""

    def __init__(self, location: S3Path, config: CheckpointConfig) -> None:
        self.location = location
        self.config = config
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
        return complete_names(self.store.sizes(self.location))

    def set_aside_later(self, step: int) -> list[S3Path]:
        """Rename the manifest of every checkpoint after `step`, so that it no longer counts as a
        checkpoint.
        """
        later = [
            self.location / name
            for name in self.names()
            if STEP_FOLDER.fullmatch(name) and step_of(self.location / name) > step
        ]
        for folder in later:
            # A store cannot rename. Between the two calls both objects exist, which is harmless.
            self.store.write(folder / SET_ASIDE, self.store.read(folder / MANIFEST) or b"")
            self.store.remove(folder, [MANIFEST])
        return later

    def publish(self, folder: Path, writers: Writers) -> None:
        """Upload a complete local checkpoint.

        All ranks call it; each file is sent by a rank that has it on disk.
        """
        target = self.location / folder.name
        is_first = writers.rank == 0

        def read() -> bytes | None:
            if is_first:
                return (folder / MANIFEST).read_bytes()
            return None

        def unpublish() -> None:
            # A checkpoint of the same step, replaced: it must not count while its files change.
            if is_first and self.store.size(target / MANIFEST) is not None:
                self.store.remove(target, [MANIFEST])

        def finish() -> None:
            if not is_first:
                return
            sizes = self.store.sizes(target)
            for file in read_manifest(folder).files:
                if sizes.get(file.path) != file.size:
                    raise CheckpointError(
                        f"{target / file.path}: has {sizes.get(file.path)} bytes in the store; "
                        f"{file.size} were written."
                    )
            self.store.write(target / MANIFEST, manifests[0])
            self.store.write(self.location / LATEST, folder.name.encode())

        # Each phase is a barrier. The manifest goes last: with it, the folder is a checkpoint.
        manifests = writers.share(target, read)
        if is_first:
            self._readers.pop(folder.name, None)
        writers.share(target, unpublish)
        writers.share(target, lambda: self._send_local_files(folder, target, writers))
        writers.share(target, finish)

    def _send_local_files(self, folder: Path, target: S3Path, writers: Writers) -> None:
        """Rank 0 also sends files that belong to no rank.

        Without a shared disk, a rank's file still has its temporary name.
        """
        if writers.rank == 0:
            others = {rank_file(rank) for rank in range(1, writers.world)}
            names = [file.path for file in read_manifest(folder).files if file.path not in others]
        else:
            names = [rank_file(writers.rank)]

        for name in names:
            path = folder / name
            if not path.exists():
                path = folder.with_name(TEMPORARY_PREFIX + folder.name) / name
            self.store.upload(target / name, path)

    def retain(self, scope: RunScope = RunScope()) -> list[str]:
        """Write best-1, best-2, ... as objects that hold a name, delete what is not kept, and
        return what was deleted.
        """
        sizes = self.store.sizes(self.location)
        names = [name for name in complete_names(sizes) if STEP_FOLDER.fullmatch(name)]
        entries = [Entry.of(name, self._reader(name), self.config.metric) for name in names]
        best, unneeded = choose(entries, self.config, scope)

        links = {f"best-{number}": name for number, name in enumerate(best, 1)}
        for link, name in links.items():
            self.store.write(self.location / link, name.encode())
        stale_links = [key for key in sizes if key.startswith("best-") and key not in links]
        self.store.remove(self.location, stale_links)

        for name in unneeded:
            objects = [key for key in sizes if key.startswith(name + "/")]
            # The manifest first, so that no reader opens a half-deleted checkpoint.
            objects.sort(key=lambda key: not key.endswith(MANIFEST))
            self.store.remove(self.location, objects)
            self._readers.pop(name, None)

        # Parts of uploads that were given up cost money and appear in no listing.
        self.store.abort_uploads(self.location)
        return unneeded

    def _reader(self, name: str) -> Reader | None:
        """An open checkpoint, cached: a complete checkpoint does not change."""
        if name not in self._readers:
            try:
                self._readers[name] = open_checkpoint(self.location / name)
            except CheckpointError:
                return None
        return self._readers[name]
