"""What pip installs is all a user needs: recipes, templates, types and licence are in the wheel, and it works outside the repository."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

from headway.config.shipped import recipe_names
from headway.runtime.optional import EXTRAS

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE")
REPOSITORY = "https://git.example.org/me/headway"
BUILD = "import setuptools.build_meta as build; print(build.build_sdist('dist')); print(build.build_wheel('dist'))"
QUESTIONS = [
    {"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n)))} for n in range(2, 40)
]


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def make_checkout(folder: Path) -> None:
    """Make a folder a repository with all of its files in one commit."""
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, *author, "commit", "--quiet", "-m", "all files")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and a source distribution of a copy of the tree, which is a checkout of git."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                folder / name,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        else:
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".gitignore").write_text("build\ndist\n*.egg-info\n")
    make_checkout(folder)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD],
        cwd=folder,
        env={**os.environ, "HEADWAY_REPOSITORY": REPOSITORY},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in (folder / "dist").iterdir()}


@pytest.fixture
def setup_file(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs setup.py, as if it stood in `folder`; returns what it hands to setuptools, and its names."""

    def run(address: str | None, folder: Path = ROOT) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        monkeypatch.setattr("setuptools.setup", lambda **options: arguments.update(options))
        monkeypatch.delenv("HEADWAY_REPOSITORY", raising=False)
        if address is not None:
            monkeypatch.setenv("HEADWAY_REPOSITORY", address)
        names = runpy.run_path(str(ROOT / "setup.py"))
        names["commit_text"].__globals__["ROOT"] = folder
        return {**arguments, **names}

    return run


def test_the_wheel_holds_what_a_user_needs(built: dict[str, Path]) -> None:
    wheel = zipfile.ZipFile(built[".whl"])
    names = set(wheel.namelist())
    source = ROOT / "src/headway"
    data = {
        path.relative_to(ROOT / "src").as_posix()
        for path in source.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", "")
    }
    assert not data - names, "missing in the wheel"
    assert {f"headway/recipes/{name}.yaml" for name in recipe_names()} <= names
    assert {
        "headway/py.typed",
        "headway/tokenizer/chat_templates/chatml.jinja",
        "headway/text/self_instruct/seeds_en.jsonl",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "recipes", "benchmarks"))]
    info = next(name for name in names if name.endswith("/METADATA"))
    about = HeaderParser().parsestr(wheel.read(info).decode())
    assert about["Requires-Python"] == ">=3.11"
    assert about["License-Expression"] == "Apache-2.0"
    assert {*EXTRAS.values(), "all", "demo"} <= set(about.get_all("Provides-Extra") or ())
    core = [line.lower() for line in about.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert not [
        line
        for line in core
        if line.startswith(tuple(name.lower() for name in (*EXTRAS, "protobuf")))
    ]
    assert f"Source, {REPOSITORY}" in (about.get_all("Project-URL") or ())
    licence = wheel.read(info.replace("METADATA", "licenses/LICENSE")).decode()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    notice = wheel.read(info.replace("METADATA", "licenses/NOTICE")).decode()
    libraries = json.loads(wheel.read("headway/vendor/libraries.json"))
    for library in libraries:
        assert library["package"] in notice
        assert {f"headway/vendor/{name}" for name in library["files"]} <= names


def test_on_a_package_index_the_readme_has_no_relative_link(built: dict[str, Path]) -> None:
    wheel = zipfile.ZipFile(built[".whl"])
    info = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
    about = HeaderParser().parsestr(wheel.read(info).decode())
    assert about["Description-Content-Type"] == "text/markdown"
    published = about.get_payload()
    assert isinstance(published, str)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    def targets(text: str) -> list[str]:
        return re.findall(r"\]\(([^)]+)\)", text)

    assert len(targets(published)) == len(targets(readme)) > 40
    paths: list[str] = []
    for before, after in zip(targets(readme), targets(published), strict=True):
        if before.startswith(("https:", "http:", "mailto:", "#")):
            assert after == before
            continue
        match = re.fullmatch(rf"{REPOSITORY}/(raw|blob|tree)/HEAD/(.+)", after)
        assert match is not None, after
        assert match[2] == before
        path = ROOT / before.partition("#")[0]
        # What a browser shows in the page, a file, a folder.
        kind = "raw" if path.suffix == ".png" else "blob"
        assert match[1] == ("tree" if path.is_dir() else kind)
        paths.append(match[1])
    assert {"raw", "blob", "tree"} <= set(paths)


def test_without_an_address_the_readme_of_a_package_is_the_file(
    setup_file: Callable[..., dict[str, Any]],
) -> None:
    assert setup_file(None)["long_description"] == (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("address", ["http://git.example.org/a/b", "https://me@git.example.org/a"])
def test_an_address_that_is_no_page_ends_the_build_in_one_line(
    address: str, setup_file: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(SystemExit, match="it must be https://HOST/OWNER/NAME"):
        setup_file(address)


def test_a_wheel_of_a_checkout_says_its_commit(built: dict[str, Path], tmp_path: Path) -> None:
    commit = git(built[".whl"].parents[1], "rev-parse", "HEAD")[:12]
    with tarfile.open(built[".gz"]) as archive:
        name = next(name for name in archive.getnames() if name.endswith("headway/commit.txt"))
        file = archive.extractfile(name)
        assert file is not None
        assert file.read().decode() == f"{commit}\n"

    zipfile.ZipFile(built[".whl"]).extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "headway", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"commit {commit}" in done.stdout
    assert "modified" not in done.stdout


def test_a_build_of_changed_files_says_that_they_are_modified(
    tmp_path: Path, setup_file: Callable[..., dict[str, Any]]
) -> None:
    (tmp_path / "file.txt").write_text("a")
    make_checkout(tmp_path)
    commit = git(tmp_path, "rev-parse", "HEAD")[:12]
    commit_text = setup_file(None, tmp_path)["commit_text"]
    assert commit_text() == f"{commit}\n"
    (tmp_path / "file.txt").write_text("b")
    assert commit_text() == f"{commit}, modified\n"
    shutil.rmtree(tmp_path / ".git")
    assert commit_text() is None


def test_the_source_distribution_holds_the_same(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "NOTICE",
        "README.md",
        "pyproject.toml",
        "src/headway/py.typed",
        "src/headway/recipes/laptop/lora.yaml",
    } <= names


def use(headway: Path, folder: Path) -> dict[str, object]:
    """A first hour in a folder outside the repository: recipes, tokenizer, data, training, tuning, answers, scores, export."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }

    def run(*arguments: str, standard_input: str = "") -> str:
        done = subprocess.run(
            [str(headway), *arguments],
            cwd=folder,
            env=environment,
            input=standard_input,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"headway {' '.join(arguments)}: {done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    (folder / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"text": f"{n} and {n * n} are numbers. " * 9}) + "\n" for n in range(300)
        )
    )
    (folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in QUESTIONS))
    small = [
        "steps=4",
        "data.seq_len=64",
        "batch={rows: 4, micro_rows: 2}",
        "eval.every=4",
        "eval.rows=4",
        "device=cpu",
    ]
    assert "laptop/lora" in run("init")
    run("init", "pretrain")
    run(
        "tokenizer",
        "train",
        "--input",
        "corpus.jsonl",
        "--vocab-size",
        "300",
        "--out",
        "tokenizers/mine",
    )
    run(
        "data",
        "tokenize",
        "--input",
        "corpus.jsonl",
        "--tokenizer",
        "tokenizers/mine",
        "--out",
        "stores/mine",
    )
    run("train", "pretrain.yaml", *small, "data.valid.fraction=0.1")
    run(
        "train",
        "lora",
        "init.from=runs/pretrain-laptop",
        "data.train.0.path=chat.jsonl",
        "epochs=null",
        *small,
    )
    run(
        "train",
        "laptop/sft",
        "init.from=runs/pretrain-laptop",
        "data.train.0.path=chat.jsonl",
        "epochs=null",
        "--nproc",
        "2",
        *small,
    )
    run(
        "generate",
        "--model",
        "runs/sft-laptop",
        "--prompt",
        "Count to 3.",
        "--chat-template",
        "tokenizer",
        "--max-new-tokens",
        "8",
    )
    scores = json.loads(
        run(
            "eval",
            "ppl",
            "--model",
            "runs/lora-laptop",
            "--data",
            "corpus.jsonl",
            "--max-samples",
            "5",
            "--json",
        )
    )
    run("export", "hf", "--model", "runs/sft-laptop", "--out", "exported")
    run("config", "diff", "laptop/sft", "runs/sft-laptop")
    run("list")
    return {
        "loss": scores["loss"],
        "exported": sorted(path.name for path in (folder / "exported").iterdir()),
    }


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_in_a_clean_environment_the_core_alone_trains_answers_and_exports(
    built: dict[str, Path], tmp_path: Path
) -> None:
    """Needs the network, or an index that pip is configured for."""
    import torch

    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    python = tmp_path / "venv/bin/python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        f"torch=={torch.__version__.partition('+')[0]}",
        str(built[".whl"]),
    ]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    there = subprocess.run(
        [str(python), "-c", "import transformers"], capture_output=True, check=False
    )
    assert there.returncode != 0, "the core should not bring transformers"
    (tmp_path / "work").mkdir()
    results = use(tmp_path / "venv/bin/headway", tmp_path / "work")
    assert "model.safetensors" in str(results["exported"])
