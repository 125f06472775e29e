"""`headway tokenizer train` and `inspect` from the command line."""

import json
from pathlib import Path

import pytest

from headway.cli import main
from headway.tokenizer.load import load_tokenizer

TEXT = "The river had frozen early that year. 那年河水结冰很早，孩子们踩着冰面过河上学。\n" * 20


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    rows = [{"title": "t", "body": TEXT}, {"title": "u", "body": TEXT[:300]}]
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    return str(tmp_path / "corpus.jsonl")


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_a_tokenizer_is_trained_and_inspected(
    corpus: str, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "tokenizer")
    arguments = [
        "--input", corpus, "--template", "{title}\\n{body}", "--kind", kind, "--vocab-size", "330",
        "--special", "<eos>", "--special", "<mark>", "--max-memory", "1GB", "--out", out,
    ]  # fmt: skip
    assert main(["tokenizer", "train", *arguments, "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["vocab_size"] == 330
    assert trained["fingerprint"] == load_tokenizer(out).fingerprint
    assert list(load_tokenizer(out).special_tokens)[-2:] == ["<eos>", "<mark>"]

    arguments = [out, "--data", corpus, "--text-key", "body"]
    assert main(["tokenizer", "inspect", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["round_trip"]
    assert report["vocab_size"] == 330
    assert report["model_vocab_size"] == 384
    assert report["compression"][corpus]["texts"] == 2
    assert set(report["compression"]) == {"English", "Chinese", "code", corpus}

    assert main(["tokenizer", "inspect", out]) == 0
    assert "round trip: exact" in capsys.readouterr().out


def test_a_tokenizer_that_loses_text_fails_the_inspection(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        corpus,
        "--input",
        corpus,
        "--vocab-size",
        "300",
        "--out",
        str(tmp_path),
        "--text-key",
        "body",
    ]
    assert main(["tokenizer", "train", *options]) == 0
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "normalizer": {"type": "NFKC"}}), encoding="utf-8")
    assert main(["tokenizer", "inspect", str(tmp_path)]) == 1
    assert "texts come back changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--vocab-size", "300", "--kind", "words"],
            "--kind is 'words'; it must be bpe or sentencepiece",
        ),
        (
            ["--vocab-size", "9000", "--text-key", "body"],
            "but this corpus has pairs that repeat for only",
        ),
        (
            ["--vocab-size", "9000", "--text-key", "body", "--kind", "sentencepiece"],
            "vocab_size is 9000, which this corpus cannot give",
        ),
        (["--vocab-size", "300"], "the record has no key 'text'"),
        (
            ["--vocab-size", "300", "--max-memory", "1kB"],
            "max_memory is 1000 bytes; it must be at least",
        ),
        (["--vocab-size", "300", "--split", "word"], "--split is 'word'"),
    ],
)
def test_a_tokenizer_that_cannot_be_trained_is_refused_in_one_line(
    corpus: str,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["tokenizer", "train", "--input", corpus, "--out", str(tmp_path / "out"), *arguments])
        == 2
    )
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(said) == 1
    assert message in said[0]
    assert not (tmp_path / "out").exists()
