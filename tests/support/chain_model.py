"""A tiny Llama that writes what a test wants: after each token one other token is by far the likeliest. Its tokenizer has bytes and words.

    chains: ("a", "one ", "two")     a prompt that ends with the byte `a` is answered "one two"
            ("b", "bytes:é")         is answered with the two bytes of é, a token each

Attention and feed-forward layers add nothing, so the last token alone decides the next one; everything else of the engine is real.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headway.export.huggingface import export_huggingface
from headway.model.config import ModelConfig
from headway.model.layout import param_specs
from headway.tokenizer.chat_template import BUILT_IN
from headway.tokenizer.load import Tokenizer

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
END = "</s>"
BYTES = "bytes:"
WIDTH = 64


def words_tokenizer(words: Sequence[str]) -> Tokenizer:
    """One id per byte, then the words, which no text is encoded as, then special tokens. ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [spelled.pre_tokenize_str(word)[0][0] for word in words]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={name: number for number, name in enumerate([*alphabet, *names])}, merges=[]
        )
    )
    backend.pre_tokenizer = spelled  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    backend.encode_special_tokens = True
    tokenizer = Tokenizer(backend, {"bos": "<s>", "eos": END})
    return tokenizer.with_chat_template(BUILT_IN["chatml"].export(tokenizer))


def write_chain_model(folder: Path, *chains: Sequence[str], context: int = 256) -> Path:
    """Write the model under `folder` and return where it is."""
    words = list(dict.fromkeys(word for chain in chains for word in chain if _is_word(word)))
    tokenizer = words_tokenizer(words)
    numbers = {word: 256 + number for number, word in enumerate(words)}
    followers: dict[int, int] = {}
    for chain in chains:
        ids: list[int] = []
        for word in chain:
            ids += [numbers[word]] if word in numbers else _known(tokenizer, word)
        for token, follower in pairwise(ids):
            assert followers.setdefault(token, follower) == follower, (
                f"{chain}: a token has two followers"
            )
    config = ModelConfig(
        hidden_size=WIDTH,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        ffn_size=16,
        vocab_size=tokenizer.vocab_size,
        max_seq_len=context,
        tie_embeddings=False,
    )
    tokenizer.save(folder / "tokenizer")
    export_huggingface(
        config, _weights(config, followers), folder / "out", tokenizer=folder / "tokenizer"
    )
    return folder / "out"


def _is_word(word: str) -> bool:
    return len(word.encode()) > 1 and word not in SPECIALS and not word.startswith(BYTES)


def _known(tokenizer: Tokenizer, word: str) -> list[int]:
    special = tokenizer.token_to_id(word)
    if word in SPECIALS and special is not None:
        return [special]
    return tokenizer.encode(word.removeprefix(BYTES))


def _weights(config: ModelConfig, followers: dict[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    # Nearly orthogonal directions of the same length: the norm of the model leaves them as they are.
    embeddings = (
        torch.nn.functional.normalize(torch.randn(config.vocab, WIDTH, generator=generator), dim=1)
        * WIDTH**0.5
    )
    for spec in param_specs(config):
        if spec.name == "model.embed_tokens.weight":
            yield spec.name, embeddings
        elif spec.name == "lm_head.weight":
            head = torch.randn(config.vocab, WIDTH, generator=generator) * 0.02
            for token, follower in followers.items():
                head[follower] += embeddings[token] / 3
            yield spec.name, head
        elif "norm" in spec.name:
            yield spec.name, torch.ones(spec.shape)
        else:
            yield spec.name, torch.zeros(spec.shape)
