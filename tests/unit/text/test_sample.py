"""Samples: the right bytes in the right shares, the same every time, no more memory than the sample."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.cli import main
from headway.errors import ConfigError, DataError
from headway.text.document import Document
from headway.text.read import read_records
from headway.text.sample import SourceShare, choose_documents, parse_bytes, sample


def source(folder: Path, name: str, count: int) -> str:
    path = folder / name
    path.write_text(
        "".join(json.dumps({"text": f"{name} {i} " + "x" * (i % 50)}) + "\n" for i in range(count)),
        encoding="utf-8",
    )
    return str(path)


def test_bytes_are_taken_in_the_given_shares(tmp_path: Path) -> None:
    shares = [
        SourceShare(source(tmp_path, "a.jsonl", 3000), 0.7),
        SourceShare(source(tmp_path, "b.jsonl", 2000), 0.3),
    ]
    taken = sample(shares, 40_000, tmp_path / "out.jsonl", seed=4)
    assert [t.wanted_bytes for t in taken] == [28_000, 12_000]
    assert all(t.wanted_bytes - 70 < t.bytes <= t.wanted_bytes for t in taken)
    rows = [record.data for record in read_records(tmp_path / "out.jsonl")]
    assert len({row["text"] for row in rows}) == len(rows) == sum(t.documents for t in taken)
    assert Counter(Path(row["source"]).name for row in rows) == {
        "a.jsonl": taken[0].documents,
        "b.jsonl": taken[1].documents,
    }
    first = [Path(row["source"]).name for row in rows[:100]]
    assert 20 < first.count("b.jsonl") < 60, "the sources are mixed"


def test_the_sample_depends_on_the_seed_alone(tmp_path: Path) -> None:
    shares = [SourceShare(source(tmp_path, "a.jsonl", 2000))]
    for name, seed in (("1", 1), ("2", 1), ("3", 2)):
        sample(shares, 9_000, tmp_path / f"{name}.jsonl", seed=seed)
    first, two, three = ((tmp_path / f"{name}.jsonl").read_bytes() for name in "123")
    assert first == two != three


def test_every_document_has_the_same_chance() -> None:
    seen: Counter[int] = Counter()
    for seed in range(400):
        kept, count, _ = choose_documents(
            (Document("12345678", "f", i) for i in range(40)), 80, seed
        )
        assert count == 40
        assert len(kept) == 10
        seen.update(document.line or 0 for _, document in kept)
    assert set(seen) == set(range(40))
    assert min(seen.values()) > 60
    assert max(seen.values()) < 145


def test_a_document_that_drew_more_than_one_that_had_to_go_stays_out_however_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sample is the documents with the lowest numbers that fit together, not whatever still fits."""
    drawn = {0: 10, 1: 30, 2: 20, 3: 40, 4: 25}
    monkeypatch.setattr("headway.text.sample.derive", lambda seed, position: drawn[position])
    # 0 and 2 use 9 of 11 bytes; 1 (drew 30) had to go, so 3 (drew 40) may not come
    texts = [
        "a" * 5,
        "b" * 5,
        "c" * 4,
        "d",
        "e",
    ]
    kept, count, size = choose_documents(
        (Document(text, "f", position) for position, text in enumerate(texts)), 11, 0
    )
    assert sorted((number, document.text) for number, document in kept) == [
        (10, "a" * 5),
        (20, "c" * 4),
        (25, "e"),
    ]
    assert (count, size) == (5, 16)


def test_memory_stays_within_the_sample() -> None:
    """Documents that are not kept are let go: far more text goes by than would be allowed to stay."""
    import tracemalloc

    def stream() -> Iterator[Document]:
        for i in range(2000):
            yield Document(str(i % 10) * 20_000, "f", i)

    tracemalloc.start()
    try:
        choose_documents(stream(), 400_000, 1)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_source_too_small_for_its_share_is_an_error(tmp_path: Path) -> None:
    small = source(tmp_path, "a.jsonl", 10)
    with pytest.raises(DataError, match=r"its share of 100000 is 50000. Request at most \d+ bytes"):
        sample(
            [SourceShare(small), SourceShare(source(tmp_path, "b.jsonl", 5000))],
            100_000,
            tmp_path / "out.jsonl",
        )
    (tmp_path / "long.txt").write_text("one long line\n" * 1000, encoding="utf-8")
    with pytest.raises(
        DataError,
        match="no document fits the 100 bytes of its share; request more bytes or --split line",
    ):
        sample([SourceShare(str(tmp_path / "long.txt"))], 100, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_inputs_and_sizes_are_parsed(tmp_path: Path) -> None:
    assert SourceShare.parse("a/b.jsonl@0.7") == SourceShare("a/b.jsonl", 0.7)
    assert SourceShare.parse("a/b.jsonl") == SourceShare("a/b.jsonl", 1.0)
    (tmp_path / "odd@1").touch()
    assert SourceShare.parse(str(tmp_path / "odd@1")) == SourceShare(str(tmp_path / "odd@1"))
    for wrong in ("a@much", "a@0", "a@-1", "a@inf"):
        with pytest.raises(ConfigError, match="input is 'a@"):
            SourceShare.parse(wrong)
    assert [parse_bytes(s, "x") for s in ("12", "1.5kB", "100MB", "2GiB", "3 gb")] == [
        12,
        1500,
        100_000_000,
        2 << 30,
        3_000_000_000,
    ]
    for wrong in ("", "MB", "-3MB", "3 bananas", "0"):
        with pytest.raises(ConfigError, match="--bytes is"):
            parse_bytes(wrong, "--bytes")


def test_the_verb_writes_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a test runner may have set it
    a = source(tmp_path, "a.jsonl", 500)
    b = source(tmp_path, "b.jsonl", 500)
    out = str(tmp_path / "out.jsonl")
    arguments = [
        "data",
        "sample",
        "--input",
        f"{a}@0.5",
        "--input",
        f"{b}@0.5",
        "--bytes",
        "4kB",
        "--out",
        out,
        "--seed",
        "3",
    ]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["documents"] == len(list(read_records(out)))
    assert 3800 < report["bytes"] <= 4000
    assert main(arguments) == 0
    assert "documents taken" in capsys.readouterr().out
