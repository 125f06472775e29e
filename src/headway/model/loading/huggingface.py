"""A Hugging Face folder comes in; a ModelConfig and weights under our names go out. Reads safetensors, and pickles with torch's restricted
loader.

Every parameter of the config must exist with its shape, and every tensor of the files must be a parameter; anything else is an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.errors import CheckpointError, ConfigError, first_line
from headway.model.families.base import Piece, family_for, family_of, our_name, pieces_of, with_head
from headway.model.layout import HEAD, param_specs
from headway.model.loading import mxfp4
from headway.model.loading.fp8_blocks import SCALE, BlockFile, BlockSize, block_size, without_scales
from headway.model.loading.unsupported import named_format, pointer, quantised
from headway.model.loading.untrusted import open_pickled, zero2all_file
from headway.runtime.digests import FolderDigests
from headway.runtime.json_file import read_object

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig
    from headway.model.families.transformers import Wrapping

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")
BYTES = {"U8", "uint8"}
MAX_MESSAGE = 1000
FILE_NAME = re.compile(r"[^/\x00-\x1f][^\x00-\x1f]{0,254}")


class StoredPiece(NamedTuple):
    """A file, and what of it belongs to a parameter."""

    file: str
    piece: Piece
    scales_file: str | None = None
    """Where the piece's scales are."""


Locations = dict[str, tuple[StoredPiece, ...]]
"""Our name -> where it is; several places are stacked, one for each expert."""
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def is_pretrained(folder: Path) -> bool:
    """Whether a folder looks like a Hugging Face model."""
    return (folder / CONFIG).is_file()


def has_weights(folder: Path) -> bool:
    """Whether a folder holds safetensors under Hugging Face's names."""
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def read_config(folder: Path, wrapping: Wrapping | None = None) -> ModelConfig:
    """The shape of the model in a Hugging Face folder. With `wrapping`, that of the class of transformers, of any model type."""
    path = folder / CONFIG
    given = read_json(path)
    reason = quantised(given, folder, _readable(given) if wrapping is None else ())
    if reason is not None and (wrapping is not None or block_size(given) is None):
        raise ConfigError(f"{path}: {reason}")
    given = {key: value for key, value in given.items() if key != "quantization_config"}
    try:
        return (
            with_head(given, family_for(given).read(given))
            if wrapping is None
            else wrapping.read(given, folder)
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {_short('; '.join(str(error).splitlines()))}") from None


def _readable(given: dict[str, Any]) -> tuple[str, ...]:
    """How the weights of this family may be quantised."""
    try:
        return vars(family_for(given)).get("QUANTISED", ())
    except ConfigError:
        return ()


def read_end_ids(folder: Path) -> frozenset[int]:
    """The ids that end a text, if the folder names them; chat models have several."""
    for name in ("generation_config.json", CONFIG):
        ids = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
                raise ConfigError(
                    f"{folder / name}: eos_token_id is {str(ids)[:80]}; an id or a list of ids is expected."
                )
            return frozenset(listed)
    return frozenset()


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Compare names and shapes of all tensors with the config, from the headers of safetensors files; pickles are checked when read."""
    with ExitStack() as opened:
        where = _locations(folder, config)
        if all(place.file.endswith(SUFFIX) for places in where.values() for place in places):
            _check_shapes(folder, config, where, _opened(folder, where, opened))


def read_weights(
    folder: Path, config: ModelConfig, digests: FolderDigests | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Our name and the tensor of every parameter, in forward order, read lazily; all shapes are checked before the first.

    With the folder's digests, the files are hashed meanwhile, and the last tensor comes only if they are as they were written.
    """
    where = _locations(folder, config)
    values = _read_all(folder, config, where)
    if digests is None:
        return values
    names = {place.file for places in where.values() for place in places}
    names |= {
        place.scales_file
        for places in where.values()
        for place in places
        if place.scales_file is not None
    }
    return digests.through(sorted(names), values)


def _read_all(
    folder: Path, config: ModelConfig, where: Locations
) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    with ExitStack() as opened:
        files = _opened(folder, where, opened)
        _check_shapes(folder, config, where, files)
        for spec in param_specs(config):
            theirs = where[spec.name][0].piece.name
            value = _read(folder, files, where[spec.name])
            if spec.tied_to in where and not torch.equal(
                value, _read(folder, files, where[spec.tied_to])
            ):
                raise CheckpointError(
                    f"{folder}: {spec.tied_to} differs from {theirs}, but {CONFIG} says tie_word_embeddings. Set it to false."
                )
            yield spec.name, value


def _opened(folder: Path, where: Locations, opened: ExitStack) -> dict[str, Any]:
    """All files with tensors, open; those of 8-bit blocks give floats."""
    block = _blocks(folder)
    scales = {} if block is None else without_scales(_tensors(folder))[1]
    names = {place.file for places in where.values() for place in places} | set(scales.values())
    names |= {
        place.scales_file
        for places in where.values()
        for place in places
        if place.scales_file is not None
    }
    files = {name: _open(folder / name, opened) for name in sorted(names)}
    if block is None:
        return files

    def scale_of(name: str) -> torch.Tensor:
        return files[scales[name]].get_tensor(name + SCALE)

    return {
        name: file if isinstance(file, _Pickled) else BlockFile(file, block, scales, scale_of)
        for name, file in files.items()
    }


def _blocks(folder: Path) -> BlockSize | None:
    return block_size(read_json(folder / CONFIG)) if (folder / CONFIG).is_file() else None


def _open(path: Path, opened: ExitStack) -> Any:
    if not path.name.endswith(SUFFIX):
        return _Pickled(open_pickled(path))
    from safetensors import SafetensorError, safe_open

    try:
        return opened.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError, ValueError) as error:
        pointed = pointer(path)
        what = (
            f"is {pointed}"
            if pointed is not None
            else f"not a safetensors file: {first_line(error)}. Download it again."
        )
        raise CheckpointError(f"{path}: {what}") from None


def _check_shapes(
    folder: Path, config: ModelConfig, where: Locations, files: dict[str, Any]
) -> None:
    for spec in param_specs(config):
        places = where[spec.name]
        wanted = spec.shape[1:] if len(places) > 1 else spec.shape
        for place in places:
            file, piece = place.file, place.piece
            whole, dtype = _shape_and_dtype(folder, files, file, piece.name)
            if place.scales_file is not None and piece.scales is not None:
                scales, kind = _shape_and_dtype(folder, files, place.scales_file, piece.scales)
                found = mxfp4.shape_of(whole, scales) if {dtype, kind} <= BYTES else None
                if found is None:
                    raise CheckpointError(
                        f"{folder / file}: {piece.name} is {dtype} {list(whole)} and {piece.scales} {kind} {list(scales)}; mxfp4 has "
                        "bytes [..., blocks, 16] and one byte of scale for each block. Download the model again."
                    )
                whole, dtype = found, "BF16"
            shape = part_shape(whole, piece)
            if shape != wanted:
                of = "" if piece.dim is None else f" of which {spec.name} is {list(shape)}"
                raise CheckpointError(
                    f"{folder / file}: {piece.name} has shape {list(whole)}{of}; {CONFIG} makes it {list(wanted)}."
                )
            if dtype not in FLOATS:
                raise CheckpointError(
                    f"{folder / file}: {piece.name} is of type {dtype}; headway reads weights of 16, 32 or 64 bits. "
                    "Give the model they were quantised from."
                )


def part_shape(whole: tuple[int, ...], piece: Piece) -> tuple[int, ...]:
    """The shape of a piece of their tensor."""
    part = tuple(
        len(range(piece.start, min(piece.stop, n), piece.step)) if dim == piece.dim else n
        for dim, n in enumerate(whole)
    )
    return (*part[:-2], part[-1], part[-2]) if piece.transposed else part


def _shape_and_dtype(
    folder: Path, files: dict[str, Any], file: str, name: str
) -> tuple[tuple[int, ...], str]:
    """Shape and type of a tensor without reading it."""
    from safetensors import SafetensorError

    try:
        if isinstance(files[file], _Pickled):
            value = files[file].get_tensor(name)
            return tuple(value.shape), str(value.dtype).removeprefix("torch.")
        part = files[file].get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(
            f"{folder / file}: holds no {name}: {first_line(error)}. Download the model again."
        ) from None


def _read(folder: Path, files: dict[str, Any], places: tuple[StoredPiece, ...]) -> torch.Tensor:
    import torch

    if places[0].piece.scales is not None or places[0].piece.step > 1:
        return _read_expert_by_expert(folder, files, places[0])
    parts = [_read_piece(folder, files, place) for place in places]
    parts = [
        part.transpose(-1, -2).contiguous() if place.piece.transposed else part
        for place, part in zip(places, parts, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def _read_expert_by_expert(folder: Path, files: dict[str, Any], place: StoredPiece) -> torch.Tensor:
    """A part of stacked tensors that lie interleaved or in blocks: memory holds the part and one expert."""
    number = _shape_and_dtype(folder, files, place.file, place.piece.name)[0][0]
    first = _read_expert(folder, files, place, 0)
    made = first.new_empty(number, *first.shape)
    made[0] = first
    for expert in range(1, number):
        made[expert] = _read_expert(folder, files, place, expert)
    return made


def _read_expert(
    folder: Path, files: dict[str, Any], place: StoredPiece, expert: int
) -> torch.Tensor:
    piece = place.piece
    one = _read_piece(
        folder, files, StoredPiece(place.file, Piece(piece.name, 0, expert, expert + 1))
    )[0]
    if piece.scales is not None:
        assert place.scales_file is not None
        scales = _read_piece(
            folder,
            files,
            StoredPiece(place.scales_file, Piece(piece.scales, 0, expert, expert + 1)),
        )[0]
        one = mxfp4.dequantise(one, scales)
    if piece.dim is not None:
        one = one[
            (
                *(slice(None) for _ in range(piece.dim - 1)),
                slice(piece.start, piece.stop, piece.step),
            )
        ]
    return one.t() if piece.transposed else one


def _read_piece(folder: Path, files: dict[str, Any], place: StoredPiece) -> torch.Tensor:
    from safetensors import SafetensorError

    file, name = place.file, place.piece.name
    dim, start, stop = place.piece.dim, place.piece.start, place.piece.stop
    try:
        if dim is None:
            return files[file].get_tensor(name)
        if isinstance(files[file], _Pickled):
            return files[file].get_tensor(name).narrow(dim, start, stop - start)
        return files[file].get_slice(name)[(*(slice(None) for _ in range(dim)), slice(start, stop))]
    except (SafetensorError, KeyError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder / file}: {name} cannot be read: {first_line(error)}. Download the model again."
        ) from None


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


class _Pickled:
    """A state dict with the interface of a safetensors file."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = {plain_name(str(name)): value for name, value in state.items()}

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        import torch

        value = self.state[name]
        if (
            not isinstance(value, torch.Tensor)
            or value.layout is not torch.strided
            or value.is_quantized
            or value.is_meta
        ):
            raise KeyError(f"{name} is not a plain tensor")
        return value


def plain_name(name: str) -> str:
    """A name without the prefixes of torch's wrappers."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def _locations(folder: Path, config: ModelConfig) -> Locations:
    """Where every parameter is stored; missing and unknown ones are errors."""
    family = family_of(config.family)
    found: Locations = {}
    stored, used = _tensors(folder), set[str]()
    stored = stored if _blocks(folder) is None else without_scales(stored)[0]
    for spec in param_specs(config):
        pieces = pieces_of(family, spec, config, stored)
        names = [name for piece in pieces for name in piece.names]
        split = len(names) > 1 or any(piece.dim is not None or piece.transposed for piece in pieces)
        if split and all(name in stored for name in names):
            found[spec.name] = tuple(
                StoredPiece(
                    stored[one.name], one, None if one.scales is None else stored[one.scales]
                )
                for one in pieces
            )
            used.update(names)
    without = vars(family).get("left_out")
    skipped: Collection[str] = set[str]() if without is None else without(stored, config)
    for theirs, file in stored.items():
        ours = None if theirs in skipped else our_name(family, theirs, config)
        if ours is not None and theirs not in used:
            found[ours] = (StoredPiece(file, Piece(theirs)),)
    wanted = {spec.name for spec in param_specs(config)}
    missing = sorted(wanted - found.keys())
    if missing:
        raise CheckpointError(
            f"{folder}: {_some(missing)} not among the weights, but {CONFIG} requires it. Download the whole model again."
        )
    # Some tools write a tied head as well.
    extra = sorted(found.keys() - wanted - ({HEAD} if config.ties_head else set()))
    if extra:
        raise CheckpointError(
            f"{folder}: {_some(extra)} among the weights, but {CONFIG} defines no such parameter. Is it from another model family?"
        )
    return found


def _tensors(folder: Path) -> dict[str, str]:
    """Name of every tensor -> its file."""
    for index in (INDEX, PICKLED_INDEX):
        if (folder / index).is_file() and (index == INDEX or not (folder / WEIGHTS).is_file()):
            return _listed(folder, index)
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = folder / PICKLED if (folder / PICKLED).is_file() else zero2all_file(folder)
        if pickled is not None:
            return {
                plain_name(str(name)): str(pickled.relative_to(folder))
                for name in open_pickled(pickled)
            }
        other = named_format(folder)
        if other is not None:
            raise ConfigError(f"{folder}: has neither {WEIGHTS} nor {PICKLED}; {other}")
        raise ConfigError(
            f"{folder}: has neither {WEIGHTS} nor {INDEX} nor {PICKLED}. Give a folder that holds the weights."
        )
    with ExitStack() as opened:
        return dict.fromkeys(_open(path, opened).keys(), WEIGHTS)


def _listed(folder: Path, index: str) -> dict[str, str]:
    listed = read_json(folder / index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{folder / index}: has no weight_map. Download the model again.")
    for file in listed.values():
        if (
            not isinstance(file, str)
            or not FILE_NAME.fullmatch(file)
            or ".." in PurePosixPath(file).parts
        ):
            raise CheckpointError(
                f"{folder / index}: names the file {str(file)[:80]!r}; it must be a file of the folder. Download it again."
            )
    absent = sorted({file for file in listed.values() if not (folder / file).is_file()})
    if absent:
        raise CheckpointError(
            f"{folder / absent[0]}: no such file, but {index} lists it. Download the whole model again."
        )
    return dict(listed)


def _some(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"


def read_json(path: Path, holds: str = "a Hugging Face model") -> dict[str, Any]:
    """The mapping in a JSON file of a folder that should hold `holds`."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give a folder that holds {holds}.")
    return read_object(path, ConfigError)
