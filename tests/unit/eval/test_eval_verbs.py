"""`headway eval` as one types it: several datasets, suites, continuations, reports, models side by side."""

import json
from pathlib import Path

import pytest
from test_perplexity import CONFIG, TEXTS, byte_tokenizer, random_weights

from headway.cli import main
from headway.eval.dataset import SUITES
from headway.export.huggingface import export_huggingface

KEYS = {"loss", "perplexity", "tokens", "bits_per_byte", "accuracy", "documents", "window", "stride"}
PARTS = (
    ("Salesforce/wikitext", "wikitext-2-raw-v1", "text"),
    ("Salesforce/wikitext", "wikitext-103-raw-v1", "text"),
    ("ptb-text-only/ptb_text_only", "penn_treebank", "sentence"),
    ("cimec/lambada", "plain_text", "text"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("models")
    byte_tokenizer().save(root / "tokenizer")
    export_huggingface(CONFIG, random_weights(CONFIG), root / "one", tokenizer=root / "tokenizer")
    return str(root / "one")


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    (tmp_path / "long.txt").write_text(TEXTS[0])
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:]))
    return ["--data", f"story={tmp_path / 'long.txt'}", "--data", str(tmp_path / "short.jsonl")]


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["eval", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_one_dataset_has_its_numbers_at_the_top_of_the_json(capsys: pytest.CaptureFixture[str], model: str, data: list[str]) -> None:
    found = json.loads(output(capsys, "ppl", "--model", model, *data[:2], "--json"))
    assert set(found) >= KEYS
    assert (found["documents"], found["window"], found["stride"]) == (1, 32, 32)


def test_several_datasets_have_the_numbers_they_have_alone(capsys: pytest.CaptureFixture[str], model: str, data: list[str]) -> None:
    both = json.loads(output(capsys, "ppl", "--model", model, *data, "--stride", "16", "--json"))["datasets"]
    assert list(both) == ["story", "short.jsonl"]
    for name, given in zip(both, (data[:2], data[2:]), strict=True):
        alone = json.loads(output(capsys, "ppl", "--model", model, *given, "--stride", "16", "--json"))
        assert {key: alone[key] for key in KEYS} == {key: both[name][key] for key in KEYS}
    table = output(capsys, "ppl", "--model", model, *data)
    assert "story" in table and "short.jsonl" in table and "ECE" in table


def test_continuations_stand_beside_the_numbers(capsys: pytest.CaptureFixture[str], model: str, data: list[str]) -> None:
    arguments = ["ppl", "--model", model, *data[:2], "--prompt", "the", "--samples", "2", "--max-new-tokens", "4"]
    samples = json.loads(output(capsys, *arguments, "--json"))["samples"]
    assert [sample["prompt"] for sample in samples] == ["the", "the"]
    assert samples[0]["text"] != samples[1]["text"]
    assert "--prompt" in output(capsys, "ppl", "--model", model, *data, "--samples", "2", code=2)


def fill_cache(cache: Path, parts: tuple[tuple[str, str, str], ...]) -> None:
    """What the hub's library leaves behind after a download."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for repo, folder, key in parts:
        root = cache / f"datasets--{repo.replace('/', '--')}"
        converted = key == "sentence"
        file = root / "snapshots" / "abc" / folder / ("test/0000.parquet" if converted else "test-00000-of-00001.parquet")
        file.parent.mkdir(parents=True)
        pq.write_table(pa.table({key: ["", *TEXTS, ""]}), file)
        revision = root / "refs" / ("refs/convert/parquet" if converted else "main")
        revision.parent.mkdir(parents=True, exist_ok=True)
        revision.write_text("abc")


def test_a_suite_comes_from_the_cache_and_what_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], model: str, data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    fill_cache(tmp_path / "cache", PARTS[:1])
    said = output(capsys, "ppl", "--model", model, "--suite", "default", code=2)
    assert "headway download Salesforce/wikitext --dataset --include 'wikitext-103-raw-v1/test*'" in said
    assert "headway download ptb-text-only/ptb_text_only --dataset --revision refs/convert/parquet" in said
    assert "wikitext-2 " not in said and "lambada" in said
    fill_cache(tmp_path / "cache", PARTS[1:3])
    given = ["--data", f"lambada={tmp_path / 'short.jsonl'}"]
    found = json.loads(output(capsys, "ppl", "--model", model, "--suite", "default", *given, "--json"))["datasets"]
    assert list(found) == list(SUITES["default"])
    assert [result["documents"] for result in found.values()] == [1, 1, 1, 3]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (["--suite", "best"], "--suite is 'best'"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--precision", "int3"], "--precision is 'int3'"),
        (["--split", "word"], "--split is 'word'"),
        (["--samples", "0", "--prompt", "a"], "--samples is 0"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], model: str, data: list[str], wrong: list[str], word: str) -> None:
    said = output(capsys, "ppl", "--model", model, *data, *wrong, code=2)
    assert word in said and len(said.strip().splitlines()) == 1
