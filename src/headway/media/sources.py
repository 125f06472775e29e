"""Where records with media come from. In: files, folders, globs; out: `Record`s whose media values
are paths or {"bytes", "path"}.

    records     .jsonl, .json, .csv, .parquet, .arrow ...          as `headway.text` reads them
    tar         WebDataset: members 000.jpg, 000.txt, 000.json of one key are one record
    folder      metadata.jsonl or .csv with file_name; captions.txt ("a.png<TAB>a cat" or
                "a.png,a cat"); a.png beside a.txt; else one folder per class, whose name is the
                caption

Invariant: records come one at a time in a fixed order. Members of a tar that would leave their
folder, links and devices are refused.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from headway.errors import DataError
from headway.media.items import LIMITS, MediaLimits, Modality
from headway.text.document import Record
from headway.text.expand import expand
from headway.text.formats import FORMATS
from headway.text.formats.json import parse_object
from headway.text.raw import RawFile, decode, lines, open_tar
from headway.text.read import read_records as read_text_records

# Kinds that cannot be decoded are listed too, so that such files are reported instead of passed
# over.
SUFFIXES: dict[Modality, tuple[str, ...]] = {
    "image": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    "audio": (".wav", ".flac", ".ogg", ".oga", ".mp3", ".m4a", ".opus", ".aac"),
    "video": (".mp4", ".webm", ".mkv", ".mov", ".avi", ".m4v"),
}
CAPTION_FILE = "captions.txt"
CAPTION_LINE = re.compile(
    r"(?P<file>[^\t]+?)(?:#\d+)?(?:\t|(?<=\.\w{3})[,|]|(?<=\.\w{4})[,|])\s*(?P<text>.*)"
)
"""A file, perhaps with the number of its caption (`a.jpg#2`), a tab, or a comma or bar after its
suffix, and the caption."""
CAPTION_HEADERS = ("image", "audio", "file", "file_name", "filename")
"""How a first line begins that names the columns."""
IN_FOLDERS = (
    f"In a folder, a caption is in a .txt file of the same name, in {CAPTION_FILE} or "
    "metadata.jsonl, or is the name of a folder."
)
TEXT_BYTES = 16 << 20
"""The longest caption or JSON member of a tar."""


def modality_of(name: str) -> Modality | None:
    """What a file is by its suffix; None if it is not media."""
    suffix = PurePosixPath(name.lower()).suffix
    return next((modality for modality, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def read_sources(
    paths: Sequence[Path | str] | Path | str, limits: MediaLimits = LIMITS
) -> Iterator[Record]:
    """Every record of some files, folders or globs."""
    for file in source_files(paths):
        yield from read_source(file, limits)


def source_files(paths: Sequence[Path | str] | Path | str) -> list[Path]:
    """The files to read, and the folders that are read as pictures and sounds."""
    if isinstance(paths, (str, Path)):
        paths = [paths]
    files: list[Path] = []
    for path in paths:
        if Path(path).is_dir() and is_media_folder(Path(path)):
            files.append(Path(path))
        else:
            files += expand([path])
    return files


def read_source(file: Path, limits: MediaLimits = LIMITS) -> Iterator[Record]:
    """The records of one of `source_files`."""
    if file.is_dir():
        yield from _folder(file)
    elif FORMATS.get(RawFile.at(file).suffix) == "tar":
        yield from read_webdataset(file, limits)
    else:
        yield from read_text_records([file])


def note_folder(times: dict[str, int | None], file: Path) -> None:
    """Add the folder of a file and its time, unless it is there already. The time changes when
    files are added, removed or replaced."""
    folder = os.path.abspath(file.parent)
    if folder not in times:
        times[folder] = folder_time(folder)


def folder_time(folder: str) -> int | None:
    """When a folder was changed last, in nanoseconds; None if it is gone."""
    try:
        return os.stat(folder).st_mtime_ns
    except (OSError, ValueError):
        return None


def is_media_folder(folder: Path) -> bool:
    """Whether a folder is read by its pictures and sounds: it has captions.txt, or media and no
    file of records at its top."""
    if (folder / CAPTION_FILE).is_file():
        return True
    # A folder of records may well hold the media that they name.
    tops = [file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]
    if any(FORMATS.get(RawFile.at(file).suffix) not in (None, "txt") for file in tops):
        return False
    return next(_media_files(folder), None) is not None


def _media_files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if modality_of(file.name) and file.is_file() and not is_hidden:
            yield file


def _folder(folder: Path) -> Iterator[Record]:
    if (folder / CAPTION_FILE).is_file():
        yield from _captions(folder / CAPTION_FILE)
        return
    for file in sorted(_media_files(folder)):
        modality = modality_of(file.name)
        assert modality is not None
        # The record's file is the media file itself, so its bare name is relative to the right
        # folder.
        data = {modality: file.name, **_text_of(file, file.relative_to(folder))}
        yield Record(data, str(file), None)


def _text_of(file: Path, inner: Path) -> dict[str, str]:
    """The caption of a file in a folder, if it has one."""
    caption_file = file.with_suffix(".txt")
    if caption_file.is_file():
        with RawFile.at(caption_file).open() as stream:
            content = stream.read(TEXT_BYTES + 1)
        if len(content) > TEXT_BYTES:
            raise DataError(
                f"{caption_file}: a caption has at most {TEXT_BYTES} bytes. Shorten it."
            )
        return {"text": decode(content, str(caption_file), 1).strip()}
    # A folder per class, as torchvision's ImageFolder reads it.
    if len(inner.parts) > 1:
        return {"text": inner.parts[0].replace("_", " ").replace("-", " ")}
    return {}


def _captions(file: Path) -> Iterator[Record]:
    for number, line in lines(RawFile.at(file)):
        if not line.strip():
            continue
        matched = CAPTION_LINE.fullmatch(line)
        modality = None
        if matched:
            modality = modality_of(matched["file"].strip())
        if matched is None or modality is None:
            first_word = line.replace("\t", ",").lower().split(",")[0].strip()
            if number == 1 and first_word in CAPTION_HEADERS:
                continue
            raise DataError(
                f"{file}:{number}: {line[:100]!r} is not a file, a tab or comma, and its caption."
            )
        data = {"text": matched["text"], modality: matched["file"].strip()}
        yield Record(data, str(file), number)


def read_webdataset(file: Path, limits: MediaLimits = LIMITS) -> Iterator[Record]:
    """The samples of a tar: members with the same name up to the first dot, one after another.
    Samples are numbered from 1."""
    raw = RawFile.at(file)
    sample: dict[str, Any] = {}
    current: str | None = None
    number = 0
    # Members of a sample stand together, so one sample at a time is in memory.
    with open_tar(raw) as archive:
        for entry in archive:
            name = _checked_name(raw.name, entry)
            if name is None:
                continue
            key, suffix = _split_name(name)
            if key != current and sample:
                number += 1
                yield Record(_finished(sample), raw.name, number)
                sample = {}
            current = key
            _add_member(sample, archive, entry, suffix, f"{raw.name}:{number + 1}: {name}", limits)
    if sample:
        yield Record(_finished(sample), raw.name, number + 1)
    elif number == 0:
        raise DataError(f"{raw.name}: the tar holds no samples.")


def _finished(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample without the names that its JSON member gives to media which are members
    themselves."""
    is_member = {modality for modality in SUFFIXES if f"{modality}s" in sample}
    return {key: value for key, value in sample.items() if key not in is_member}


def _checked_name(tar: str, entry: tarfile.TarInfo) -> str | None:
    """The name of a regular member; None for folders and hidden files. A name outside the archive
    and links are refused."""
    path = PurePosixPath(entry.name)
    if path.is_absolute() or ".." in path.parts or "\\" in entry.name or "\0" in entry.name:
        raise DataError(
            f"{tar}: the member {entry.name[:200]!r} leads outside the archive; it is refused."
        )
    if entry.isdir():
        return None
    if not entry.isfile():
        raise DataError(
            f"{tar}: the member {entry.name[:200]!r} is a link or device; it is refused."
        )
    return None if path.name.startswith(".") else entry.name


def _split_name(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    key, _, suffix = base.partition(".")
    return folder + slash + key, suffix.lower()


def _add_member(
    sample: dict[str, Any],
    archive: tarfile.TarFile,
    entry: tarfile.TarInfo,
    suffix: str,
    place: str,
    limits: MediaLimits,
) -> None:
    modality = modality_of(f"x.{suffix}")
    max_bytes = TEXT_BYTES if modality is None else limits.bytes_of(modality)
    if entry.size > max_bytes:
        raise DataError(f"{place}: {entry.size} bytes; at most {max_bytes} are read.")
    stream = archive.extractfile(entry)
    assert stream is not None
    data = stream.read()
    if len(data) != entry.size:
        raise DataError(f"{place}: the archive is cut short.")
    if modality is not None:
        sample.setdefault(f"{modality}s", []).append({"bytes": data, "path": entry.name})
    elif suffix == "json":
        # Members win over what the JSON says of them.
        values = parse_object(decode(data, place, 1), place, 1)
        sample.update({key: value for key, value in values.items() if key not in sample})
    elif suffix in ("txt", "caption"):
        sample["text"] = decode(data, place, 1).strip()
    else:
        # Named, so that it is reported as a key that nobody reads.
        sample[suffix] = f"{len(data)} bytes"
