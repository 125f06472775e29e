"""Without any of the optional packages: training, evaluation and export work, and what does not names the extra in one line."""

import ast
import json
import sys
import tomllib
from pathlib import Path

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.cli import main
from headway.runtime.optional import EXTRAS, how_to_get, install_command, is_installed

ROOT = Path(__file__).parents[2]
ALSO = ("triton", "peft", "datasets", "accelerate")


@pytest.fixture
def core_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user who installed only the core."""
    for name in (*EXTRAS, *ALSO):
        for loaded in [
            module for module in sys.modules if module == name or module.startswith(f"{name}.")
        ]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_an_evaluation_and_an_export_need_none_of_them(
    core_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (core_only / "chat.jsonl").write_text(
        "".join(
            json.dumps({"instruction": f"Add {n}.", "output": f"{n} + 1"}) + "\n" for n in range(30)
        )
    )
    base = write_model(
        core_only / "base",
        CONFIG.with_(max_seq_len=64),
        byte_tokenizer("<|im_start|>", "<|im_end|>"),
    )
    small = [
        "data.seq_len=64",
        "batch={rows: 2, micro_rows: 1}",
        "epochs=null",
        "steps=2",
        "eval.rows=2",
        "eval.every=2",
        "device=cpu",
    ]
    capsys.readouterr()
    assert main(["train", "lora", f"init.from={base}", "data.train.0.path=chat.jsonl", *small]) == 0
    said = capsys.readouterr()
    assert said.err.count("not installed") == 1 and "warning" not in said.err, said.err
    assert f"tensorboard is not installed ({install_command('tensorboard')})" in said.err
    assert not (core_only / "runs/lora-laptop/tensorboard").exists()
    (core_only / "text.txt").write_text("A plain text of some words. " * 20)
    assert (
        main(
            ["eval", "ppl", "--model", "runs/lora-laptop", "--data", "text.txt", "--out", "report"]
        )
        == 0
    )
    report = (core_only / "report/report.md").read_text()
    assert install_command("plot") in capsys.readouterr().err
    assert "![" not in report
    assert "## Calibration" in report
    assert main(["export", "hf", "--model", "runs/lora-laptop", "--out", "out"]) == 0
    assert main(["generate", "--model", "out", "--prompt", "Add", "--max-new-tokens", "3"]) == 0


def write(folder: Path, name: str, content: bytes = b"") -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("parquet", ["data", "validate", "x.parquet"]),
        ("parquet", ["data", "clean", "x.jsonl", "out.parquet"]),
        ("zstd", ["data", "validate", "x.jsonl.zst"]),
        ("zstd", ["data", "clean", "x.jsonl", "out.jsonl.zst"]),
        ("sentencepiece", ["tokenizer", "inspect", "x.model"]),
        (
            "sentencepiece",
            [
                "tokenizer",
                "train",
                "--kind",
                "sentencepiece",
                "--input",
                "x.jsonl",
                "--vocab-size",
                "300",
                "--out",
                "t",
            ],
        ),
        ("transformers", ["tokenizer", "inspect", "odd"]),
        ("serve", ["serve", "--model", "m"]),
        (
            "tensorboard",
            ["eval", "ppl", "--model", "m", "--data", "x.jsonl", "--tensorboard", "tb"],
        ),
        ("plot", ["masks", "show", "--masks", "x.tsv", "--out", "x.png"]),
        ("zh", ["data", "clean", "x.jsonl", "out.jsonl", "--simplified"]),
        ("s3", ["train", "steps=1", "checkpoint.to=s3://bucket/x", "device=cpu"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:3]),
)
def test_what_needs_an_extra_says_so_in_one_line(
    core_only: Path, capsys: pytest.CaptureFixture[str], extra: str, arguments: list[str]
) -> None:
    write(core_only, "x.jsonl", b'{"text": "some words"}\n')
    write(core_only, "x.parquet", b"PAR1")
    write(core_only, "x.jsonl.zst", b"\x28\xb5\x2f\xfd")
    write(core_only, "x.model", b"\x0a\x05")
    write(core_only, "x.tsv", b"")
    (core_only / "odd").mkdir()
    write(core_only / "odd", "tokenizer_config.json", b'{"tokenizer_class": "BertTokenizer"}')
    assert main(arguments) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"is not installed. Run {install_command(extra)}." in errors[0], (
        errors
    )


def test_the_extras_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(EXTRAS.values()) <= set(extras)
    assert how_to_get("matplotlib") is None or not is_installed("matplotlib")


def test_no_optional_package_is_imported_when_a_module_is() -> None:
    banned = {name.split(".")[0] for name in (*EXTRAS, *ALSO)}
    # loaded only where the package is, as kernels of Triton are
    allowed = {
        "export/code/modeling_qwen3_nope.py",
        "serve/app.py",
    }
    for path in sorted((ROOT / "src/headway").rglob("*.py")):
        if str(path.relative_to(ROOT / "src/headway")) in allowed or path.name.endswith(
            "_triton.py"
        ):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & banned, f"{path}:{node.lineno}"
