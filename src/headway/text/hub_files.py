"""Large files of the hub, fetched so that a later start continues inside them: what has come lies beside its place under a name of its own.

    CACHE/models--ORG--NAME/blobs/ETAG.part     or     FOLDER/.cache/huggingface/download/ETAG.part

The hub's library removes what it has of a file when it is cut off. So the large files are fetched here, by byte ranges, and put where
the library looks for them; it then sees them as fetched, links or records them, and fetches the small ones.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headway.runtime.storage import sha256_file

LARGE_BYTES = 1 << 20
AT_ONCE = 4
_SHA256_LENGTH = 64


@dataclass(frozen=True)
class Wanted:
    """A repository, or a part of it, and where its files go."""

    repo_id: str
    repo_type: str
    revision: str | None
    include: Sequence[str]
    to: Path | None
    cache_dir: Path | None


def fetch_large(wanted: Wanted, info: Any) -> None:
    """Fetch the large files that are not here, of what the hub says there is."""
    from huggingface_hub.utils import filter_repo_objects

    sizes = {one.rfilename: one.size for one in info.siblings or [] if (one.size or 0) >= LARGE_BYTES}
    names = list(filter_repo_objects(sizes, allow_patterns=list(wanted.include) or None))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(_fetch, wanted, name, str(info.sha)) for name in names]:
            done.result()


def _fetch(wanted: Wanted, name: str, commit: str) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(wanted.repo_id, name, repo_type=wanted.repo_type, revision=commit)
    found = get_hf_file_metadata(url)
    if found.etag is None or found.size is None:
        return
    if wanted.to is None:
        place = _blobs(wanted) / found.etag
        part = place.with_name(f"{found.etag}.part")
    else:
        place = wanted.to / name
        part = wanted.to / ".cache" / "huggingface" / "download" / f"{found.etag}.part"
        if len(found.etag) != _SHA256_LENGTH or not place.resolve().is_relative_to(wanted.to.resolve()):
            return  # the library fetches it: it takes only what has the hub's SHA-256 as fetched
    if found.size > constants.MAX_HTTP_DOWNLOAD_SIZE or _is_here(place, found.size):
        return
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another start may be fetching the same file
        if _is_here(place, found.size):
            part.unlink(missing_ok=True)
            return
        _continue(file, url, found)
    if wanted.to is not None and sha256_file(part) != found.etag:
        part.unlink()
        return  # the library fetches it anew and names what is wrong
    place.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, place)


def _is_here(place: Path, size: int) -> bool:
    return place.is_file() and place.stat().st_size == size


def _continue(file: Any, url: str, found: Any) -> None:
    """Append what is missing."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    here = file.seek(0, os.SEEK_END)
    if here > found.size:
        file.truncate(here := 0)
    if here == found.size:
        return
    headers = {key: value for key, value in build_hf_headers().items() if key.lower() != "authorization" or _same_host(url, found.location)}
    http_get(found.location, file, resume_size=here, headers=headers, expected_size=found.size)


def _same_host(one: str, other: str) -> bool:
    """Whether a token may go along: storage behind the hub has addresses that are signed already."""
    return urlsplit(one).netloc == urlsplit(other).netloc


def _blobs(wanted: Wanted) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = wanted.cache_dir or Path(constants.HF_HUB_CACHE)
    return cache / repo_folder_name(repo_id=wanted.repo_id, repo_type=wanted.repo_type) / "blobs"
