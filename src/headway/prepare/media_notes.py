"""Notes in the cache about work on records that name media files: a store that was built, features
that were computed. With its note the result is found again without parsing the records or looking
at the media files, which may be millions.

A note is named by the records (their files' places and contents) and by the settings. It is valid
as long as the folders of the media files have the times they had: files that are added, removed or
replaced by others change them. A file that is overwritten in place changes only itself, which
`headway data prepare` notices: it looks at every file.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError
from headway.media.sources import folder_time
from headway.runtime.storage import read_sealed, write_sealed
from headway.store.checksums import Checksums

log = logging.getLogger("headway")


@dataclass(frozen=True)
class MediaNote:
    """A note in the cache; there may be none yet."""

    path: Path

    @staticmethod
    def of(
        files: Sequence[Path], settings: str, folder: Path, checksums: Checksums
    ) -> MediaNote | None:
        """The note of some files of records; None where an input is a folder of media, whose
        content only a look at its files can tell."""
        if not all(file.is_file() for file in files):
            return None
        # With their folders: records name media relative to where they lie.
        places = [str(file.absolute()) for file in files]
        contents = list(zip(places, checksums.of_all(files), strict=True))
        key = hashlib.sha256(repr((contents, settings)).encode()).hexdigest()
        return MediaNote(folder / f"known-{key[:32]}")

    def read(self) -> dict[str, Any] | None:
        """What was noted; None if nothing was, or if a folder of media has changed since."""
        try:
            stored = read_sealed(self.path)
        except (OSError, ValueError):
            log.warning("%s: damaged; reading the records again", self.path)
            return None
        if stored is None:
            return None
        noted = json.loads(stored)
        # A folder's time changes when a name in it is added, removed or replaced.
        if any(folder_time(folder) != time for folder, time in noted["folders"].items()):
            return None
        return noted["value"]

    def write(self, value: Mapping[str, Any], folders: Mapping[str, int | None]) -> None:
        """Note a value, which JSON can hold, and the folders of the media files with their times
        from before the files were looked at."""
        content = json.dumps({"value": dict(value), "folders": dict(folders)}).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(self.path, content, durable=False)
        except (OSError, HeadwayError) as problem:
            # A cache may be on a disk that is read-only. What was made is there; only the next
            # start is slower.
            log.debug("%s: not written: %s", self.path, problem)
