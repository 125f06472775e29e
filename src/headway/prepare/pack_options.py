"""How documents are packed: what `prepare/pack.py` takes, and the options of `headway data pack`.

A module of its own, because the command line imports it for every help, without numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from headway.config.options import option
from headway.errors import ConfigError

Mode = Literal["concat", "best_fit", "prulong"]


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"--split-by-lengths is {text!r}; it must be numbers, e.g. 1024,4096.")
    return tuple(map(int, parts))


@dataclass(frozen=True)
class PackOptions:
    """How documents are packed."""

    pack_length: int = option(..., "Tokens of a pack.")
    mode: Mode = option(
        "concat",
        "concat: concatenate and cut; best_fit: whole documents; prulong: as ProLong's tools pack.",
    )
    min_length: int = option(
        1,
        "concat, best_fit: drop shorter documents; prulong: drop shorter rests of cut documents.",
    )
    overlap: int = option(0, "prulong: the rest of a cut document begins this many tokens earlier.")
    """But not before its document."""
    split_by_lengths: tuple[int, ...] = option(
        (),
        "prulong: cut documents to these lengths first, e.g. 1024,4096.",
        metavar="N,N",
        written="",
        read=_lengths,
    )
    """Each document is cut into slices of the longest of these lengths that fits; a shorter rest is
    dropped."""
    intact: bool = option(False, "prulong: drop the rest of a cut document.", "--intact")
    keep_last: bool | None = option(
        None,
        "The last, partly filled pack; default: kept, in prulong dropped.",
        "--keep-last/--drop-last",
    )
    to: Literal["headway", "mds"] = option("headway", "Format of the result: headway or mds.")
    compression: str | None = option(None, "To mds: zstd or zstd:LEVEL.")
    workers: int = option(2, "Threads that read.", min=1)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"mode is {self.mode!r}; it must be one of {', '.join(get_args(Mode))}."
            )
        for name, least in (("pack_length", 2), ("min_length", 1), ("workers", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}.")

        # An option that would do nothing is refused, not ignored.
        for name in ("overlap", "split_by_lengths", "intact"):
            if getattr(self, name) and self.mode != "prulong":
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; only mode prulong uses it. Use --mode "
                    "prulong, or leave it out."
                )

        # With an overlap of a whole pack, packing a cut document would never end.
        if not 0 <= self.overlap < self.pack_length:
            raise ConfigError(
                f"overlap is {self.overlap}; it must be from 0 to pack_length - 1 = "
                f"{self.pack_length - 1}."
            )
        if any(length < 1 for length in self.split_by_lengths):
            raise ConfigError(
                f"split_by_lengths is {list(self.split_by_lengths)}; lengths must be positive."
            )

        if self.to not in ("headway", "mds"):
            raise ConfigError(f"--to is {self.to!r}; packs are written as headway or mds.")
        if self.compression is not None and self.to != "mds":
            raise ConfigError(
                f"compression is {self.compression!r}; only --to mds uses it. Leave it out."
            )
        if self.keep_last is False and self.mode == "best_fit":
            raise ConfigError(
                "keep_last is false, but best_fit has no partly filled last pack. Leave it out."
            )
