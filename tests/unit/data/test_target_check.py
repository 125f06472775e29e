"""What is checked about answers before training, and that the mask is transformers' own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chat_tokenizer
from support.byte_model import byte_tokenizer

from headway.data.config import DataConfig
from headway.data.open import OpenData, open_data
from headway.data.target_check import check_targets
from headway.errors import DataError
from headway.prepare.build import BuildOptions, build_store
from headway.prepare.sources import prepare_sources
from headway.store.convert import convert
from headway.store.reader import open_store
from headway.store.writer import StoreWriter
from headway.tokenizer.chat import Turn, render
from headway.tokenizer.load import load_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
)
CONVERSATIONS = [
    [("user", "What is 2 + 2?"), ("assistant", "4.")],
    [
        ("system", "Be brief."),
        ("user", "你好"),
        ("assistant", "你好！\nHow can I help?"),
        ("user", " Sing  "),
        ("assistant", "La, la 🎵 la."),
    ],
    [("user", "a\n\nb"), ("assistant", "  spaces stay  "), ("user", "thanks")],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(folder)
    return folder


@pytest.mark.parametrize("turns", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_ids_and_mask_of_chatml_are_transformers_own(
    tokenizer: Path, turns: list[tuple[Any, str]]
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer)
    messages = [{"role": role, "content": content} for role, content in turns]
    wanted = reference.apply_chat_template(
        messages, chat_template=CHATML, return_dict=True, return_assistant_tokens_mask=True
    )
    got = render(
        [Turn(role, content) for role, content in turns], "chatml", load_tokenizer(tokenizer)
    )
    assert got.ids.tolist() == list(wanted["input_ids"])
    assert got.mask.tolist() == [bool(flag) for flag in wanted["assistant_masks"]]


def opened(path: Path | str, tokenizer: Path | None, **settings: Any) -> OpenData:
    config = DataConfig.model_validate(
        {"train": [str(path)], "seq_len": 128, "tokenizer_unchecked": True, **settings}
    )
    return open_data(
        config, prepare_sources(config, tokenizer), tokenizer=tokenizer, vocab_size=400, seed=0
    )


def chat(folder: Path, tokenizer: Path, template: str = "chatml", **options: Any) -> Path:
    lines = [
        json.dumps({"prompt": f"question {n}", "completion": "word " * (1 + n)}) for n in range(20)
    ]
    (folder / "chat.jsonl").write_text("\n".join(lines))
    build_store(
        [folder / "chat.jsonl"],
        tokenizer,
        folder / "store",
        BuildOptions("chat", chat_template=template, **options),
    )
    return folder / "store"


def test_good_conversations_are_said_to_be_good(tmp_path: Path, tokenizer: Path) -> None:
    loaded = load_tokenizer(tokenizer)
    data = opened(chat(tmp_path, tokenizer), tokenizer)
    report = check_targets(data, loaded, frozenset({7}))
    end = loaded.token_to_id("<|im_end|>")
    assert "each of 20 samples has a target" in report.lines[0]
    assert f"the stop token '<|im_end|>' (id {end}) is a target in 20" in report.lines[0]
    assert report.end_ids == {7, end}


def test_cut_conversations_are_counted_and_refused_where_none_ends(
    tmp_path: Path, tokenizer: Path
) -> None:
    loaded = load_tokenizer(tokenizer)
    some = check_targets(opened(chat(tmp_path, tokenizer, max_length=80), tokenizer), loaded).lines[
        0
    ]
    assert "are truncated before it)" in some
    (tmp_path / "none").mkdir()
    none = opened(chat(tmp_path / "none", tokenizer, max_length=34), tokenizer)
    with pytest.raises(DataError, match=r"is a target in none of 20 samples.*raise data\.seq_len"):
        check_targets(none, loaded)


def test_raw_conversations_are_cut_to_a_row_at_their_end(tmp_path: Path, tokenizer: Path) -> None:
    chat(tmp_path, tokenizer)
    source = {"path": str(tmp_path / "chat.jsonl"), "kind": "chat"}
    data = opened("", tokenizer, train=[source], seq_len=100, cache_dir=tmp_path / "cache")
    store = data.train[0].selection.source
    assert int(store.lengths(0, store.num_documents).max()) == 100
    whole = opened(
        "", tokenizer, train=[source], seq_len=100, packing="concat", cache_dir=tmp_path / "cache"
    )
    assert int(whole.train[0].selection.source.lengths(0, 20).max()) > 100


def test_a_template_that_ends_in_the_end_token_is_checked_for_that(
    tmp_path: Path, tokenizer: Path
) -> None:
    loaded = load_tokenizer(tokenizer)
    report = check_targets(opened(chat(tmp_path, tokenizer, "alpaca"), tokenizer), loaded)
    assert report.end_ids == {loaded.eos_id}


@pytest.mark.parametrize(
    ("kind", "refuses"), [("kind=chat template=chatml", True), ("somewhere else", False)]
)
def test_samples_without_a_target_are_refused_in_conversations_and_counted_elsewhere(
    tmp_path: Path, tokenizer: Path, kind: str, refuses: bool
) -> None:
    writer = StoreWriter(
        tmp_path / "store", dtype="uint16", tokenizer_fingerprint=None, masked=True, sources=[kind]
    )
    for number in range(10):
        mask = np.arange(12) >= 6
        # a first token is never predicted, so a target there alone is none
        writer.add(np.arange(12, dtype=np.uint16), np.arange(12) < 1 if number in (4, 7) else mask)
    writer.finish()
    data = opened(tmp_path / "store", None)
    loaded = load_tokenizer(tokenizer)
    if refuses:
        with pytest.raises(
            DataError,
            match=r"2 of 10 samples have no target to learn from \(the first: document 4\)",
        ):
            check_targets(data, loaded)
    else:
        assert "2 of 10 samples have no target" in check_targets(data, loaded).lines[0]


def test_a_masked_store_without_any_target_is_refused(tmp_path: Path) -> None:
    writer = StoreWriter(
        tmp_path / "store", dtype="uint16", tokenizer_fingerprint=None, masked=True
    )
    writer.add(np.arange(12, dtype=np.uint16), np.zeros(12, np.bool_))
    writer.finish()
    with pytest.raises(DataError, match="1 of 1 samples have no target"):
        check_targets(opened(tmp_path / "store", None), None)
    assert open_store(tmp_path / "store").masked


def sft_pairs(folder: Path, tokenizer: Path, template: str = "zero2all") -> Path:
    """zero2all's SFT files, as its tool writes them: nothing in them names the template."""
    lines = [
        json.dumps({"prompt": f"question {n}", "completion": "word " * (1 + n)}) for n in range(9)
    ]
    (folder / "chat.jsonl").write_text("\n".join(lines))
    build_store(
        [folder / "chat.jsonl"],
        tokenizer,
        folder / "pairs",
        BuildOptions("chat", chat_template=template, to="zero2all"),
    )
    return folder / "pairs"


@pytest.mark.parametrize("converted", [False, True])
def test_answers_of_zero2alls_pair_files_stop_at_the_token_that_ends_them(
    tmp_path: Path, converted: bool
) -> None:
    chat_tokenizer.byte_tokenizer().save(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    path = sft_pairs(tmp_path, tmp_path / "tokenizer")
    if converted:
        convert(path, tmp_path / "store", "headway")
        path = tmp_path / "store"
    report = check_targets(opened(path, tmp_path / "tokenizer"), loaded)
    end = loaded.token_to_id("<|im_end|>")
    assert end != loaded.eos_id
    assert report.end_ids == {end}
    assert f"the stop token '<|im_end|>' (id {end}) is a target in 9" in report.lines[0]


def test_samples_that_end_in_ordinary_text_have_no_stop_token_of_their_own(
    tmp_path: Path, tokenizer: Path
) -> None:
    writer = StoreWriter(
        tmp_path / "store", dtype="uint16", tokenizer_fingerprint=None, masked=True
    )
    for last in (5, 5, 6):
        writer.add(np.array([1, 2, 3, last], np.uint16), np.array([False, True, True, True]))
    writer.finish()
    loaded = load_tokenizer(tokenizer)
    assert check_targets(opened(tmp_path / "store", None), loaded).end_ids == {loaded.eos_id}
