"""A tokenizer with the special tokens of every chat template, and a conversation."""

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headway.tokenizer.chat_template import Turn
from headway.tokenizer.load import Tokenizer

SPECIALS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<eoh>", "<eoa>", "<|beginoftext|>", "<|role_end|>", "<TOKENS_UNUSED_139>", "<TOKENS_UNUSED_140>", "<0x0A>",
)  # fmt: skip


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """One id per byte, and every template's special tokens."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    backend.encode_special_tokens = True
    return Tokenizer(backend, {"bos": "<s>", "eos": "</s>"}, {}, chat_template)


CONVERSATION = [
    Turn("system", "Be kind."),
    Turn("user", "Hi"),
    Turn("assistant", "Hello!"),
    Turn("user", "Bye"),
    Turn("assistant", "再见"),
]
