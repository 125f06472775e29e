"""Models and datasets of the Hugging Face hub: downloaded once into a folder or the shared cache, then found without a network.

The hub library reads HF_ENDPOINT (mirrors), HF_HOME and HF_TOKEN. Every file is checked against the size and checksum the hub states.
If a cache is named (data.cache_dir, --cache-dir), it is searched first and receives downloads; the hub's default cache is searched too.

Large files are downloaded here by byte ranges, because the hub library discards a partial file. A restart continues inside them:

    CACHE/models--ORG--NAME/blobs/ETAG.part     or     FOLDER/.cache/huggingface/download/ETAG.part

A finished file is moved to where the library looks for it. The library then links or records it and downloads the small files.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headway.errors import ConfigError, DataError, first_line
from headway.runtime.storage import sha256_file

LARGE_BYTES = 1 << 20
AT_ONCE = 4


@dataclass(frozen=True)
class HubRequest:
    """A repository or a part of it, and the target folder."""

    repo_id: str
    repo_type: str
    revision: str | None
    include: Sequence[str]
    to: Path | None
    cache_dir: Path | None


def fetch_large(request: HubRequest, info: Any) -> None:
    """Download the missing large files of a repository."""
    from huggingface_hub.utils import filter_repo_objects

    sizes = {one.rfilename: one.size for one in info.siblings or [] if (one.size or 0) >= LARGE_BYTES}
    names = list(filter_repo_objects(sizes, allow_patterns=list(request.include) or None))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(_fetch, request, name, str(info.sha)) for name in names]:
            done.result()


def _fetch(request: HubRequest, name: str, commit: str) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(request.repo_id, name, repo_type=request.repo_type, revision=commit)
    found = get_hf_file_metadata(url)
    if found.etag is None or found.size is None:
        return
    if request.to is None:
        place = _blobs(request) / found.etag
        part = place.with_name(f"{found.etag}.part")
    else:
        place = request.to / name
        part = request.to / ".cache" / "huggingface" / "download" / f"{found.etag}.part"
        if len(found.etag) != _SHA256_LENGTH or not place.resolve().is_relative_to(request.to.resolve()):
            return  # the library downloads it: it accepts only files with a SHA-256 from the hub
    if found.size > constants.MAX_HTTP_DOWNLOAD_SIZE or _is_complete(place, found.size):
        return
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process may download the same file
        if _is_complete(place, found.size):
            part.unlink(missing_ok=True)
            return
        _continue(file, url, found)
    if request.to is not None and sha256_file(part) != found.etag:
        part.unlink()
        return  # the library downloads it again and reports the error
    place.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, place)


def _is_complete(place: Path, size: int) -> bool:
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
    """Whether the token may be sent: addresses of storage behind the hub are signed already."""
    return urlsplit(one).netloc == urlsplit(other).netloc


def _blobs(request: HubRequest) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = request.cache_dir or Path(constants.HF_HUB_CACHE)
    return cache / repo_folder_name(repo_id=request.repo_id, repo_type=request.repo_type) / "blobs"


_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHA256_LENGTH = 64
LOCAL_FOLDERS = {"checkpoints", "data", "datasets", "models", "raw", "runs", "stores"}
FILE_ENDINGS = {
    ".arrow", ".bin", ".bz2", ".csv", ".gguf", ".gz", ".json", ".jsonl", ".md", ".model", ".parquet", ".pt", ".safetensors", ".tsv",
    ".txt", ".xml", ".xz", ".yaml", ".zip", ".zst",
}  # fmt: skip
"""Beginnings and ends of local paths that no hub id has."""


def local_or_hub(path_or_id: Path | str, *, dataset: bool = False, cache_dir: Path | None = None) -> Path:
    """An existing path, else the folder of a hub id: from a cache, or downloaded into it."""
    if Path(path_or_id).exists():
        return Path(path_or_id)
    given = str(path_or_id)
    if not is_hub_id(given):
        form = "" if _ID.fullmatch(given) else ", and not a hub id (ORGANISATION/NAME)"
        raise ConfigError(f"{given}: no such file or folder{form}.")
    return in_cache(given, dataset=dataset, cache_dir=cache_dir) or fetch(given, dataset=dataset, cache_dir=cache_dir)


def is_hub_id(text: str) -> bool:
    """Whether a text has the form ORGANISATION/NAME and does not look like a local path, by its first folder or its file suffix."""
    if _ID.fullmatch(text) is None:
        return False
    first = Path(text).parts[0]
    return not (Path(first).is_dir() or first in LOCAL_FOLDERS or Path(text).suffix.lower() in FILE_ENDINGS)


def in_cache(repo_id: str, *, dataset: bool = False, revision: str | None = None, cache_dir: Path | None = None) -> Path | None:
    """The folder of a hub id downloaded before, or None; uses no network."""
    if not _ID.fullmatch(repo_id):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for cache in dict.fromkeys((cache_dir, None)):
        try:
            return Path(snapshot_download(repo_id, repo_type=_type(dataset), revision=revision, cache_dir=cache, local_files_only=True))
        except LocalEntryNotFoundError:
            continue
    return None


def fetch(
    repo_id: str,
    *,
    dataset: bool = False,
    include: Sequence[str] = (),
    revision: str | None = None,
    to: Path | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """Download a model or dataset (or the files that match `include`) and return its folder; continues an interrupted download."""
    if not _ID.fullmatch(repo_id):
        raise ConfigError(f"{repo_id!r} is not a hub id; write ORGANISATION/NAME.")
    from huggingface_hub import errors, snapshot_download

    what = "dataset" if dataset else "model"
    request = HubRequest(repo_id, _type(dataset), revision, include, to, cache_dir)
    try:
        if (info := _described(request)) is not None:
            fetch_large(request, info)
        found = snapshot_download(
            repo_id, repo_type=_type(dataset), revision=revision, allow_patterns=list(include) or None, local_dir=to, cache_dir=cache_dir
        )
    except errors.GatedRepoError:
        raise DataError(f"{repo_id}: the {what} needs your consent on its page and a token (HF_TOKEN). Then run this again.") from None
    except errors.RepositoryNotFoundError:
        raise DataError(
            f"{repo_id}: the hub has no such {what}{'' if dataset else ' (a dataset needs --dataset)'}, or it is private."
        ) from None
    except errors.RevisionNotFoundError:
        raise DataError(f"{repo_id}: the hub has no revision {revision!r} of this {what}.") from None
    except (OSError, *_network_errors()) as error:
        raise DataError(_unreachable(repo_id, dataset, error)) from None
    folder = Path(found)
    if verify(folder, repo_id) == 0 and include:
        raise DataError(f"{repo_id}: no file of the {what} matches {', '.join(include)}.")
    return folder


def _described(request: HubRequest) -> Any:
    """The hub's description of a repository; None if the hub does not answer: the library then uses its cache or reports why."""
    from huggingface_hub import HfApi

    try:
        return HfApi().repo_info(request.repo_id, repo_type=request.repo_type, revision=request.revision, files_metadata=True)
    except (OSError, *_network_errors()):
        return None


def verify(folder: Path, repo_id: str) -> int:
    """Compare downloaded files with the hub's checksums; a damaged file is removed and reported. Returns how many were checked."""
    checked = 0
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or ".cache" in file.relative_to(folder).parts:
            continue
        expected = _expected_checksum(folder, file)
        if expected is not None and _checksum(file, len(expected)) != expected:
            file.resolve().unlink()
            file.unlink(missing_ok=True)
            raise DataError(
                f"{repo_id}: {file.relative_to(folder)} does not have the checksum of the hub; it was removed. Download it again."
            )
        checked += 1
    return checked


def _expected_checksum(folder: Path, file: Path) -> str | None:
    """The hub's checksum of a file: the name of its blob in the cache, or the library's metadata file in a plain folder.

    None for files that are not from the hub or were changed after the download.
    """
    named = ""
    note = folder / ".cache" / "huggingface" / "download" / f"{file.relative_to(folder)}.metadata"
    if file.is_symlink():
        named = file.resolve().name
    elif note.is_file():
        _, named, fetched_at = note.read_text(encoding="utf-8").split()
        if file.stat().st_mtime > float(fetched_at) + 1:
            return None
    return named if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", named) else None


def _checksum(file: Path, length: int) -> str:
    """SHA-256 of the content (large files) or git's SHA-1 of the blob (small ones), by the length of the hub's checksum."""
    if length == _SHA256_LENGTH:
        return sha256_file(file)
    digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _network_errors() -> tuple[type[BaseException], ...]:
    """Connection errors of the installed hub library: of httpx2, httpx, or (the oldest) OSError."""
    found = [name for name in ("httpx2", "httpx") if importlib.util.find_spec(name) is not None]
    return tuple(importlib.import_module(name).HTTPError for name in found)


def _unreachable(repo_id: str, dataset: bool, error: BaseException) -> str:
    from huggingface_hub import constants

    flag = " --dataset" if dataset else ""
    why = first_line(error, 120)
    return (
        f"{repo_id}: not found locally, and {constants.ENDPOINT} did not provide it ({why}). On a connected machine run "
        f"`headway download {repo_id}{flag} --to {repo_id.rpartition('/')[2]}`, copy that folder here and give its path; "
        f"or copy it into the cache {constants.HF_HUB_CACHE}. HF_ENDPOINT names a mirror."
    )


def _type(dataset: bool) -> str:
    return "dataset" if dataset else "model"
