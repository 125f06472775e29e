"""What a user can get wrong ends in one line and exit code 2, before anything is written."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.runs import headway, make_stores, write_recipe

from headway.cli import main

WEIGHTLESS = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    make_stores(folder)
    (folder / "file").write_text("not a folder")
    (folder / "empty").mkdir()
    (folder / "weightless").mkdir()
    (folder / "weightless" / "config.json").write_text(json.dumps(WEIGHTLESS))
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "missing.yaml"], ["missing.yaml", "no such file"]),
        (["train", "optim.lrr=1"], ["optim.lrr is not a setting", "did you mean 'lr'"]),
        (["train", "optim.lr=fast"], ["optim.lr is", "number"]),
        (["train", "data.train=[nowhere]"], ["nowhere"]),
        (["train", "tokenizer=nowhere"], ["tokenizer is 'nowhere'", "headway tokenizer train"]),
        (["train", "init.from=nowhere"], ["init.from", "nowhere"]),
        (["generate", "--model", "nowhere", "--prompt", ""], ["a prompt is empty"]),
        (["train", "model.family=lama"], ["model.family is 'lama'", "llama"]),
        (["train", "batch.tokens=1000"], ["batch.tokens is 1000", "multiple", "Try"]),
        (["train", "freeze=[layers.99]"], ["layers.99", "matches no parameter"]),
        (["train", "device=cuda"], ["device is 'cuda'", "device=cpu"]),
        (["train", "data.seq_len=1024"], ["data.seq_len is 1024", "max_seq_len=512"]),
        (
            ["train", "parallel.context=2", "objective.kind=dpo"],
            ["objective dpo needs whole rows", "parallel.context is 2 and must be 1"],
        ),
        (
            ["train", "parallel.context=2"],
            ["parallel.context is 2", "number of ranks, 1", "--nproc"],
        ),
        (
            ["train", "parallel.tensor=3"],
            ["parallel.tensor is 3", "must divide model.num_heads=4", "Use 2"],
        ),
        (["train", "parallel.tensor=2"], ["parallel.tensor is 2", "number of ranks, 1", "--nproc"]),
        (["train", "steps=5", "epochs=1"], ["steps and epochs"]),
        (
            [
                "train",
                "data.train=[{path: $/store0, weight: 1}]",
                "model.vocab_size=32",
                "data.tokenizer_unchecked=true",
            ],
            ["vocabulary has 32"],
        ),
        (
            ["train", "data.train=[$/store0]", "model.vocab_size=64"],
            ["does not record which tokenizer", "tokenizer_unchecked"],
        ),
        (["train", "run.dir=$/file"], ["$/file"]),
        (["train", "a.yaml", "b.yaml"], ["two recipes"]),
        (["generate", "--model", "nowhere", "--prompt", "x"], ["nowhere", "is not a folder"]),
        (["eval", "ppl", "--model", "nowhere", "--data", "x"], ["nowhere"]),
        (["export", "hf", "--model", "nowhere", "--out", "y"], ["nowhere"]),
        (["train", "track=[{kind: alert, url_env: NO_SUCH_VARIABLE}]"], ["NO_SUCH_VARIABLE"]),
        (["trian"], ["trian", "train"]),
        (["train", "$/empty"], ["$/empty", "is a folder", "recipe.yaml"]),
        (["train", "--profile", "steps=6"], ["--profile records steps 6 to 8", "only 6 are left"]),
        (["train", "run.name=../elsewhere"], ["run.name", "../elsewhere", "run.dir"]),
        (["train", "run.name=/elsewhere"], ["run.name", "run.dir"]),
        (["train", "model.hidden_size=100000000000"], ["hidden_size is 100000000000", "smaller"]),
        (["train", "model.num_layers=100000000"], ["num_layers 100000000", "smaller"]),
        (
            ["tokenizer", "train", "--input", "$/file", "--vocab-size", "300", "--out", "$/file"],
            ["$/file", "is a file"],
        ),
        (
            ["data", "tokenize", "--input", "$/file", "--tokenizer", "t", "--out", "$/file"],
            ["$/file", "is a file"],
        ),
        (
            ["data", "tokenize", "--input", "$/file", "--tokenizer", "t", "--out", "/proc/store"],
            ["/proc/store", "cannot be written"],
        ),
        (
            ["data", "clean", "$/file", "out.jsonl", "--min-characters", "-4"],
            ["min_characters is -4", "0 or more"],
        ),
        (
            ["export", "hf", "--model", "nowhere", "--out", "/proc/export"],
            ["/proc", "cannot be written"],
        ),
        (
            ["eval", "ppl", "--model", "nowhere", "--data", "$/file", "--tensorboard", "$/file"],
            ["$/file", "is a file"],
        ),
        (
            ["data", "inspect", "$"],
            ["$", "token stores but is not one itself", "$/store0 or $/store1"],
        ),
        (["demo", "--out", "$/file"], ["$/file", "is a file"]),
        (["verify", "checkpoint", "nowhere"], ["nowhere", "no such folder"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    stores: Path, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    command = [argument.replace("$", str(stores)) for argument in arguments]
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        done = headway(*command)
    finally:
        os.chdir(before)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word.replace("$", str(stores)).lower() in lines[0].lower()
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_fresh_interpreter_ends_a_mistake_the_same_way() -> None:
    done = headway("train", "freeze=[layers.99]", afresh=True)
    assert done.returncode == 2
    assert (
        done.stderr.startswith("error: freeze contains 'layers.99'")
        and len(done.stderr.splitlines()) == 1
    ), done.stderr


def test_an_interrupt_that_an_import_swallowed_is_still_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half_imported() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        raise AttributeError("module 'numpy' has no attribute 'diff'")

    monkeypatch.setattr("headway.cli.build_app", lambda words: lambda **_: half_imported())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["train"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "stopped\n"


def test_a_dry_run_writes_nothing_and_says_what_would_happen(stores: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, [stores / "store0", stores / "store1"])
    done = headway("train", str(recipe), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["total_steps"] == 40
    assert result["first_step"]["loss"] > 0
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "init.from=$/empty"], ["init.from: $/empty", "no checkpoint and no model"]),
        (
            ["train", "init.from=$/empty", "init.content=all"],
            ["init.from: $/empty", "no checkpoint and no model"],
        ),
        (
            ["train", "init.from=$/weightless", "data.seq_len=64"],
            ["$/weightless", "neither model.safetensors"],
        ),
        (["train", "--resume", "$/empty"], ["$/empty", "no checkpoint"]),
        (
            ["generate", "--model", "$/empty", "--prompt", "x"],
            ["$/empty", "no checkpoint and no model"],
        ),
    ],
)
def test_a_folder_without_a_model_is_the_users_mistake_and_nothing_is_written(
    stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([argument.replace("$", str(stores)) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word.replace("$", str(stores)) in line for word in [*words, "Give a"]), line
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_damaged_weights_to_start_from_are_named_and_not_tried_again(
    stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text(json.dumps(WEIGHTLESS))
    (damaged / "model.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0{ broken")
    monkeypatch.chdir(tmp_path)
    assert main(["train", f"init.from={damaged}", "data.seq_len=64", "device=cpu"]) == 2, (
        "a supervisor must not start it again"
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert "init.from" in line and "model.safetensors" in line, line
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"], "nothing is written"
