"""Uploads to the Hugging Face hub: a folder and a repository's name come in, one commit goes out.

    folder ──compare──▶ files the repository lacks ──send, one by one──▶ commit (all files at once)

Files are sent before the commit. The hub keeps what has arrived, so that a push that was
interrupted sends only the rest when it is run again. Invariant: a repository that holds anything
else than an earlier push of the same source is left as it is, unless `replace` is set. The token
comes from HF_TOKEN or from the login of the hub library; it is never written or printed.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headway.errors import ConfigError, DataError, first_line
from headway.runtime.progress import progress, quantity
from headway.runtime.storage import sha256_file
from headway.text.hub_download import LARGE_BYTES, network_errors, require_library

log = logging.getLogger("headway")

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CARD = "README.md"
MARK = "headway_source"
"""The key of a card that says what a repository was pushed from."""
OF_THE_HUB = (".gitattributes",)
"""Files that the hub itself puts into a new repository."""
AUTHORISATION = (401, 403)


@dataclass(frozen=True)
class UploadRequest:
    """A folder and where it goes."""

    repo_id: str
    folder: Path
    source: str
    """What the folder was made from; the card in it has the same under `MARK`."""
    is_public: bool = False
    replace: bool = False
    """Whether other content of the repository may be replaced."""
    kept_endings: tuple[str, ...] = ()
    """Files with these endings that an earlier push of the same source has sent stay, unless
    `replace` is set.
    """
    message: str = "Upload with headway"


@dataclass(frozen=True)
class UploadResult:
    """What a push did."""

    url: str
    commit: str | None
    """None: the repository had everything already."""
    sent: tuple[str, ...]
    present: tuple[str, ...]
    """Files that the repository had with the same content."""
    deleted: tuple[str, ...] = ()


def check_repository(repo_id: str) -> None:
    """Refuse a name that is not USER/NAME."""
    if "/" not in repo_id.strip("/"):
        raise ConfigError(
            f"{repo_id[:200]!r} has no user; write USER/{repo_id[:100] or 'NAME'}, with your name "
            "on the hub or that of an organisation."
        )
    if REPOSITORY.fullmatch(repo_id) is None:
        raise ConfigError(
            f"{repo_id[:200]!r} is not a name of the hub; write USER/NAME with letters, digits, "
            "'-', '_' and '.'."
        )


def upload(request: UploadRequest) -> UploadResult:
    """Push a folder. Run again after an interruption, it sends what is missing."""
    check_repository(request.repo_id)
    require_library(request.repo_id)
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if get_token() is None:
        raise ConfigError(
            f"{request.repo_id}: a push needs a token that may write. Set HF_TOKEN, or run "
            f"`hf auth login`; tokens are made on {constants.ENDPOINT}/settings/tokens."
        )

    api = HfApi()
    files = local_files(request.folder)
    # There is one bar for the whole push.
    was_quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        remote = _open_repository(api, request)
        return _send(api, request, files, remote)
    except (OSError, *network_errors()) as error:
        raise _explained(request, error) from None
    finally:
        if not was_quiet:
            enable_progress_bars()


def local_files(folder: Path) -> dict[str, Path]:
    """The files of a folder by their names in the repository; links and hidden files are left out."""
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not path.is_symlink() and not is_hidden:
            files[name.as_posix()] = path
    return files


def _open_repository(api: Any, request: UploadRequest) -> dict[str, Any]:
    """The files of the repository, by name; it is created if it does not exist."""
    from huggingface_hub import errors

    try:
        info = api.repo_info(request.repo_id, files_metadata=True)
    except errors.RepositoryNotFoundError:
        # Also the answer for a private repository of somebody else; `create_repo` then refuses.
        api.create_repo(request.repo_id, private=not request.is_public)
        return {}

    remote = {file.rfilename: file for file in info.siblings or []}
    content = remote.keys() - set(OF_THE_HUB)
    if not content or request.replace:
        return remote

    pushed_from = _source_of(info)
    if pushed_from != request.source:
        origin = "was not pushed by headway"
        if pushed_from is not None:
            origin = f"was pushed from {pushed_from}"
        raise ConfigError(
            f"{request.repo_id}: exists, has {len(content)} files and {origin}; this is "
            f"{request.source}. Choose another name, or replace its content with --replace."
        )
    return remote


def _source_of(info: Any) -> str | None:
    """What a repository was pushed from, by the head of its card."""
    card = info.card_data
    if card is None:
        return None
    content: Mapping[str, Any] = card.to_dict()
    source = content.get(MARK)
    return None if source is None else str(source)[:200]


def _send(
    api: Any, request: UploadRequest, files: Mapping[str, Path], remote: Mapping[str, Any]
) -> UploadResult:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants

    present = [name for name, path in files.items() if _is_same(path, remote.get(name))]
    missing = {name: path for name, path in files.items() if name not in present}
    # What an earlier push had and this one has not, such as a shard of a larger model.
    stale = sorted(
        name
        for name in remote.keys() - files.keys() - set(OF_THE_HUB)
        if request.replace or not name.endswith(request.kept_endings)
    )
    url = f"{constants.ENDPOINT}/{request.repo_id}"
    if not missing and not stale:
        return UploadResult(url, None, (), tuple(present))

    total = sum(path.stat().st_size for path in missing.values())
    log.info(
        "pushing to %s: %s in %d files, %d files are there already",
        request.repo_id,
        quantity(total, "bytes"),
        len(missing),
        len(present),
    )
    additions = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path))
        for name, path in missing.items()
    ]
    # Small files go with one question, and each large one alone: the bar follows them.
    small = [addition for addition in additions if addition.upload_info.size < LARGE_BYTES]
    large = [addition for addition in additions if addition.upload_info.size >= LARGE_BYTES]
    deletions = [CommitOperationDelete(path_in_repo=name) for name in stale]
    try:
        with progress(request.repo_id, total=total, unit="bytes") as advance:
            for group in (small, *([addition] for addition in large)):
                # The content stays with the operation: the commit needs that of small files.
                api.preupload_lfs_files(request.repo_id, group, free_memory=False)
                advance(sum(addition.upload_info.size for addition in group))
        commit = api.create_commit(
            request.repo_id, [*additions, *deletions], commit_message=request.message
        )
    except RuntimeError as error:
        # The library wraps what happened while a large file was sent.
        raise OSError(first_line(error.__cause__ or error)) from None
    except ValueError as error:
        # The hub checks the head of a card, and the numbers of files.
        raise ConfigError(f"{request.repo_id}: the hub refuses it: {first_line(error)}.") from None
    return UploadResult(url, str(commit.oid), tuple(missing), tuple(present), tuple(stale))


def _is_same(path: Path, remote: Any) -> bool:
    """Whether the repository has this content, by the checksum that the hub keeps of a file."""
    if remote is None or remote.size != path.stat().st_size:
        return False
    if remote.lfs is not None:
        return remote.lfs.sha256 == sha256_file(path)
    content = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return remote.blob_id == blob.hexdigest()


def _explained(request: UploadRequest, error: BaseException) -> ConfigError | DataError:
    """One line for what the hub or the network refused, and what to do."""
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return ConfigError(f"{request.repo_id}: HF_HUB_OFFLINE is set. Unset it to push.")
    if isinstance(error, errors.HfHubHTTPError):
        # The class comes from one of two HTTP libraries, which type checkers cannot see.
        response: Any = cast(Any, error).response
        status = 0
        if response is not None:
            status = response.status_code
        if status in AUTHORISATION:
            return ConfigError(
                f"{request.repo_id}: the hub refuses the token ({status}). It must be valid and "
                f"may write to {request.repo_id.partition('/')[0]}; see "
                f"{constants.ENDPOINT}/settings/tokens."
            )
    return DataError(
        f"{request.repo_id}: {constants.ENDPOINT} could not be reached, or broke off "
        f"({first_line(error, 120)}). Run the same command again: it sends what is missing."
    )
