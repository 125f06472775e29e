"""A Llama whose weights are written by hand: it copies the letter that stood PERIOD letters before.

One layer, one head. A channel of the embedding is the same for every token, and queries and keys
are made of it alone, so scores depend on distances only:

    score at distance d = GAIN * sum over planes of cos(frequency * (d - (PERIOD - 1)))

which is highest at PERIOD - 1, the distance from a letter to the one before its copy's successor.
Values are letters, and the head reads them where the layer wrote them.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch

from headway.export.huggingface import export_huggingface
from headway.model.config import ModelConfig
from headway.model.layout import param_specs
from headway.model.rope import inverse_frequencies
from support.byte_model import byte_tokenizer

PERIOD = 48
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CODE = 32
"""Channels of a letter in the embedding, then as many that the layer writes to."""
CONSTANT = 31
"""The channel that is the same for every token."""
GAIN = 6.0
CONFIDENCE = 2.0

CONFIG = ModelConfig(
    hidden_size=2 * CODE,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=CODE,
    ffn_size=8,
    vocab_size=320,
    max_seq_len=128,
    # A low base: all planes are fast enough to tell neighbouring distances apart.
    rope_theta=30.0,
    tie_embeddings=False,
)


def write_copying_model(folder: Path) -> Path:
    """Write the model under `folder` and return where it is."""
    tokenizer = byte_tokenizer()
    tokenizer.save(folder / "tokenizer")
    ids = [tokenizer.encode(letter)[0] for letter in LETTERS]
    export_huggingface(CONFIG, weights(ids), folder / "out", tokenizer=folder / "tokenizer")
    return folder / "out"


def weights(ids: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the model."""
    planes = CODE // 2
    angle = inverse_frequencies(CONFIG) * (PERIOD - 1)
    for spec in param_specs(CONFIG):
        value = torch.zeros(spec.shape)
        name = spec.name
        if "norm" in name:
            value.fill_(1.0)
        elif "embed_tokens" in name:
            value[:, CONSTANT] = 1.0
            for number, token in enumerate(ids):
                value[token, number] = 1.0
        elif "k_proj" in name:
            # Along the first axis of every plane.
            value[:planes, CONSTANT] = 1.0
        elif "q_proj" in name:
            # Turned back by the distance, so that the dot product is highest there.
            value[:planes, CONSTANT] = GAIN * angle.cos()
            value[planes:, CONSTANT] = -GAIN * angle.sin()
        elif "v_proj" in name:
            value[:, :CODE] = torch.eye(CODE)
        elif "o_proj" in name:
            value[CODE:, :] = torch.eye(CODE)
        elif "lm_head" in name:
            for number, token in enumerate(ids):
                value[token, CODE + number] = CONFIDENCE
        yield name, value


def write_documents(path: Path, *, copies: int = 4, shuffled: int = 4) -> None:
    """Documents whose second half repeats the first, and as many turns of others in which it is
    shuffled; the last document is short.
    """
    rng = random.Random(0)
    lines: list[str] = []
    for number in range(2 * max(copies, shuffled)):
        half = rng.choices(LETTERS, k=PERIOD)
        second = list(half)
        if number % 2:
            rng.shuffle(second)
        if number // 2 < (shuffled if number % 2 else copies):
            lines.append(json.dumps({"text": "".join(half + second)}))
    lines.append(json.dumps({"text": "short"}))
    path.write_text("".join(f"{line}\n" for line in lines))
