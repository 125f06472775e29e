"""The chat page in a real Chromium: send, stop, edit, regenerate, compare, upload, refresh; and what a model says stays text."""

import base64
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_page import IDLE, READY, ask, choose_files, click, key, reload, texts, write
from support.chromium import PROGRAM, Page, browser
from support.stand_in_chat_server import StandInChatServer, stand_in_chat_server

pytestmark = [pytest.mark.drill, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def double() -> Iterator[StandInChatServer]:
    with stand_in_chat_server() as server:
        yield server


@pytest.fixture
def page(double: StandInChatServer) -> Iterator[Page]:
    with browser() as open_page:
        open_page.resize(1300, 900)
        open_page.open(double.address)
        open_page.wait_for(READY)
        yield open_page


def only_the_server_was_asked(page: Page, double: StandInChatServer) -> bool:
    return not [
        request
        for request in page.requests
        if not request.startswith((double.address, "about:", "data:image/png", "data:audio/"))
    ]


def test_a_conversation_is_sent_streamed_edited_answered_again_and_kept(
    page: Page, double: StandInChatServer
) -> None:
    write(page, "one")
    key(page, "Enter", shift=True)
    write(page, "two")
    assert page.evaluate("document.querySelector('#message').value") == "one\ntwo"
    assert double.bodies == []
    double.seconds_per_piece = 0.05
    double.answers["one\ntwo"] = "Streams piece by piece. " * 4
    key(page, "Enter")
    page.wait_for(
        "document.querySelector('.markdown')?.textContent.includes('piece') && headwayChat.isBusy"
    )
    page.wait_for(IDLE)
    double.seconds_per_piece = 0.0
    assert texts(page, ".markdown") == [" ".join(["Streams piece by piece."] * 4)]
    assert "24 tokens ·" in texts(page, ".stats")[0]
    assert "tokens/s" in texts(page, ".stats")[0]
    assert "7 from cache" in texts(page, ".stats")[0]
    assert "322 tokens/s" in texts(page, ".live")[0]
    assert "cache 3 MB / 1 GB" in texts(page, ".live")[0]
    ask(page, "next")
    sent = double.bodies[-1]
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["temperature"] == 0.7
    assert "top_k" not in sent
    _edits(page, double)
    _answers_again(page, double)
    _keeps(page, double)
    assert page.problems == []
    assert only_the_server_was_asked(page, double)


def _edits(page: Page, double: StandInChatServer) -> None:
    click(page, ".turn:first-child [aria-label=Edit]")
    page.evaluate("document.querySelector('.editor textarea').value = 'edited'")
    page.evaluate("document.querySelector('.editor .primary').click()")
    page.wait_for(IDLE)
    assert texts(page, ".markdown") == ["You said: edited"]
    assert [message["content"] for message in double.bodies[-1]["messages"]] == ["edited"]
    click(page, ".question [aria-label='Previous version']")
    page.wait_for("document.querySelectorAll('.markdown').length === 2")
    assert texts(page, ".bubble") == ["one\ntwo", "next"], "the earlier version keeps what followed"


def _answers_again(page: Page, double: StandInChatServer) -> None:
    double.answers["next"] = "another"
    click(page, ".turn:last-child [aria-label='Answer again']")
    page.wait_for("document.querySelectorAll('.answer .stepper').length === 1 && " + IDLE)
    assert texts(page, ".turn:last-child .markdown") == ["another"]
    assert texts(page, ".answer .stepper") == ["2 of 2"]
    click(page, ".answer [aria-label='Previous version']")
    page.wait_for(
        "document.querySelector('.turn:last-child .markdown').textContent === 'You said: next'"
    )


def _keeps(page: Page, double: StandInChatServer) -> None:
    click(page, "header [aria-label=Settings]")
    page.evaluate(
        "(() => { const one = document.querySelector('#system'); one.value = 'Be brief.'; one.dispatchEvent(new Event('input')); })()"
    )
    for name, value in (("temperature", "0"), ("seed", "5"), ("top_k", "-4")):
        field = f"document.querySelector('[name={name}]')"
        page.evaluate(f"{field}.value = {value!r}; {field}.dispatchEvent(new Event('change'))")
    assert (
        page.evaluate("document.querySelector('[name=top_k]').getAttribute('aria-invalid')")
        == "true"
    )
    shown = "JSON.stringify([...document.querySelectorAll('.bubble, .markdown, .stepper')].map((one) => one.textContent))"
    before = page.evaluate(shown)
    reload(page)
    page.wait_for("document.querySelectorAll('.markdown').length === 2")
    assert page.evaluate(shown) == before
    assert page.evaluate("document.querySelector('#system').value") == "Be brief."
    ask(page, "after")
    sent = double.bodies[-1]
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (
        sent["temperature"],
        sent["seed"],
    ) == (0, 5)
    assert "top_k" not in sent, "what is out of its range is not taken"


def test_an_answer_is_stopped_and_what_was_said_stays(
    page: Page, double: StandInChatServer
) -> None:
    double.answers["long"] = "word " * 5000
    double.seconds_per_piece = 0.02
    for stop in (lambda: key(page, "Escape"), lambda: click(page, ".stop")):
        write(page, "long")
        key(page, "Enter")
        page.wait_for(
            "[...document.querySelectorAll('.markdown')].at(-1)?.textContent.length > 20 && headwayChat.isBusy"
        )
        stop()
        page.wait_for(IDLE)
    assert all("stopped" in text for text in texts(page, ".stats"))
    assert all("word word" in text for text in texts(page, ".markdown"))
    end = time.monotonic() + 5
    while double.disconnects < 2:
        assert time.monotonic() < end, "the server sees that nobody listens"
        time.sleep(0.05)
    write(page, "long")
    key(page, "Enter")
    page.wait_for(
        "document.querySelectorAll('.markdown').length === 3 && document.querySelectorAll('.markdown')[2].textContent.length > 20"
    )
    reload(page)  # in the middle of an answer
    page.wait_for("document.querySelectorAll('.markdown').length === 3")
    assert "word" in texts(page, ".markdown")[2]
    assert "stopped" in texts(page, ".stats")[2]


EVIL = """<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2"> <svg onload=window.hacked=3>
[click](javascript:window.hacked=4) [click](JAVASCRIPT:window.hacked=4) <javascript:window.hacked=5>
[a](data:text/html,<script>window.hacked=6</script>)
![x](http://evil.example/steal.png) <iframe src="javascript:window.hacked=7"></iframe> [ok](https://example.org/"onmouseover="window.hacked=8)

```html"><img src=x onerror=window.hacked=9>
</code></pre><script>window.hacked = 10</script>
```

| <b onclick=window.hacked=11>a</b> | b |
|---|---|
| <script>window.hacked=12</script> | [x](vbscript:x) |
"""


def test_what_a_model_says_stays_text(page: Page, double: StandInChatServer) -> None:
    double.answers["evil"] = EVIL
    ask(page, "evil")
    ask(page, "<img src=x onerror=window.hacked=13>")
    page.evaluate(
        "document.querySelectorAll('.markdown a').forEach((one) => one.dispatchEvent(new MouseEvent('mouseover')))"
    )
    assert page.evaluate("window.hacked === undefined")
    assert (
        page.evaluate(
            "document.querySelectorAll('.thread :is(script, img, iframe, svg:not(.icon), b)').length"
        )
        == 0
    )
    links = json.loads(
        page.evaluate(
            "JSON.stringify([...document.querySelectorAll('.markdown a')].map((one) => [one.protocol, one.rel, one.target]))"
        )
    )
    assert links
    assert all(
        link[0] in ("http:", "https:") and "noopener" in link[1] and link[2] == "_blank"
        for link in links
    )
    assert "<script>window.hacked = 1</script>" in texts(page, ".markdown")[0]
    assert "javascript:window.hacked=4" in texts(page, ".markdown")[0]
    assert page.evaluate(
        "[...document.querySelectorAll('.thread *')].every((one) => one.getAttributeNames().every((name) => !name.startsWith('on')))"
    )
    assert page.problems == []
    assert only_the_server_was_asked(page, double)


def test_two_models_answer_side_by_side_each_after_its_own_turns(
    page: Page, double: StandInChatServer
) -> None:
    click(page, "[aria-label='Compare two models']")
    ask(page, "hello")
    assert texts(page, ".answer .name") == ["cat", "dog"]
    assert {body["model"] for body in double.bodies} == {"cat", "dog"}
    corner = "(one) => { const box = one.getBoundingClientRect(); return [box.left, box.top]; }"
    boxes = json.loads(
        page.evaluate(f"JSON.stringify([...document.querySelectorAll('.answer')].map({corner}))")
    )
    assert boxes[0][1] == boxes[1][1]
    assert boxes[1][0] > boxes[0][0] + 200
    double.answers["hello"] = "dog's other answer"
    click(page, ".answer:last-child [aria-label='Answer again']")
    page.wait_for("document.querySelectorAll('.stepper').length === 1 && " + IDLE)
    ask(page, "more")
    told = {body["model"]: body["messages"][1]["content"] for body in double.bodies[-2:]}
    assert told == {"cat": "You said: hello", "dog": "dog's other answer"}
    page.resize(360, 740)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    reload(page)
    assert texts(page, ".answer .name") == ["cat", "dog", "cat", "dog"]


def test_pictures_and_sounds_go_where_a_model_takes_them(
    page: Page, double: StandInChatServer, tmp_path: Path
) -> None:
    picture = tmp_path / "p.png"
    sound = tmp_path / "s.wav"
    text = tmp_path / "t.txt"
    picture.write_bytes(base64.b64decode(PIXEL))
    sound.write_bytes(b"RIFF....WAVE")
    text.write_text("no")
    choose_files(page, ".composer input[type=file]", picture, sound, text)
    page.wait_for("document.querySelectorAll('.chosen img, .chosen audio').length === 2")
    assert "does not take t.txt" in texts(page, ".composer .problem")[0]
    ask(page, "What is this?")
    parts = double.bodies[-1]["messages"][0]["content"]
    assert parts[0] == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    assert parts[1] == {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(sound.read_bytes()).decode(), "format": "wav"},
    }
    assert parts[2] == {"type": "text", "text": "\nWhat is this?"}
    page.wait_for("document.querySelector('.question img').naturalWidth === 1")
    assert page.evaluate(
        "document.querySelector('.question audio') !== null && document.querySelector('.chosen').children.length === 0"
    )
    reload(page)
    page.wait_for("document.querySelector('.question img')?.naturalWidth === 1")
    page.evaluate(
        "(() => { const one = document.querySelector('header select'); one.value = 'dog'; one.dispatchEvent(new Event('change')); })()"
    )
    assert page.evaluate("document.querySelector('.composer [aria-label^=Attach]').hidden"), (
        "dog takes text alone"
    )
    assert [problem for problem in page.problems if "audio" not in problem] == []


def test_errors_are_one_line_with_a_retry_and_a_full_context_drops_the_oldest_turns(
    page: Page, double: StandInChatServer
) -> None:
    double.failures = 1
    ask(page, "first")
    assert texts(page, ".answer .problem") == ["The queue is full. (1 s)Try again"]
    assert texts(page, ".markdown") == [""]
    click(page, ".answer .problem button")
    page.wait_for(
        "document.querySelector('.markdown').textContent === 'You said: first' && " + IDLE
    )
    double.cut_after = 2
    ask(page, "second")
    assert "connection ended" in texts(page, ".answer .problem")[1]
    assert texts(page, ".markdown")[1] == "You said"
    double.cut_after = None
    click(page, ".turn:last-child .problem button")
    page.wait_for(
        "document.querySelectorAll('.markdown')[1].textContent === 'You said: second' && " + IDLE
    )
    double.fits = 3
    ask(page, "third")
    assert [message["content"] for message in double.bodies[-1]["messages"]] == [
        "second",
        "You said: second",
        "third",
    ]
    assert texts(page, ".answer .note")[2] == "The context is full: the oldest turn was left out."
    asked = len(double.bodies)
    ask(page, "fourth")
    assert len(double.bodies) == asked + 2, "what was left out before is not tried again"


def test_a_token_is_asked_for_and_lasts_as_long_as_the_tab(double: StandInChatServer) -> None:
    double.token = "secret"
    with browser() as page:
        page.open(double.address)
        page.wait_for(
            "document.querySelector('.signin') && !document.querySelector('.signin').hidden"
        )
        for token, says in (("wrong", "does not take this token"), ("secret", "")):
            page.evaluate(
                f"document.querySelector('#token').value = {token!r}; document.querySelector('.signin').requestSubmit()"
            )
            page.wait_for(
                f"document.querySelector('.signin').textContent.includes({says!r}) || document.querySelector('.signin').hidden"
            )
        page.wait_for(READY)
        ask(page, "hi")
        reload(page)
        assert texts(page, ".markdown") == ["You said: hi"]
        assert page.evaluate("document.querySelector('.signin').hidden")
        assert page.evaluate("JSON.stringify(localStorage).includes('secret')") is False


def test_conversations_are_renamed_deleted_exported_and_imported(
    page: Page, double: StandInChatServer, tmp_path: Path
) -> None:
    ask(page, "alpha")
    click(page, ".new")
    ask(page, "beta")
    page.wait_for("document.querySelectorAll('.chats li').length === 2")
    click(page, ".chats li.open [aria-label=Rename]")
    page.evaluate("document.querySelector('.renaming').value = '<b>name</b>'")
    key(page, "Enter")
    page.wait_for("document.querySelector('.chats li.open .chat')?.textContent === '<b>name</b>'")
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    click(page, ".chats li.open [aria-label='Export this conversation']")
    saved = _download(page, tmp_path)
    assert [message["content"] for message in saved["messages"]] == ["beta", "You said: beta"]
    for _ in range(2):  # the second click is sure
        click(page, ".chats li.open [aria-label=Delete]")
    page.wait_for("document.querySelectorAll('.chats li').length === 1")
    (tmp_path / "in.json").write_text(json.dumps(saved))
    (tmp_path / "bad.json").write_text("[1]")
    (tmp_path / "plain.json").write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
        )
    )
    choose_files(
        page,
        ".sidebar input[type=file]",
        tmp_path / "in.json",
        tmp_path / "bad.json",
        tmp_path / "plain.json",
    )
    page.wait_for(
        "document.querySelectorAll('.chats li').length === 3 && document.querySelector('.markdown')?.textContent === 'y'"
    )
    assert "bad.json is not a conversation" in texts(page, ".sidebar > .note")[0]
    assert "2 imported." in texts(page, ".sidebar > .note")[0]
    assert page.problems == []


def _download(page: Page, folder: Path) -> Any:
    end = time.monotonic() + 10
    while not (downloads := [name for name in os.listdir(folder) if name.endswith(".json")]):
        page.evaluate("1")
        assert time.monotonic() < end
        time.sleep(0.05)
    return json.loads((folder / downloads[0]).read_text())


def test_the_real_server_streams_stops_compares_and_keeps(tmp_path: Path) -> None:
    for name in ("starlette", "uvicorn", "httpx"):
        pytest.importorskip(name)
    from support.byte_model import CONFIG, byte_tokenizer, write_model
    from support.serving import serving

    folder = write_model(
        tmp_path, CONFIG.with_(max_seq_len=256), byte_tokenizer("<|im_start|>", "<|im_end|>")
    )
    models = (
        "--model",
        f"cat={folder}",
        "--model",
        f"dog={folder}",
        "--chat-template",
        "chatml",
        "--max-running",
        "2",
    )
    with serving(*models, stand_in=False) as server, browser() as page:
        page.resize(1300, 900)
        page.open(f"{server.url}/")
        page.wait_for(READY, 60)
        page.evaluate(
            "Object.assign(headwayChat.conversation.sampling, { temperature: 0, max_tokens: 12 })"
        )
        ask(page, "hi")
        chosen = {
            "model": "cat",
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0,
            "max_tokens": 12,
        }
        answer = (
            server.client()
            .post("/v1/chat/completions", json=chosen)
            .json()["choices"][0]["message"]["content"]
        )
        kept = "headwayChat.session.store.read(headwayChat.conversation.id).then((one) => Object.values(one.turns)[0].answers[0][0].text)"
        assert page.evaluate(kept) == answer
        assert "first after" in texts(page, ".stats")[0]
        page.wait_for("document.querySelector('.live').textContent.includes('cache')")
        click(page, "[aria-label='Compare two models']")
        ask(page, "more")
        assert texts(page, ".answer .name") == ["cat", "cat", "dog"]
        assert texts(page, ".answer .problem") == ["", "", ""]
        first, second = texts(page, ".answer .markdown")[1:]
        assert first == second, "the same weights, greedy"
        for number in range(8):
            ask(page, f"a longer question {number}")
        assert any("context is full" in text for text in texts(page, ".answer .note")), (
            "the oldest turns are left out"
        )
        assert set(texts(page, ".answer .problem")) == {""}
        reload(page)
        assert len(texts(page, ".bubble")) == 10
        assert [problem for problem in page.problems if "400" not in problem] == []
        assert not [
            request for request in page.requests if not request.startswith((server.url, "about:"))
        ]


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(
    page: Page, double: StandInChatServer
) -> None:
    double.answers["long"] = "word " * 5000
    double.seconds_per_piece = 0.02
    write(page, "long")
    key(page, "Enter")
    page.wait_for("document.querySelector('.markdown')?.textContent.length > 20")
    for _ in range(2):  # the second click is sure
        click(page, ".chats li.open [aria-label=Delete]")
    page.wait_for(
        "document.querySelectorAll('.chats li').length === 0 && headwayChat.session.running.size === 0"
    )
    reload(page)
    assert texts(page, ".chats li") == []
    assert texts(page, ".bubble") == []


def test_an_edit_keeps_its_text_while_another_answer_comes(
    page: Page, double: StandInChatServer
) -> None:
    ask(page, "one")
    ask(page, "two")
    click(page, ".turn:first-child [aria-label=Edit]")
    page.evaluate("document.querySelector('.editor textarea').value = 'half written'")
    click(page, ".turn:last-child [aria-label='Answer again']")
    page.wait_for("document.querySelectorAll('.answer .stepper').length === 1 && " + IDLE)
    assert page.evaluate("document.querySelector('.editor textarea').value") == "half written"


def test_the_page_speaks_chinese_and_keeps_its_colours(double: StandInChatServer) -> None:
    with browser() as page:
        page.call("Emulation.setUserAgentOverride", userAgent="Mozilla/5.0", acceptLanguage="zh-CN")
        page.resize(1200, 800, dark=True)
        page.open(double.address)
        page.wait_for(READY)
        assert page.evaluate("document.documentElement.lang") == "zh-CN"
        assert "新对话" in texts(page, ".new")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark", (
            "the system's choice"
        )
        click(page, "[aria-label='浅色或深色']")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        reload(page)
        assert page.evaluate("document.documentElement.dataset.theme") == "light"


FRAMES = """(() => {
    window.slowest = 0;
    let last = performance.now();
    const tick = () => {
        window.slowest = Math.max(window.slowest, performance.now() - last);
        last = performance.now();
        requestAnimationFrame(tick);
    };
    tick();
})()"""


def test_a_very_long_answer_is_drawn_without_blocking(
    page: Page, double: StandInChatServer
) -> None:
    block = "## Part\n\nSome **bold** words and `code` in a paragraph that is not short at all.\n\n- one\n- two\n\n```py\nx = 1\n```\n\n"
    double.answers["long"] = block * 2000
    page.evaluate(FRAMES)
    write(page, "long")
    key(page, "Enter")
    page.wait_for("headwayChat.isBusy || document.querySelector('.stats')?.textContent")
    page.wait_for(IDLE, 120)
    assert page.evaluate("document.querySelectorAll('.markdown > *').length") == 8000
    assert page.evaluate("window.slowest") < 2000, "milliseconds between two frames"
