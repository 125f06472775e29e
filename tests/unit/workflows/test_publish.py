"""`headway push` and `headway pull` against hubs on loopback: forms of a model, its card, resumption, and what is refused."""

import io
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML
from support.byte_model import write_model
from support.hub_server import serve_hub, using_hub
from support.runs import make_stores
from support.upload_hub import TOKEN, Repository, UploadHub, serve_upload_hub

from headway.checkpoint.stored_model import find_model
from headway.cli import main
from headway.config.load import load
from headway.text.hub_upload import MARK
from headway.train import train
from headway.train.config import Recipe
from headway.train.run_name import GIVEN

# The hub library hands bytes to httpx in an older way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
NOBODY = "http://127.0.0.1:9"
SHAPE = (
    "model.hidden_size=32",
    "model.num_layers=1",
    "model.num_heads=4",
    "model.ffn_size=48",
    "model.vocab_size=64",
    "model.max_seq_len=64",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a run with an adapter over it."""
    folder = tmp_path_factory.mktemp("published")
    make_stores(folder)

    def go(name: str, *more: str) -> None:
        settings = [
            f"run.dir={folder}", f"run.name={name}", f"data.train=[{folder}/store0]", "data.seq_len=64", "data.tokenizer_unchecked=true",
            "data.valid.fraction=0.2", f"data.cache_dir={folder}/cache", "batch.rows=4", "batch.micro_rows=2", "steps=2", "eval.every=1",
            "device=cpu", *more,
        ]  # fmt: skip
        train(load(Recipe, None, settings))

    go("base", *SHAPE, "launch.ssh.hosts=[very-secret.example]")
    go("lora", f"init.from={folder}/base", "adapter.rank=4")
    return folder


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with a tokenizer, of which GGUF files can be made: full weights, and an adapter."""
    folder = tmp_path_factory.mktemp("spoken")
    model = write_model(folder / "model")
    (folder / "text.txt").write_text("a small text to learn from, again and again\n" * 60)
    for name, settings in {"full": (), "lora": ("adapter.rank=4",)}.items():
        lines = (
            f"init.from={model}", f"run.dir={folder}", f"run.name={name}", "data.seq_len=32", "device=cpu", "steps=2",
            f"data.train=[{{path: {folder}/text.txt, split: line}}]", f"data.cache_dir={folder}/cache", "batch.rows=2",
            "data.valid.fraction=0.2", "optim.lr=0.01", "log.samples=0", *settings,
        )  # fmt: skip
        train(load(Recipe, None, lines))
    return folder


@pytest.fixture
def hub() -> Iterator[UploadHub]:
    with serve_upload_hub() as state:
        yield state


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # Pauses between attempts of the hub library; `time.sleep` of everybody else stays.
    impatient = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", impatient)


def run(hub: str, home: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """`headway ARGUMENTS --json` against a hub: the exit code, the result, what was said."""
    out = io.StringIO()
    err = io.StringIO()
    with using_hub(hub, home), redirect_stdout(out), redirect_stderr(err):
        code = main([*arguments, "--json"])
    return code, json.loads(out.getvalue() or "{}"), err.getvalue()


def refusal(hub: str, home: Path, *arguments: str) -> str:
    """The one line with which a command is refused."""
    code, _, said = run(hub, home, *arguments)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert len(errors) == 1, said
    assert "Traceback" not in said
    return errors[0]


def card_of(repository: Repository) -> tuple[dict[str, Any], str]:
    """The head of a card and its text."""
    _, head, text = repository.files["README.md"].decode().split("---\n", 2)
    return YAML(typ="safe").load(head), text


def test_a_run_is_pushed_as_one_commit_and_pulled_again(
    runs: Path, hub: UploadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, result, _ = run(
        hub.url, tmp_path, "push", str(runs / "base"), "me/mine", "--license", "mit"
    )
    assert code == 0
    repository = hub.repositories["me/mine"]
    assert repository.is_private
    assert len(repository.commits) == 1
    final = {path.name: path.read_bytes() for path in (runs / "base/final").iterdir()}
    assert final.items() <= repository.files.items()
    assert sorted(result["sent"]) == sorted(repository.files.keys() - {".gitattributes"})

    monkeypatch.chdir(tmp_path)
    with serve_hub() as mirror:
        mirror.files = repository.files
        code, result, _ = run(mirror.url, tmp_path, "pull", "org/name")
        assert code == 0
        assert result == {"path": "name", "form": "model", "is_checked": True}
        assert run(mirror.url, tmp_path, "pull", "org/name")[0] == 0
    weights = dict(find_model(tmp_path / "name").weights())
    for name, value in find_model(runs / "base").weights():
        assert weights[name].equal(value)
    # Nothing of the push is left beside the runs.
    assert not [path for path in runs.iterdir() if path.name.startswith(".tmp")]


def test_the_card_has_data_metrics_curve_and_recipe_and_no_path_or_address(
    runs: Path, hub: UploadHub, tmp_path: Path
) -> None:
    assert run(hub.url, tmp_path, "push", str(runs / "base"), "me/mine", "--license", "mit")[0] == 0
    files = hub.repositories["me/mine"].files
    head, text = card_of(hub.repositories["me/mine"])
    assert head["license"] == "mit"
    assert head["library_name"] == "transformers"
    assert head["tags"][0] == "headway"
    summary = json.loads((runs / "base/summary.json").read_text())
    last = summary["validation"]["valid"]["loss"]["last"]
    assert f"{last:.4g} |" in text
    assert "- `store0`" in text
    assert "training_curve.svg" in text
    assert files["training_curve.svg"] == (runs / "base/training_curve.svg").read_bytes()
    recipe = YAML(typ="safe").load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["batch"]["rows"] == 4
    assert recipe["data"]["train"] == [{"path": "store0"}] or recipe["data"]["train"] == ["store0"]

    for name, content in files.items():
        assert str(runs).encode() not in content, name
        assert b"very-secret" not in content, name
    assert not [body for body in hub.bodies if TOKEN.encode() in body]


def test_an_adapter_and_a_gguf_file_have_cards_of_their_own(
    runs: Path, hub: UploadHub, tmp_path: Path
) -> None:
    assert (
        run(hub.url, tmp_path, "push", str(runs / "lora"), "me/lora", "--form", "adapter")[0] == 0
    )
    files = hub.repositories["me/lora"].files
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= files.keys()
    # The base is a folder here: its name stays, the way to it does not.
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] != str(runs / "base")
    assert str(runs).encode() not in b"".join(files.values())
    head, text = card_of(hub.repositories["me/lora"])
    assert head["library_name"] == "peft"
    assert "AutoPeftModelForCausalLM" in text

    # The merged model is another form: its repository has no adapter in it.
    assert run(hub.url, tmp_path, "push", str(runs / "lora"), "me/merged")[0] == 0
    assert not [name for name in hub.repositories["me/merged"].files if "adapter" in name]
    said = refusal(hub.url, tmp_path, "push", str(runs / "base"), "me/none", "--form", "adapter")
    assert "was trained without an adapter" in said
    assert "me/none" not in hub.repositories


def test_a_gguf_folder_that_was_exported_is_pushed_with_the_users_card(
    runs: Path, hub: UploadHub, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "mine.gguf").write_bytes(b"GGUF" + bytes(100))
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# By hand\n")
    assert run(hub.url, tmp_path, "push", str(folder), "me/gguf", "--license", "apache-2.0")[0] == 0
    head, text = card_of(hub.repositories["me/gguf"])
    assert head["license"] == "apache-2.0"
    assert head["language"] == "en"
    assert text == "# By hand\n"
    assert MARK not in (folder / "README.md").read_text()
    assert hub.objects


@pytest.mark.parametrize("name", ["full", "lora"])
def test_a_run_is_pushed_as_a_gguf_file_with_the_weights_of_the_run(
    name: str, spoken: Path, hub: UploadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run with an adapter, the merged ones."""
    words = ("push", str(spoken / name), "me/small", "--form", "gguf", "--type", "f32")
    code, result, _ = run(hub.url, tmp_path, *words)
    assert code == 0
    repository = hub.repositories["me/small"]
    file = "small-f32.gguf"
    assert file in result["sent"]
    assert repository.files[file].startswith(b"GGUF")
    assert not [path for path in repository.files if path.endswith(".safetensors")]
    assert len(repository.commits) == 1
    assert f"FROM ./{file}" in repository.files["small-f32.Modelfile"].decode()

    head, text = card_of(repository)
    assert head["library_name"] == "gguf"
    assert head["pipeline_tag"] == "text-generation"
    assert f"llama-cli -hf me/small --hf-file {file}" in text
    assert "training_curve.svg" in repository.files
    for path, content in repository.files.items():
        assert str(spoken).encode() not in content, path

    monkeypatch.chdir(tmp_path)
    with serve_hub() as mirror:
        mirror.files = repository.files
        code, result, _ = run(mirror.url, tmp_path, "pull", "org/name")
    assert code == 0
    assert result == {"path": "name", "form": "gguf", "is_checked": True}
    weights = dict(find_model(tmp_path / "name" / file).weights())
    for weight, value in find_model(spoken / name / "final").weights():
        assert weights[weight].equal(value), weight

    # The same bytes again: nothing is sent.
    code, result, _ = run(hub.url, tmp_path, *words)
    assert code == 0
    assert result["commit"] is None


def test_a_gguf_file_of_another_type_is_added_to_those_of_the_same_run(
    spoken: Path, hub: UploadHub, tmp_path: Path
) -> None:
    words = ("push", str(spoken / "full"), "me/small", "--form", "gguf")
    assert run(hub.url, tmp_path, *words, "--type", "f32")[0] == 0
    code, result, _ = run(hub.url, tmp_path, *words)
    assert code == 0
    assert result["deleted"] == []
    files = hub.repositories["me/small"].files
    assert {"small-f32.gguf", "small-q8_0.gguf"} <= files.keys()
    _, text = card_of(hub.repositories["me/small"])
    assert "--hf-file small-q8_0.gguf" in text

    code, result, _ = run(hub.url, tmp_path, *words, "--replace")
    assert code == 0
    assert result["deleted"] == ["small-f32.Modelfile", "small-f32.gguf"]


def test_the_card_of_a_reward_model_loads_it_as_a_classifier(
    runs: Path, hub: UploadHub, tmp_path: Path
) -> None:
    judge = tmp_path / "judge"
    shutil.copytree(runs / "base", judge)
    with open(judge / GIVEN, "a", encoding="utf-8") as file:
        file.write("objective: {kind: reward}\n")
    assert run(hub.url, tmp_path, "push", str(judge), "me/judge")[0] == 0
    head, text = card_of(hub.repositories["me/judge"])
    assert "pipeline_tag" not in head
    assert 'AutoModelForSequenceClassification.from_pretrained("me/judge")' in text
    assert "headway eval reward me/judge --data FILE" in text
    assert "headway chat" not in text


def test_a_second_push_sends_nothing_and_a_changed_run_only_what_changed(
    runs: Path, hub: UploadHub, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(runs / "base", mine)
    assert run(hub.url, tmp_path, "push", str(mine), "me/mine")[0] == 0
    puts = hub.count("PUT")
    code, result, _ = run(hub.url, tmp_path, "push", str(mine), "me/mine")
    assert code == 0
    assert result["commit"] is None
    assert result["sent"] == []
    assert hub.count("PUT") == puts

    # The same run, with one file more and one less than before.
    (mine / "final/notes.txt").write_text("more")
    (mine / "training_curve.svg").unlink()
    code, result, _ = run(hub.url, tmp_path, "push", str(mine), "me/mine")
    assert code == 0
    assert set(result["sent"]) == {"notes.txt", "README.md"}
    assert result["deleted"] == ["training_curve.svg"]
    assert hub.count("PUT") == puts


def test_a_push_that_broke_off_sends_the_rest_when_it_is_run_again(
    runs: Path, hub: UploadHub, tmp_path: Path
) -> None:
    # The large file arrives, the commit does not.
    hub.refuse_commit = True
    said = refusal(hub.url, tmp_path, "push", str(runs / "base"), "me/mine")
    assert "Run the same command again" in said
    assert hub.repositories["me/mine"].files.keys() == {".gitattributes"}
    assert hub.count("PUT") == 1

    hub.refuse_commit = False
    assert run(hub.url, tmp_path, "push", str(runs / "base"), "me/mine")[0] == 0
    assert hub.count("PUT") == 1
    assert "model.safetensors" in hub.repositories["me/mine"].files


def test_a_connection_that_is_cut_in_a_large_file_is_tried_again_and_then_reported(
    runs: Path, hub: UploadHub, tmp_path: Path
) -> None:
    hub.cut_puts = 100
    said = refusal(hub.url, tmp_path, "push", str(runs / "base"), "me/mine")
    assert "broke off" in said
    hub.cut_puts = 1
    assert run(hub.url, tmp_path, "push", str(runs / "base"), "me/mine")[0] == 0
    assert "model.safetensors" in hub.repositories["me/mine"].files


def test_other_content_of_a_repository_stays_unless_it_is_replaced(
    runs: Path, hub: UploadHub, tmp_path: Path
) -> None:
    hub.repositories["me/taken"] = Repository({"README.md": b"# Mine\n", "model.safetensors": b"x"})
    before = dict(hub.repositories["me/taken"].files)
    said = refusal(hub.url, tmp_path, "push", str(runs / "base"), "me/taken")
    assert "was not pushed by headway" in said
    assert "--replace" in said
    assert hub.repositories["me/taken"].files == before

    assert run(hub.url, tmp_path, "push", str(runs / "base"), "me/taken", "--replace")[0] == 0
    said = refusal(hub.url, tmp_path, "push", str(runs / "lora"), "me/taken")
    assert "was pushed from base" in said


def test_what_cannot_be_pushed_is_refused_before_a_repository_is_made(
    runs: Path, hub: UploadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(runs / "base", unfinished)
    shutil.rmtree(unfinished / "final")
    cases = {
        ("nope", "me/mine"): "no such run",
        (str(unfinished), "me/mine"): "has not ended",
        (str(runs / "store0"), "me/mine"): "neither a run folder",
        (str(runs / "base"), "mine"): "has no user; write USER/mine",
        (str(runs / "base"), "me/m ine"): "not a name of the hub",
        (str(runs / "base"), "me/mine", "--form", "onnx"): "--form is 'onnx'",
        (str(runs / "base"), "me/mine", "--license", "My Own"): "--license is",
        (str(runs / "base"), "me/mine", "--form", "gguf", "--type", "q3"): "q3",
        (str(runs / "base/final"), "me/mine", "--form", "gguf"): "is not a run folder",
        (str(runs / "base"), "somebody/mine"): "refuses the token (403)",
    }
    for arguments, expected in cases.items():
        assert expected in refusal(hub.url, tmp_path, "push", *arguments)
    assert not hub.repositories
    said = refusal(hub.url, tmp_path, "push", str(runs / "base"), "me/mine", "--license", "nobodys")
    assert "the hub refuses it" in said

    assert "could not be reached" in refusal(
        NOBODY, tmp_path, "push", str(runs / "base"), "me/mine"
    )
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    said = refusal(hub.url, tmp_path, "push", str(runs / "base"), "me/mine")
    assert "HF_TOKEN" in said
    # The form of a push can be looked at without a token or a network.
    code, result, _ = run(NOBODY, tmp_path, "push", str(runs / "base"), "me/mine", "--dry-run")
    assert code == 0
    assert "model.safetensors" in result["files"]
    assert result["card"].startswith("---\n")


def test_a_pull_that_is_damaged_or_would_overwrite_is_refused(
    runs: Path, hub: UploadHub, tmp_path: Path
) -> None:
    assert run(hub.url, tmp_path, "push", str(runs / "base"), "me/mine")[0] == 0
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with serve_hub() as mirror:
        mirror.files = dict(hub.repositories["me/mine"].files)
        said = refusal(mirror.url, tmp_path, "pull", "org/name", "--to", str(folder))
        assert "is not a download of the hub" in said
        assert "has no user" in refusal(mirror.url, tmp_path, "pull", "name")

        mirror.files["config.json"] = mirror.files["config.json"].replace(b"32", b"64", 1)
        said = refusal(mirror.url, tmp_path, "pull", "org/name", "--to", str(tmp_path / "new"))
        assert "config.json: damaged, or changed" in said
