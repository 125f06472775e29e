"""Tokenizer folders: reads what other tools wrote, and writes what AutoTokenizer reads.

    tokenizer.json            vocabulary, merges, pre-tokenizer
                              (else vocab.json + merges.txt, tokenizer.model, *.tiktoken)
    tokenizer_config.json     which token begins, ends, pads; chat template
    special_tokens_map.json   the same roles, for older tools

Invariant: a loaded backend neither truncates nor pads, and treats special tokens in texts as
ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headway.errors import ConfigError, DataError, first_line
from headway.runtime.digests import read_digests
from headway.runtime.json_file import read_bounded, read_object
from headway.tokenizer.byte_level import QWEN, byte_level
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.zero2all_folder import full_config, is_bare, is_zero2all, read_zero2all

if TYPE_CHECKING:
    import tokenizers

CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
ROLES = ("bos", "eos", "pad", "unk")
LARGEST_ID = 1 << 31
"""Ids in tokenizer_config.json are below this."""
ID_DIGITS = 10
"""Digits of the largest such id. Longer numbers are not even converted."""
VOCABULARY_IDS = 1 << 24
"""Ids of a vocabulary are below this. The tokenizers library writes and compares it in a table
of all ids up to the largest."""
GUESSES = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>"),
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
}
"""Usual names of begin and end tokens, for a tokenizer.json without a config; the first counts."""
DIGESTED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
"""The files that a tokenizer is read from."""
OTHER_JSON = (
    "config.json",
    "digests.json",
    "map.json",
    "index.json",
    "processor_config.json",
    "vocab.json",
    "manifest.json",
    "results.json",
    "state.json",
)
"""Name endings of JSON files in model folders that are not tokenizers."""
PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
"""A prefix that is not empty. Searching for it spares parsing a large file twice."""
KNOWN_FILES = "tokenizer.json, vocab.json with merges.txt, tokenizer.model or a .tiktoken file"


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder holds a tokenizer that `read_folder` opens."""
    if any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        return True
    return any(folder.glob("*.tiktoken")) or is_zero2all(read_config(folder))


def read_folder(folder: Path) -> Tokenizer:
    """Open the tokenizer of a folder, whichever of the known files it holds.

    tokenizer.json comes first, because it says everything. `transformers` reads the folder only
    if no known file is there, and never runs code from it.
    """
    check_files(folder)
    config = read_config(folder)

    if is_zero2all(config):
        return read_zero2all(folder, config)
    if (folder / "tokenizer.json").is_file():
        return finish(read_fast(folder / "tokenizer.json"), config)

    # The class decides how vocab.json and merges.txt are used. Only these two are known here.
    kind = str(config.get("tokenizer_class", "GPT2Tokenizer")).removesuffix("Fast")
    if (
        (folder / "vocab.json").is_file()
        and (folder / "merges.txt").is_file()
        and kind in ("GPT2Tokenizer", "Qwen2Tokenizer")
    ):
        return finish(
            _read_vocab_and_merges(folder, qwen=kind == "Qwen2Tokenizer"),
            config,
            ("<|endoftext|>",),
        )

    if (folder / "tokenizer.model").is_file():
        from headway.tokenizer.sentencepiece_model import read_model

        return read_model(folder / "tokenizer.model", config)

    ranks = sorted(folder.glob("*.tiktoken"))
    if len(ranks) == 1:
        from headway.tokenizer.tiktoken_ranks import read_ranks

        return read_ranks(ranks[0], config)

    only_file = _only_file(folder)
    if only_file is not None:
        from headway.tokenizer.load import load_tokenizer

        return load_tokenizer(only_file)

    if "tokenizer_class" in config and "auto_map" not in config:
        return finish(_read_with_transformers(folder), config)

    raise ConfigError(f"{folder} holds no tokenizer headway can read; expected {KNOWN_FILES}.")


def check_files(folder: Path) -> None:
    """Refuse a folder whose digests say that a file of its tokenizer was changed or removed."""
    digests = read_digests(folder)
    if digests is not None:
        digests.check([name for name in digests.files if is_tokenizer_file(name)])


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of a model folder belongs to its tokenizer."""
    return any(fnmatch(name, pattern) for pattern in DIGESTED)


def _only_file(folder: Path) -> Path | None:
    """The only tokenizer file of a folder, under any name."""
    candidates = [path for path in sorted(folder.glob("*.model")) if path.is_file()]
    candidates += [
        path
        for path in sorted(folder.glob("*.json"))
        if path.is_file() and not path.name.endswith(OTHER_JSON)
    ]
    if len(candidates) == 1:
        return candidates[0]

    return None


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Open a tokenizer.json; without a tokenizer_config.json next to it the begin and end tokens
    are found by their usual names.
    """
    config = read_config(path.parent)
    backend = read_fast(path)
    if is_zero2all(config) or (not config and is_bare(backend)):
        config = full_config()
    return finish(backend, config)


def finish(
    backend: tokenizers.Tokenizer, config: dict[str, Any], extra_special: tuple[str, ...] = ()
) -> Tokenizer:
    """Make a `Tokenizer` of a backend: special tokens the config names are added, roles and chat
    template are read.
    """
    with _one_line_errors("the tokenizer cannot be completed"):
        return _finish(backend, config, extra_special)


def _finish(
    backend: tokenizers.Tokenizer, config: dict[str, Any], extra_special: tuple[str, ...]
) -> Tokenizer:
    """Add the special tokens that the config names, check their ids, and find the roles."""
    from tokenizers import AddedToken

    def special(token: Any) -> AddedToken:
        """A token of a config: a text, or an object with its flags."""
        if isinstance(token, dict):
            flags = {
                flag: bool(token[flag])
                for flag in ("single_word", "lstrip", "rstrip", "normalized")
                if flag in token
            }
            return AddedToken(
                str(cast(Any, token["content"])), special=bool(token.get("special", True)), **flags
            )

        return AddedToken(str(token), special=True, normalized=False)

    # In the order of ids, because the backend numbers added tokens one after another.
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared: dict[str, Any] = config.get("added_tokens_decoder") or {}
    for number, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            if token.get("special"):
                backend.add_special_tokens([special(token)])
            else:
                backend.add_tokens([special(token)])

        if backend.token_to_id(token["content"]) != int(number):
            raise DataError(
                f"tokenizer_config.json gives {token['content'][:80]!r} the id {number}, but the "
                f"vocabulary gives it {backend.token_to_id(token['content'])}; the two files are "
                "not of one tokenizer."
            )

    # A token with a role must be special, even if the vocabulary has it as an ordinary entry.
    named = [config.get(f"{role}_token") for role in ROLES]
    named += _as_list(config.get("additional_special_tokens"))
    named += _as_list(config.get("extra_special_tokens"))
    named += [token for token in extra_special if backend.token_to_id(token) is not None]
    for token in (special(entry) for entry in named if entry is not None):
        if token.content not in _special_contents(backend):
            backend.add_special_tokens([token])

    _check_typed(backend)

    roles = {
        role: special(config[f"{role}_token"]).content
        for role in ROLES
        if config.get(f"{role}_token") is not None
    }
    if not config:
        # The last assignment wins, so the names come in reverse order.
        special_contents = _special_contents(backend)
        for role, names in GUESSES.items():
            for name in reversed(names):
                if name in special_contents:
                    roles[role] = name

    if not backend.get_vocab_size(with_added_tokens=True):
        raise DataError("the tokenizer's vocabulary is empty. Fetch or train it again.")

    return Tokenizer(backend, roles, config, default_template(config.get("chat_template")))


def _special_contents(backend: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values() if token.special}


def _check_typed(backend: tokenizers.Tokenizer) -> None:
    """Refuse a unigram model whose special tokens are pieces like any other: typed in a text they
    would become special.
    """
    if json.loads(backend.model.__getstate__())["type"] != "Unigram":
        return

    backend.encode_special_tokens = True
    for number, token in backend.get_added_tokens_decoder().items():
        if token.special and number in backend.encode(token.content, add_special_tokens=False).ids:
            raise DataError(
                f"a text that holds {token.content!r} would become that special token: unigram "
                "vocabularies cannot keep them apart."
            )


def write_folder(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json (and the .model of
    a sentencepiece tokenizer).
    """
    from headway.runtime.storage import write_atomic

    folder.mkdir(parents=True, exist_ok=True)
    # tokenizer.json holds the added tokens. `auto_map` would run code that is not in this folder.
    config = {
        key: value
        for key, value in tokenizer.config.items()
        if key not in ("auto_map", "chat_template", "added_tokens_decoder")
    }
    roles = {f"{role}_token": token for role, token in tokenizer.roles.items()}
    others = [token for token in tokenizer.special_tokens if token not in roles.values()]
    if "auto_map" in tokenizer.config or "tokenizer_class" not in config:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"

    config = {
        **config,
        **roles,
        "clean_up_tokenization_spaces": config.get("clean_up_tokenization_spaces", False),
    }
    if "additional_special_tokens" not in config and "extra_special_tokens" not in config:
        config["additional_special_tokens"] = others

    # What transformers writes for "no limit".
    config.setdefault("model_max_length", int(1e30))
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template

    if tokenizer.is_sentencepiece:
        write_atomic(
            folder / "tokenizer.model", cast(Any, tokenizer.backend).serialized_model_proto()
        )

    write_atomic(folder / "tokenizer.json", _with_begin(tokenizer).to_str(pretty=True))
    write_atomic(
        folder / "special_tokens_map.json", _pretty({**roles, "additional_special_tokens": others})
    )
    write_atomic(folder / "tokenizer_config.json", _pretty(config))


def _with_begin(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The backend, putting the begin token before texts for tools that ask for it, where its
    config says so and its file does not.
    """
    begin = tokenizer.roles.get("bos")
    if (
        not tokenizer.config.get("add_bos_token")
        or begin is None
        or tokenizer.fast.post_processor is not None
    ):
        return tokenizer.fast

    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    clone = Backend.from_str(tokenizer.fast.to_str())
    number = tokenizer.special_tokens[begin]
    clone.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, number)]
    )
    return clone


def read_fast(path: Path) -> tokenizers.Tokenizer:
    """The backend of a tokenizer.json, without truncation and padding."""
    import tokenizers

    with _one_line_errors(f"{path} is not a tokenizer.json"):
        text = read_bytes(path).decode()
        _check_prefix(path, text)
        backend = tokenizers.Tokenizer.from_str(text)

    _check_ids(path, backend)
    # Files of published models may carry both settings, which would change ids and lengths.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_ids(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Refuse an id so large that tables of all ids up to it take gigabytes."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    token = max(vocabulary, key=vocabulary.__getitem__, default="")
    largest = vocabulary.get(token, 0)
    if largest >= VOCABULARY_IDS:
        raise DataError(
            f"{path}: the token {token[:40]!r} has the id {largest}; ids below {VOCABULARY_IDS} "
            "are expected. The file is damaged."
        )


def _check_prefix(path: Path, text: str) -> None:
    """Refuse merges without the prefix that the model says continued words have: the tokenizers
    library aborts the process over them.
    """
    if not PREFIX.search(text):
        return

    model = json.loads(text)["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model.get("merges", []):
        if isinstance(merge, list):
            right = merge[1]
        else:
            right = merge.split(" ", 1)[1]

        if not right.startswith(prefix):
            raise DataError(
                f"{path}: continuing_subword_prefix is {prefix[:40]!r}, but the merge "
                f"{str(merge)[:80]} has no such prefix."
            )


def _read_vocab_and_merges(folder: Path, *, qwen: bool) -> tokenizers.Tokenizer:
    """GPT-2's or Qwen's vocabulary; how words are split is known from the class, not the files."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    with _one_line_errors(f"{folder}: vocab.json and merges.txt cannot be read"):
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))

    backend = Backend(model)
    _check_ids(folder / "vocab.json", backend)
    if qwen:
        backend.normalizer = normalizers.NFC()

    backend.pre_tokenizer = byte_level(QWEN if qwen else None)
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    """The backend of a tokenizer that only `transformers` can build; no code of the folder runs."""
    from headway.runtime.optional import need

    need("transformers", f"{folder}: a tokenizer of this class")
    from transformers import AutoTokenizer

    with _one_line_errors(
        f"{folder} holds a tokenizer that neither headway nor transformers can read"
    ):
        loaded: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )

    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            f"{folder} holds a slow tokenizer ({type(loaded).__name__}); convert it to a "
            "tokenizer.json first."
        )

    return backend


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """The errors of the tokenizers library, its panics too, as one line."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        # A panic of the Rust library derives from BaseException. KeyboardInterrupt does too.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {first_line(error, 300)}.") from None


def read_bytes(path: Path) -> bytes:
    """A tokenizer's file, whole."""
    try:
        return read_bounded(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def default_template(template: Any) -> str | None:
    """The one template, or the one called `default` where a folder holds several named ones."""
    if isinstance(template, list):
        named = {
            str(entry["name"]): str(entry["template"])
            for entry in cast(list[dict[str, Any]], template)
        }
        return named.get("default")
    return template


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast(dict[str, Any], value).values())
    return list(value or ())


def _pretty(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed from special_tokens_map.json and chat_template.jinja; {} if
    the folder has none of them.
    """
    config = _read(folder / CONFIG)
    for key, value in _read(folder / MAP).items():
        config.setdefault(key, value)

    path = folder / TEMPLATE
    if path.is_file():
        try:
            config["chat_template"] = read_bounded(path).decode("utf-8")
        except (OSError, ValueError) as problem:
            raise DataError(f"{path} cannot be read: {problem}.") from None

    return config


def _read(path: Path) -> dict[str, Any]:
    """A JSON file of a tokenizer folder with the types that later code relies on; {} if missing."""
    if not path.is_file():
        return {}

    config = read_object(path, DataError)
    # Old Llama folders have empty role tokens, which mean none.
    for role in ROLES:
        if config.get(f"{role}_token") == "":
            del config[f"{role}_token"]

    for key, (fits, expected) in TYPES.items():
        if config.get(key) is not None and not fits(config[key]):
            raise DataError(f"{path}: {key} is {str(config[key])[:80]}; {expected} is expected.")

    return config


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and _encodes(value)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_token(value: Any) -> bool:
    """Whether a value is a token: a text, or an object with its content and flags."""
    content = value
    if isinstance(value, dict):
        content = cast(dict[str, Any], value).get("content")
    return _is_text(content) and content != ""


def _is_decoder(value: Any) -> bool:
    """Whether a value is an `added_tokens_decoder`: ids, as texts, to tokens."""
    if not isinstance(value, dict):
        return False
    listed = cast(dict[str, Any], value).items()
    numbers = all(
        number.isascii()
        and number.isdigit()
        and len(number) <= ID_DIGITS
        and int(number) < LARGEST_ID
        for number, _ in listed
    )
    return numbers and all(isinstance(token, dict) and _is_token(token) for _, token in listed)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, (list, dict)) and all(map(_is_token, _as_list(value)))


def _is_template(value: Any) -> bool:
    """Whether a value is a chat template, or a list of named ones."""
    if isinstance(value, str):
        return _encodes(value)

    named = isinstance(value, list) and all(
        isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in value
    )
    return named and all(
        isinstance(entry["name"], str)
        and isinstance(entry["template"], str)
        and _encodes(entry["template"])
        for entry in value
    )


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


# A downloaded folder may hold anything. Checked here, later code can rely on the types.
TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{f"{role}_token": (_is_token, "a token or a mapping with its content") for role in ROLES},
    "added_tokens_decoder": (_is_decoder, "a mapping from ids to tokens"),
    "additional_special_tokens": (_are_tokens, "a list of tokens"),
    "extra_special_tokens": (_are_tokens, "a list or mapping of tokens"),
    "tokenizer_class": (lambda value: isinstance(value, str), "a name"),
    "chat_template": (_is_template, "a template or a list of named templates"),
    "add_bos_token": (_is_switch, "true or false"),
    "add_eos_token": (_is_switch, "true or false"),
    "clean_up_tokenization_spaces": (_is_switch, "true or false"),
}
