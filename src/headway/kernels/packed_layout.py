"""How a quantised matrix lies in bytes: a form and a shape come in, sections and sizes go out.
Imports without torch.

One matrix is one row of bytes, so that engines store, shard, save and gather it like any other
parameter. Sections begin at multiples of 64:

    nf4    group scales, fp32 [G] | offset, fp32 [1] | block scales, 8 bits [S] | codes, 4 bits, two
           in a byte [ceil(N / 2)]
    int8   row scales, fp32 [outputs] | codes, 8 bits [N]

N elements in row-major order, S = ceil(N / 64) blocks, G = ceil(S / 256) groups of blocks. An
element of nf4 needs 4.127 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PackedForm = Literal["nf4", "int8"]
FORMS: tuple[PackedForm, ...] = get_args(PackedForm)
BLOCK = 64
GROUP = 256
"""Elements under one scale, and scales under one scale of scales, as in bitsandbytes."""
ALIGN = 64
"""Bytes: a section may be viewed in any type, and vector loads find it aligned."""
PREFIX = "weight_"


@dataclass(frozen=True)
class PackedLayout:
    """Where each section of a packed matrix begins and how many bytes it has."""

    form: PackedForm
    outputs: int
    inputs: int
    experts: int | None = None
    """Of a matrix that is stacked over experts: how many share `outputs`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter in floats: [outputs, inputs], or [experts, outputs,
        inputs]."""
        if self.experts is None:
            return self.outputs, self.inputs
        return self.experts, self.outputs // self.experts, self.inputs

    @property
    def elements(self) -> int:
        """Numbers in the matrix."""
        return self.outputs * self.inputs

    @property
    def blocks(self) -> int:
        """Blocks of nf4, each with a scale."""
        return -(-self.elements // BLOCK)

    @property
    def groups(self) -> int:
        """Groups of blocks of nf4, each with a scale of scales."""
        return -(-self.blocks // GROUP)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each section, without padding."""
        if self.form == "int8":
            return 4 * self.outputs, self.elements
        return 4 * self.groups, 4, self.blocks, -(-self.elements // 2)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each section begins, and the length of all."""
        offsets = [0]
        for size in self.sizes:
            # Aligned, so that a view of bytes as fp32 is allowed wherever a section begins.
            padded = -(-size // ALIGN) * ALIGN
            offsets.append(offsets[-1] + padded)
        return tuple(offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix, padding included."""
        return self.starts[-1]


def packed_name(name: str, form: PackedForm) -> str:
    """`...q_proj.weight` -> `...q_proj.weight_nf4`."""
    return name.removesuffix("weight") + PREFIX + form


def form_of(name: str) -> PackedForm | None:
    """The form of a packed parameter, by its name; None for any other parameter."""
    leaf = name.rpartition(".")[2]
    return next((form for form in FORMS if leaf == PREFIX + form), None)


def plain_name(name: str) -> str:
    """`...q_proj.weight_nf4` -> `...q_proj.weight`; other names stay."""
    form = form_of(name)
    if form is None:
        return name
    return name.removesuffix("_" + form)
