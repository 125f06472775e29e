"""The chat page's files: whole, self-contained, and safe against what a model or an imported file says. Its modules run in node."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.serving import RunningServer
from support.stand_in_chat_server import PAGE

from headway.serve.page_files import VENDORED

NODE = shutil.which("node")
SCRIPTS = sorted(PAGE.glob("*.js"))
LIBRARIES = [PAGE.parents[1] / "vendor" / name for name in VENDORED]
needs_node = pytest.mark.skipif(NODE is None, reason="needs node")


def test_the_page_is_made_of_its_own_files_and_names_no_other_host() -> None:
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert named
    assert all(
        path.startswith("static/") and (PAGE / path.removeprefix("static/")).is_file()
        for path in named
    )
    assert (
        "<script>" not in page
        and "<style" not in page
        and not re.search(r"\son\w+=|\sstyle=", page)
    ), "the policy allows files alone"
    for file in (*SCRIPTS, *PAGE.glob("*.css")):
        text = file.read_text(encoding="utf-8")
        assert text.count("\n") <= 400, file.name
        hosts = [
            url
            for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w{2,}[^\s\"'`)]*", text)
            if not url.startswith("http://www.w3.org/")
        ]
        assert not [host for host in hosts if host.startswith("http")], f"{file.name}: {hosts}"
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), file.name
        for other in re.findall(r'(?:from|import) "\./([^"]+)"', text):
            assert (PAGE / other).is_file() or other in VENDORED, f"{file.name} imports {other}"


def test_the_server_gives_every_file_under_a_policy_that_allows_its_own_alone(
    server: RunningServer,
) -> None:
    for file in (*sorted(PAGE.iterdir()), *LIBRARIES):
        answer = server.client().get("/" if file.name == "index.html" else f"/static/{file.name}")
        assert answer.status_code == 200 and answer.content == file.read_bytes(), file.name
        policy = dict(
            part.strip().split(" ", 1)
            for part in answer.headers["Content-Security-Policy"].split(";")
            if part.strip()
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "data:" in policy["img-src"] and "data:" in policy["media-src"], "uploads are shown"


def messages_in(script: str, name: str) -> dict[str, str]:
    """The texts of one language, by name."""
    table = script[script.index(f"const {name} ") :].split("\n};")[0]
    return dict(re.findall(r'(\w+): "((?:[^"\\]|\\.)*)"', table))


def test_both_languages_say_everything_that_the_page_says() -> None:
    text = (PAGE / "words.js").read_text(encoding="utf-8")
    english = messages_in(text, "EN")
    chinese = messages_in(text, "ZH")
    assert english.keys() == chinese.keys()
    for key, words in english.items():
        assert set(re.findall(r"\{\w+\}", words)) == set(re.findall(r"\{\w+\}", chinese[key])), key
    used = {
        key
        for file in SCRIPTS
        for key in re.findall(r'say\("(\w+)"', file.read_text(encoding="utf-8"))
    }
    assert used <= english.keys(), used - english.keys()


def in_node(folder: Path, script: str, argument: Any = None) -> Any:
    """What a module beside this file prints as JSON; it can import the page's files."""
    assert NODE is not None
    for file in (*SCRIPTS, *LIBRARIES, Path(__file__).parent / script):
        shutil.copy(file, folder / file.name)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "given.json").write_text(json.dumps(argument), encoding="utf-8")
    done = subprocess.run(
        [NODE, script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_versions_of_questions_and_answers_keep_what_followed(tmp_path: Path) -> None:
    seen = in_node(tmp_path, "page_branches.js")
    assert seen["plain"] == "q1|a1|q2|a2" and seen["regenerated"] == "q1|a1b", (
        "a new answer has no continuation yet"
    )
    assert seen["back"] == "q1|a1|q2|a2"
    assert seen["edited"] == "q1|a1|q2b|a2b"
    assert seen["unedited"] == "q1|a1|q2|a2"
    assert seen["dog"] == "Be brief.|q1|a1|q2|a2|q3|dog 3|q4", (
        "a model that joined later takes the first one's answers before it"
    )
    assert seen["copied"]
    assert seen["read"]
    assert seen["mediaRead"] == 1
    assert seen["hostile"][:5] == [[], [], [], [], []]
    assert seen["hostile"][5] == [0, 0, 0]
    assert seen["hostile"][6] == []
    assert seen["circle"] == 1
    assert seen["kept"] == [None, None, None, ["a"], 0, ["t"]]
    assert [part["type"] for part in seen["media"]] == ["image_url", "input_audio", "text"]
    assert seen["media"][1]["input_audio"] == {"data": "BB==", "format": "mp3"}
    turns, depth = seen["deep"]
    assert turns == 1500 and depth < 12, "JSON readers refuse deep nesting"


INLINE = {
    "a **b** *c* `d` ~~e~~ ***f***": "a <strong:b> <em:c> <code:d> <del:e> <both:f>",
    "snake_case_name 2*3*4 __init__": "snake_case_name 2<em:3>4 <strong:init>",
    "**not closed": "**not closed",
    "`` a`b ``": "<code:a`b>",
    r"\*plain\*": "*plain*",
    "[x](https://e.org/a_(b))": "<link https://e.org/a_(b):x>",
    "see https://e.org/a. ok": "see <link https://e.org/a:https://e.org/a>. ok",
    "（https://e.org/中）": "（<link https://e.org/%E4%B8%AD:https://e.org/中>）",
    "[x](javascript:alert(1))": "[x](javascript:alert(1))",
    "[x](  JaVaScRiPt:alert(1))": "[x](  JaVaScRiPt:alert(1))",
    "[x](data:text/html;base64,AA)": "[x](data:text/html;base64,AA)",
    "![p](https://e.org/p.png)": "<link https://e.org/p.png:p>",
    "<img src=x onerror=alert(1)>": "<img src=x onerror=alert(1)>",
    "a\nb": "a<break:>b",
}
BLOCKS: dict[str, list[list[Any]]] = {
    "# T\n\ntext\nmore\n\n---": [["heading", "T"], ["paragraph", "text\nmore"], ["rule", None]],
    "- a\n- b\n  - c\n\ntext": [["list", 2], ["paragraph", "text"]],
    "1. a\n\n2. b": [["list", 2]],
    "text\n- a": [["paragraph", "text"], ["list", 1]],
    "```py\n<script>\n# no\n```\nx": [["code", "<script>\n# no"], ["paragraph", "x"]],
    "```\nopen": [["code", "open"]],
    "a | b\n--|--\n1 | 2": [["table", 1]],
    "> q\n> r": [["quote", None]],
    "<script>alert(1)</script>": [["paragraph", "<script>alert(1)</script>"]],
}
ADDRESSES = {
    "https://e.org/": "https://e.org/",
    "javascript:alert(1)": None,
    " https://e.org": None,
    "//e.org": None,
    "data:text/html,x": None,
    "file:///etc": None,
    "http://[": None,
}


@needs_node
def test_markdown_is_read_and_nothing_in_it_becomes_more_than_text(tmp_path: Path) -> None:
    lists = {"inline": [*INLINE], "blocks": [*BLOCKS], "addresses": [*ADDRESSES]}
    seen = in_node(tmp_path, "page_markdown.js", lists)
    assert seen["inline"] == INLINE
    assert seen["blocks"] == BLOCKS
    assert seen["addresses"] == ADDRESSES
    assert [(passage["thoughts"], passage["rest"]) for passage in seen["thoughts"]] == [
        ("a", ""),
        ("a", "b"),
        (None, "b <think>"),
    ]
    assert "lost" not in seen, seen["lost"]
    assert seen["deep"] == [True, True, True]
    assert "grown" not in seen, seen["grown"]
    assert seen["milliseconds"] < 8000, "a hostile answer must not freeze the page"


@needs_node
def test_streams_are_read_whatever_their_pieces_and_old_turns_are_left_out_when_the_context_is_full(
    tmp_path: Path,
) -> None:
    seen = in_node(tmp_path, "page_stream.js")
    assert seen["events"] == ['{"a":"你"}', "1\n2", "[DONE]"]
    assert seen["cuts"]
    assert seen["fits"] == [{"leftOut": 2}, {"text": "hi"}, {"finish": "stop"}]
    assert seen["asked"] == [0, 1, 2]
    assert seen["never"] == ["too long"], "the question alone is too long"
    assert "connection ended" in seen["cutOff"][-1]
    assert "does not answer" in seen["offline"][-1]
