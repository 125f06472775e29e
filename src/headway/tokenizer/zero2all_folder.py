"""zero2all's tokenizers, whose classes add special tokens in code, so that no file of their
folders holds them.

    hf_bbpe_tokenizer/my_tokenizer.json
        64000 ids of byte-level BPE; 13 special tokens follow, 64000 to 64012
    sp_bbpe_tokenizer/sp_bbpe_tokenizer.model
        sentencepiece with 12 of them as pieces; <|role_end|> follows the last piece
    my_hf_bbpe_tokenizer_10G.json
        the first one's file alone, recognised by its size and its word pattern
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import DataError

if TYPE_CHECKING:
    import tokenizers

    from headway.tokenizer.load import Tokenizer

HF_CLASS = "MyHFTokenizer"
SP_CLASS = "MySPTokenizer"
FIRST = 64000
"""The id of the first special token."""
TOKENS = (
    "<|beginoftext|>",
    "<|endoftext|>",
    "<|endofprompt|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|UNK|>",
    "<|PAD|>",
    "<|CLS|>",
    "<|SEP|>",
    "<|MASK|>",
    "<|BOS|>",
    "<|EOS|>",
    "<|role_end|>",
)
"""In the order in which zero2all's classes add them, which decides their ids."""
ROLES = {"bos_token": "<|beginoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|PAD|>"}
CUT = r"[\u4e00-\u9fa5]+"
"""Runs of Chinese characters are split off as separate words: no other known vocabulary of this
size does that."""


def is_zero2all(config: dict[str, Any]) -> bool:
    """Whether a tokenizer_config.json names one of zero2all's classes."""
    return config.get("tokenizer_class") in (HF_CLASS, SP_CLASS)


def read_zero2all(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Open a folder of one of the two classes."""
    from headway.tokenizer.folder import finish, read_fast
    from headway.tokenizer.sentencepiece_model import read_model

    if config["tokenizer_class"] == SP_CLASS:
        path = _file(folder, "sp_bbpe_tokenizer.model", "tokenizer.model")
        return read_model(path, dict(ROLES), special=TOKENS)
    return finish(read_fast(_file(folder, "my_tokenizer.json", "tokenizer.json")), full_config())


def _file(folder: Path, *names: str) -> Path:
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise DataError(
            f"{folder}: its tokenizer_config.json is zero2all's, but it holds no "
            f"{' or '.join(names)}. Fetch the whole folder again."
        )
    return path


def full_config() -> dict[str, Any]:
    """A tokenizer_config.json with the special tokens that zero2all's class adds."""
    added = {str(i): {"content": token, "special": True} for i, token in enumerate(TOKENS, FIRST)}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added, **ROLES}


def is_bare(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer.json is zero2all's without its special tokens."""
    if (
        backend.get_vocab_size(with_added_tokens=True) != FIRST
        or backend.get_added_tokens_decoder()
    ):
        return False

    splitter = {}
    if backend.pre_tokenizer is not None:
        splitter = json.loads(backend.pre_tokenizer.__getstate__())

    patterns = [
        part.get("pattern", {}).get("Regex", "")
        for part in splitter.get("pretokenizers", [splitter])
    ]
    return any(pattern.endswith(CUT) for pattern in patterns)
