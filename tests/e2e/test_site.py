"""The documentation site builds without a broken link and loads nothing from the network. Needs the extra `docs`."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/_site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lines_of_a_chinese_paragraph_become_one_and_a_heading_stays_alone(
    site_pages: ModuleType,
) -> None:
    page = "## 容器\n仓库里的文件\n安装全部依赖。\n\n```\n# 第一行\n第二行\n```\n"
    joined = site_pages.join_chinese_lines(page)
    assert joined == "## 容器\n\n仓库里的文件安装全部依赖。\n\n```\n# 第一行\n第二行\n```\n"


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").rglob("*.zh-CN.md")), ids=lambda page: page.name
)
def test_headings_and_code_of_a_chinese_page_reach_the_site(
    site_pages: ModuleType, page: Path
) -> None:
    text = page.read_text(encoding="utf-8")
    joined = site_pages.join_chinese_lines(text)
    for kind in (r"(?m)^#+ .*$", r"(?ms)^```.*?^```", r"(?m)^\|.*$"):
        assert re.findall(kind, joined) == re.findall(kind, text)


@pytest.mark.drill
def test_the_site_builds_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("jieba")
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
    for word in ("resume", "检查点"):
        results = search_from_disk(tmp_path / "site" / "index.html", word)
        assert results is None or results > 10, word


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
