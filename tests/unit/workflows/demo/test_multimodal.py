"""The multimodal demo: its figures are counted by question, and a small one leaves every part and every figure behind."""

import json
from pathlib import Path

import pytest

from headway.infer.media import MediaQuestion
from headway.media.items import MediaRef
from headway.media.synthetic import ANSWERS
from headway.tokenizer.chat import Turn
from headway.workflows.demo.multimodal import (
    FIGURES,
    MediaDemo,
    right_by_question,
    run_multimodal_demo,
    without_media,
)


def test_answers_are_counted_by_question() -> None:
    asked = [
        ("What colour?", "red", "Red "),
        ("What colour?", "red", "blue"),
        ("What shape?", "ring", "ring"),
        ("What tone?", "low", ""),
    ]
    assert right_by_question(asked) == {"What colour?": 0.5, "What shape?": 1.0, "What tone?": 0.0}


def test_a_question_without_media_has_no_marks_either() -> None:
    given = MediaQuestion(
        (Turn("user", "<image>\n<audio>\nWhat is it?"),),
        (MediaRef("image", Path("a.png")),),
        "ring",
    )
    assert without_media(given) == MediaQuestion((Turn("user", "What is it?"),), (), "ring")


@pytest.mark.slow
def test_a_small_demo_states_every_figure_of_every_kind_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    found = run_multimodal_demo(
        tmp_path, MediaDemo(samples=24, heldout=6, align_steps=2, tune_steps=2)
    )
    assert found["answers"].keys() == ANSWERS.keys()
    for question, one in found["answers"].items():
        assert one["asked"] == 6 and one["chance"] == 1 / len(ANSWERS[question])
        assert all(0 <= one[name] <= 1 for name in FIGURES)
    assert (
        found["recall"].keys()
        == {"text_to_image", "image_to_text", "text_to_audio", "audio_to_text"}
        and found["candidates"] > 0
    )
    report = (tmp_path / "report.html").read_text()
    assert all(question in report for question in ANSWERS) and "left out" in report
    monkeypatch.setattr("headway.train.train", lambda *_: pytest.fail("a part was made twice"))
    again = run_multimodal_demo(tmp_path)
    assert (
        {**again, "seconds": 0}
        == {**found, "seconds": 0}
        == {**json.loads((tmp_path / "summary.json").read_text()), "seconds": 0}
    )
