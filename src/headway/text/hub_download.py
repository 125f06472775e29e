"""Downloads of the Hugging Face hub: a repository and what is needed of it come in, a verified
folder goes out.

Every file is checked against the size and checksum the hub states. Large files are downloaded
here by byte ranges, because the hub library discards a partial file. A restart continues inside
them:

    CACHE/models--ORG--NAME/blobs/ETAG.part     or     FOLDER/.cache/huggingface/download/ETAG.part

A finished file is moved to where the library looks for it. The library then links or records it
and downloads the small files. Invariant: while a download into the cache is unfinished,
CACHE/models--ORG--NAME/.headway-unfinished is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from headway.errors import ConfigError, DataError, first_line
from headway.runtime.progress import progress, quantity
from headway.runtime.storage import sha256_file
from headway.text.hub_request import HubRequest

log = logging.getLogger("headway")
T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""Files of this size or more are downloaded here, smaller ones by the library."""
AT_ONCE = 4
"""Files that are downloaded at the same time."""
WATCH_SECONDS = 0.2
"""How often the progress bar looks at the sizes of files."""
SHA256_LENGTH = 64
"""Hexadecimal digits."""


def require_library(name: str) -> None:
    """Refuse, in one line, to look for a name on the hub without the package that does it."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"{name}: no such file or folder here, and the package huggingface_hub, which "
            "downloads from the hub, is not installed. Run pip install huggingface_hub, or give "
            "a path."
        )


def fetch(request: HubRequest) -> Path:
    """Download a model, tokenizer or dataset and return its folder; continues an interrupted
    download.
    """
    require_library(request.repo_id)
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    repo_type = request.repo_type
    # There is one bar for the whole download.
    quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        info = _described(request)
        if info is None and request.to is None and request.unfinished.exists():
            raise DataError(
                f"{request.repo_id}: an earlier download was interrupted; connect to the network "
                "and run this again."
            )

        # Without an answer the cache must do, unless the user asks for certain files or a folder.
        if (
            info is None
            and request.to is None
            and not request.include
            and (cached := request.cached()) is not None
        ):
            log.warning("%s: the hub does not answer; using the cache", request.repo_id)
            return cached

        names = None
        if info is not None:
            names = request.choose([sibling.rfilename for sibling in info.siblings or []])

        if names == [] and request.include:
            raise DataError(
                f"{request.repo_id}: no file of the {repo_type} matches "
                f"{', '.join(request.include)}."
            )

        with _marked(request, info):
            if info is not None:
                _fetch_large(request, info, names or [])

            # By commit, so that all files are of the same one, even if the branch moves meanwhile.
            revision = request.revision
            if info is not None:
                revision = str(info.sha)

            downloaded = snapshot_download(
                request.repo_id,
                repo_type=repo_type,
                revision=revision,
                allow_patterns=names,
                local_dir=request.to,
                cache_dir=request.cache_dir,
            )
            if info is not None and request.to is None:
                _write_ref(request, str(info.sha))

            folder = Path(downloaded)
            verify(folder, request.repo_id)
    except errors.GatedRepoError:
        raise DataError(
            f"{request.repo_id}: the {repo_type} needs your consent on its page and a token "
            "(HF_TOKEN). Then run this again."
        ) from None
    except errors.RepositoryNotFoundError:
        # `headway download` asks for everything; other verbs know what they need.
        hint = ""
        token = "; a private one needs a token (HF_TOKEN)"
        if request.need == "everything":
            hint = " (a dataset needs --dataset)"
            token = ""

        raise DataError(
            f"{request.repo_id}: the hub has no such {repo_type}{hint}, or it is private{token}. "
            f"{_how_to_train(request)}".rstrip()
        ) from None
    except errors.RevisionNotFoundError:
        raise DataError(
            f"{request.repo_id}: the hub has no revision {request.revision!r} of this {repo_type}."
        ) from None
    except (OSError, *network_errors()) as error:
        raise DataError(_unreachable(request, error)) from None
    finally:
        if not quiet:
            enable_progress_bars()

    return folder


@contextmanager
def _marked(request: HubRequest, info: Any) -> Iterator[None]:
    """Mark the repository in the cache as unfinished until the block has ended well."""
    if info is None or request.to is not None:
        yield
        return

    # No `finally`: after an error the mark must stay.
    request.cache.mkdir(parents=True, exist_ok=True)
    request.unfinished.touch()
    yield
    request.unfinished.unlink(missing_ok=True)


def _write_ref(request: HubRequest, commit: str) -> None:
    """Record which commit a branch or tag is, so that it is found again without a network.

    The library records it only when it is asked for a name; `fetch` asks for a commit.
    """
    revision = request.revision or "main"
    if revision != commit and ".." not in Path(revision).parts and not Path(revision).is_absolute():
        ref = request.cache / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit, encoding="utf-8")


def _described(request: HubRequest) -> Any:
    """The hub's description of a repository; None if the hub does not answer: the library then
    uses its cache or reports why.
    """
    from huggingface_hub import HfApi, errors

    # Answers of the hub, which `fetch` explains; all other errors mean that it did not answer.
    answers = (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
    try:
        return HfApi().repo_info(
            request.repo_id,
            repo_type=request.repo_type,
            revision=request.revision,
            files_metadata=True,
        )
    except answers:
        raise
    except (OSError, *network_errors()):
        return None


@dataclass(frozen=True)
class _Transfer:
    """The files of one download and how much of them is there."""

    parts: list[tuple[Path, Path, int]]
    """Where a file grows, where it ends up, its size."""

    def done(self) -> int:
        """Bytes that have arrived."""
        return sum(
            size if target.is_file() else min(size, _size(part))
            for part, target, size in self.parts
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _fetch_large(request: HubRequest, info: Any, names: Sequence[str]) -> None:
    """Download the missing large files of a repository, with one bar for all."""
    chosen = set(names)
    large = [
        sibling.rfilename
        for sibling in info.siblings or []
        if sibling.rfilename in chosen and (sibling.size or 0) >= LARGE_BYTES
    ]
    jobs = [
        job
        for job in in_threads([partial(_job_of, request, name, str(info.sha)) for name in large])
        if job is not None
    ]
    missing = [job for job in jobs if not _is_complete(job.target, job.size)]
    if not missing:
        return

    transfer = _Transfer([(job.part, job.target, job.size) for job in jobs])
    total = sum(job.size for job in jobs)
    before = transfer.done()
    continued = ""
    if before:
        continued = f", {quantity(before, 'bytes')} of it is here"

    folder = request.to or request.cache
    log.info(
        "downloading %s: %s in %d files%s, to %s",
        request.repo_id,
        quantity(total, "bytes"),
        len(jobs),
        continued,
        folder,
    )
    with (
        progress(request.repo_id, total=total, unit="bytes") as advance,
        _watching(transfer, advance),
    ):
        in_threads([partial(_fetch_file, request, job) for job in missing])


def in_threads(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """The results of some tasks, a few at a time.

    Ctrl-C ends the wait at once; a thread that still downloads does not delay the exit.
    """
    waiting = queue.SimpleQueue[int]()
    done = queue.SimpleQueue[tuple[int, T | None, BaseException | None]]()
    for index in range(len(tasks)):
        waiting.put(index)

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((index, tasks[index](), None))
            except BaseException as error:
                done.put((index, None, error))

    # Daemons instead of an executor, whose threads the interpreter waits for at its exit.
    for _ in range(min(AT_ONCE, len(tasks))):
        threading.Thread(target=work, name="headway-download", daemon=True).start()

    results: dict[int, T] = {}
    while len(results) < len(tasks):
        index, result, error = done.get()
        if error is not None:
            raise error

        results[index] = cast(T, result)

    return [results[index] for index in range(len(tasks))]


@contextmanager
def _watching(transfer: _Transfer, advance: Callable[[float], None]) -> Iterator[None]:
    """Report how the files grow; reading their sizes needs nothing of the library that writes
    them.
    """
    over = threading.Event()
    seen = 0

    def look() -> None:
        nonlocal seen
        now = transfer.done()
        if now > seen:
            advance(now - seen)
            seen = now

    def work() -> None:
        while not over.wait(WATCH_SECONDS):
            look()

    thread = threading.Thread(target=work, name="headway-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()


@dataclass(frozen=True)
class _Job:
    """One large file: from where, what the hub says about it, where it grows and where it ends up."""

    url: str
    metadata: Any
    part: Path
    target: Path

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return int(self.metadata.size)


def _job_of(request: HubRequest, name: str, commit: str) -> _Job | None:
    """The download of a large file; None where the library must do it."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(request.repo_id, name, repo_type=request.repo_type, revision=commit)
    metadata = get_hf_file_metadata(url)
    if (
        metadata.etag is None
        or metadata.size is None
        or metadata.size > constants.MAX_HTTP_DOWNLOAD_SIZE
    ):
        return None

    if request.to is None:
        target = request.cache / "blobs" / metadata.etag
        return _Job(url, metadata, target.with_name(f"{metadata.etag}.part"), target)

    # The library accepts only files with a SHA-256 from the hub. A name must not lead out of the
    # folder.
    target = request.to / name
    if len(metadata.etag) != SHA256_LENGTH or not target.resolve().is_relative_to(
        request.to.resolve()
    ):
        return None

    part = request.to / ".cache" / "huggingface" / "download" / f"{metadata.etag}.part"
    return _Job(url, metadata, part, target)


def _fetch_file(request: HubRequest, job: _Job) -> None:
    """Download a large file, or continue it, and move it to where the library looks for it."""
    job.part.parent.mkdir(parents=True, exist_ok=True)
    with open(job.part, "ab") as file:
        # Another process may be downloading the same file; this one waits for it.
        fcntl.flock(file, fcntl.LOCK_EX)
        if _is_complete(job.target, job.size):
            job.part.unlink(missing_ok=True)
            return

        _continue(file, job)

    # A damaged file in the cache is found by `verify`. One that goes to a folder is removed here:
    # the library then downloads it again and reports the error.
    if request.to is not None and sha256_file(job.part) != job.metadata.etag:
        job.part.unlink()
        return

    job.target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(job.part, job.target)


def _is_complete(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _continue(file: Any, job: _Job) -> None:
    """Append what is missing of a file."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = job.url
    metadata = job.metadata
    present_bytes = file.seek(0, os.SEEK_END)
    if present_bytes > metadata.size:
        file.truncate(present_bytes := 0)
    if present_bytes == metadata.size:
        return

    # The address that the hub redirects to belongs to a storage service, which must not get the
    # user's token.
    headers = {
        key: value
        for key, value in build_hf_headers().items()
        if key.lower() != "authorization" or _same_host(url, metadata.location)
    }
    http_get(
        metadata.location,
        file,
        resume_size=present_bytes,
        headers=headers,
        expected_size=metadata.size,
    )


def _same_host(first: str, second: str) -> bool:
    """Whether the token may be sent: addresses of storage behind the hub are signed already."""
    return urlsplit(first).netloc == urlsplit(second).netloc


def verify(folder: Path, repo_id: str) -> int:
    """Compare downloaded files with the hub's checksums; a damaged file is removed and reported.

    Returns how many were checked.
    """
    checked = 0
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or ".cache" in file.relative_to(folder).parts:
            continue

        expected = _expected_checksum(folder, file)
        if expected is not None and _checksum(file, len(expected)) != expected:
            # The blob, and the link to it in the snapshot.
            file.resolve().unlink()
            file.unlink(missing_ok=True)
            raise DataError(
                f"{repo_id}: {file.relative_to(folder)} does not have the checksum of the hub; it "
                "was removed. Download it again."
            )

        checked += 1

    return checked


def _expected_checksum(folder: Path, file: Path) -> str | None:
    """The hub's checksum of a file: the name of its blob in the cache, or the library's metadata
    file in a plain folder.

    None for files that are not from the hub or were changed after the download.
    """
    checksum = ""
    note = folder / ".cache" / "huggingface" / "download" / f"{file.relative_to(folder)}.metadata"
    if file.is_symlink():
        checksum = file.resolve().name
    elif note.is_file():
        _, checksum, fetched_at = note.read_text(encoding="utf-8").split()
        # Changed by the user since; a second for file systems that round times.
        if file.stat().st_mtime > float(fetched_at) + 1:
            return None

    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", checksum):
        return None
    return checksum


def _checksum(file: Path, length: int) -> str:
    """SHA-256 of the content (large files) or git's SHA-1 of the blob (small ones), by the
    length of the hub's checksum.
    """
    if length == SHA256_LENGTH:
        return sha256_file(file)

    digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)

    return digest.hexdigest()


def network_errors() -> tuple[type[BaseException], ...]:
    """Connection errors of the installed hub library: of httpx2, httpx, or (the oldest) OSError."""
    libraries = [name for name in ("httpx2", "httpx") if importlib.util.find_spec(name) is not None]
    return tuple(importlib.import_module(name).HTTPError for name in libraries)


def _unreachable(request: HubRequest, error: BaseException) -> str:
    """What to do where the hub cannot be reached: every way to get the files here."""
    from huggingface_hub import constants

    repo_id = request.repo_id
    flag = " --dataset" if request.need == "dataset" else ""
    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        why = first_line(error, 120)

    return (
        f"{repo_id}: not found locally, and {constants.ENDPOINT} did not provide it ({why}). "
        f"{_how_to_train(request)}On a connected machine run `headway download {repo_id}{flag} --to "
        f"{repo_id.rpartition('/')[2]}`, copy that folder here and give its path; or copy it into "
        f"the cache {constants.HF_HUB_CACHE}. HF_ENDPOINT names a mirror."
    )


def _how_to_train(request: HubRequest) -> str:
    """Recipes that pretrain name a folder that looks like a hub id, such as tokenizers/mine, which a
    user may not have made yet."""
    if request.need != "tokenizer":
        return ""
    return (
        "To make a tokenizer from your texts: `headway tokenizer train --input FILE "
        f"--vocab-size 32000 --out {request.repo_id}`. "
    )
