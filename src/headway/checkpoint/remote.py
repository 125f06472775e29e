"""Checkpoints in S3: a folder that is complete on the local disk goes up, manifest last; the store keeps what retention says.

    runs/NAME/checkpoints/step-500/  --ranks, in parts-->  s3://bucket/prefix/NAME/step-500/rank-*.safetensors, tokenizer/...
                                     --then rank 0------>  .../manifest.json: from now on it is a checkpoint

What is under way when a process dies is continued by the next start: parts that are there are not sent again.
"""

from __future__ import annotations

import socket
from pathlib import Path

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import Reader, open_checkpoint, step_of
from headway.checkpoint.manifest import MANIFEST, read_manifest
from headway.checkpoint.retention import Entry, Own, choose
from headway.checkpoint.save import LATEST, STEP_FOLDER, Writers
from headway.errors import CheckpointError
from headway.runtime.places import S3Path
from headway.runtime.s3 import S3
from headway.runtime.temporary import TEMPORARY_PREFIX

SET_ASIDE = "set-aside-manifest.json"
PROBE_SECONDS = 15.0


class Remote:
    """The folder of one run in a store."""

    def __init__(self, place: S3Path, config: CheckpointConfig) -> None:
        self.place, self.config = place, config
        self.store = S3(place.endpoint, config.retry_seconds)
        self._readers: dict[str, Reader] = {}

    def probe(self, patience_seconds: float = PROBE_SECONDS) -> None:
        """Refuse a store that cannot be written, before work starts; leaves nothing behind."""
        store = S3(self.place.endpoint, min(patience_seconds, self.config.retry_seconds))
        ping = self.place / f".ping-{socket.gethostname()}"
        store.write(ping, b"ping")
        store.remove(self.place, [ping.name])

    def names(self) -> list[str]:
        """The complete checkpoints and snapshots there."""
        return [name.split("/")[0] for name in self.store.sizes(self.place) if name.endswith("/" + MANIFEST) and name.count("/") == 1]

    def set_aside_later(self, step: int) -> list[S3Path]:
        """Take the manifest of every checkpoint after `step` out of the way under another name: what is left is no checkpoint any more."""
        later = [self.place / name for name in self.names() if STEP_FOLDER.fullmatch(name) and step_of(self.place / name) > step]
        for folder in later:
            self.store.write(folder / SET_ASIDE, self.store.read(folder / MANIFEST) or b"")
            self.store.remove(folder, [MANIFEST])
        return later

    def publish(self, folder: Path, writers: Writers) -> None:
        """Send a complete local checkpoint. All ranks call it; a file is sent by a rank that has it on its disk."""
        target, is_first = self.place / folder.name, writers.rank == 0
        manifests = writers.share(target, lambda: (folder / MANIFEST).read_bytes() if is_first else None)
        if is_first:
            self._readers.pop(folder.name, None)
        writers.share(
            target, lambda: self.store.remove(target, [MANIFEST]) if is_first and self.store.size(target / MANIFEST) is not None else None
        )
        writers.share(target, lambda: self._send_own(folder, target, writers))

        def finish() -> None:
            sizes = self.store.sizes(target)
            for file in read_manifest(folder).files:
                if sizes.get(file.path) != file.size:
                    raise CheckpointError(f"{target / file.path}: has {sizes.get(file.path)} bytes in the store; {file.size} were written.")
            self.store.write(target / MANIFEST, manifests[0])
            self.store.write(self.place / LATEST, folder.name.encode())

        writers.share(target, lambda: finish() if is_first else None)

    def _send_own(self, folder: Path, target: S3Path, writers: Writers) -> None:
        """Rank 0 also sends what belongs to no rank. On machines with disks of their own a rank's file is still under its first name."""
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

    def retain(self, own: Own = Own()) -> list[str]:
        """Write best-1, best-2, ... as small objects that hold a name, delete what need not stay, return what was deleted."""
        sizes = self.store.sizes(self.place)
        complete = {name.split("/")[0] for name in sizes if name.endswith("/" + MANIFEST) and name.count("/") == 1}
        names = [name for name in complete if STEP_FOLDER.fullmatch(name)]
        best, doomed = choose([Entry.of(name, self._reader(name), self.config.metric) for name in names], self.config, own)
        wanted = {f"best-{number}": name for number, name in enumerate(best, 1)}
        for link, name in wanted.items():
            self.store.write(self.place / link, name.encode())
        self.store.remove(self.place, [name for name in sizes if name.startswith("best-") and name not in wanted])
        for name in doomed:
            objects = sorted((one for one in sizes if one.startswith(name + "/")), key=lambda one: not one.endswith(MANIFEST))
            self.store.remove(self.place, objects)  # the manifest first: nobody opens what is half deleted
            self._readers.pop(name, None)
        self.store.abort_uploads(self.place)
        return doomed

    def _reader(self, name: str) -> Reader | None:
        """What lies there, opened once: a complete checkpoint does not change."""
        if name not in self._readers:
            try:
                self._readers[name] = open_checkpoint(self.place / name)
            except CheckpointError:
                return None
        return self._readers[name]
