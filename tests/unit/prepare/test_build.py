"""Tokenizing: the same bytes however the work is divided or interrupted, and shards that merge into the undivided store."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import headway.prepare.workers as workers
from headway.cli import main
from headway.errors import ConfigError, DataError
from headway.prepare.build import BuildOptions, build_store
from headway.store.merge import merge
from headway.store.reader import open_store
from headway.text.clean import CleanRules
from headway.tokenizer.load import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {"<|end|>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(90)}}, "<unk>"
        )
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer(tokenizer, {"eos": "<|end|>"}).save(folder)
    return folder


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHUNK_BYTES", 200)
    monkeypatch.setattr(workers, "COMMIT_SECONDS", 0.0)


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    files = []
    for number in range(3):
        path = tmp_path / f"part-{number}.jsonl"
        texts = [
            " ".join(f"w{(7 * number + line + i) % 90}" for i in range(line % 20))
            for line in range(60)
        ]
        path.write_text(
            "".join(json.dumps({"text": text, "title": "w1"}) + "\n" for text in texts),
            encoding="utf-8",
        )
        files.append(path)
    return files


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_documents_end_with_the_end_token_and_empty_ones_are_counted(
    tmp_path: Path, tokenizer: Path, corpus: list[Path]
) -> None:
    report = build_store(corpus, tokenizer, tmp_path / "s")
    store = open_store(tmp_path / "s")
    assert (
        (report.train_documents, report.counts["empty"], report.tokens)
        == (store.num_documents, 9, store.num_tokens)
        == (171, 9, store.num_tokens)
    )
    assert store.document(0).tolist() == [3, 0]
    assert store.fingerprint == load_tokenizer(tokenizer).fingerprint
    build_store(
        corpus,
        tokenizer,
        tmp_path / "t",
        BuildOptions(append_eos=False, text_template="{title} {text}"),
    )
    assert open_store(tmp_path / "t").document(1).tolist() == [3, 3]


def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path, tokenizer: Path, corpus: list[Path]
) -> None:
    build_store(corpus, tokenizer, tmp_path / "one", BuildOptions(workers=1))
    build_store(corpus, tokenizer, tmp_path / "two", BuildOptions(workers=2))
    build_store(corpus, tokenizer, tmp_path / "auto")
    assert content(tmp_path / "one") == content(tmp_path / "two") == content(tmp_path / "auto")


def test_cleaning_on_the_way_leaves_out_duplicates_of_all_files(
    tmp_path: Path, tokenizer: Path, corpus: list[Path]
) -> None:
    rules = CleanRules(
        min_characters=5, max_digits=1.0, max_signs=1.0, min_letters=0.0, duplicates="exact"
    )
    texts = {json.loads(line)["text"] for path in corpus for line in path.read_text().splitlines()}
    report = build_store([*corpus, corpus[0]], tokenizer, tmp_path / "s", BuildOptions(clean=rules))
    assert report.train_documents == len({text for text in texts if len(text) >= 5})
    assert report.removed["duplicate"] > 30
    assert "duplicate" in report.describe()


@pytest.mark.parametrize(
    ("stop_after", "rules"),
    [
        (0, None),
        (1, None),
        (9, None),
        (20, None),
        (4, CleanRules(max_digits=1.0, duplicates="exact")),
    ],
)
def test_an_interrupted_build_ends_with_the_same_bytes(
    tmp_path: Path, tokenizer: Path, corpus, stop_after, rules, monkeypatch
) -> None:
    options = BuildOptions(clean=rules)
    build_store(corpus, tokenizer, tmp_path / "whole", options)
    encoded = []

    class Died(Exception):
        pass

    def dying(job, chunks):
        for number, pair in enumerate(original(job, chunks)):
            if number == stop_after:
                raise Died
            encoded.append(pair)
            yield pair

    original = workers._encoded
    monkeypatch.setattr(workers, "_encoded", dying)
    with pytest.raises(Died):
        build_store(corpus, tokenizer, tmp_path / "s", options)
    with pytest.raises(DataError, match=r"unfinished|not a token store|no such folder"):
        open_store(tmp_path / "s")
    stop_after = 10**9
    build_store(corpus, tokenizer, tmp_path / "s", options)
    assert content(tmp_path / "s") == content(tmp_path / "whole")
    assert len(encoded) == len({(chunk.unit, chunk.number) for chunk, _ in encoded}), (
        "no chunk is encoded twice"
    )


def build_shards(corpus: list[Path], tokenizer: Path, folder: Path, shards: int) -> list[Path]:
    parts = [folder / f"shard-{index}" for index in range(shards)]
    for index, part in enumerate(parts):
        build_store(corpus, tokenizer, part, BuildOptions(shard=(index, shards)))
    return parts


@pytest.mark.parametrize(("shards", "unit_bytes"), [(1, 10**9), (3, 10**9), (2, 100)])
def test_merged_shards_are_the_undivided_store(
    tmp_path: Path,
    tokenizer: Path,
    corpus: list[Path],
    shards: int,
    unit_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers.make_units, "__defaults__", (unit_bytes,))
    monkeypatch.setattr(workers, "UNITS_PER_SHARD", 1)
    build_store(corpus, tokenizer, tmp_path / "whole")
    parts = build_shards(corpus, tokenizer, tmp_path, shards)
    merge(parts[::-1], tmp_path / "merged")
    assert content(tmp_path / "merged") == content(tmp_path / "whole")


@pytest.mark.parametrize(("shards", "unit_bytes"), [(3, 10**9), (2, 100)])
def test_shards_that_are_not_one_whole_are_not_merged(
    tmp_path: Path,
    tokenizer: Path,
    corpus: list[Path],
    shards: int,
    unit_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers.make_units, "__defaults__", (unit_bytes,))
    monkeypatch.setattr(workers, "UNITS_PER_SHARD", 1)
    build_store(corpus, tokenizer, tmp_path / "whole")
    parts = build_shards(corpus, tokenizer, tmp_path, shards)
    with pytest.raises(DataError, match="shard 0/"):
        merge(parts[1:], tmp_path / "some")
    with pytest.raises(DataError, match="same part"):
        merge([*parts, parts[0]], tmp_path / "twice")
    with pytest.raises(DataError, match="not a shard"):
        merge([tmp_path / "whole", *parts], tmp_path / "mixed")


def test_a_changed_file_or_option_does_not_continue_an_old_build(
    tmp_path: Path, tokenizer: Path, corpus, monkeypatch
) -> None:
    monkeypatch.setattr(workers.StoreWriter, "finish", lambda *_: None)

    def tokenize_quietly(**options: Any) -> Any:
        return build_store(corpus, tokenizer, tmp_path / "s", BuildOptions(**options))

    with pytest.raises(DataError, match="unfinished"):
        tokenize_quietly()  # opening the store it was kept from finishing
    with pytest.raises(DataError, match="other files or with other options"):
        tokenize_quietly(append_eos=False)
    os.utime(corpus[0], ns=(1, 1))
    with pytest.raises(DataError, match="other files or with other options"):
        tokenize_quietly()


def test_a_killed_process_continues(tmp_path: Path, tokenizer: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": f"w{i % 90} " * 400}) + "\n" for i in range(2500)),
        encoding="utf-8",
    )
    script = (
        "import sys; import headway.prepare.workers as b; b.CHUNK_BYTES = 20000; b.COMMIT_SECONDS = 0.05;"
        "from headway.prepare.build import *; build_store([sys.argv[1]], sys.argv[2], sys.argv[3], BuildOptions(workers=1))"
    )
    command = [sys.executable, "-c", script, str(corpus), str(tokenizer)]
    process = subprocess.Popen([*command, str(tmp_path / "killed")])
    until = time.monotonic() + 30
    while not (tmp_path / "killed" / "progress.json").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    committed = json.loads((tmp_path / "killed" / "progress.json").read_text())["note"]["chunk"]
    assert committed > 0
    subprocess.run([*command, str(tmp_path / "killed")], check=True)
    subprocess.run([*command, str(tmp_path / "whole")], check=True)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_a_begin_token_that_the_tokenizer_lacks_is_refused(
    tmp_path: Path, tokenizer: Path, corpus: list[Path]
) -> None:
    with pytest.raises(ConfigError, match="no begin token"):
        build_store(corpus, tokenizer, tmp_path / "s", BuildOptions(bos=True))


def test_a_missing_input_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        build_store([tmp_path / "absent.jsonl"], tokenizer, tmp_path / "s")


def test_records_without_the_text_key_are_refused(
    tmp_path: Path, tokenizer: Path, corpus: list[Path]
) -> None:
    with pytest.raises(DataError, match="no key 'body'"):
        build_store(corpus, tokenizer, tmp_path / "s", BuildOptions(text_key="body"))


def test_a_shard_beyond_the_last_is_refused(
    tmp_path: Path, tokenizer: Path, corpus: list[Path]
) -> None:
    with pytest.raises(ConfigError, match="shard is 3/3"):
        build_store(corpus, tokenizer, tmp_path / "s", BuildOptions(shard=(3, 3)))


def test_a_finished_store_is_not_built_again(
    tmp_path: Path, tokenizer: Path, corpus: list[Path]
) -> None:
    build_store(corpus, tokenizer, tmp_path / "done")
    with pytest.raises(DataError, match="finished token store already"):
        build_store(corpus, tokenizer, tmp_path / "done")


def test_the_command_line_says_what_was_made(
    tmp_path: Path, tokenizer: Path, corpus: list[Path], capsys
) -> None:
    files = [str(path) for path in corpus]
    base = ["data", "tokenize", "--tokenizer", str(tokenizer), "--workers", "1"]
    assert main([*base, "--out", str(tmp_path / "a"), "--json", "--input", *files]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 171
    assert main([*base, "--out", str(tmp_path / "b"), "--input", files[0], "--no-eos"]) == 0
    options = [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "ab"), "--json"]
    assert main(["data", "merge", *options]) == 0
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1])["documents"] == 171 + 57
    assert main([*base, "--out", str(tmp_path / "d"), "--input", *files, "--clean"]) == 0
    assert "too short" in capsys.readouterr().out
    assert main([*base, "--out", str(tmp_path / "c"), "--input", files[0], "--shard", "2/2"]) == 2
    assert "--shard is '2/2'" in capsys.readouterr().err


@pytest.fixture
def long_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of .txt files, one of them much longer than a chunk, that is read in blocks of 97 bytes and encoded in pieces of 50."""
    monkeypatch.setattr("headway.text.raw.BLOCK_BYTES", 97)
    monkeypatch.setattr("headway.tokenizer.load.WHOLE_CHARACTERS", 60)
    monkeypatch.setattr("headway.tokenizer.split_points.PIECE_CHARACTERS", 50)
    folder = tmp_path / "long"
    folder.mkdir()
    for number, words in enumerate((30, 2000, 3, 500)):
        text = " ".join(f"w{(number * 11 + i * i) % 90}" for i in range(words))
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def in_one_piece(folder: Path, tokenizer: Path, out: Path, shard_tokens: int) -> dict[str, bytes]:
    """The store of whole texts, written document by document."""
    from headway.store.writer import StoreWriter

    loaded = load_tokenizer(tokenizer)
    writer = StoreWriter(
        out,
        dtype="uint16",
        tokenizer_fingerprint=loaded.fingerprint,
        sources=[str(folder)],
        shard_tokens=shard_tokens,
    )
    with writer:
        for path in sorted(folder.iterdir()):
            writer.add(
                [
                    *loaded.fast.encode(
                        path.read_text(encoding="utf-8"), add_special_tokens=False
                    ).ids,
                    0,
                ]
            )
        writer.finish()
    return content(out)


def test_a_document_longer_than_a_chunk_is_built_in_slices_into_the_same_bytes(
    tmp_path: Path, tokenizer: Path, long_text: Path
) -> None:
    from headway.prepare.encode import TextEncoder

    sizes: list[int] = []
    encode = TextEncoder.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TextEncoder,
            "encode",
            lambda self, items: (
                sizes.append(sum(len(i.text) for i in items)),
                encode(self, items),
            )[1],
        )
        build_store([long_text], tokenizer, tmp_path / "s", BuildOptions(workers=1))
    whole = in_one_piece(long_text, tokenizer, tmp_path / "w", 1 << 30)
    assert max(sizes) < 300, "nobody holds more than a slice"
    assert content(tmp_path / "s") == whole


def test_slices_are_divided_and_merged_as_whole_documents(
    tmp_path: Path, tokenizer: Path, long_text: Path
) -> None:
    for number in range(3):
        build_store(
            [long_text],
            tokenizer,
            tmp_path / f"s{number}",
            BuildOptions(shard=(number, 3), workers=1),
        )
    merge([tmp_path / f"s{number}" for number in range(3)], tmp_path / "m")
    whole = in_one_piece(long_text, tokenizer, tmp_path / "w", 1 << 30)
    assert {k: v for k, v in content(tmp_path / "m").items() if k != "store.json"} == {
        k: v for k, v in whole.items() if k != "store.json"
    }


def test_a_build_killed_inside_a_long_document_ends_with_the_same_bytes(
    tmp_path: Path, tokenizer: Path, long_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.store.writer import StoreWriter

    whole = in_one_piece(long_text, tokenizer, tmp_path / "w", 1 << 30)
    add_many = StoreWriter.add_many
    calls = [0]

    def dies(self: StoreWriter, *arguments: object, **named: object) -> None:
        calls[0] += 1
        if calls[0] == 12:
            raise KeyboardInterrupt
        add_many(self, *arguments, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(StoreWriter, "add_many", dies)
    with pytest.raises(KeyboardInterrupt):
        build_store([long_text], tokenizer, tmp_path / "s", BuildOptions(workers=1))
    build_store([long_text], tokenizer, tmp_path / "s", BuildOptions(workers=1))
    assert content(tmp_path / "s") == whole


@pytest.mark.parametrize("shard_tokens", [40, 600, 2000, 2100, 2600])
def test_a_document_in_parts_lies_in_the_shard_it_would_lie_in_as_a_whole(
    tmp_path: Path, shard_tokens: int
) -> None:
    import numpy as np

    from headway.store.writer import StoreWriter

    lengths = [31, 30, 2001, 4, 501, 7]
    ids = np.arange(sum(lengths), dtype=np.uint16)
    ends = np.cumsum(lengths)
    with StoreWriter(
        tmp_path / "whole", dtype="uint16", tokenizer_fingerprint=None, shard_tokens=shard_tokens
    ) as writer:
        writer.add_many(ids, np.array(lengths))
        writer.finish()
    with StoreWriter(
        tmp_path / "parts", dtype="uint16", tokenizer_fingerprint=None, shard_tokens=shard_tokens
    ) as writer:
        for start in range(0, len(ids), 25):
            stop = min(start + 25, len(ids))
            inside = [end for end in ends.tolist() if start < end <= stop]
            parts = np.diff([start, *inside])
            writer.add_many(
                ids[start:stop], parts, open_tokens=stop - (inside[-1] if inside else start)
            )
        writer.finish()
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
