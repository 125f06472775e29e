"""Chat and preference data become stores whose masks, splits and truncations are exact and counted."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headway.data.config import DataConfig, SourceConfig
from headway.data.groups import is_preference, num_pairs
from headway.errors import ConfigError, DataError
from headway.prepare.build import BuildOptions, build_store, cached_store
from headway.prepare.sources import prepare_source
from headway.store.open import open_source
from headway.store.reader import Store, open_store
from headway.text.record_keys import KeyMap
from headway.tokenizer.load import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of one id per byte; no byte has id 0."""
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


def chats(path: Path, count: int, size: int = 3) -> Path:
    """Alpaca records whose answers are `size` letters and a number."""
    rows = [{"instruction": f"say {i}", "output": "a" * size + str(i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def targets(store: Store, tokenizer: Tokenizer) -> list[str]:
    return [
        tokenizer.decode(store.document(i)[store.document_mask(i)].tolist())  # pyright: ignore[reportArgumentType, reportCallIssue]
        for i in range(store.num_documents)
    ]


def test_a_chat_store_has_the_answers_and_their_end_as_targets(
    tmp_path: Path, folder: Path
) -> None:
    report = build_store(
        [chats(tmp_path / "c.jsonl", 3)], folder, tmp_path / "out", BuildOptions("chat")
    )
    store = open_store(tmp_path / "out")
    tokenizer = load_tokenizer(folder)
    assert targets(store, tokenizer) == [f"aaa{i}<|im_end|>" for i in range(3)]
    assert store.masked
    assert store.fingerprint == tokenizer.fingerprint
    assert not is_preference(store)
    assert (
        report.counts["records"],
        report.train_documents,
        report.valid_documents,
        report.counts["targets"],
    ) == (3, 3, 0, 3 * 5)
    assert report.tokens == store.num_tokens
    assert "3 conversations of 3 records" in report.describe()


def test_the_split_is_exact_seeded_and_loses_nothing(tmp_path: Path, folder: Path) -> None:
    source = chats(tmp_path / "c.jsonl", 37)
    tokenizer = load_tokenizer(folder)
    texts_of_seed: dict[int, list[list[str]]] = {}
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        report = build_store(
            [source], folder, tmp_path / name, BuildOptions("chat", valid_fraction=0.1, seed=seed)
        )
        assert (report.train_documents, report.valid_documents) == (33, 4)
        sides = [
            targets(open_store(tmp_path / name / side), tokenizer) for side in ("train", "valid")
        ]
        assert sorted(sides[0] + sides[1]) == sorted(f"aaa{i}<|im_end|>" for i in range(37))
        assert texts_of_seed.setdefault(seed, sides) == sides
    assert texts_of_seed[1] != texts_of_seed[2]


@pytest.mark.parametrize(
    ("too_long", "kept", "truncated", "dropped"),
    [
        ("truncate_right", "aaaaaa", 1, 0),
        ("truncate_left", "aaaaaaaaa1<|im_end|>", 1, 0),
        ("drop", None, 0, 1),
    ],
)
def test_too_long_conversations_follow_the_stated_rule_and_are_counted(
    tmp_path: Path, folder: Path, too_long: Any, kept: str | None, truncated: int, dropped: int
) -> None:
    rows = [{"instruction": "q", "output": "b"}, {"instruction": "q", "output": "a" * 9 + "1"}]
    (tmp_path / "c.json").write_text(json.dumps(rows))
    limit = len("?user\nq?\n?assistant\n") + 6
    report = build_store(
        [tmp_path / "c.json"],
        folder,
        tmp_path / "out",
        BuildOptions("chat", max_length=limit, too_long=too_long),
    )
    store = open_store(tmp_path / "out")
    assert targets(store, load_tokenizer(folder)) == ["b<|im_end|>"] + ([kept] if kept else [])
    assert (report.counts["truncated"], report.counts["dropped"]) == (truncated, dropped)
    assert int(store.lengths(0, store.num_documents).max()) <= limit


def test_what_truncation_leaves_without_a_target_is_left_out_and_counted(
    tmp_path: Path, folder: Path
) -> None:
    rows = [{"instruction": "q", "output": "b"}, {"instruction": "q" * 50, "output": "b"}]
    (tmp_path / "c.json").write_text(json.dumps(rows))
    report = build_store(
        [tmp_path / "c.json"], folder, tmp_path / "out", BuildOptions("chat", max_length=30)
    )
    assert (
        report.train_documents,
        report.counts["truncated"],
        report.counts["without_targets"],
    ) == (1, 1, 1)
    (tmp_path / "d.json").write_text(json.dumps(rows[1:]))
    with pytest.raises(DataError, match="no record is left"):
        build_store(
            [tmp_path / "d.json"], folder, tmp_path / "out2", BuildOptions("chat", max_length=30)
        )


def test_a_conversation_cut_to_one_target_at_its_very_beginning_is_left_out(
    tmp_path: Path, folder: Path
) -> None:
    # cut from the left to `<|im_end|>` and a line break, the one target is the first token, which nothing predicts
    source = tmp_path / "c.jsonl"
    source.write_text(json.dumps({"instruction": "say", "output": "a"}) + "\n")
    whole = build_store([source], folder, tmp_path / "whole", BuildOptions("chat"))
    # "a" and <|im_end|>, then a line break that is no target
    assert (whole.counts["targets"], whole.train_documents) == (
        2,
        1,
    )
    mask = open_store(tmp_path / "whole").document_mask(0)
    assert mask is not None
    assert mask[-3:].tolist() == [True, True, False]
    kept = build_store(
        [source],
        folder,
        tmp_path / "three",
        BuildOptions("chat", max_length=3, too_long="truncate_left"),
    )
    assert (kept.train_documents, kept.counts["without_targets"]) == (1, 0)
    with pytest.raises(DataError):
        build_store(
            [source],
            folder,
            tmp_path / "two",
            BuildOptions("chat", max_length=2, too_long="truncate_left"),
        )


def test_bad_records_are_refused_with_their_place_or_left_out_and_counted(
    tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "c.jsonl").write_text('{"instruction": "q", "output": "b"}\n{"instruction": "q"}\n')
    with pytest.raises(
        DataError, match=r"c\.jsonl:2: instruction without output.*headway data validate"
    ):
        build_store([tmp_path / "c.jsonl"], folder, tmp_path / "out", BuildOptions("chat"))
    report = build_store(
        [tmp_path / "c.jsonl"], folder, tmp_path / "other", BuildOptions("chat", drop_bad=True)
    )
    assert (report.counts["records"], report.train_documents, report.counts["bad"]) == (2, 1, 1)


@pytest.mark.parametrize("to", ["internlm", "zero2all"])
def test_other_systems_files_hold_the_same_ids_and_targets(
    tmp_path: Path, folder: Path, to: str
) -> None:
    source = chats(tmp_path / "c.jsonl", 10)
    build_store([source], folder, tmp_path / "native", BuildOptions("chat", valid_fraction=0.2))
    build_store([source], folder, tmp_path / to, BuildOptions("chat", valid_fraction=0.2, to=to))
    for side in ("train", "valid"):
        native = open_store(tmp_path / "native" / side)
        other = open_source(tmp_path / to / side)
        assert native.num_documents == other.num_documents
        for i, length in enumerate(native.lengths(0, native.num_documents).tolist()):
            assert np.array_equal(native.tokens(i, 0, length), other.tokens(i, 0, length))
            assert np.array_equal(native.mask(i, 1, length), other.mask(i, 1, length))  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.glob("**/.tmp-*"))
    if to == "internlm":
        assert (tmp_path / to / "train" / "en" / "dataset.bin.meta").exists()


def test_workers_make_the_same_bytes_as_one_process(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.prepare.workers.CHUNK_BYTES", 512)
    source = chats(tmp_path / "c.jsonl", 40, size=30)
    for workers in (1, 2):
        build_store(
            [source], folder, tmp_path / str(workers), BuildOptions("chat", workers=workers)
        )
    assert {f.name: f.read_bytes() for f in (tmp_path / "1").iterdir()} == {
        f.name: f.read_bytes() for f in (tmp_path / "2").iterdir()
    }


def test_raw_chat_is_built_once_into_the_cache_and_again_when_anything_changes(
    tmp_path: Path, folder: Path
) -> None:
    source = chats(tmp_path / "c.jsonl", 4)
    first = cached_store([source], folder, tmp_path / "cache", BuildOptions("chat"))
    assert cached_store([source], folder, tmp_path / "cache", BuildOptions("chat")) == first
    assert open_store(first).num_documents == 4
    assert (
        cached_store(
            [source], folder, tmp_path / "cache", BuildOptions("chat", chat_template="alpaca")
        )
        != first
    )
    assert (
        cached_store([source], folder, tmp_path / "cache", BuildOptions("chat", max_length=25))
        != first
    )
    chats(source, 5)
    assert (
        open_store(
            cached_store([source], folder, tmp_path / "cache", BuildOptions("chat"))
        ).num_documents
        == 5
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BuildOptions("chat", to="megatron"), "--to is 'megatron'"),
        (BuildOptions("chat", valid_fraction=1.0), "--valid-fraction is 1.0"),
        (BuildOptions("chat", max_length=1), "--max-length is 1"),
        (BuildOptions("chat", too_long="shorten"), "--too-long is 'shorten'"),  # pyright: ignore[reportArgumentType]
        (BuildOptions("chat", chat_template="llama3"), "needs the token '<|begin_of_text|>'"),
        (BuildOptions("chat", chat_template="none"), "template is 'none'"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tmp_path: Path, folder: Path, options: BuildOptions, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_store([chats(tmp_path / "c.jsonl", 2)], folder, tmp_path / "out", options)
    assert message in str(caught.value)


def pairs(
    path: Path, prompt: str = "hi", chosen: str = "good", rejected: str = "bad", count: int = 1
) -> Path:
    path.write_text(
        json.dumps(
            [
                {"prompt": f"{prompt}{i}", "chosen": chosen, "rejected": rejected}
                for i in range(count)
            ]
        )
    )
    return path


def test_pairs_lie_side_by_side_share_the_prompt_and_have_loss_on_the_answers_alone(
    tmp_path: Path, folder: Path
) -> None:
    rows = [{
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "earlier"},
            {"from": "human", "value": "b"},
        ],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "worse"},
    }] * 2  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps(rows))
    report = build_store(
        [tmp_path / "p.json"], folder, tmp_path / "out", BuildOptions("preference")
    )
    store = open_store(tmp_path / "out")
    tokenizer = load_tokenizer(folder)
    assert is_preference(store)
    assert num_pairs(store) == report.train_documents // 2 == 2
    assert targets(store, tokenizer) == ["good<|im_end|>", "worse<|im_end|>"] * 2
    said = (("system", "s"), ("user", "a"), ("assistant", "earlier"), ("user", "b"))
    prompt = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    for i in range(4):
        text = tokenizer.decode(store.document(i).tolist())
        assert text.startswith(prompt + "<|im_start|>assistant\n"), (
            "the answer has the assistant's header, not the user's"
        )


HEADER = len("?user\n0?\n?assistant\n")


@pytest.mark.parametrize(
    ("prompt", "chosen", "limit", "kept_prompt", "kept_answer", "cut"),
    [
        (10, 5, 100, 10 + HEADER, 6, (0, 0)),
        (40, 5, 40, 34, 6, (1, 0)),
        (40, 60, 40, 20, 20, (1, 1)),
        (0, 60, 40, HEADER, 40 - HEADER, (0, 1)),
    ],
)
def test_the_prompt_loses_its_beginning_first_then_the_answers_their_ends(
    tmp_path: Path,
    folder: Path,
    prompt: int,
    chosen: int,
    limit: int,
    kept_prompt: int,
    kept_answer: int,
    cut: tuple[int, int],
) -> None:
    source = pairs(tmp_path / "p.json", "q" * prompt, "g" * chosen, "b")
    report = build_store(
        [source], folder, tmp_path / "out", BuildOptions("preference", max_length=limit)
    )
    store = open_store(tmp_path / "out")
    tokenizer = load_tokenizer(folder)
    assert (report.counts["prompts_truncated"], report.counts["answers_truncated"]) == cut
    for i, answer in enumerate(("g" * chosen + "\N{BULLET}", "b\N{BULLET}")):
        mask = store.document_mask(i)
        assert mask is not None
        assert int(mask.argmax()) == kept_prompt
        assert tokenizer.decode(store.document(i)[:kept_prompt].tolist()).endswith(
            "<|im_start|>assistant\n"
        )
        shown = tokenizer.decode(store.document(i)[kept_prompt:].tolist()).replace(
            "<|im_end|>", "\N{BULLET}"
        )
        assert shown == answer[: kept_answer if i == 0 else None][: limit - kept_prompt]


def test_preference_data_is_split_by_pairs_and_cached(tmp_path: Path, folder: Path) -> None:
    source = pairs(tmp_path / "p.json", count=10)
    report = build_store(
        [source], folder, tmp_path / "out", BuildOptions("preference", valid_fraction=0.3)
    )
    assert (report.train_documents // 2, report.valid_documents // 2) == (7, 3)
    assert [num_pairs(open_store(tmp_path / "out" / side)) for side in ("train", "valid")] == [7, 3]
    first = cached_store([source], folder, tmp_path / "cache", BuildOptions("preference"))
    assert num_pairs(open_store(first)) == 10
    assert cached_store([source], folder, tmp_path / "cache", BuildOptions("preference")) == first


def test_a_store_without_pairs_is_not_taken_for_one(tmp_path: Path, folder: Path) -> None:
    build_store([chats(tmp_path / "c.jsonl", 2)], folder, tmp_path / "out", BuildOptions("chat"))
    with pytest.raises(DataError, match="holds no preference pairs"):
        num_pairs(open_store(tmp_path / "out"))
    with pytest.raises(ConfigError, match="headway stores only"):
        build_store(
            [tmp_path / "c.jsonl"], folder, tmp_path / "p", BuildOptions("preference", to="mds")
        )
    shutil.rmtree(tmp_path / "out")


def test_the_build_names_keys_it_does_not_read_and_reads_those_it_is_given(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"frage": f"say {i}", "antwort": f"a{i}", "topic": "x"} for i in range(3)] + [
        {"frage": "", "antwort": "a", "topic": "x"}
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = KeyMap.of({"prompt": "frage", "response": "antwort"})
    with caplog.at_level("INFO", "headway"):
        report = build_store(
            [tmp_path / "c.jsonl"],
            folder,
            tmp_path / "out",
            BuildOptions("chat", keys=keys, drop_bad=True),
        )
    assert (report.counts["records"], report.train_documents, report.counts["bad"]) == (4, 3, 1)
    assert targets(open_store(tmp_path / "out"), load_tokenizer(folder)) == [
        f"a{i}<|im_end|>" for i in range(3)
    ]
    assert "unread keys: topic (3 records)" in caplog.text
    assert "dropped 1 bad of 4 records" in caplog.text


@pytest.fixture
def german_source(tmp_path: Path) -> dict[str, Any]:
    """A file with keys of its own whose second record has an empty answer."""
    rows = [{"frage": "Hi", "antwort": "Hello"}, {"frage": "Hi", "antwort": ""}]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"prompt": "frage", "response": "antwort"}
    return {"path": str(path), "kind": "chat", "keys": keys}


def test_a_bad_record_of_a_recipe_is_refused_with_the_setting_that_leaves_it_out(
    german_source: dict[str, Any], tmp_path: Path, folder: Path
) -> None:
    config = SourceConfig(**german_source)
    with pytest.raises(
        DataError,
        match=r"c.jsonl:2: turn 1 \(assistant\) is empty.*\(in a recipe drop_bad: true\) leaves them out",
    ):
        prepare_source(config, DataConfig(cache_dir=tmp_path / "cache"), folder)


def test_a_recipe_names_keys_and_leaves_out_bad_records(
    german_source: dict[str, Any], tmp_path: Path, folder: Path
) -> None:
    config = SourceConfig(**german_source, drop_bad=True)
    prepared = prepare_source(config, DataConfig(cache_dir=tmp_path / "cache"), folder)
    store = open_store(prepared.path)
    assert targets(store, load_tokenizer(folder)) == ["Hello<|im_end|>"]


def test_keys_that_no_conversation_has_are_refused(german_source: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="keys names 'frage', which is not one of messages"):
        SourceConfig(**{**german_source, "keys": {"frage": "prompt"}})


def test_bad_records_of_plain_text_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="has kind=text and drop_bad=True"):
        SourceConfig(path="x", kind="text", drop_bad=True)
