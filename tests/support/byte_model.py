"""A tiny Llama with random weights and a tokenizer of one id per byte, as a Hugging Face folder."""

from pathlib import Path

import torch

from headway.export.adapter import write_adapter
from headway.export.huggingface import export_huggingface
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.tokenizer.load import Tokenizer

CONFIG = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=320,
    max_seq_len=32,
    init_std=0.5,
)


def byte_tokenizer(*more: str) -> Tokenizer:
    """One id per byte, then begin, end and `more` special tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", *more])
    backend.encode_special_tokens = True
    return Tokenizer(backend, {"bos": "<s>", "eos": "</s>"})


def write_model(
    folder: Path, config: ModelConfig = CONFIG, tokenizer: Tokenizer | None = None
) -> Path:
    """Write the model under `folder` and return where it is."""
    (tokenizer or byte_tokenizer()).save(folder / "tokenizer")
    weights = ((spec.name, initial_value(spec, config, 4)) for spec in param_specs(config))
    export_huggingface(config, weights, folder / "out", tokenizer=folder / "tokenizer")
    return folder / "out"


def write_small_adapter(base: Path, out: Path, config: ModelConfig = CONFIG) -> Path:
    """Write an adapter of random updates over the model at `base`."""
    adapter = AdapterConfig(rank=2, alpha=4.0, targets=("q_proj",))
    draw = torch.Generator().manual_seed(5)
    updates = {
        name: torch.randn(shape, generator=draw) for name, shape in adapter.shapes(config).items()
    }
    write_adapter(updates, adapter, config, out, base=str(base))
    return out
