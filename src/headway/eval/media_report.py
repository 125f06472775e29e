"""A picture report: one HTML file with pictures and sounds beside answers, and retrieval examples
with ranks.

In: rows; out: a file.

    AnswerRow       media, question, answer (green if right, red if wrong), expected answer
    RetrievalRow    a query (text or media), what was wanted, its rank, what was found instead

The file is alone: thumbnails and short sounds are inside as data, there are no scripts and nothing
comes from the network. Every text is escaped. Media that cannot be shown are named.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headway.errors import ConfigError, DataError
from headway.media.items import ImageSpec, MediaRef, decode_image
from headway.media.png import write_png
from headway.media.video import decode_frames
from headway.runtime.storage import write_atomic

THUMBNAIL = 128
"""Width and height in pixels."""
SOUND_BYTES = 512 << 10
"""Longer sounds are named instead of put into the report."""
FRAMES = 4
"""Pictures of a video that are shown side by side."""
MOST_ROWS = 200
"""Of each table: every row may hold a picture, and a browser must open the file."""
GREY = (127, 127, 127)
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#1b1f24;background:#fff}
table{border-collapse:collapse;width:100%}td,th{border-top:1px solid #d8dee4;padding:.5em .6em;vertical-align:top;text-align:left}
img{display:block;margin:0 0 .3em;max-width:100%}audio{width:12em}.right{color:#116329}.wrong{color:#a40e26}.dim{color:#656d76}
pre{white-space:pre-wrap;margin:0;font:inherit}dl{display:grid;grid-template-columns:max-content auto;gap:.1em 1.2em}dd{margin:0}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}td,th{border-color:#30363d}.right{color:#3fb950}.wrong{color:#ff7b72}}
"""


@dataclass(frozen=True)
class AnswerRow:
    """One question, and what the model said."""

    question: str
    answer: str
    media: tuple[MediaRef, ...] = ()
    expected: str | None = None
    note: str = ""

    @property
    def is_right(self) -> bool | None:
        """Whether the answer is the expected one, apart from case and white space; None if nothing
        is expected.
        """
        if self.expected is None:
            return None
        return same_answer(self.answer, self.expected)


@dataclass(frozen=True)
class RetrievalRow:
    """One query among many candidates: the rank of the wanted one (1 = first), and the best ones
    with their similarity.
    """

    query: MediaRef | str
    wanted: MediaRef | str
    rank: int
    found: tuple[tuple[MediaRef | str, float], ...]


@dataclass(frozen=True)
class PictureReport:
    """What a report shows."""

    title: str
    figures: Mapping[str, object] = field(default_factory=dict)
    answers: Sequence[AnswerRow] = ()
    retrievals: Sequence[RetrievalRow] = ()


def same_answer(answer: str, expected: str) -> bool:
    """Whether two answers are the same words."""
    return answer.casefold().split() == expected.casefold().split()


def check_report_path(path: Path) -> None:
    """Refuse a file that could not be written, before work begins."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: its folder does not exist.")
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder. Give the name of an .html file.")


def write_picture_report(path: Path, report: PictureReport) -> None:
    """Write the report as one HTML file; the first 200 rows of each table are shown."""
    check_report_path(path)
    body = [f"<h1>{_text(report.title)}</h1>", _figures(report.figures)]
    if report.answers:
        answers = [_answer(row) for row in report.answers[:MOST_ROWS]]
        body += [
            "<h2>Answers</h2>",
            _table(("media", "question", "answer"), answers),
            _left_out(len(report.answers)),
        ]
    if report.retrievals:
        retrievals = [_retrieval(row) for row in report.retrievals[:MOST_ROWS]]
        body += [
            "<h2>Retrieval</h2>",
            _table(("query", "wanted", "rank", "found first"), retrievals),
            _left_out(len(report.retrievals)),
        ]

    head = f'<meta charset="utf-8"><title>{_text(report.title)}</title><style>{STYLE}</style>'
    page = [f'<!doctype html>\n<html lang="en"><head>{head}</head><body>', *body, "</body></html>"]
    write_atomic(path, "\n".join(page) + "\n")


def _left_out(rows: int) -> str:
    if rows > MOST_ROWS:
        return f'<p class="dim">{MOST_ROWS} of {rows} rows are shown.</p>'
    return ""


def _figures(figures: Mapping[str, object]) -> str:
    entries: list[str] = []
    for name, value in figures.items():
        number = str(value)
        if isinstance(value, float):
            number = f"{value:.4g}"
        entries.append(f"<dt>{_text(name)}</dt><dd>{_text(number)}</dd>")
    return f"<dl>{''.join(entries)}</dl>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are HTML already, headings are text."""
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    lines: list[str] = []
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    body = "\n".join(lines)
    return f"<table><tr>{head}</tr>{body}</table>"


def _answer(row: AnswerRow) -> tuple[str, str, str]:
    css_class = {None: "", True: "right", False: "wrong"}[row.is_right]
    answer = f'<pre class="{css_class}">{_text(row.answer)}</pre>'
    if row.is_right is False:
        answer += f'<pre class="dim">expected: {_text(row.expected or "")}</pre>'
    if row.note:
        answer += f'<p class="dim">{_text(row.note)}</p>'
    media = "".join(map(_shown, row.media)) or '<span class="dim">none</span>'
    return media, f"<pre>{_text(row.question)}</pre>", answer


def _retrieval(row: RetrievalRow) -> tuple[str, str, str, str]:
    css_class = "wrong"
    if row.rank == 1:
        css_class = "right"
    rank = f'<span class="{css_class}">{row.rank}</span>'
    candidates = "".join(
        f"<div>{_shown(candidate)} <span class='dim'>{score:.3f}</span></div>"
        for candidate, score in row.found
    )
    return _shown(row.query), _shown(row.wanted), rank, candidates


def _text(text: str) -> str:
    """Text as HTML; what UTF-8 cannot hold, such as half of a surrogate pair, becomes `?`."""
    return html.escape(text.encode("utf-8", "replace").decode())


def _shown(item: MediaRef | str) -> str:
    """A text, picture or sound as HTML. A file that is damaged or gone is named with its problem."""
    if isinstance(item, str):
        return f"<pre>{_text(item)}</pre>"
    try:
        if item.modality == "audio":
            return _sound(item)
        if item.modality == "video":
            frames = decode_frames(item, FRAMES, ImageSpec(THUMBNAIL, None, "pad"))
            return _picture(np.concatenate(list(frames), axis=2), item.name)
        thumbnail = decode_image(item, ImageSpec(THUMBNAIL, None, "pad", pad_colour=GREY))
        return _picture(thumbnail, item.name)
    except (DataError, ConfigError) as problem:
        return f'<p class="wrong">{_text(str(problem))}</p>'


def _picture(pixels: np.ndarray, name: str) -> str:
    """Pixels [3, height, width] as an image element."""
    data = base64.b64encode(write_png(pixels.transpose(1, 2, 0), compressed=True)).decode()
    return f'<img alt="{_text(name)}" title="{_text(name)}" src="data:image/png;base64,{data}">'


def _sound(item: MediaRef) -> str:
    if item.size() > SOUND_BYTES:
        return f'<p class="dim">{_text(item.name)} ({item.size()} bytes)</p>'

    # Browsers need the format; each has four bytes of its own at the beginning, all but MP3.
    data = item.read()
    formats = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg"}
    kind = formats.get(data[:4], "mpeg")
    source = f"data:audio/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<audio controls title="{_text(item.name)}" src="{source}"></audio>'
