"""What looks like success and is none is said: a tokenizer that knows nothing, a dry run that writes, exports that differ by chance."""

import shutil
from pathlib import Path

import tokenizers
from support.byte_model import byte_tokenizer, write_model
from support.runs import headway, tiny_settings
from tokenizers import models, pre_tokenizers

from headway.tokenizer.load import Tokenizer


def texts(folder: Path) -> Path:
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return folder / "a.txt"


def test_a_tokenizer_that_knows_no_character_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(
        models.WordLevel({"<unk>": 0, "</s>": 1, "zzz": 2}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer(backend, {"eos": "</s>", "unk": "<unk>"}).save(tmp_path / "tokenizer")
    raw = texts(tmp_path)
    done = headway(
        "data",
        "tokenize",
        "--input",
        str(raw),
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        "--out",
        str(tmp_path / "store"),
    )
    trained = headway(
        "train",
        *tiny_settings(tmp_path, "run"),
        f"data.train=[{raw}]",
        f"tokenizer={tmp_path / 'tokenizer'}",
        "steps=2",
    )
    (tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]}\n'
    )
    source = f"data.train=[{{path: {tmp_path}/chat.jsonl, kind: chat, chat_template: alpaca}}]"
    chat = headway(
        "train",
        *tiny_settings(tmp_path, "run"),
        source,
        f"tokenizer={tmp_path / 'tokenizer'}",
        "steps=2",
    )
    for refused in (done, trained, chat):
        assert refused.returncode == 2, refused.stderr
        assert "knows no character of the text" in refused.stderr
    assert not (tmp_path / "store" / "store.json").exists()
    assert not list((tmp_path / "cache").glob("stores/*/store.json"))


def test_a_dry_run_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "tokenizer")
    settings = [
        *tiny_settings(tmp_path, "run"),
        f"data.train=[{texts(tmp_path)}]",
        f"tokenizer={tmp_path / 'tokenizer'}",
        "steps=2",
    ]
    settings += [
        "model.vocab_size=300",
        "data.valid=null",
        "eval.every=null",
        f"data.stage_to={tmp_path / 'staged'}",
    ]
    before = sorted(path.name for path in tmp_path.iterdir())
    tried = headway("train", *settings, "--dry-run")
    assert tried.returncode == 0, tried.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    done = headway("train", *settings)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "run")
    kept = sorted(str(path) for path in tmp_path.rglob("*"))
    tried = headway("train", *settings, "--dry-run")  # reads what is there
    assert tried.returncode == 0, tried.stderr
    assert "build a token store" not in tried.stderr
    assert sorted(str(path) for path in tmp_path.rglob("*")) == kept


def test_exports_of_the_same_model_are_the_same_to_the_byte(tmp_path: Path) -> None:
    files = [
        (write_model(tmp_path / str(number)) / "model.safetensors").read_bytes()
        for number in range(6)
    ]
    assert len(set(files)) == 1
