"""Fetching against a small hub on loopback: caches, plain folders, filters, cut connections, wrong checksums, no network."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import FILES, Hub, serve_hub, using_hub

from headway.cli import main
from headway.data.config import default_cache_dir
from headway.errors import ConfigError
from headway.text.hub import in_cache, is_hub_id, local_or_hub

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as state:
        yield state


def run(hub: Hub | str, home: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """`headway ARGUMENTS --json` against a hub: the exit code, the result, what was said."""
    out = io.StringIO()
    err = io.StringIO()
    with (
        using_hub(hub if isinstance(hub, str) else hub.url, home),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = main([*arguments, "--json"])
    return code, json.loads(out.getvalue() or "{}"), err.getvalue()


def content(folder: Path) -> dict[str, bytes]:
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if not name.startswith(".cache")}


def test_a_model_is_fetched_into_the_cache_and_found_there_without_a_network(
    hub: Hub, tmp_path: Path
) -> None:
    code, folder, _ = run(hub, tmp_path, "download", "org/name")
    assert code == 0
    assert content(Path(folder["path"])) == FILES
    assert Path(folder["path"]).is_relative_to(tmp_path)
    code, again, _ = run(NOBODY, tmp_path, "download", "org/name")
    assert code == 0
    assert again == folder


def test_a_dataset_is_fetched_into_a_folder_or_a_cache_of_ones_own(
    hub: Hub, tmp_path: Path
) -> None:
    code, folder, _ = run(
        hub,
        tmp_path / "home",
        "download",
        "org/name",
        "--dataset",
        "--to",
        str(tmp_path / "mine"),
        "--revision",
        "main",
    )
    assert code == 0
    assert Path(folder["path"]) == tmp_path / "mine"
    assert content(tmp_path / "mine") == FILES
    assert any("/api/datasets/org/name" in request for request in hub.requests)
    code, folder, _ = run(
        hub, tmp_path / "home", "download", "org/name", "--cache-dir", str(tmp_path / "cache")
    )
    assert code == 0
    assert Path(folder["path"]).is_relative_to(tmp_path / "cache")


def test_only_files_that_match_are_fetched(hub: Hub, tmp_path: Path) -> None:
    code, _, _ = run(
        hub,
        tmp_path / "home",
        "download",
        "org/name",
        "--include",
        "*.json",
        "--to",
        str(tmp_path / "mine"),
    )
    assert code == 0
    assert content(tmp_path / "mine") == {"config.json": FILES["config.json"]}
    code, _, said = run(
        hub,
        tmp_path / "home",
        "download",
        "org/name",
        "--include",
        "*.gguf",
        "--to",
        str(tmp_path / "none"),
    )
    assert code == 2
    assert "org/name: no file of the model matches *.gguf" in said


def test_a_cut_connection_is_resumed_where_it_was(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": bytes(range(256)) * 50_000}
    hub.cut_after = 11_000_000
    code, folder, _ = run(hub, tmp_path, "download", "org/name")
    assert code == 0
    assert content(Path(folder["path"])) == hub.files
    rest = [
        int(request.rpartition("bytes=")[2].rstrip("-"))
        for request in hub.requests
        if "bytes=" in request
    ]
    assert len(rest) == 1 and 10_000_000 < rest[0] <= 11_000_000, (
        "the second request asks only for the rest"
    )


@pytest.mark.parametrize("where", ["cache", "folder", "own cache"])
def test_a_later_start_continues_inside_the_file(hub: Hub, tmp_path: Path, where: str) -> None:
    options = {
        "cache": (),
        "folder": ("--to", str(tmp_path / "mine")),
        "own cache": ("--cache-dir", str(tmp_path / "own")),
    }[where]
    hub.files = {"model.safetensors": bytes(range(256)) * 50_000, "config.json": b"{}"}
    hub.cut_after = 11_000_000
    hub.gone_after_cut = True
    code, _, said = run(hub, tmp_path / "home", "download", "org/name", *options)
    assert code == 2
    assert said.strip().splitlines()[-1].startswith("error: org/name: not found locally")
    hub.gone_after_cut = False
    hub.requests.clear()
    code, folder, said = run(hub, tmp_path / "home", "download", "org/name", *options)
    assert code == 0 and content(Path(folder["path"])) == hub.files, said
    asked = [
        request
        for request in hub.requests
        if request.startswith("GET") and "model.safetensors" in request
    ]
    assert len(asked) == 1 and int(asked[0].rpartition("bytes=")[2].rstrip("-")) >= 10_000_000, (
        asked
    )
    assert not list(tmp_path.rglob("*.part")), "nothing is left behind"


def test_a_damaged_part_is_noticed(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": bytes(range(256)) * 50_000}
    hub.cut_after = 11_000_000
    hub.gone_after_cut = True
    run(hub, tmp_path / "home", "download", "org/name", "--to", str(tmp_path / "mine"))
    (part,) = tmp_path.rglob("*.part")
    part.write_bytes(b"?" * part.stat().st_size)
    hub.gone_after_cut = False
    code, folder, said = run(
        hub, tmp_path / "home", "download", "org/name", "--to", str(tmp_path / "mine")
    )
    assert code == 0 and content(Path(folder["path"])) == hub.files, said


def test_a_failed_fetch_keeps_the_files_it_has(hub: Hub, tmp_path: Path) -> None:
    hub.missing = {"config.json"}
    code, _, said = run(hub, tmp_path, "download", "org/name")
    assert code == 2
    assert said.strip().splitlines()[-1].startswith("error: org/name: not found locally")
    hub.missing = set()
    hub.requests = []
    code, folder, _ = run(hub, tmp_path, "download", "org/name")
    assert code == 0
    assert content(Path(folder["path"])) == FILES
    assert not any(
        request.startswith("GET") and request.endswith("model.safetensors")
        for request in hub.requests
    )


def test_a_wrong_checksum_is_noticed_and_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    for name, where in (
        ("model.safetensors", ()),
        ("config.json", ("--to", str(tmp_path / "mine"))),
    ):
        hub.wrong = {name}
        home = tmp_path / name
        code, _, said = run(hub, home, "download", "org/name", *where)
        assert code == 2
        assert (
            f"org/name: {name} does not have the checksum of the hub; it was removed. Download it again."
            in said
        )
        hub.wrong = set()
        code, folder, _ = run(hub, home, "download", "org/name", *where)
        assert code == 0
        assert content(Path(folder["path"])) == FILES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("org/other",),
            "org/other: the hub has no such model (a dataset needs --dataset), or it is private.",
        ),
        (("just-a-name",), "'just-a-name' is not a hub id; write ORGANISATION/NAME."),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    hub: Hub, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, said = run(hub, tmp_path, "download", *arguments)
    assert code == 2
    assert said.strip().splitlines()[-1] == f"error: {message}"


def test_without_a_network_one_line_says_what_to_do(tmp_path: Path) -> None:
    code, _, said = run(NOBODY, tmp_path, "download", "org/name", "--dataset")
    assert code == 2
    line = said.strip().splitlines()[-1]
    assert line.startswith(f"error: org/name: not found locally, and {NOBODY} did not provide it (")
    assert (
        "run `headway download org/name --dataset --to name`, copy that folder here and give its path"
        in line
    )
    assert str(tmp_path / "hub") in line
    assert "HF_ENDPOINT" in line


CODE = """
import sys
from headway.text.hub import local_or_hub
from headway.text.read import read_documents
from headway.errors import HeadwayError
try:
    print(local_or_hub(sys.argv[1], dataset=True), [d.text for d in read_documents("org/name", text_key="text")])
except HeadwayError as error:
    print("error:", error)
"""


def test_hub_ids_are_paths_once_they_were_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.files = {name: data for name, data in FILES.items() if name.startswith("data/")}

    def resolve(address: str, url: str) -> str:
        environment = {
            "HF_ENDPOINT": url,
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PATH": "",
        }
        done = subprocess.run(
            [sys.executable, "-c", CODE, address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout.strip()

    assert resolve("org/name", NOBODY).startswith("error: org/name: not found locally")
    fetched = resolve("org/name", hub.url)
    assert fetched.endswith("['from the hub']")
    hub.requests.clear()
    assert resolve("org/name", hub.url) == fetched and hub.requests == [], (
        "what is in the cache asks no network"
    )
    assert resolve(str(tmp_path), NOBODY) == f"{tmp_path} ['from the hub']"
    assert "no such file or folder, and not a hub id" in resolve("no/such/path", NOBODY)


@pytest.mark.parametrize("path", ["runs/mine", "here/wiki", "data/train.jsonl", "Corpora/wiki.txt"])
def test_a_missing_path_is_not_looked_for_on_the_hub(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert not is_hub_id(path)
    with pytest.raises(ConfigError, match=f"^{path}: no such file or folder\\.$"):
        local_or_hub(path)
    assert is_hub_id("Qwen/Qwen2.5-7B")
    assert is_hub_id("princeton-nlp/prolong-data-64K")


def test_a_recipes_cache_is_the_one_that_download_fills(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, folder, _ = run(
        hub,
        tmp_path / "home",
        "download",
        "org/name",
        "--dataset",
        "--cache-dir",
        str(tmp_path / "own"),
    )
    assert code == 0
    assert in_cache("org/name", dataset=True, cache_dir=tmp_path / "own") == Path(folder["path"])
    assert in_cache("org/name", dataset=True, cache_dir=tmp_path / "other") is None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "own"))
    assert in_cache("org/name", dataset=True, cache_dir=tmp_path / "other") == Path(
        folder["path"]
    ), "the hub's own is looked into, too"


def test_caches_follow_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "headway"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path.home() / ".cache" / "headway"


def test_hub_ids_are_legal_in_init_from_and_in_data(hub: Hub, tmp_path: Path) -> None:
    from headway.config.load import load
    from headway.tokenizer.train import train_bpe
    from headway.train import train
    from headway.train.config import Recipe

    tiny = [
        "model={hidden_size: 16, num_layers: 1, num_heads: 2, ffn_size: 24, max_seq_len: 32}",
        "data.seq_len=32",
        "batch.rows=2",
        "device=cpu",
    ]
    train_bpe([Path(__file__).read_text()], vocab_size=300, out=tmp_path / "tokenizer")
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": f"some text {i} " * 9}) + "\n" for i in range(30)))
    common = [f"data.cache_dir={tmp_path}/cache", "steps=1"]
    train(
        load(
            Recipe,
            None,
            [
                *tiny,
                *common,
                f"run.dir={tmp_path}/runs",
                f"tokenizer={tmp_path}/tokenizer",
                f"data.train=[{raw}]",
            ],
        )
    )
    final = tmp_path / "runs" / "run" / "final"
    hub.files = {p.name: p.read_bytes() for p in final.iterdir()}
    override = [
        "data.seq_len=32",
        "batch.rows=2",
        "device=cpu",
        *common,
        f"run.dir={tmp_path}/again",
    ]
    code, summary, errors = run(
        hub, tmp_path / "home", "train", "init.from=org/name", f"data.train=[{raw}]", *override
    )
    assert code == 0, errors
    assert summary["steps"] == 1
    hub.files = {"data/train-00000-of-00001.jsonl": raw.read_bytes()}
    code, summary, errors = run(
        hub,
        tmp_path / "home",
        "train",
        f"init.from={final}",
        "data.train=[org/name]",
        "run.name=data",
        *override,
    )
    assert code == 0, errors
    assert summary["tokens"] > 0
    code, _, errors = run(
        "http://127.0.0.1:9", tmp_path / "empty", "train", "init.from=org/other", *override
    )
    assert code == 2
    assert "headway download org/other" in errors
