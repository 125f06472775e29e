"""Bits per byte by hand counts: a model that gives every token the same chance costs log2(vocabulary) bits a token, whatever is scored."""

import json
import math
from pathlib import Path

import pytest
import tokenizers
import torch
from support.byte_model import CONFIG, write_model
from tokenizers import decoders, models, pre_tokenizers

from headway.cli import main
from headway.eval.perplexity import EvalDocument, perplexity
from headway.infer.load import LoadedModel, load_model
from headway.runtime.digests import write_digests
from headway.tokenizer.load import Tokenizer

BITS = math.log2(320)
"""Of one token, when all 320 are as likely."""


def uniform(folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """A model whose logits are all zero."""
    from safetensors.torch import load_file, save_file

    path = write_model(folder, CONFIG.with_(max_seq_len=128), tokenizer)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"].zero_()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    write_digests(path)
    return path


def merged_tokenizer(*pairs: tuple[bytes, bytes], prefix: bool = False) -> Tokenizer:
    """One id per byte, and one for each pair of tokens that is merged."""
    spelled = dict(zip(range(256), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    from headway.tokenizer.byte_level import spell

    vocab = {c: i for i, c in spelled.items()}
    merges: list[tuple[str, str]] = []
    for left, right in pairs:
        merges.append((spell(left), spell(right)))
        vocab[spell(left + right)] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"bos": "<s>", "eos": "</s>"})


def spaced_tokenizer() -> Tokenizer:
    """Puts a space before a text, as Llama 2's does; ids for the words ` ab`, ` cd` and for every byte."""
    words = ["▁", "a", "b", "c", "d", "▁a", "▁ab", "▁c", "▁cd"]
    vocab = {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)},
    }
    vocab |= {word: 259 + index for index, word in enumerate(words)}
    merges = [("▁", "a"), ("▁a", "b"), ("▁", "c"), ("▁c", "d")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, {"bos": "<s>", "eos": "</s>"})


def piece(loaded: LoadedModel, text: str, *, bos: bool = False) -> EvalDocument:
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.bos_id is not None
    return EvalDocument(
        loaded.tokenizer.encode(text),
        len(text.encode()),
        None,
        (loaded.tokenizer.bos_id,) if bos else (),
    )


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uniform(tmp_path_factory.mktemp("uniform"))


def test_a_token_per_byte_costs_the_same_bits_in_every_window_and_split(
    bytes_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "text.txt"
    data.write_text(
        "".join(f"zwölf Boxkämpfer jagen Viktor {line} mal quer\n" for line in range(20)),
        encoding="utf-8",
    )
    for options in (
        ["--window", "128"],
        ["--window", "16"],
        ["--window", "2"],
        ["--split", "line"],
        ["--bos"],
        ["--window", "16", "--stride", "3"],
    ):
        arguments = ["--model", str(bytes_model), "--data", str(data), *options, "--json"]
        assert main(["eval", "ppl", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["bits_per_byte"] == pytest.approx(
            BITS, rel=1e-6
        ), options


def test_bytes_of_tokens_that_were_not_scored_are_not_counted(tmp_path: Path) -> None:
    # "abcd" is one token of 4 bytes; e, f and g are tokens of one.
    loaded = load_model(
        uniform(tmp_path, merged_tokenizer((b"a", b"b"), (b"c", b"d"), (b"ab", b"cd")))
    )
    document = piece(loaded, "abcdefg" + "abcdefg")
    assert len(document.ids) == 8
    # abcd e f g abcd e f g: all but the first token are scored, 7 tokens with 14 - 4 bytes
    whole = perplexity(loaded, [document])
    assert (whole.tokens, whole.num_bytes) == (7, 10)
    assert whole.bits_per_byte == pytest.approx(7 * BITS / 10)
    # [abcd e f] [g abcd e] [f g]: scored are e f, abcd e, g
    windows = perplexity(loaded, [document], window=3)
    assert (windows.tokens, windows.num_bytes) == (5, 8)
    assert windows.bits_per_byte == pytest.approx(5 * BITS / 8)
    # [abcd e f g abcd e f] [g]: the last window holds nothing to score
    assert perplexity(loaded, [document], window=7).num_bytes == 9
    # every token behind a begin token
    begun = perplexity(loaded, [piece(loaded, "abcdefgabcdefg", bos=True)], window=4)
    assert (begun.tokens, begun.num_bytes) == (8, 14)
    # parts and documents add up: abcd|e f and e|f
    in_two = perplexity(loaded, [piece(loaded, "abcdef"), piece(loaded, "ef")])
    assert (in_two.tokens, in_two.num_bytes) == (3, 3)
    assert in_two.bits_per_byte == pytest.approx(BITS)


def test_a_token_that_cuts_a_character_counts_its_own_bytes(tmp_path: Path) -> None:
    # é is C3 A9 and 中 is E4 B8 AD: tokens "z C3", "A9 E4", then B8 and AD alone.
    loaded = load_model(uniform(tmp_path, merged_tokenizer((b"z", b"\xc3"), (b"\xa9", b"\xe4"))))
    document = piece(loaded, "zé中")
    assert len(document.ids) == 4
    assert document.num_bytes == 6
    scores = perplexity(loaded, [document])
    assert (scores.tokens, scores.num_bytes) == (3, 4)
    assert perplexity(loaded, [document], window=2).num_bytes == 2 + 1


@pytest.mark.parametrize(
    ("text", "tokens", "scored"), [("ab cd", 2, 3), (" ab cd", 3, 6), ("x cd", 3, 4)]
)
def test_a_space_that_the_tokenizer_puts_before_a_text_is_no_byte_of_it(
    tmp_path: Path, text: str, tokens: int, scored: int
) -> None:
    # "▁ab ▁cd"; "▁ ▁ab ▁cd"; "▁ x ▁cd" with x as a byte. The first token is not scored: 2, 0 and 0 bytes of the text.
    loaded = load_model(uniform(tmp_path, spaced_tokenizer()))
    document = piece(loaded, text)
    assert len(document.ids) == tokens
    assert perplexity(loaded, [document]).num_bytes == scored
    assert perplexity(loaded, [piece(loaded, text, bos=True)]).num_bytes == len(text)


def test_a_byte_level_tokenizer_that_adds_a_space_counts_the_text_alone(tmp_path: Path) -> None:
    loaded = load_model(
        uniform(tmp_path, merged_tokenizer((b" ", b"a"), (b"b", b"c"), prefix=True))
    )
    # " a" "bc" " a": the first token is one byte of "abc a"
    document = piece(loaded, "abc a")
    assert len(document.ids) == 3
    assert perplexity(loaded, [document]).num_bytes == 4
    assert perplexity(loaded, [piece(loaded, "abc a", bos=True)]).num_bytes == 5


def test_a_tokenizer_that_loses_characters_shares_the_bytes_out(tmp_path: Path) -> None:
    # A vocabulary of letters: é is unknown, which stands for two bytes that no token spells.
    backend = tokenizers.Tokenizer(
        models.BPE(
            {"<unk>": 0, "<s>": 1, **{chr(97 + i): 2 + i for i in range(26)}}, [], unk_token="<unk>"
        )
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<unk>", "<s>"])
    loaded = load_model(uniform(tmp_path, Tokenizer(backend, {"bos": "<s>", "unk": "<unk>"})))
    # a b c é d: four letters spell six bytes, so each stands for 1.5; three of them and é are scored
    assert perplexity(loaded, [piece(loaded, "abcéd")]).num_bytes == pytest.approx(4.5, abs=0.5)
    assert perplexity(loaded, [piece(loaded, "abcéd", bos=True)]).num_bytes == 6


def test_documents_without_known_bytes_have_no_bits_per_byte(bytes_model: Path) -> None:
    loaded = load_model(bytes_model)
    scores = perplexity(loaded, [EvalDocument([1, 2, 3], 3), EvalDocument([1, 2, 3], None)])
    assert (scores.bits_per_byte, scores.num_bytes) == (None, None)
    assert torch.isfinite(torch.tensor(scores.loss))
