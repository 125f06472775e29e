"""The hosted CI runs what people run: its steps are make targets that exist, on the Pythons that are declared."""

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import headway

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_of_a_workflow_is_a_make_target(path: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [
        step["run"] for job in read(path)["jobs"].values() for step in job["steps"] if "run" in step
    ]
    assert commands
    for command in commands:
        words = command.split()
        assert words[0] == "make"
        assert words[1] in targets


def test_the_tests_run_on_every_python_of_the_classifiers() -> None:
    classifiers = re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()
    )
    matrix = read(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == classifiers


def test_slow_tests_and_those_that_need_further_packages_run_on_a_schedule() -> None:
    workflow = read(ROOT / ".github/workflows/weekly.yml")
    assert "schedule" in workflow["on"]
    commands = [step.get("run", "") for step in workflow["jobs"]["test-extra"]["steps"]]
    assert any(command.startswith("make test-extra") for command in commands)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target = makefile.split("\ntest-extra: $(VENV)/.ready-extra\n")[1].split("\n\n")[0]
    # The option replaces that of pyproject.toml, which leaves slow tests out.
    assert '-m "not drill and not gpu and not cluster"' in target
    assert '$(PIP) -e ".[test-extra]"' in makefile


def test_the_job_on_a_gpu_installs_what_it_runs_with() -> None:
    path = ROOT / ".github/workflows/gpu.yml"
    commands = [step["run"] for step in read(path)["jobs"]["test-gpu"]["steps"] if "run" in step]
    assert commands == ["make setup", "make test-gpu PYTHON=.venv/bin/python"]
    assert "The runner must have:" in path.read_text(encoding="utf-8")


def test_ci_builds_the_site_where_its_packages_can_be_installed() -> None:
    steps = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert steps.index("\nextra docs mkdocs,jieba") < steps.index("make docs")


def test_the_citation_has_the_version_and_the_date_of_the_newest_release() -> None:
    citation = read(ROOT / "CITATION.cff")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    release = re.search(r"(?m)^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", changelog)
    assert release is not None
    assert citation["version"] == release[1] == headway.__version__
    assert citation["date-released"] == release[2]


@pytest.mark.parametrize("page", ["install.md", "install.zh-CN.md"])
def test_the_wheel_that_a_page_installs_has_the_version_of_the_source(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert set(re.findall(r"headway-(\d[\d.]*)-py3", text)) == {headway.__version__}


def test_labels_of_issue_forms_are_those_that_a_new_repository_has() -> None:
    labels = {
        label
        for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
        for label in read(path).get("labels", [])
    }
    assert labels == {"bug", "enhancement"}


def test_a_weakness_is_reported_to_no_address_that_nobody_has() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "Report a\nvulnerability" in text
    assert "@" not in text


def test_strangers_cannot_start_the_job_on_the_own_runner() -> None:
    workflow = read(ROOT / ".github/workflows/gpu.yml")
    # YAML 1.1 reads the key `on` as true; this reader is YAML 1.2.
    assert list(workflow["on"]) == ["workflow_dispatch"]


def test_hooks_of_pre_commit_call_tools_of_the_environment() -> None:
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert hooks
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)
