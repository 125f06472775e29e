"""The guides and both front pages name only verbs, flags, settings, recipes and files that exist."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML
from support.recipe_settings import is_setting, settings

from headway.cli import build_app
from headway.config.shipped import recipe_names

ROOT = Path(__file__).parents[3]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("README*.md")])
GUIDES = [page for page in PAGES if page.name not in ("settings.md", "lab-notes.md")]
FENCE = re.compile(r"(?ms)^```(\w*)\n(.*?)^```")
NO_SETTINGS = (
    ".yaml",
    ".json",
    ".jsonl",
    ".md",
    ".py",
    ".txt",
    ".log",
    ".tsv",
    "model.norm.weight",
    "model.safetensors",
)
OF_OTHERS = {"--case", "--search", "--signal"}
"""Flags of benchmarks and of SLURM."""
WITH_RECIPE = {"train", "supervise", "verify resume", "sparsify"}


@cache
def commands() -> dict[str, Any]:
    """Every verb by the words one types."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, subcommand in getattr(command, "commands", {}).items():
            yield from below(subcommand, (*words, name))
        if not hasattr(command, "commands") or (words and command.invoke_without_command):
            yield " ".join(words), command

    return dict(below(typer.main.get_command(build_app()), ()))


def flags(command: Any) -> set[str]:
    return {
        flag
        for option in command.params
        for flag in (*option.opts, *option.secondary_opts)
        if flag.startswith("-")
    } | {"--help", "-h"}


def lines(page: Path) -> list[list[str]]:
    """The words of every headway command in the page's blocks."""
    collected: list[list[str]] = []
    text = page.read_text(encoding="utf-8")
    for kind, block in FENCE.findall(text):
        if kind in ("", "sh", "bash", "console"):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                if re.match(r"(\$ )?headway ", line):
                    collected.append(shlex.split(line.removeprefix("$ "), comments=True)[1:])
    for code in re.findall(r"`(headway [a-z][^`\n]*)`", re.sub(r"(?s)```.*?```", "", text)):
        words = code.replace("|", " ").split()[1:]
        if any(
            verb == words[0] or verb.startswith(words[0] + " ") for verb in commands()
        ) and not re.search(r"[|…]|\.\.\.", code):
            collected.append(words)
    return collected


def test_there_is_something_to_check() -> None:
    assert len(commands()) > 30
    assert len([words for page in GUIDES for words in lines(page)]) > 150


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_commands_have_verbs_flags_and_settings_that_exist(page: Path) -> None:
    for words in lines(page):
        verb = next(
            (
                " ".join(words[:count])
                for count in (3, 2, 1)
                if " ".join(words[:count]) in commands()
            ),
            None,
        )
        assert verb is not None, f"no such verb: headway {' '.join(words)}"
        for word in words[len(verb.split()) :]:
            if word == "--":
                break
            if word.startswith("-") and not re.fullmatch(r"-\d.*", word):
                assert word.split("=")[0] in flags(commands()[verb]), (
                    f"headway {verb} has no {word}"
                )
            elif verb in WITH_RECIPE and (setting := re.match(r"([a-z_]+(?:\.[\w]+)*)=", word)):
                assert is_setting(setting[1]), (
                    f"no such setting: {setting[1]} in headway {' '.join(words)}"
                )
            elif word.startswith(("laptop/", "node/")):
                assert word in recipe_names(), (
                    f"no such recipe: {word} in headway {' '.join(words)}"
                )


COOKBOOK = [page for page in GUIDES if page.parent.name == "cookbook"]
OF_THE_READER = {"my-run"}
"""Runs that a page of the cookbook names without having trained them."""


@pytest.mark.parametrize("page", COOKBOOK, ids=lambda page: page.name)
def test_a_page_of_the_cookbook_trains_the_runs_that_it_uses(page: Path) -> None:
    """A reader who follows the page has a run under exactly these names."""
    known = set(OF_THE_READER)
    for words in lines(page):
        if words[0] == "train":
            known |= {
                word.removeprefix("run.name=") for word in words if word.startswith("run.name=")
            }
        # A run below demo/ is of `headway demo`.
        used = set(re.findall(r"(?<![\w/])runs/([\w.-]+)", " ".join(words)))
        assert used <= known, f"{sorted(used - known)} in headway {' '.join(words)}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_settings_and_flags_in_running_text_exist(page: Path) -> None:
    known, sections = settings()
    heads = {path.split(".")[0] for path in known | sections}
    text = re.sub(r"(?s)```.*?```", "", page.read_text(encoding="utf-8"))
    if page.name.startswith("coming-from"):
        text = re.sub(r"(?m)^\|[^|]*\|", "|", text)  # the first column is the other system's
    for code in re.findall(r"`([^`\n]+)`", text):
        for name in re.findall(r"(?<![\w./-])[a-z_]+(?:\.[a-z0-9_]+)+(?![\w/(*-])", code):
            if (
                name.split(".")[0] in heads
                and not name.endswith(NO_SETTINGS)
                and not name.startswith("model.layers.")
            ):
                assert is_setting(name), f"no such setting: {name}"
        for flag in re.findall(r"^--[a-z][a-z-]+", code):
            assert flag in OF_OTHERS or any(
                flag in flags(command) for command in commands().values()
            ), f"no verb has {flag}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_settings_in_recipes_exist(page: Path) -> None:
    def check(value: Any, prefix: str, *, is_stage: bool = False) -> None:
        for key, below in value.items() if isinstance(value, dict) else ():
            if is_stage and key == "name":
                continue
            path = f"{prefix}.{key}" if prefix else str(key)
            assert is_setting(path), f"no such setting: {path}"
            if path not in FREE:
                for section in below if isinstance(below, list) else [below]:
                    check(section, "" if path == "stages" else path, is_stage=path == "stages")

    for kind, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if kind == "yaml" and "\ntask: " not in block:
            check(YAML(typ="safe").load(block), "")


FREE = {"data.valid.sets"}
"""Its keys are names."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(
        r"(?<![\w/])((?:recipes|tests|benchmarks|docs)/[\w/.-]+\.(?:yaml|py|md|png))", text
    ):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert "://" in link or (page.parent / link).exists(), link


@cache
def anchors(page: Path) -> set[str]:
    """The names that links to a heading of the page use, as GitHub and the site make them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    headings: list[str] = []
    for heading in re.findall(r"(?m)^#+ +(.+?) *$", text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        headings.append(f"{name}_{headings.count(name)}" if name in headings else name)
    return set(headings)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "settings.md"], ids=lambda page: page.name
)
def test_anchors_exist(page: Path) -> None:
    for link, anchor in re.findall(
        r"\]\(([^)#\s]*)#([^)\s]+)\)",
        re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8")),
    ):
        if "://" not in link:
            target = (page.parent / link) if link else page
            assert anchor in anchors(target), (
                f"{target.name} has no heading #{anchor}; it has {sorted(anchors(target))}"
            )


def test_every_page_in_the_navigation_of_the_site_exists() -> None:
    shown = set(
        re.findall(
            r"(?m)^ *- .*?: ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
        )
    )
    generated = {
        "index.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "README.zh-CN.md",
        "benchmarks.md",
        "commands.md",
    }
    docs = ROOT / "docs"
    assert shown - generated <= {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_front_pages_have_no_long_line(name: str) -> None:
    width = {
        line: sum(2 if ord(letter) > 0x2E7F else 1 for letter in line)
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
    }
    assert not {line: cells for line, cells in width.items() if cells > 120}


def test_no_page_promises_what_does_not_exist() -> None:
    for page in PAGES:
        if not page.name.startswith("coming-from"):
            assert "serve" in {
                verb.split()[0] for verb in commands()
            } or "headway serve" not in page.read_text(encoding="utf-8"), page.name


IN_CHINESE = [page for page in PAGES if page.name.endswith(".zh-CN.md")]


def without_prompt(words: list[str]) -> list[str]:
    return [word for before, word in zip(["", *words], words, strict=False) if before != "--prompt"]


IN_ENGLISH_ONLY = {
    "api-reference.md": "made from docstrings",
    "settings.md": "made from the declarations of settings",
    "internals.md": "for developers of headway",
    "lab-notes.md": "for developers of headway",
    "read-the-code.md": "for developers of headway",
}
"""Pages without a Chinese one, and why."""
WITH_CHINESE = [
    page
    for page in PAGES
    if not page.name.endswith(".zh-CN.md") and page.name not in IN_ENGLISH_ONLY
]
"""Every page that users read."""


def test_the_pages_in_english_only_exist() -> None:
    assert all((ROOT / "docs" / name).is_file() for name in IN_ENGLISH_ONLY)


@pytest.mark.parametrize("page", WITH_CHINESE, ids=lambda page: page.name)
def test_these_guides_exist_in_chinese_and_both_link_to_each_other(page: Path) -> None:
    chinese = page.with_suffix(".zh-CN.md")
    assert f"[中文]({chinese.name})" in page.read_text(encoding="utf-8")
    assert f"[English]({page.name})" in chinese.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", IN_CHINESE, ids=lambda page: page.name)
def test_a_page_in_chinese_leads_to_pages_in_chinese(page: Path) -> None:
    links = re.findall(r"\[([^\]]*)\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
    in_english = [
        link
        for text, link in links
        if text != "English"
        and not link.endswith(".zh-CN.md")
        and (page.parent / link).with_suffix(".zh-CN.md").exists()
    ]
    assert not in_english, f"{page.name}: {in_english}"


@pytest.mark.parametrize("page", IN_CHINESE, ids=lambda page: page.name)
def test_a_page_has_the_same_commands_headings_and_table_rows_in_both_languages(page: Path) -> None:
    both = [page, page.with_name(page.name.replace(".zh-CN", ""))]
    chinese, english = ([without_prompt(words) for words in lines(page)] for page in both)
    assert chinese == english
    codes = [
        set(
            re.findall(
                r"`([^`\n]+)`", re.sub(r"(?s)```.*?```", "", page.read_text(encoding="utf-8"))
            )
        )
        for page in both
    ]
    assert codes[1] <= codes[0], f"only in {both[1].name}: {sorted(codes[1] - codes[0])}"
    for kind in (r"(?m)^#+ ", r"(?m)^\|", r"(?m)^- "):
        assert (
            len({len(re.findall(kind, page.read_text(encoding="utf-8"))) for page in both}) == 1
        ), kind


@pytest.mark.parametrize("page", IN_CHINESE, ids=lambda page: page.name)
def test_a_page_has_the_same_blocks_of_code_in_both_languages(page: Path) -> None:
    def blocks(path: Path) -> list[tuple[str, str]]:
        """The kind of each block, and its content where nothing in it is translated."""
        matches = FENCE.findall(path.read_text(encoding="utf-8"))
        return [(kind, code if kind == "python" else "") for kind, code in matches]

    assert blocks(page) == blocks(page.with_name(page.name.replace(".zh-CN", "")))


@pytest.mark.parametrize("page", IN_CHINESE, ids=lambda page: page.name)
def test_the_headings_of_both_languages_have_the_same_levels_in_the_same_order(page: Path) -> None:
    def levels(path: Path) -> list[int]:
        text = re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8"))
        return [len(marks) for marks in re.findall(r"(?m)^(#+) ", text)]

    assert levels(page) == levels(page.with_name(page.name.replace(".zh-CN", "")))


@pytest.mark.parametrize("page", IN_CHINESE, ids=lambda page: page.name)
def test_tables_that_tests_make_are_the_same_in_both_languages(page: Path) -> None:
    def tables(path: Path) -> list[str]:
        text = path.read_text(encoding="utf-8")
        return re.findall(r"(?s)<!-- made by tests/\S+ begin -->.*?<!-- .*?end -->", text)

    assert tables(page) == tables(page.with_name(page.name.replace(".zh-CN", "")))


SCALES = {
    "千": 1e3,
    "thousand": 1e3,
    "万": 1e4,
    "百万": 1e6,
    "million": 1e6,
    "亿": 1e8,
    "billion": 1e9,
}
"""Words behind a number that multiply it: 100 万 is 1.0 million."""
SPELLED_OUT = {
    0: ("zero", "零", "〇"),
    1: ("one", "first", "a single", "一", "首"),
    2: ("two", "second", "both", "twice", "二", "两"),
    3: ("three", "third", "三"),
    4: ("four", "四"),
    5: ("five", "fifth", "五"),
    6: ("six", "六"),
    7: ("seven", "七"),
    8: ("eight", "八"),
    9: ("nine", "九"),
    10: ("ten", "十"),
    12: ("twelve", "dozen", "十二"),
    20: ("twenty", "二十"),
    100: ("hundred", "百"),
    1000: ("thousand", "千"),
}
"""How a page may write a number that the other page writes in digits."""
MONTHS = "January February March April May June July August September October November December"


def passages(page: Path) -> list[str]:
    """The text of a page, cut before each heading, table row and list item; without code."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    cut = re.split(r"(?m)^(?=#+ |\||- )|(?<=\|)\n(?!\|)", text)
    return [re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", passage) for passage in cut]


def numbers_in(passage: str) -> set[float]:
    """All numbers in digits, each times the word behind it."""
    scale = "|".join(sorted(SCALES, key=len, reverse=True))
    numbers = re.findall(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?: ?({scale}))?", passage)
    return {float(digits.replace(",", "")) * SCALES.get(word, 1) for digits, word in numbers}


def spells_out(passage: str, number: float) -> bool:
    """Whether a passage has the number as a word, or as the name of a month."""
    words = list(SPELLED_OUT.get(int(number), ())) if number.is_integer() else []
    if number in range(1, 13):
        words.append(MONTHS.split()[int(number) - 1])
    # Chinese has no spaces between words.
    patterns = [rf"\b{word}s?\b" if word.isascii() else word for word in words]
    return any(re.search(pattern, passage, re.IGNORECASE) for pattern in patterns)


def missing_numbers(passage: str, translation: str) -> list[float]:
    """Numbers of a passage that its translation neither has nor spells out."""
    candidates = numbers_in(passage) - numbers_in(translation)
    return sorted(number for number in candidates if not spells_out(translation, number))


def test_a_changed_number_is_missing_in_the_other_language() -> None:
    assert missing_numbers("70 % after 1.5 million tokens", "150 万个 token 之后 70 %") == []
    assert missing_numbers("two ranks, November 2026", "2 个进程，2026 年 11 月") == []
    assert missing_numbers("2 个进程，2026 年 11 月", "two ranks, November 2026") == []
    assert missing_numbers("70 % of 203 pairs", "203 对中的 72 %") == [70]
    assert missing_numbers("1.5 million", "15 万") == [1.5e6]
    assert missing_numbers("1 个或 10 个", "often none") == [1, 10]


@pytest.mark.parametrize("page", IN_CHINESE, ids=lambda page: page.name)
def test_both_languages_have_the_same_numbers_in_the_same_places(page: Path) -> None:
    english = passages(page.with_name(page.name.replace(".zh-CN", "")))
    chinese = passages(page)
    assert len(english) == len(chinese)
    for original, translated in zip(english, chinese, strict=True):
        lost = missing_numbers(original, translated)
        added = missing_numbers(translated, original)
        assert not lost, f"{lost} is not in: {translated}"
        assert not added, f"{added} is not in: {original}"
