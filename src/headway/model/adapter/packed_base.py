"""Streams of (name, tensor) in which some matrices are quantised: floats become bytes when a model
is loaded, and floats again on export.

    read    model.layers.0.mlp.up_proj.weight      [O,I] floats
    engine  model.layers.0.mlp.up_proj.weight_nf4  [bytes]        saved, sharded and resumed as they
                                                                  are: nothing is rounded twice
    export  model.layers.0.mlp.up_proj.weight      [O,I] fp32, merged with its update

One matrix at a time: what was read is freed before the next is read, so a model is never in memory
in floats as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from headway.kernels.packed_layout import PackedLayout, form_of, packed_name, plain_name
from headway.kernels.packed_weight import pack, unpack

Values = Iterable[tuple[str, Tensor]]


def packed_values(
    values: Values, layouts: Mapping[str, PackedLayout], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Matrices as bytes, quantised on a device; what comes as bytes, and everything else, is
    unchanged."""
    for name, value in values:
        layout = layouts.get(name)
        if layout is None:
            yield name, value
            continue
        # Experts that a folder joins come as a part of a larger tensor, whose rows lie apart.
        matrix = value.to(device).reshape(layout.outputs, layout.inputs)
        yield packed_name(name, layout.form), pack(matrix, layout.form)


def plain_values(
    values: Values, layouts: Mapping[str, PackedLayout]
) -> Iterator[tuple[str, Tensor]]:
    """Matrices in fp32 under their plain names; everything else is unchanged."""
    for name, value in values:
        if form_of(name) is None:
            yield name, value
            continue
        plain = plain_name(name)
        layout = layouts[plain]
        yield plain, unpack(value, layout, torch.float32).view(layout.shape)
