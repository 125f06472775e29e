"""What a name such as `Qwen/Qwen2.5-0.5B` means: a path that exists, else a repository of the Hugging Face hub.

    ORGANISATION/NAME               the main branch
    ORGANISATION/NAME@REVISION      a branch, a tag or a commit

In: such a name. Out: a local folder, from a cache without a network, or downloaded once into the cache (`hub_download.py`).
The hub library reads HF_ENDPOINT (mirrors), HF_HOME, HF_HUB_OFFLINE and HF_TOKEN. If a cache is named (data.cache_dir, --cache-dir), it
is searched first and receives downloads; the hub's default cache is searched too. One process downloads, others that need the same wait.
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
from headway.text.hub_download import fetch as download
from headway.text.hub_download import require_library
from headway.text.hub_request import TOKENIZER_FILES, UNFINISHED, HubRequest, Need

log = logging.getLogger("headway")

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?"
)
LOCAL_FOLDERS = {"checkpoints", "data", "datasets", "models", "raw", "runs", "stores"}
FILE_ENDINGS = {
    ".arrow", ".bin", ".bz2", ".csv", ".gguf", ".gz", ".json", ".jsonl", ".md", ".model", ".parquet", ".pt", ".safetensors", ".tsv",
    ".txt", ".xml", ".xz", ".yaml", ".zip", ".zst",
}  # fmt: skip
"""Beginnings and ends of local paths that no hub id has."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def split_revision(name: str) -> tuple[str, str | None]:
    """`ORG/NAME@REVISION` -> its two parts; any other text is returned as it is."""
    found = _ID.fullmatch(name)
    return (name, None) if found is None else (found["repo"], found["revision"])


def is_hub_id(text: str) -> bool:
    """Whether a text has the form ORGANISATION/NAME[@REVISION] and does not look like a local path, by its first folder or its suffix."""
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
    """An existing path, else the folder of a hub id: from a cache, or downloaded into it. Of a `tokenizer` no weights are downloaded."""
    if _exists(path_or_id):
        return Path(path_or_id)
    given = str(path_or_id)
    if not is_hub_id(given):
        form = "" if _ID.fullmatch(given) else ", and not a hub id (ORGANISATION/NAME)"
        raise ConfigError(f"{given[:500]}: no such file or folder{form}.")
    require_library(given)
    repo_id, revision = split_revision(given)
    request = HubRequest(repo_id, _need(dataset, tokenizer), revision, cache_dir=cache_dir)
    found = _search(request)
    if found is not None:
        return found
    with _one_at_a_time(request):
        return _search(request) or download(request)


def _exists(path: Path | str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name that no file system takes
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
    """Download a model or dataset (or the files that match `include`), whatever is there already, and return its folder."""
    repo, own = split_revision(repo_id)
    if not _ID.fullmatch(repo_id):
        raise ConfigError(f"{repo_id!r} is not a hub id; write ORGANISATION/NAME.")
    if own is not None and revision is not None and own != revision:
        raise ConfigError(
            f"{repo_id}: names the revision {own!r}, and --revision is {revision!r}. Give one of them."
        )
    request = HubRequest(
        repo, "dataset" if dataset else "everything", revision or own, include, to, cache_dir
    )
    require_library(repo_id)
    with _one_at_a_time(request):
        return download(request)


def _need(dataset: bool, tokenizer: bool) -> Need:
    return "dataset" if dataset else "tokenizer" if tokenizer else "model"


def _search(request: HubRequest) -> Path | None:
    """The folder of a request in a cache, if it holds what is needed."""
    for cache in dict.fromkeys((request.cache_dir, None)):
        place = replace(request, cache_dir=cache).cached()
        if place is not None and _has_what_is_needed(place, request.need):
            return place
    return None


def _has_what_is_needed(folder: Path, need: Need) -> bool:
    """Whether a cached folder is complete. A tokenizer may have come alone, and an interrupted download leaves a part of the files."""
    if need == "tokenizer":
        return any(
            name != "config.json"
            for pattern in TOKENIZER_FILES
            for name in (path.name for path in folder.glob(pattern))
        )
    if (folder.parents[1] / UNFINISHED).exists():
        return False
    if need != "model":
        return True
    lists = [found for index in folder.glob("*.index.json") if (found := _listed(index))]
    if lists and not any(
        (folder / name).exists() for name in ("model.safetensors", "pytorch_model.bin")
    ):
        return any(all((folder / name).exists() for name in names) for names in lists)
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def _listed(index: Path) -> set[str]:
    """The files of weights that an index lists; none if it is damaged, which the loader explains."""
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        return {str(name) for name in content["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


@contextmanager
def _one_at_a_time(request: HubRequest) -> Iterator[None]:
    """Wait while another process, another rank for instance, downloads the same repository."""
    if request.to is not None:
        yield
        return
    place = request.cache.with_name(f".headway-{request.cache.name}.lock")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        file = open(place, "ab")  # noqa: SIM115 - closed below
    except OSError as problem:
        raise DataError(
            f"{request.repo_id}: not in the cache, and {place.parent} cannot be written: {problem.strerror}. Set HF_HOME to another folder."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.info("%s: waiting for another process that downloads it", request.repo_id)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
