"""What pip installs is all a user needs: recipes, templates, types and licence are in the wheel, and it works outside the repository."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and a source distribution of a copy of the tree."""
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
