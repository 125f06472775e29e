"""A tokenizer in the metadata of a GGUF file: `to_metadata` makes the values that llama.cpp
reads, `write_files` makes a folder of them.

    tokenizer.ggml.model            gpt2 (byte-level BPE) or llama (sentencepiece BPE)
    tokenizer.ggml.pre              the name llama.cpp has for the pattern that splits words
    tokenizer.ggml.tokens ...       tokens, types, merges or scores; ids of begin, end, padding
    tokenizer.huggingface.json      the tokenizer.json itself: a file with it is read back exactly

A vocabulary that llama.cpp has no rules for is refused by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, DataError
from headway.tokenizer.byte_level import CL100K, QWEN, WORDS, byte_level

if TYPE_CHECKING:
    import tokenizers

    from headway.tokenizer.load import Tokenizer

log = logging.getLogger("headway")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""llama.cpp's types of tokens (`llama_token_type`), which are sentencepiece's."""
SPACE = "▁"
WHOLE = "tokenizer.huggingface.json"
"""The key of the whole tokenizer.json."""
GPT2: None = None
"""The pattern inside the ByteLevel pre-tokenizer."""
LETTERS_AND_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_NAMES: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (GPT2, False),
    "smollm": (GPT2, False),
    "qwen2": (QWEN, False),
    "qwen35": (LETTERS_AND_MARKS, False),
    "dbrx": (CL100K, False),
    "llama-bpe": (CL100K, True),
}
"""llama.cpp's name -> pattern, and whether a word that is a token is taken without merging."""
SAME_NAME = {
    "deepseek-r1-qwen": "qwen2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "dbrx",
    "phi-2": "gpt-2",
    "megrez": "qwen2",
    "starcoder": "smollm",
    "codeshell": "smollm",
    "default": "gpt-2",
}
"""Other names that llama.cpp has for the same patterns."""
ROLE_KEYS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def to_metadata(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """The values of a tokenizer for a model with this many rows of embeddings."""
    from headway.tokenizer.chat import bos_ids

    content = json.loads(tokenizer.fast.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise ConfigError(
            f"the tokenizer is of type {model['type']}; GGUF takes BPE vocabularies only. Export "
            "with `headway export hf`."
        )

    # llama.cpp wants a token for each row. Rows beyond the vocabulary have the names that its own
    # converter gives them.
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [UNUSED] * rows
    for token, number in model["vocab"].items():
        tokens[number] = token
        types[number] = NORMAL

    for token in content["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED

    values: dict[str, Any] = {}
    if _is_byte_level(content["pre_tokenizer"]):
        values["tokenizer.ggml.model"] = "gpt2"
        values["tokenizer.ggml.pre"] = _pre_name(content)
        values["tokenizer.ggml.tokens"] = tokens
        values["tokenizer.ggml.token_type"] = types
        values["tokenizer.ggml.merges"] = [
            merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]
        ]
    else:
        values |= _sentencepiece(tokenizer, content, tokens, types)

    for role, key in ROLE_KEYS.items():
        number = tokenizer.token_to_id(tokenizer.roles.get(role))
        if number is not None:
            values[f"tokenizer.ggml.{key}_token_id"] = number

    values["tokenizer.ggml.add_bos_token"] = tokenizer.bos_id is not None and bos_ids(
        tokenizer
    ) == [tokenizer.bos_id]
    values["tokenizer.ggml.add_eos_token"] = False
    if tokenizer.chat_template is not None:
        values["tokenizer.chat_template"] = tokenizer.chat_template

    # The other values lose the exact pattern and the flags of added tokens.
    values[WHOLE] = tokenizer.fast.to_str()
    return values


def _parts(part: Any) -> list[dict[str, Any]]:
    """A pre-tokenizer or normaliser as a flat list."""
    if not part:
        return []
    inner = part.get("pretokenizers", part.get("normalizers"))
    if inner is not None:
        return [step for nested in inner for step in _parts(nested)]
    return [part]


def _is_byte_level(pre_tokenizer: Any) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(pre_tokenizer))


def _pre_name(content: Mapping[str, Any]) -> str:
    """llama.cpp's name for how words are split.

    headway's own pattern has none. It is written as the nearest, which the log says.
    """
    unsupported = [part["type"] for part in _parts(content["normalizer"]) if part["type"] != "NFC"]
    if unsupported:
        raise ConfigError(
            f"the tokenizer normalises texts with {unsupported[0]}, which llama.cpp does not. "
            "Export with `headway export hf`."
        )

    parts = _parts(content["pre_tokenizer"])
    ignores_merges = bool(content["model"].get("ignore_merges"))
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"

    if (
        kinds == ["Digits", "ByteLevel"]
        and parts[0].get("individual_digits")
        and parts[1].get("use_regex", True)
    ):
        return "smollm"

    pattern = None
    if kinds == ["Split", "ByteLevel"]:
        pattern = parts[0].get("pattern", {}).get("Regex")

    if pattern == WORDS:
        log.info(
            "the tokenizer splits words at headway's own pattern, which llama.cpp does not have; "
            "the file names the nearest one (dbrx). Texts with combining marks may get other ids "
            "there; docs/deploy.md says how to compare."
        )
        return "dbrx"

    for name, (known_pattern, known_ignores) in PRE_NAMES.items():
        if pattern is not None and pattern == known_pattern and known_ignores == ignores_merges:
            return name

    if pattern is not None:
        shown = pattern
    else:
        shown = " and ".join(kinds)

    raise ConfigError(
        f"the tokenizer splits words with {str(shown)[:120]}, which has no name in llama.cpp. "
        "Export with `headway export hf`."
    )


def _sentencepiece(
    tokenizer: Tokenizer, content: Mapping[str, Any], tokens: list[str], types: list[int]
) -> dict[str, Any]:
    """The values of a sentencepiece vocabulary.

    A token's score is its place among the merges, which is the order of joining.
    """
    model = content["model"]
    if not model.get("byte_fallback"):
        raise ConfigError(
            "the tokenizer is neither byte-level nor falls back to bytes; llama.cpp has no rules "
            "for it."
        )

    scores = [0.0] * len(tokens)
    for rank, pair in enumerate(model["merges"]):
        # Older files write a merge as "left right", newer ones as a list.
        if not isinstance(pair, list):
            pair = pair.split(" ", 1)

        # Several merges may make the same token; the first one counts.
        token = model["vocab"].get("".join(pair))
        if token is not None and scores[token] == 0.0:
            scores[token] = -float(rank + 1)

    # Tokens that no merge makes (single characters) come after all others.
    lowest_score = -float(len(model["merges"]) + 1)
    for number, token in enumerate(tokens):
        if types[number] == NORMAL:
            scores[number] = scores[number] or lowest_score
            if len(token) == len("<0x0A>") and token.startswith("<0x"):
                types[number] = BYTE
            tokens[number] = token.replace(" ", SPACE)

        if token == model.get("unk_token"):
            types[number] = UNKNOWN

    steps = _parts(content["normalizer"]) + _parts(content["pre_tokenizer"])
    if any(step["type"] == "Precompiled" for step in steps):
        log.info(
            "the tokenizer normalises texts (nmt_nfkc), and llama.cpp does not: texts that it "
            "changes get other ids there."
        )

    adds_prefix = any(
        step["type"] == "Prepend"
        or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": adds_prefix,
    }


def write_files(values: Mapping[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json from the values of a file; `load_tokenizer`
    checks them when it reads the folder.
    """
    tokens = values.get("tokenizer.ggml.tokens")
    types = values.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise DataError("tokenizer.ggml.tokens is no list of texts")
    if types is None:
        types = [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise DataError("tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens")

    text = values.get(WHOLE)
    if not isinstance(text, str):
        text = _backend(values, tokens, types).to_str()

    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, key in ROLE_KEYS.items():
        number = values.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens) and types[number] != UNUSED:
            config[f"{role}_token"] = tokens[number]

    if isinstance(values.get("tokenizer.ggml.add_bos_token"), bool):
        config["add_bos_token"] = values["tokenizer.ggml.add_bos_token"]
    if isinstance(values.get("tokenizer.chat_template"), str):
        config["chat_template"] = values["tokenizer.chat_template"]

    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False), encoding="utf-8"
    )


def _backend(
    values: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    kind = values.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level_backend(values, tokens, types)
    if kind == "llama":
        return _sentencepiece_backend(values, tokens, types)
    raise DataError(f"tokenizer.ggml.model is {str(kind)[:80]!r}; headway reads gpt2 and llama")


def _byte_level_backend(
    values: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    """The backend of a gpt2 vocabulary; tokens, types and merges must belong together."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    pre = values.get("tokenizer.ggml.pre", "default")
    merges = values.get("tokenizer.ggml.merges")
    name = SAME_NAME.get(str(pre), str(pre))
    if name not in PRE_NAMES:
        raise DataError(
            f"tokenizer.ggml.pre is {str(pre)[:80]!r}; headway knows "
            f"{', '.join([*PRE_NAMES, *SAME_NAME])}"
        )

    if not isinstance(merges, list) or not all(
        isinstance(merge, str) and merge.count(" ") == 1 for merge in merges
    ):
        raise DataError("tokenizer.ggml.merges is no list of pairs")

    pattern, ignore_merges = PRE_NAMES[name]
    vocabulary = {token: number for number, token in enumerate(tokens) if types[number] == NORMAL}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(
        left not in vocabulary or right not in vocabulary or left + right not in vocabulary
        for left, right in pairs
    ):
        raise DataError("tokenizer.ggml.merges joins tokens that the vocabulary does not hold")

    added = [
        (number, token)
        for number, token in enumerate(tokens)
        if types[number] in (CONTROL, USER_DEFINED)
    ]
    vocabulary |= {token: number for number, token in added}
    model = models.BPE(
        vocab=vocabulary,
        merges=pairs,  # pyright: ignore[reportArgumentType]
        ignore_merges=ignore_merges,
    )
    backend = Backend(model)
    splitter = byte_level(pattern)
    # smollm's words are GPT-2's with every digit alone.
    digits = pre_tokenizers.Digits(individual_digits=True)
    if name == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, splitter])
    else:
        backend.pre_tokenizer = splitter

    backend.decoder = decoders.ByteLevel()
    for number, token in added:
        is_special = types[number] == CONTROL
        added_token = AddedToken(token, special=is_special, normalized=False)
        if is_special:
            backend.add_special_tokens([added_token])
        else:
            backend.add_tokens([added_token])

    return backend


def _sentencepiece_backend(
    values: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    """The backend of a llama vocabulary, whose scores give the order of merges."""
    from headway.tokenizer.sentencepiece_model import convert

    scores = values.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(tokens)
        or not all(isinstance(score, float) for score in scores)
    ):
        raise DataError("tokenizer.ggml.scores does not fit tokenizer.ggml.tokens")

    # `convert` reads sentencepiece's protobuf. These values have the same fields.
    names = {
        "NORMAL": NORMAL,
        "UNKNOWN": UNKNOWN,
        "CONTROL": CONTROL,
        "USER_DEFINED": USER_DEFINED,
        "UNUSED": UNUSED,
        "BYTE": BYTE,
    }
    pieces = [
        SimpleNamespace(piece=token, type=types[n], score=scores[n], **names)
        for n, token in enumerate(tokens)
    ]
    unknown = next((number for number, kind in enumerate(types) if kind == UNKNOWN), None)
    if unknown is None:
        raise DataError("tokenizer.ggml.token_type names no unknown token")

    adds_prefix = values.get("tokenizer.ggml.add_space_prefix", True)
    rules = SimpleNamespace(
        precompiled_charsmap=b"",
        remove_extra_whitespaces=False,
        add_dummy_prefix=bool(adds_prefix),
        escape_whitespaces=True,
    )
    trained = SimpleNamespace(unk_id=unknown, byte_fallback=BYTE in types)
    return convert(SimpleNamespace(pieces=pieces, trainer_spec=trained, normalizer_spec=rules))
