"""What a run folder holds besides its metrics: settings, events, checkpoints, reports, masks,
samples, log. Plain values go out.

Only files of known kinds inside the run folder are read, each up to a bounded size; a link that
leads out of it is not followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.board.follow import last_lines
from headway.board.mirror import CHECKPOINTS
from headway.board.runs import (
    EVENT_TAIL_BYTES,
    flat_values,
    parse_events,
    read_recipe_file,
    read_summary_file,
)
from headway.checkpoint.load import step_folders, step_of
from headway.checkpoint.manifest import MANIFEST
from headway.eval.report import REPORT, RESULTS
from headway.runtime.json_file import load_json, read_bounded
from headway.track.events import EVENTS
from headway.train.settings_page import changed_settings

LOG = "train.log"
LOG_BYTES = 96 << 10
REPORT_BYTES = 1 << 20
RESULTS_BYTES = 32 << 20
PICTURE_BYTES = 16 << 20
TABLE_BYTES = 256 << 10
MAX_FILES = 400
"""Reports, pictures and tables of a run."""
MAX_ENTRIES = 2000
"""Of one folder."""
MAX_DEPTH = 4
MAX_SAMPLES = 200
MAX_TEXT = 20_000
"""Characters of a sample."""
MAX_EVENTS = 500
MAX_EVENT_TEXT = 2000
MAX_TABLE = 1000
"""Rows and columns of a table."""
PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
NOT_LOOKED_INTO = {"checkpoints", "final", "logs", "tensorboard", "tokenizer", "stages", "code"}


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a file lies in a folder once all links are followed."""
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError):
        return False


def known_files(folder: Path) -> list[Path]:
    """Reports, pictures and mask tables of a run, bounded in number and depth."""
    paths: list[Path] = []
    queue = [(folder, 0)]
    while queue and len(paths) < MAX_FILES:
        subfolder, depth = queue.pop(0)
        try:
            entries = sorted(os.scandir(subfolder), key=lambda entry: entry.name)
        except OSError:
            continue

        for entry in entries[:MAX_ENTRIES]:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                is_skipped = entry.name.startswith(".") or entry.name in NOT_LOOKED_INTO
                if depth < MAX_DEPTH and not is_skipped:
                    queue.append((path, depth + 1))
                continue

            is_known = (
                path.suffix.lower() in PICTURES or path.name == REPORT or path.suffix == ".tsv"
            )
            if is_known and is_inside(path, folder):
                paths.append(path)

    return paths[:MAX_FILES]


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a run, one row each."""
    return {key: value for key, value in flat_values(read_recipe_file(folder)) if key}


def read_events_of(folder: Path) -> list[dict[str, Any]]:
    """The newest events, newest first."""
    # More than the list of runs needs: this is one run that somebody looks at.
    events = parse_events(last_lines(folder / EVENTS, 4 * EVENT_TAIL_BYTES)[0])
    rows: list[dict[str, Any]] = []
    for event in reversed(events[-MAX_EVENTS:]):
        text = str(event.get("text", ""))[:MAX_EVENT_TEXT]
        rows.append(
            {
                "time": event.get("time"),
                "event": event["event"],
                "step": event.get("step"),
                "text": text,
            }
        )
    return rows


def read_log(folder: Path, size: int = LOG_BYTES) -> str:
    """The end of the run's log."""
    # A log may be a link to any file of this machine.
    if not is_inside(folder / LOG, folder):
        return ""
    return last_lines(folder / LOG, min(size, LOG_BYTES))[0].decode(errors="replace")


def read_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Checkpoints and snapshots, newest first: step, bytes, when, whether complete, and the links
    that name them.
    """
    # In the copy of a run elsewhere: checkpoints are not copied, their list is.
    if (folder / CHECKPOINTS).is_file():
        return _copied_checkpoints(folder)

    checkpoints_folder = folder / "checkpoints"
    # `latest` and others are links to the folders of steps.
    links: dict[str, list[str]] = {}
    try:
        for entry in os.scandir(checkpoints_folder):
            if entry.is_symlink():
                links.setdefault(os.readlink(entry.path), []).append(entry.name)
    except OSError:
        pass

    rows: list[dict[str, Any]] = []
    for path in step_folders(checkpoints_folder)[::-1]:
        size = 0
        is_complete = False
        try:
            for entry in os.scandir(path):
                size += entry.stat(follow_symlinks=False).st_size
                is_complete |= entry.name == MANIFEST
            changed_at = path.stat().st_mtime
        except OSError:
            continue  # removed meanwhile

        rows.append(
            {
                "name": path.name,
                "step": step_of(path),
                "bytes": size,
                "time": changed_at,
                "complete": is_complete,
                "links": sorted(links.get(path.name, [])),
            }
        )

    return rows


def _copied_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The same from the list beside a copy. Another machine wrote it: nothing in it is certain."""
    keys = ("name", "bytes", "time", "complete", "links")
    rows: list[dict[str, Any]] = []
    try:
        listed: Any = load_json(folder / CHECKPOINTS, REPORT_BYTES)
        for values in listed:
            row = dict(zip(keys, values, strict=True))
            rows.append({**row, "step": int(str(values[0]).rpartition("-")[2])})
    except (OSError, ValueError, TypeError):
        return []
    return sorted(rows, key=lambda row: -row["step"])


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Every report.md of a run with the pictures beside it."""
    files = known_files(folder)
    reports: list[dict[str, Any]] = []
    for path in files:
        if path.name != REPORT:
            continue
        try:
            text = read_bounded(path, REPORT_BYTES).decode(errors="replace")
        except OSError:
            continue

        pictures = [
            str(file.relative_to(folder))
            for file in files
            if file.parent == path.parent and file.suffix.lower() in PICTURES
        ]
        reports.append(
            {
                "path": str(path.relative_to(folder)),
                "text": text,
                "pictures": pictures,
                "time": path.stat().st_mtime,
            }
        )

    return reports


def read_pictures(folder: Path) -> list[str]:
    """Pictures that no report shows."""
    files = known_files(folder)
    reports = {path.parent for path in files if path.name == REPORT}
    return [
        str(path.relative_to(folder))
        for path in files
        if path.suffix.lower() in PICTURES and path.parent not in reports
    ]


def read_mask_tables(folder: Path) -> list[dict[str, Any]]:
    """Tables of head masks or gates: a row per layer, a number per KV head."""
    tables: list[dict[str, Any]] = []
    for path in known_files(folder):
        if path.suffix == ".tsv" and (table := _table(path)):
            tables.append({"path": str(path.relative_to(folder)), "table": table})
    return tables


def _table(path: Path) -> list[list[float]] | None:
    """A rectangle of numbers; None where a file is anything else."""
    rows: list[list[float]] = []
    try:
        for line in read_bounded(path, TABLE_BYTES).decode().splitlines():
            if line.strip():
                rows.append([float(cell) for cell in line.split("\t")])
    except (OSError, ValueError):
        return None

    if not rows or len(rows) > MAX_TABLE or len(rows[0]) > MAX_TABLE:
        return None
    if any(len(row) != len(rows[0]) for row in rows):
        return None
    return rows


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Texts that models of this run have written in evaluations: prompt, text, who wrote it."""
    samples: list[dict[str, Any]] = []
    for path in known_files(folder):
        if path.name != REPORT or not is_inside(path.parent / RESULTS, folder):
            continue

        try:
            results = load_json(path.parent / RESULTS, RESULTS_BYTES)
        except (OSError, ValueError):
            continue

        # Texts are cut, since one evaluation may have written megabytes.
        for prompt, text, model in _texts(results):
            samples.append(
                {
                    "report": str(path.relative_to(folder)),
                    "prompt": prompt[:MAX_TEXT],
                    "text": text[:MAX_TEXT],
                    "model": model,
                }
            )
            if len(samples) >= MAX_SAMPLES:
                return samples

    return samples


def _texts(results: Any) -> Iterator[tuple[str, str, str]]:
    """Prompt, text and model of each sample in a results.json, whatever else it holds."""
    for model in _listed(results, "models"):
        for sample in _listed(model, "samples"):
            if isinstance(sample, dict) and isinstance(sample.get("text"), str):
                yield str(sample.get("prompt", "")), sample["text"], str(model.get("model", ""))


def _listed(value: Any, key: str) -> list[Any]:
    """The list at a key of a mapping; empty where either is something else."""
    if isinstance(value, dict) and isinstance(value.get(key), list):
        return value[key]
    return []


def read_picture(folder: Path, name: str) -> tuple[bytes, str] | None:
    """A picture that `known_files` lists, and its type; None for any other name."""
    # The name comes from a request: it is compared, never opened.
    for path in known_files(folder):
        if path.suffix.lower() in PICTURES and str(path.relative_to(folder)) == name:
            try:
                return read_bounded(path, PICTURE_BYTES), PICTURES[path.suffix.lower()]
            except OSError:
                return None
    return None


def read_details(folder: Path) -> dict[str, Any]:
    """Everything about one run but its curves and its log."""
    return {
        "folder": str(folder),
        "config": read_config(folder),
        "changed": changed_settings(read_recipe_file(folder)),
        "summary": read_summary_file(folder),
        "events": read_events_of(folder),
        "checkpoints": read_checkpoints(folder),
        "reports": read_reports(folder),
        "pictures": read_pictures(folder),
        "masks": read_mask_tables(folder),
        "samples": read_samples(folder),
        "command": _text(folder / "command.txt"),
        "environment": _environment(folder),
    }


def _text(path: Path) -> str:
    try:
        return read_bounded(path, 64 << 10).decode(errors="replace").strip()
    except OSError:
        return ""


def _environment(folder: Path) -> dict[str, Any]:
    try:
        environment = load_json(folder / "environment.json", 1 << 20)
    except (OSError, ValueError):
        return {}
    return environment if isinstance(environment, dict) else {}
