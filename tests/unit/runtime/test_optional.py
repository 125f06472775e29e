"""A missing extra is answered with the command that adds it to this very installation."""

import json
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headway.runtime import optional
from headway.runtime.optional import install_command

ROOT = Path(__file__).parents[3]


class Installed:
    """What pip keeps about an installation."""

    def __init__(self, origin: dict[str, Any] | None, installer: str = "pip") -> None:
        self.files = {
            "INSTALLER": f"{installer}\n",
            "direct_url.json": None if origin is None else json.dumps(origin),
        }

    def read_text(self, name: str) -> str | None:
        return self.files.get(name)


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (None, ["headway[serve]"]),
        (
            {"url": "file:///home/me/my%20code/headway", "dir_info": {}},
            ["/home/me/my code/headway[serve]"],
        ),
        (
            {"url": "file:///tmp/headway-0.1.0-py3-none-any.whl", "archive_info": {}},
            ["/tmp/headway-0.1.0-py3-none-any.whl[serve]"],
        ),
        (
            {"url": "https://host/headway.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            ["headway[serve] @ git+https://host/headway.git@abc"],
        ),
        (
            {"url": "https://host/headway.whl", "archive_info": {}},
            ["headway[serve] @ https://host/headway.whl"],
        ),
    ],
)
def test_the_command_repeats_where_headway_came_from(
    origin: dict[str, Any] | None, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(optional, "distribution", lambda name: Installed(origin))
    monkeypatch.setattr(
        optional.shutil, "which", lambda name: str(Path(sys.executable).with_name("pip"))
    )
    assert shlex.split(install_command("serve", tmp_path)) == ["pip", "install", *words]


def test_a_checkout_is_installed_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout = tmp_path / "a b"
    (checkout / "src" / "headway").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    monkeypatch.setattr(
        optional.shutil, "which", lambda name: str(Path(sys.executable).with_name("pip"))
    )
    assert shlex.split(install_command("gguf", checkout)) == [
        "pip",
        "install",
        "-e",
        f"{checkout}[gguf]",
    ]
    assert f"{ROOT}[gguf]" in install_command("gguf")


def test_the_pip_of_this_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(optional, "distribution", lambda name: Installed(None))
    monkeypatch.setattr(optional.shutil, "which", lambda name: "/somewhere/else/pip")
    assert shlex.split(install_command("serve", tmp_path)) == [
        sys.executable,
        "-m",
        "pip",
        "install",
        "headway[serve]",
    ]
    monkeypatch.setattr(optional, "distribution", lambda name: Installed(None, "uv"))
    assert install_command("serve", tmp_path) == 'uv pip install "headway[serve]"'


def test_damaged_metadata_is_an_unknown_origin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = Installed(None)
    installed.files["direct_url.json"] = "{"
    monkeypatch.setattr(optional, "distribution", lambda name: installed)
    assert install_command("serve", tmp_path).endswith('"headway[serve]"')


def test_the_demo_brings_what_the_first_steps_after_it_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    (demo,) = extras["demo"]
    assert {"serve", "gguf", "media", "plot", "tensorboard"} <= set(
        demo.removeprefix("headway[").removesuffix("]").split(",")
    )
