"""`headway data` for pictures and sounds: checks multimodal records, and writes the generated set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._options import JSON
from headway.cli._output import print_json

if TYPE_CHECKING:
    from headway.text.record_keys import KeyMap


@dataclass(frozen=True)
class MultimodalChecks:
    """What `data validate --kind multimodal` checks besides the media."""

    schema: str | None
    media_dir: Path | None
    keys: KeyMap


def validate_multimodal(paths: list[str], checks: MultimodalChecks, json: bool) -> None:
    """Decode everything and report every bad record and broken file; exit code 1 if there is one."""
    from headway.media.records import MediaOptions
    from headway.media.schema import load_schema
    from headway.prepare.validate_media import ValidateMediaOptions, validate_media
    from headway.records.base import describe_unread

    schema = None if checks.schema is None else load_schema(checks.schema)
    report = validate_media(
        paths,
        ValidateMediaOptions(MediaOptions(checks.media_dir, video_frames=0), checks.keys, schema),
    )
    if json:
        counts = {
            name: getattr(report, name)
            for name in (
                "files",
                "records",
                "good",
                "bad_records",
                "captions",
                "conversations",
                "text_only",
            )
        }
        unread = {key.partition(":")[2]: number for key, number in sorted(report.unread.items())}
        bad = [asdict(one) for one in report.bad]
        print_json(
            {
                "kind": "multimodal",
                **counts,
                "media": dict(report.media),
                "schema": checks.schema,
                "unread": unread,
                "bad": bad,
            }
        )
    else:
        for one in report.bad:
            typer.echo(f"{one.place}: {one.message}")
        typer.echo(
            f"{report.records} records in {report.files} files: {report.good} good, {report.bad_records} bad"
        )
        if (unread_line := describe_unread(report.unread)) is not None:
            typer.echo(unread_line)
        if report.good:
            media = (
                ", ".join(
                    f"{number} {modality}" for modality, number in sorted(report.media.items())
                )
                or "no media"
            )
            typer.echo(
                f"{report.captions} captions and {report.conversations} conversations with {media}; {report.text_only} of text alone"
            )
    if report.bad:
        raise typer.Exit(1)


def synthetic_media(
    out: Path = typer.Argument(..., metavar="OUT", help="The folder of the new set."),
    samples: int = typer.Option(
        600, help="Scenes for training; every question about one is a conversation."
    ),
    heldout: int = typer.Option(120, help="Scenes with combinations that training never shows."),
    seed: int = typer.Option(
        0, min=0, help="Chooses the scenes; the same seed gives the same bytes."
    ),
    image_size: int = typer.Option(64, help="Width and height of a picture."),
    missing: float = typer.Option(
        0.1, help="Share of the scenes with a picture alone, and share with a sound alone."
    ),
    json: bool = JSON,
) -> None:
    """Write a small set of pictures (shapes, colours, places) and tones with captions and questions, to try things out."""
    from headway.media.synthetic import SyntheticMedia, write_media

    files = write_media(out, SyntheticMedia(samples, heldout, seed, image_size, missing=missing))
    if json:
        print_json(files)
    else:
        for name, path in files.items():
            typer.echo(f"{name}: {path}")


VERBS = {"data synthetic-media": synthetic_media}
