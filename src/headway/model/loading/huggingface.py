"""A Hugging Face folder comes in; a ModelConfig and weights under our names go out. Reads
safetensors, and pickles with torch's restricted loader.

    config.json -> family -> ModelConfig -> param_specs -> pieces of their tensors (`HfPiece`)
    names in the files -> Locations: our name -> file and piece -> tensors, one at a time

Every parameter of the config must exist with its shape, and every tensor of the files must be a
parameter; anything else is an error. All shapes are checked before the first tensor is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.errors import CheckpointError, ConfigError, first_line
from headway.model.families.base import (
    WRAPPED,
    HfPiece,
    family_for,
    family_of,
    name_in_folder,
    pieces_of,
    with_head,
)
from headway.model.layout import param_specs
from headway.model.loading import mxfp4
from headway.model.loading.fp8_blocks import SCALE, BlockFile, BlockSize, block_size, without_scales
from headway.model.loading.other_parts import (
    OtherParts,
    check_logits,
    find_other_parts,
    has_other_parts,
    text_config,
)
from headway.model.loading.packed_groups import (
    PACKING,
    GroupFile,
    GroupFormat,
    Packed,
    group_format,
    parts_files,
    parts_names,
    with_weights,
)
from headway.model.loading.unsupported import named_format, pointer, quantised
from headway.model.loading.untrusted import open_pickled, zero2all_file
from headway.runtime.digests import FolderDigests
from headway.runtime.json_file import read_object

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig
    from headway.model.families.transformers import Wrapping

log = logging.getLogger("headway")

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
SUFFIX = ".safetensors"
FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")
"""Types of weights, as safetensors and as torch call them."""
BYTES = {"U8", "uint8"}
MAX_MESSAGE = 1000
"""Characters of a message about a config.json: its values may be of any length."""
FILE_NAME = re.compile(r"[^/\x00-\x1f][^\x00-\x1f]{0,254}")


class StoredPiece(NamedTuple):
    """A file, and what of it belongs to a parameter."""

    file: str
    piece: HfPiece
    scales_file: str | None = None
    """Where the piece's scales are."""


Locations = dict[str, tuple[StoredPiece, ...]]
"""Our name -> where it is; several pieces are stacked, one for each expert."""


class WeightSurvey(NamedTuple):
    """What a folder's tensors are to a config."""

    matched: int
    """Parameters with their shape and a type that is read."""
    missing: tuple[str, ...]
    """Our names of parameters that no file has."""
    extra: tuple[str, ...]
    """Names of tensors that are no parameter."""
    wrong: tuple[str, ...]
    """One line for each tensor of another shape or type."""


def is_pretrained(folder: Path) -> bool:
    """Whether a folder looks like a Hugging Face model."""
    return (folder / CONFIG).is_file()


def has_weights(folder: Path) -> bool:
    """Whether a folder holds safetensors under Hugging Face's names."""
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def read_config(folder: Path, wrapping: Wrapping | None = None) -> ModelConfig:
    """The shape of the model in a Hugging Face folder.

    With `wrapping`, that of the class of transformers, of any model type.
    """
    path = folder / CONFIG
    hf_config = read_json(path)

    # A family reads the quantisation that it is published in, and 8-bit blocks and groups are read
    # for any family. For a class of transformers nothing is dequantised.
    readable = ()
    if wrapping is None:
        readable = _readable_quantisation(hf_config)
    reason = quantised(hf_config, folder, readable)
    is_read = False
    if reason is not None and wrapping is None:
        is_blocks = block_size(hf_config) is not None
        is_read = is_blocks or group_format(hf_config, folder) is not None
    if reason is not None and not is_read:
        raise ConfigError(f"{path}: {reason}")

    hf_config = {key: value for key, value in hf_config.items() if key != PACKING}
    try:
        whole = hf_config
        if has_other_parts(whole):
            hf_config = text_config(whole)
        if wrapping is None:
            config = with_head(hf_config, family_for(hf_config).read(hf_config))
        else:
            config = wrapping.read(hf_config, folder)
        if has_other_parts(whole):
            check_logits(whole, config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {_short('; '.join(str(error).splitlines()))}") from None

    # A class of transformers may store matrices as [in, out], which a square one does not show.
    if config.family == WRAPPED and reason is not None and packing(folder) is not None:
        raise ConfigError(f"{path}: {reason}")
    return config


def _readable_quantisation(hf_config: dict[str, Any]) -> tuple[str, ...]:
    """How the weights of this family may be quantised."""
    try:
        return vars(family_for(hf_config)).get("QUANTISED", ())
    except ConfigError:
        return ()


def read_end_ids(folder: Path) -> frozenset[int]:
    """The ids that end a text, if the folder names them; chat models have several."""
    for name in ("generation_config.json", CONFIG):
        if not (folder / name).is_file():
            continue
        ids = read_json(folder / name).get("eos_token_id")
        if ids is None:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(end_id, int) and not isinstance(end_id, bool) for end_id in listed):
            raise ConfigError(
                f"{folder / name}: eos_token_id is {str(ids)[:80]}; an id or a list of ids is expected."
            )
        return frozenset(listed)
    return frozenset()


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Compare names and shapes of all tensors with the config, from the headers of safetensors
    files; pickles are checked when read."""
    where = _locations(folder, config)
    if all(file.endswith(SUFFIX) for file in _weight_files(where)):
        with ExitStack() as opened:
            _check_shapes(folder, config, where, _open_all(folder, where, opened))


def survey_weights(folder: Path, config: ModelConfig) -> WeightSurvey:
    """Compare names, shapes and types of all tensors with the config; every difference is listed."""
    where, missing, extra = _matched(folder, config)
    known = {spec.name for spec in param_specs(config)} & where.keys()
    with ExitStack() as opened:
        wrong = tuple(_wrong_shapes(folder, config, where, _open_all(folder, where, opened)))
    return WeightSurvey(len(known) - len(wrong), tuple(missing), tuple(extra), wrong)


def read_weights(
    folder: Path, config: ModelConfig, digests: FolderDigests | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Our name and the tensor of every parameter, in forward order, read lazily; all shapes are
    checked before the first.

    With the folder's digests, the files are hashed meanwhile, and the last tensor comes only if
    they are as they were written.
    """
    where = _locations(folder, config)
    values = _read_all(folder, config, where)
    form = packing(folder)
    if form is not None:
        log.info(
            "%s: its weights are quantised (%s) and are dequantised while they are read; what is trained or written "
            "from them has 16 or 32 bits",
            folder,
            form.description,
        )
    # Files are read once: hashed while their tensors are taken.
    if digests is None:
        return values
    files = _weight_files(where) | _scale_files(where) | parts_files(_packed(folder))
    return digests.through(sorted(files), values)


def _weight_files(where: Locations) -> set[str]:
    return {stored.file for pieces in where.values() for stored in pieces}


def _scale_files(where: Locations) -> set[str]:
    files = {stored.scales_file for pieces in where.values() for stored in pieces}
    return {file for file in files if file is not None}


def _read_all(
    folder: Path, config: ModelConfig, where: Locations
) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    with ExitStack() as opened:
        files = _open_all(folder, where, opened)
        _check_shapes(folder, config, where, files)
        for spec in param_specs(config):
            value = _read(folder, files, spec.name, where[spec.name])
            # A folder may hold a tied head too. One that differs was trained by itself, and would be lost.
            if spec.tied_to in where:
                head = _read(folder, files, spec.tied_to, where[spec.tied_to])
                if not torch.equal(value, head):
                    hf_name = where[spec.name][0].piece.name
                    raise CheckpointError(
                        f"{folder}: {spec.tied_to} differs from {hf_name}, but {CONFIG} says tie_word_embeddings. Set it to false."
                    )
            yield spec.name, value


def _open_all(folder: Path, where: Locations, opened: ExitStack) -> dict[str, Any]:
    """All files with tensors, open; those of 8-bit blocks give floats."""
    block = _blocks(folder)
    scales = {}
    if block is not None:
        scales = without_scales(_tensors(folder))[1]
    packed = _packed(folder)
    names = _weight_files(where) | _scale_files(where) | set(scales.values()) | parts_files(packed)
    files = {name: _open(folder / name, opened) for name in sorted(names)}
    parts = other_parts(folder)
    if parts is not None:
        stored_names = _stored_names(folder, parts)
        files = {name: _renamed(file, stored_names) for name, file in files.items()}
    form = packing(folder)
    if form is not None:
        # Pickles hold no packed weight, but may hold other tensors.
        return {
            name: file
            if isinstance(file, _Pickled)
            else GroupFile(file, form, packed, files.__getitem__, folder)
            for name, file in files.items()
        }
    if block is None:
        return files

    # A tensor and its scales may lie in different files.
    def scale_of(name: str) -> torch.Tensor:
        return files[scales[name]].get_tensor(name + SCALE)

    return {
        name: file if isinstance(file, _Pickled) else BlockFile(file, block, scales, scale_of)
        for name, file in files.items()
    }


def _renamed(file: Any, names: Mapping[str, str]) -> Any:
    """A file whose tensors have other names."""
    if isinstance(file, _Pickled):
        return _Pickled({name: file.state[old] for name, old in names.items() if old in file.state})
    return _RenamedFile(file, names)


class _RenamedFile:
    """A safetensors file whose tensors have other names."""

    def __init__(self, file: Any, names: Mapping[str, str]) -> None:
        self._file = file
        self._names = names

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor by its new name."""
        return self._file.get_tensor(self._names[name])

    def get_slice(self, name: str) -> Any:
        """A part of a tensor by its new name."""
        return self._file.get_slice(self._names[name])


def _blocks(folder: Path) -> BlockSize | None:
    """The 8-bit blocks in which the weights of a folder are stored, if they are."""
    if (folder / CONFIG).is_file():
        return block_size(read_json(folder / CONFIG))
    return None


def packing(folder: Path) -> GroupFormat | None:
    """The groups of whole numbers in which the weights of a folder are stored, if they are."""
    if (folder / CONFIG).is_file():
        return group_format(read_json(folder / CONFIG), folder)
    return None


def _packed(folder: Path) -> Packed:
    """The packed weights of a folder and the files of their parts."""
    form = packing(folder)
    if form is None:
        return {}
    return with_weights(_tensors(folder), form, folder)[1]


def _open(path: Path, opened: ExitStack) -> Any:
    if not path.name.endswith(SUFFIX):
        return _Pickled(open_pickled(path))
    from safetensors import SafetensorError, safe_open

    try:
        return opened.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError, ValueError) as error:
        # Often a pointer of Git LFS in place of the file.
        other_format = pointer(path)
        if other_format is not None:
            raise CheckpointError(f"{path}: is {other_format}") from None
        raise CheckpointError(
            f"{path}: not a safetensors file: {first_line(error)}. Download it again."
        ) from None


def _check_shapes(
    folder: Path, config: ModelConfig, where: Locations, files: dict[str, Any]
) -> None:
    """Compare shape and type of every piece with the config; nothing is read but headers."""
    for problem in _wrong_shapes(folder, config, where, files):
        raise CheckpointError(problem)


def _wrong_shapes(
    folder: Path, config: ModelConfig, where: Locations, files: dict[str, Any]
) -> Iterator[str]:
    """One line for each piece whose shape or type is not that of the config."""
    for spec in param_specs(config):
        pieces = where.get(spec.name, ())
        # Of several pieces each is one expert.
        expected = spec.shape[1:] if len(pieces) > 1 else spec.shape
        for stored in pieces:
            file = stored.file
            piece = stored.piece
            if piece.join is not None:
                expected = piece.join.shapes[piece.name]
            whole, dtype = _shape_and_dtype(folder, files, file, piece.name)
            if stored.scales_file is not None and piece.scales is not None:
                scales, scale_dtype = _shape_and_dtype(
                    folder, files, stored.scales_file, piece.scales
                )
                dequantised = None
                if {dtype, scale_dtype} <= BYTES:
                    dequantised = mxfp4.shape_of(whole, scales)
                if dequantised is None:
                    yield (
                        f"{folder / file}: {piece.name} is {dtype} {list(whole)} and {piece.scales} {scale_dtype} {list(scales)}; mxfp4 has "
                        "bytes [..., blocks, 16] and one byte of scale for each block. Download the model again."
                    )
                    continue
                whole = dequantised
                dtype = "BF16"

            is_packed = isinstance(files[file], GroupFile) and piece.name in files[file].packed
            if is_packed and piece.transposed:
                yield (
                    f"{folder / file}: {piece.name} is packed, and {CONFIG} is of a family that stores its weights "
                    "as [in, out]; packed weights are read as [out, in]. Give the model they were made from."
                )
                continue

            # A message about a part names the whole tensor too, since that is what a file shows.
            shape = part_shape(whole, piece)
            if shape != expected:
                part = ""
                if piece.dim is not None:
                    part = f" of which {spec.name} is {list(shape)}"
                yield (
                    f"{folder / file}: {piece.name} has shape {list(whole)}{part}; {CONFIG} makes it {list(expected)}."
                )
            elif dtype not in FLOATS:
                yield (
                    f"{folder / file}: {piece.name} is of type {dtype}; headway reads weights of 16, 32 or 64 bits. "
                    "Give the model they were quantised from."
                )


def part_shape(whole: tuple[int, ...], piece: HfPiece) -> tuple[int, ...]:
    """The shape that a piece of their tensor has as our parameter."""
    part = list(whole)
    if piece.dim is not None and piece.dim < len(part):
        if piece.period and part[piece.dim] % piece.period:
            return tuple(whole)  # not what the config makes it
        part[piece.dim] = len(piece.rows(part[piece.dim]))
    if piece.transposed:
        return (*part[:-2], part[-1], part[-2])
    return tuple(part)


def _shape_and_dtype(
    folder: Path, files: dict[str, Any], file: str, name: str
) -> tuple[tuple[int, ...], str]:
    """Shape and type of a tensor without reading it."""
    from safetensors import SafetensorError

    try:
        # A pickle is in memory, or mapped, as soon as it is open.
        if isinstance(files[file], _Pickled):
            value = files[file].get_tensor(name)
            return tuple(value.shape), str(value.dtype).removeprefix("torch.")
        part = files[file].get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(
            f"{folder / file}: holds no {name}: {first_line(error)}. Download the model again."
        ) from None


def _read(
    folder: Path, files: dict[str, Any], name: str, pieces: tuple[StoredPiece, ...]
) -> torch.Tensor:
    """One of our parameters, of one piece or stacked or joined of several."""
    import torch

    join = pieces[0].piece.join
    if join is not None:
        values = {stored.piece.name: _read_piece(folder, files, stored) for stored in pieces}
        return join.from_hf(values)[name]
    if pieces[0].piece.scales is not None or pieces[0].piece.step > 1:
        return _read_expert_by_expert(folder, files, pieces[0])

    parts: list[torch.Tensor] = []
    for stored in pieces:
        part = _read_piece(folder, files, stored)
        if stored.piece.transposed:
            part = part.transpose(-1, -2).contiguous()
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts)


def _read_expert_by_expert(
    folder: Path, files: dict[str, Any], stored: StoredPiece
) -> torch.Tensor:
    """A part of stacked tensors that lie interleaved or in blocks: memory holds the part and one
    expert."""
    number = _shape_and_dtype(folder, files, stored.file, stored.piece.name)[0][0]
    first = _read_expert(folder, files, stored, 0)
    experts = first.new_empty(number, *first.shape)
    experts[0] = first
    for expert in range(1, number):
        experts[expert] = _read_expert(folder, files, stored, expert)
    return experts


def _read_expert(
    folder: Path, files: dict[str, Any], stored: StoredPiece, expert: int
) -> torch.Tensor:
    piece = stored.piece
    only_expert = HfPiece(piece.name, 0, expert, expert + 1)
    value = _read_piece(folder, files, StoredPiece(stored.file, only_expert))[0]
    if piece.scales is not None:
        assert stored.scales_file is not None
        only_scales = HfPiece(piece.scales, 0, expert, expert + 1)
        scales = _read_piece(folder, files, StoredPiece(stored.scales_file, only_scales))[0]
        value = mxfp4.dequantise(value, scales)

    if piece.dim is not None:
        # `dim` counts the dim of experts, which is gone here.
        before = (slice(None),) * (piece.dim - 1)
        value = value[(*before, slice(piece.start, piece.stop, piece.step))]
    if piece.transposed:
        return value.t()
    return value


def _read_piece(folder: Path, files: dict[str, Any], stored: StoredPiece) -> torch.Tensor:
    """What a piece names, as it is stored; only these bytes of a safetensors file are read."""
    from safetensors import SafetensorError

    file = stored.file
    name = stored.piece.name
    dim = stored.piece.dim
    start = stored.piece.start
    stop = stored.piece.stop
    try:
        if dim is None:
            return files[file].get_tensor(name)
        if stored.piece.period:
            value = files[file].get_tensor(name).unflatten(dim, (-1, stored.piece.period))
            return value.narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)
        if isinstance(files[file], _Pickled):
            return files[file].get_tensor(name).narrow(dim, start, stop - start)
        before = (slice(None),) * dim
        return files[file].get_slice(name)[(*before, slice(start, stop))]
    except (SafetensorError, KeyError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder / file}: {name} cannot be read: {first_line(error)}. Download the model again."
        ) from None


def _short(text: str) -> str:
    if len(text) <= MAX_MESSAGE:
        return text
    return text[:MAX_MESSAGE] + "..."


class _Pickled:
    """A state dict with the interface of a safetensors file."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = {plain_name(str(name)): value for name, value in state.items()}

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor of a plain kind; others cannot be copied into a parameter."""
        import torch

        value = self.state[name]
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise KeyError(f"{name} is not a plain tensor")
        if value.is_quantized or value.is_meta:
            raise KeyError(f"{name} is not a plain tensor")
        return value


def plain_name(name: str) -> str:
    """A name without the prefixes of torch's wrappers."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def _locations(folder: Path, config: ModelConfig) -> Locations:
    """Where every parameter is stored; missing and unknown ones are errors."""
    where, missing, extra = _matched(folder, config)
    if missing:
        raise CheckpointError(
            f"{folder}: {_some(missing)} not among the weights, but {CONFIG} requires it. Download the whole model again."
        )
    if extra:
        raise CheckpointError(
            f"{folder}: {_some(extra)} among the weights, but {CONFIG} defines no such parameter. Is it from another model family?"
        )
    return where


def _matched(folder: Path, config: ModelConfig) -> tuple[Locations, list[str], list[str]]:
    """Where every parameter is stored, the parameters that no file has, and tensors that are no
    parameter."""
    family = family_of(config.family)
    files = _tensors(folder)
    if _blocks(folder) is not None:
        files = without_scales(files)[0]
    form = packing(folder)
    packed: Packed = {}
    if form is not None:
        files, packed = with_weights(files, form, folder)

    # First the parameters that are a part of a tensor, or made of several: the family knows how.
    where: Locations = {}
    used = set[str]()
    for spec in param_specs(config):
        # With the names of the folder: some families are published in several forms.
        pieces = pieces_of(family, spec, config, files)
        names = [name for piece in pieces for name in piece.names]
        is_part = any(
            piece.dim is not None or piece.transposed or piece.join is not None for piece in pieces
        )
        if not (is_part or len(names) > 1) or not all(name in files for name in names):
            continue
        stored: list[StoredPiece] = []
        for piece in pieces:
            scales_file = None if piece.scales is None else files[piece.scales]
            stored.append(StoredPiece(files[piece.name], piece, scales_file))
        where[spec.name] = tuple(stored)
        used.update(names)

    # Then all other tensors, by name, so that one that belongs to no parameter is found.
    list_skipped = vars(family).get("left_out")
    skipped: Collection[str] = ()
    if list_skipped is not None:
        skipped = list_skipped(files, config)
    for hf_name, file in files.items():
        if hf_name in skipped:
            continue
        name = name_in_folder(family, hf_name, config)
        if name is not None and hf_name not in used:
            where[name] = (StoredPiece(file, HfPiece(hf_name)),)

    expected = {spec.name for spec in param_specs(config)}
    missing = sorted(expected - where.keys())
    # Some tools write a tied head as well.
    accepted = {spec.tied_to for spec in param_specs(config) if spec.tied_to is not None}
    extra = sorted(where.keys() - expected - accepted)
    if packed:
        zeros = [name for name in extra if _is_zero_bias(folder, where[name][0], packed)]
        for name in zeros:
            del where[name]
        extra = [name for name in extra if name not in zeros]
    return where, missing, extra


def _is_zero_bias(folder: Path, stored: StoredPiece, packed: Packed) -> bool:
    """Whether a tensor is the bias of zeros that tools write beside each packed weight."""
    name = stored.piece.name
    module, _, leaf = name.rpartition(".")
    if leaf != "bias" or f"{module}.weight" not in packed:
        return False
    with ExitStack() as opened:
        files = _open_all(folder, {name: (stored,)}, opened)
        return not bool(_read_piece(folder, files, stored).any())


def other_parts(folder: Path) -> OtherParts | None:
    """What a folder holds besides a text model; None: nothing."""
    if not (folder / CONFIG).is_file():
        return None
    hf_config = read_json(folder / CONFIG)
    if not has_other_parts(hf_config):
        return None
    form = group_format(hf_config, folder)
    if form is None:
        return find_other_parts(folder, hf_config, _stored(folder))

    # Names in the class are those of weights. What is written with the parts later is plain.
    hf_config = {key: value for key, value in hf_config.items() if key != PACKING}
    stored, packed = with_weights(_stored(folder), form, folder)
    parts = find_other_parts(folder, hf_config, stored)
    kept = next((name for name in parts.others if name in packed), None)
    if kept is not None:
        raise ConfigError(
            f"{folder}: {kept} is packed ({form.description}) and no part of the text model; headway keeps such parts as they "
            "are and reads packed weights of the text model alone. Give the model they were made from."
        )
    return parts


def _stored_names(folder: Path, parts: OtherParts) -> Mapping[str, str]:
    """Name of every tensor in a folder of the text model -> the name of the one that is stored."""
    form = packing(folder)
    if form is None:
        return parts.names
    return parts_names(parts.names, with_weights(_stored(folder), form, folder)[1])


def _tensors(folder: Path) -> dict[str, str]:
    """Name of every tensor of the model -> its file; those of a text part have the names that they
    have in a folder of their own."""
    stored = _stored(folder)
    parts = other_parts(folder)
    if parts is None:
        return stored
    return {name: stored[whole] for name, whole in _stored_names(folder, parts).items()}


def _stored(folder: Path) -> dict[str, str]:
    """Name of every tensor -> its file.

    Safetensors are preferred to pickles where a folder has both.
    """
    if (folder / INDEX).is_file():
        return _listed(folder, INDEX)
    if (folder / WEIGHTS).is_file():
        with ExitStack() as opened:
            return dict.fromkeys(_open(folder / WEIGHTS, opened).keys(), WEIGHTS)
    if (folder / PICKLED_INDEX).is_file():
        return _listed(folder, PICKLED_INDEX)

    pickled = folder / PICKLED
    if not pickled.is_file():
        pickled = zero2all_file(folder)
    if pickled is not None:
        file = str(pickled.relative_to(folder))
        return dict.fromkeys((plain_name(str(name)) for name in open_pickled(pickled)), file)

    other = named_format(folder)
    if other is not None:
        raise ConfigError(f"{folder}: has neither {WEIGHTS} nor {PICKLED}; {other}")
    raise ConfigError(
        f"{folder}: has neither {WEIGHTS} nor {INDEX} nor {PICKLED}. Give a folder that holds the weights."
    )


def _listed(folder: Path, index: str) -> dict[str, str]:
    """The weight_map of an index, whose files must lie in the folder."""
    listed = read_json(folder / index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{folder / index}: has no weight_map. Download the model again.")
    for file in listed.values():
        is_name = isinstance(file, str) and FILE_NAME.fullmatch(file)
        if not is_name or ".." in PurePosixPath(file).parts:
            raise CheckpointError(
                f"{folder / index}: names the file {str(file)[:80]!r}; it must be a file of the folder. Download it again."
            )
    # All at once, so that a download with several files missing is reported before anything is read.
    absent = sorted({file for file in listed.values() if not (folder / file).is_file()})
    if absent:
        raise CheckpointError(
            f"{folder / absent[0]}: no such file, but {index} lists it. Download the whole model again."
        )
    return dict(listed)


def _some(names: list[str]) -> str:
    """The subject and verb of a sentence about some names."""
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{names[0]} and {len(names) - 1} more are"


def read_json(path: Path, holds: str = "a Hugging Face model") -> dict[str, Any]:
    """The mapping in a JSON file of a folder that should hold `holds`."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give a folder that holds {holds}.")
    return read_object(path, ConfigError)
