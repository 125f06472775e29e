"""`headway data` for pictures and sounds: checks multimodal records, and writes the generated set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._options import GROUP, JSON
from headway.cli._output import print_checked, print_json
from headway.media.synthetic_options import SyntheticMedia

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
    from headway.records.base import unread_counts

    schema = None
    if checks.schema is not None:
        schema = load_schema(checks.schema)

    # 0 frames: a video is checked, not turned into pictures.
    media_options = MediaOptions(checks.media_dir, video_frames=0)
    report = validate_media(paths, ValidateMediaOptions(media_options, checks.keys, schema))
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
        bad = [asdict(problem) for problem in report.bad]
        print_json(
            {
                "kind": "multimodal",
                **counts,
                "media": dict(report.media),
                "schema": checks.schema,
                "unread": unread_counts(report.unread),
                "bad": bad,
            }
        )
    else:
        print_checked(report, num_bad=report.bad_records)
        if report.good:
            counts_by_modality = [
                f"{number} {modality}" for modality, number in sorted(report.media.items())
            ]
            media = ", ".join(counts_by_modality) or "no media"
            typer.echo(
                f"{report.captions} captions and {report.conversations} conversations with "
                f"{media}; {report.text_only} of text alone"
            )
    if report.bad:
        raise typer.Exit(1)


def synthetic_media(
    out: Path = typer.Argument(..., metavar="OUT", help="The folder of the new set."),
    options: SyntheticMedia = GROUP,
    json: bool = JSON,
) -> None:
    """Write a small set of pictures (shapes, colours, places) and tones with captions and questions, to try things out."""
    from headway.media.synthetic import write_media

    files = write_media(out, options)
    if json:
        print_json(files)
    else:
        for name, path in files.items():
            typer.echo(f"{name}: {path}")


VERBS = {"data synthetic-media": synthetic_media}
