"""Tokenizers come back byte for byte, keep special tokens out of texts, and load in other tools with the same ids."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.byte_model import byte_tokenizer

from headway.errors import ConfigError, DataError
from headway.tokenizer.inspect import HARD_TEXTS, inspect
from headway.tokenizer.load import Tokenizer, load_tokenizer
from headway.tokenizer.train import SPECIAL_TOKENS, train_bpe, train_sentencepiece

SHARED = Path(__file__).parents[4] / "shared" / "data"
TEXTS = [
    "The river had frozen early that year, and the children were crossing it on foot.  Two  spaces.\n"
    * 6,
    "那年河水结冰很早，孩子们踩着冰面过河上学。没有人记得渡船上一次停在岸边是什么时候。" * 6,
    "def f(x):\n    return x + 12345\n\n\tif x:\n        f(x)\n" * 6,
]
KINDS: dict[str, Callable[..., Tokenizer]] = {
    "bpe": train_bpe,
    "sentencepiece": train_sentencepiece,
}


@pytest.fixture(scope="module", params=list(KINDS))
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Path]:
    """A tokenizer as it was trained, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    size = 400 if request.param == "bpe" else 460
    return KINDS[request.param](TEXTS, vocab_size=size, out=folder), folder


@pytest.fixture(scope="module")
def both(trained: tuple[Tokenizer, Path]) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer as trained, and as read back from its folder."""
    return trained[0], load_tokenizer(trained[1])


def anything() -> st.SearchStrategy[str]:
    pieces = st.sampled_from([*HARD_TEXTS, *SPECIAL_TOKENS, "河水", " the", "\n", "  "])
    return st.lists(st.one_of(st.text(max_size=12), pieces), max_size=8).map("".join)


@given(text=anything())
@example(text="".join(HARD_TEXTS))
@settings(max_examples=200, deadline=None)
def test_every_string_comes_back_byte_for_byte(
    both: tuple[Tokenizer, Tokenizer], text: str
) -> None:
    first, second = both
    ids = first.encode(text)
    assert second.encode_batch([text, text]) == [ids, ids]
    assert first.decode(ids) == second.decode(ids) == text
    assert first.decode_bytes(ids) == text.encode()
    assert not set(ids) & set(first.special_tokens.values())


@given(text=anything(), allowed=st.sets(st.sampled_from(SPECIAL_TOKENS)))
@settings(max_examples=100, deadline=None)
def test_only_allowed_special_tokens_are_recognised(
    both: tuple[Tokenizer, Tokenizer], text: str, allowed: set[str]
) -> None:
    for tokenizer in both:
        ids = tokenizer.encode(text, allowed_special=allowed)
        special = [number for number in ids if number in tokenizer.special_tokens.values()]
        rest = text
        expected = []
        while occurrences := [(rest.find(token), token) for token in allowed if token in rest]:
            offset, token = min(occurrences)
            expected.append(tokenizer.special_tokens[token])
            rest = rest[offset + len(token) :]
        assert special == expected
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special=True) == tokenizer.decode(
            [i for i in ids if i not in special]
        )


def test_a_loaded_tokenizer_has_the_sizes_roles_and_fingerprint_of_the_trained_one(
    trained: tuple[Tokenizer, Path],
) -> None:
    tokenizer, folder = trained
    again = load_tokenizer(folder)
    for loaded in (tokenizer, again, load_tokenizer(folder / "tokenizer.json")):
        assert loaded.vocab_size in (400, 460)
        assert loaded.model_vocab_size in (448, 512)
        assert set(SPECIAL_TOKENS) <= loaded.special_tokens.keys()
        assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (
            None,
            *(loaded.special_tokens[t] for t in SPECIAL_TOKENS[:2]),
        )
        assert loaded.fingerprint == tokenizer.fingerprint
    assert tokenizer.with_chat_template("x").fingerprint == tokenizer.fingerprint


def test_the_fingerprint_changes_with_what_decides_ids(
    trained: tuple[Tokenizer, Path], tmp_path: Path
) -> None:
    tokenizer, folder = trained
    seen = {tokenizer.fingerprint}
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    changes = [
        dict(content, normalizer={"type": "NFC"}),
        dict(content, added_tokens=content["added_tokens"][:-1]),
    ]
    changes.append(
        dict(content, model=dict(content["model"], merges=content["model"]["merges"][:-1]))
    )
    for changed in changes:
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed), encoding="utf-8")
        seen.add(load_tokenizer(tmp_path).fingerprint)
    assert len(seen) == 4
    harmless = dict(
        content,
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(harmless), encoding="utf-8")
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    assert len(load_tokenizer(tmp_path).encode("the river had frozen")) > 2, (
        "a file's own truncation never applies"
    )


def test_transformers_loads_the_folder_with_the_same_ids(
    trained: tuple[Tokenizer, Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer, folder = trained
    exported = AutoTokenizer.from_pretrained(folder)
    for text in (*TEXTS, *HARD_TEXTS):
        ids = exported.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ids == tokenizer.encode(text)
        assert exported.decode(ids) == text
        assert exported.encode(text, add_special_tokens=False) == tokenizer.encode(
            text, allowed_special="all"
        )
    assert (len(exported), exported.eos_token_id, exported.pad_token_id) == (
        tokenizer.vocab_size,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )
    exported.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


def test_a_pickled_tokenizer_still_keeps_special_tokens_out(
    trained: tuple[Tokenizer, Path],
) -> None:
    again = pickle.loads(pickle.dumps(trained[0]))
    assert (
        again.encode("<|im_end|>")
        == trained[0].encode("<|im_end|>")
        != [again.special_tokens["<|im_end|>"]]
    )


def test_loading_asks_neither_transformers_nor_torch(trained: tuple[Tokenizer, Path]) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from headway.tokenizer.load import load_tokenizer; t = load_tokenizer(sys.argv[1]); t.decode(t.encode('x')); "
        "t.fingerprint; sys.exit(bool({'transformers', 'torch'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code, str(trained[1])], check=False).returncode == 0
    )


def test_ids_cut_inside_a_character_decode_to_its_bytes(trained: tuple[Tokenizer, Path]) -> None:
    tokenizer = trained[0]
    ids = tokenizer.encode("😀")
    assert len(ids) == 4
    assert tokenizer.decode_bytes(ids[:2]) == "😀".encode()[:2]
    assert tokenizer.decode(ids[:2]) == "\ufffd"
    with pytest.raises(DataError, match="id 5000 is not in the vocabulary"):
        tokenizer.decode([5000])


def test_inspection_finds_compression_and_losses(
    trained: tuple[Tokenizer, Path], tmp_path: Path
) -> None:
    inspection = inspect(trained[0], {"mine": [("here:1", "the river " * 20)]})
    assert not inspection.lost
    assert inspection.to_dict()["round_trip"]
    assert inspection.compression["mine"].bytes_per_token > 2
    assert inspection.compression["English"].bytes_per_token > 1
    assert len(inspection.longest[0][1].encode()) >= 5
    content = json.loads((trained[1] / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(dict(content, normalizer={"type": "Lowercase"})), encoding="utf-8"
    )
    assert any("river" in text for text in inspect(load_tokenizer(tmp_path)).lost)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("tokenizer.json", "{", DataError, "is not a tokenizer.json"),
        ("tokenizer.model", "x", DataError, "is not a sentencepiece model"),
        ("x.tiktoken", "IQ== 0\nbad", DataError, "x.tiktoken:2: not a rank line"),
        ("x.tiktoken", "IQ== 0\n", DataError, "have gaps or lack some of the 256 bytes"),
        ("x.bin", "x", ConfigError, "it must be a folder, a tokenizer.json"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(
    tmp_path: Path, name: str, content: str, error: type[Exception], message: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(error, match=message):
        load_tokenizer(tmp_path / name)


def test_a_folder_that_is_missing_or_has_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(
        ConfigError, match=r"holds no tokenizer headway can read; expected tokenizer.json"
    ):
        load_tokenizer(tmp_path)


def test_an_allowed_special_token_that_does_not_exist_is_refused(
    trained: tuple[Tokenizer, Path],
) -> None:
    tokenizer, _ = trained
    with pytest.raises(ConfigError, match="allowed_special names '<x>'"):
        tokenizer.encode("text", allowed_special={"<x>"})


def test_files_that_give_a_token_two_ids_are_refused(
    tmp_path: Path, trained: tuple[Tokenizer, Path]
) -> None:
    _, folder = trained
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"added_tokens_decoder": {"7": {"content": "<|pad|>"}}}', encoding="utf-8"
    )
    with pytest.raises(DataError, match=r"gives '<\|pad\|>' the id 7"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "repository", ["tokenizers/llama2/tokenizer.model", "tokenizers/gpt2", "models/minimind2-small"]
)
def test_published_tokenizers_are_saved_with_the_same_ids(repository: str, tmp_path: Path) -> None:
    if not (SHARED / repository).exists():
        pytest.skip(f"{SHARED / repository} is not here")
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(SHARED / repository)
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    for text in (*TEXTS, *HARD_TEXTS, "  lead"):
        ids = tokenizer.encode(text)
        assert (
            again.encode(text)
            == ids
            == exported.encode(text, add_special_tokens=False, split_special_tokens=True)
        )
        assert again.encode(text, allowed_special="all") == exported.encode(
            text, add_special_tokens=False
        )
        assert not set(ids) & set(tokenizer.special_tokens.values())


def test_a_rank_file_gives_the_published_vocabulary(tmp_path: Path) -> None:
    path = SHARED / "tokenizers/qwen/qwen.tiktoken"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.special_tokens["<|im_end|>"]) == (151646, 151645)
    assert tokenizer.encode("你好，世界! Hello world 2024") == [
        108386,
        3837,
        99489,
        0,
        21927,
        1879,
        220,
        17,
        15,
        17,
        19,
    ]


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_an_id_of_a_billion_is_refused_before_tables_of_all_ids_are_made(
    tmp_path: Path, name: str
) -> None:
    byte_tokenizer().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["vocab"]["a"] = 10**9
    if name == "tokenizer.json":
        file.write_text(json.dumps(content), encoding="utf-8")
    else:
        file.unlink()
        (tmp_path / "tokenizer_config.json").unlink()
        (tmp_path / name).write_text(json.dumps(content["model"]["vocab"]), encoding="utf-8")
        (tmp_path / "merges.txt").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=rf"{name}: the token 'a' has the id 1000000000; ids below"):
        load_tokenizer(tmp_path)


def test_a_pipe_in_place_of_a_file_of_a_tokenizer_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises((ConfigError, DataError), match=r"."):
        load_tokenizer(tmp_path)
    with pytest.raises((ConfigError, DataError), match=r"."):
        load_tokenizer(tmp_path / "tokenizer.json")
