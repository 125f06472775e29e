"""Tokenizer folders: what other tools wrote is read, and what we write AutoTokenizer reads.

    tokenizer.json            vocabulary, merges, cuts            (else vocab.json + merges.txt, tokenizer.model, *.tiktoken)
    tokenizer_config.json     which token begins, ends, pads; chat template
    special_tokens_map.json   the same roles, for older tools

Invariant: a loaded backend neither truncates nor pads, and treats special tokens in texts as ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headway.errors import ConfigError, DataError, first_line
from headway.tokenizer.byte_alphabet import unspell
from headway.tokenizer.folder_config import ROLES, read_config
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.presplit import QWEN, byte_level
from headway.tokenizer.zero2all_folder import is_bare, is_zero2all, read_zero2all, written_out

if TYPE_CHECKING:
    import tokenizers

GUESSES = {"bos": ("<s>", "<|begin_of_text|>", "<bos>"), "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")}
OTHER_JSON = ("config.json", "map.json", "index.json", "processor_config.json", "vocab.json", "manifest.json", "results.json", "state.json")
"""Ends of the names of JSON files in model folders that are no tokenizer."""
PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
KNOWN_FILES = "tokenizer.json, vocab.json with merges.txt, tokenizer.model or a .tiktoken file"


def read_folder(folder: Path) -> Tokenizer:
    """Open the tokenizer of a folder, whichever of the known files it holds; `transformers` is asked only if none is there."""
    config = read_config(folder)
    if is_zero2all(config):
        return read_zero2all(folder, config)
    if (folder / "tokenizer.json").is_file():
        return finish(read_fast(folder / "tokenizer.json"), config)
    kind = str(config.get("tokenizer_class", "GPT2Tokenizer")).removesuffix("Fast")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file() and kind in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        return finish(_read_vocab_and_merges(folder, qwen=kind == "Qwen2Tokenizer"), config, ("<|endoftext|>",))
    if (folder / "tokenizer.model").is_file():
        from headway.tokenizer.sentencepiece_model import read_model

        return read_model(folder / "tokenizer.model", config)
    ranks = sorted(folder.glob("*.tiktoken"))
    if len(ranks) == 1:
        from headway.tokenizer.tiktoken_ranks import read_ranks

        return read_ranks(ranks[0], config)
    alone = _only_file(folder)
    if alone is not None:
        from headway.tokenizer.load import load_tokenizer

        return load_tokenizer(alone)
    if "tokenizer_class" in config and "auto_map" not in config:
        return finish(_ask_transformers(folder), config)
    raise ConfigError(f"{folder} holds no tokenizer headway can read; expected {KNOWN_FILES}.")


def _only_file(folder: Path) -> Path | None:
    """The one tokenizer file of a folder under a name of its own."""
    found = [path for path in sorted(folder.glob("*.model")) if path.is_file()]
    found += [path for path in sorted(folder.glob("*.json")) if path.is_file() and not path.name.endswith(OTHER_JSON)]
    return found[0] if len(found) == 1 else None


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Open a tokenizer.json; without a tokenizer_config.json beside it the begin and end tokens are found by their usual names."""
    config = read_config(path.parent)
    backend = read_fast(path)
    if is_zero2all(config) or (not config and is_bare(backend)):
        config = written_out()
    return finish(backend, config)


def finish(backend: tokenizers.Tokenizer, config: dict[str, Any], extra_special: tuple[str, ...] = ()) -> Tokenizer:
    """Make a `Tokenizer` of a backend: special tokens the config names are added, roles and chat template are read."""
    with _answering("the tokenizer cannot be completed"):
        return _finish(backend, config, extra_special)


def _finish(backend: tokenizers.Tokenizer, config: dict[str, Any], extra_special: tuple[str, ...]) -> Tokenizer:
    from tokenizers import AddedToken

    def special(token: Any) -> AddedToken:
        if isinstance(token, dict):
            flags = {k: bool(token[k]) for k in ("single_word", "lstrip", "rstrip", "normalized") if k in token}
            return AddedToken(str(cast(Any, token["content"])), special=bool(token.get("special", True)), **flags)
        return AddedToken(str(token), special=True, normalized=False)

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared: dict[str, Any] = config.get("added_tokens_decoder") or {}
    for number, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            backend.add_special_tokens([special(token)]) if token.get("special") else backend.add_tokens([special(token)])
        if backend.token_to_id(token["content"]) != int(number):
            raise DataError(
                f"tokenizer_config.json gives {token['content'][:80]!r} the id {number}, "
                f"but the vocabulary gives it {backend.token_to_id(token['content'])}; the two files are not of one tokenizer."
            )
    named = [config.get(f"{role}_token") for role in ROLES]
    named += _as_list(config.get("additional_special_tokens")) + _as_list(config.get("extra_special_tokens"))
    named += [token for token in extra_special if backend.token_to_id(token) is not None]
    for token in (special(t) for t in named if t is not None):
        if token.content not in {t.content for t in backend.get_added_tokens_decoder().values() if t.special}:
            backend.add_special_tokens([token])
    _check_typed(backend)
    roles = {role: special(config[f"{role}_token"]).content for role in ROLES if config.get(f"{role}_token") is not None}
    if not config:
        vocabulary = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
        roles = {role: name for role, names in GUESSES.items() for name in reversed(names) if name in vocabulary}
    if not backend.get_vocab_size(with_added_tokens=True):
        raise DataError("the tokenizer's vocabulary is empty. Fetch or train it again.")
    return Tokenizer(backend, roles, config, default_template(config.get("chat_template")))


def _check_typed(backend: tokenizers.Tokenizer) -> None:
    """Unigram models hold special tokens as pieces like any other: typed in a text they would become special."""
    if json.loads(backend.model.__getstate__())["type"] != "Unigram":
        return
    backend.encode_special_tokens = True
    for number, token in backend.get_added_tokens_decoder().items():
        if token.special and number in backend.encode(token.content, add_special_tokens=False).ids:
            raise DataError(
                f"a text that holds {token.content!r} would become that special token: unigram vocabularies cannot keep them apart."
            )


def write_folder(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json (and the .model of a sentencepiece tokenizer)."""
    from headway.runtime.storage import write_atomic

    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in tokenizer.config.items() if k not in ("auto_map", "chat_template", "added_tokens_decoder")}
    roles = {f"{role}_token": token for role, token in tokenizer.roles.items()}
    others = [token for token in tokenizer.special_tokens if token not in roles.values()]
    if "auto_map" in tokenizer.config or "tokenizer_class" not in config:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config = {**config, **roles, "clean_up_tokenization_spaces": config.get("clean_up_tokenization_spaces", False)}
    if "additional_special_tokens" not in config and "extra_special_tokens" not in config:
        config["additional_special_tokens"] = others
    config.setdefault("model_max_length", int(1e30))
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    if tokenizer.is_sentencepiece:
        write_atomic(folder / "tokenizer.model", cast(Any, tokenizer.backend).serialized_model_proto())
    write_atomic(folder / "tokenizer.json", _with_begin(tokenizer).to_str(pretty=True))
    write_atomic(folder / "special_tokens_map.json", _pretty({**roles, "additional_special_tokens": others}))
    write_atomic(folder / "tokenizer_config.json", _pretty(config))


def _with_begin(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The backend, putting the begin token before texts for tools that ask for it, where its config says so and its file does not."""
    begin = tokenizer.roles.get("bos")
    if not tokenizer.config.get("add_bos_token") or begin is None or tokenizer.fast.post_processor is not None:
        return tokenizer.fast
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    clone = Backend.from_str(tokenizer.fast.to_str())
    number = tokenizer.special_tokens[begin]
    clone.post_processor = TemplateProcessing(single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, number)])
    return clone


def canonical(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """What decides the ids of a text, in one spelling whichever tool wrote the file."""
    content = json.loads(backend.to_str())
    model = content["model"]
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {
        "type": model.get("type"),
        "vocab": sorted(backend.get_vocab(with_added_tokens=True).items(), key=lambda item: (item[1], item[0])),
        "scores": model["vocab"] if isinstance(model.get("vocab"), list) else None,
        "merges": [list(m) if isinstance(m, list) else m.split(" ") for m in model.get("merges", [])],
        "rules": {k: model.get(k) or None for k in ("unk_token", "unk_id", "byte_fallback", "ignore_merges", "dropout", "fuse_unk",
                  "continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word")},
        "special": sorted([t["id"], t["content"], *(t[f] for f in flags)] for t in content["added_tokens"]),
        "normalizer": _plain(content.get("normalizer")),
        "pre_tokenizer": _plain(content.get("pre_tokenizer")),
    }  # fmt: skip


def token_bytes(backend: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """The bytes each id stands for, or None where the decoder is neither byte-level nor byte-fallback."""
    kinds = {part["type"]: part for part in _decoders(backend)}
    if not kinds.keys() & {"ByteLevel", "ByteFallback"}:
        return None
    table = {i: token.encode() for i, token in _plain_tokens(backend, "ByteLevel" not in kinds)}
    if "ByteLevel" in kinds:
        for token, i in backend.get_vocab(with_added_tokens=False).items():
            table[i] = spelled if (spelled := unspell(token)) is not None else token.encode()
    else:
        table |= {i: bytes([int(t[3:5], 16)]) for t, i in backend.get_vocab(with_added_tokens=False).items() if _is_byte(t)}
    return table | {i: token.content.encode() for i, token in backend.get_added_tokens_decoder().items()}


def strips_first_space(backend: tokenizers.Tokenizer) -> bool:
    """Whether decoding drops the space that encoding put before the text."""
    return any(part["type"] == "Strip" and part.get("start") for part in _decoders(backend))


def _plain_tokens(backend: tokenizers.Tokenizer, escaped: bool) -> list[tuple[int, str]]:
    replaces = escaped and any(p["type"] == "Replace" and p["pattern"] == {"String": "▁"} for p in _decoders(backend))
    return [(i, t.replace("▁", " ") if replaces else t) for t, i in backend.get_vocab(with_added_tokens=False).items()]


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _decoders(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder] if decoder else []


def _plain(part: Any) -> Any:
    """A normaliser or pre-tokenizer without what does not change ids, and without a sequence of one."""
    if isinstance(part, list):
        return [_plain(p) for p in cast(list[Any], part)]
    if not isinstance(part, dict):
        return part
    found = {k: _plain(v) for k, v in cast(dict[str, Any], part).items() if k != "trim_offsets"}
    for key in ("pretokenizers", "normalizers"):
        if found.get("type") == "Sequence" and len(found.get(key, ())) == 1:
            return found[key][0]
    return found


def read_fast(path: Path) -> tokenizers.Tokenizer:
    """The backend of a tokenizer.json, without truncation and padding."""
    import tokenizers

    with _answering(f"{path} is no tokenizer.json"):
        text = read_bytes(path).decode()
        _check_prefix(path, text)
        backend = tokenizers.Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_prefix(path: Path, text: str) -> None:
    """Refuse merges without the prefix that the model says continued words have: the tokenizers library aborts the process over them."""
    if not PREFIX.search(text):
        return
    model = json.loads(text)["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model.get("merges", []):
        right = merge[1] if isinstance(merge, list) else merge.split(" ", 1)[1]
        if not right.startswith(prefix):
            raise DataError(f"{path}: continuing_subword_prefix is {prefix[:40]!r}, but the merge {str(merge)[:80]} has no such prefix.")


def _read_vocab_and_merges(folder: Path, *, qwen: bool) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    with _answering(f"{folder}: vocab.json and merges.txt cannot be read"):
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = Backend(model)
    if qwen:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = byte_level(QWEN if qwen else None)
    backend.decoder = decoders.ByteLevel()
    return backend


def _ask_transformers(folder: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    with _answering(f"{folder} holds a tokenizer that neither headway nor transformers can read"):
        found: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise DataError(f"{folder} holds a slow tokenizer ({type(found).__name__}); convert it to a tokenizer.json first.")
    return backend


@contextmanager
def _answering(what: str) -> Iterator[None]:
    """The errors of the tokenizers library, its panics too, as one line."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {first_line(error, 300)}.") from None


def read_bytes(path: Path) -> bytes:
    """A tokenizer's file, whole."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def default_template(template: Any) -> str | None:
    """The one template, or the one called `default` where a folder holds several named ones."""
    if isinstance(template, list):
        named = {str(entry["name"]): str(entry["template"]) for entry in cast(list[dict[str, Any]], template)}
        return named.get("default")
    return template


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast(dict[str, Any], value).values())
    return list(value or ())


def _pretty(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"
