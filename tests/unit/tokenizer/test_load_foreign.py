"""Folders that other tools made: the same ids as those tools give, and special tokens kept out of texts there too."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from headway.errors import DataError
from headway.tokenizer import tiktoken_ranks
from headway.tokenizer.byte_level import unspell
from headway.tokenizer.inspect import HARD_TEXTS
from headway.tokenizer.load import Tokenizer, load_tokenizer
from headway.tokenizer.train import train_bpe

TEXTS = [
    "The river had frozen early that year, and the children crossed it.\n" * 8,
    "那年河水结冰很早，孩子们踩着冰面过河上学。\n" * 8,
]


@pytest.fixture(scope="module", params=["plain", "with nfkc"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model as most projects train them: a space before each text, spaces as U+2581."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "corpus.txt").write_text("".join(TEXTS), encoding="utf-8")
    settings_: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 305,
        "byte_fallback": True,
        "minloglevel": 2,
    }
    if "nfkc" not in request.param:
        settings_ |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "tokenizer"), **settings_
    )  # pyright: ignore[reportAttributeAccessIssue]
    return folder / "tokenizer.model"


@given(
    text=st.lists(
        st.one_of(st.text(max_size=8), st.sampled_from([*HARD_TEXTS, "river had", "河水", "  "])),
        max_size=6,
    ).map("".join)
)
@settings(max_examples=150, deadline=None)
def test_a_converted_sentencepiece_model_gives_the_ids_of_the_library(
    model: Path, text: str
) -> None:
    tokenizer = _cached(model)
    ids = SentencePieceProcessor(model_file=str(model)).encode(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.fast.encode(text, add_special_tokens=False).ids == ids


_LOADED: dict[Path, Tokenizer] = {}


def _cached(path: Path) -> Tokenizer:
    if path not in _LOADED:
        _LOADED[path] = load_tokenizer(path)
    return _LOADED[path]


def test_a_bare_model_is_saved_as_a_folder_for_everybody(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(model)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.special_tokens) == (
        1,
        2,
        {"<unk>": 0, "<s>": 1, "</s>": 2},
    )
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    for text in (*TEXTS, "plain text</s>", "河水 river"):
        assert (
            again.encode(text)
            == tokenizer.encode(text)
            == exported.encode(text, add_special_tokens=False, split_special_tokens=True)
        )
        assert again.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert 2 not in tokenizer.encode("x</s>")
    assert tokenizer.encode("x</s>", allowed_special={"</s>"})[-1] == 2
    assert (exported.bos_token_id, exported.eos_token_id) == (1, 2)


def test_unigram_models_are_refused(tmp_path: Path) -> None:
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Backend

    (tmp_path / "c.txt").write_text("".join(TEXTS), encoding="utf-8")
    SentencePieceTrainer.train(
        input=str(tmp_path / "c.txt"),
        model_prefix=str(tmp_path / "u"),
        vocab_size=50,
        minloglevel=2,
    )  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DataError, match="of another type than bpe"):
        load_tokenizer(tmp_path / "u.model")
    unigram = Backend(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)], unk_id=0))
    unigram.add_special_tokens([AddedToken("</s>", special=True)])
    unigram.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="would become that special token"):
        load_tokenizer(tmp_path)


def test_a_model_folder_may_add_tokens(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    config = {
        "added_tokens_decoder": {"305": {"content": "<pad>", "special": True, "normalized": False}},
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.vocab_size, tokenizer.model_vocab_size) == (305, 306, 320)
    assert tokenizer.encode("the river<pad>") == load_tokenizer(model).encode("the river<pad>")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_bpe(TEXTS, vocab_size=320, out=tmp_path_factory.mktemp("bpe"))


def put_vocab_and_merges(tokenizer: Tokenizer, folder: Path) -> None:
    content = json.loads(tokenizer.fast.to_str())
    vocabulary = {**content["model"]["vocab"], "<|endoftext|>": len(content["model"]["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in content["model"]["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges_give_the_ids_of_transformers(
    ours: Tokenizer, tmp_path: Path, kind: str
) -> None:
    from transformers import AutoTokenizer

    put_vocab_and_merges(ours, tmp_path)
    config = {
        "tokenizer_class": kind,
        "eos_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, *HARD_TEXTS):
        assert tokenizer.encode(text) == reference.encode(
            text, add_special_tokens=False, split_special_tokens=True
        ), text
    assert tokenizer.special_tokens == {"<|endoftext|>": 316, "<|im_start|>": 317}
    assert reference.convert_tokens_to_ids("<|im_start|>") == 317


def test_a_rank_file_becomes_the_same_tokenizer(
    ours: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = json.loads(ours.fast.to_str())["model"]["vocab"]
    lines = [
        base64.b64encode(unspell(token) or b"") + b" %d\n" % rank
        for token, rank in vocabulary.items()
    ]
    (tmp_path / "small.tiktoken").write_bytes(b"".join(lines))
    known = tiktoken_ranks.RankVocabulary(
        tiktoken_ranks.CL100K, False, ("<|endoftext|>",), {"eos_token": "<|endoftext|>"}
    )
    monkeypatch.setitem(tiktoken_ranks.KNOWN, len(vocabulary), known)
    tokenizer = load_tokenizer(tmp_path)
    assert (
        json.loads(tokenizer.fast.to_str())["model"]["merges"]
        == json.loads(ours.fast.to_str())["model"]["merges"]
    )
    assert tokenizer.encode(TEXTS[0]) == ours.encode(TEXTS[0])
    assert tokenizer.eos_id == len(vocabulary)


def test_chat_templates_are_read_and_written(ours: Tokenizer, tmp_path: Path) -> None:
    ours.with_chat_template("{{ messages }}").save(tmp_path)
    assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("{{ other }}", encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template == "{{ other }}"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = [
        {"name": "tool_use", "template": "t"},
        {"name": "default", "template": "d"},
    ]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template == "d"


def test_the_begin_token_of_a_llama_folder_is_kept_for_other_tools(
    model: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "legacy": false}', encoding="utf-8"
    )
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "saved")
    exported = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in (" lead", "  two", "river"):
        assert (
            exported.encode(text)
            == [1, *tokenizer.encode(text)]
            == [1, *load_tokenizer(tmp_path / "saved").encode(text)]
        )


@pytest.mark.parametrize("name", ["tokenizer.json", "my_tokenizer.json"])
def test_zero2all_folders_get_the_tokens_their_class_adds(
    ours: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    content = json.loads(ours.fast.to_str()) | {"added_tokens": []}
    (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    config = {
        "added_tokens_decoder": {},
        "auto_map": {"AutoTokenizer": ["x.MyHFTokenizer", None]},
        "tokenizer_class": "MyHFTokenizer",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="the id 64000, but the vocabulary gives it 316"):
        load_tokenizer(tmp_path)
    monkeypatch.setattr("headway.tokenizer.zero2all_folder.FIRST", 316)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (316, 317, 322)
    assert tokenizer.special_tokens["<|role_end|>"] == 328
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == tokenizer.fingerprint


def test_zero2alls_file_alone_gets_its_special_tokens_too(
    ours: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my_hf_bbpe_tokenizer_10G.json"
    content = json.loads(ours.fast.to_str()) | {"added_tokens": []}
    path.write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr("headway.tokenizer.zero2all_folder.FIRST", 316)
    assert not load_tokenizer(path).special_tokens, (
        "another vocabulary of the same size stays as it is"
    )
    split = {
        "type": "Split",
        "pattern": {"Regex": r"\p{N}{1,3}|[\u4e00-\u9fa5]+"},
        "behavior": "Isolated",
        "invert": False,
    }
    cuts = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, cuts]}
    path.write_text(json.dumps(content), encoding="utf-8")
    for source in (path, tmp_path):
        tokenizer = load_tokenizer(source)
        assert list(tokenizer.special_tokens.values()) == list(range(316, 329))
        assert tokenizer.special_tokens["<|im_end|>"] == 320


def test_zero2alls_sentencepiece_folder_keeps_the_ids_of_its_pieces(tmp_path: Path) -> None:
    tokens = ["<|beginoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|PAD|>"]
    (tmp_path / "corpus.txt").write_text("".join(TEXTS), encoding="utf-8")
    SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "sp_bbpe_tokenizer"), model_type="bpe", vocab_size=310,
        byte_fallback=True, minloglevel=2, user_defined_symbols=tokens,
    )  # fmt: skip
    config = {
        "added_tokens_decoder": {},
        "auto_map": {"AutoTokenizer": ["x.MySPTokenizer", None]},
        "tokenizer_class": "MySPTokenizer",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    library = SentencePieceProcessor(model_file=str(tmp_path / "sp_bbpe_tokenizer.model"))
    assert (
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.pad_id,
        tokenizer.special_tokens["<|im_end|>"],
    ) == (3, 4, 7, 6)
    assert tokenizer.special_tokens["<|role_end|>"] == 317, (
        "behind the 310 pieces, in the order of zero2all's own list"
    )
    for text in (*TEXTS, "  two  spaces ▁ "):
        assert tokenizer.encode(text) == library.encode(text)
    assert 6 not in tokenizer.encode("typed <|im_end|>")
    assert tokenizer.encode("said<|im_end|>", allowed_special={"<|im_end|>"})[-1] == 6


def test_a_sentencepiece_model_with_a_null_character_is_read_in_every_version(
    model: Path, tmp_path: Path
) -> None:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(model.read_bytes())
    proto.pieces[300].piece = "\0"
    (tmp_path / "V7_sft.model").write_bytes(proto.SerializeToString())
    tokenizer = load_tokenizer(tmp_path / "V7_sft.model")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (305, 1, 2)
    assert tokenizer.encode("\0")[-1] == 300
    assert tokenizer.decode(tokenizer.encode("river\0 had")) == "river\0 had"
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode("ice \0 river") == tokenizer.encode(
        "ice \0 river"
    )


def test_what_the_library_says_of_a_model_is_passed_on(model: Path, tmp_path: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(model.read_bytes())
    proto.pieces[300].piece = proto.pieces[301].piece
    (tmp_path / "twice.model").write_bytes(proto.SerializeToString())
    with pytest.raises(
        DataError, match=r"twice\.model: sentencepiece \S+ cannot open it: .*already defined"
    ):
        load_tokenizer(tmp_path / "twice.model")


def test_transformers_is_asked_where_nothing_else_can_read_a_folder(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "river", "##s"]), encoding="utf-8"
    )
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer"}', encoding="utf-8"
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("rivers [MASK]") != tokenizer.encode(
        "rivers [MASK]", allowed_special="all"
    )
    assert tokenizer.encode("rivers") == [5, 6]
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "NoSuchTokenizer"}', encoding="utf-8"
    )
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(DataError, match="neither headway nor transformers can read"):
        load_tokenizer(tmp_path)
