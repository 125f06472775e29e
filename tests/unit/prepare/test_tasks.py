"""`data tokenize --on` writes the store of one process: texts, cleaned texts, conversations, pairs, splits, other formats."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from support.corpora import texts, write_corpus
from support.one_process_executor import OneProcessExecutor, run_inside
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headway.errors import ConfigError, DataError
from headway.prepare import tasks
from headway.prepare.build import BuildOptions, build_converted, build_store
from headway.runtime.executor.work import Placement
from headway.text.clean import CleanRules
from headway.tokenizer.load import Tokenizer

SMALL = Placement(task_bytes=9000)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One id per byte, and the marks of chatml."""
    vocabulary = {"<pad>": 0} | {
        letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
        ]
    )
    path = tmp_path_factory.mktemp("tokenizer")
    Tokenizer(backend, {"bos": "<s>", "eos": "</s>"}).save(path)
    return path


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> OneProcessExecutor:
    return run_inside(monkeypatch)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def records(path: Path, kind: str, count: int = 90) -> Path:
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(texts(count, seed=2)):
        answer = text or "none"
        pair = {"prompt": f"say {number}", "chosen": answer, "rejected": f"{answer} no"}
        rows.append(
            {"instruction": f"say {number}", "output": answer, "id": number}
            if kind == "chat"
            else pair
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("clean", [None, CleanRules()])
def test_tasks_tokenize_every_kind_of_text_file_into_the_store_of_one_process(
    tmp_path: Path,
    tokenizer: Path,
    inside: OneProcessExecutor,
    clean: CleanRules | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "BLOCK_TOKENS", 3000)
    monkeypatch.setattr("headway.prepare.workers.CHUNK_BYTES", 4000)
    monkeypatch.setattr("headway.tokenizer.load.WHOLE_CHARACTERS", 1000)
    inputs = write_corpus(tmp_path / "raw", 200)
    options = BuildOptions(workers=1, split="file", bos=True, clean=clean)
    alone = build_store(inputs, tokenizer, tmp_path / "one", options)
    many = build_store(inputs, tokenizer, tmp_path / "many", replace(options, placement=SMALL))
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert {**many.fields(), "out": 0, "seconds": 0} == {**alone.fields(), "out": 0, "seconds": 0}
    assert sum(name.startswith("encode") for name in inside.ran) > 5
    assert not (tmp_path / "many.work").exists()


@pytest.mark.parametrize("kind", ["chat", "preference"])
@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_tasks_encode_and_split_records_into_the_store_of_one_process(
    tmp_path: Path, tokenizer: Path, inside: OneProcessExecutor, kind: Any, fraction: float
) -> None:
    inputs = [records(tmp_path / "a.jsonl", kind), records(tmp_path / "b.jsonl", kind, 30)]
    options = BuildOptions(kind, workers=1, max_length=300, valid_fraction=fraction, seed=4)
    alone = build_store(inputs, tokenizer, tmp_path / "one", options)
    many = build_store(inputs, tokenizer, tmp_path / "many", replace(options, placement=SMALL))
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert {**many.fields(), "out": 0} == {**alone.fields(), "out": 0}


@pytest.fixture
def chat_file_with_a_bad_line(tmp_path: Path) -> Path:
    path = records(tmp_path / "chat.jsonl", "chat")
    lines = path.read_text(encoding="utf-8").splitlines()
    lines.insert(70, '{"instruction": "what?"}')
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_tasks_write_other_formats_as_one_process_does(
    tmp_path: Path, tokenizer: Path, inside: OneProcessExecutor
) -> None:
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in texts(90)]
    source.write_text("".join(lines), encoding="utf-8")
    options = BuildOptions(workers=1, to="internlm")
    build_converted([source], tokenizer, tmp_path / "one", options)
    build_converted([source], tokenizer, tmp_path / "many", replace(options, placement=SMALL))
    assert content(tmp_path / "many") == content(tmp_path / "one")


def test_tasks_of_one_shard_are_refused(
    tmp_path: Path, tokenizer: Path, inside: OneProcessExecutor
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a text"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="--on divides the work itself"):
        build_store(
            [source], tokenizer, tmp_path / "s", BuildOptions(shard=(0, 2), placement=SMALL)
        )


def test_tasks_report_the_bad_record_that_one_process_reports(
    tmp_path: Path, tokenizer: Path, inside: OneProcessExecutor, chat_file_with_a_bad_line: Path
) -> None:
    inputs = [chat_file_with_a_bad_line]
    options = BuildOptions("chat", workers=1)
    with pytest.raises(DataError) as error_of_one_process:
        build_store(inputs, tokenizer, tmp_path / "bad", options)
    with pytest.raises(DataError) as error_of_tasks:
        build_store(inputs, tokenizer, tmp_path / "bad", replace(options, placement=SMALL))
    assert str(error_of_tasks.value) == str(error_of_one_process.value)
    assert "chat.jsonl:71" in str(error_of_one_process.value)


def test_tasks_drop_the_bad_records_that_one_process_drops(
    tmp_path: Path, tokenizer: Path, inside: OneProcessExecutor, chat_file_with_a_bad_line: Path
) -> None:
    inputs = [chat_file_with_a_bad_line]
    options = BuildOptions("chat", workers=1, drop_bad=True)
    build_store(inputs, tokenizer, tmp_path / "one", options)
    build_store(inputs, tokenizer, tmp_path / "many", replace(options, placement=SMALL))
    assert content(tmp_path / "many") == content(tmp_path / "one")


def test_a_driver_killed_while_it_writes_continues(
    tmp_path: Path, tokenizer: Path, inside: OneProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [tmp_path / "a.jsonl"]
    inputs[0].write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts(150)), encoding="utf-8"
    )
    build_store(inputs, tokenizer, tmp_path / "one", BuildOptions(workers=1))
    monkeypatch.setattr(tasks, "COMMIT_SECONDS", 0.0)
    # pyright: ignore[reportPrivateUsage]
    append = tasks._append_part
    calls = list[Path]()

    def stop_at_third(folder: Path, masked: bool, writer: Any) -> None:
        calls.append(folder)
        if len(calls) == 3:
            raise KeyboardInterrupt
        append(folder, masked, writer)

    monkeypatch.setattr(tasks, "_append_part", stop_at_third)
    with pytest.raises(KeyboardInterrupt, match="Run the same command again"):
        build_store(inputs, tokenizer, tmp_path / "many", BuildOptions(placement=SMALL))
    ran = len(inside.ran)
    build_store(inputs, tokenizer, tmp_path / "many", BuildOptions(placement=SMALL))
    assert len(inside.ran) == ran and calls[3] == calls[2], (
        "no task runs twice, and what was committed is not written again"
    )
    assert content(tmp_path / "many") == content(tmp_path / "one")
