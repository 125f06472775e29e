"""A model with its own vision tower as users ask it: generate, files of records, eval, chat and the server give the same answers."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.fuzzing import run_verb
from support.serving import serving
from support.small_vision import build_vision, write_conversations, write_vision

from headway.infer.chat_engine import EngineResponder
from headway.infer.generate import GenerateOptions
from headway.infer.load import load_model
from headway.infer.media import answer_media, question_about
from headway.media.image_header import orientation
from headway.media.items import MediaRef
from headway.media.patches import PictureSpec, grid_of, header_grid
from headway.tokenizer.chat import Turn

pytest.importorskip("transformers", minversion="5.0")
OPTIONS = GenerateOptions(max_new_tokens=8)
NEW = ("--max-new-tokens", "8")


@pytest.fixture(
    scope="module", params=["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)]
)
def workspace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service")
    model = build_vision(std=0.3, kind=request.param)
    write_vision(folder / "model", model, kind=request.param)
    write_conversations(folder)
    return folder


@pytest.fixture(scope="module")
def wanted(workspace: Path) -> list[str]:
    """The answer about each picture."""
    loaded = load_model(workspace / "model")
    paths = sorted((workspace / "pictures").iterdir())
    questions = [question_about("What?", [MediaRef("image", path)]) for path in paths]
    return [answer.text for answer in answer_media(loaded, questions, "chatml", OPTIONS)]


def test_generate_and_chat_answer_about_pictures(
    workspace: Path, wanted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(workspace / "model")
    for number, text in enumerate(wanted[:2]):
        picture = f"{workspace}/pictures/{number}.png"
        command = ["generate", "--model", model, "--image", picture, "--prompt", "What?"]
        assert run_verb([*command, "--chat-template", "chatml", *NEW, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == text

    responder = EngineResponder(load_model(workspace / "model"), "chatml")
    assert responder.takes == {"image"}
    said: list[str] = []
    ref = MediaRef("image", workspace / "pictures/1.png")
    answer = responder.answer([Turn("user", "<image>What?")], [ref], OPTIONS, said.append)
    assert answer.text == "".join(said) == wanted[1]
    # Text alone needs no positions for pictures.
    assert responder.answer([Turn("user", "Hello")], [], OPTIONS, said.append).text


def test_files_of_records_and_evaluations_read_pictures(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(workspace / "model"), "--chat-template", "chatml"]
    out = tmp_path / "answers.jsonl"
    records = ["--input", f"{workspace}/chat.jsonl", "--output", str(out)]
    assert run_verb(["generate", *model, *records, *NEW]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 4
    assert all("answer" in line for line in lines)
    capsys.readouterr()
    data = ["--data", f"{workspace}/chat.jsonl", "--blank", "--json"]
    assert run_verb(["eval", "multimodal", *model, *data, *NEW]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 4

    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"prompt": "Hello"}) + "\n")
    answers = ["--input", str(texts), "--output", str(tmp_path / "texts-out.jsonl")]
    assert run_verb(["generate", *model, *answers, *NEW]) == 0


def test_a_bad_picture_ends_one_question_in_one_line(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (3000, 5)).save(tmp_path / "long.png")
    (tmp_path / "cut.png").write_bytes((workspace / "pictures/1.png").read_bytes()[:300])
    model = ["generate", "--model", str(workspace / "model"), "--prompt", "What?", *NEW]
    for name, expected in (("long", "more than 200 times"), ("cut", "damaged or cut")):
        assert run_verb([*model, "--image", str(tmp_path / f"{name}.png")]) == 2
        text = capsys.readouterr().err
        assert expected in text
        assert len([line for line in text.splitlines() if line.startswith("error: ")]) == 1


def test_headers_say_how_pictures_are_turned(tmp_path: Path) -> None:
    spec = PictureSpec(patch=4, merge=2, min_pixels=64, max_pixels=6400)
    for number in range(9):
        for form in ("PNG", "JPEG", "WEBP"):
            image = Image.new("RGB", (96, 40))
            exif = image.getexif()
            exif[270] = "a picture" * 20
            if number:
                exif[274] = number
            stream = io.BytesIO()
            image.save(stream, form, exif=exif)
            data = stream.getvalue()
            assert orientation(data) == (number or 1)
            ref = MediaRef("image", data=data)
            assert header_grid(ref, spec) == grid_of(ref, spec)
    draw = np.random.default_rng(0)
    for begin in (b"\xff\xd8", b"\xff\xd8\xff\xe1\xff\xffExif\0\0II", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBPEXIF"):  # fmt: skip
        for length in range(60):
            assert 1 <= orientation(begin + draw.bytes(length)) <= 8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_server_answers_about_pictures_of_requests(workspace: Path, wanted: list[str]) -> None:
    def ask(server: Any, content: Any, **more: Any) -> Any:
        body = {
            "model": "seen", "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **more,
        }  # fmt: skip
        return server.client().post("/v1/chat/completions", json=body)

    def url(data: bytes) -> dict[str, Any]:
        text = base64.b64encode(data).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}

    pictures = [path.read_bytes() for path in sorted((workspace / "pictures").iterdir())]
    question = {"type": "text", "text": "What?"}
    model = ("--model", f"seen={workspace}/model", "--chat-template", "chatml")
    with serving(*model, "--device", "cpu", stand_in=False) as server:
        started = modules_of_children(server.process.pid)
        assert started.count("headway.serve.worker_process") == 2, "they decode pictures"
        assert started.count("headway.serve.grammar_check") == 1
        for data, text in zip(pictures, wanted, strict=True):
            answer = ask(server, [url(data), question]).json()
            assert answer["choices"][0]["message"]["content"] == text
        two = ask(server, [url(pictures[0]), url(pictures[1]), question])
        assert two.status_code == 200
        assert two.json()["choices"][0]["message"]["content"] not in wanted
        assert ask(server, "Hello").status_code == 200

        stream = io.BytesIO()
        Image.new("RGB", (3000, 5)).save(stream, "PNG")
        for bad in (stream.getvalue(), pictures[1][:300], b"hello"):
            refused = ask(server, [url(bad), question])
            assert refused.status_code == 400, refused.text
        fetched = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
        assert "never fetched" in ask(server, [fetched, question]).text
        assert ask(server, [url(pictures[0]), question]).status_code == 200


def modules_of_children(pid: int) -> list[str]:
    """The modules that the children of a process run (`python -m MODULE`)."""
    modules: list[str] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            modules += words[words.index("-m") + 1 :][:1] if "-m" in words else []
    return modules
