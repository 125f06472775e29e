"""What a person does on the chat page: write, press keys, click, choose files, reload."""

import json
from pathlib import Path
from typing import Any

from support.chromium import Page

READY = "window.headwayChat && headwayChat.models.length === 2 && document.querySelector('#message') !== null"
IDLE = "!headwayChat.isBusy"


def key(page: Page, name: str, *, shift: bool = False) -> None:
    codes = {"Enter": 13, "Escape": 27}
    pressed: dict[str, Any] = {
        "key": name,
        "code": name,
        "windowsVirtualKeyCode": codes[name],
        "modifiers": 8 if shift else 0,
    }
    page.call(
        "Input.dispatchKeyEvent",
        type="keyDown",
        **pressed,
        **({"text": "\r"} if name == "Enter" else {}),
    )
    page.call("Input.dispatchKeyEvent", type="keyUp", **pressed)


def write(page: Page, text: str) -> None:
    page.evaluate("document.querySelector('#message').focus()")
    page.call("Input.insertText", text=text)


def ask(page: Page, text: str) -> None:
    write(page, text)
    key(page, "Enter")
    page.wait_for(IDLE)


def texts(page: Page, selector: str) -> list[str]:
    return json.loads(
        page.evaluate(
            f"JSON.stringify([...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent))"
        )
    )


def click(page: Page, selector: str) -> None:
    page.wait_for(
        f"(() => {{ const one = document.querySelector({json.dumps(selector)}); return one && !one.disabled; }})()"
    )
    page.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def reload(page: Page) -> None:
    page.evaluate("window.headwayChat = null")
    page.call("Page.reload")
    page.wait_for(READY)


def choose_files(page: Page, selector: str, *files: Path) -> None:
    page.call("DOM.enable")
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
    page.call("DOM.setFileInputFiles", files=[str(file) for file in files], nodeId=node)
