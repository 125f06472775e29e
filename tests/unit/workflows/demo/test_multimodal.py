"""The multimodal demo: its figures are counted by question, and a small one leaves every part and every figure behind."""

import json
from pathlib import Path

import pytest

from headway.errors import Terminated
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
    question = MediaQuestion(
        (Turn("user", "<image>\n<audio>\nWhat is it?"),),
        (MediaRef("image", Path("a.png")),),
        "ring",
    )
    assert without_media(question) == MediaQuestion((Turn("user", "What is it?"),), (), "ring")


def test_headway_stop_of_a_run_ends_the_demo_and_its_part_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("media", "align"):
        (tmp_path / f"{part}.json").write_text("{}")
    stopped = {"run": "tune", "stopped_by": "headway stop", "first_loss": 2.0, "last_loss": 1.0}
    monkeypatch.setattr("headway.train.train", lambda recipe: stopped)
    with pytest.raises(Terminated, match="headway stop ended tune"):
        run_multimodal_demo(tmp_path)
    assert not (tmp_path / "tune.json").exists()


@pytest.mark.slow
def test_a_small_demo_states_every_figure_of_every_kind_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    figures = run_multimodal_demo(
        tmp_path, MediaDemo(samples=24, heldout=6, align_steps=2, tune_steps=2)
    )
    assert figures["answers"].keys() == ANSWERS.keys()
    for question, answer in figures["answers"].items():
        assert answer["asked"] == 6
        assert answer["chance"] == 1 / len(ANSWERS[question])
        assert all(0 <= answer[name] <= 1 for name in FIGURES)
    assert figures["recall"].keys() == {
        "text_to_image",
        "image_to_text",
        "text_to_audio",
        "audio_to_text",
    }
    assert figures["candidates"] > 0
    report = (tmp_path / "report.html").read_text()
    assert all(question in report for question in ANSWERS)
    assert "left out" in report
    monkeypatch.setattr("headway.train.train", lambda *_: pytest.fail("a part was made twice"))
    again = run_multimodal_demo(tmp_path)
    assert (
        {**again, "seconds": 0}
        == {**figures, "seconds": 0}
        == {**json.loads((tmp_path / "summary.json").read_text()), "seconds": 0}
    )
