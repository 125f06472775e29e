"""Runs come in; one HTML file that opens offline goes out: the page of the board with its data in
it.

Its scripts and styles are those of the board's page, allowed by their checksums in the file's
content security policy; nothing else can run in it, and nothing is loaded from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.board.answers import as_json, curve_arrays, curve_head, pack
from headway.board.curves import X_AXES, Window
from headway.board.details import read_details, read_log, read_picture
from headway.board.index import build_index
from headway.board.open import DEFAULT
from headway.board.rollouts import ORDERS
from headway.board.server import page_files
from headway.board.watch import Board, Source, WatchedRun
from headway.errors import ConfigError, DataError
from headway.runtime.storage import write_atomic

POINTS = {"step": 1200, "tokens": 600, "time": 600}
"""Of a curve, by its axis: a file has no server to ask for more."""
MAX_RUNS = 64
LOG_CHARACTERS = 16_000
"""Of the end of a log."""
PICTURES_BYTES = 64 << 20
"""Of all pictures of a report; those beyond are left out."""


def write_html_report(sources: Sequence[Source], out: Path) -> dict[str, Any]:
    """Write the report; returns what it holds."""
    if out.is_dir():
        raise ConfigError(
            f"--out is {str(out)!r}, which is a folder. Give the name of a file, such as "
            f"{out / 'report.html'}."
        )

    board = Board(sources)
    try:
        runs = _complete_runs(board)
        if not runs:
            labels = ", ".join(source.label for source in sources)
            raise DataError(
                f"{labels}: no runs there. Give a run folder, such as {DEFAULT}/my-run."
            )

        if len(runs) > MAX_RUNS:
            raise ConfigError(
                f"{len(runs)} runs are given; a report holds at most "
                f"{MAX_RUNS}. Name the run folders one by one."
            )

        page = _page(_content(runs))
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, page)
        return {"report": str(out), "runs": [run.name for run in runs], "bytes": len(page.encode())}
    finally:
        board.close()


def _complete_runs(board: Board) -> list[WatchedRun]:
    """The runs with all their files copied and all their metrics read.

    A run folder itself means that run, not its stages.
    """
    for source in board.sources:
        source.refresh()
        board.look(source)
        if not source.is_here and source.problem and not source.folders():
            raise DataError(f"{source.label}: {source.problem.rstrip('.')}.")

    chosen: list[WatchedRun] = []
    for source in board.sources:
        runs = [run for run in board.runs.values() if run.source is source]
        itself = [
            run for run in runs if source.is_here and run.folder == Path(source.label).expanduser()
        ]
        chosen += itself or sorted(runs, key=lambda run: run.name)

    # Twice: the first refresh has found the runs, this one copies what is copied on demand.
    for run in chosen:
        run.source.want(run.folder)
    for source in board.sources:
        source.refresh()

    for run in chosen:
        if run.curves.wants_build:
            build_index(run.curves.path, run.curves.index.folder)
            run.curves.built()
        run.curves.update()
        run.newest = run.curves.newest()
        run.status = run.reader.read(run.newest, run.source.clock())

    return chosen


def _content(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """What the page asks a server for, of every run, as one object."""
    room = PICTURES_BYTES
    content: dict[str, Any] = {
        "now": time.time(),
        "runs": [],
        "metrics": {},
        "curves": {},
        "details": {},
        "logs": {},
        "rollouts": {},
        "pictures": {},
    }
    for run in runs:
        details = read_details(run.folder)
        content["runs"].append({**run.row(), "version": 1, "partial": False})
        content["metrics"][run.id] = run.curves.names()
        content["curves"][run.id] = {axis: _curves(run, axis) for axis in X_AXES}
        content["details"][run.id] = details
        content["logs"][run.id] = read_log(run.folder)[-LOG_CHARACTERS:]
        content["rollouts"][run.id] = _rollouts(run)
        pictures = content["pictures"][run.id] = {}
        paths = list(details["pictures"])
        for report in details["reports"]:
            paths += report["pictures"]
        for path in paths:
            picture = read_picture(run.folder, path)
            if picture is None:
                continue
            data, media_type = picture
            if len(data) <= room:
                room -= len(data)
                pictures[path] = f"data:{media_type};base64,{base64.b64encode(data).decode()}"

    return content


def _rollouts(run: WatchedRun) -> dict[str, Any] | None:
    """The distributions of what a run has sampled, and the first answers in each order."""
    pages: dict[str, Any] = {}
    figures: Any = None
    for order in ORDERS:
        view = run.rollouts.view(order, None, 0)
        if view is None:
            return None
        # One look reads a bounded piece of the journal.
        while view["figures"]["partial"]:
            view = run.rollouts.view(order, None, 0)
            if view is None:
                return None
        figures = view["figures"]
        pages[order] = view["page"]
    return {"figures": figures, "pages": pages}


def _curves(run: WatchedRun, axis: Any) -> str:
    """All curves of a run over one axis, packed as the server packs them."""
    names = [name for name in run.curves.names() if name != "step"]
    views = [run.curves.view(name, Window(axis, POINTS[axis])) for name in names]
    heads = [
        {"metric": name, "partial": False, **curve_head(view)}
        for name, view in zip(names, views, strict=True)
    ]
    arrays: list[np.ndarray] = []
    for view in views:
        arrays += curve_arrays(view)
    return base64.b64encode(pack({"series": heads}, arrays)).decode()


def _page(content: dict[str, Any]) -> str:
    """board.html with its files and its data inside."""
    files = {address: content.decode() for address, (content, _) in page_files().items()}
    html = files["/"]
    # In the order of the page: libraries come before the scripts that use them.
    script_addresses = re.findall(r'<script src="([^"]+)" defer></script>', html)
    style_addresses = re.findall(r'<link rel="stylesheet" href="([^"]+)">', html)
    script = "\n".join(files[address] for address in script_addresses)
    style = "\n".join(files[address] for address in style_addresses)
    # Checksums instead of 'self': a file on a disk has no server whose scripts it could trust.
    policy = (
        f"default-src 'none'; script-src '{_checksum(script)}'; style-src '{_checksum(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # Without `<` the data cannot end the element that holds it, whatever a run is called. The two
    # others end a line in JavaScript, but not in JSON.
    data = (
        as_json(content)
        .decode()
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    # The files themselves are in the page now.
    html = re.sub(r'<script src="/[^"]+" defer></script>\n|<link rel="[^>]*>\n', "", html)
    html = html.replace("</head>", f"{head}\n</head>").replace("headway board", "headway report")
    # The data comes first, so that the script finds it.
    tail = (
        f'<script type="application/json" id="embedded">{data}</script>\n'
        f"<script>{script}</script>\n</body>"
    )
    return html.replace("</body>", tail)


def _checksum(text: str) -> str:
    """As a content security policy has it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
