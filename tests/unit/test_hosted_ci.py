"""The hosted CI runs what people run: its steps are make targets that exist, on the Pythons that are declared."""

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

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


def test_strangers_cannot_start_the_job_on_the_own_runner() -> None:
    workflow = read(ROOT / ".github/workflows/gpu.yml")
    # YAML 1.1 reads the key `on` as true; this reader is YAML 1.2.
    assert list(workflow["on"]) == ["workflow_dispatch"]


def test_hooks_of_pre_commit_call_tools_of_the_environment() -> None:
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert hooks
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)
