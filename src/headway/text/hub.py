"""What a name such as `Qwen/Qwen2.5-0.5B` means: a path that exists, else a repository of the
Hugging Face hub.

    ORGANISATION/NAME               the main branch
    ORGANISATION/NAME@REVISION      a branch, a tag or a commit

In: such a name. Out: a local folder, from a cache without a network, or downloaded once into the
cache (`hub_download.py`). The hub library reads HF_ENDPOINT (mirrors), HF_HOME, HF_HUB_OFFLINE
and HF_TOKEN. If a cache is named (data.cache_dir, --cache-dir), it is searched first and
receives downloads; the hub's default cache is searched too. One process downloads, others that
need the same wait.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, DataError
from headway.text.hub_request import TOKENIZER_FILES, UNFINISHED, HubRequest, Need

log = logging.getLogger("headway")

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?"
)
# Beginnings and ends of local paths. A misspelled path should be reported as missing, and not be
# asked for on the hub.
LOCAL_FOLDERS = {"checkpoints", "data", "datasets", "models", "raw", "runs", "stores"}
FILE_ENDINGS = {
    ".arrow",
    ".bin",
    ".bz2",
    ".csv",
    ".gguf",
    ".gz",
    ".json",
    ".jsonl",
    ".md",
    ".model",
    ".parquet",
    ".pt",
    ".safetensors",
    ".tsv",
    ".txt",
    ".xml",
    ".xz",
    ".yaml",
    ".zip",
    ".zst",
}
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def split_revision(name: str) -> tuple[str, str | None]:
    """`ORG/NAME@REVISION` -> its two parts; any other text is returned as it is."""
    match = _ID.fullmatch(name)
    if match is None:
        return (name, None)
    return (match["repo"], match["revision"])


def is_hub_id(text: str) -> bool:
    """Whether a text has the form ORGANISATION/NAME[@REVISION] and does not look like a local
    path, by its first folder or its suffix.
    """
    # A relative path of two names has the same form; what is known about it decides.
    if _ID.fullmatch(text) is None:
        return False

    repo_id, _ = split_revision(text)
    first = Path(repo_id).parts[0]
    return not (
        Path(first).is_dir()
        or first in LOCAL_FOLDERS
        or Path(repo_id).suffix.lower() in FILE_ENDINGS
    )


def local_or_hub(
    path_or_id: Path | str,
    *,
    dataset: bool = False,
    tokenizer: bool = False,
    cache_dir: Path | None = None,
) -> Path:
    """An existing path, else the folder of a hub id: from a cache, or downloaded into it.

    Of a `tokenizer` no weights are downloaded.
    """
    if _exists(path_or_id):
        return Path(path_or_id)

    name = str(path_or_id)
    if not is_hub_id(name):
        form = "" if _ID.fullmatch(name) else ", and not a hub id (ORGANISATION/NAME)"
        raise ConfigError(f"{name[:500]}: no such file or folder{form}.")

    from headway.text.hub_download import fetch as download
    from headway.text.hub_download import require_library

    require_library(name)
    repo_id, revision = split_revision(name)
    request = HubRequest(repo_id, _need(dataset, tokenizer), revision, cache_dir=cache_dir)
    folder = _search(request)
    if folder is not None:
        return folder

    # Another process may have downloaded it while this one waited.
    with _one_at_a_time(request):
        return _search(request) or download(request)


def _exists(path: Path | str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        # A name that no file system takes: too long, or with a null character.
        return False


def in_cache(
    repo_id: str,
    *,
    dataset: bool = False,
    revision: str | None = None,
    cache_dir: Path | None = None,
) -> Path | None:
    """The folder of a hub id downloaded before, or None; uses no network."""
    if not _ID.fullmatch(repo_id):
        return None
    return _search(HubRequest(repo_id, _need(dataset, False), revision, cache_dir=cache_dir))


def fetch(
    repo_id: str,
    *,
    dataset: bool = False,
    include: Sequence[str] = (),
    revision: str | None = None,
    to: Path | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """Download a model or dataset (or the files that match `include`), whatever is there
    already, and return its folder.
    """
    repo, named_revision = split_revision(repo_id)
    if not _ID.fullmatch(repo_id):
        raise ConfigError(f"{repo_id!r} is not a hub id; write ORGANISATION/NAME.")

    if named_revision is not None and revision is not None and named_revision != revision:
        raise ConfigError(
            f"{repo_id}: names the revision {named_revision!r}, and --revision is {revision!r}. "
            "Give one of them."
        )

    from headway.text.hub_download import fetch as download
    from headway.text.hub_download import require_library

    need: Need = "everything"
    if dataset:
        need = "dataset"
    request = HubRequest(repo, need, revision or named_revision, include, to, cache_dir)
    require_library(repo_id)
    with _one_at_a_time(request):
        return download(request)


def _need(dataset: bool, tokenizer: bool) -> Need:
    if dataset:
        return "dataset"
    if tokenizer:
        return "tokenizer"
    return "model"


def _search(request: HubRequest) -> Path | None:
    """The folder of a request in a cache, if it holds what is needed."""
    # None is the hub library's default cache; dict.fromkeys leaves out a repeated one.
    for cache in dict.fromkeys((request.cache_dir, None)):
        folder = replace(request, cache_dir=cache).cached()
        if folder is not None and _is_complete(folder, request.need):
            return folder
    return None


def _is_complete(folder: Path, need: Need) -> bool:
    """Whether a cached folder is complete.

    A tokenizer may have come alone, and an interrupted download leaves a part of the files.
    """
    if need == "tokenizer":
        # config.json alone tells which tokenizer it is, not what it holds.
        paths = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)]
        return any(path.name != "config.json" for path in paths)

    if (folder.parents[1] / UNFINISHED).exists():
        return False
    if need != "model":
        return True

    # Weights in several files: all files that one of the indexes lists must be there.
    lists = [names for names in map(_listed, folder.glob("*.index.json")) if names]
    if lists and not any(
        (folder / name).exists() for name in ("model.safetensors", "pytorch_model.bin")
    ):
        return any(all((folder / name).exists() for name in names) for names in lists)

    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def _listed(index: Path) -> set[str]:
    """The files of weights that an index lists; none if it is damaged, which the loader
    explains.
    """
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        return {str(name) for name in content["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


@contextmanager
def _one_at_a_time(request: HubRequest) -> Iterator[None]:
    """Wait while another process, another rank for instance, downloads the same repository."""
    # A folder of the user is not shared.
    if request.to is not None:
        yield
        return

    lock_path = request.cache.with_name(f".headway-{request.cache.name}.lock")
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock_path, "ab")  # noqa: SIM115 - closed below
    except OSError as problem:
        raise DataError(
            f"{request.repo_id}: not in the cache, and {lock_path.parent} cannot be written: "
            f"{problem.strerror}. Set HF_HOME to another folder."
        ) from None

    with file:
        try:
            # Tried without waiting first, so that a wait can be announced.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.info("%s: waiting for another process that downloads it", request.repo_id)
            fcntl.flock(file, fcntl.LOCK_EX)

        yield
