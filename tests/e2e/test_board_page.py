"""The board's page in a real Chromium: what it shows, what survives a refresh, what it never asks for."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.board_runs import (
    EVIL_ANSWER,
    add_rollout,
    append_record,
    make_run,
    record,
    serving_board,
)
from support.chromium import PROGRAM, Page, browser

from headway.board.open import open_sources
from headway.board.report import write_html_report

pytestmark = [pytest.mark.drill, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
BOX = """(() => {
    const box = document.querySelector('[data-metric=loss] .u-over').getBoundingClientRect();
    return [box.left, box.top, box.width, box.height];
})()"""
DRAWING = """(async () => {
    const begun = performance.now(), card = hw.app.charts.cards.get('loss');
    for (let i = 0; i < 10; i++) {
        hw.app.charts.draw(card);
        await null;  // uPlot draws when the script that changed it has ended
    }
    return (performance.now() - begun) / 10;
})()"""
SHOWN = """JSON.stringify([
    document.querySelectorAll('.runs li').length, document.querySelector('.sidebar input').value,
    document.querySelector('.segments .on').dataset.axis,
])"""
DRAWN = "document.querySelectorAll('.card').length > 4 && Number(document.querySelector('[data-metric=loss]').dataset.points) > 0"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with browser() as open_page:
        open_page.resize(1400, 1000)
        yield open_page


def hover(page: Page, share: float) -> list[dict[str, Any]]:
    """Move over the chart of the loss; returns the rows of the tip."""
    box = page.evaluate(BOX)
    page.move(box[0] + (box[2] - 1) * share, box[1] + box[3] / 2)
    page.wait_for("document.querySelector('.tip.on') !== null")
    script = "JSON.stringify([...document.querySelectorAll('.tiprow')].map((row) => ({...row.dataset, text: row.textContent})))"
    return json.loads(page.evaluate(script))


def test_two_runs_are_overlaid_and_their_values_are_those_of_the_file(
    tmp_path: Path, page: Page
) -> None:
    evil = "<img src=x onerror=alert(1)>"
    run = make_run(tmp_path / "runs" / evil, 200, seed=1.0)
    two = make_run(tmp_path / "runs" / "two", 200, lr=0.5, done=False)
    with serving_board(tmp_path / "runs") as (client, _):
        origin = f"http://127.0.0.1:{client.port}/"
        page.open(origin)
        page.wait_for(DRAWN)
        page.evaluate("hw.app.select([...hw.app.runs.keys()])")
        page.wait_for("Number(document.querySelector('[data-metric=loss]').dataset.points) === 400")
        names = page.evaluate(
            "[...document.querySelectorAll('.runs .name')].map((one) => one.textContent).sort().join('|')"
        )
        assert names == f"{evil}|two"
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        rows = hover(page, 0.5)
        assert len(rows) == 2
        for row in rows:
            folder = run if evil in row["text"] else two
            records = {
                value["step"]: value
                for value in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            }
            assert float(row["value"]) == records[int(float(row["x"]))]["loss"]
        _follows(page, two)
        _keeps_its_state(page, origin)
        _shows_panels(page)
        assert page.problems == []
        assert {
            address for address in page.requests if not address.startswith((origin, "about:"))
        } == set()


def _follows(page: Page, folder: Path) -> None:
    append_record(folder, 201, loss=9.75)
    page.wait_for(
        "Number(document.querySelector('[data-metric=loss]').dataset.points) === 401", seconds=4.0
    )
    rows = hover(page, 1.0)
    assert any(float(row["value"]) == 9.75 for row in rows)


def _keeps_its_state(page: Page, origin: str) -> None:
    page.evaluate("document.querySelector('[data-axis=tokens]').click()")
    page.evaluate("document.querySelector('[data-flip=logY]').click()")
    page.evaluate("hw.app.store.set({ smooth: 0.5, filter: 'two$' })")
    box = page.evaluate(BOX)
    page.drag(box[0] + 100, box[0] + 250, box[1] + 80)
    page.wait_for("hw.app.store.state.zoom !== null")
    page.wait_for("location.hash.includes('z=') && location.hash.includes('f=two')")
    keys = "JSON.stringify((({runs, axis, smooth, logY, zoom, filter}) => ({runs, axis, smooth, logY, zoom, filter}))(hw.app.store.state))"
    before = page.evaluate(keys)
    page.call("Page.reload")
    page.wait_for("typeof hw !== 'undefined' && hw.app && hw.app.runs.size === 2")
    page.wait_for(DRAWN)
    assert page.evaluate(keys) == before
    assert page.evaluate(SHOWN) == '[1,"two$","tokens"]'
    page.open(origin)  # without the address: the browser remembers
    page.wait_for("typeof hw !== 'undefined' && hw.app && hw.app.runs.size === 2")
    assert page.evaluate("hw.app.store.state.axis") == "tokens"
    page.evaluate(
        "hw.app.store.set({ zoom: null, filter: '', axis: 'step', logY: false, smooth: 0 })"
    )


def _shows_panels(page: Page) -> None:
    page.evaluate("document.querySelector('[data-tab=config]').click()")
    page.wait_for("document.querySelectorAll('tr.differs').length >= 2")
    assert "optim.lr" in page.evaluate("document.querySelector('.panel').textContent")
    for tab, words in (
        ("summary", "best loss"),
        ("events", "begins"),
        ("log", "INFO done"),
        ("checkpoints", "No checkpoints"),
        ("samples", "No samples"),
    ):
        page.evaluate(f"document.querySelector('[data-tab={tab}]').click()")
        page.wait_for(f"document.querySelector('.panel').textContent.includes({json.dumps(words)})")


ANSWERS = "JSON.stringify([...document.querySelectorAll('.answer')].map((one) => [Number(one.dataset.reward), one.querySelector('pre').textContent]))"


def shown_answers(page: Page) -> list[tuple[float, str]]:
    return [tuple(pair) for pair in json.loads(page.evaluate(ANSWERS))]


def test_answers_of_a_run_stand_beside_their_rewards_and_are_text(
    tmp_path: Path, page: Page
) -> None:
    run = make_run(tmp_path / "runs" / "grpo", 30, done=False)
    for batch in range(30):
        add_rollout(run, batch, [0.1 * batch, 0.0, 1.0, 1.0], EVIL_ANSWER)
    add_rollout(run, 30, [float(number) for number in range(50)])
    with serving_board(tmp_path / "runs") as (client, _):
        origin = f"http://127.0.0.1:{client.port}/"
        page.open(origin)
        page.wait_for("typeof hw !== 'undefined' && hw.app && hw.app.runs.size === 1")
        page.evaluate("document.querySelector('[data-tab=rollouts]').click()")
        page.wait_for("document.querySelectorAll('.answer').length === 20")
        # Six lines of 31 batches, three shares.
        points = "JSON.stringify([...document.querySelectorAll('[data-rollouts]')].map((one) => Number(one.dataset.points)))"
        assert json.loads(page.evaluate(points)) == [6 * 31, 6 * 31, 3 * 31]
        page.wait_for("document.querySelectorAll('[data-rollouts] canvas').length === 3")
        assert [reward for reward, _ in shown_answers(page)] == list(range(20))

        page.evaluate("document.querySelector('[data-go=later]').click()")
        page.wait_for("document.querySelector('.answer').dataset.reward === '20'")
        page.evaluate("document.querySelector('[data-order=best]').click()")
        page.wait_for("document.querySelector('.answer').dataset.reward === '49'")
        page.evaluate("document.querySelector('[data-order=worst]').click()")
        page.evaluate("document.querySelector('[data-go=before]').click()")
        page.wait_for("document.querySelectorAll('.answer').length === 4")
        rewards = [reward for reward, _ in shown_answers(page)]
        assert rewards == sorted(rewards)
        # A hostile answer is its text, and nothing of it runs or is loaded.
        assert all("<img src=x onerror=alert(1)>" in text for _, text in shown_answers(page))
        assert page.evaluate("document.querySelectorAll('.panel img, .panel script').length") == 0

        # A batch that is sampled meanwhile appears by itself.
        page.evaluate("document.querySelector('[data-order=best_of_run]').click()")
        page.wait_for("document.querySelector('.answer').dataset.reward === '49'")
        add_rollout(run, 31, [99.0, 0.0])
        append_record(run, 31)
        page.wait_for("document.querySelector('.answer').dataset.reward === '99'", seconds=6.0)
        assert page.problems == []
        assert [
            address for address in page.requests if not address.startswith((origin, "about:"))
        ] == []


def test_a_report_has_the_best_answers_of_a_run(tmp_path: Path, page: Page) -> None:
    run = make_run(tmp_path / "runs" / "grpo", 3)
    add_rollout(run, 0, [0.0, 1.0, 0.5, 0.25], EVIL_ANSWER)
    out = tmp_path / "report.html"
    write_html_report(open_sources([str(run)]), out)
    page.open(out.as_uri())
    page.wait_for("typeof hw !== 'undefined' && hw.app && hw.app.runs.size === 1")
    page.evaluate("document.querySelector('[data-tab=rollouts]').click()")
    page.wait_for("document.querySelectorAll('.answer').length === 4")
    page.evaluate("document.querySelector('[data-order=best_of_run]').click()")
    page.wait_for("document.querySelector('.answer').dataset.reward === '1'")
    assert page.evaluate("document.querySelectorAll('.panel img, .panel script').length") == 0
    assert page.problems == []


def test_a_report_opens_from_the_disk_without_a_server(tmp_path: Path, page: Page) -> None:
    run = make_run(tmp_path / "runs" / "one", 100)
    out = tmp_path / "report.html"
    write_html_report(open_sources([str(run)]), out)
    page.open(out.as_uri())
    page.wait_for("typeof hw !== 'undefined' && " + DRAWN)
    rows = hover(page, 0.5)
    assert float(rows[0]["value"]) == record(int(float(rows[0]["x"])))["loss"]
    page.evaluate("document.querySelector('[data-axis=time]').click()")
    page.wait_for("Number(document.querySelector('[data-metric=loss]').dataset.points) === 100")
    page.evaluate("document.querySelector('[data-tab=config]').click()")
    page.wait_for("document.querySelector('.panel').textContent.includes('optim.lr')")
    assert page.problems == []
    assert [address for address in page.requests if address != out.as_uri()] == []


EVIL = """# Scores <img src=x onerror="window.hacked = 1">

| task | score | note |
|:--|--:|---|
| mmlu | 0.51 | <script>window.hacked = 2</script> |
| arc | 0.4 | a \\| b |

![plot](plot.png) ![other](http://evil.example/steal.png) [click](javascript:window.hacked=3)

    <b onclick=window.hacked=4>text of a model</b>
"""


@pytest.mark.parametrize("is_file", [False, True])
def test_reports_are_drawn_and_what_they_say_stays_text(
    tmp_path: Path, page: Page, is_file: bool
) -> None:
    run = make_run(tmp_path / "runs" / "one", 20)
    (run / "eval").mkdir()
    (run / "eval" / "report.md").write_text(EVIL)
    (run / "eval" / "plot.png").write_bytes(base64.b64decode(PIXEL))
    out = tmp_path / "report.html"
    write_html_report(open_sources([str(run)]), out)
    with serving_board(tmp_path / "runs") as (client, _):
        page.open(out.as_uri() if is_file else f"http://127.0.0.1:{client.port}/")
        page.wait_for("typeof hw !== 'undefined' && " + DRAWN)
        page.evaluate("document.querySelector('[data-tab=evaluations]').click()")
        page.wait_for("document.querySelector('.markdown img')?.naturalWidth === 1")
        assert page.evaluate("document.querySelectorAll('.panel img').length") == 1
        assert page.evaluate("document.querySelector('.markdown pre').textContent") == (
            "<b onclick=window.hacked=4>text of a model</b>\n"
        )
        cells = "[...document.querySelectorAll('.markdown td')].map((one) => [one.textContent, one.className])"
        assert json.loads(page.evaluate(f"JSON.stringify({cells})")) == [
            ["mmlu", ""],
            ["0.51", "num"],
            ["<script>window.hacked = 2</script>", ""],
            ["arc", ""],
            ["0.4", "num"],
            ["a | b", ""],
        ]
        assert page.evaluate("document.querySelectorAll('.panel :is(a, b, script)').length") == 0
        assert "[click](javascript:window.hacked=3)" in page.evaluate(
            "document.querySelector('.markdown').textContent"
        )
        assert page.evaluate("window.hacked === undefined")
        assert page.problems == []
        assert not [address for address in page.requests if "evil" in address]


def test_a_hundred_thousand_points_of_many_runs_are_drawn_quickly(
    tmp_path: Path, page: Page
) -> None:
    text = (make_run(tmp_path / "first", 20_000) / "metrics.jsonl").read_text()
    for number in range(20):
        folder = make_run(tmp_path / "runs" / f"run-{number:02}", 1)
        (folder / "metrics.jsonl").write_text(text)
    with serving_board(tmp_path / "runs") as (client, board):
        page.open(f"http://127.0.0.1:{client.port}/")
        page.wait_for(DRAWN)
        page.evaluate("hw.app.select([...hw.app.runs.keys()])")
        assert board.wait_until(
            lambda: all(run.is_wanted and not run.is_indexing for run in board.runs.values()), 120.0
        )
        page.wait_for(
            "hw.app.charts.cards.get('loss').series.length === 20 && !document.querySelector('.card.partial')",
            60.0,
        )
        milliseconds = page.evaluate(DRAWING)
        assert milliseconds < 100.0, milliseconds
