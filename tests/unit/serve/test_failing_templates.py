"""A chat template that raises while it writes a conversation fails that request alone, with its reason."""

import threading
from collections.abc import Iterator

import httpx
import pytest
from support.serving import RunningServer, serving

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content == 'refuse' -%}{{ raise_exception('no such talk here') }}
{%- elif message.content == 'divide' -%}{{ 1 // 0 }}
{%- elif message.content == 'absent' -%}{{ message.picture.width }}
{%- elif message.content == 'forever' -%}
{%- for i in range(9000) -%}{%- for j in range(9000) -%}{{ i }}{%- endfor -%}{%- endfor -%}
{%- endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One stand-in model whose conversations are written by the template above."""
    template = tmp_path_factory.mktemp("template") / "odd.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    with serving("--model", "m=stand-in", "--chat-template", str(template)) as running:
        yield running


def ask(server: RunningServer, content: str) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return server.client().post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("refuse", "no such talk here"),
        ("divide", "ZeroDivisionError"),
        ("absent", "has no attribute 'picture'"),
        ("forever", "it does not end"),
    ],
)
def test_a_template_that_raises_fails_its_request_alone(
    server: RunningServer, content: str, reason: str
) -> None:
    neighbours: list[httpx.Response] = []
    neighbour = threading.Thread(
        target=lambda: neighbours.append(ask(server, "[sleep] [[a neighbour's answer]]"))
    )
    neighbour.start()
    refused = ask(server, content)
    neighbour.join()

    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["message"].startswith("chat template ")
    assert reason in error["message"]
    assert "\n" not in error["message"]
    assert neighbours[0].json()["choices"][0]["message"]["content"] == "a neighbour's answer"
    after = ask(server, "[[again]]")
    assert after.json()["choices"][0]["message"]["content"] == "again"
    assert server.client().get("/health").json()["status"] == "ok"
