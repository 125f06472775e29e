"""Answers about media are compared with those of the records; blank media, schemas and bad records are counted."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.errors import ConfigError, DataError
from headway.eval import multimodal
from headway.eval.multimodal import BLANKS, MultimodalPlan, as_json, evaluate_multimodal
from headway.infer.media import MediaQuestion
from headway.media.items import MediaRef, decode_audio, decode_image
from headway.media.schema import AnswerSchema
from headway.media.synthetic import SyntheticMedia, write_media

SEEING: Any = None
"""Stands for a model; its answers are made below."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records, and a model that gives the right answer where it sees and `red` where media are blank."""

    def answer(
        loaded: Any, questions: list[MediaQuestion], template: str, options: Any
    ) -> list[Any]:
        blank = set(BLANKS.values())
        return [
            SimpleNamespace(
                text="red"
                if any(ref.data in blank for ref in question.media)
                else question.expected
            )
            for question in questions
        ]

    monkeypatch.setattr(multimodal, "answer_media", answer)
    return write_media(tmp_path, SyntheticMedia(30, 2, image_size=16, seconds=0.1))["chat"]


def test_blank_media_take_away_what_was_seen(data: Path) -> None:
    report = evaluate_multimodal(SEEING, data, MultimodalPlan("chatml", blank=True))
    assert report.right == 1.0
    assert report.records == len(data.read_text().splitlines())
    assert report.blank is not None
    assert report.blank < 0.2
    scores = {question.question: question for question in report.questions}
    assert set(scores) == {
        "What colour is the shape?",
        "What shape is it?",
        "Where is the shape?",
        "What kind of tone is it?",
    }
    assert scores["What shape is it?"].blank == 0.0
    assert sum(question.records for question in report.questions) == report.records
    assert report.figures()["right"] == 1.0
    assert json.dumps(as_json(report))


def test_answers_are_limited_in_number_and_checked_against_a_schema(data: Path) -> None:
    plan = MultimodalPlan("chatml", schema=AnswerSchema({"type": "object"}), limit=5)
    report = evaluate_multimodal(SEEING, data, plan)
    assert (report.records, report.valid, report.blank) == (5, 0.0, None)
    first = report.rows[0]
    assert first.note.startswith("the answer is not JSON")
    assert first.media


def test_bad_records_are_refused_or_counted(data: Path) -> None:
    lines = data.read_text().splitlines()
    lines[1] = json.dumps({"instruction": "a", "response": "b", "image": "none.png"})
    data.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"none\.png.*--drop-bad"):
        evaluate_multimodal(SEEING, data, MultimodalPlan("chatml"))
    report = evaluate_multimodal(SEEING, data, MultimodalPlan("chatml", drop_bad=True))
    assert (report.dropped, report.records) == (1, len(lines) - 1)
    data.write_text(lines[1] + "\n")
    with pytest.raises(ConfigError, match="no record could be asked"):
        evaluate_multimodal(SEEING, data, MultimodalPlan("chatml", drop_bad=True))


def test_blank_media_are_media() -> None:
    assert decode_image(MediaRef("image", data=BLANKS["image"])).max() == 127
    assert decode_audio(MediaRef("audio", data=BLANKS["audio"])).max() == -100.0
