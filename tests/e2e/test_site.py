"""The documentation site builds without a broken link and loads nothing from the network. Needs the extra `docs`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.drill
def test_the_site_builds_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").glob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"(https?:)?//", text) + re.findall(
            r"<link[^>]+href=\"https?://[^\"]+\.css", text
        )
        assert not loaded, page.name
    assert "headway config import" in (tmp_path / "site" / "commands.html").read_text(
        encoding="utf-8"
    )
    assert not list((tmp_path / "site").rglob("*.py")), "a program of the repository was published"
    results = search_from_disk(tmp_path / "site" / "index.html", "resume")
    assert results is None or results > 10


def search_from_disk(page: Path, word: str) -> int | None:
    """How many documents the search of a page that is opened from the disk finds; None without Chromium."""
    browser = shutil.which("chromium")
    if browser is None:
        return None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=15000",
        "--dump-dom",
    ]
    done = subprocess.run(
        [browser, *options, f"file://{page}?q={word}"], capture_output=True, text=True, timeout=120
    )
    matches = re.search(r"(\d+) matching documents", done.stdout)
    assert matches is not None, "the search did not answer"
    return int(matches[1])
