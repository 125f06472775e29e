"""Streams of (name, tensor) in which some matrices are quantised: floats become bytes when a model is loaded, and floats again on export.

    read    model.layers.0.mlp.up_proj.weight      [O,I] floats
    engine  model.layers.0.mlp.up_proj.weight_nf4  [bytes]        saved, sharded and resumed as they are: nothing is rounded twice
    export  model.layers.0.mlp.up_proj.weight      [O,I] fp32, merged with its update

One matrix at a time: what was read is let go before the next is read, so a model never lies in memory in floats.
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
    """Matrices as bytes, quantised on a device; what comes as bytes, and everything else, is unchanged."""
    for name, value in values:
        layout = layouts.get(name)
        if layout is None:
            yield name, value
        else:
            yield (
                packed_name(name, layout.form),
                pack(value.to(device).view(layout.outputs, layout.inputs), layout.form),
            )


def plain_values(
    values: Values, layouts: Mapping[str, PackedLayout]
) -> Iterator[tuple[str, Tensor]]:
    """Matrices in fp32 under their plain names; everything else is unchanged."""
    for name, value in values:
        if form_of(name) is None:
            yield name, value
        else:
            yield (
                plain_name(name),
                unpack(value, layouts[plain_name(name)], torch.float32).view(
                    layouts[plain_name(name)].shape
                ),
            )
