"""`data validate --kind multimodal` reports every broken file with file and line, and counts every record."""

import json
from pathlib import Path

import pytest
from support.fuzzing import run_verb

from headway.media.synthetic import SyntheticMedia, write_media
from headway.prepare.validate_media import ValidateMediaOptions, validate_media


@pytest.fixture(scope="module")
def media_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    write_media(folder, SyntheticMedia(12, 2, image_size=16, seconds=0.1))
    return folder


def test_the_generated_set_is_good(media_set: Path) -> None:
    report = validate_media(
        [media_set / "captions.jsonl", media_set / "chat.jsonl"], ValidateMediaOptions()
    )
    lines = sum(
        len((media_set / f"{name}.jsonl").read_text().splitlines()) for name in ("captions", "chat")
    )
    assert not report.bad
    assert report.records == report.good == lines
    assert report.captions == 12
    assert report.media["image"] > 30
    assert report.media["audio"] > 30


def test_every_broken_file_is_reported_with_its_line(
    media_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.png").write_bytes(
        (media_set / "images").joinpath("000001.png").read_bytes()[:300]
    )
    (tmp_path / "cut.wav").write_bytes(b"RIFF0000WAVE")
    (tmp_path / "ok.png").write_bytes((media_set / "images").joinpath("000001.png").read_bytes())
    lines = [
        json.dumps({"text": "a", "image": "ok.png"}),
        json.dumps({"text": "a", "image": "cut.png", "audio": "cut.wav"}),
        "not JSON",
        json.dumps({"text": "a", "image": "none.png"}),
        json.dumps({"text": "a", "image": "http://x/a.png"}),
        json.dumps({"text": "a", "image": "cut.png"}),
        json.dumps({"instruction": "a", "response": "{}", "image": "ok.png"}),
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "<image><image>"},
                    {"role": "assistant", "content": "b"},
                ],
                "images": ["ok.png"],
            }
        ),
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines) + "\n")
    assert run_verb(["data", "validate", str(file), "--kind", "multimodal", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["records"], report["good"], report["bad_records"]) == (8, 2, 6)
    assert [bad_record["line"] for bad_record in report["bad"]] == [2, 2, 3, 4, 5, 6, 8]
    assert (
        run_verb(
            ["data", "validate", str(file), "--kind", "multimodal", "--schema", "purrsight_v3"]
        )
        == 1
    )
    shown = capsys.readouterr().out
    assert f"{file}:7: answer has no 'diagnostic'." in shown
    assert "8 records in 1 files: 0 good, 8 bad" in shown


REPORT = {
    "diagnostic": {
        "physical_markers": {
            "ears": "forward",
            "tail": "neutral",
            "posture": "relaxed",
            "vocalization": "purr",
        },
        "classification": {
            "ethogram_group": "maintenance",
            "affective_state": "content",
            "arousal_level": "low",
            "risk_rating": 1,
        },
    },
    "behavioral_summary": "The cat rests.",
    "human_actionable_insight": "让它休息。",
}
ANSWER = json.dumps(REPORT, ensure_ascii=False)
TURNS = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": ANSWER}]


@pytest.mark.parametrize(
    ("record", "keys", "problem"),
    [
        ({"instruction": "a", "response": ANSWER, "image": "ok.png"}, None, None),
        ({"instruction": "a", "response": ANSWER}, None, "no picture, sound or video"),
        ({"instruction": "a", "response": ANSWER, "image": ""}, None, "no picture, sound or video"),
        (
            {"instruction": "a", "response": ANSWER, "images": ["ok.png"]},
            None,
            "no picture, sound or video",
        ),
        ({"prompt": "a", "response": ANSWER, "image": "ok.png"}, None, "no instruction, which"),
        (
            {"prompt": "a", "answer": ANSWER, "image": "ok.png"},
            None,
            "no instruction and no response, which",
        ),
        ({"text": "a cat", "image": "ok.png"}, None, "no instruction and no response, which"),
        (
            {"instruction": "a", "response": ANSWER.replace("1", "4.0"), "image": "ok.png"},
            None,
            "risk_rating is of type number",
        ),
        (
            {"prompt": "a", "answer": ANSWER, "image": "ok.png"},
            "prompt=prompt,response=answer",
            None,
        ),
        ({"messages": TURNS, "images": ["ok.png"]}, "messages=messages", None),
        ({"messages": TURNS}, "messages=messages", "no picture, sound or video"),
        ({"text": "a cat", "image": "ok.png"}, "messages=messages", "without a question"),
    ],
)
def test_what_purrsights_own_validator_refuses_is_refused(
    media_set: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record: dict[str, object],
    keys: str | None,
    problem: str | None,
) -> None:
    (tmp_path / "ok.png").write_bytes((media_set / "images").joinpath("000001.png").read_bytes())
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    line = ["data", "validate", str(file), "--kind", "multimodal", "--schema", "purrsight_v3"]
    if keys is not None:
        line += ["--keys", keys]
    assert run_verb(line) == (0 if problem is None else 1)
    printed = capsys.readouterr().out
    if problem is not None:
        assert f"{file}:1: " in printed
        assert problem in printed


def test_options_of_other_kinds_are_refused(media_set: Path) -> None:
    file = str(media_set / "captions.jsonl")
    assert run_verb(["data", "validate", file, "--kind", "multimodal", "--tokenizer", "x"]) == 2
    assert run_verb(["data", "validate", file, "--kind", "chat", "--schema", "purrsight_v3"]) == 2
    assert run_verb(["data", "validate", file, "--kind", "multimodal", "--schema", "none"]) == 2
    assert run_verb(["data", "validate", file, "--kind", "nothing"]) == 2


def test_the_verb_writes_the_generated_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_verb(
            [
                "data",
                "synthetic-media",
                str(tmp_path / "out"),
                "--samples",
                "3",
                "--heldout",
                "2",
                "--json",
            ]
        )
        == 0
    )
    assert Path(json.loads(capsys.readouterr().out)["chat_heldout"]).is_file()
    assert run_verb(["data", "synthetic-media", str(tmp_path / "out"), "--samples", "0"]) == 2
