"""What a run folder holds besides its metrics: settings, events, checkpoints, reports, masks, samples, log. Plain values go out.

Only files of known kinds inside the run folder are read, each up to a bounded size; a link that leads out of it is not followed.
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
MAX_DEPTH = 4
MAX_SAMPLES = 200
MAX_TEXT = 20_000
MAX_EVENTS = 500
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
    found: list[Path] = []
    queue = [(folder, 0)]
    while queue and len(found) < MAX_FILES:
        here, depth = queue.pop(0)
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries[:2000]:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                if (
                    depth < MAX_DEPTH
                    and not entry.name.startswith(".")
                    and entry.name not in NOT_LOOKED_INTO
                ):
                    queue.append((path, depth + 1))
            elif (
                path.suffix.lower() in PICTURES or path.name == REPORT or path.suffix == ".tsv"
            ) and is_inside(path, folder):
                found.append(path)
    return found[:MAX_FILES]


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a run, one row each."""
    return {key: value for key, value in flat_values(read_recipe_file(folder)) if key}


def read_events_of(folder: Path) -> list[dict[str, Any]]:
    """The newest events, newest first."""
    events = parse_events(last_lines(folder / EVENTS, 4 * EVENT_TAIL_BYTES)[0])
    return [{"time": one.get("time"), "event": one["event"], "step": one.get("step"), "text": str(one.get("text", ""))[:2000]}
            for one in events[-MAX_EVENTS:]][::-1]  # fmt: skip


def read_log(folder: Path, size: int = LOG_BYTES) -> str:
    """The end of the run's log."""
    if not is_inside(folder / LOG, folder):
        return ""
    return last_lines(folder / LOG, min(size, LOG_BYTES))[0].decode(errors="replace")


def read_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Checkpoints and snapshots, newest first: step, bytes, when, whether complete, and the links that name them."""
    if (folder / CHECKPOINTS).is_file():  # the copy of a run elsewhere
        return _copied_checkpoints(folder)
    place = folder / "checkpoints"
    links: dict[str, list[str]] = {}
    try:
        for entry in os.scandir(place):
            if entry.is_symlink():
                links.setdefault(os.readlink(entry.path), []).append(entry.name)
    except OSError:
        pass
    found: list[dict[str, Any]] = []
    for path in step_folders(place)[::-1]:
        size, is_whole = 0, False
        try:
            for entry in os.scandir(path):
                size += entry.stat(follow_symlinks=False).st_size
                is_whole |= entry.name == MANIFEST
            when = path.stat().st_mtime
        except OSError:
            continue
        found.append({"name": path.name, "step": step_of(path), "bytes": size, "time": when, "complete": is_whole,
                      "links": sorted(links.get(path.name, []))})  # fmt: skip
    return found


def _copied_checkpoints(folder: Path) -> list[dict[str, Any]]:
    try:
        found: Any = load_json(folder / CHECKPOINTS, REPORT_BYTES)
        keys = ("name", "bytes", "time", "complete", "links")
        rows = [
            {**dict(zip(keys, one, strict=True)), "step": int(str(one[0]).rpartition("-")[2])}
            for one in found
        ]
    except (OSError, ValueError, TypeError):
        return []
    return sorted(rows, key=lambda row: -row["step"])


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Every report.md of a run with the pictures beside it."""
    files = known_files(folder)
    found: list[dict[str, Any]] = []
    for path in files:
        if path.name == REPORT:
            try:
                text = read_bounded(path, REPORT_BYTES).decode(errors="replace")
            except OSError:
                continue
            pictures = [
                str(one.relative_to(folder))
                for one in files
                if one.parent == path.parent and one.suffix.lower() in PICTURES
            ]
            found.append(
                {
                    "path": str(path.relative_to(folder)),
                    "text": text,
                    "pictures": pictures,
                    "time": path.stat().st_mtime,
                }
            )
    return found


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
    found: list[dict[str, Any]] = []
    for path in known_files(folder):
        if path.suffix == ".tsv" and (table := _table(path)):
            found.append({"path": str(path.relative_to(folder)), "table": table})
    return found


def _table(path: Path) -> list[list[float]] | None:
    try:
        rows = [
            [float(cell) for cell in line.split("\t")]
            for line in read_bounded(path, TABLE_BYTES).decode().splitlines()
            if line.strip()
        ]
    except (OSError, ValueError):
        return None
    return (
        rows
        if rows
        and all(len(row) == len(rows[0]) for row in rows)
        and len(rows) <= 1000
        and len(rows[0]) <= 1000
        else None
    )


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Texts that models of this run have written in evaluations: prompt, text, who wrote it."""
    found: list[dict[str, Any]] = []
    for path in known_files(folder):
        if path.name != REPORT or not is_inside(path.parent / RESULTS, folder):
            continue
        try:
            results = load_json(path.parent / RESULTS, RESULTS_BYTES)
        except (OSError, ValueError):
            continue
        for prompt, text, model in _texts(results):
            found.append(
                {
                    "report": str(path.relative_to(folder)),
                    "prompt": prompt[:MAX_TEXT],
                    "text": text[:MAX_TEXT],
                    "model": model,
                }
            )
            if len(found) >= MAX_SAMPLES:
                return found
    return found


def _texts(results: Any) -> Iterator[tuple[str, str, str]]:
    models = results.get("models") if isinstance(results, dict) else None
    for model in models if isinstance(models, list) else []:
        samples = model.get("samples") if isinstance(model, dict) else None
        for sample in samples if isinstance(samples, list) else []:
            if isinstance(sample, dict) and isinstance(sample.get("text"), str):
                yield str(sample.get("prompt", "")), sample["text"], str(model.get("model", ""))


def read_picture(folder: Path, name: str) -> tuple[bytes, str] | None:
    """A picture that `known_files` lists, and its type; None for any other name."""
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
        found = load_json(folder / "environment.json", 1 << 20)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
