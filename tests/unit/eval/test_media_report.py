"""The picture report is one HTML file without scripts; hostile texts and broken media are shown as text."""

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.eval.media_report import (
    MOST_ROWS,
    AnswerRow,
    PictureReport,
    RetrievalRow,
    same_answer,
    write_picture_report,
)
from headway.media.items import MediaRef
from headway.media.png import write_png
from headway.media.sound import write_wave

PICTURE = MediaRef("image", data=write_png(np.full((128, 128, 3), 200, np.uint8)), name="a.png")
SOUND = MediaRef("audio", data=write_wave(np.zeros(800, np.float32), 8000), name="a.wav")
BROKEN = MediaRef("image", data=b"<script>", name="<b>x</b>")
HOSTILE = "</pre><script>alert(1)</script>\ud800"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_media_stand_beside_answers_and_ranks(tmp_path: Path) -> None:
    answers = [
        AnswerRow("What?", "Red ", (PICTURE, SOUND), "red"),
        AnswerRow(HOSTILE, HOSTILE, (BROKEN,), "blue"),
    ]
    retrievals = [
        RetrievalRow(PICTURE, "a red circle", 2, (("a blue circle", 0.9), ("a red circle", 0.8)))
    ]
    write_picture_report(
        tmp_path / "r.html",
        PictureReport("A & B", {"accuracy": 0.5, "answers": 2}, answers, retrievals),
    )
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    tags = Tags(text)
    assert {tag for tag, _ in tags.tags} & {"script", "link", "iframe", "b"} == set()
    assert [tag for tag, _ in tags.tags].count("img") == 2
    assert [tag for tag, _ in tags.tags].count("audio") == 1
    assert all((attrs.get("src") or "data:").startswith("data:") for _, attrs in tags.tags)
    assert '<pre class="right">Red ' in text
    assert "expected: blue" in text
    assert "not a PNG, JPEG or WebP picture" in text
    assert '<span class="wrong">2</span>' in text
    assert "A &amp; B" in text


def test_long_tables_say_what_is_left_out(tmp_path: Path) -> None:
    write_picture_report(
        tmp_path / "r.html", PictureReport("x", answers=[AnswerRow("a", "b")] * (MOST_ROWS + 5))
    )
    assert f"{MOST_ROWS} of {MOST_ROWS + 5} rows are shown" in (tmp_path / "r.html").read_text()
    with pytest.raises(ConfigError, match="its folder does not exist"):
        write_picture_report(tmp_path / "none" / "r.html", PictureReport("x"))


def test_answers_are_compared_by_their_words() -> None:
    assert same_answer(" On  the LEFT", "on the left")
    assert not same_answer("red", "reddish")
