"""An alert in the form its receiver understands. In: a message; out: the JSON to post, or to give to a command."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from headway.track.base import Event

Form = Literal["feishu", "slack", "webhook", "command"]


@dataclass(frozen=True)
class Message:
    """What happened in which run. `loss` is None where it is not finite."""

    event: Event
    run: str
    job: str
    step: int
    loss: float | None
    text: str
    timestamp: int

    @property
    def title(self) -> str:
        """Which run speaks."""
        return f"{self.job}_{self.run}"

    def body(self, form: Form) -> bytes:
        """The message as JSON; `webhook` and `command` get every field of it."""
        content: dict[str, Any] = asdict(self)
        if form == "feishu":
            post = {"title": self.title, "content": [[{"tag": "text", "text": self.text}]]}
            content = {"timestamp": self.timestamp, "msg_type": "post", "content": {"post": {"zh_cn": post}}}
        elif form == "slack":
            content = {"text": f"*{self.title}*\n{self.text}"}
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()


def refusal(form: Form, answer: bytes) -> str | None:
    """Why a receiver that answered 200 did not take the message: Feishu says so in a code."""
    if form != "feishu":
        return None
    try:
        said: Any = json.loads(answer)
        code = said.get("code", said.get("StatusCode", 0))
    except (ValueError, AttributeError):
        return None
    return None if code == 0 else f"code {code}"
