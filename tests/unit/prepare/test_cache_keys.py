"""Stores that earlier versions cached are found again: the names of cached stores never change."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from headway.prepare.build import BuildOptions, cached_store
from headway.records.encode_media import MediaPositions
from headway.text.record_keys import KeyMap
from headway.tokenizer.load import Tokenizer

FINGERPRINT = "0123456789abcdef"


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer of one id per byte, with a fingerprint that no library version changes."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
        ]
    )
    Tokenizer(backend, {"bos": "<s>", "eos": "</s>"}).save(tmp_path / "tokenizer")
    monkeypatch.setattr(Tokenizer, "fingerprint", FINGERPRINT)
    return tmp_path / "tokenizer"


CHAT = {"instruction": "say one", "output": "one"}
PAIR = {"prompt": "say one", "chosen": "one", "rejected": "two"}
KEYS = KeyMap.of({"prompt": "instruction", "response": "output"})


@pytest.mark.parametrize(
    ("record", "options", "name"),
    [
        ({"text": "one two"}, {}, "bfe583bf54e432fa048ab50061c98601"),
        (
            {"text": "one two"},
            {"text_template": "{text}", "split": "line", "append_eos": False, "bos": True},
            "00abd13ceb46f13e6865956a4c615cb6",
        ),
        (CHAT, {"kind": "chat"}, "7e8ee744bcdbc646d4d6192215c01c9c"),
        (
            CHAT,
            {
                "kind": "chat",
                "chat_template": "alpaca",
                "max_length": 256,
                "too_long": "drop",
                "keys": KEYS,
            },
            "c8168d65cc4e8aa9719a250472a1e163",
        ),
        (PAIR, {"kind": "preference", "max_length": 64}, "7cc08b3660e8446f293077d03418fab8"),
        (
            PAIR,
            {"kind": "preference", "max_length": 64, "max_prompt_length": 20, "drop_bad": True},
            "136ec27aa41fec9eb7662e4fd64865b4",
        ),
    ],
)
def test_cached_stores_keep_the_names_of_the_first_release(
    tmp_path: Path, tokenizer: Path, record: dict[str, str], options: dict[str, Any], name: str
) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    store = cached_store(
        [tmp_path / "data.jsonl"], tokenizer, tmp_path / "cache", BuildOptions(**options)
    )
    assert store.name == name


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (
            {"positions": MediaPositions({"image": 2}, missing=True)},
            "4230244294badea3a8cda1f6bc2a9db8",
        ),
        (
            {
                "positions": MediaPositions({"image": 2, "audio": 3}, missing=False),
                "keys": KeyMap.of({"prompt": "instruction", "response": "response"}),
                "max_length": 40,
                "drop_bad": True,
            },
            "986660294985918d52af333c5be2f56a",
        ),
    ],
)
def test_cached_stores_with_media_keep_the_names_of_the_second_release(
    tmp_path: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # names of media files are part of the key
    for number, file in enumerate(("a.png", "b.png")):
        Path(file).write_bytes(bytes([number]) * (10 + number))
        os.utime(file, ns=(1_700_000_000_000_000_000, 1_700_000_000_000_000_000))
    turns = [{"role": "user", "content": "<image> Hm?"}, {"role": "assistant", "content": "No."}]
    records = [
        {"image": "a.png", "instruction": "What?", "response": "A cat."},
        {"messages": turns, "images": ["b.png"]},
        {"text": "both", "image": "b.png"},
    ]
    Path("chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen = BuildOptions("multimodal", **options)
    store = cached_store(["chat.jsonl"], tokenizer, Path("cache"), chosen)
    assert store.name == name
