"""The live chart: drawn from a run's records, at most once a second, in a kernel only, and never in the way of a run."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs import make_stores, tiny_settings

import headway as hw
from headway.api.notebook import LiveChart, in_notebook


class Kernel:
    """IPython as far as a chart uses it."""

    def __init__(self, config: dict[str, Any], fail: bool = False) -> None:
        self.config = config
        self.fail = fail
        self.shown: list[str] = []
        self.display = SimpleNamespace(HTML=str, display=self.open)

    def get_ipython(self) -> Any:
        return SimpleNamespace(config=self.config)

    def open(self, html: str, *, display_id: bool) -> Any:
        self.shown.append(html)
        return self

    def update(self, html: str) -> None:
        if self.fail:
            raise RuntimeError("the browser is gone")
        self.shown.append(html)


def train(folder: Path, name: str, length: str = "steps=3", **options: Any) -> hw.TrainResult:
    if not (folder / "store0").exists():
        make_stores(folder)
    recipe = hw.Recipe.load(None, [*tiny_settings(folder, name), length])
    return hw.train(recipe, **options)


def test_a_run_in_a_kernel_is_drawn_and_one_elsewhere_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel({"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    result = train(tmp_path, "shown")
    assert "<svg" in kernel.shown[-1]
    assert f"loss {result.last_loss:.4g}" in kernel.shown[-1]
    assert "done" in kernel.shown[-1]

    kernel.shown.clear()
    train(tmp_path, "switched-off", live_chart=False)
    # IPython in a terminal is no notebook.
    kernel.config = {"TerminalIPythonApp": {}}
    train(tmp_path, "terminal")
    assert not kernel.shown
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_an_output_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", Kernel({"IPKernelApp": {}}, fail=True))
    assert train(tmp_path, "unseen").steps == 3


def test_it_is_redrawn_once_a_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("headway.api.notebook.time.monotonic", lambda: now)
    shown: list[str] = []
    chart = LiveChart("a <run>", shown.append)
    for step in range(1, 31):
        now += 0.1
        chart.on_step(step, {"step": step, "loss": 3.0 / step, "time": {"eta_seconds": 61.0}})
    assert len(shown) == 3
    assert "1m 01s left" in shown[-1]
    assert "a &lt;run&gt;" in shown[-1]
    chart.on_end({"error": "<b>no</b>"})
    assert "ended with an error: &lt;b&gt;no&lt;/b&gt;" in shown[-1]


@pytest.mark.parametrize("length", ["steps=5", "epochs=1"])
def test_the_chart_shows_how_far_the_run_is(
    length: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run of epochs, too, whose number of steps the recipe does not say."""
    kernel = Kernel({"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setattr("headway.api.notebook.REDRAW_SECONDS", 0.0)
    steps = train(tmp_path, "shown", length).steps
    assert steps > 4
    assert f"step 2 of {steps} ({2 / steps:.0%}) · loss" in "".join(kernel.shown)
    assert f'<progress value="2" max="{steps}"' in "".join(kernel.shown)
    assert f"step {steps} of {steps} (100%)" in kernel.shown[-1]


def test_a_run_of_stages_counts_the_steps_of_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel({"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setattr("headway.api.notebook.REDRAW_SECONDS", 0.0)
    train(tmp_path, "staged", "stages=[{name: first, steps: 2}, {name: second, steps: 3}]")
    assert '<progress value="4" max="5"' in "".join(kernel.shown)
    assert "step 5 of 5 (100%)" in kernel.shown[-1]


def test_without_a_total_the_chart_has_no_bar() -> None:
    shown: list[str] = []
    chart = LiveChart("a run", shown.append)
    chart.on_step(1, {"step": 1, "loss": 3.0})
    assert "<p>step 1 · loss 3</p>" in shown[-1]
    assert "<progress" not in shown[-1]

    # A total that the run has passed is not shown.
    chart = LiveChart("a run", shown.append, total_steps=3)
    chart.on_step(4, {"step": 4, "loss": 3.0})
    assert "<p>step 4 · loss 3</p>" in shown[-1]
    assert "<progress" not in shown[-1]
