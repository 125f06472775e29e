"""Cleaning leaves out what breaks a rule, says why, and finds duplicates that are not quite alike."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from headway.cli import main
from headway.errors import ConfigError, DataError
from headway.runtime.optional import install_command
from headway.text.clean import CleanReport, CleanRules, broken_rule, clean, clean_files
from headway.text.dedup import (
    ExactDuplicates,
    NearDuplicates,
    SeenHashes,
    run_hashes,
)
from headway.text.document import Document

ENGLISH = (
    "The river had frozen early that year, and the children were crossing it on foot to school. "
)
CHINESE = "那年河水结冰很早，孩子们踩着冰面过河上学，没有人记得渡船上一次停在岸边是什么时候。"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ENGLISH, None),
        (CHINESE, None),
        (" \n\t ", "blank"),
        ("short", "too short"),
        ("x " * 400, "too long"),
        ("1234567890 12.5 99.9 100 ab", "many digits"),
        ("!!! ??? --- *** ((( ))) word and", "many signs"),
        ("12 ab + - 34 ; ( ) 5 c", "few letters"),
        ("broken \ufffd\ufffd text \x00\x01 here", "control characters"),
        ("the same line\n" * 9 + "another", "repeated lines"),
        ("a b\nc d\ne f\ng h\ni j", "short lines"),
    ],
)
def test_each_rule_is_named(text: str, reason: str | None) -> None:
    assert (
        broken_rule(text, CleanRules(max_characters=700, min_letters=0.3, min_line_length=5))
        == reason
    )


def edited(text: str, share: float, seed: int) -> str:
    """The text with that share of its places (each a run of 12 characters) replaced."""
    chance = random.Random(seed)
    pieces = [text[i : i + 12] for i in range(0, len(text), 12)]
    for index in chance.sample(range(len(pieces)), int(share * len(pieces))):
        pieces[index] = "".join(chance.choice("天地玄黄宇宙洪荒xyz ") for _ in range(12))
    return "".join(pieces)


def long_text(language: str, seed: int) -> str:
    chance = random.Random(seed)
    words = sorted(set(ENGLISH.split())) if language == "English" else sorted(set(CHINESE))
    return ("" if language == "Chinese" else " ").join(
        chance.choice(words) + str(chance.randrange(300)) for _ in range(400)
    )


@pytest.mark.parametrize("language", ["English", "Chinese"])
def test_signatures_estimate_what_two_texts_have_in_common(language: str) -> None:
    near = NearDuplicates(seed=5)
    errors: list[float] = []
    for seed in range(20):
        text = long_text(language, seed)
        other = edited(text, seed / 40, seed)
        first = set(run_hashes(text).tolist())
        second = set(run_hashes(other).tolist())
        errors.append(
            (near.signature(text) == near.signature(other)).mean()
            - len(first & second) / len(first | second)
        )
    assert abs(np.mean(errors)) < 0.03
    assert np.abs(errors).max() < 0.15


@pytest.mark.parametrize("language", ["English", "Chinese"])
def test_near_duplicates_are_found_and_others_kept(language: str) -> None:
    texts = [long_text(language, seed) for seed in range(40)]
    near = NearDuplicates(0.8, seed=1)
    assert all(near.is_new(text) for text in texts)
    assert not any(near.is_new(edited(text, 0.02, 7)) for text in texts)
    assert all(near.is_new(edited(text, 0.5, 8)) for text in texts)
    assert not near.is_new("  " + texts[3].upper().replace(" ", "\n"))


def test_short_texts_are_told_apart() -> None:
    near = NearDuplicates()
    assert [
        near.is_new(text) for text in ("甲", "乙", "甲", "甲乙丙丁戊己庚", "甲乙丙丁戊己辛", "")
    ] == [True, True, False, True, True, True]


def test_the_choice_depends_on_the_seed_alone() -> None:
    texts = [edited(long_text("English", seed // 3), seed % 3 / 12, seed) for seed in range(60)]

    def chosen(seed: int) -> list[bool]:
        near = NearDuplicates(seed=seed)
        return [near.is_new(text) for text in texts]

    assert chosen(3) == chosen(3)
    assert (
        NearDuplicates(seed=1).signature(texts[0]) != NearDuplicates(seed=2).signature(texts[0])
    ).any()


def test_a_full_index_forgets_the_oldest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.text.dedup.BUFFERED_DOCUMENTS", 4)
    near = NearDuplicates(max_memory_bytes=1)
    texts = [long_text("Chinese", seed) for seed in range(12)]
    assert all(near.is_new(text) for text in texts)
    assert near.forgotten == 4
    assert near.is_new(texts[0])
    assert not near.is_new(texts[11])


def test_seen_hashes_are_found_after_they_settle() -> None:
    seen = SeenHashes(buffered=10)
    keys = np.random.default_rng(0).integers(0, 1 << 63, 1000, dtype=np.uint64)
    for number, key in enumerate(keys.tolist()):
        seen.add(key, number)
    assert all(number in seen.find(keys[number : number + 1]) for number in range(1000))
    assert seen.find(keys + np.uint64(1)) == []
    assert len(seen.runs) < 8
    exact = ExactDuplicates()
    assert [exact.is_new(text) for text in ("a", "b", "a")] == [True, True, False]


def documents() -> Iterator[Document]:
    texts = [ENGLISH, CHINESE, ENGLISH, "x", CHINESE * 5, CHINESE * 5 + "又一年。", ENGLISH]
    yield from (
        Document(text, "f", line, {"text": text, "n": line}) for line, text in enumerate(texts, 1)
    )


def test_the_report_counts_every_document_once() -> None:
    report = CleanReport()
    kept = list(clean(documents(), CleanRules(), report))
    assert [d.line for d in kept] == [1, 2]
    assert report.documents == 7
    assert report.kept_documents == 2
    assert dict(report.removed_documents) == {"duplicate": 2, "too short": 1, "near duplicate": 2}
    assert report.examples["duplicate"] == ["f:3", "f:7"]
    assert report.bytes == sum(len(d.text.encode()) for d in documents())
    assert [
        d.line
        for d in clean(documents(), CleanRules(duplicates="keep", min_characters=0), CleanReport())
    ] == list(range(1, 8))


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.parquet"])
def test_files_are_cleaned_into_one_with_all_their_keys(tmp_path: Path, name: str) -> None:
    from headway.text.read import read_records

    rows = [
        {"body": text, "n": n, "meta": {"a": [n]}}
        for n, text in enumerate([ENGLISH, CHINESE, ENGLISH])
    ]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    report = clean_files([tmp_path / "a.jsonl"], tmp_path / name, CleanRules(), text_key="body")
    assert [r.data for r in read_records(tmp_path / name)] == rows[:2]
    assert report.removed_documents == {"duplicate": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["a.jsonl", name])


def test_a_failed_clean_leaves_nothing_and_an_old_output_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": ENGLISH}) + "\n{broken\n", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    out.write_text("old", encoding="utf-8")
    with pytest.raises(DataError, match=r"a.jsonl:2"):
        clean_files([source], out, CleanRules())
    assert out.read_text(encoding="utf-8") == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_an_output_that_is_a_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": ENGLISH}) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="one of the sources"):
        clean_files([tmp_path], source, CleanRules())


def test_an_output_of_an_unknown_format_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": ENGLISH}) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="must be named"):
        clean_files([source], tmp_path / "out.csv", CleanRules())


def test_texts_of_which_none_passes_are_refused_with_the_rule(tmp_path: Path) -> None:
    source = tmp_path / "b.txt"
    source.write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match=r"no document passed the rules \(too short\)"):
        clean_files([source], tmp_path / "out2.jsonl", CleanRules())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_digits": 2.0}, "max"),
        ({"duplicates": "some"}, "dup"),
        ({"min_characters": 5, "max_characters": 2}, "min"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CleanRules(**settings)


def test_a_similarity_that_would_join_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"similarity is 0.2"):
        NearDuplicates(0.2)


def test_the_verb_prints_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a.txt", ENGLISH), ("b.txt", ENGLISH), ("c.txt", CHINESE)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    out = str(tmp_path / "out.parquet")
    assert main(["data", "clean", str(tmp_path / "*.txt"), out, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kept_documents"], report["removed"]["duplicate"]["documents"]) == (2, 1)
    assert pq.read_table(out).column("text").to_pylist() == [ENGLISH, CHINESE]
    assert main(["data", "clean", str(tmp_path / "*.txt"), out]) == 0
    assert "kept 2 of 3 documents" in capsys.readouterr().out
    assert main(["data", "clean", str(tmp_path / "a.txt")]) == 2
    assert main(["data", "clean", str(tmp_path / "*.txt"), out, "--max-memory", "lots"]) == 2
    assert "--max-memory is 'lots'; write a size such as" in capsys.readouterr().err


def test_text_is_converted_to_simplified_chinese_before_duplicates_are_sought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OpenCC:
        def __init__(self, how: str) -> None:
            assert how == "t2s"

        def convert(self, text: str) -> str:
            return text.replace("數學", "数学").replace("學科", "学科")

    monkeypatch.setitem(sys.modules, "opencc", SimpleNamespace(OpenCC=OpenCC))
    raw = tmp_path / "raw.jsonl"
    lines = [
        {"text": "數學是研究數量與結構的學科。", "id": 1},
        {"text": "数学是研究數量與結構的学科。", "id": 2},
    ]
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["data", "clean", str(raw), str(tmp_path / "out.jsonl"), "--simplified"]) == 0
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        {**lines[0], "text": lines[1]["text"]}
    ]


def test_without_opencc_one_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opencc", None)
    (tmp_path / "raw.jsonl").write_text('{"text": "數學是研究數量的學科"}\n')
    options = [str(tmp_path / "raw.jsonl"), str(tmp_path / "out.jsonl"), "--simplified"]
    assert main(["data", "clean", *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--simplified needs OpenCC" in line
    assert install_command("zh") in line
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "rules", "broken"),
    [
        ("ten letter", {"max_characters": 10}, None),
        ("ten letters", {"max_characters": 10}, "too long"),
        ("ten letter", {"min_characters": 10}, None),
        ("ten lette", {"min_characters": 10}, "too short"),
        ("1 2 3 4 5 6 abcd", {}, "many digits"),  # 6 of the 10 characters that are no spaces
        ("1 2 3 4 5 abcde f", {}, None),  # 5 of 11
        ("!  !  !  !  !  !  abcd", {}, "many signs"),
        (
            "one line here\ntwo\none line here\n",
            {},
            None,
        ),  # 13 of 29 characters stand in a line that was there before
        ("one line here\none line here\none line here", {}, "repeated lines"),
        ("abc de\nfgh ij\n", {"min_line_length": 6.0}, None),
        ("abc de\nfgh i\n", {"min_line_length": 6.0}, "short lines"),
    ],
)
def test_a_rule_breaks_just_past_its_limit(
    text: str, rules: dict[str, float], broken: str | None
) -> None:
    assert broken_rule(text, CleanRules(**rules)) == broken  # pyright: ignore[reportArgumentType]
