"""`data inspect`, `data convert` and `data tokenize` as a user meets them, on every kind of data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from headway.cli import main
from headway.tokenizer.load import Tokenizer

LINES = (
    "感恩生活中的每一个细节，才能真正体会到幸福的滋味。\n"
    "梦想是人生的动力源泉，努力追逐，才能实现自己的目标。\n"
    "学会宽容和理解，才能建立真正和谐的人际关系。\n"
)
WORDS = {
    "感恩": 73075, "生活中的": 75302, "每一个": 69522, "细节": 69022, "，": 98899, "才能": 67713, "真正": 68015, "体会到": 81269,
    "幸福的": 74637, "滋味": 75445, "。": 99157, "梦想": 69469, "是": 60355, "人生的": 73026, "动力": 68524, "源": 60846, "泉": 61844,
    "努力": 67775, "追逐": 79241, "实现": 67800, "自己的": 67453, "目标": 67838, "学会": 68057, "宽容": 79017, "和谐": 70381, "和": 60378,
    "理解": 68014, "建立": 67990, "的": 67428, "人": 61003, "际关系": 67622,
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    """A verb's JSON."""
    assert main(["data", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that yields the ids of InternLM's published example."""
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=WORDS | {"?": 0}, unk_token="?"))
    longest_first = "|".join(sorted(WORDS, key=len, reverse=True))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
    )
    path = tmp_path_factory.mktemp("letters")
    Tokenizer(backend, {"eos": "<|im_end|>"}).save(path)
    return path


def test_what_a_refused_conversion_has_tokenized_is_not_taken_for_the_next_one(
    tmp_path: Path, words: Path, letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw.jsonl").write_text('{"text": "a是"}\n{"text": "b和源"}\n', encoding="utf-8")
    source = [
        "data",
        "tokenize",
        "--input",
        str(tmp_path / "raw.jsonl"),
        "--out",
        str(tmp_path / "out"),
        "--to",
        "zero2all",
    ]
    assert main([*source, "--tokenizer", str(letters)]) == 2
    assert "need one begin token" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["raw.jsonl"], "nothing is left"
    assert main([*source, "--tokenizer", str(words), "--begin-id", "0", "--no-eos"]) == 0
    capsys.readouterr()
    assert run(capsys, "inspect", tmp_path / "out")["dtype"] == "uint16"
    assert not list(tmp_path.glob(".tmp-*"))


def test_the_internlm_example_gives_offsets_0_90_208(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw_data.txt").write_text(LINES, encoding="utf-8")
    source = (
        "tokenize",
        "--input",
        tmp_path / "raw_data.txt",
        "--tokenizer",
        words,
        "--to",
        "internlm",
        "--out",
    )
    report = run(capsys, *source, tmp_path / "cn" / "output.bin")
    assert (report["documents"], report["tokens"]) == (3, 39)
    assert np.load(tmp_path / "cn" / "output.bin.meta").tolist() == [[0, 11], [90, 15], [208, 13]]
    assert (
        (tmp_path / "cn" / "output.bin")
        .read_text()
        .startswith('{"tokens": [73075, 75302, 69522, 69022, 98899,')
    )
    inspected = run(capsys, "inspect", tmp_path / "cn")
    assert (
        inspected["kind"],
        inspected["documents"],
        inspected["tokens"],
        inspected["longest"],
    ) == ("internlm", 3, 39, 15)
    assert run(capsys, "inspect", tmp_path / "raw_data.txt")["bytes"] == len(LINES.encode())
    assert (
        inspected["bytes"] == sum(file.stat().st_size for file in (tmp_path / "cn").iterdir()) > 39
    )
    assert inspected["types"] == {"cn": {"documents": 3, "tokens": 39}}
    report = run(capsys, *source, tmp_path / "folder", "--type", "cn")
    assert (tmp_path / "folder" / "cn" / "dataset.bin").read_bytes() == (
        tmp_path / "cn" / "output.bin"
    ).read_bytes()


def test_every_format_is_inspected_with_the_same_counts(
    tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "hello"}\n{"text": "bye"}\n')
    report = run(
        capsys,
        "tokenize",
        "--input",
        tmp_path / "t.jsonl",
        "--tokenizer",
        letters,
        "--out",
        tmp_path / "headway",
    )
    assert (report["documents"], report["tokens"]) == (2, 10)
    store = run(capsys, "inspect", tmp_path / "headway")
    assert (
        store["kind"],
        store["documents"],
        store["tokens"],
        store["dtype"],
        store["masked"],
    ) == ("headway", 2, 10, "uint16", False)
    assert len(store["fingerprint"]) == 64
    for to in ("internlm", "zero2all", "mds"):
        options = ("--begin-id", 7) if to == "zero2all" else ()
        run(capsys, "convert", tmp_path / "headway", tmp_path / to, "--to", to, *options)
        inspected = run(capsys, "inspect", tmp_path / to)
        assert (inspected["kind"], inspected["documents"], inspected["tokens"]) == (
            to,
            2,
            12 if to == "zero2all" else 10,
        )
    raw = run(capsys, "inspect", tmp_path / "t.jsonl")
    assert (raw["kind"], raw["documents"], raw["tokens"]) == ("raw", 2, None)
    assert run(capsys, "inspect", tmp_path / "t.jsonl", "--tokenizer", letters)["tokens"] == 8
    back = run(capsys, "convert", tmp_path / "mds", tmp_path / "back", "--tokenizer", letters)
    assert back["documents"] == 2
    assert run(capsys, "inspect", tmp_path / "back")["fingerprint"] == store["fingerprint"]


def test_samples_show_which_tokens_are_targets(
    tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.jsonl").write_text('{"instruction": "Hi", "output": "Hello"}\n')
    report = run(
        capsys,
        "tokenize",
        "--input",
        tmp_path / "c.jsonl",
        "--kind",
        "chat",
        "--tokenizer",
        letters,
        "--out",
        tmp_path / "chat",
    )
    assert report["targets"] == 6
    assert main(["data", "inspect", str(tmp_path / "chat"), "--tokenizer", str(letters)]) == 0
    assert (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello<|im_end|>⟧\n"
        in capsys.readouterr().out
    )


def test_preference_pairs_are_tokenized_from_the_command_line(
    tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.json").write_text(json.dumps([{"prompt": "a", "chosen": "b", "rejected": "c"}]))
    report = run(
        capsys,
        "tokenize",
        "--input",
        tmp_path / "p.json",
        "--kind",
        "preference",
        "--tokenizer",
        letters,
        "--out",
        tmp_path / "p",
    )
    assert (report["train_pairs"], report["targets"]) == (1, 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kind", "poem"], "--kind is 'poem'"),
        (["--max-length", "5"], "--max-length has no meaning with --kind text"),
        (["--kind", "chat", "--bos"], "--bos has no meaning with --kind chat"),
        (
            ["--kind", "preference", "--too-long", "drop"],
            "--too-long has no meaning with --kind preference",
        ),
        (["--type", "cn"], "--type has no meaning with --to headway"),
        (["--to", "zip"], "--to is 'zip'"),
        (["--kind", "preference", "--to", "mds"], "headway stores only"),
    ],
)
def test_flags_that_mean_nothing_together_are_refused(
    tmp_path: Path,
    letters: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "hello"}\n')
    options = [
        "--input",
        str(tmp_path / "t.jsonl"),
        "--tokenizer",
        str(letters),
        "--out",
        str(tmp_path / "out"),
        *flags,
    ]
    assert main(["data", "tokenize", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["inspect"], ["convert"]])
def test_a_folder_or_format_that_is_not_known_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    (tmp_path / "model.bin").write_bytes(b"123")
    more = [str(tmp_path / "out")] if verb == ["convert"] else []
    assert main(["data", *verb, str(tmp_path), *more]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["data", *verb, str(tmp_path), *more, "--from", "tape"]) == 2
    assert "must be one of headway, internlm" in capsys.readouterr().err
