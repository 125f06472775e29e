"""Weights stored as whole numbers of 4 or 8 bits in groups, as AWQ and GPTQ publish them: the open
files of a folder come in, files that give the tensors in fp32 go out. One tensor is read at a time.

    weight[o, i] = scales[g(i), o] * (code[i, o] - zero[g(i), o])

A word is an int32 that holds n = 32 / bits codes, the first one in its lowest bits.

    AWQ, version gemm                        GPTQ
    X.qweight  int32 [in, out / 8]           int32 [in / n, out]: a word holds n inputs in order
    X.qzeros   int32 [groups, out / 8]       int32 [groups, out / n]: a word holds n outputs in order
    X.scales   float [groups, out]           float [groups, out]
    X.g_idx                                  int32 [in]: g(i); absent: i // group_size

Of every 8 outputs an AWQ word holds 0, 2, 4, 6, 1, 3, 5, 7, and g(i) = i // group_size.
GPTQ's first format stores zero - 1, modulo 2^bits, and gptq_v2 stores zero. A product of a 16-bit scale
and a code is exact in fp32, so the only rounding is that to the type of the model.

AWQ: Lin et al. 2023, https://arxiv.org/abs/2306.00978, the layout of AutoAWQ.
GPTQ: Frantar et al. 2022, https://arxiv.org/abs/2210.17323, the layout of AutoGPTQ and GPTQModel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from headway.errors import CheckpointError, ConfigError
from headway.runtime.json_file import read_object

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
OLDER_CONFIG = "quantize_config.json"
"""Where older GPTQ folders have their settings."""
PACKING = "quantization_config"
"""The key of config.json that describes it."""
SUFFIX = ".safetensors"
WEIGHT = ".weight"
CODES = "qweight"
ZEROS = "qzeros"
SCALES = "scales"
GROUP_OF = "g_idx"
WORD = 32
"""Bits of a word."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each place of an AWQ word holds."""
WORDS = ("I32",)
INDICES = ("I32", "I64")
FLOATS = ("F16", "BF16", "F32")
REMEDY = "Give the model they were made from."
AGAIN = "Download the model again."


class GroupFormat(NamedTuple):
    """How the weights of a folder are packed."""

    method: str
    """awq or gptq."""
    bits: int
    group_size: int
    """Inputs that share a scale; -1: all of them."""
    zero_offset: int = 0
    """What is added to a stored zero."""
    is_reordered: bool = False
    """Whether groups are made of inputs in another order, which g_idx must give."""

    @property
    def per_word(self) -> int:
        """Codes in a word."""
        return WORD // self.bits

    @property
    def description(self) -> str:
        """For messages."""
        groups = f"groups of {self.group_size}"
        if self.group_size == -1:
            groups = "one group"
        return f"{self.method.upper()}, {self.bits} bits, {groups}"

    def num_groups(self, inputs: int) -> int:
        """Groups of that many inputs; the last one may be smaller."""
        if self.group_size == -1:
            return 1
        return -(-inputs // self.group_size)


def group_format(config: Mapping[str, Any], folder: Path) -> GroupFormat | None:
    """The packing of a folder with this config.json; None if it is quantised otherwise, or not.

    Variants that are not read are refused.
    """
    settings = config.get(PACKING)
    where = f"{folder / CONFIG}: {PACKING}."
    if settings is None and (folder / OLDER_CONFIG).is_file():
        settings = {"quant_method": "gptq", **read_object(folder / OLDER_CONFIG, ConfigError)}
        where = f"{folder / OLDER_CONFIG}: "
    if not isinstance(settings, Mapping):
        return None

    method = settings.get("quant_method")
    if method == "awq":
        return _awq(settings, where)
    if method == "gptq":
        return _gptq(settings, where)
    return None


def _awq(settings: Mapping[str, Any], where: str) -> GroupFormat:
    for key in ("version", "format"):
        _require(settings, where, key, "gemm", default="gemm")
    _require(settings, where, "zero_point", True, default=True)
    if settings.get("backend") == "llm-awq":
        raise _unread(where, "backend", "llm-awq", "the packing of autoawq")
    bits = _require(settings, where, "bits", 4, default=4)
    return GroupFormat("awq", bits, _group_size(settings, where))


def _gptq(settings: Mapping[str, Any], where: str) -> GroupFormat:
    bits = _require(settings, where, "bits", 4, 8)
    _require(settings, where, "is_marlin_format", False, default=False)
    _require(settings, where, "pack_dtype", "int32", default="int32")
    # Other bits or groups for some modules.
    if settings.get("dynamic"):
        raise _unread(where, "dynamic", settings["dynamic"], "the same packing of all modules")

    formats = [
        _require(settings, where, key, "gptq", "gptq_v2", default="gptq")
        for key in ("checkpoint_format", "format")
        if settings.get(key) is not None
    ]
    if len(set(formats)) > 1:
        raise _unread(where, "format", formats[1], f"{formats[0]!r}, as checkpoint_format says")
    zero_offset = 1
    if formats and formats[0] == "gptq_v2":
        zero_offset = 0

    is_reordered = _require(settings, where, "desc_act", True, False, default=False)
    size = _group_size(settings, where)
    return GroupFormat("gptq", bits, size, zero_offset, is_reordered)


def _require(
    settings: Mapping[str, Any], where: str, key: str, *expected: Any, default: Any = None
) -> Any:
    """The value of a key, which must be one of the expected; names in any case."""
    value = settings.get(key)
    if value is None:
        value = default
    if isinstance(value, str):
        value = value.lower()
    # True equals 1, and is not meant where a number is.
    if any(value == choice and type(value) is type(choice) for choice in expected):
        return value
    wanted = " or ".join(json.dumps(choice) for choice in expected)
    raise _unread(where, key, settings.get(key), wanted)


def _group_size(settings: Mapping[str, Any], where: str) -> int:
    size = settings.get("group_size", 128)
    if isinstance(size, int) and not isinstance(size, bool) and (size == -1 or size > 0):
        return size
    raise _unread(where, "group_size", size, "a number of inputs, or -1")


def _unread(where: str, key: str, value: object, expected: str) -> ConfigError:
    shown = json.dumps(value, default=str)[:80]
    return ConfigError(f"{where}{key} is {shown}; headway reads weights with {expected}. {REMEDY}")


Packed = Mapping[str, Mapping[str, str]]
"""Name of a weight -> its parts (qweight, ...) -> the file of each."""


def with_weights(
    stored: Mapping[str, str], form: GroupFormat, folder: Path
) -> tuple[dict[str, str], Packed]:
    """Tensors and their files with weights in place of their parts; and the parts."""
    tensors = dict(stored)
    packed: dict[str, dict[str, str]] = {}
    for name in stored:
        module, _, part = name.rpartition(".")
        if part != CODES:
            continue
        parts: dict[str, str] = {}
        for kind in (CODES, ZEROS, SCALES, GROUP_OF):
            file = tensors.pop(f"{module}.{kind}", None)
            if file is not None:
                parts[kind] = file

        needed = [CODES, ZEROS, SCALES]
        if form.is_reordered:
            needed.append(GROUP_OF)
        for kind in needed:
            if kind not in parts:
                raise CheckpointError(
                    f"{folder}: {module}.{kind} is not among the weights, but {name} ({form.description}) requires it. "
                    "Download the whole model again."
                )
        if module + WEIGHT in stored:
            raise CheckpointError(
                f"{folder}: has both {name} and {module}{WEIGHT}; one of them is expected. {AGAIN}"
            )
        for file in parts.values():
            if not file.endswith(SUFFIX):
                raise ConfigError(
                    f"{folder / file}: holds {name}; weights in {form.method.upper()} are read from safetensors. {REMEDY}"
                )
        packed[module + WEIGHT] = parts
        tensors[module + WEIGHT] = parts[CODES]
    return tensors, packed


def parts_files(packed: Packed) -> set[str]:
    """All files that hold a part of a weight."""
    return {file for parts in packed.values() for file in parts.values()}


def parts_names(names: Mapping[str, str], packed: Packed) -> dict[str, str]:
    """New names of tensors -> old names, with the parts in place of packed weights."""
    renamed: dict[str, str] = {}
    for new, old in names.items():
        if old not in packed:
            renamed[new] = old
            continue
        for kind in packed[old]:
            renamed[f"{new.removesuffix(WEIGHT)}.{kind}"] = f"{old.removesuffix(WEIGHT)}.{kind}"
    return renamed


class PackedParts(NamedTuple):
    """The tensors of one weight."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_of: torch.Tensor | None


def dequantised(name: str, parts: PackedParts, form: GroupFormat) -> torch.Tensor:
    """fp32 [out, in] of a weight's parts, whose shapes fit each other."""
    import torch

    outputs = parts.scales.shape[1]
    inputs = parts.codes.shape[0]
    if form.method == "gptq":
        inputs *= form.per_word
    groups = _groups(name, parts, form, inputs)
    scales = parts.scales.float()
    zeros = _zeros(parts.zeros, form, outputs).float()

    result = torch.empty(outputs, inputs, dtype=torch.float32)
    # One place of all words at a time: codes of the whole matrix never exist beside it.
    for place in range(form.per_word):
        codes = _codes(parts.codes, place, form)
        if form.method == "gptq":
            rows = slice(place, None, form.per_word)
            of_rows = groups[rows]
            values = (codes - zeros[of_rows]) * scales[of_rows]
            result[:, rows] = values.t()
        else:
            columns = slice(AWQ_ORDER[place], None, form.per_word)
            values = (codes - zeros[groups, columns]) * scales[groups, columns]
            result[columns] = values.t()
    return result


def _codes(words: torch.Tensor, place: int, form: GroupFormat) -> torch.Tensor:
    """The code at a place of every word, of the same shape."""
    # The shift copies the sign, which the mask removes.
    return (words >> (form.bits * place)) & ((1 << form.bits) - 1)


def _zeros(words: torch.Tensor, form: GroupFormat, outputs: int) -> torch.Tensor:
    """int32 [groups, out]."""
    zeros = words.new_empty(words.shape[0], outputs)
    for place in range(form.per_word):
        column = place
        if form.method == "awq":
            column = AWQ_ORDER[place]
        zeros[:, column :: form.per_word] = _codes(words, place, form)
    return (zeros + form.zero_offset) & ((1 << form.bits) - 1)


def _groups(name: str, parts: PackedParts, form: GroupFormat, inputs: int) -> torch.Tensor:
    """The group of every input, int64 [in]."""
    import torch

    number = parts.scales.shape[0]
    if parts.group_of is None:
        size = inputs if form.group_size == -1 else form.group_size
        return torch.arange(inputs) // size
    groups = parts.group_of.long()
    if groups.min() < 0 or groups.max() >= number:
        raise CheckpointError(
            f"{name.removesuffix(WEIGHT)}.{GROUP_OF} names the groups {int(groups.min())} to {int(groups.max())}; "
            f"0 to {number - 1} are expected. {AGAIN}"
        )
    return groups


class GroupFile:
    """An open safetensors file whose packed weights are read in fp32."""

    def __init__(
        self,
        file: Any,
        form: GroupFormat,
        packed: Packed,
        file_of: Callable[[str], Any],
        folder: Path,
    ) -> None:
        """`file_of`: an open file, by its name; the parts of a weight may lie in several."""
        self.file = file
        self.form = form
        self.packed = packed
        self.file_of = file_of
        self.folder = folder

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        if name not in self.packed:
            return self.file.get_tensor(name)
        self.shape_of(name)
        module = name.removesuffix(WEIGHT)
        parts = {
            kind: self.file_of(file).get_tensor(f"{module}.{kind}")
            for kind, file in self.packed[name].items()
        }
        tensors = PackedParts(parts[CODES], parts[ZEROS], parts[SCALES], parts.get(GROUP_OF))
        try:
            return dequantised(name, tensors, self.form)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {error}") from None

    def get_slice(self, name: str) -> Any:
        """One tensor, of which shape, type or a part is read."""
        if name not in self.packed:
            return self.file.get_slice(name)
        return GroupSlice(self, name)

    def shape_of(self, name: str) -> list[int]:
        """[out, in] of a packed weight, from headers: the shapes and types of its parts must fit
        each other."""
        form = self.form
        module = name.removesuffix(WEIGHT)
        shapes: dict[str, list[int]] = {}
        types: dict[str, str] = {}
        for kind, file in self.packed[name].items():
            part = self.file_of(file).get_slice(f"{module}.{kind}")
            shapes[kind] = list(part.get_shape())
            types[kind] = part.get_dtype()

        if len(shapes[CODES]) != 2:
            self._refuse(module, CODES, types, shapes, "int32 of two dimensions")
        rows, columns = shapes[CODES]
        if form.method == "gptq":
            inputs = rows * form.per_word
            outputs = columns
        else:
            inputs = rows
            outputs = columns * form.per_word
        groups = form.num_groups(inputs)
        expected: dict[str, tuple[tuple[str, ...], list[int]]] = {
            CODES: (WORDS, [rows, columns]),
            ZEROS: (WORDS, [groups, outputs // form.per_word]),
            SCALES: (FLOATS, [groups, outputs]),
            GROUP_OF: (INDICES, [inputs]),
        }
        for kind, shape in shapes.items():
            kinds, wanted = expected[kind]
            if types[kind] not in kinds or shape != wanted:
                self._refuse(module, kind, types, shapes, f"{kinds[0]} {wanted}")
        return [outputs, inputs]

    def _refuse(
        self,
        module: str,
        kind: str,
        types: Mapping[str, str],
        shapes: Mapping[str, list[int]],
        wanted: str,
    ) -> NoReturn:
        raise CheckpointError(
            f"{self.folder}: {module}.{kind} is {types[kind]} {shapes[kind]} and {module}.{CODES} {types[CODES]} {shapes[CODES]}; "
            f"{self.form.description} make it {wanted}. {AGAIN}"
        )


class GroupSlice:
    """The interface of a safetensors slice."""

    def __init__(self, file: GroupFile, name: str) -> None:
        self.file = file
        self.name = name

    def get_shape(self) -> list[int]:
        """Shape of the whole weight."""
        return self.file.shape_of(self.name)

    def get_dtype(self) -> str:
        """Type in which it is read."""
        return "F32"

    def __getitem__(self, part: Any) -> torch.Tensor:
        # A part of the outputs cuts through words, so the whole weight is read.
        return self.file.get_tensor(self.name)[part]
