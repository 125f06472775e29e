"""A hub id wherever a model, a tokenizer or data is named: revisions, what is left out, who downloads, what an interruption leaves."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_server import FILES, Hub, serve_hub, using_hub

from headway.cli import main
from headway.errors import ConfigError, DataError
from headway.text import hub_download
from headway.text.hub import is_hub_id, local_or_hub, split_revision
from headway.text.hub_request import UNFINISHED, HubRequest
from headway.tokenizer.load import load_tokenizer
from headway.tokenizer.train import train_bpe

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serve_hub() as state, using_hub(state.url, tmp_path / "home"):
        yield state


def weights(hub: Hub) -> list[str]:
    return [
        request
        for request in hub.requests
        if request.startswith("GET") and ".safetensors" in request
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Qwen/Qwen2.5-0.5B", ("Qwen/Qwen2.5-0.5B", None)),
        ("org/name@main", ("org/name", "main")),
        ("org/name@refs/convert/parquet", ("org/name", "refs/convert/parquet")),
        ("org/name@v1.0", ("org/name", "v1.0")),
    ],
)
def test_an_id_may_carry_a_revision(text: str, parts: tuple[str, str | None]) -> None:
    assert is_hub_id(text)
    assert split_revision(text) == parts
    assert not is_hub_id("runs/mine@v1")
    assert not is_hub_id("org/name@")
    assert not is_hub_id("org/name@../x")


def test_what_exists_here_wins(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert local_or_hub("org/name") == Path("org/name")
    assert not hub.requests


def test_each_revision_is_downloaded_once_and_found_without_a_network(
    hub: Hub, tmp_path: Path
) -> None:
    hub.revisions = {"v1": {**FILES, "config.json": b'{"model_type": "old"}'}}
    new = local_or_hub("org/name")
    old = local_or_hub("org/name@v1")
    assert (new / "config.json").read_bytes() == FILES["config.json"]
    assert (old / "config.json").read_bytes() == b'{"model_type": "old"}'
    assert len(weights(hub)) == 1, "the same file of both revisions is one download"
    with using_hub(NOBODY, tmp_path / "home"):
        assert (local_or_hub("org/name"), local_or_hub("org/name@v1")) == (new, old)
    with pytest.raises(
        DataError, match=r"^org/name: the hub has no revision 'v9' of this model\.$"
    ):
        local_or_hub("org/name@v9")


MODEL = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
]
SHARDS = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
]
OTHER = [
    "pytorch_model.bin", "consolidated.safetensors", "model.fp16.safetensors", "original/params.json", "onnx/model.onnx", "x.gguf",
    "flax_model.msgpack", "modeling.py", "README.md", "training_args.bin",
]  # fmt: skip


def test_a_model_is_its_safetensors_and_its_tokenizer_and_no_pickle() -> None:
    assert HubRequest("org/name").choose([*MODEL, *SHARDS, *OTHER]) == [*MODEL, *SHARDS]
    assert HubRequest("org/name").choose(["config.json", "consolidated.safetensors"]) == [
        "config.json",
        "consolidated.safetensors",
    ]
    only = HubRequest("org/name", "tokenizer").choose([*MODEL, *SHARDS, *OTHER])
    assert set(only) == set(MODEL), "no weights for a tokenizer"
    everything = HubRequest("org/name", "everything")
    assert "pytorch_model.bin" not in everything.choose([*SHARDS, *OTHER])
    assert "README.md" in everything.choose([*SHARDS, *OTHER])
    assert everything.choose(["pytorch_model.bin"]) == ["pytorch_model.bin"], (
        "a repository without safetensors is downloaded as it is"
    )
    assert HubRequest("org/name", "everything", include=["*.bin"]).choose([*SHARDS, *OTHER]) == [
        "pytorch_model.bin",
        "training_args.bin",
    ]
    assert HubRequest("org/name", "dataset").choose(["a.parquet", "b/c.jsonl", "d.pkl"]) == [
        "a.parquet",
        "b/c.jsonl",
    ]


def test_a_model_of_pickles_alone_is_refused(hub: Hub) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(
        DataError,
        match=r"^org/name: has no safetensors; pytorch_model\.bin is another format, and pickles can run code",
    ):
        local_or_hub("org/name")
    assert not any("pytorch_model" in request for request in hub.requests)


def test_a_tokenizer_comes_alone_and_its_model_later(hub: Hub, tmp_path: Path) -> None:
    train_bpe(["some text of some text"], vocab_size=262, out=tmp_path / "mine")
    hub.files = {
        **FILES,
        **{path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()},
    }
    assert load_tokenizer("org/name").fingerprint == load_tokenizer(tmp_path / "mine").fingerprint
    assert not weights(hub)
    assert (local_or_hub("org/name") / "model.safetensors").is_file(), (
        "the cached tokenizer is not taken for the model"
    )


def test_one_of_several_processes_downloads(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    folders: list[Path] = []
    hub.slow_seconds = 0.02
    with caplog.at_level(logging.INFO, "headway"):
        ranks = [
            threading.Thread(target=lambda: folders.append(local_or_hub("org/name")))
            for _ in range(3)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert len(weights(hub)) == 1
    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("downloading org/name: 1.0 MB in 1 files") for line in said) == 1
    assert "org/name: waiting for another process that downloads it" in said


def test_an_interrupted_download_is_not_taken_for_the_model(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": bytes(range(256)) * 50_000, "config.json": b"{}"}
    hub.cut_after = 11_000_000
    hub.gone_after_cut = True
    with pytest.raises(DataError, match="did not provide it"):
        local_or_hub("org/name")
    with (
        using_hub(NOBODY, tmp_path / "home"),
        pytest.raises(DataError, match=r"an earlier download was interrupted; connect"),
    ):
        local_or_hub("org/name")
    hub.gone_after_cut = False
    hub.requests = []
    assert (local_or_hub("org/name") / "model.safetensors").read_bytes() == hub.files[
        "model.safetensors"
    ]
    (asked,) = weights(hub)
    assert int(asked.rpartition("bytes=")[2].rstrip("-")) >= 10_000_000, (
        "only the rest is asked for"
    )
    assert not list(tmp_path.rglob(UNFINISHED))


def test_ctrl_c_ends_a_download_at_once_and_keeps_what_has_arrived(
    hub: Hub, tmp_path: Path
) -> None:
    hub.files = {"model.safetensors": bytes(1 << 26)}
    hub.slow_seconds = 0.01
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "other"),
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-m", "headway", "download", "org/name"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        while (
            not any(part.stat().st_size for part in tmp_path.rglob("*.part"))
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in said, said
    assert time.monotonic() - began < 5
    assert any(part.stat().st_size for part in tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (
            (401, "GatedRepo"),
            "org/name: the model needs your consent on its page and a token (HF_TOKEN). Then run this again.",
        ),
        (
            (401, "RepoNotFound"),
            "org/name: the hub has no such model, or it is private; a private one needs a token (HF_TOKEN).",
        ),
        (
            (404, "RepoNotFound"),
            "org/name: the hub has no such model, or it is private; a private one needs a token (HF_TOKEN).",
        ),
    ],
)
def test_a_refusal_is_one_line(hub: Hub, refusal: tuple[int, str], message: str) -> None:
    hub.refusal = refusal
    with pytest.raises(DataError) as said:
        local_or_hub("org/name")
    assert str(said.value) == message


@pytest.mark.parametrize("refusal", [None, (404, "RepoNotFound")])
def test_a_tokenizer_that_is_not_there_can_be_trained(
    hub: Hub, refusal: tuple[int, str] | None, tmp_path: Path
) -> None:
    hub.refusal = refusal
    address = NOBODY if refusal is None else hub.url
    with using_hub(address, tmp_path / "home"), pytest.raises(DataError) as said:
        local_or_hub("tokenizers/mine", tokenizer=True)
    assert "`headway tokenizer train" in str(said.value)
    assert "--out tokenizers/mine`" in str(said.value)
    assert "\n" not in str(said.value)


def test_offline_mode_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"not found locally, .* did not provide it \(HF_HUB_OFFLINE is set\)"
    ):
        local_or_hub("org/name")
    assert not hub.requests


def test_without_the_hub_library_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"^org/name: no such file or folder here, and the package huggingface_hub, .* pip install",
    ):
        local_or_hub("org/name")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A small model with its tokenizer."""
    from headway.export.huggingface import export_huggingface
    from headway.model.base import build_model
    from headway.model.config import ModelConfig

    tokenizer = tmp_path / "tokenizer"
    train_bpe([Path(__file__).read_text()], vocab_size=300, out=tokenizer)
    config = ModelConfig(
        vocab_size=320, hidden_size=16, num_layers=1, num_heads=2, ffn_size=24, max_seq_len=32
    )
    weights = build_model(config).named_parameters()
    export_huggingface(config, weights, tmp_path / "model", tokenizer=tokenizer)
    return tmp_path / "model"


@pytest.fixture
def hub_with_model(hub: Hub, model_folder: Path) -> Hub:
    """A repository with a model in one revision and data in another."""
    hub.files = {"README.md": b"nothing"}
    hub.revisions = {
        "model": {path.name: path.read_bytes() for path in model_folder.iterdir()},
        "data": {"data/train-00000-of-00001.jsonl": b'{"text": "from the hub"}\n' * 20},
    }
    return hub


GREEDY = ["--prompt", "def", "--max-new-tokens", "2", "--json", "--device", "cpu"]


def test_generate_takes_a_hub_id_as_it_takes_a_folder(
    hub_with_model: Hub, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", "org/name", "--revision", "model", *GREEDY]) == 0
    from_hub = json.loads(capsys.readouterr().out)
    assert main(["generate", "--model", str(model_folder), *GREEDY]) == 0
    assert json.loads(capsys.readouterr().out) == from_hub


def test_tokenize_takes_hub_ids_for_input_and_tokenizer(
    hub_with_model: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--input", "org/name@data", "--tokenizer", "org/name@model"]
    assert main(["data", "tokenize", *options, "--out", str(tmp_path / "store"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 20


def test_a_revision_of_a_folder_or_a_second_one_is_refused(
    hub_with_model: Hub, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(model_folder), "--revision", "v1", *GREEDY]) == 2
    assert "is no hub id (ORGANISATION/NAME). Leave --revision out." in capsys.readouterr().err
    assert main(["generate", "--model", "org/name@model", "--revision", "v1", *GREEDY]) == 2
    assert "Give one of them." in capsys.readouterr().err
