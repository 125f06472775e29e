"""Sentencepiece .model files: encoded by the sentencepiece library, and converted exactly to a
tokenizer.json for other tools.

In: a .model. Out: a `Tokenizer`, or the `tokenizers` equal that gives the same ids for every
text. Conversion: a piece's rank is its merge's rank; normalisation, dummy prefix and byte
fallback become the steps of the same name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import DataError
from headway.runtime.optional import need
from headway.tokenizer.load import Tokenizer

if TYPE_CHECKING:
    import tokenizers
    from sentencepiece import SentencePieceProcessor

SPACE = "▁"
"""How pieces spell a space."""
BPE = 2
"""TrainerSpec.ModelType.BPE of sentencepiece's protobuf."""
ROLE_IDS = ("bos", "eos", "pad", "unk")


def read_model(
    path: Path, config: dict[str, Any] | None = None, special: Sequence[str] = ()
) -> Tokenizer:
    """Open a .model file; `config` is that of its folder, where there is one.

    `special` tokens become control pieces: user-defined pieces of the model keep their ids, the
    others follow the last piece.
    """
    from headway.tokenizer.folder import default_template, finish, read_bytes
    from headway.tokenizer.tiktoken_ranks import is_ranks, read_ranks

    config = _neutral(config or {})
    data = read_bytes(path)
    # Llama 3 calls its rank file tokenizer.model too.
    if is_ranks(data):
        return read_ranks(path, config)

    proto = _parse(path, data)
    _check_kind(proto, path)

    if special:
        data = _with_control_pieces(proto, special).SerializeToString()
    # What the sentencepiece library cannot do, the converted tokenizer can.
    if _adds_tokens(proto, config) or _holds_null(proto):
        return finish(convert(proto), {**_role_tokens(proto), **config})

    roles = {role.removesuffix("_token"): token for role, token in _role_tokens(proto).items()}
    roles |= {
        role: _content(config[f"{role}_token"])
        for role in ROLE_IDS
        if config.get(f"{role}_token") is not None
    }
    return Tokenizer(
        _processor(path, data), roles, config, default_template(config.get("chat_template"))
    )


def _parse(path: Path, data: bytes) -> Any:
    """The content of a .model file."""
    need("sentencepiece", str(path))
    need("google.protobuf", str(path))
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise DataError(
            f"{path} is not a sentencepiece model: {error}. Fetch or train it again."
        ) from None

    if not proto.pieces or not 0 <= proto.trainer_spec.unk_id < len(proto.pieces):
        raise DataError(
            f"{path} is not a sentencepiece model: it has {len(proto.pieces)} pieces. Fetch or "
            "train it again."
        )

    return proto


def _processor(path: Path, data: bytes) -> SentencePieceProcessor:
    """The sentencepiece library's processor of a model."""
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(data)
    except RuntimeError as error:
        version = sentencepiece.__version__
        raise DataError(
            f"{path}: sentencepiece {version} cannot open it: {str(error).rstrip('.')}. Fetch or "
            "train it again."
        ) from None

    return sp


def _with_control_pieces(proto: Any, tokens: Sequence[str]) -> Any:
    """The model with these tokens as control pieces, which no typed text becomes."""
    known = {piece.piece: piece for piece in proto.pieces}
    for token in tokens:
        if token in known:
            piece = known[token]
        else:
            piece = proto.pieces.add(piece=token, score=0.0)
        piece.type = piece.CONTROL
    return proto


def _holds_null(proto: Any) -> bool:
    """Whether a piece holds the null character (InternLM's V7_sft.model has one), which
    sentencepiece 0.2.2 refuses to open.
    """
    return any("\0" in piece.piece for piece in proto.pieces)


def _role_tokens(proto: Any) -> dict[str, str]:
    """`bos_token` and so on, as the model itself numbers them."""
    numbers = {role: getattr(proto.trainer_spec, f"{role}_id") for role in ROLE_IDS}
    return {
        f"{role}_token": proto.pieces[number].piece
        for role, number in numbers.items()
        if 0 <= number < len(proto.pieces)
    }


def _neutral(config: dict[str, Any]) -> dict[str, Any]:
    """A folder's config without the class that would change spaces at a text's start; whether it
    puts a begin token stays.
    """
    if "tokenizer_class" not in config:
        return config
    # LlamaTokenizer puts a begin token where its config does not say otherwise.
    adds_begin = config.get("add_bos_token", str(config["tokenizer_class"]).startswith("Llama"))
    unused = ("legacy", "sp_model_kwargs", "auto_map")
    kept = {key: value for key, value in config.items() if key not in unused}
    return {**kept, "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bool(adds_begin)}


def _check_kind(proto: Any, path: Path) -> None:
    """Refuse models whose ids a tokenizer.json could not give, or whose pieces a user could type
    as special tokens.
    """
    trained = proto.trainer_spec
    if trained.model_type != BPE:
        raise DataError(
            f"{path} is a sentencepiece model of another type than bpe; only bpe keeps special "
            "tokens out of typed text."
        )

    if trained.treat_whitespace_as_suffix:
        raise DataError(
            f"{path} writes spaces after words (treat_whitespace_as_suffix), which no "
            "tokenizer.json can say."
        )


def encode_batch(sp: SentencePieceProcessor, texts: Sequence[str]) -> list[list[int]]:
    """Ids of many texts, in the library's threads."""
    processor: Any = sp
    return processor.encode(list(texts), num_threads=os.cpu_count() or 1)


def convert(proto: Any) -> tokenizers.Tokenizer:
    """A `tokenizers` tokenizer that gives the same ids as the sentencepiece model."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    trained = proto.trainer_spec
    rules = proto.normalizer_spec
    vocabulary = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merges = _merges(proto, vocabulary)
    # sentencepiece gives neighbouring unknown characters one unknown id: fuse_unk.
    model = models.BPE(
        vocabulary,
        merges,
        unk_token=proto.pieces[trained.unk_id].piece,
        fuse_unk=True,
        byte_fallback=trained.byte_fallback,
    )
    backend = Backend(model)

    # In sentencepiece's order: characters, extra spaces, the space in front, spelling of spaces.
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))

    if rules.remove_extra_whitespaces:
        from tokenizers import Regex

        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]

    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE if rules.escape_whitespaces else " "))
    if rules.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)

    # The decoder undoes these steps, and drops the space in front.
    parts: list[Any] = []
    if rules.escape_whitespaces:
        parts.append(decoders.Replace(SPACE, " "))

    parts += [decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)

    for piece in proto.pieces:
        if piece.type in (piece.CONTROL, piece.UNKNOWN):
            backend.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == piece.USER_DEFINED:
            backend.add_tokens([AddedToken(piece.piece, special=False, normalized=False)])

    return backend


def content_of(sp: SentencePieceProcessor) -> Any:
    """What the .model file of a processor holds."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(sp.serialized_model_proto())
    return proto


def _merges(proto: Any, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece from two others, best pieces first: the order in which
    sentencepiece joins them.

    sentencepiece joins any two neighbours whose text is a piece, so every split of a piece into two
    pieces is a merge here. Merges of one piece are in the order of the ids of their parts.
    """
    normal = {p.piece for p in proto.pieces if p.type == p.NORMAL}
    ranked: list[tuple[float, int, int, int]] = []
    pieces = [p.piece for p in proto.pieces]
    for number, piece in enumerate(proto.pieces):
        if piece.type != piece.NORMAL:
            continue

        text = piece.piece
        for length in range(1, len(text)):
            left = text[:length]
            right = text[length:]
            if left in normal and right in normal:
                ranked.append((-piece.score, number, vocabulary[left], vocabulary[right]))

    return [(pieces[left], pieces[right]) for _, _, left, right in sorted(ranked)]


def _adds_tokens(proto: Any, config: dict[str, Any]) -> bool:
    """Whether a folder's config names tokens that the model itself has not."""
    pieces = {piece.piece for piece in proto.pieces}
    declared = [token["content"] for token in (config.get("added_tokens_decoder") or {}).values()]
    named = [config.get(f"{role}_token") for role in ROLE_IDS]
    named += list(config.get("additional_special_tokens") or ())
    return any(
        token not in pieces
        for token in declared + [_content(token) for token in named if token is not None]
    )


def _content(token: Any) -> str:
    if isinstance(token, dict):
        return str(token["content"])
    return str(token)
