"""Open a token store of any format. `detect_kind` finds the format by file names and first bytes;
`open_source` opens it."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Literal, get_args

from headway.errors import ConfigError, DataError
from headway.store.reader import is_store, open_store
from headway.store.source import TokenSource
from headway.text.expand import refuse_stream
from headway.text.formats import FORMATS, SUPPORTED

StoreKind = Literal["headway", "internlm", "zero2all", "zero2all-sft", "mds", "megatron", "raw"]
KINDS: tuple[StoreKind, ...] = get_args(StoreKind)
ZERO2ALL_NAME = re.compile(r"file_\d{3}_\d{5}\.bin")
KNOWN = (
    "a headway store (store.json), InternLM (X.bin with X.bin.meta), zero2all (.bin with .ibin, or "
    "*_input_ids.bin), MDS (index.json), Megatron (X.idx with X.bin)"
)


def detect_kind(path: Path | str) -> StoreKind:
    """The format of the data at a path; unknown data is an error that lists the known formats."""
    location = Path(path)
    refuse_stream(location)
    # Looking for files below / would take hours.
    if location.is_dir() and location.resolve().parent == location.resolve():
        raise DataError(f"{path}: is the whole file system. Give a folder of data.")
    kind = None
    if location.is_dir():
        kind = _of_folder(location)
    elif location.is_file():
        kind = _of_file(location)
    if kind is not None:
        return kind
    if not location.exists():
        if glob.has_magic(str(path)) and glob.glob(str(path), recursive=True):
            return "raw"
        raise DataError(f"{path}: no such file or folder.")
    raise DataError(
        f"{path}: unknown format. Known are {KNOWN}; raw data ({SUPPORTED}). Bare .bin files need "
        "--from zero2all."
    )


def parse_kind(kind: str) -> StoreKind:
    """The kind with that name; an error if there is none."""
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}.")
    return kind


def _of_folder(path: Path) -> StoreKind | None:
    # From the surest sign to the vaguest: several formats call their files *.bin.
    if is_store(path) or any(path.glob("tokens-*.bin")):
        return "headway"
    # A folder of stores is not read as one: which of them, and in which order, is for the recipe to
    # say.
    inside = sorted(str(manifest.parent) for manifest in path.glob("*/store.json"))
    if inside:
        plural = "s" if len(inside) > 1 else ""
        raise DataError(
            f"{path}: holds {len(inside)} token store{plural} but is not one itself. "
            f"Give {' or '.join(inside[:3])}."
        )
    from headway.store.foreign.mds import has_tokens
    from headway.store.foreign.zero2all import IDS_END
    from headway.text.formats.mds import is_mds
    from headway.text.raw import RawFile

    if is_mds(path):
        return "mds" if has_tokens(path) else "raw"
    if any(_is_megatron(index) for index in path.rglob("*.idx")):
        return "megatron"
    if any(path.rglob(f"*{IDS_END}")):
        return "zero2all-sft"
    if any(path.rglob("*.bin.meta")):
        return "internlm"
    if any(path.rglob("*.ibin")):
        return "zero2all"
    if any(ZERO2ALL_NAME.fullmatch(file.name) for file in path.rglob("*.bin")):
        return "zero2all"

    if any(RawFile.at(file).suffix in FORMATS for file in path.rglob("*") if file.is_file()):
        return "raw"
    return None


def _of_file(path: Path) -> StoreKind | None:
    # An X.bin may belong to three formats; the file beside it decides.
    if path.suffix == ".idx" or (path.suffix == ".bin" and _is_megatron(path.with_suffix(".idx"))):
        return "megatron"
    if path.name.endswith(".bin.meta") or path.with_name(path.name + ".meta").exists():
        return "internlm"
    if path.suffix == ".bin" and ZERO2ALL_NAME.fullmatch(path.name):
        return "zero2all"
    from headway.text.raw import RawFile

    if RawFile.at(path).suffix in FORMATS:
        return "raw"
    return None


def _is_megatron(index: Path) -> bool:
    if not index.is_file():
        return False
    from headway.store.foreign.megatron import MAGIC

    with open(index, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_source(
    path: Path | str,
    kind: StoreKind | None = None,
    *,
    rebuild_index: bool = False,
    begin_id: int | None = None,
) -> TokenSource:
    """Open a token store of any format; `kind` is detected if not given.

    `rebuild_index`: rebuild InternLM and zero2all indexes instead of reading the index files.
    `begin_id`: zero2all's begin token.
    """
    location = Path(path)
    kind = kind or detect_kind(path)
    if kind == "headway":
        return open_store(location)

    from headway.store.foreign.internlm import open_internlm
    from headway.store.foreign.mds import open_mds
    from headway.store.foreign.megatron import open_megatron
    from headway.store.foreign.zero2all import open_zero2all, open_zero2all_sft

    if kind == "internlm":
        return open_internlm(location, rebuild_index)
    if kind == "zero2all":
        return open_zero2all(location, begin_id, rebuild_index)
    if kind == "zero2all-sft":
        return open_zero2all_sft(location)
    if kind == "mds":
        return open_mds(location)
    if kind == "megatron":
        return open_megatron(location)
    raise DataError(
        f"{path}: raw data, not tokens. Tokenize it first: headway data tokenize --input {path} "
        "--tokenizer DIR --out DIR."
    )
